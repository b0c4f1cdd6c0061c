"""What a culprit changed: names that came and went, and its share of the whole difference."""

from dataclasses import replace
from typing import Any

import pytest

from harness.bisect.culprit import CallsChange, ProfileChange, profile_change
from harness.records import MAX_USES, Counters, Measurement, Profile, Use
from harness.tests.fake_runs import case, timed


def ran(*kernels: tuple[str, float, float], **counts: Any) -> Measurement:
    """A process with these kernels (name, calls, time) and counts."""
    uses = tuple(Use(name=name, calls=calls, time_s=time_s) for name, calls, time_s in kernels)
    measured = timed(case({}), 0.01, processes=1)[0]
    return replace(measured, profile=Profile(kernels=uses), counters=Counters(**counts))


def test_names_that_came_went_or_ran_more_often_are_listed_by_their_time() -> None:
    before = ran(("same", 2, 9.0), ("gone", 1, 2.0), ("more", 1, 1.0), host_syncs=1, allocations=4)
    after = ran(("same", 2, 8.0), ("new", 3, 5.0), ("more", 2, 2.0), host_syncs=3, allocations=4)

    found = profile_change(before, after)

    assert [(c.kind, c.name, c.before, c.after) for c in found.calls] == [
        ("counter", "host_syncs", 1, 3),
        ("kernel", "new", 0, 3),
        ("kernel", "gone", 1, 0),
        ("kernel", "more", 1, 2),
    ]


def test_a_name_may_be_among_those_that_a_full_record_left_out() -> None:
    full = [(f"k{n}", 1, 1.0) for n in range(MAX_USES)]

    found = profile_change(ran(*full), ran(*full[1:], ("long", 1, 2.0)))
    unsure = profile_change(ran(*full), ran(*full[1:], ("short", 1, 0.5)))

    assert [(c.name, c.after) for c in found.calls] == [("long", 1)]
    assert unsure.calls == (CallsChange(kind="kernel", name="k0", before=1, after=0),)


def test_an_operator_that_a_full_record_left_out_is_not_called_gone() -> None:
    """The host took 60 times as long for it in one process as in the other."""

    def operators(*slow: tuple[str, str, float]) -> Measurement:
        uses = [Use(name=f"o{n}", calls=1, time_s=1.0) for n in range(MAX_USES - len(slow))]
        uses += [Use(name=n, where=where, calls=c, time_s=60.0) for n, where, c in slow]
        return replace(ran(), profile=Profile(operators=tuple(uses)))

    before = operators(("empty", "forward", 15), ("empty", "backward", 18), ("clone", "", 1))
    found = profile_change(before, operators(("empty", "forward", 15), ("clone", "", 2)))

    assert [(c.name, c.before, c.after) for c in found.calls] == [("clone", 1, 2)]


@pytest.mark.parametrize("profile", [None, Profile(skipped="no GPU")])
def test_without_a_profile_the_counters_are_left(profile: Profile | None) -> None:
    before = ran(host_syncs=0)

    found = profile_change(before, replace(ran(("k", 1, 1.0), host_syncs=2), profile=profile))

    assert [c.after for c in found.calls] == [2]
    assert found.unknown
    differing = replace(before, counters=Counters(host_syncs=5, series={"host_syncs": (5, 6)}))
    assert profile_change(before, differing) == ProfileChange()
