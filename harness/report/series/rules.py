"""A stored run by the rules of another suite file, such as today's."""

from dataclasses import replace

from harness.errors import HarnessError
from harness.records import Run
from harness.suite import load as suites


def judged_by(rules: str, run: Run) -> Run:
    """The run with the question, rules and expectations of another suite file."""
    if not rules:
        return run
    suite = suites.load(rules)
    there = {c.case_id for c in run.suite.cases}
    missing = [c for c in suite.cases if c.case_id not in there]
    if len(missing) == len(suite.cases):
        raise HarnessError(
            f"{suite.path} has no case of {run.run_id}, so its rules say nothing about it"
        )
    own = (
        *("question", "parts", "decides_for", "deciding", "peers", "labels"),
        *("axis_names", "provider_names"),
        *("expectations", "rules", "cost", "suspects"),
    )
    taken = {name: getattr(suite, name) for name in own}
    judged = replace(run.suite, left_out=len(missing), **taken)
    note = f"judged by the rules of {suite.path} (sha256 {suite.sha256[:12]}), not by its own"
    notes = run.notes if suite.sha256 == run.suite.sha256 else (*run.notes, note)
    return replace(run, suite=judged, notes=notes, judged_by=suite.path)
