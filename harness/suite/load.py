"""Loads suite files: what to measure, what is expected, and which rules decide.

A suite is read with positions, validated (schema), expanded into cases (sweep) and changed by the
command line (choice). This module checks its rules against the cases.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

from harness.errors import SuiteError
from harness.records import METRICS, Case, Match, Metric, Rule, Suite
from harness.suite import program, sweep
from harness.suite.choice import filtered, overridden, set_error
from harness.suite.decisions import contrary as wrong_abort
from harness.suite.fields import checked
from harness.suite.positions import Loc, Problem, nearest, read
from harness.suite.schema import SuiteModel, WorkloadModel


def load(ref: str | Path, *, overrides: Sequence[str] = (), filters: Sequence[str] = ()) -> Suite:
    """Read, check and expand a suite; a SuiteError has place, problem and the nearest valid name.
    `ref` is a path, `NAME` of suites/NAME.yaml here, or else that of a shipped suite, in any
    folder. Overrides, for every workload: `axis=value[,value...]` or `measure.SETTING=value`.
    Filters: patterns (fnmatch) or parts of case ids; `!` before one leaves its cases out."""
    path, shown = _find(ref)
    text = text_of(path, shown, f"Shipped suites: {', '.join(f.stem for f in available())}.")
    return loads(text, shown, overrides, filters)


def text_of(path: Path, shown: Path | str, remedy: str) -> str:
    """The text of a YAML file, which a SuiteError calls `shown`."""
    try:
        return path.read_bytes().decode()
    except UnicodeDecodeError:
        raise SuiteError(shown, "this is not a text file", remedy) from None
    except OSError as error:
        raise SuiteError(shown, f"cannot be read: {error.strerror}", remedy) from None


def factory_place(suite: Suite, case: Case) -> tuple[int, int]:
    """Line and column, from 1, of a case's factory in the suite's file; 0, 0 without a file."""
    if not suite.text:
        return 0, 0
    document = read(suite.text, suite.path)
    names = [workload["name"] for workload in document.data["workloads"]]
    return document.values["workloads", names.index(case.workload), "factory"]


def available() -> tuple[Path, ...]:
    """The shipped suites, sorted by name."""
    return tuple(sorted((shipped_folder() / "suites").glob("*.yaml")))


def shipped_roots(suite: Suite) -> tuple[Path, ...]:
    """The folder that workers of a shipped suite import from; empty for other suites."""
    try:
        file, _ = _find(suite.path)
    except SuiteError:  # it has no file
        return ()
    folder = shipped_folder()
    return (folder,) if file.resolve().parent == folder / "suites" else ()


def shipped_folder() -> Path:
    """The folder of the packages `suites` and `nsa`, in a wheel or a checkout."""
    here = Path(__file__).resolve().parents[1]
    return here / "shipped" if (here / "shipped" / "suites").is_dir() else here.parent


def _find(ref: str | Path) -> tuple[Path, Path]:
    """The file of a suite, and the path to show, which `load` accepts in any folder."""
    path, shipped = Path(ref), {file.stem: file for file in available()}
    for own in (path, Path("suites", f"{path}.yaml"), Path(f"{path}.yaml")):
        if own.is_file():
            return own, own
    if path.parent in (Path(), Path("suites")) and path.name.removesuffix(".yaml") in shipped:
        file = shipped[path.name.removesuffix(".yaml")]
        return file, Path("suites") / file.name
    if not path.exists():
        raise SuiteError(path, "no such suite", nearest(path.stem, [*shipped]))
    return path, path


def loads(
    text: str, path: Path | str, overrides: Sequence[str] = (), filters: Sequence[str] = ()
) -> Suite:
    """As `load`, from the text of a file; `path` gives the suite its name."""
    document = read(text, path)
    model = checked(SuiteModel, document)
    problems = [*_repeated("workloads", "workloads", model.workloads)]
    for w, workload in enumerate(model.workloads):
        problems += sweep.check(workload, ("workloads", w))
    if problems:
        raise document.error(problems)
    cases, problems = _cases(model)
    if problems := [*problems, *(_decision_problems(model, cases) if cases else ())]:
        raise document.error(problems)
    free = program.free_metrics(model)
    if overrides:
        cases = sweep.expanded(*overridden(model, overrides))
        if contrary := _contrary(cases):
            raise set_error(" ".join(overrides), contrary)
    parts = {} if isinstance(model.question, str) else model.question
    asked = model.question if isinstance(model.question, str) else " ".join(parts.values())
    kept = filtered(cases, filters, path)
    return Suite(
        name=Path(path).stem,
        **model.model_dump(include={"title", "subject", "device"}),
        question=asked.replace("{gpu}", "this GPU"),
        parts=parts,
        decides_for=model.decides_for.gpu,
        deciding=tuple(model.decides_for.parts),
        peers=tuple(model.peers),
        labels=tuple((one.name, one.match) for one in model.labels),
        axis_names=model.axis_names,
        provider_names=model.provider_names,
        requires={k: v for one in model.requires if not one.else_ for k, v in one.stated().items()},
        wants={k: v for one in model.requires if one.else_ for k, v in one.stated().items()},
        path=str(path),
        text=text,
        sha256=sha256(text.encode()).hexdigest(),
        cases=kept,
        left_out=len(cases) - len(kept),
        expectations=tuple(model.expectations),
        rules=tuple(
            replace(r, free=free.get(r.metric), asked=len(r.pairs(cases) or r.needs(cases)))
            for r in model.verdict
        ),
        cost=model.cost,
        suspects=model.suspects,
    )


# --- the file as written -----------------------------------------------------------------


def _repeated(
    key: str, what: str, named: Sequence[WorkloadModel] | Sequence[Rule]
) -> Iterator[Problem]:
    names = [one.name for one in named]
    for i, name in enumerate(names):
        if name in names[:i]:
            yield Problem((key, i, "name"), f"two {what} are named {name!r}", "Rename one.")


def _cases(model: SuiteModel) -> tuple[list[Case], list[Problem]]:
    """The cases of the file, and the parts of workloads that refer to none of theirs."""
    cases: list[Case] = []
    problems: list[Problem] = []
    for w, workload in enumerate(model.workloads):
        loc: Loc = ("workloads", w)
        combinations = sweep.combinations(workload, model.measure.given(), {})
        for i, criteria in enumerate(workload.exclude):
            problems += sweep.check_match(criteria, (*loc, "exclude", i), combinations)
        kept = sweep.kept(workload, combinations)
        if not kept:
            text = "every combination is excluded"
            problems.append(Problem((*loc, "exclude"), text, at_key=True))
            continue
        if contrary := _contrary(kept):
            remedy = "Lower min_samples or raise max_samples."
            place = (*loc, "measure") if "measure" in workload.model_fields_set else ("measure",)
            problems.append(Problem(place, contrary, remedy, at_key=True))
        cases += kept
        problems += program.check_settings(kept, loc)
        for key in ("env", "kernels", "operators", "measure", "allow"):
            stated = getattr(workload, key)
            for i, some in enumerate(stated if isinstance(stated, list) else ()):
                problems += sweep.check_match(some.match, (*loc, key, i, "match"), kept)
    return cases, problems


def _contrary(cases: Sequence[Case]) -> str:
    """Settings that contradict each other; empty without any."""
    for case in cases:
        fewest, most = case.settings.min_samples, case.settings.max_samples
        if fewest > most:
            return f"min_samples {fewest} is above max_samples {most}, for {case.case_id}"
    return ""


def _decision_problems(model: SuiteModel, cases: Sequence[Case]) -> Iterator[Problem]:
    """Parts of the suite that refer to cases, metrics or names it does not have."""
    for at, match in _matches(model):
        yield from sweep.check_match(match, at, cases)
    yield from _repeated("verdict", "rules", model.verdict)
    known = {**METRICS, **program.free_metrics(model)}
    for place, rule in _stated(model).items():
        yield from _rule_problems(rule, place, known, cases)
    axes = [*dict.fromkeys(name for case in cases for name in case.axes)]
    providers = [*dict.fromkeys(case.provider for case in cases)]
    named = [*providers, *dict.fromkeys(f"{case.workload}/{case.provider}" for case in cases)]
    for key, what, stated, valid in (
        ("axis_names", "axis", model.axis_names, axes),
        ("provider_names", "provider", model.provider_names, named),
        ("peers", "provider", model.peers, providers),
    ):
        for i, name in enumerate(stated):
            if name not in valid:
                place = (key, i if key == "peers" else name)
                text = f"no case has the {what} {name!r}"
                yield Problem(place, text, nearest(name, valid), at_key=True)
    yield from _unasked(model)


def _rule_problems(
    rule: Rule, loc: Loc, known: Mapping[str, Metric], cases: Sequence[Case]
) -> Iterator[Problem]:
    if rule.metric not in known:
        text = f"metric must name a metric, not {rule.metric!r}"
        yield Problem((*loc, "metric"), text, nearest(rule.metric, [*known]))
    elif why := wrong_abort(replace(rule, free=known[rule.metric])):
        yield Problem((*loc, "abort"), f"abort {why}")
    problems = sweep.check_match(rule.match, (*loc, "match"), cases)
    if rule.against is not None:
        problems += sweep.check_match(rule.against, (*loc, "against"), cases)
        if not problems and not rule.pairs(cases):
            text = "no matched case has a partner that is equal in all other axes"
            yield Problem((*loc, "against"), text, "Name every axis that differs.")
    if rule.axis is not None and not problems:
        matched = [case for case in cases if rule.match.accepts(case)]
        problems += sweep.check_fit(rule.axis, (*loc, "axis"), matched)
    yield from problems


def _stated(model: SuiteModel) -> dict[Loc, Rule]:
    """The expectations and rules by their places."""
    sections = {"expectations": model.expectations, "verdict": model.verdict}
    return {(key, i): rule for key, rules in sections.items() for i, rule in enumerate(rules)}


def _matches(model: SuiteModel) -> Iterator[tuple[Loc, Match]]:
    """Place and `match` of each part, beside the rules, that must select a case."""
    for i, label in enumerate(model.labels):
        yield ("labels", i, "match"), label.match
    if model.cost:
        yield ("cost", "match"), model.cost.match
    if not model.suspects:
        return
    if model.suspects.gap.then:
        yield ("suspects", "gap", "then"), model.suspects.gap.then
    for i, seen in enumerate(model.suspects.observed):
        yield ("suspects", "observed", i, "at"), seen.at
        yield ("suspects", "observed", i, "over"), seen.over
    for i, suspect in enumerate(model.suspects.tested):
        if suspect.control:
            yield ("suspects", "tested", i, "control"), suspect.control
        else:
            yield ("suspects", "tested", i, "without"), suspect.without
            yield ("suspects", "tested", i, "with"), suspect.with_


def _unasked(model: SuiteModel) -> Iterator[Problem]:
    """Parts of the question that no rule asks, and rules that ask for no part of it."""
    parts = {} if isinstance(model.question, str) else model.question
    asked: dict[Loc, str] = {(*place, "asks"): r.asks for place, r in _stated(model).items()}
    if model.suspects:
        asked["suspects", "asks"] = model.suspects.asks
    named = dict(asked)
    for i, part in enumerate(model.decides_for.parts):
        named["decides_for", "parts", i] = part
    for place, part in named.items():
        if part and part not in parts:
            yield Problem(place, f"question has no part {part!r}", nearest(part, [*parts]))
    for part in parts:
        if part not in asked.values():
            remedy = f"Add `asks: {part}` to the rule or expectation that answers it."
            yield Problem(("question", part), "no rule asks this part", remedy, at_key=True)
