"""pytest plugin: the cases of a suite as benchmarks, `pytest suites/smoke.yaml`.

Each case is a test of its name. The harness measures it as `harness run` does, and hands the step
times to the `benchmark` fixture, so that --benchmark-json, --benchmark-save and
--benchmark-compare work. Collecting imports neither torch nor the workloads.
"""

import re
import warnings
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

# Every pytest session in an environment with the harness loads this module, so other modules are
# imported only when they are needed.
if TYPE_CHECKING:
    from harness.analysis.study import Study
    from harness.records import Case, CaseSummary, Measurement, Run

_VERDICTS = pytest.StashKey["list[tuple[bool, str]]"]()  # whether it is good, and its text
_LOOKS_LIKE_A_SUITE = re.compile(rb"""^\s*\{?\s*["']?(schema|workloads)["']?\s*:""", re.MULTILINE)


class CaseFailure(Exception):
    """A case did not end ok; the text says how."""


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> "SuiteFile | None":
    """A suite file that the command line names."""
    if file_path.suffix not in (".yaml", ".yml") or not parent.session.isinitpath(file_path):
        return None
    if not _LOOKS_LIKE_A_SUITE.search(file_path.read_bytes()):  # of another plugin
        return None
    return SuiteFile.from_parent(parent, path=file_path)


class SuiteFile(pytest.File):
    """A suite; an invalid one is an error of collection, with its line."""

    def collect(self) -> Iterable[pytest.Item]:
        from harness.errors import SuiteError
        from harness.suite import load as suites

        if not self.config.pluginmanager.hasplugin("pytest-benchmark"):
            raise self.CollectError(
                f"{self.path.name} needs pytest-benchmark, which is not loaded: "
                "pip install pytest-benchmark, and remove -p no:benchmark"
            )
        if hasattr(self.config, "workerinput"):
            raise self.CollectError(
                f"{self.path.name}: workers of pytest-xdist would disturb each other: remove -n"
            )
        here = Path.cwd()
        path = self.path.relative_to(here) if self.path.is_relative_to(here) else self.path
        try:
            self.suite = suites.load(path)
        except SuiteError as error:
            raise self.CollectError(str(error)) from None
        for case in self.suite.cases:
            yield SuiteCase.from_parent(self, name=case.case_id, case=case)

    def setup(self) -> None:
        """Reserve the machine, and create a run of the selected cases."""
        from harness.errors import HarnessError
        from harness.report.markdown import plain
        from harness.runner.rig import take
        from harness.runner.watchdog import RunObserver
        from harness.store.reader import DEFAULT_ROOT
        from harness.store.writer import create

        items = (i for i in self.session.items if isinstance(i, SuiteCase) and i.parent is self)
        selected = replace(self.suite, cases=tuple(item.case for item in items))
        try:
            with ExitStack() as held:
                self._rig, here = take(
                    held,
                    selected,
                    command=("pytest", *self.config.invocation_params.args),
                    wait_s=0.0,
                    say=warnings.warn,
                )
                self._rig.launcher.preflight(selected)
                self._rig.observe(here)
                store = self.config.rootpath / DEFAULT_ROOT
                self._writer = held.enter_context(create(store, selected, here))
                self._rig.measures(self._writer.run_id)
                self._begun, self._measured = self._recorded(), list["Measurement"]()
                self._rig.observer = RunObserver()
                setattr(self._rig.observer, "finished", self._measured.append)  # noqa: B010  mypy
                self._held = held.pop_all()
            self.addfinalizer(self._finish)  # pytest would tear down a failed set-up, too
        except HarnessError as error:
            pytest.fail(plain(str(error)), pytrace=False)

    def measure(self, case: "Case") -> "Run":
        """Run all processes of a case; the run with this case alone."""
        from harness.runner.run import Agenda, run_suite

        alone = replace(self.suite, cases=(case,))
        self._measured.clear()
        run_suite(Agenda(alone), self._rig, self._writer)
        return replace(self._begun, suite=alone, measurements=tuple(self._measured))

    def _finish(self) -> None:
        """Finish the run, release the machine, and judge the run by the rules of its suite."""
        from harness.analysis.study import Study
        from harness.records import Decision
        from harness.report.answer import excused
        from harness.report.markdown import plain
        from harness.report.text import rest_command
        from harness.report.verdict_text import verdict_sentence
        from harness.runner.run import Agenda

        with self._held:
            run = self._recorded()
            left = Agenda(run.suite, recorded=run.measurements).left
            if not left:
                self._writer.finish()
        good, cases, whole = True, len(run.suite.cases), len(self.suite.cases)
        if left:
            said = f"{left} processes were not run; to resume: {rest_command(None, run.folder)}"
        elif cases < whole:
            said = f"no verdict on the suite: {cases} of {whole} cases were selected"
        else:
            verdict = excused(Study(run))
            good = verdict.decision is Decision.GO
            said = f"verdict: {verdict.said}: {plain(verdict_sentence(verdict))}"
        lines = f"{run.suite.path}: {said}\nrun: {run.folder}"
        self.config.stash.setdefault(_VERDICTS, []).append((good, lines))

    def _recorded(self) -> "Run":
        from harness.store import reader

        folder = self._writer.folder.resolve()
        return reader.load(folder.parent, folder)


