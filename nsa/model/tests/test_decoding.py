"""Device caches: prefill then decode equals one long prefill, token for token, at any length."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from nsa.config import PRESETS, ModelConfig, Routes
from nsa.errors import Unsupported
from nsa.kernels.decode import attend as kernels
from nsa.kernels.decode import scores as decode_scores
from nsa.model.compiled import runs
from nsa.model.decoding import Decoder, generate
from nsa.model.language_model import ByteLM
from nsa.tests.gpu import no_waiting
from nsa.tests.operator_inputs import needs_gpu

pytestmark = pytest.mark.filterwarnings(
    # Triton's interpreter reads loop bounds so.
    "ignore:Conversion of an array with ndim > 0 to a scalar:DeprecationWarning"
)
TINY = replace(PRESETS["tiny"], n_layers=2)
CAPACITY = 40


def model(config: ModelConfig = TINY, dtype: torch.dtype = torch.float64) -> ByteLM:
    lm = ByteLM(config, aux_stats=False, generator=torch.Generator().manual_seed(0))
    return lm.to(dtype).eval()


def text(B: int, T: int) -> Tensor:
    return torch.randint(256, (B, T), generator=torch.Generator().manual_seed(1))


def decode(
    decoder: Decoder, tokens: Tensor, lengths: list[int], steps: int, pad: int | None = None
) -> Tensor:
    """Logits [B, steps + 1, V] after each prompt and each of the next tokens of its row."""
    T = max(lengths) if pad is None else pad
    prompt = torch.full((len(lengths), T), 255)
    for b, n in enumerate(lengths):
        prompt[b, :n] = tokens[b, :n]
    device = decoder.lengths.device
    held = torch.tensor(lengths, device=device)
    logits = [decoder.prefill(prompt.to(device), held)]
    for i in range(steps):
        new = torch.stack([tokens[b, n + i] for b, n in enumerate(lengths)])[:, None]
        logits.append(decoder.step(new.to(device)).clone())
    return torch.cat(logits, 1)


def whole(lm: ByteLM, tokens: Tensor, lengths: list[int], steps: int) -> Tensor:
    """The same from one long prefill."""
    with torch.no_grad():
        logits = lm(tokens.to(lm.head.weight.device), routes=Routes.reference())
    return torch.stack([logits[b, n - 1 : n + steps] for b, n in enumerate(lengths)])


@pytest.mark.parametrize(
    "lengths",
    [
        pytest.param([1, 1], id="one-token"),
        pytest.param([7, 8], id="around-l"),
        pytest.param([3, 21], id="far-apart"),
        pytest.param([16, 15], id="around-the-window"),
    ],
)
@pytest.mark.parametrize("route", ["eager", "reference"])
def test_prefill_then_decode_equals_one_long_prefill(route: str, lengths: list[int]) -> None:
    """Enough steps to cross ends of compressed blocks, select blocks and the window."""
    lm, tokens = model(), text(2, CAPACITY)
    decoder = Decoder(lm, batch=2, capacity=CAPACITY, route=route)
    for cache in decoder.caches:
        for store in (cache.k_cmp, cache.v_cmp, cache.k_sel, cache.v_sel, cache.k_win, cache.v_win):
            store.fill_(torch.nan)

    got = decode(decoder, tokens, lengths, steps=19)

    assert torch.equal(decoder.lengths, torch.tensor(lengths, dtype=torch.int32) + 19)
    torch.testing.assert_close(got, whole(lm, tokens, lengths, 19), rtol=1e-10, atol=1e-12)


def test_a_prompt_may_be_padded_beyond_its_longest() -> None:
    lm, tokens = model(), text(2, CAPACITY)
    decoder = Decoder(lm, batch=2, capacity=CAPACITY)

    got = decode(decoder, tokens, [5, 9], steps=3, pad=30)

    torch.testing.assert_close(got, whole(lm, tokens, [5, 9], 3), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("variant", [{"phi": "mean"}, {"gate": "softmax"}])
def test_variants_of_the_layer(variant: dict[str, str]) -> None:
    config = replace(TINY, nsa=replace(TINY.nsa, **variant))  # type: ignore[arg-type]
    lm, tokens = model(config), text(2, CAPACITY)

    got = decode(Decoder(lm, batch=2, capacity=CAPACITY), tokens, [6, 17], steps=8)

    torch.testing.assert_close(got, whole(lm, tokens, [6, 17], 8), rtol=1e-10, atol=1e-12)


def test_parts_of_a_step_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nsa.model.compiled.BACKEND", "aot_eager")  # traces, but generates no code
    torch._dynamo.reset()
    lm, tokens = model(), text(2, CAPACITY)
    before = runs()

    decoder = Decoder(lm, batch=2, capacity=CAPACITY, compile_parts=True)
    got = decode(decoder, tokens, [6, 17], steps=8)

    parts = 3 * len(lm.blocks) + 3  # enter, append and leave; rows, embedding and head
    torch._dynamo.reset()
    assert runs() - before == 8 * parts
    torch.testing.assert_close(got, whole(lm, tokens, [6, 17], 8), rtol=1e-10, atol=1e-12)


def test_a_window_larger_than_the_capacity() -> None:
    config = replace(TINY, nsa=replace(TINY.nsa, window_size=64))
    lm, tokens = model(config), text(2, CAPACITY)

    got = decode(Decoder(lm, batch=2, capacity=CAPACITY), tokens, [6, 30], steps=10)

    torch.testing.assert_close(got, whole(lm, tokens, [6, 30], 10), rtol=1e-10, atol=1e-12)


def test_a_prefill_starts_over() -> None:
    lm, tokens = model(), text(2, CAPACITY)
    decoder = Decoder(lm, batch=2, capacity=CAPACITY)
    decode(decoder, tokens.flip(0), [30, 20], steps=10)

    again = decode(decoder, tokens, [4, 12], steps=6)

    torch.testing.assert_close(again, whole(lm, tokens, [4, 12], 6), rtol=1e-10, atol=1e-12)


def test_the_kernels_agree_with_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """In float16, whose rounding both share: the same bytes, and logits to its precision."""
    monkeypatch.setattr(kernels, "KEYS", 16)
    monkeypatch.setattr(decode_scores, "CHUNK", 4)
    lm, tokens = model(replace(TINY, n_layers=1), torch.float16), text(2, CAPACITY)
    exact = whole(lm.double(), tokens, [7, 20], 5)
    lm = lm.half()

    def error(route: str) -> float:
        decoder = Decoder(lm, batch=2, capacity=CAPACITY, route=route)
        return float((decode(decoder, tokens, [7, 20], steps=5) - exact).norm())

    assert error("triton") <= 2 * error("eager")


def test_generate_continues_each_prompt_from_its_own_length() -> None:
    lm, tokens = model(), text(2, 12)
    expected = [generate(lm, tokens[b : b + 1, :n], 9) for b, n in enumerate([5, 12])]

    decoder = Decoder(lm, batch=2, capacity=20)
    got = generate(lm, tokens, 9, decoder=decoder, lengths=torch.tensor([5, 12]))

    assert torch.equal(got, torch.cat(expected))


def test_what_a_decoder_cannot_hold_is_refused() -> None:
    lm, tokens = model(), text(2, CAPACITY)
    decoder = Decoder(lm, batch=2, capacity=9)

    with pytest.raises(ValueError, match="call prefill first"):
        decoder.step(tokens[:, :1])
    with pytest.raises(ValueError, match="10 tokens do not fit"):
        decoder.prefill(tokens[:, :10])
    with pytest.raises(ValueError, match="prompt holds 1 sequences; this decoder 2"):
        decoder.prefill(tokens[:1, :5])
    with pytest.raises(ValueError, match=r"lengths is \[3\]"):
        decoder.prefill(tokens[:, :5], torch.ones(3))
    decoder.prefill(tokens[:, :8])
    decoder.step(tokens[:, :1])
    with pytest.raises(ValueError, match="10 tokens do not fit a decoder with capacity=9"):
        decoder.step(tokens[:, :1])
    with pytest.raises(ValueError, match="lengths need a decoder"):
        generate(lm, tokens, 1, lengths=torch.ones(2))


def test_a_decoder_has_every_branch() -> None:
    decoder = Decoder(model(), batch=1, capacity=CAPACITY)

    with pytest.raises(Unsupported, match="a branch is off, but a decode step computes all three"):
        decoder.prefill(torch.zeros(1, 3, dtype=torch.int64), routes=Routes(window="off"))


def test_what_cannot_be_captured_is_refused() -> None:
    with pytest.raises(ValueError, match="needs the route 'triton' on CUDA"):
        Decoder(model(), batch=1, capacity=9, cuda_graph=True)
    with pytest.raises(ValueError, match="no device cache"):
        Decoder(model(replace(TINY, attention="dense")), batch=1, capacity=9)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")  # the compiler's advice
@pytest.mark.parametrize("compile_parts", [False, True], ids=["eager", "compiled"])
def test_a_graph_replays_what_the_step_computes(compile_parts: bool) -> None:
    lm, tokens = model(dtype=torch.bfloat16).cuda(), text(2, CAPACITY)
    plain = Decoder(lm, batch=2, capacity=CAPACITY, route="triton")
    graph = Decoder(
        lm, batch=2, capacity=CAPACITY, route="triton", compile_parts=compile_parts, cuda_graph=True
    )

    expected = decode(plain, tokens, [3, 17], steps=15)
    got = decode(graph, tokens, [3, 17], steps=15)

    assert graph.replays == 15
    if compile_parts:
        torch.testing.assert_close(got, expected, rtol=0, atol=0.05)
    else:
        assert torch.equal(got, expected)


@pytest.mark.gpu
@needs_gpu
def test_a_step_does_not_wait_for_the_device() -> None:
    lm, tokens = model(dtype=torch.bfloat16).cuda(), text(2, CAPACITY).cuda()
    decoder = Decoder(lm, batch=2, capacity=CAPACITY, route="triton")
    decoder.prefill(tokens[:, :9])
    decoder.step(tokens[:, :1])

    with no_waiting():
        decoder.step(tokens[:, :1])
