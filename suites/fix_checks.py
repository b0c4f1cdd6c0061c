"""What a fix validation asks of the model itself: `python -m suites.fix_checks 125m 512`.

It takes one training step by the routes of the NSA_* flags, and prints what it finds.
"""

import json
import sys

from torch import Tensor

from harness.records import Scalar
from nsa.flags import Flags
from nsa.train.loop import Trainer
from suites.training import train_config


def checks(preset: str, seq_len: int) -> dict[str, float]:
    """gate_std: of the gate's weights, in the layer where they vary least.
    fa2_branches: how many of window and compress ran by FlashAttention-2.
    without_gradient: parameters whose gradient is absent or not finite, of one step.
    """
    flags, finite = Flags.from_env(), dict[Tensor, bool]()
    axes: dict[str, Scalar] = {"preset": preset, "seq_len": seq_len, "precision": "bf16"}
    with Trainer(train_config("nsa", axes, flags), flags) as trainer:
        named = dict(trainer.model.named_parameters())
        spread = min(
            float(w.detach().std()) for n, w in named.items() if ".gate." in n and w.ndim > 1
        )

        def note(weight: Tensor) -> None:
            finite[weight] = weight.grad is not None and bool(weight.grad.isfinite().all())

        for weight in named.values():
            weight.register_post_accumulate_grad_hook(note)
        trainer.step()
        return {
            "gate_std": spread,
            "fa2_branches": str(trainer.effective()["routes"]).count("fa2-"),
            "without_gradient": sum(not finite.get(weight) for weight in named.values()),
        }


if __name__ == "__main__":
    found = json.dumps(checks(sys.argv[1], int(sys.argv[2])))
    sys.stdout.write(f"METRICS {found}\n")
