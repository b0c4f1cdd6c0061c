"""How many small changes of logic the tests notice: a sample of mutants, run one by one.

    python -m reports.studies.mutation_sample --seed 2 --mutants 80 --minutes 20

copies the working tree into a temporary folder for each of two jobs. One mutant at a time is
written into a copy, and the test modules that concern its module run there, without those for a
GPU. A mutant is noticed if they fail or take more than three times as long as without it. Survivors
are printed with their places. Those judged equivalent, with a reason, are listed in
mutation_equivalents.json by function and code, not by line: an entry is valid until the code
changes.
"""

import argparse
import ast
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from harness import units

ROOT = Path(__file__).resolve().parents[2]
EQUIVALENTS = Path(__file__).with_name("mutation_equivalents.json")
"""Module -> key of a mutant -> why no test can notice it."""
MODULES: Mapping[str, tuple[str, ...]] = {
    "harness/analysis/comparison.py": (
        "harness/analysis/tests",
        "harness/gate/tests/test_stored.py",
    ),
    "harness/analysis/dead_axes.py": ("harness/analysis/tests/test_dead_axes.py",),
    "harness/analysis/scaling.py": ("harness/analysis/tests", "harness/report/tests"),
    "harness/analysis/statistics.py": ("harness/analysis/tests",),
    "harness/analysis/verdict.py": ("harness/analysis/tests", "harness/report/tests"),
    "harness/bisect/posterior.py": ("harness/bisect/tests/test_search.py",),
    "harness/bisect/search.py": (
        "harness/bisect/tests/test_search.py",
        "harness/report/series/tests/test_bisection.py",
    ),
    "harness/bisect/session.py": (
        "harness/bisect/tests/test_session.py",
        "harness/bisect/tests/test_differences.py",
        "harness/report/series/tests/test_bisection.py",
    ),
    "harness/gate/baselines.py": ("harness/gate/tests/test_stored.py",),
    "harness/gate/decide.py": ("harness/gate/tests/test_decide.py",),
    "harness/machine/nvml.py": (
        "harness/machine/tests/test_nvml.py",
        "harness/machine/tests/test_environment.py",
    ),
    "harness/report/tables.py": ("harness/report/tests",),
    "harness/runner/launcher.py": (
        "harness/worker/tests/test_forkserver.py",
        "harness/runner/tests/test_run.py",
    ),
    "harness/runner/watchdog.py": (
        "harness/runner/tests/test_watchdog.py",
        "harness/runner/tests/test_run.py",
    ),
    "harness/store/writer.py": (
        "harness/store/tests/test_writer.py",
        "harness/store/tests/test_reader.py",
    ),
    "nsa/reference.py": (
        "nsa/tests/test_reference.py",
        "nsa/routes/tests/test_selection.py",
        "nsa/routes/tests/test_routes.py",
    ),
    "nsa/routes/eager.py": ("nsa/tests/test_ops.py", "nsa/routes/tests"),
    "nsa/routes/selected.py": ("nsa/tests/test_ops.py", "nsa/routes/tests"),
    "nsa/train/data.py": ("nsa/train/tests/test_data.py",),
}
"""Central modules, and the tests that concern each."""
PYTEST = (
    *(sys.executable, "-m", "pytest", "-q", "-x", "-m", "not gpu and not slow"),
    *("-p", "no:cacheprovider", "-p", "no:benchmark"),
)
PATIENCE, GRACE_S = 3.0, 20.0
"""Tests of a mutant may take so many times what they took without it, and so many seconds more."""

