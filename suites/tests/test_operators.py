"""Operators of other projects: declined where they cannot run, and judged by what they claim.

Their packages are no dependency, so their functions are played by PyTorch's attention under a mask.
"""

import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

from harness.measure import accuracy
from harness.measure.failures import Failed
from harness.records import Scalar
from harness.workload import Unsupported
from nsa import reference
from nsa.config import NSAConfig, Positions
from nsa.routes import fa2
from suites import workloads
from suites.axes import AxisError
from suites.operators import flex, nsa_pytorch, protocol
from suites.operators.found import OPERATORS
from suites.operators.protocol import Operator
from suites.tests import small

INSTALL = Path(workloads.__file__).parent / "operators" / "install.sh"
OPERATOR: Mapping[str, Scalar] = {
    **small.OPERATOR,
    "batch": 2,
    "head_dim_v": 16,
    "select_block_size": 16,
}


def attend(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Any:
    """[B, T, H, D], under seen [B, H, T, S] of KV heads or of all query heads."""
    q, k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], 2).transpose(1, 2) for x in (q, k, v))
    mask = seen.repeat_interleave(q.shape[1] // seen.shape[1], 1)
    return F.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2)


def to_blocks(q: Tensor, k: Tensor, v: Tensor, blocks: Tensor, size: int) -> Any:
    """Attention to blocks [B, T, H, n]; -1 is unused."""
    T, M = q.shape[1], -(-q.shape[1] // size)
    used = F.one_hot(blocks.long().masked_fill(blocks < 0, M), M + 1).sum(3)[..., :M].bool()
    tokens = used.repeat_interleave(size, -1)[..., :T].transpose(1, 2)
    return attend(q, k, v, tokens & torch.ones(T, T).tril().bool())


def unpack(x: Tensor, cu: Tensor) -> Any:
    assert cu.tolist() == list(range(0, len(x) + 1, len(x) // (len(cu) - 1)))
    return x.unflatten(0, (len(cu) - 1, -1))


def sized(size: int, n: int, l: int | None = None, d: int | None = None) -> NSAConfig:  # noqa: E741
    return NSAConfig(
        compress_block_size=l or size,
        compress_stride=d or size,
        select_block_size=size,
        num_blocks=n,
    )


class Varlen:
    """native-sparse-attention-triton and its copy, which score by these query heads of a group."""

    def __init__(self, heads: slice) -> None:
        self.heads = heads

    def compressed_attention(self, q: Tensor, k: Tensor, v: Tensor, *given: Any, **_: Any) -> Any:
        l, d, size, n, cu, cu_blocks, T, N = given  # noqa: E741
        q, k, v = unpack(q, cu), unpack(k, cu_blocks), unpack(v, cu_blocks)
        assert (q.shape[1], k.shape[1]) == (T, N)
        at = Positions.of(q, config=sized(size, n or 4, l, d))
        scoring = q.unflatten(2, (k.shape[2], -1))[:, :, :, self.heads].flatten(2, 3)
        best = reference.select_blocks(scoring, k, at).movedim(2, 0).flatten(1, 2)
        return reference.compress_attention(q, k, v, at).flatten(0, 1), best if n else None

    def topk_sparse_attention(self, q: Tensor, k: Tensor, v: Tensor, *given: Any) -> Any:
        blocks, size, cu = given
        q, k, v, chosen = (unpack(x, cu) for x in (q, k, v, blocks.movedim(1, 0)))
        return to_blocks(q, k, v, chosen, size).flatten(0, 1)

    FSA_topk_sparse_attention = topk_sparse_attention


class Fla:
    def mean_pooling(self, x: Tensor, size: int) -> Tensor:
        return reference.compress_blocks(x, lambda b: b.mean(2), config=sized(size, 4))

    def parallel_nsa_compression(self, **_: Any) -> tuple[None, None]:
        return None, None

    def parallel_nsa_topk(self, q: Tensor, k: Tensor, **o: Any) -> Tensor:
        at = Positions.of(q, config=sized(o["block_size"], o["block_counts"]))
        return reference.select_blocks(q, k, at).flip(-1)

    def parallel_nsa(self, q: Tensor, k: Tensor, v: Tensor, **o: Any) -> Any:
        assert q.shape[2] // k.shape[2] >= 16
        size = o["block_size"]
        k_cmp, v_cmp = self.mean_pooling(k, size), self.mean_pooling(v, size)
        blocks = o.get("block_indices")
        chosen = self.parallel_nsa_topk(q, k_cmp, **o) if blocks is None else blocks
        out = to_blocks(q, k, v, chosen, size)
        if blocks is not None:
            return out
        far = reference.compress_attention(q, k_cmp, v_cmp, Positions.of(q, config=sized(size, 4)))
        return out * o["g_slc"][..., None] + far * o["g_cmp"][..., None]


def cudnn(q: Tensor, k: Tensor, v: Tensor, blocks: Tensor, counts: Tensor, **o: Any) -> Any:
    used = blocks.masked_fill(torch.arange(blocks.shape[-1]) >= counts[..., None], -1)
    q, k, v, used = (unpack(x, o["cum_seqlen_q_tensor"]) for x in (q, k, v, used))
    return {"o_tensor": to_blocks(q, k, v, used, o["block_size"]).flatten(0, 1)}


def to_rows(q: Tensor, k: Tensor, v: Tensor, rows: Tensor) -> Any:
    """Each query [Q, H, D] attends to its rows of keys [S, 1, D]; -1 is unused."""
    unused = rows.long().masked_fill(rows < 0, len(k))
    seen = torch.zeros(len(q), len(k) + 1, dtype=torch.bool).scatter_(1, unused, True)
    return attend(q[None], k[None], v[None], seen[None, None, :, :-1])[0]


def beside_own(q: Tensor, k: Tensor, v: Tensor, size: int, *lists: Tensor, **_: Any) -> Any:
    """[B, H, T, D]: the query's own block, and the listed ones, which must be before it."""
    q, k, v, earlier, used = (x.transpose(1, 2) for x in (q, k, v, *lists))
    own = (torch.arange(q.shape[1]) // size)[:, None, None].expand(*earlier.shape[:3], 1)
    assert ((earlier < own) | ~used).all()
    blocks = torch.cat([earlier.masked_fill(~used, -1), own], -1)
    return to_blocks(q, k, v, blocks, size).transpose(1, 2)


def moba(q: Tensor, k: Tensor, v: Tensor, cu: Tensor, T: int, size: int, n: int) -> Any:
    """The query's own block and the n - 1 earlier ones with the best mean key, for each head."""
    q, k, v = (unpack(x, cu) for x in (q, k, v))
    blocks = torch.full((*q.shape[:3], n), -1)
    for t in range(T):
        blocks[:, t, :, 0] = t // size
        if earlier := t // size:
            means = k[:, : earlier * size].unflatten(1, (-1, size)).mean(2)
            top = torch.einsum("bhd,bmhd->bhm", q[:, t], means).topk(min(n - 1, earlier)).indices
            blocks[:, t, :, 1 : 1 + top.shape[-1]] = top
    return to_blocks(q, k, v, blocks, size).flatten(0, 1)


def msa(qp: Tensor, kp: Tensor, q: Tensor, k: Tensor, v: Tensor, tokens: int, _: float) -> Any:
    """The query's own block and the earlier ones that hold the best token of a proxy head."""
    T = qp.shape[2]
    later = torch.ones(T, T).triu(1).bool()
    worth = (qp @ kp.mT).masked_fill(later, -torch.inf).unflatten(-1, (-1, 128)).amax(-1)
    worth[:, :, torch.arange(T), torch.arange(T) // 128] = torch.inf
    top = worth.topk(tokens // 128)
    blocks = top.indices.masked_fill(top.values == -torch.inf, -1).transpose(1, 2)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return to_blocks(q, k, v, blocks, 128).flatten(2, 3), 0


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Fla:
    """The operators' modules, on any device."""
    fla, every, first = Fla(), Varlen(slice(None)), Varlen(slice(0, 1))
    cudnn_nsa = SimpleNamespace(selection_attention_wrapper=cudnn)

    def ffa(q: Tensor, k: Tensor, v: Tensor, **o: Any) -> Any:
        return to_rows(q, k, v, o["index_attn_indices"].flatten(0, 1)), None

    def mla(q: Tensor, kv: Tensor, tokens: Tensor, _: float) -> Any:
        return (to_rows(q, kv, kv[..., :512], tokens[:, 0]),)

    modules: Mapping[str, Any] = {
        "native_sparse_attention.ops": every,
        "nsa_ref.ops": first,
        "fsa.ops": first,
        "fla.ops.nsa": fla,
        "fla.ops.nsa.parallel": fla,
        "cudnn": SimpleNamespace(NSA=cudnn_nsa),
        "magi_attention.functional.flex_flash_attn": SimpleNamespace(flex_flash_attn_func=ffa),
        "flash_mla": SimpleNamespace(flash_mla_sparse_fwd=mla),
        nsa_pytorch.KERNELS: SimpleNamespace(native_sparse_attend=beside_own),
        "moba": SimpleNamespace(moba_attn_varlen=moba),
        "flash_msa": SimpleNamespace(flash_msa_func=msa),
    }
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)

    def flash(q: Tensor, k: Tensor, v: Tensor, *, window_size: int, **_: Any) -> Tensor:
        at = Positions.of(q, config=NSAConfig(window_size=window_size))
        return reference.window_attention(q, k, v, at)

    monkeypatch.setattr(fa2, "flash_attention", flash)
    monkeypatch.setattr(Operator, "_absence", lambda *_: "")
    monkeypatch.setattr(protocol, "version_of", lambda _: "1.0")
    return fla


RANDOM: Mapping[str, Scalar] = {"branch": "select", "selection": "random"}
TOKENS: Mapping[str, Scalar] = {
    **dict.fromkeys(("batch", "kv_heads", "compress_block_size", "compress_stride"), 1),
    "q_heads": 64,
    "head_dim_qk": 576,
    "head_dim_v": 512,
    "dtype": "bf16",
    "select_block_size": 1,
    "num_blocks": 9,
}


@pytest.mark.usefixtures("played")
@pytest.mark.parametrize(
    ("provider", "changes", "definition", "also"),
    [
        ("fla-nsa", {"head_dim_v": 8}, "means", {"dk_sel", "dgates", "selected"}),
        ("fla-nsa", {**RANDOM, "head_dim_v": 8}, "paper", {"dk_sel"}),
        ("nsa-triton", {}, "paper", {"dk_cmp", "dv_win", "dgates", "selected"}),
        ("nsa-triton", {"branch": "compress"}, "paper", {"dv_cmp"}),
        ("nsa-triton", {"branch": "scores", "pass": "forward"}, "paper", {"selected"}),
        ("nsa-triton", RANDOM, "paper", {"dv_sel"}),
        ("fsa", {}, "first-head", {"dk_cmp", "selected"}),
        ("fsa", {**RANDOM, "q_heads": 18}, "paper", {"dv_sel"}),
        ("cudnn-nsa", {**RANDOM, "pass": "forward"}, "paper", set()),
        ("magi-ffa", {**RANDOM, "pass": "forward", "batch": 1}, "paper", set()),
        ("nsa-pytorch", RANDOM, "paper", {"dq", "dk_sel", "dv_sel"}),
        ("flash-mla", {**RANDOM, **TOKENS, "pass": "forward"}, "tokens", set()),
        ("moba", {}, "moba", {"dk_sel", "dv_sel"}),
        ("flash-msa", {"seq_len": 640, "batch": 1, "select_block_size": 128}, "msa", {"dq"}),
    ],
)
def test_an_operator_is_compared_with_what_it_claims(
    provider: str,
    changes: Mapping[str, Scalar],
    definition: str,
    also: set[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda _: "2.6.3")
    workload = workloads.attention(provider, {**OPERATOR, **changes})

    compared = accuracy.compare(workload)

    names = {t.name for t in compared.tensors}
    assert names >= also
    assert ("o" in names) == (changes.get("branch") != "scores")
    assert ("selected" in names) == ("selected" in also)
    assert workload.effective
    seen = workload.effective()
    assert seen["definition"] == definition
    assert float(seen.get("blocks_per_query", 0)) < 4 or definition == "tokens"
    assert ("differs" in seen) == (definition != "paper")
    assert ("padded_q_heads" in seen) == (provider == "fla-nsa")
    assert (seen["version"], seen["install"]) == ("1.0", OPERATORS[provider].install)


def test_an_operator_that_computes_or_selects_something_else_is_caught(
    played: Fla, monkeypatch: pytest.MonkeyPatch
) -> None:
    right, topk = played.parallel_nsa, played.parallel_nsa_topk
    monkeypatch.setattr(played, "parallel_nsa", lambda *a, **o: right(*a, **o) * 1.001)
    with pytest.raises(Failed, match=r"error .* bound"):
        accuracy.compare(workloads.attention("fla-nsa", OPERATOR))

    monkeypatch.setattr(played, "parallel_nsa", right)
    monkeypatch.setattr(played, "parallel_nsa_topk", lambda q, k, **o: topk(-q, k, **o))
    with pytest.raises(Failed, match="selected"):
        accuracy.compare(workloads.attention("fla-nsa", OPERATOR))


@pytest.mark.usefixtures("played")
def test_ours_computes_the_definition_of_another_operator_too() -> None:
    workload = workloads.attention("gather", {**OPERATOR, "definition": "means"})

    names = {t.name for t in accuracy.compare(workload).tensors}

    assert names == {"o", "dq", "dk_sel", "dv_sel", "dgates", "selected"}
    assert workload.effective
    assert workload.effective()["definition"] == "means"


@pytest.mark.parametrize("name", [n for n, o in OPERATORS.items() if o.package != "torch"])
def test_an_absent_operator_says_how_to_get_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    branch = next(iter(OPERATORS[name].parts))

    with pytest.raises(Unsupported, match=re.escape(f"{name}: not installed: ")) as refused:
        workloads.attention(name, {**OPERATOR, "branch": branch})

    assert str(refused.value).endswith(OPERATORS[name].install)


def test_an_operator_refuses_in_its_own_words_and_a_fault_is_none(
    played: Fla, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError

    monkeypatch.setattr(played, "parallel_nsa", refuse)
    with pytest.raises(Unsupported, match="fla-nsa: AssertionError: raise AssertionError"):
        workloads.attention("fla-nsa", OPERATOR).run()

    monkeypatch.setattr(played, "parallel_nsa", lambda *_, **__: torch.ones(2) @ torch.ones(3))
    with pytest.raises(RuntimeError, match="size"):
        workloads.attention("fla-nsa", OPERATOR).run()


@pytest.mark.usefixtures("played")
@pytest.mark.parametrize(
    ("provider", "changes", "message"),
    [
        ("nsa-triton", {"head_dim_v": 8}, "one head size, but these have 16, 8"),
        ("cudnn-nsa", RANDOM, "select has no backward pass"),
        ("infllm-v2", RANDOM, "blocks of 64 keys, but these have 16"),
        ("flash-mla", RANDOM, "takes one KV head of 512 or 576"),
        ("nsa-pytorch", {**RANDOM, "head_dim_qk": 24}, "a power of two from 16 on"),
        ("nsa-pytorch", {**RANDOM, "select_block_size": 256}, "last block of 256 is not full"),
        ("moba", {}, "moba: .*flash"),
    ],
)
def test_what_an_operator_does_not_take_declines(
    provider: str, changes: Mapping[str, Scalar], message: str
) -> None:
    with pytest.raises(Unsupported, match=message):
        workloads.attention(provider, {**OPERATOR, **changes})


@pytest.mark.parametrize(
    ("provider", "axes", "message"),
    [
        ("flex", {}, "flex has no branch 'whole'; only window"),
        ("fla-nsa", {"branch": "window"}, "fla-nsa has no branch 'window'; only whole, select"),
        ("fa2-torch", {"branch": "select"}, "no branch 'select'; only compress, window"),
        ("fla-nas", {}, "did you mean 'fla-nsa'"),
        ("gather", {"selection": "random"}, "needs branch=select"),
        ("gather", {"branch": "select", "selection": "rnadom"}, "did you mean 'random'"),
        ("fsa", {"definition": "paper"}, "fsa computes the definition 'first-head' alone"),
        ("gather", {"definition": "dense"}, "gather computes the definition 'paper' alone"),
        ("gather", {"branch": "select", "definition": "means"}, "the definition 'paper' alone"),
        ("gather", {"definition": "moba"}, "gather computes the definition 'paper' alone"),
    ],
)
def test_what_a_provider_does_not_have_is_refused_before_a_run(
    provider: str, axes: Mapping[str, Scalar], message: str
) -> None:
    with pytest.raises(AxisError, match=message):
        workloads.preflight("attention", provider, {**OPERATOR, **axes}, {})


@pytest.mark.usefixtures("played")
def test_the_readme_adds_an_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    readme = Path(protocol.__file__).parents[1].joinpath("README.md").read_text(encoding="utf-8")
    (code,) = (c for c in re.findall(r"```python\n(.*?)```", readme, re.S) if "OPERATOR" in c)
    module: dict[str, Any] = {}
    exec(code, module)
    mine = SimpleNamespace(block_attention=Varlen(slice(None)).topk_sparse_attention)
    monkeypatch.setitem(sys.modules, "mine", mine)
    monkeypatch.setitem(OPERATORS, "mine", module["OPERATOR"])

    accuracy.compare(workloads.attention("mine", {**OPERATOR, **RANDOM}))

    assert code.count("\n") <= 20


def test_the_version_of_a_checkout_is_its_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.joinpath("aside").mkdir()
    monkeypatch.setitem(sys.modules, "aside", SimpleNamespace(__path__=[str(tmp_path / "aside")]))
    assert protocol.version_of("aside") == "not stated"

    git = ("git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b")
    for words in (("init", "-q"), ("commit", "-q", "--allow-empty", "-m", "first")):
        subprocess.run([*git, *words], check=True)

    assert re.fullmatch("commit [0-9a-f]{12}", protocol.version_of("aside"))
    assert protocol.version_of("torch").startswith(torch.__version__.partition("+")[0])


@pytest.mark.parametrize("group", [1, 3, 16, 17, 32])
def test_padding_a_group_keeps_its_heads(group: int) -> None:
    x = torch.randn(2, 5, 2 * group, 3)

    padded = protocol.pad_group(x, 2, 16)

    assert padded.shape[2] == 2 * (32 if group > 16 else 16)
    assert torch.equal(protocol.unpad_group(padded, 2, 2 * group), x)
    assert protocol.pad_group(x, 2, 1) is x


@pytest.mark.parametrize(
    ("T", "window_size"), [(130, 16), (1024, 512), (1000, 512), (700, 129), (300, 1), (300, 999)]
)
def test_the_window_mask_is_that_of_its_definition(T: int, window_size: int) -> None:
    mask = flex.window_mask(T, window_size, torch.device("cpu"))

    expected = create_block_mask(mask.mask_mod, None, None, T, T, device="cpu")

    assert torch.equal(mask.kv_num_blocks, expected.kv_num_blocks)
    assert mask.full_kv_num_blocks is not None
    assert expected.full_kv_num_blocks is not None
    assert torch.equal(mask.full_kv_num_blocks, expected.full_kv_num_blocks)
    assert torch.equal(mask.to_dense(), expected.to_dense())


def test_the_installer_has_the_versions_for_which_the_files_are_written() -> None:
    script = INSTALL.read_text(encoding="utf-8")
    said = " ".join(operator.install for operator in OPERATORS.values())

    pins = re.findall(r"[\w-]+==[\w.]+", script)
    checkouts = re.findall(r"^checkout (\S+) (\w+)$", script, re.MULTILINE)

    assert pins
    assert checkouts
    assert all(pin in said for pin in pins)
    assert all(f"https://github.com/{name}, commit {commit}" in said for name, commit in checkouts)
