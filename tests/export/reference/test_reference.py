"""The readable reference against transformers 5.24, and its three caches against each other."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from bench.speed.deepseek_v3 import deepseek_state
from export.checkpoint.open import Checkpoint
from export.reference.attention import LatentRows, LayerCache, PerHeadRows, Taps, causal_mask
from export.reference.block import ReferenceModel
from export.reference.feedforward import Gate
from graphs.contract.config import ModelConfig
from tests.support.helpers import (
    random_state,
    tiny_checkpoint,
    tiny_config,
    transformers_config,
    transformers_model,
)

RAW = tiny_config(max_position_embeddings=131072)
CONFIG = ModelConfig.from_dict(RAW)
D = CONFIG.hidden_size
STARTS = pytest.mark.parametrize("start", [0, 17, 1000, 100_000])
FORMS = ("expanded", "absorbed", "per head")


@pytest.fixture(scope="module")
def model() -> ReferenceModel:
    reference = ReferenceModel(CONFIG)
    reference.load_state_dict(random_state(CONFIG))
    return reference.requires_grad_(False).eval()


def empty_cache(form: str, batch: int, dtype: torch.dtype = torch.float32) -> LayerCache:
    if form == "per head":
        return PerHeadRows.empty(CONFIG, batch, dtype)
    return LatentRows.empty(CONFIG, batch, dtype, "absorbed" if form == "absorbed" else "expanded")


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """max|a−b| / max|b|."""
    return float((actual - expected).abs().max() / expected.abs().max())


def published_layer(model: ReferenceModel, layer: int) -> Any:
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as published

    block = published.DeepseekV3DecoderLayer(transformers_config(RAW), layer)
    state = deepseek_state(model.block(layer).state_dict(), CONFIG.n_routed_experts)
    block.load_state_dict(state)
    return block.requires_grad_(False).eval()


def published_tables(x: Tensor, positions: Tensor) -> Any:
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as published

    return published.DeepseekV3RotaryEmbedding(transformers_config(RAW))(x, positions)


@STARTS
def test_attention_is_bit_identical_to_transformers(model: ReferenceModel, start: int) -> None:
    """Case 1: from position 17 on a missing mscale² would show."""
    torch.manual_seed(start)
    x, positions = torch.randn(2, 5, D), torch.arange(start, start + 5).expand(2, 5)
    mask = causal_mask(5, 0, x.dtype)
    expected = published_layer(model, 0).self_attn(
        x, position_embeddings=published_tables(x, positions), attention_mask=mask
    )[0]
    tables = model.tables(positions, x.dtype)
    for form in ("expanded", "per head"):
        cache = empty_cache(form, 2)
        assert torch.equal(model.block(0).self_attn(x, *tables, mask, cache), expected)


@STARTS
def test_the_dense_block_is_bit_identical_to_transformers(
    model: ReferenceModel, start: int
) -> None:
    torch.manual_seed(start)
    x, positions = torch.randn(2, 5, D), torch.arange(start, start + 5).expand(2, 5)
    mask = causal_mask(5, 0, x.dtype)
    expected = published_layer(model, 0)(
        x, attention_mask=mask, position_embeddings=published_tables(x, positions)
    )
    tables = model.tables(positions, x.dtype)
    assert torch.equal(model.block(0)(x, *tables, mask, empty_cache("expanded", 2)), expected)


@STARTS
def test_the_moe_block_equals_transformers(model: ReferenceModel, start: int) -> None:
    """The same experts and weights; the sums' order differs."""
    torch.manual_seed(start)
    x, positions = torch.randn(2, 5, D), torch.arange(start, start + 5).expand(2, 5)
    mask, taps = causal_mask(5, 0, x.dtype), Taps()
    published = published_layer(model, 1)
    expected = published(x, attention_mask=mask, position_embeddings=published_tables(x, positions))
    tables = model.tables(positions, x.dtype)
    y = model.block(1)(x, *tables, mask, empty_cache("expanded", 2), taps)
    assert relative_error(y, expected) <= 1e-6
    assert_same_routing(
        (taps["experts"], taps["expert_weights"]), routing(published.mlp.gate, taps["h"])
    )


def routing(published_gate: Any, h: Tensor) -> tuple[Tensor, Tensor]:
    """Experts [M,K] and weights [M,K] by transformers."""
    _, weights, experts = published_gate(h)
    return experts, weights


