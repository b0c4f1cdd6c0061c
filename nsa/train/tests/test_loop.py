"""Training: one step, the progress that the loop reports, and several processes."""

import math
import os
import socket
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.spawn import spawn

from nsa import roofline
from nsa.errors import TrainError
from nsa.flags import Flags, Launch
from nsa.roofline import peak_flops
from nsa.train import checkpoint
from nsa.train.__main__ import NonFiniteError, train
from nsa.train.config import TrainConfig
from nsa.train.data import open_stream, text_corpus, unigram_entropy
from nsa.train.devices import process_group
from nsa.train.loop import Trainer
from nsa.train.tests.training import DENSE, MASKED, TINY, losses, planted, step_on, tiny, weights

pytestmark = pytest.mark.usefixtures("one_thread", "no_flags")


# --- learning ----------------------------------------------------------------------------


@pytest.mark.parametrize("model", [TINY, DENSE], ids=["nsa", "dense"])
def test_training_beats_the_unigram_entropy_on_text_it_has_not_seen(model) -> None:
    """On 16 KiB of it: the files, and so the text, differ from one Python to the next."""
    config = TrainConfig(
        model=model, seq_len=32, batch_size=8, steps=120, lr=2e-2, warmup_steps=5, weight_decay=0.0
    )
    with Trainer(config, MASKED) as trainer:
        *_, last = train(trainer, log_every=120, held_out_batches=16)

    unigram = unigram_entropy(text_corpus("held_out"))
    assert last.held_out_bits_per_byte is not None
    assert last.held_out_bits_per_byte < unigram - 0.5


def test_a_fresh_model_knows_nothing() -> None:
    with Trainer(tiny()) as trainer:
        assert trainer.step().item() / math.log(2) == pytest.approx(8, abs=0.2)


# --- one step ----------------------------------------------------------------------------


def test_the_seed_decides_weights_and_data() -> None:
    def run(seed: int) -> list[float]:
        return losses(tiny(seed=seed), 3)

    assert run(0) == run(0) != run(1)


def test_building_a_trainer_leaves_the_global_generator_alone() -> None:
    before = torch.random.get_rng_state()
    Trainer(tiny()).close()
    assert torch.equal(before, torch.random.get_rng_state())


def test_a_step_predicts_the_next_byte_and_starts_from_no_gradient() -> None:
    with Trainer(tiny(clip=1e9)) as trainer:
        trainer.step()
        batch = next(trainer.stream)
        expected = trainer.model.loss(batch[:, :-1], batch[:, 1:])
        gradients = torch.autograd.grad(expected, list(trainer.model.parameters()))

        loss, gradient = step_on(trainer, [batch])

    assert torch.equal(loss, expected)
    torch.testing.assert_close(gradient, torch.cat([g.flatten() for g in gradients]))


def test_accumulation_equals_one_larger_batch() -> None:
    with (
        Trainer(tiny(batch_size=4, clip=1e9)) as whole,
        Trainer(tiny(batch_size=2, accum=2, clip=1e9)) as halves,
    ):
        batch = next(whole.stream)
        loss, gradient = step_on(whole, [batch])
        mean_loss, accumulated = step_on(halves, batch.chunk(2))

    torch.testing.assert_close(mean_loss, loss)
    torch.testing.assert_close(accumulated, gradient, atol=1e-6, rtol=1e-4)
    assert whole.steps_done == halves.steps_done == 1


def test_checkpointing_changes_neither_loss_nor_weights() -> None:
    with Trainer(tiny()) as plain, Trainer(tiny(checkpointing="on")) as checkpointed:
        for _ in range(2):
            assert plain.step().item() == checkpointed.step().item()
        assert torch.equal(weights(plain), weights(checkpointed))


def test_a_step_follows_the_gradient_and_the_schedule() -> None:
    """Adam's first step moves a parameter by about the learning rate, whatever the gradient."""
    config = tiny(lr=1e-3, warmup_steps=4, weight_decay=0.0)
    with Trainer(config) as trainer:
        before = weights(trainer)
        trainer.step()
        moved = (weights(trainer) - before).abs().max().item()
    assert moved == pytest.approx(config.learning_rate(0), rel=0.01)