def _measured(request: pytest.FixtureRequest, benchmark: Any) -> None:
    """The body of the test of every case."""
    request.node.measure(benchmark)


class SuiteCase(pytest.Function):
    """One case. Its times are those of all its processes."""

    def __init__(self, *, case: "Case", **kwargs: Any) -> None:
        super().__init__(callobj=_measured, **kwargs)
        self.case, self._readings = case, deque[float]()
        # -k does not accept "=": `-k "seq_len:512 and nsa"` selects by the value of an axis.
        self.extra_keyword_matches.update(f"{name}:{value}" for name, value in case.axes.items())
        self.add_marker(pytest.mark.benchmark(timer=self.harness_clock, group=case.workload))

    def harness_clock(self) -> float:
        """The timer of this benchmark: 0 at the start of a round, its step time at the end."""
        return self._readings.popleft()

    def measure(self, benchmark: Any) -> None:
        """Measure the case and hand its step times to pytest-benchmark, one a round."""
        from harness.analysis.study import Study
        from harness.records import Outcome

        assert isinstance(self.parent, SuiteFile)
        of = Study(self.parent.measure(self.case))
        run, (seen,) = of.run, of.summaries
        samples = [sample for m in run.measurements for sample in m.samples_s]
        self._readings.extend(reading for sample in samples for reading in (0.0, sample))
        benchmark.params = dict(self.case.axes)
        benchmark.extra_info.update(
            run=run.run_id,
            provider=self.case.provider,
            processes=len(run.measurements),
            metrics={name: estimate.value for name, estimate in seen.metrics.items()},
        )
        if seen.outcome is Outcome.OK:
            benchmark.pedantic(lambda: None, rounds=len(samples))
            return

        def fail() -> None:
            raise CaseFailure("\n".join(_failure_lines(of, seen)))

        self._readings.append(0.0)
        try:
            benchmark.pedantic(fail)
        except CaseFailure:
            if seen.outcome and seen.outcome in self.case.allow:
                pytest.xfail(f"{seen.outcome} is allowed: {self.case.allow[seen.outcome]}")
            raise

    def repr_failure(  # type: ignore[override]  # as that of pytest.Function
        self, excinfo: pytest.ExceptionInfo[BaseException]
    ) -> Any:
        from harness.errors import HarnessError
        from harness.report.markdown import plain

        if isinstance(excinfo.value, CaseFailure | HarnessError):
            return plain(str(excinfo.value))
        return super().repr_failure(excinfo)

    def reportinfo(self) -> tuple[Path, None, str]:
        return self.path, None, self.name


def _failure_lines(of: "Study", seen: "CaseSummary") -> Iterator[str]:
    """How a case ended, as in the failures of a report."""
    from harness import units
    from harness.report.endings import failures

    yield f"{seen.case.case_id}: {units.outcome_name(seen.outcome)}"
    yield seen.detail.rstrip()
    for failure in failures(of):
        yield from failure.facts
        yield from filter(None, (failure.log, failure.command))
    yield f"run: {of.run.folder}"


def pytest_sessionfinish(session: pytest.Session) -> None:
    verdicts = session.config.stash.get(_VERDICTS, [])
    if session.exitstatus == pytest.ExitCode.OK and not all(good for good, _ in verdicts):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for good, lines in terminalreporter.config.stash.get(_VERDICTS, []):
        terminalreporter.section("harness", green=good, red=not good)
        terminalreporter.write_line(lines)
