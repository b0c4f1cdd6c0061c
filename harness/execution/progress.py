"""How long a run still takes, from what its finished processes took."""

from collections.abc import Iterable

from harness.records import Measurement


class TimeLeft:
    """Estimates the remaining wall time of a run.

    A case that has been measured before is expected to take as long again; one that has not
    is expected to take the mean of all that have. A case that ended other than ok runs no
    more processes, so it leaves the plan.
    """

    def __init__(self, planned: Iterable[tuple[str, int]]) -> None:
        self._planned = set(planned)
        self._wall_s: dict[str, float] = {}

    def finished(self, measurement: Measurement) -> None:
        """Take one process off the plan."""
        self._wall_s[measurement.case_id] = measurement.wall_s
        self._planned.discard((measurement.case_id, measurement.process))
        if not measurement.samples_s:
            self._planned = {p for p in self._planned if p[0] != measurement.case_id}

    @property
    def processes(self) -> int:
        """Processes still to run."""
        return len(self._planned)

    def seconds(self) -> float | None:
        """Expected wall time of the rest; None before anything has finished."""
        if not self._wall_s:
            return None
        mean_s = sum(self._wall_s.values()) / len(self._wall_s)
        return sum(self._wall_s.get(case_id, mean_s) for case_id, _ in self._planned)
