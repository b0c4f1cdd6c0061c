"""The digest of the first output."""

import math

import pytest
import torch
from torch import Tensor

from harness.measure import digest, facts


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_strides_do_not_change_the_digest() -> None:
    x = draw(7, 5, 3)
    turned = x.permute(2, 0, 1).contiguous().permute(1, 2, 0)

    assert not turned.is_contiguous()
    assert digest.of({"o": turned}) == digest.of({"o": x})
    (of_x,) = digest.of({"o": x})
    assert of_x.shape == (7, 5, 3)
    assert of_x.norm == pytest.approx(float(x.double().norm()))


@pytest.mark.parametrize(
    "changed",
    [
        pytest.param(draw(64, seed=1), id="other values"),
        pytest.param(draw(64).flip(0), id="the same values elsewhere"),
        pytest.param(-draw(64), id="sign"),
        pytest.param(draw(64).double(), id="dtype"),
        pytest.param(draw(64).view(8, 8), id="shape"),
        pytest.param(draw(64) + 1e-6 * (torch.arange(64) == 40), id="one element a little"),
    ],
)
def test_any_change_of_the_output_changes_the_digest(changed: Tensor) -> None:
    assert digest.of(changed) != digest.of(draw(64))


def test_a_large_tensor_is_sampled_in_every_column(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digest, "MOST", 64)
    monkeypatch.setattr(digest, "CHUNK", 16)
    x = draw(32, 8)  # every fourth element would be in columns 0 and 4 only

    for column in range(8):
        other = x.clone()
        other[:, column] += 1
        assert digest.of(other) != digest.of(x)


def test_only_finite_tensors_have_a_digest() -> None:
    for bad in (math.nan, math.inf):
        assert digest.of({"o": draw(3), "lse": torch.tensor([1.0, bad])}) == ()
    assert digest.of(None) == digest.of({"o": 3.0}) == ()
    for output in (torch.tensor(3), torch.empty(0, 4), torch.tensor([True]), torch.tensor([1j])):
        assert len(digest.of(output)) == 1


def test_the_peak_excludes_the_memory_of_the_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first step peaks at 100 bytes, its digest at 900, the second step at 70."""
    peaks = [100]
    monkeypatch.setattr(facts, "device_peak_bytes", lambda: peaks[-1])
    monkeypatch.setattr(facts, "start_peak", lambda: peaks.append(70))

    def of(_: object) -> tuple[()]:
        peaks.append(900)
        return ()

    monkeypatch.setattr(digest, "of", of)
    first = digest.FirstOutput()

    first.inspect(None)

    assert first.device_peak_bytes() == 100


@pytest.mark.gpu
def test_a_digest_on_the_gpu_equals_the_cpu_one_and_leaves_the_peak() -> None:
    x = draw(300, 64, 64)
    on_gpu = x.cuda()
    first = digest.FirstOutput()
    facts.start_peak()
    before = first.device_peak_bytes()

    first.inspect({"o": on_gpu})

    (there,), (here,) = first.digest, digest.of({"o": x})
    assert there.norm == pytest.approx(here.norm, rel=1e-12)
    assert there.projection == pytest.approx(here.projection, rel=1e-9)
    assert first.device_peak_bytes() == before