def test_the_gradient_is_clipped() -> None:
    with Trainer(tiny(clip=1e-3)) as trainer:
        _, gradient = step_on(trainer, [next(trainer.stream)])
    assert gradient.norm().item() == pytest.approx(1e-3, rel=1e-3)


def test_weights_decay_but_norms_and_biases_do_not() -> None:
    with Trainer(tiny(lr=1e-9, weight_decay=1e8, warmup_steps=0)) as trainer:
        before = {n: p.detach().clone() for n, p in trainer.model.named_parameters()}
        trainer.step()
        for name, p in trainer.model.named_parameters():
            expected = before[name] * (0.9 if p.ndim >= 2 else 1.0)
            torch.testing.assert_close(p.detach(), expected, atol=1e-6, rtol=1e-4, msg=name)


@pytest.mark.parametrize(
    ("step", "rate"),
    [
        pytest.param(0, 0.25, id="warm-up begins above zero"),
        pytest.param(3, 1.0, id="peak"),
        pytest.param(9, 0.55, id="half way down"),
        pytest.param(14, 0.1, id="end"),
        pytest.param(99, 0.1, id="past the end"),
    ],
)
def test_learning_rate(step: int, rate: float) -> None:
    config = tiny(lr=1.0, warmup_steps=4, steps=14, min_lr_ratio=0.1)
    assert config.learning_rate(step) == pytest.approx(rate)


# --- precision ---------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_low_precision_learns_like_float32(precision: str) -> None:
    exact = losses(tiny(), 4)
    assert losses(tiny(precision=precision), 4) == pytest.approx(exact, rel=0.02)


def test_fp16_gradients_are_clipped_and_applied_without_their_scale() -> None:
    with Trainer(tiny()) as exact, Trainer(tiny(precision="fp16")) as scaled:
        batch = next(exact.stream)
        (_, expected), (_, gradient) = step_on(exact, [batch]), step_on(scaled, [batch])
    assert (gradient - expected).norm() < 0.02 * expected.norm()


def test_fp16_skips_a_step_that_overflows_and_lowers_the_scale() -> None:
    config = tiny(precision="fp16", initial_scale=2.0**40)
    with Trainer(config) as trainer:
        before = weights(trainer)
        trainer.step()

        assert torch.equal(weights(trainer), before)
        assert trainer.effective()["loss_scale"] == 2.0**39


# --- the loop ----------------------------------------------------------------------------


def test_progress_comes_first_every_so_often_and_last() -> None:
    with Trainer(tiny(steps=8)) as trainer:
        progress = list(train(trainer, log_every=3))

    assert [p.step for p in progress] == [1, 3, 6, 8]
    assert [p.tokens_per_s is None for p in progress] == [True, False, False, False]
    assert all(p.bits_per_byte == pytest.approx(p.loss / math.log(2)) for p in progress)
    assert all(p.held_out_bits_per_byte is None for p in progress)


