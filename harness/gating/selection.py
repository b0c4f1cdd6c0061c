"""Which cases a change can reach.

A case reaches the module of its factory and, through import statements, whatever that imports
within the repository. A changed file selects the cases that reach it. What no import statement
tells of selects every case, unless it is known to reach none: when in doubt, select.

A module that no case imports is known to reach none under two conditions: its package lies under
a root, so that its name is the one that imports would give it, and the case's modules load code
by import alone.
"""

import ast
import sys
from collections.abc import Iterator, Mapping, Sequence, Set
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
COLLECTED = ("test_*.py", "*_test.py", "conftest.py")
"""Their names, which nothing else gives to what it loads in another way than by import."""
LOADERS = (
    *("spec_from_file_location", "SourceFileLoader", "module_from_spec", "exec_module"),
    *("entry_points", "extend_path", "walk_packages", "iter_modules", "resolve_name"),
    *("load_source", "run_path", "run_module", "addsitedir", "__path__"),
)
"""What loads code, or says where it lies, in another way than by import."""
LOADER_MODULES = (
    *("runpy", "pkgutil", "imp", "zipimport", "site", "builtins", "importlib.machinery"),
)
SYS = ("path", "meta_path", "path_hooks", "executable")
"""Of `sys`: where modules are looked for, and what runs a script."""
BUILTINS = ("exec", "eval", "compile")
IMPORTERS = ("import_module", "__import__")


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
    modules = {candidate.case.factory.partition(":")[0] for candidate in candidates}
    imported = {path for graph in graphs for m in modules for path in graph.reached(m).paths}
    placed = {path for path in changed if path in imported or _is_placed(path, graphs)}
    why: dict[tuple[str, str], str] = {}
    for candidate in candidates:
        module = candidate.case.factory.partition(":")[0]
        closures = [graph.reached(module) for graph in graphs]
        for path in changed:
            if said := _reaches(path, candidate, closures, placed, policy):
                why.setdefault((candidate.suite, candidate.case.case_id), said)
    return Selection(why)


def _reaches(
    path: str,
    candidate: Candidate,
    closures: Sequence["_Closure"],
    placed: Set[str],
    policy: Policy,
) -> str:
    """Why a changed file reaches a case; empty where it does not.

    Args:
        path: Of the file.
        candidate: The case.
        closures: What it imports, in each tree.
        placed: Changed modules whose name is known, so that imports tell who reaches them.
        policy: As of `select`.
    """
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
    if any(path in closure.paths for closure in closures):
        return path
    if path.endswith(".py") and not _is_collected(path):
        for closure in closures:
            if by := closure.loads:
                return f"{path}, which {by} may load in another way than by import"
            if name := closure.outside & _names(path):
                return f"{path}, which may be what it imports as {min(name)}"
    if candidate.case.program is not None and not (_is_test(path) or _is_inert(path, policy)):
        return f"{path}, of which nobody knows whether the program reads it"
    if path in placed or _is_test(path) or _is_inert(path, policy):
        return ""
    return f"{path}, of which nobody knows what it reaches"


def _speaks_of(reach: Reach, path: str) -> bool:
    return any(fnmatchcase(path, pattern) for pattern in reach.paths)


def _is_test(path: str) -> bool:
    return path.endswith(".py") and bool(set(PurePosixPath(path).parts[:-1]) & set(TESTS))


def _is_collected(path: str) -> bool:
    return _is_test(path) and any(fnmatchcase(PurePosixPath(path).name, p) for p in COLLECTED)


def _names(path: str) -> set[str]:
    """Names that a module could be imported by, or its package, wherever Python looks for it."""
    pure = PurePosixPath(path)
    return {*pure.parts[:-1], pure.stem}


def _is_placed(path: str, graphs: Sequence["_Graph"]) -> bool:
    """Whether the module's name is known, in each tree that has it."""
    having = [graph for graph in graphs if graph.has(path)]
    return bool(having) and all(graph.places(path) for graph in having)


def _is_inert(path: str, policy: Policy) -> bool:
    """Another suite's file reaches this case no more than a document does."""
    if any(path == choice.suite for choice in (*policy.choices, *policy.counted)):
        return True
    return any(fnmatchcase(path, pattern) for pattern in INERT)


