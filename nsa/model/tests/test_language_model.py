"""The language model: what it predicts, forgets, recomputes and generates."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.utils import counters

from nsa.config import PRESETS, ModelConfig, Routes
from nsa.model.attention import NSAttention
from nsa.model.cache import Heads
from nsa.model.compiled import runs
from nsa.model.decoding import generate
from nsa.model.language_model import Block, ByteLM, cross_entropy, parse_checkpointing
from nsa.tests.gpu import no_waiting
from nsa.train.tests.training import QUICK_COMPILER, TORCH_LOOKS_AT_GRAD

TINY = PRESETS["tiny"]
DENSE = replace(TINY, attention="dense")
BOTH = pytest.mark.parametrize("config", [TINY, DENSE], ids=["nsa", "dense"])
T = 37


@pytest.fixture(autouse=True)
def _seed() -> Iterator[None]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


def some_bytes(batch_size: int = 2, length: int = T) -> Tensor:
    return torch.randint(256, (batch_size, length))


def sharp(config: ModelConfig) -> ByteLM:
    """A model whose likeliest byte depends on its context; a fresh one hardly has an opinion."""
    model = ByteLM(config).double()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


@BOTH
def test_logits_do_not_see_the_future(config: ModelConfig) -> None:
    model, tokens = sharp(config), some_bytes()
    changed = torch.cat([tokens[:, :20], some_bytes()[:, 20:]], 1)

    before, after = model(tokens), model(changed)

    assert before.shape == (2, T, 256)
    assert torch.equal(before[:, :20], after[:, :20])
    assert not torch.allclose(before[:, 20:], after[:, 20:])


@BOTH
def test_the_model_is_llama_around_its_attention(config: ModelConfig) -> None:
    """Pre-norm, SwiGLU and the untied head, written out from the papers."""
    model, tokens = sharp(config), some_bytes()
    x = model.embedding.weight[tokens]

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + config.norm_eps).sqrt() * weight

    for block in model.blocks:
        assert isinstance(block, Block)
        x = x + block.attention(norm(x, block.attention_norm.weight), routes=Routes())
        y = norm(x, block.ffn_norm.weight)
        gate, up = block.ffn.gate_up.weight.split(config.ffn_dim)
        x = x + (F.silu(y @ gate.T) * (y @ up.T)) @ block.ffn.down.weight.T
    logits = norm(x, model.norm.weight) @ model.head.weight.T

    torch.testing.assert_close(model(tokens), logits)


@pytest.mark.parametrize("prefill", ["batched", "token"])
def test_routes_and_prefill_reach_each_layer(prefill: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    attend = NSAttention.attend

    def spy(self: NSAttention, heads: Heads, **options: object) -> Tensor:
        seen.append((options["routes"], options["prefill"]))
        return attend(self, heads, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(NSAttention, "attend", spy)

    ByteLM(TINY)(some_bytes(), routes=Routes(select="masked"), prefill=prefill)

    assert seen == [(Routes(select="masked"), prefill)] * TINY.n_layers


@BOTH
def test_packed_documents_are_predicted_alone(config: ModelConfig) -> None:
    model, tokens = sharp(config), some_bytes(1)
    bounds = torch.tensor([0, 9, 10, T], dtype=torch.int32)

    packed = model(tokens, cu_seqlens=bounds)

    torch.testing.assert_close(
        packed, torch.cat([model(d) for d in tokens.split([9, 1, 27], 1)], 1)
    )


# --- loss --------------------------------------------------------------------------------


def test_a_fresh_model_knows_nothing() -> None:
    """Cross-entropy of the uniform guess is log(256) nats, 8 bits per byte."""
    loss = ByteLM(TINY).loss(some_bytes(), some_bytes())

    assert loss.item() == pytest.approx(torch.tensor(256.0).log().item(), abs=0.05)


def test_loss_per_token_averages_to_the_loss() -> None:
    model, tokens, targets = sharp(TINY), some_bytes(), some_bytes()

    each = model.loss(tokens, targets, reduction="none")

    chosen = model(tokens).softmax(-1).gather(-1, targets[..., None]).squeeze(-1)
    torch.testing.assert_close(each, -chosen.log())
    torch.testing.assert_close(model.loss(tokens, targets), each.mean())


def test_loss_is_summed_in_float32() -> None:
    logits, targets = torch.randn(2, T, 256), some_bytes()

    low = cross_entropy(logits.bfloat16(), targets)

    assert low.dtype == torch.float32
    torch.testing.assert_close(low, cross_entropy(logits.bfloat16().float(), targets))


# --- checkpointing -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "layers"),
    [("off", set()), ("on", set(range(12))), ("2-7", set(range(2, 8))), ("11-11", {11})],
)
def test_checkpointing_is_off_on_or_a_range(text: str, layers: set[int]) -> None:
    assert parse_checkpointing(text, 12) == layers


@pytest.mark.parametrize("text", ["", "yes", "7-2", "0-12", "3", "-1-2", "2-7,9-9"])
def test_other_checkpointing_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"is neither 'off', 'on' nor a range .* '0-11'"):
        parse_checkpointing(text, 12)


@BOTH
@pytest.mark.parametrize("text", ["on", "1-1"])
def test_checkpointing_recomputes_its_layers_and_changes_no_gradient(
    config: ModelConfig, text: str
) -> None:
    model, tokens, targets = sharp(config), some_bytes(), some_bytes()
    layers = parse_checkpointing(text, config.n_layers)
    calls = [0] * config.n_layers
    for i, block in enumerate(model.blocks):

        def count(_block: object, _args: object, i: int = i) -> None:
            calls[i] += 1

        block.register_forward_pre_hook(count)

    def gradients(**options: object) -> list[Tensor]:
        model.zero_grad()
        model.loss(tokens, targets, **options).backward()  # type: ignore[arg-type]
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    plain = gradients()
    assert calls == [1] * config.n_layers

    recomputed = gradients(checkpointing=layers)

    assert calls == [3 if i in layers else 2 for i in range(config.n_layers)]
    assert len(plain) == len(recomputed) == len(list(model.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(plain, recomputed, strict=True))


# --- compiled ----------------------------------------------------------------------------


def trained(model: ByteLM, tokens: Tensor, targets: Tensor, **options: object) -> list[Tensor]:
    """The loss and every gradient."""
    model.zero_grad()
    loss = model.loss(tokens, targets, **options)  # type: ignore[arg-type]
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


@QUICK_COMPILER
@TORCH_LOOKS_AT_GRAD
@BOTH
def test_compiled_parts_compute_the_same(config: ModelConfig) -> None:
    model, tokens, targets = sharp(config), some_bytes(), some_bytes()
    expected = trained(model, tokens, targets)

    for layers in ((), (1,)):
        found = trained(model, tokens, targets, compile_parts=True, checkpointing=layers)
        torch.testing.assert_close(found, expected)


@QUICK_COMPILER
@TORCH_LOOKS_AT_GRAD
@BOTH
def test_layers_share_what_was_compiled(config: ModelConfig) -> None:
    """Embedding, both sides of attention, phi, head and loss are compiled once, not per layer."""
    tokens, targets = some_bytes(), some_bytes()
    model = ByteLM(replace(config, n_layers=3))
    parts = 5 if config.attention == "dense" else 6
    in_a_layer = parts - 3
    graphs = counters["stats"]
    graphs.clear()

    for _ in range(2):
        before = runs()
        trained(model, tokens, targets, compile_parts=True)
        assert runs() - before == 3 + 3 * in_a_layer

    assert graphs["unique_graphs"] == parts


@QUICK_COMPILER
@TORCH_LOOKS_AT_GRAD
def test_a_part_that_does_not_compile_whole_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def read_back(self: ByteLM, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        logits: Tensor = self.head(x)
        return logits

    monkeypatch.setattr(ByteLM, "predict", read_back)

    with pytest.raises(torch._dynamo.exc.TorchDynamoException):
        ByteLM(TINY)(some_bytes(), compile_parts=True)


def test_compiled_parts_take_neither_documents_nor_caches() -> None:
    model, tokens = ByteLM(TINY), some_bytes(1)
    bounds = torch.tensor([0, T], dtype=torch.int32)

    for option in ({"cu_seqlens": bounds}, {"caches": model.new_caches(T)}):
        with pytest.raises(ValueError, match="compile_parts takes neither"):
            model(tokens, compile_parts=True, **option)


# --- weights -----------------------------------------------------------------------------


def test_weights_come_from_the_generator() -> None:
    def weights(seed: int) -> Tensor:
        model = ByteLM(TINY, generator=torch.Generator().manual_seed(seed))
        return torch.nn.utils.parameters_to_vector(model.parameters())

    assert torch.equal(weights(1), weights(1))
    assert not torch.equal(weights(1), weights(2))


def test_weights_come_from_the_global_seed_without_one() -> None:
    models = [(torch.manual_seed(3), ByteLM(TINY))[1] for _ in range(2)]

    first, second = (torch.nn.utils.parameters_to_vector(m.parameters()) for m in models)
    assert torch.equal(first, second)


def test_initial_scales() -> None:
    config = replace(TINY, dim=256, n_layers=8)
    block = ByteLM(config).blocks[3]
    assert isinstance(block, Block)

    assert block.attention.qkv.weight.std().item() == pytest.approx(0.02, rel=0.03)
    for added in (block.attention.out, block.ffn.down):
        assert added.weight.std().item() == pytest.approx(0.02 / 4, rel=0.03)


def test_branches_begin_with_equal_weight() -> None:
    model = ByteLM(TINY)
    model(some_bytes())

    for block in model.blocks:
        assert isinstance(block.attention, NSAttention)
        means = block.attention.aux_stats()["gate_mean"]
        torch.testing.assert_close(means, torch.full((3,), 0.5), atol=0.01, rtol=0)


def test_compressed_keys_begin_at_the_scale_of_keys() -> None:
    """phi neither mutes nor shouts down its branch."""
    model = ByteLM(PRESETS["small"])
    attention = model.blocks[0].attention
    assert isinstance(attention, NSAttention)
    blocks = torch.randn(4, 64, 16, 2, 32)

    ratio = attention.phi_k(blocks).std() / blocks.std()

    assert 0.2 < ratio < 2


def test_parameters_of_the_users_model() -> None:
    """Counted by hand: embedding and head, then per layer projections, phi, gate, SwiGLU, norms."""
    with torch.device("meta"):
        model = ByteLM(PRESETS["125m"])
    attention = 768 * (12 * 64 + 3 * 2 * (64 + 64)) + 12 * 64 * 768
    phi = 2 * (32 * 64 + (32 * 64 * 64 + 64) + (64 * 64 + 64))
    gate = 768 * 64 + 64 + 64 * 36 + 36
    layer = attention + phi + gate + 3 * 768 * 2048 + 2 * 768

    assert model.num_parameters == 2 * 256 * 768 + 12 * layer + 768


# --- generation --------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("length", [1, 7, 8, 20])
def test_greedy_bytes_are_those_of_the_full_forward(config: ModelConfig, length: int) -> None:
    model, prompt = sharp(config), some_bytes(2, length)
    tokens = prompt
    for _ in range(25):
        tokens = torch.cat([tokens, model(tokens)[:, -1:].argmax(-1)], 1)

    new = generate(model, prompt, 25)

    assert torch.equal(new, tokens[:, length:])
    assert new.unique().numel() > 5  # the model has something to say


def test_token_by_token_prompts_generate_the_same() -> None:
    model, prompt = sharp(TINY), some_bytes(2, 20)

    assert torch.equal(
        generate(model, prompt, 12, prefill="token", routes=Routes.reference()),
        generate(model, prompt, 12),
    )


def test_sampled_bytes_follow_the_softmax() -> None:
    """The mean logit of many drawn bytes is the softmax's, to four standard errors."""
    model, n, temperature = sharp(TINY), 1000, 0.5
    prompt = some_bytes(1, 3)
    logits = model(prompt)[0, -1]
    weights = (logits / temperature).softmax(-1)
    mean = weights @ logits
    error = ((weights @ logits.square() - mean**2) / n).sqrt()

    drawn = generate(
        model,
        prompt.expand(n, -1),
        1,
        temperature=temperature,
        generator=torch.Generator().manual_seed(1),
    )

    assert (logits[drawn.flatten()].mean() - mean).abs() < 4 * error


