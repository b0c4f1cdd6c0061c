"""pytest plugin: the cases of a suite file as tests, `pytest suites/smoke.yaml`.

Suite files are collected if the command line names them or they match the ini option
`harness_suites`. Each case is a test of its name, so -k, --collect-only, JUnit and pytest-xdist
work. Collecting imports neither torch nor the workloads. Cases are measured and stored as by
`harness run`: see harness.integrations.pytest_session.
"""

import re
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

# Every pytest session in an environment with the harness loads this module, so other modules are
# imported only when they are needed.
if TYPE_CHECKING:
    from harness.integrations.pytest_session import Session, SuiteResult
    from harness.records import Case, Suite

INI = "harness_suites"
_SUFFIXES = (".yaml", ".yml")
_LOOKS_LIKE_A_SUITE = re.compile(rb"""^\s*\{?\s*["']?(schema|workloads)["']?\s*:""", re.MULTILINE)
_HEAD_BYTES = 2**16
_KEY: "pytest.StashKey[Session]" = pytest.StashKey()
_SHARED = pytest.StashKey[Path]()
_ENDS: "pytest.StashKey[tuple[SuiteResult, ...]]" = pytest.StashKey()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("harness", "suite files as tests")
    group.addoption(
        "--harness-store",
        default="reports/runs",
        metavar="DIR",
        help="Folder of the recorded runs (default: reports/runs).",
    )
    group.addoption(
        "--harness-wait-for-gpu",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="Wait up to SECONDS for a busy GPU (default: 0).",
    )
    parser.addini(
        INI,
        "Patterns of suite files to collect, relative to the root folder; for example "
        "suites/*.yaml.",
        type="args",
        default=[],
    )


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> "SuiteFile | None":
    if file_path.suffix not in _SUFFIXES:
        return None
    root, patterns = parent.config.rootpath, parent.config.getini(INI)
    wanted = any(file_path in root.glob(pattern) for pattern in patterns)
    if not wanted and not (parent.session.isinitpath(file_path) and _is_suite(file_path)):
        return None
    return SuiteFile.from_parent(parent, path=file_path)


def _is_suite(path: Path) -> bool:
    """Whether a file has the keys of a suite, valid or not."""
    with path.open("rb") as file:
        return _LOOKS_LIKE_A_SUITE.search(file.read(_HEAD_BYTES)) is not None


class SuiteFile(pytest.File):
    """A suite; an invalid one is an error of collection, with its line."""

    def collect(self) -> Iterable[pytest.Item]:
        from harness.errors import SuiteError
        from harness.suite import load as suites

        here = Path.cwd()
        path = self.path.relative_to(here) if self.path.is_relative_to(here) else self.path
        try:
            suite = suites.load(path)
        except SuiteError as error:
            raise self.CollectError(str(error)) from None
        lines = suites.workload_lines(suite)
        for case in suite.cases:
            yield SuiteCase.from_parent(
                self, name=case.case_id, suite=suite, case=case, line=lines[case.workload]
            )


class SuiteCase(pytest.Item):
    """One case, measured by its processes and judged by the rules of the suite for single cases."""

    def __init__(self, *, suite: "Suite", case: "Case", line: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.suite = suite
        self.case = case
        self._line = line
        # -k does not accept "=": `-k "seq_len:512 and nsa"` selects by the value of an axis.
        self.extra_keyword_matches.update(f"{name}:{value}" for name, value in case.axes.items())

    def runtest(self) -> None:
        from harness.errors import HarnessError
        from harness.report.markdown import plain

        selected = [
            item.case
            for item in self.session.items
            if isinstance(item, SuiteCase) and item.path == self.path
        ]
        try:
            judged = _measuring(self.config).measure(self.suite, self.case, selected)
        except HarnessError as error:
            pytest.fail(plain(str(error)), pytrace=False)
        self.user_properties += judged.properties
        if judged.expected:
            pytest.xfail(judged.expected)
        if judged.failure:
            pytest.fail(judged.failure, pytrace=False)

    def reportinfo(self) -> tuple[Path, int, str]:
        return self.path, self._line - 1, self.name


def _measuring(config: pytest.Config) -> "Session":
    """The session of this process, created for its first case."""
    from harness.integrations.pytest_session import Session

    if _KEY not in config.stash:
        config.stash[_KEY] = Session(
            store=config.rootpath / config.getoption("--harness-store"),
            shared=_shared(config),
            wait_for_gpu_s=config.getoption("--harness-wait-for-gpu"),
            command=("pytest", *config.invocation_params.args),
        )
    return config.stash[_KEY]


def _shared(config: pytest.Config) -> Path:
    """A folder that only the processes of this pytest run share."""
    if _SHARED not in config.stash:
        given = getattr(config, "workerinput", {}).get("harness_shared")
        config.stash[_SHARED] = Path(given or tempfile.mkdtemp(prefix="harness-pytest-"))
    return config.stash[_SHARED]


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """pytest-xdist calls this before each worker starts."""
    node.workerinput["harness_shared"] = str(_shared(node.config))


def pytest_sessionfinish(session: pytest.Session) -> None:
    config = session.config
    if _KEY in config.stash:
        config.stash[_KEY].close()
    if _SHARED not in config.stash or hasattr(config, "workerinput"):
        return
    shared = config.stash[_SHARED]
    try:
        if any(shared.iterdir()):
            from harness.integrations.pytest_session import conclude

            config.stash[_ENDS] = conclude(shared)
            if session.exitstatus == pytest.ExitCode.OK and any(
                not end.good for end in config.stash[_ENDS]
            ):
                session.exitstatus = pytest.ExitCode.TESTS_FAILED
    finally:
        shutil.rmtree(shared)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for end in terminalreporter.config.stash.get(_ENDS, ()):
        terminalreporter.section(f"harness: {end.suite}", green=end.good, red=not end.good)
        for line in end.lines:
            terminalreporter.line(line)