@dataclass(frozen=True, slots=True)
class _Closure:
    """What importing a module can load."""

    paths: frozenset[str]
    """Of all files, and of the links that lead to them."""
    outside: frozenset[str]
    """Top-level names that lie neither under a root nor in the standard library."""
    loads: str
    """The path of a module in it that loads code in another way than by import; else empty."""


class _Graph:
    """What modules of one tree import of each other."""

    def __init__(self, tree: Path, roots: Sequence[str]) -> None:
        self._tree = tree.resolve()
        self._roots = [self._tree / root for root in roots]

    def has(self, path: str) -> bool:
        return (self._tree / path).is_file()

    def places(self, path: str) -> bool:
        """Whether a path is a module here of a package, or of none, that lies under a root: then
        imports under that name say all there is to say of it."""
        file = self._tree / path
        if not path.endswith(".py") or file.is_symlink() or self._name(file) is None:
            return False
        folder = file.parent
        while (folder / "__init__.py").is_file() and folder not in self._roots:
            folder = folder.parent
        return folder in self._roots

    @cache  # noqa: B019  a graph lives as long as one selection
    def reached(self, module: str) -> _Closure:
        """What importing a module can load."""
        found: dict[str, None] = {}
        outside: set[str] = set()
        loads = ""
        queue = [*_with_parents(module)]
        seen: set[str] = set()
        while queue:
            name = queue.pop()
            if name in seen:
                continue
            seen.add(name)
            file = self._file(name)
            if file is None:
                if "." not in name and not self._is_folder(name):
                    outside.add(name)
                continue
            found |= dict.fromkeys(self._paths(file))
            text = self._parsed(file)
            path = file.relative_to(self._tree).as_posix()
            # Of our own tree it is the running harness that measures: what it loads is no case's.
            if not (loads or path.startswith(HARNESS)) and (text is None or _loads(text)):
                loads = path
            for imported in self._imports(file, name):
                queue += _with_parents(imported)
        return _Closure(frozenset(found), frozenset(outside - sys.stdlib_module_names), loads)

    @cache  # noqa: B019  as above
    def _parsed(self, file: Path) -> ast.Module | None:
        """A module's text; None where it is no Python."""
        try:
            return ast.parse(file.read_bytes())
        except (SyntaxError, ValueError):
            return None

    def _is_folder(self, name: str) -> bool:
        return bool(name) and any((root / name).is_dir() for root in self._roots)

    def _paths(self, file: Path) -> Iterator[str]:
        """A file's path, and those of whatever its links lead to within the tree."""
        yield file.relative_to(self._tree).as_posix()
        while True:
            place = file.parent.resolve() / file.name
            if place.is_relative_to(self._tree):
                yield place.relative_to(self._tree).as_posix()
            if not place.is_symlink():
                return
            file = place.parent / place.readlink()

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
        tree = self._parsed(file)
        if tree is None:
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
                if known.startswith(".") and not _is_own(node.args[1:]):
                    yield from self._beginning("")  # relative to a package that is computed
                elif whole:
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


def _loads(tree: ast.Module) -> bool:
    """Whether a module may load code in another way than by import."""
    called = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    return any(_is_loader(node, called=id(node) in called) for node in ast.walk(tree))


def _is_loader(node: ast.AST, *, called: bool) -> bool:
    match node:
        case ast.Import(names=names):
            return any(a.name in LOADER_MODULES or (a.name == "sys" and a.asname) for a in names)
        case ast.ImportFrom(module=module, level=0, names=names):
            return (
                module in LOADER_MODULES
                or any(f"{module}.{alias.name}" in LOADER_MODULES for alias in names)
                or any(alias.name in LOADERS for alias in names)
                or any(alias.name in IMPORTERS and alias.asname for alias in names)
                or (module == "sys" and any(alias.name in SYS for alias in names))
            )
        case ast.Attribute(value=ast.Name(id="sys"), attr=attr):
            return attr in SYS
        case ast.Name(id=name) if name in BUILTINS:
            return called
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name in LOADERS or (name in IMPORTERS and not called)
        case ast.Constant(value=str(text)):  # a pattern is of files that are read
            return text.endswith(".py") and "*" not in text and "\n" not in text
    return False


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
    match node.func:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name in IMPORTERS
    return False


def _is_own(package: Sequence[ast.expr]) -> bool:
    """Whether what a relative name is relative to is the module's own package."""
    return not package or ast.unparse(package[0]) in ("__package__", "__name__")


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