def assert_same_routing(actual: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    """Experts as sets, and the weight of each, bit for bit."""
    for (experts_a, weights_a), (experts_b, weights_b) in zip(
        zip(*actual, strict=True), zip(*expected, strict=True), strict=True
    ):
        a = dict(zip(experts_a.tolist(), weights_a.tolist(), strict=True))
        b = dict(zip(experts_b.tolist(), weights_b.tolist(), strict=True))
        assert a == pytest.approx(b, rel=1e-6, abs=0)


def test_the_whole_model_equals_transformers(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(tiny_checkpoint(tmp_path))
    torch.manual_seed(0)
    ids = torch.randint(0, 258, (2, 12))
    with torch.no_grad():
        expected = transformers_model(checkpoint)(ids).logits
    assert relative_error(checkpoint.reference()(ids), expected) <= 2e-6


def decode(model: ReferenceModel, form: str, ids: Tensor) -> Tensor:
    """Logits [B,S,vocab] of 4 tokens in one step, then the others one by one."""
    dtype = model.lm_head.weight.dtype
    caches = [empty_cache(form, len(ids), dtype) for _ in range(CONFIG.num_hidden_layers)]
    steps = [ids[:, :4], *(ids[:, i : i + 1] for i in range(4, ids.shape[1]))]
    return torch.cat([model(step, caches) for step in steps], dim=1)


@pytest.mark.parametrize("form", FORMS)
def test_prefill_then_decode_equals_one_prefill(model: ReferenceModel, form: str) -> None:
    """Case 12, for each cache: what a step sees includes what it has just written."""
    torch.manual_seed(0)
    ids = torch.randint(0, 258, (2, 8))
    whole = model(ids)
    assert relative_error(decode(model, form, ids[:, :5]), whole[:, :5]) <= 1e-5
    assert relative_error(decode(model, form, ids), whole) <= 1e-5


def test_absorbed_equals_expanded_in_fp64() -> None:
    """Equal by algebra: in fp64 nothing but 1e-12 of rounding is left."""
    double = ReferenceModel(CONFIG)
    double.load_state_dict(random_state(CONFIG))
    double.requires_grad_(False).double()
    torch.manual_seed(0)
    ids = torch.randint(0, 258, (2, 8))
    expanded = double(ids)
    assert expanded.dtype == torch.float64
    for form in FORMS:
        assert relative_error(decode(double, form, ids), expanded) <= 1e-12


def test_latent_cache_rows_are_normed_and_rotated(model: ReferenceModel) -> None:
    """Rows [B,T,C+R], for a second step behind those of the first."""
    torch.manual_seed(0)
    ids, caches, rows = torch.randint(0, 258, (2, 6)), model.empty_caches(2), []
    for step in (ids[:, :4], ids[:, 4:]):
        taps: list[Taps] = [{} for _ in caches]
        model(step, caches, taps)
        rows.append(torch.cat([taps[1]["c_kv_normed"], taps[1]["k_pe_rotated"]], dim=-1))
    cache = caches[1]
    assert isinstance(cache, LatentRows) and cache.length == 6
    assert torch.equal(cache.rows(), torch.cat(rows, dim=1))


def test_causal_mask_is_aligned_to_the_last_key() -> None:
    """Case 11: of 3 new tokens behind 5 cached, query i sees keys 0 … 5+i."""
    mask = causal_mask(3, 5, torch.float32)
    assert mask.shape == (1, 1, 3, 8)
    seen = [[key for key in range(8) if mask[0, 0, i, key] == 0] for i in range(3)]
    assert seen == [[*range(6)], [*range(7)], [*range(8)]]
    assert torch.isfinite(mask).all() and mask.min() < -1e30


def test_bf16_runs_and_is_near_fp32(model: ReferenceModel) -> None:
    state = {k: v if k.endswith("bias") else v.bfloat16() for k, v in model.state_dict().items()}
    narrow = ReferenceModel(CONFIG)
    narrow.load_state_dict(state, assign=True)
    wide = ReferenceModel(CONFIG)
    wide.load_state_dict(state)  # the same rounded weights
    torch.manual_seed(0)
    ids = torch.randint(0, 258, (2, 8))
    with torch.no_grad():
        expected, logits = wide(ids), narrow(ids)
    assert logits.dtype == torch.bfloat16
    errors = (logits - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert 1e-3 <= errors.median() <= 2e-2  # a token whose rounded routing differs is far off


# Step of the dense block (facts sheet §5), its tap, its shape; T counts cached and new rows.
STEPS = [
    ("1 norm", "x_attn", "B S D"),
    ("3 query down", "c_q", "B S Q"),
    ("4 its norm", "c_q_normed", "B S Q"),
    ("5 latent", "c_kv", "B S C"),
    ("6 its norm", "c_kv_normed", "B S C"),
    ("8 queries", "q_nope", "B H S N"),
    ("10 rope queries", "q_pe", "B H S R"),
    ("11 rotated", "q_pe_rotated", "B H S R"),
    ("12 joined", "query", "B H S N+R"),
    ("14 keys", "k_nope", "B H T N"),
    ("15 rope key", "k_pe", "B S R"),
    ("16 rotated", "k_pe_rotated", "B S R"),
    ("17 joined", "keys", "B H T N+R"),
    ("19 values", "values", "B H T V"),
    ("scores", "scores", "B H S T"),
    ("softmax", "probabilities", "B H S T"),
    ("mix", "mix", "B H S V"),
    ("output projection", "delta_attn", "B S D"),
    ("20 residual", "x_mid", "B S D"),
    ("21 norm", "h", "B S D"),
    ("23 gate", "gate", "B S F"),
    ("24 up", "up", "B S F"),
    ("25 activation", "activated", "B S F"),
    ("26 product", "product", "B S F"),
    ("27 down", "delta_mlp", "B S D"),
    ("28 residual", "y", "B S D"),
]


@pytest.mark.parametrize(("new", "cached"), [(5, 0), (1, 4)], ids=["prefill", "decode"])
def test_every_step_of_the_dense_block_is_a_tap(
    model: ReferenceModel, new: int, cached: int
) -> None:
    sizes = dict(B=2, S=new, T=cached + new, D=160, Q=136, C=56, H=3, N=24, R=16, V=20, F=144)
    x, cache, taps = torch.randn(2, cached + new, D), empty_cache("expanded", 2), Taps()
    for start, stop in ((0, cached), (cached, cached + new)):
        if start == stop:
            continue
        tables = model.tables(torch.arange(start, stop).expand(2, -1), x.dtype)
        mask, taps = causal_mask(stop - start, start, x.dtype), Taps()
        y = model.block(0)(x[:, start:stop], *tables, mask, cache, taps)
    shapes = {
        tap: tuple(sum(sizes[letter] for letter in d.split("+")) for d in dims.split())
        for _, tap, dims in STEPS
    }
    assert {name: tuple(value.shape) for name, value in taps.items()} == shapes
    assert torch.equal(taps["y"], y) and torch.equal(y, taps["x_mid"] + taps["delta_mlp"])
    assert torch.equal(taps["product"], taps["activated"] * taps["up"])
    torch.testing.assert_close(taps["probabilities"].sum(-1), torch.ones(2, 3, new))


def test_taps_change_nothing(model: ReferenceModel) -> None:
    torch.manual_seed(0)
    ids, taps = torch.randint(0, 258, (2, 6)), [Taps() for _ in range(3)]
    assert torch.equal(model(ids, taps=taps), model(ids))
    assert all(torch.equal(a["y"], b["x"]) for a, b in pairwise(taps))
    assert {"gate_logits", "gate_scores", "experts", "expert_weights"} <= taps[1].keys()


def gates(bias: Tensor, **changes: Any) -> tuple[Gate, Any]:
    """The reference's gate and transformers', with the same random weights and this bias."""
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as published

    raw = tiny_config(**changes)
    gate = Gate(ModelConfig.from_dict(raw)).requires_grad_(False)
    weight = torch.randn(gate.weight.shape) / D**0.5
    gate.load_state_dict({"weight": weight, "e_score_correction_bias": bias})
    router = published.DeepseekV3TopkRouter(transformers_config(raw)).requires_grad_(False)
    router.load_state_dict(gate.state_dict())
    return gate, router


@pytest.mark.parametrize("changes", [{}, {"norm_topk_prob": False}, {"n_group": 2}])
def test_the_gate_equals_transformers(changes: dict[str, Any]) -> None:
    torch.manual_seed(0)
    gate, published = gates(torch.linspace(-0.3, 0.3, 8), **changes)
    h = torch.randn(50, D)
    assert_same_routing(gate(h), routing(published, h))


def test_a_masked_group_loses_to_negative_scores() -> None:
    """Case 5: bias −2 puts every score for choosing below 0."""
    torch.manual_seed(0)
    gate, published = gates(torch.full((8,), -2.0), n_group=4, topk_group=2)
    h = torch.randn(200, D)
    experts, weights = gate(h)
    scores = (h @ gate.weight.T).sigmoid().view(200, 4, 2)
    best = scores.sum(-1).topk(2).indices
    assert (experts[..., None] // 2 == best[:, None]).any(-1).all()
    assert_same_routing((experts, weights), routing(published, h))


def test_a_large_bias_does_not_erase_small_scores() -> None:
    """Case 6: (score + bias) − bias would be 0; sigmoid(−18) is 1.52e-8."""
    torch.manual_seed(0)
    gate, _ = gates(torch.tensor([12.0] * 3 + [-12.0] * 5), norm_topk_prob=False)
    gate.weight.fill_(-18 / D)
    gate.weight[:3] *= torch.tensor([[1.0], [1.01], [1.02]])
    experts, weights = gate(torch.ones(1, D))
    assert set(experts[0].tolist()) == {0, 1, 2}
    logits = torch.tensor([-18.0, -18.18, -18.36])
    expected = logits.double().sigmoid() * 2.827
    torch.testing.assert_close(
        weights[0, experts[0].argsort()].double(), expected, rtol=1e-5, atol=0
    )
