"""The suite flash-attention-validation at small sizes on a CPU, to its verdict; and its checks."""

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

from harness.analysis import scaling
from harness.analysis.summary import summarise
from harness.analysis.verdict import judge
from harness.records import Decision, Outcome, Scalar
from harness.store.reader import load
from harness.tests.command_line import harness
from harness.workload import Factory
from nsa.config import PRESETS
from nsa.model.attention import Gate
from nsa.model.language_model import ByteLM
from suites import workloads
from suites.axes import AxisError
from suites.fix_checks import checks
from suites.tests.small import smaller

SMALL = {
    "device: cuda": "device: cpu",
    "fa2-torch": "reference",  # FlashAttention-2 needs a GPU
    "125m": "tiny",
    "[1, 17, 65, 1023]": "[1, 17]",
    "seq_len: 2048": "seq_len: 40",
    "seq_len: 512": "seq_len: 40",
    "processes: {from: 2, to: 5}": "processes: 1",
    "[10, 200]": "[10, 12]",
    "steps: 200": "steps: 12",
    "go: 200": "go: 12",
    "sample_s: 0.3, warmup_s: 1": "sample_s: 0.01, warmup_s: 0.01, min_samples: 2",
}
LEFT_OUT = [
    "direct",
    "drift",
    "triton",
    "package",
    "FA2=1",
    "of-branch",
    "window",
    "*/eager*",
]
"""Patterns of cases that need a GPU, or show nothing more."""


def test_a_small_variant_runs_to_its_verdict(tmp_path: Path) -> None:
    text = smaller("flash-attention-validation", SMALL)
    (tmp_path / "small.yaml").write_text(text, encoding="utf-8")
    filters = [word for part in LEFT_OUT for word in ("--filter", f"!*{part}*")]
    options = ("--no-self-test", "--no-report", *filters)
    root = {"PYTHONPATH": str(Path(__file__).parents[2])}  # the copy is not shipped

    said = harness("run", "small.yaml", *options, cwd=tmp_path, env=root)

    (folder,) = (tmp_path / "reports" / "runs").iterdir()
    run = load(folder.parent, folder.name)
    assert {m.outcome for m in run.measurements} == {Outcome.OK}, said.stdout
    cases = summarise(run)
    verdict = judge(run.suite, run.environment, cases, scaling.fit(cases))
    met = {r.rule for r in verdict.rules if r.applies and r.decision is Decision.GO}
    assert met >= {
        "no host sync with any flag",
        "right at odd lengths",
        "every run takes 10 steps",
        "no host sync in a training step",
    }, [r.findings for r in verdict.rules if r.applies and r.decision is not Decision.GO]
    assert {r.asks for r in verdict.rules if not r.applies} >= {"package", "direct"}
    (found,) = (c.metrics for c in cases if c.case.workload == "checks")
    assert found["gate_std"].value > 0.01
    assert found["without_gradient"].value == found["fa2_branches"].value == 0


def test_gates_without_weights_and_parameters_without_a_gradient_are_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    healthy = checks("tiny", 40)
    forward, made = Gate.forward, ByteLM.__init__

    def zeroed(model: ByteLM, *args: Any, **options: Any) -> None:
        made(model, *args, **options)
        nn.init.zeros_(model.blocks[0].get_parameter("attention.gate.out.weight"))

    def detached(gate: Gate, x: Tensor) -> Tensor:
        return forward(gate, x).detach()

    monkeypatch.setattr(ByteLM, "__init__", zeroed)
    monkeypatch.setattr(Gate, "forward", detached)
    broken = checks("tiny", 40)

    assert healthy["gate_std"] > 0.01
    assert healthy["without_gradient"] == healthy["fa2_branches"] == 0
    assert broken["gate_std"] == 0
    gates = 4 * PRESETS["tiny"].n_layers  # two weights and two biases each
    assert broken["without_gradient"] == gates


@pytest.mark.parametrize("factory", [workloads.attention, workloads.train])
def test_a_route_by_name_runs_and_is_seen(factory: Factory) -> None:
    """Of the whole operator and of the model, for the parts that have it."""
    axes: dict[str, Scalar] = {"preset": "tiny", "seq_len": 40, "precision": "fp32"}
    if factory is workloads.attention:
        axes = {"seq_len": 40, "q_heads": 4, "kv_heads": 2, "head_dim_qk": 16, "head_dim_v": 16}
        axes |= {"dtype": "fp32", "pass": "forward"}
    workload = factory("eager", axes)
    workload.run()

    assert workload.effective
    routes = workload.effective()["routes"]
    assert routes == "compress:eager,scores:eager,select:gather,window:eager"


def test_a_route_by_name_accepts_no_flag_for_another() -> None:
    axes: dict[str, Scalar] = {"preset": "tiny", "seq_len": 40, "NSA_USE_FA2": 1}
    axes["precision"] = "fp32"

    with pytest.raises(AxisError, match="eager sets every route"):
        workloads.preflight("train", "eager", axes, {"NSA_USE_FA2": "1"})
