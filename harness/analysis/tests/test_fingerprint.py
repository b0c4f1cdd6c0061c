"""What was seen that day against candidates: planted agreement, and each way to disagree."""

from dataclasses import replace

import pytest

from harness.analysis.summary import summarise
from harness.analysis.suspects import Candidate, fingerprint
from harness.records import Case, Gap, Measurement, Observation, Suspect, Suspects
from harness.report import explained
from harness.tests.fake_runs import case, run, sweep, timed, to

OVER_T = Observation(metric="tokens_per_s", seen=1.0, at=to(seq_len=2048), over=to(seq_len=512))
SPEED = Observation(metric="tokens_per_s", seen=51.0)
BUSY = Observation(metric="gpu_utilisation", seen=0.29)
OFF = Suspect(name="off", then="off", without=to(loop=0), with_=to(loop=1))
LOOP, BATCH = (replace(OFF, name=n, then="on", with_=to(loop=i)) for n, i in (("loop", 1), ("", 0)))
CASES = [*sweep(seq_len=[512, 2048], loop=[0, 1]), case({"other": 1})]


def candidates(*observed: Observation, seen: float = 11.0) -> tuple[tuple[Candidate, ...], str]:
    """A loop makes 25.6 tokens/s at any length, 20 % busy; a batch takes 0.1 s, 90 % busy."""

    def measure(c: Case) -> list[Measurement]:
        tokens, loop = int(c.axes.get("seq_len", 1)), c.axes.get("loop")
        telemetry = {"gpu_utilisation": 0.2 if loop else 0.9}
        return timed(
            c, tokens / 25.6 if loop else 0.1, tokens=tokens, cv=0.001, telemetry=telemetry
        )

    made = run(CASES, measure)
    gap = Gap(metric="tokens_per_s", expected=500, seen=seen, where=to(seq_len=512), source="s")
    suspects = Suspects(gap=gap, tested=(OFF, BATCH, LOOP), observed=observed)
    made = replace(made, suite=replace(made.suite, suspects=suspects))
    found = fingerprint(made, summarise(made))
    assert found is not None
    return found.candidates, explained.fingerprint_sentence(found, made.suite)


def test_only_what_does_as_was_seen_agrees() -> None:
    (loop, batch), said = candidates(OVER_T, BUSY)

    assert (loop.suspects, loop.agrees) == (("loop",), (True, True, True))
    assert (batch.against, batch.agrees) == (3, (False, False, False))
    assert said == "Only loop agrees with all that was measured there, 3 of 3 observations."
    assert candidates(BUSY, seen=52.0)[1].endswith("; none makes 52 tokens/s.")


@pytest.mark.parametrize(
    ("observed", "agrees"),
    [
        (replace(BUSY, seen=0.79), True),  # a slower GPU is busy for longer
        (replace(BUSY, seen=0.81), False),
        (replace(BUSY, seen=0.09), False),
        (replace(SPEED, seen=6.3), False),
        (replace(SPEED, seen=6.5), True),  # a slower GPU makes fewer tokens/s
        (replace(SPEED, seen=52.0), False),
        (replace(OVER_T, seen=1.6), False),
        (replace(OVER_T, at=to(seq_len=4096)), None),  # not measured
        (replace(BUSY, metric="gpu_memory_bytes"), None),
    ],
)
def test_a_number_far_from_what_was_seen_disagrees(
    observed: Observation, agrees: bool | None
) -> None:
    loop = next(c for c in candidates(observed)[0] if c.suspects == ("loop",))

    assert (loop.here[1] is None) == (agrees is None)
    assert loop.agrees[1] is bool(agrees)
