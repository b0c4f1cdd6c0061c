"""Ranks that others wait for, planted in records, are named as the cause; alike ones are not."""

from dataclasses import replace

import pytest

from harness.analysis.causes import CauseKind
from harness.records import Case, Measurement, Rank
from harness.tests.test_planted_causes import Damage, channel, kinds, planted


def ranks_draw(*watts: float) -> Damage:
    """Under DDP all ranks take as long as the slowest, and NCCL keeps a GPU that waits busy."""

    def damage(c: Case, m: Measurement) -> Measurement:
        all_wait = Rank(rank=0, step_s=m.kept_s[0], gpu_utilisation=1.0)
        drawn = enumerate(w + 20 * m.process for w in watts)
        return replace(m, ranks=tuple(replace(all_wait, rank=i, gpu_power_w=w) for i, w in drawn))

    return damage


def jitter(c: Case, m: Measurement) -> Measurement:
    times = ((8.7, 6.6), (7.5, 7.4), (7.5, 7.4))[m.process % 3]
    return replace(m, ranks=tuple(Rank(rank=i, step_s=s / 1e3) for i, s in enumerate(times)))


def a_rank_rests(c: Case, m: Measurement) -> Measurement:
    used = (Rank(rank=0, gpu_utilisation=1.0), Rank(rank=1, gpu_utilisation=0.3))
    return replace(m, ranks=used)


@pytest.mark.parametrize(
    ("damage", "uneven"),
    [
        (ranks_draw(600, 300), True),
        (ranks_draw(600, 520), False),  # another card
        (lambda c, m: ranks_draw(600, 100 if m.process == 0 else 600)(c, m), False),  # once
        (jitter, False),
        (a_rank_rests, True),
    ],
)
def test_uneven_ranks_are_the_only_cause_named(damage: Damage, uneven: bool) -> None:
    assert kinds(planted(damage)) == [CauseKind.RANKS] * uneven


def test_another_process_on_the_gpu_of_any_rank_is_a_cause() -> None:
    def occupied(c: Case, m: Measurement) -> Measurement:
        used = channel(m, "gpu1_foreign_processes", lambda _: 1.0)
        return replace(used, ranks=(Rank(rank=0), Rank(rank=1)))

    assert kinds(planted(occupied)) == [CauseKind.SHARED]