def test_sampling_repeats_by_its_generator() -> None:
    model, prompt = sharp(TINY), some_bytes(2, 9)
    draws = [
        generate(model, prompt, 20, temperature=2.0, generator=torch.Generator().manual_seed(seed))
        for seed in (1, 1, 2)
    ]

    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])
    with pytest.raises(ValueError, match=r"temperature=-1\.0 must not be negative"):
        generate(model, prompt, 1, temperature=-1.0)


# --- on a GPU ----------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@BOTH
@pytest.mark.parametrize("checkpointing", ["off", "on"])
def test_a_training_step_never_waits_for_the_gpu(config: ModelConfig, checkpointing: str) -> None:
    model = ByteLM(config).cuda()
    tokens, targets = some_bytes().cuda(), some_bytes().cuda()
    layers = parse_checkpointing(checkpointing, config.n_layers)

    def forward_and_backward() -> None:
        with torch.autocast("cuda", torch.bfloat16):
            loss = model.loss(tokens, targets, checkpointing=layers)
        loss.backward()

    forward_and_backward()  # makes handles and workspaces, which may wait
    with no_waiting():
        forward_and_backward()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@BOTH
def test_gpu_and_cpu_predict_the_same(config: ModelConfig) -> None:
    model, tokens = sharp(config), some_bytes()
    expected = model(tokens)

    model = model.cuda()

    torch.testing.assert_close(model(tokens.cuda()).cpu(), expected)
    prompt = tokens[:, :9]
    generated = generate(model, prompt.cuda(), 20).cpu()
    assert torch.equal(generated, generate(model.cpu(), prompt, 20))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@TORCH_LOOKS_AT_GRAD
@BOTH
def test_compiled_parts_compute_the_same_on_a_gpu(config: ModelConfig) -> None:
    """By the compiler that training uses, in float32: bfloat16 rounds elsewhere when fused."""
    model = ByteLM(config).cuda()
    tokens, targets = some_bytes().cuda(), some_bytes().cuda()
    expected = trained(model, tokens, targets)

    found = trained(model, tokens, targets, compile_parts=True)

    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5)