def test_throughput_counts_the_interval_and_neither_the_first_step_nor_the_held_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A clock that only training and reading turn: 100 s the first step, 2 s each other."""
    clock = [0.0]
    monkeypatch.setattr("nsa.train.__main__.time.perf_counter", lambda: clock[0])
    with Trainer(tiny(steps=5, accum=2)) as trainer:
        taken = iter([100.0, 2.0, 2.0, 2.0, 2.0])

        def step() -> Tensor:
            clock[0] += next(taken)
            return torch.tensor(1.0)

        def held_out_loss(batches: int) -> Tensor:
            clock[0] += 50.0
            return torch.tensor(float(batches))

        monkeypatch.setattr(trainer, "step", step)
        monkeypatch.setattr(trainer, "held_out_loss", held_out_loss)
        progress = list(train(trainer, log_every=2, held_out_batches=3))

    assert [p.mfu for p in progress] == [None] * 4, "no data sheet of this CPU"
    tokens = 2 * 24 * 2
    assert [p.tokens_per_s for p in progress] == [None, tokens / 2, tokens / 2, tokens / 2]
    assert progress[-1].held_out_bits_per_byte == pytest.approx(3 / math.log(2))


def test_utilisation_is_the_share_of_the_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step in a second on a device that could do ten times as much."""
    clock = [0.0]
    monkeypatch.setattr("nsa.train.__main__.time.perf_counter", lambda: clock[0])
    config = tiny(steps=3, accum=2)
    flops = 2 * roofline.training_flops(TINY, batch=2, tokens=24)
    monkeypatch.setattr(Trainer, "peak_flops", 10.0 * flops)
    with Trainer(config) as trainer:

        def step() -> Tensor:
            clock[0] += 1.0
            return torch.tensor(1.0)

        monkeypatch.setattr(trainer, "step", step)
        progress = list(train(trainer, log_every=1))

    assert [p.mfu for p in progress] == [None, pytest.approx(0.1), pytest.approx(0.1)]
    assert "MFU" not in str(progress[0])
    assert "MFU 10.0 %" in str(progress[1])


@pytest.mark.parametrize(
    ("gpu", "dtype", "peak"),
    [
        ("NVIDIA H200", torch.bfloat16, 989e12),
        ("NVIDIA A100-SXM4-80GB", torch.float16, 312e12),
        ("NVIDIA H200", None, None),
        ("NVIDIA H200 MIG 1g.18gb", torch.bfloat16, None),
    ],
)
def test_peaks_are_those_of_data_sheets(
    gpu: str, dtype: torch.dtype | None, peak: float | None
) -> None:
    assert peak_flops(gpu, dtype) == peak


def test_the_logged_loss_is_the_mean_of_its_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    with Trainer(tiny(steps=3)) as trainer:
        values = iter(torch.tensor([7.0, 1.0, 3.0]))
        monkeypatch.setattr(trainer, "step", lambda: next(values))
        assert [p.loss for p in train(trainer, log_every=3)] == [7.0, 2.0]


def test_every_step_keeps_its_loss_and_gradient_norm_until_the_next_log() -> None:
    def steps(log_every: int) -> list[tuple[float, float]]:
        with Trainer(tiny(steps=5)) as trainer:
            seen = list(train(trainer, log_every=log_every))
        assert [p.gradient_norm for p in seen] == [p.gradient_norms[-1] for p in seen]
        return [one for p in seen for one in zip(p.losses, p.gradient_norms, strict=True)]

    each = steps(1)

    assert steps(4) == each
    assert len(set(each)) == 5
    with Trainer(tiny(steps=5)) as trainer:
        tokens = next(trainer.stream)
        loss = trainer._loss(tokens, trainer.model)
        gradients = torch.autograd.grad(loss, list(trainer.model.parameters()))
        assert each[0][0] == pytest.approx(loss.item())
        norm = torch.cat([g.flatten() for g in gradients]).norm()
        assert each[0][1] == pytest.approx(norm.item(), rel=1e-4)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_stops_at_the_next_log_and_names_its_step(
    monkeypatch: pytest.MonkeyPatch, value: float
) -> None:
    with Trainer(tiny(steps=9)) as trainer:
        values = iter(torch.tensor([1.0, 1.0, value, 1.0]))
        monkeypatch.setattr(trainer, "step", lambda: next(values))
        finite = r"at step 3; it was finite up to step 2\n  Lower --lr\.$"
        with pytest.raises(NonFiniteError, match=finite):
            list(train(trainer, log_every=2))


