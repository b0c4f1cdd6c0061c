"""The example of the README runs as it is printed."""

import re
from pathlib import Path

import torch

from nsa.tests.operator_inputs import normal

README = Path(__file__).resolve().parents[1] / "README.md"


def test_the_example_computes_an_output() -> None:
    (example,) = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    names = {
        "q": normal(1, 70, 6, 16, seed=0),
        "k": normal(1, 70, 2, 16, seed=1),
        "v": normal(1, 70, 2, 8, seed=2),
        "gates": normal(1, 70, 6, 3, seed=3).sigmoid(),
    }

    exec(example, names)

    assert names["out"].shape == (1, 70, 6, 8)
    assert torch.isfinite(names["out"]).all()
