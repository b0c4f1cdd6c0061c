"""Which cases a change can reach.

A case reaches the module of its factory and, through import statements, whatever that imports
within the repository. A changed file selects the cases that reach it. What no import statement
tells of selects every case, unless it is known to reach none: when in doubt, select.
"""

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path, PurePosixPath

from harness.gating.policy import Policy, Reach, fits_any
from harness.records import Case

HARNESS = "harness/"
"""Ours, where the repository is our own: it measures every case."""
INERT = ("*.md", "*.rst", "LICENSE*", "reports/*", "docs/*", ".github/*", "ci/baselines/*")
"""Paths that no case can reach: nothing of them is read where a case is measured."""
TESTS = ("tests", "test")
"""Folders whose modules only a test runner imports, unless something else imports them too."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A case that may be left out."""

    suite: str
    """Path of the suite's file, from the root of the repository."""
    case: Case


@dataclass(frozen=True, slots=True)
class Selection:
    """Case keys (suite, case id) with the change that reaches each; absent if none does."""

    why: Mapping[tuple[str, str], str]


def select(
    candidates: Sequence[Candidate],
    changed: Sequence[str],
    trees: Sequence[Path],
    policy: Policy,
) -> Selection:
    """Choose the cases that a change can reach.

    Args:
        candidates: All cases of the gate.
        changed: Paths from the root of the repository that differ between the sides.
        trees: Roots of both sides: a deleted module is only in the base, a new one in the head.
        policy: Its map of what files reach, and where packages lie.
    """
    graphs = [_Graph(tree, policy.roots) for tree in trees]
    why: dict[tuple[str, str], str] = {}
    for candidate in candidates:
        module = candidate.case.factory.partition(":")[0]
        reached = frozenset().union(*(graph.reached(module) for graph in graphs))
        for path in changed:
            if said := _reaches(path, candidate, reached, graphs, policy):
                why.setdefault((candidate.suite, candidate.case.case_id), said)
    return Selection(why)


def _reaches(
    path: str,
    candidate: Candidate,
    reached: frozenset[str],
    graphs: Sequence["_Graph"],
    policy: Policy,
) -> str:
    """Why a changed file reaches a case; empty where it does not."""
    said = [reach for reach in policy.reaches if _speaks_of(reach, path)]
    if any(fits_any(candidate.case.case_id, reach.cases) for reach in said):
        return f"{path}, by the policy"
    if any(reach.only for reach in said):
        return ""
    if path == candidate.suite:
        return f"{path}, its suite"
    if path == policy.path:
        return f"{path}, the policy"
    if path.startswith(HARNESS) and not _is_test(path):
        return "" if path.endswith(".md") else f"{path}, which measures it"
    if path in reached:
        return path
    if candidate.case.program is not None and not (_is_test(path) or _is_inert(path, policy)):
        return f"{path}, of which nobody knows whether the program reads it"
    if any(graph.knows(path) for graph in graphs) or _is_test(path) or _is_inert(path, policy):
        return ""
    return f"{path}, of which nobody knows what it reaches"


def _speaks_of(reach: Reach, path: str) -> bool:
    return any(fnmatchcase(path, pattern) for pattern in reach.paths)


def _is_test(path: str) -> bool:
    return path.endswith(".py") and bool(set(PurePosixPath(path).parts[:-1]) & set(TESTS))


def _is_inert(path: str, policy: Policy) -> bool:
    """Another suite's file reaches this case no more than a document does."""
    if any(path == choice.suite for choice in (*policy.choices, *policy.counted)):
        return True
    return any(fnmatchcase(path, pattern) for pattern in INERT)


class _Graph:
    """What modules of one tree import of each other."""

    def __init__(self, tree: Path, roots: Sequence[str]) -> None:
        self._tree = tree
        self._roots = [tree / root for root in roots]

    def knows(self, path: str) -> bool:
        """Whether a path is a module here: then imports say all there is to say of it."""
        file = self._tree / path
        return path.endswith(".py") and file.is_file() and self._name(file) is not None

    @cache  # noqa: B019  a graph lives as long as one selection
    def reached(self, module: str) -> frozenset[str]:
        """Paths of all files that importing a module can load."""
        found: dict[str, None] = {}
        queue = [*_with_parents(module)]
        seen: set[str] = set()
        while queue:
            name = queue.pop()
            if name in seen:
                continue
            seen.add(name)
            file = self._file(name)
            if file is None:
                continue
            found[file.relative_to(self._tree).as_posix()] = None
            for imported in self._imports(file, name):
                queue += _with_parents(imported)
        return frozenset(found)

    def _file(self, module: str) -> Path | None:
        for root in self._roots:
            stem = root.joinpath(*module.split("."))
            for file in (stem / "__init__.py", stem.with_name(stem.name + ".py")):
                if file.is_file():
                    return file
        return None

    def _name(self, file: Path) -> str | None:
        """The dotted name of a file under a root whose folders could be packages."""
        for root in self._roots:
            if file.is_relative_to(root):
                parts = file.relative_to(root).with_suffix("").parts
                if all(part.isidentifier() for part in parts):
                    return ".".join(parts).removesuffix(".__init__")
        return None

    def _imports(self, file: Path, name: str) -> Iterator[str]:
        """Names that a module's text may import, wherever in it; where only running it would
        tell, all that begin as far as is known."""
        try:
            tree = ast.parse(file.read_bytes())
        except (SyntaxError, ValueError):
            yield from self._beginning("")  # it will crash; what it meant to import nobody knows
            return
        package = name if file.name == "__init__.py" else name.rpartition(".")[0]
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                yield from _imported_from(node, package)
            elif isinstance(node, ast.Call) and _is_import_call(node):
                known, whole = _spelled(node.args[0] if node.args else None)
                if whole:
                    yield _absolute(known, package)
                else:
                    yield from self._beginning(_absolute(known, package) if known else "")

    def _beginning(self, prefix: str) -> Iterator[str]:
        """Every module whose name begins so, tests and the harness aside."""
        for root in self._roots:
            for file in root.rglob("*.py"):
                path = file.relative_to(self._tree).as_posix()
                name = self._name(file)
                if name and name.startswith(prefix) and not _is_test(path):
                    yield name


def _spelled(node: ast.expr | None) -> tuple[str, bool]:
    """How far a computed text is known from its beginning, and whether that is all of it."""
    match node:
        case ast.Constant(value=str(text)):
            return text, True
        case ast.JoinedStr(values=[ast.Constant(value=str(text)), *_]):
            return text, False
        case ast.BinOp(left=left, op=ast.Add()):
            return _spelled(left)[0], False
    return "", False


def _imported_from(node: ast.ImportFrom, package: str) -> Iterator[str]:
    parts = package.split(".")
    start = parts[: len(parts) - node.level + 1] if node.level else []
    module = ".".join([*start, *filter(None, [node.module])])
    yield module
    yield from (f"{module}.{alias.name}" for alias in node.names)


def _is_import_call(node: ast.Call) -> bool:
    return ast.unparse(node.func) in ("importlib.import_module", "import_module", "__import__")


def _absolute(name: str, package: str) -> str:
    dots = len(name) - len(name.lstrip("."))
    if not dots:
        return name
    parts = package.split(".")
    return ".".join([*parts[: len(parts) - dots + 1], name.lstrip(".")])


def _with_parents(module: str) -> Iterator[str]:
    """a.b.c runs a and a.b before it."""
    parts = module.split(".")
    yield from (".".join(parts[: i + 1]) for i in range(len(parts)))
