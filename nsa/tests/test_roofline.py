"""FLOPs and bytes: pair counts against the masks of the definition, and sums by hand."""

from dataclasses import replace

import pytest

from nsa import roofline
from nsa.config import PRESETS, ROUTES, NSAConfig
from nsa.roofline import Cost, Shape
from nsa.tests.operator_inputs import SMALL

CONFIGS = [
    SMALL,
    NSAConfig(
        compress_block_size=12, compress_stride=2, select_block_size=6, num_blocks=5, window_size=1
    ),
]
SHAPE = Shape(
    batch=2, tokens=10, q_heads=6, kv_heads=2, head_dim_qk=16, head_dim_v=8, element_bytes=2
)


def visible(t: int, config: NSAConfig) -> dict[str, int]:
    """Keys that query t sees in each branch, counted one by one."""
    size, n = config.select_block_size, config.num_blocks
    own = t // size
    blocks = [own, *range(own)][:n]  # which of the earlier ones is of no account
    last_tokens = range(config.compress_block_size - 1, t + 1, config.compress_stride)
    return {
        "dense": sum(1 for s in range(t + 1)),
        "window": sum(1 for s in range(t + 1) if t - s < config.window_size),
        "compress": sum(1 for _ in last_tokens),
        "select": sum(1 for s in range(t + 1) if s // size in blocks),
    }


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize(("q_start", "tokens"), [(0, 1), (0, 16), (0, 200), (37, 5), (150, 1)])
def test_pairs_are_those_of_the_masks(q_start: int, tokens: int, config: NSAConfig) -> None:
    counted = [visible(t, config) for t in range(q_start, q_start + tokens)]

    formulas = {
        "dense": roofline.dense_pairs(tokens, q_start),
        "window": roofline.window_pairs(tokens, config.window_size, q_start),
        "compress": roofline.compress_pairs(tokens, config, q_start),
        "select": roofline.selected_pairs(tokens, config, q_start),
    }

    assert formulas == {name: sum(c[name] for c in counted) for name in formulas}


def test_dense_cost_by_hand() -> None:
    """55 pairs of (16 + 8) multiplications and additions, 6 heads, 2 sequences."""
    q, k, v, out = (2 * 2 * 10 * size for size in (6 * 16, 2 * 16, 2 * 8, 6 * 8))

    assert roofline.dense_cost(SHAPE) == Cost(
        flops=2 * 55 * (16 + 8) * 6 * 2, bytes=q + k + v + out
    )
    assert roofline.dense_cost(SHAPE, backward=True) == Cost(
        flops=7 * 55 * (16 + 8) * 6 * 2, bytes=3 * (q + k + v + out)
    )


@pytest.mark.parametrize("backward", [False, True])
def test_the_whole_is_the_sum_of_its_parts(backward: bool) -> None:
    """FLOPs add up; bytes do not: the whole reads q once and keeps the indices to itself."""
    parts = {
        part: roofline.operator_cost(SHAPE, SMALL, part, backward=backward)
        for part in ("compress", "scores", "select", "window")
    }
    whole = roofline.operator_cost(SHAPE, SMALL, backward=backward)

    assert whole.flops == sum(part.flops for part in parts.values())
    assert whole.bytes < sum(part.bytes for part in parts.values())


def test_scores_cost_no_value_product_and_have_no_backward() -> None:
    compress = roofline.operator_cost(SHAPE, SMALL, "compress")
    scores = roofline.operator_cost(SHAPE, SMALL, "scores")

    assert scores.flops * (16 + 8) == compress.flops * 16
    assert scores == roofline.operator_cost(SHAPE, SMALL, "scores", backward=True)


def test_an_unknown_part_is_an_error() -> None:
    with pytest.raises(ValueError, match="part='selected'"):
        roofline.operator_cost(SHAPE, SMALL, "selected")  # type: ignore[arg-type]


def test_the_users_model_has_78_million_matmul_parameters() -> None:
    """0.47 GFLOP a token by 6N, as measured of it before; attention comes on top."""
    config = PRESETS["125m"]
    N = roofline.matmul_parameters(config)
    step = roofline.training_flops(config, batch=2, tokens=2048)

    assert N == 12 * (2 * 768 * 768 + 6 * 768 * 128 + 3 * 768 * 2048) + 768 * 256
    assert pytest.approx(6 * N, rel=0.01) == 0.47e9
    assert step > 6 * N * 2 * 2048
    assert step == 2 * roofline.training_flops(config, batch=1, tokens=2048)


def test_training_counts_each_layer_of_attention() -> None:
    config = PRESETS["tiny"]
    shape = Shape(
        batch=1, tokens=64, q_heads=4, kv_heads=2, head_dim_qk=16, head_dim_v=8, element_bytes=1
    )
    layer = roofline.operator_cost(shape, config.nsa, backward=True).flops

    some = [
        roofline.training_flops(config, batch=1, tokens=64, parts=parts)
        for parts in (ROUTES, ["compress"], ["scores", "select"], ["window"], [])
    ]
    assert some[0] - some[-1] == sum(some[1:-1]) - 3 * some[-1]
    attention = some[0] - 6 * 64 * (roofline.matmul_parameters(config))

    assert attention == config.n_layers * layer


def test_a_forward_pass_is_that_of_its_parts_one_token_at_a_time() -> None:
    config = PRESETS["tiny"]

    whole = roofline.forward_flops(config, batch=1, tokens=40)

    assert whole == sum(
        roofline.forward_flops(config, batch=1, tokens=1, q_start=t) for t in range(40)
    )


@pytest.mark.parametrize("context", [1, 5, 100])
def test_a_decode_step_reads_only_the_keys_it_sees(context: int) -> None:
    shape = replace(SHAPE, tokens=1, q_start=context - 1)
    seen = visible(context - 1, SMALL)
    kv_bytes = 2 * (16 + 8) * 2  # of one key and value, all KV heads, 2 bytes an element

    cost = roofline.decode_cost(shape, SMALL)

    keys = seen["compress"] + seen["select"] + seen["window"]
    assert cost.bytes == 2 * (keys * kv_bytes + 6 * (16 + 8 + 3) * 2)
    assert cost.flops == roofline.operator_cost(shape, SMALL).flops
    with pytest.raises(ValueError, match="one query per sequence"):
        roofline.decode_cost(SHAPE, SMALL)