FLIPS: Mapping[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
SIGNS: Mapping[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
}
STATEMENTS = ("statement", "return", "answer")
"""Operators that change a whole statement; the others change an expression."""
TURNED = {"min": "max", "max": "min", "any": "all", "all": "any"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """One change of a module's logic."""

    module: str
    function: str
    """Qualified name of what is changed; empty for code of the module itself."""
    operator: str
    line: int
    code: str
    changed: str
    start: int
    """Place of the code in the source, in bytes of UTF-8."""
    end: int
    number: int = 1
    """Which of several equal ones in the function."""

    @property
    def key(self) -> str:
        """The name of the mutant among its module's as long as its code is the same."""
        number = f" #{self.number}" if self.number > 1 else ""
        return f"{self.function}: {self.code} -> {self.changed}{number}"

    def applied(self, source: str) -> str:
        changed = self.changed if self.operator in STATEMENTS else f"({self.changed})"
        raw = source.encode()
        return (raw[: self.start] + changed.encode() + raw[self.end :]).decode()


def mutants(source: str, module: str = "") -> tuple[Mutant, ...]:
    """Every mutant of a module, in the order of its code."""
    return tuple(_Mutator(source, module).found)


class _Mutator(ast.NodeVisitor):
    """Collects mutants, but none of annotations, decorators, docstrings, imports, f-strings and
    `raise`: they are not logic, or a test of them would assert wording."""

    def __init__(self, source: str, module: str) -> None:
        self.found: list[Mutant] = []
        self._module = module
        self._lines = [0]
        for line in source.encode().splitlines(keepends=True):
            self._lines.append(self._lines[-1] + len(line))
        self._seen: Counter[tuple[str, str, str]] = Counter()
        self._inside: list[str] = []
        self._answers_bool = False
        tree = ast.parse(source)
        self._functions = {n.name: n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)}
        self.visit(tree)

    def _add(self, operator: str, node: ast.expr | ast.stmt, changed: ast.expr | ast.stmt) -> None:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        code, new = ast.unparse(node), ast.unparse(changed)
        same = (".".join(self._inside), code, new)
        self._seen[same] += 1
        self.found.append(
            Mutant(
                module=self._module,
                function=same[0],
                operator=operator,
                line=node.lineno,
                code=code,
                changed=new,
                start=self._lines[node.lineno - 1] + node.col_offset,
                end=self._lines[node.end_lineno - 1] + node.end_col_offset,
                number=self._seen[same],
            )
        )

    # --- what is walked ---

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        outer, self._answers_bool = self._answers_bool, _text(node.returns) == "bool"
        self._inside.append(node.name)
        for default in [*node.args.defaults, *filter(None, node.args.kw_defaults)]:
            self.visit(default)
        self._body(node.body)
        self._inside.pop()
        self._answers_bool = outer

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._inside.append(node.name)
        self._body(node.body)
        self._inside.pop()

    def visit_Module(self, node: ast.Module) -> None:
        self._body(node.body)

    def _body(self, statements: Sequence[ast.stmt]) -> None:
        for statement in statements:
            self.visit(statement)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_Raise(self, node: ast.Raise) -> None: ...

    def visit_Assert(self, node: ast.Assert) -> None: ...

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None: ...

    # --- operators ---

    def visit_Compare(self, node: ast.Compare) -> None:
        flipped: list[ast.cmpop] = [FLIPS[type(node.ops[0])](), *node.ops[1:]]
        self._add("comparison", node, ast.Compare(node.left, flipped, node.comparators))
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool) or not isinstance(node.value, int | float):
            return
        for new in (
            [node.value + 1, node.value - 1]
            if isinstance(node.value, int)
            else [node.value * 1.1 or 1.0]
        ):
            self._add("constant", node, ast.Constant(new))

    def visit_BinOp(self, node: ast.BinOp) -> None:
        sides = (node.left, node.right)
        if type(node.op) in SIGNS and not any(map(_of_text, sides)):
            self._add("sign", node, ast.BinOp(node.left, SIGNS[type(node.op)](), node.right))
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        self._add("and, or", node, ast.BoolOp(other, node.values))
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not):
            self._add("not", node, node.operand)
        self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self._add("arms", node, ast.IfExp(node.test, node.orelse, node.body))
        self.generic_visit(node)

    def visit_Return(self, node: ast.Return) -> None:
        if node.value is None or _text(node.value) == "None":
            return
        if self._answers_bool:
            denied = ast.UnaryOp(ast.Not(), node.value)
            self._add("answer", node, ast.Return(denied))
        else:
            self._add("return", node, ast.Return(ast.Constant(None)))
        self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Call):
            self._add("statement", node, ast.Pass())
            self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self._add("statement", node, ast.Pass())
        self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        if isinstance(node.targets[0], ast.Attribute | ast.Subscript):
            self._add("statement", node, ast.Pass())
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        if isinstance(node.func, ast.Name) and node.func.id in TURNED:
            other = ast.Name(TURNED[node.func.id])
            self._add("turned", node, ast.Call(other, node.args, node.keywords))
        for i in self._alike(node):
            swapped = [*node.args[:i], node.args[i + 1], node.args[i], *node.args[i + 2 :]]
            self._add("arguments", node, ast.Call(node.func, swapped, node.keywords))
        self.generic_visit(node)

    def _alike(self, node: ast.Call) -> Iterator[int]:
        """Places of neighbouring arguments that a function of this module takes as one type."""
        of_self = isinstance(node.func, ast.Attribute) and _text(node.func.value) == "self"
        name = node.func.attr if isinstance(node.func, ast.Attribute) else _text(node.func)
        called = self._functions.get(name) if of_self or isinstance(node.func, ast.Name) else None
        if called is None or any(isinstance(a, ast.Starred) for a in node.args):
            return
        types = [_text(p.annotation) for p in called.args.args[of_self:]]
        for i, (one, other) in enumerate(pairwise(types)):
            if i + 1 < len(node.args) and one and one == other:
                yield i