def test_a_gradient_that_is_not_finite_stops_the_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its step makes the weights NaN, and a checkpoint of them would replace a good one."""
    with Trainer(tiny(steps=9)) as trainer:
        honest = trainer._update

        def update(counts: bool) -> torch.Tensor:
            norm = honest(counts)
            return norm * math.inf if trainer.steps_done == 2 else norm

        monkeypatch.setattr(trainer, "_update", update)
        with pytest.raises(NonFiniteError, match="the gradient norm is inf at step 3"):
            list(train(trainer, log_every=1))


# --- several processes -------------------------------------------------------------------


TWO_BRANCHES = Flags(branches=("select", "window"))
"""Without compress, phi has no gradient, and DDP must not wait for one."""
TOGETHER: dict[str, tuple[Flags, dict[str, Any]]] = {
    "off": (Flags(ddp_bucket_mb=1), {"accum": 2}),
    "fp16": (Flags(ddp_compress="fp16"), {"accum": 2}),
    "branches": (TWO_BRANCHES, {"accum": 2, "checkpointing": "on"}),
    "static": (replace(TWO_BRANCHES, ddp_static_graph=True), {"checkpointing": "0-0"}),
}


def train_in_a_group(rank: int, port: int, folder: Path) -> None:
    """One of two ranks: trains with each of TOGETHER, and files losses, weights and settings."""
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    launch = Launch(rank=rank, world_size=2, local_rank=rank)
    results: dict[str, Any] = {}
    with process_group(launch, "cpu"):
        for name, (flags, settings) in TOGETHER.items():
            with Trainer(tiny(steps=2, **settings), flags, launch) as trainer:
                logged = [p.loss for p in train(trainer, log_every=1)]
                results[name] = (logged, weights(trainer), trainer.effective())
        for _ in range(2):  # a step each, the second resumed from the first
            with Trainer(tiny(steps=2, accum=2), TOGETHER["off"][0], launch) as trainer:
                if (folder / "step-000001").exists():
                    checkpoint.resume(trainer, folder)
                trainer.step()
                checkpoint.save(trainer, folder, keep=2)
                results["resumed"] = weights(trainer)
        with Trainer(tiny(steps=4), launch=launch) as trainer:
            values = iter(torch.tensor([1.0, 1.0, math.nan if rank else 1.0, math.nan]))
            setattr(trainer, "step", lambda: next(values))  # noqa: B010
            with pytest.raises(NonFiniteError) as stopped:
                list(train(trainer, log_every=4))
            results["not finite"] = str(stopped.value)
        with pytest.raises(TrainError, match="cannot accumulate 2 forwards"):
            Trainer(tiny(accum=2), TOGETHER["static"][0], launch)
    torch.save(results, folder / f"{rank}.pt")


def alone(**settings: Any) -> tuple[list[float], Tensor]:
    """Losses and weights of one process on the data of two ranks."""
    config = tiny(steps=2, **{**settings, "accum": 2 * settings.get("accum", 1)})
    with Trainer(config) as trainer:
        streams = [
            open_stream("text", batch_size=2, seq_len=24, rank=rank, world_size=2)
            for rank in (0, 1)
        ]
        trainer.stream = planted(next(stream) for stream in cycle(streams))
        return [p.loss for p in train(trainer, log_every=1)], weights(trainer)


def test_two_ranks_train_as_one_process_on_the_data_of_both(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    spawn(train_in_a_group, args=(port, tmp_path), nprocs=2)
    assert len(list((tmp_path / "step-000001").glob("*.distcp"))) == 2
    ranks = [torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1)]

    for results in ranks:
        assert torch.equal(results["resumed"], results["off"][1])
        assert results["not finite"].startswith("the loss of rank 1 is nan at step 3; ")
    for name, (flags, settings) in TOGETHER.items():
        (logged, mine, observed), (_, theirs, _) = ranks[0][name], ranks[1][name]
        assert torch.equal(mine, theirs)
        assert observed["world_size"] == 2
        assert observed["gc"] == settings.get("checkpointing", "off")
        assert observed["ddp_compress"] == flags.ddp_compress
        assert observed["ddp_bucket_mb"] == (flags.ddp_bucket_mb or 25)
        assert observed["ddp_static_graph"] == ("on" if flags.ddp_static_graph else "off")
        expected, ours = alone(routes=flags.routes(), **settings)
        assert logged == pytest.approx(expected, rel=1e-5)
        error = (mine - ours).norm() / ours.norm()
        least, most = (1e-6, 1e-3) if flags.ddp_compress == "fp16" else (0, 1e-6)
        assert least <= error <= most, name