def _text(node: ast.expr | None) -> str:
    return ast.unparse(node) if node is not None else ""


def _of_text(node: ast.expr) -> bool:
    """Whether an operand is known not to be a number."""
    known = ast.JoinedStr | ast.List | ast.ListComp | ast.Tuple
    return isinstance(node, known) or (
        isinstance(node, ast.Constant) and not isinstance(node.value, int | float)
    )


def drawn(found: Sequence[Mutant], count: int, seed: str) -> list[Mutant]:
    """So many of a module's mutants, spread over the operators."""
    rng = random.Random(seed)
    by_operator: dict[str, list[Mutant]] = {}
    for mutant in rng.sample(found, len(found)):
        by_operator.setdefault(mutant.operator, []).append(mutant)
    order = rng.sample(sorted(by_operator), len(by_operator))
    rounds = max(map(len, by_operator.values()), default=0)
    return [by_operator[o][i] for i in range(rounds) for o in order if i < len(by_operator[o])][
        :count
    ]


# --- running -----------------------------------------------------------------------------


def copied(root: Path, folder: Path) -> Path:
    """The files as they are now, without ignored ones and the stored runs of reports."""
    words = ("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    listed = subprocess.run(words, cwd=root, check=True, capture_output=True, text=True)
    for name in filter(None, listed.stdout.split("\0")):
        if not name.startswith("reports/runs/") and (root / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(root / name, folder / name)
    return folder


def passes(tree: Path, command: Sequence[str], limit_s: float) -> tuple[bool, float]:
    """Whether a command ends well in a tree within the time, and the seconds it took."""
    variables = {
        **os.environ,
        "PYTHONPATH": str(tree),
        "PYTHONDONTWRITEBYTECODE": "1",  # that of a source changed twice in a second is not renewed
        "OMP_NUM_THREADS": "1",
    }
    started = time.monotonic()
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(
            command, cwd=tree, env=variables, stdout=said, stderr=said, start_new_session=True
        )
        try:
            ended = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            ended = -1
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    return ended == 0, time.monotonic() - started


def noticed(tree: Path, module: str, text: str, command: Sequence[str], limit_s: float) -> bool:
    """Whether a command fails in a tree where the module has this text; the module is put back."""
    file = tree / module
    source = file.read_text()
    try:
        file.write_text(text)
        return not passes(tree, command, limit_s)[0]
    finally:
        file.write_text(source)


class Sample:
    """The mutants to try, and what became of them; jobs take from it one by one."""

    def __init__(self, chosen: Mapping[str, Sequence[Mutant]], deadline: float) -> None:
        self.chosen = chosen
        self.outcomes: dict[Mutant, bool] = {}
        """Mutant -> whether it was noticed."""
        self.problems: list[str] = []
        self._waiting = sorted(chosen, key=lambda m: -len(chosen[m]))
        self._deadline = deadline
        self._lock = threading.Lock()

    def work(self, tree: Path) -> None:
        """Take modules and try their mutants in a tree until none is left, or no time."""
        while (module := self._next()) is not None:
            try:
                self._try(tree, module)
            except OSError as error:
                self.problems.append(f"{module}: {error}")

    def _next(self) -> str | None:
        with self._lock:
            late = time.monotonic() > self._deadline
            return None if late or not self._waiting else self._waiting.pop(0)

    def _try(self, tree: Path, module: str) -> None:
        command = [*PYTEST, *MODULES[module]]
        source = (tree / module).read_text()
        green, baseline_s = passes(tree, command, self._deadline - time.monotonic())
        if not green:
            self.problems.append(f"{module}: its tests fail, or do not end in time, as it is")
            return
        limit_s = PATIENCE * baseline_s + GRACE_S
        broken = f"raise RuntimeError('planted')\n{source}"
        if not noticed(tree, module, broken, command, limit_s):
            self.problems.append(f"{module}: its tests do not run the copy")
            return
        for mutant in self.chosen[module]:
            if time.monotonic() > self._deadline:
                return
            seen = noticed(tree, module, mutant.applied(source), command, limit_s)
            self.outcomes[mutant] = seen
            sys.stderr.write(f"{'noticed ' if seen else 'SURVIVED'} {module} {mutant.key}\n")


# --- the answer --------------------------------------------------------------------------


def report(sample: Sample, equivalents: Mapping[str, Mapping[str, str]]) -> str:
    """The share noticed for each module, and the survivors, as Markdown."""
    outcomes = sample.outcomes
    equal = {m for m in outcomes if m.key in equivalents.get(m.module, {}) and not outcomes[m]}
    lines = ["| module | noticed | survived | equivalent |", "|:--|--:|--:|--:|"]
    for module in [*sample.chosen, ""]:
        of = [m for m in outcomes if module in ("", m.module)]
        seen, same = sum(outcomes[m] for m in of), len(equal.intersection(of))
        name = f"`{module}`" if module else "all"
        lines.append(f"| {name} | {seen} | {len(of) - seen - same} | {same} |")
    seen, judged = sum(outcomes.values()), len(outcomes) - len(equal)
    share = units.percent(seen / judged) if judged else "none"
    lines += ["", f"Noticed: {seen} of {judged} that are not equivalent ({share})."]
    if untried := sum(map(len, sample.chosen.values())) - len(outcomes):
        lines.append(f"Not tried: {untried}.")
    lines += ["", *(f"- problem: {text}" for text in sample.problems)]
    lines += [
        f"- survived: {m.module}:{m.line} {m.key}"
        for m, seen in outcomes.items()
        if not seen and m not in equal
    ]
    lines += [f"- stale: {m}: {key}" for m, key in stale(equivalents)]
    return "\n".join(lines)


def stale(equivalents: Mapping[str, Mapping[str, str]]) -> Iterator[tuple[str, str]]:
    """Entries whose code is no longer there: to be removed, or judged again."""
    for module, known in equivalents.items():
        file = ROOT / module
        keys = {m.key for m in mutants(file.read_text())} if file.is_file() else set()
        yield from ((module, key) for key in known if key not in keys)


def main(arguments: Iterable[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Which mutants of central modules survive.")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--mutants", type=int, default=80, help="in all modules together")
    parser.add_argument("--minutes", type=float, default=20, help="none is begun later")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--module", action="append", help="only this one; may be repeated")
    given = parser.parse_args(None if arguments is None else list(arguments))
    modules = given.module or list(MODULES)
    each, more = divmod(given.mutants, len(modules))
    chosen = {
        module: drawn(
            mutants((ROOT / module).read_text(), module),
            each + (i < more),
            f"{given.seed} {module}",
        )
        for i, module in enumerate(modules)
    }
    started = time.monotonic()
    sample = Sample(chosen, started + 60 * given.minutes)
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        trees = [copied(ROOT, Path(folder, str(job))) for job in range(given.jobs)]
        threads = [threading.Thread(target=sample.work, args=(tree,)) for tree in trees]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    sys.stdout.write(report(sample, json.loads(EQUIVALENTS.read_text())) + "\n")
    sys.stderr.write(f"{time.monotonic() - started:.0f} s\n")


if __name__ == "__main__":
    main()
