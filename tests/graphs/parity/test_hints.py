"""Faults planted one at a time in a build: the report names the first bad tap and the cause.

What is planted is what the field has shipped; a random perturbation, of whatever tensor, gets no
hint.
"""

import functools
import hashlib
import json
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch

import runtime.parity
import runtime.step.chain
from export.checkpoint.open import Checkpoint
from export.packing.layer_weights import half_layout
from export.reference.rope import inverse_frequencies, rope_tables
from export.synthetic.write_checkpoint import write_checkpoint
from graphs.contract.config import ModelConfig, load_config
from graphs.contract.spec import ROPE_FILE, BuildSpec, GraphName, layer_file
from graphs.contract.tensorfile import Array, TensorFile, write_arrays
from graphs.ops import MASKED
from graphs.parity.compare import ReplayCase
from graphs.parity.findings import Fragment, first_bad
from graphs.parity.graphs import graph_parity
from graphs.parity.hints.masks import mask_hint, position_hint
from graphs.parity.hints.rope import inverse_frequencies as float64_frequencies
from runtime.load import load_chain
from runtime.parity import runtime_parity
from tests.support.builds import Build
from tests.support.graph_surgery import change_body
from tests.support.helpers import random_state, tiny_config
from tests.support.shared_builds import shared_build

# wide enough for square grids of 2×2 block scales
CONFIG = tiny_config(
    n_group=4,
    topk_group=2,
    num_attention_heads=4,
    num_key_value_heads=4,
    v_head_dim=36,
    kv_lora_rank=136,
    moe_intermediate_size=144,
)
EDIT = Callable[[Any], None]


def strong_state(config: ModelConfig) -> dict[str, torch.Tensor]:
    """Random weights on which every planted fault shows.

    Biased scores are negative, as in the field's case of a group mask of 0; latents are so small
    that an epsilon of 1e-5 is not one of 1e-6; block scales differ by powers of two.
    """
    state = random_state(config)
    for name, tensor in state.items():
        if name.endswith("e_score_correction_bias"):
            tensor -= 2
        if name.endswith(("q_a_proj.weight", "kv_a_proj_with_mqa.weight")):
            tensor *= 0.01
        if tensor.ndim == 2 and "_proj" in name:
            tensor[:128, 128:] *= 8
    return state


@pytest.fixture(scope="module")
def builds(tmp_path_factory: pytest.TempPathFactory) -> Build:
    folder = tmp_path_factory.mktemp("hints")
    write_checkpoint(folder, CONFIG, strong_state(ModelConfig.from_dict(CONFIG)))
    checkpoint = Checkpoint.open(folder)
    return functools.cache(lambda precision: shared_build(checkpoint, precision))


@pytest.fixture(params=["fp32", pytest.param("fp8", marks=pytest.mark.slow)])
def build(request: pytest.FixtureRequest, builds: Build, tmp_path: Path) -> Path:
    """A copy of the tiny build that the test may damage."""
    return Path(shutil.copytree(builds(request.param), tmp_path / request.param))


def edit_graph(build: Path, name: GraphName, edit: EDIT) -> None:
    path = build / "onnx" / f"{name}.onnx"
    model = onnx.load(path)
    edit(model)
    path.write_bytes(model.SerializeToString(deterministic=True))
    spec = json.loads((build / "spec.json").read_text())
    spec["graphs"][name]["sha256"] = hashlib.sha256(path.read_bytes()).hexdigest()
    (build / "spec.json").write_text(json.dumps(spec))


def edit_file(path: Path, edit: Callable[[dict[str, Array]], None]) -> None:
    file = TensorFile.open(path)
    tensors = {name: np.array(array) for name, array in file.tensors.items()}
    edit(tensors)
    metadata = {k: v for k, v in file.metadata.items() if k != "sha256"}
    path.unlink()
    write_arrays(path, tensors, metadata)


def node_of(model: onnx.ModelProto, kind: str, reading: str = "") -> onnx.NodeProto:
    nodes: Iterable[onnx.NodeProto] = model.graph.node
    return next(n for n in nodes if n.op_type == kind and (not reading or reading in n.input))


def set_attribute(node: onnx.NodeProto, name: str, value: Any) -> None:
    kept = [a for a in node.attribute if a.name != name]
    del node.attribute[:]
    node.attribute.extend([*kept, onnx.helper.make_attribute(name, value)])


def outcome(fragment: Fragment) -> tuple[str | None, set[str]]:
    """The first bad tap, and the causes named."""
    bad = first_bad(fragment.rows)
    return None if bad is None else bad.tap, {hint.cause for hint in fragment.hints}


def test_the_build_as_it_is_passes_without_a_hint(build: Path) -> None:
    fragment = graph_parity(build, threads=1)
    assert outcome(fragment) == (None, set()) and fragment.passed
    assert {r.mode for r in fragment.rows if r.graph == "experts"} == {"prefill", "chunk", "decode"}


def test_mscale_squared_missing(build: Path) -> None:
    scale = ModelConfig.from_dict(CONFIG).qk_head_dim ** -0.5
    for name in ("dense", "moe"):
        edit_graph(
            build, name, lambda m: set_attribute(node_of(m, "LatentAttention"), "scale", scale)
        )
    fragment = graph_parity(build, threads=1)
    assert outcome(fragment) == ("scores", {"mscale2_missing"})
    bad = first_bad(fragment.rows)
    assert bad is not None and bad.case == "dense_000_prefill" and bad.positions
    assert "1.81326" in fragment.hints[0].text


@pytest.mark.parametrize("twice", [False, True])
def test_rope_rows_of_a_weight_not_in_half_layout(build: Path, twice: bool) -> None:
    c = ModelConfig.from_dict(CONFIG)
    order = half_layout(c.qk_rope_head_dim).numpy()
    order = order if twice else np.argsort(order)
    assert c.q_lora_rank is not None
    rows = np.arange(c.q_lora_rank + c.cache_width)
    rows[-c.qk_rope_head_dim :] = rows[-c.qk_rope_head_dim :][order]

    def edit(tensors: dict[str, Array]) -> None:
        weight, scale = "attention.qkv_a.weight", "attention.qkv_a.scale"
        if scale in tensors:
            tensors[scale] = tensors[scale][rows]
            tensors[weight] = np.ascontiguousarray(tensors[weight][rows])
        else:
            tensors[weight] = tensors[weight][rows]

    edit_file(build / layer_file(0), edit)
    fragment = graph_parity(build, threads=1)
    assert outcome(fragment) == ("k_pe", {"rope_layout_swapped"})
    assert ("twice" in fragment.hints[0].text) == twice


def test_interleaved_rotation_of_half_layout(build: Path) -> None:
    def edit(model: onnx.ModelProto) -> None:
        function = next(f for f in model.functions if f.name == "RoPE")
        node = next(n for n in function.node if n.op_type == "RotaryEmbedding")
        set_attribute(node, "interleaved", 1)

    edit_graph(build, "dense", edit)
    assert outcome(graph_parity(build, threads=1)) == ("q_pe_rotated", {"rope_layout_swapped"})


@pytest.mark.parametrize(
    "change, cause, words",
    [
        ({"rope_theta": 10_000.0}, "rope_theta", "rope_theta 10000, the config has 50000"),
        ({"rope_theta": 12_345.0}, "rope_frequencies", "frequencies are off from pair 1 on"),
        ({"factor": 1.0}, "yarn_ramp", "no YaRN"),
        ({"beta_fast": 32.0}, "yarn_ramp", "beta_fast 32 and beta_slow 1"),
        ({"factor": 64.0, "mscale": 0.0, "mscale_all_dim": 0.0}, "yarn_factor", "factor 64"),
    ],
)
def test_rope_tables_of_another_config(
    build: Path, change: dict[str, float], cause: str, words: str
) -> None:
    raw = {**CONFIG, "rope_theta": change.get("rope_theta", CONFIG["rope_theta"])}
    raw["rope_scaling"] = {**CONFIG["rope_scaling"], **change}
    raw["rope_scaling"].pop("rope_theta", None)
    cos, sin = rope_tables(ModelConfig.from_dict(raw))
    edit_file(build / ROPE_FILE, lambda t: t.update(cos=cos.numpy(), sin=sin.numpy()))
    fragment = graph_parity(build, threads=1)
    assert outcome(fragment) == ("q_pe_rotated", {cause})
    assert words in fragment.hints[0].text


@pytest.mark.parametrize("preset", ["k2", "k2.5", "deepseek-v3", "moonlight", "deepseek-v2-lite"])
def test_the_hints_own_frequencies_are_the_exporters(preset: str) -> None:
    config = load_config(preset)
    width = config.qk_rope_head_dim
    own = float64_frequencies(config.rope, width)
    np.testing.assert_allclose(own, inverse_frequencies(config.rope, width).numpy(), rtol=1e-5)


def skip_norm(model: onnx.ModelProto, weight: str) -> None:
    node = node_of(model, "RMSNormalization", weight)
    node.op_type = "Identity"
    del node.input[1:]
    del node.attribute[:]


@pytest.mark.parametrize("norm, tap", [("q_norm", "c_q_normed"), ("kv_norm", "new")])
def test_a_latent_norm_skipped(build: Path, norm: str, tap: str) -> None:
    weight = f"attention.{norm}.weight"

    def edit(model: onnx.ModelProto) -> None:
        skip_norm(model, weight)
        # an input that nothing reads would not be in the session
        node = model.graph.node.add(op_type="Identity", name="kept")
        node.input.append(weight)
        node.output.append("kept")
        model.graph.output.add(name="kept").type.CopyFrom(
            next(i for i in model.graph.input if i.name == weight).type
        )

    edit_graph(build, "dense", edit)
    assert outcome(graph_parity(build, threads=1)) == (tap, {"norm_skipped"})


@pytest.mark.parametrize("norm, tap", [("q_norm", "c_q_normed"), ("kv_norm", "new")])
def test_a_latent_norm_with_the_blocks_epsilon(build: Path, norm: str, tap: str) -> None:
    def edit(model: onnx.ModelProto) -> None:
        node = node_of(model, "RMSNormalization", f"attention.{norm}.weight")
        set_attribute(node, "epsilon", CONFIG["rms_norm_eps"])

    edit_graph(build, "moe", edit)
    fragment = graph_parity(build, threads=1)
    assert outcome(fragment) == (tap, {"norm_eps"})
    assert "1e-05 in place of 1e-06" in fragment.hints[0].text


@pytest.mark.parametrize(
    "layer, module, tap",
    [
        (0, "attention.qkv_a", "c_q"),
        (0, "attention.q_b", "q_nope"),
        (0, "mlp.gate_up", "gate"),
        (1, "shared.down", "shared"),
        (1, "experts.E.gate_up", "slots.0.gate"),
    ],
)
def test_a_scale_grid_transposed(build: Path, layer: int, module: str, tap: str) -> None:
    """As repacked from the grid turned round: codes at other scales, or values multiplied."""
    spec = BuildSpec.load(build)
    graph = (
        "experts_001_prefill_0"
        if "E" in module
        else f"{spec.config.block_type(layer)}_{layer:03d}_prefill"
    )
    golden = TensorFile.open(build / "golden" / f"{graph}.safetensors")
    key = f"regrid.{module}"
    if "E" in module:
        module, key = (
            module.replace("E", str(int(golden["slot_experts"][0]))),
            "regrid.slots.0.gate_up",
        )
    ratio = np.repeat(golden[key], 128, axis=1)

    def edit(tensors: dict[str, Array]) -> None:
        weight, scale = f"{module}.weight", f"{module}.scale"
        if scale not in tensors:
            tensors[weight] = tensors[weight] / ratio[:, : tensors[weight].shape[1]]
            return
        wide = tensors[weight].astype(np.float32) * tensors[scale][:, None]
        wide = wide / ratio[:, : wide.shape[1]]
        tensors[scale] = np.abs(wide).max(axis=1) / np.float32(448)
        tensors[weight] = (wide / tensors[scale][:, None]).astype(tensors[weight].dtype)

    edit_file(build / layer_file(layer), edit)
    fragment = graph_parity(build, threads=1)
    assert outcome(fragment) == (tap, {"scale_grid_transposed"})
    assert module.split(".")[-1] in fragment.hints[0].text


@pytest.mark.parametrize("part, tap", [("w_uk", "scores"), ("w_uv", "mix")])
def test_the_scale_grid_of_kv_b_proj_transposed(build: Path, part: str, tap: str) -> None:
    c = ModelConfig.from_dict(CONFIG)
    golden = TensorFile.open(build / "golden" / "dense_000_prefill.safetensors")
    ratio = np.repeat(golden["regrid.attention"], 128, axis=1)[:, : c.kv_lora_rank]
    per_head = ratio.reshape(c.num_attention_heads, -1, c.kv_lora_rank)
    N = c.qk_nope_head_dim
    by = per_head[:, :N] if part == "w_uk" else per_head[:, N:].transpose(0, 2, 1)

    def edit(tensors: dict[str, Array]) -> None:
        weight = tensors[f"attention.{part}"]
        tensors[f"attention.{part}"] = (weight.astype(np.float32) / by).astype(weight.dtype)

    edit_file(build / layer_file(0), edit)
    fragment = graph_parity(build, threads=1)
    assert outcome(fragment) == (tap, {"scale_grid_transposed"})
    assert "kv_b_proj" in fragment.hints[0].text


def test_expert_weights_taken_from_the_biased_scores(build: Path) -> None:
    def edit(model: onnx.ModelProto) -> None:
        function = next(f for f in model.functions if f.name == "TopKGate")
        next(n for n in function.node if n.op_type == "GatherElements").input[0] = "biased"

    edit_graph(build, "moe", edit)
    assert outcome(graph_parity(build, threads=1)) == (
        "expert_weights",
        {"weights_from_biased_scores"},
    )


@pytest.mark.slow  # a build of its own
def test_expert_weights_rebuilt_from_biased_scores(builds: Build, tmp_path: Path) -> None:
    """Biases of ±12 choose three experts, whose scores may be 1e−8: they are erased."""
    raw, folder = tiny_config(num_hidden_layers=2), tmp_path / "fp32"
    state = random_state(ModelConfig.from_dict(raw))
    state["model.layers.1.mlp.gate.weight"] *= 15
    state["model.layers.1.mlp.gate.e_score_correction_bias"] = torch.tensor(
        [12.0] * 3 + [-12.0] * 5
    )
    write_checkpoint(tmp_path / "checkpoint", raw, state)
    shutil.copytree(shared_build(Checkpoint.open(tmp_path / "checkpoint"), "fp32"), folder)
    assert outcome(graph_parity(folder, threads=1)) == (None, set())

    def edit(model: onnx.ModelProto) -> None:
        function = next(f for f in model.functions if f.name == "TopKGate")
        index = next(i for i, n in enumerate(function.node) if n.op_type == "GatherElements")
        function.node[index].input[0] = "rebuilt"
        rebuilt = onnx.helper.make_node("Sub", ["biased", "bias"], ["rebuilt"], name="rebuild")
        function.node.insert(index, rebuilt)

    edit_graph(folder, "moe", edit)
    tap, causes = outcome(graph_parity(folder, threads=1))
    assert (tap, causes) == ("expert_weights", {"weights_rebuilt_from_biased_scores"})


def test_softmax_where_the_config_asks_for_sigmoid(build: Path) -> None:
    def edit(model: onnx.ModelProto) -> None:
        function = next(f for f in model.functions if f.name == "TopKGate")
        index = next(i for i, n in enumerate(function.node) if "scores" in n.output)
        softmax = onnx.helper.make_node("Softmax", ["logits"], ["scores"], name="softmax", axis=-1)
        function.node[index].CopyFrom(softmax)

    edit_graph(build, "moe", edit)
    fragment = graph_parity(build, threads=1)
    assert outcome(fragment) == ("gate_scores", {"scoring_func"})
    assert "softmax" in fragment.hints[0].text


@pytest.mark.parametrize("mode", ["prefill", "chunk"])
def test_an_expert_that_only_one_route_reaches(build: Path, mode: str) -> None:
    """Whichever route chose it: every expert that a case chooses is compared by itself."""
    routes = {
        m: set(TensorFile.open(build / f"golden/moe_001_{m}.safetensors")["output.experts"].flat)
        for m in ("prefill", "chunk")
    }
    expert = int(max(routes[mode]))
    cases = [TensorFile.open(p) for p in sorted((build / "golden").glob(f"experts_001_{mode}_*"))]
    compared = [int(e) for case in cases for e in case["slot_experts"]]
    assert set(compared) == routes[mode]

    def lose(tensors: dict[str, Array]) -> None:
        tensors[f"experts.{expert}.gate_up.weight"] *= 0

    edit_file(build / layer_file(1), lose)
    rows = [r for r in graph_parity(build, threads=1).rows if r.mode == mode and not r.passed]
    slots = {r.case: int(r.tap.split(".")[1]) for r in rows if r.tap.startswith("slots.")}
    by_case = {case.path.stem: case["slot_experts"] for case in cases}
    assert slots and all(by_case[case][slot] == expert for case, slot in slots.items())


def test_barred_groups_at_zero_in_place_of_minus_infinity(build: Path) -> None:
    def edit(model: onnx.ModelProto) -> None:
        function = next(f for f in model.functions if f.name == "TopKGate")
        barred = next(n for n in function.node if "barred" in n.output)
        set_attribute(barred, "value_float", 0.0)

    edit_graph(build, "moe", edit)
    assert outcome(graph_parity(build, threads=1)) == ("experts", {"group_mask_zero"})


def test_the_shared_expert_forgotten(build: Path) -> None:
    def edit(model: onnx.ModelProto) -> None:
        node = next(n for n in model.graph.node if "acc" in n.output)
        node.op_type = "Identity"
        del node.input[1:]

    edit_graph(build, "moe", edit)
    assert outcome(graph_parity(build, threads=1)) == ("acc", {"shared_expert_forgotten"})


SEES_NEXT = """
    next_111S = Add(tokens_111S, axis1)
    causal_1S1S = LessOrEqual(own_1S11, next_111S)
"""
SEES_NONE = """
    far = Constant<value_ints = [1000]>()
    none_111S = Sub(tokens_111S, far)
    causal_1S1S = LessOrEqual(own_1S11, none_111S)
"""
ONE_FEWER = """
    fewer_B11 = Sub(length_B11, axis1)
    cached_BL1 = Less(rows_1L1, fewer_B11)
"""


@pytest.mark.parametrize(
    "case, right, wrong, cause",
    [
        ("chunk", "causal", SEES_NEXT, "causal_mask_off_by_one"),
        ("chunk", "causal", "causal_1S1S = Less(own_1S11, tokens_111S)", "causal_mask_off_by_one"),
        ("chunk", "causal", SEES_NONE, "valid_length_before_write"),
        ("chunk", "cached", ONE_FEWER, "context_length_off_by_one"),
        (
            "decode",
            "cached",
            "cached_BL1 = LessOrEqual(rows_1L1, length_B11)",
            "context_length_off_by_one",
        ),
    ],
    ids=["next", "not itself", "none", "one fewer", "one more"],
)
def test_a_mask_off_by_one(build: Path, case: str, right: str, wrong: str, cause: str) -> None:
    lines = {
        "causal": "causal_1S1S = LessOrEqual(own_1S11, tokens_111S)",
        "cached": "cached_BL1 = Less(rows_1L1, length_B11)",
    }

    def edit(model: onnx.ModelProto) -> None:
        change_body(model, "LatentAttention", (lines[right], wrong))

    edit_graph(build, "dense", edit)
    for golden in (build / "golden").glob("*.safetensors"):
        if not golden.stem.endswith(case):
            golden.unlink()
    assert outcome(graph_parity(build, threads=1)) == ("scores", {cause})


def test_positions_off_by_one(build: Path) -> None:
    path = build / "golden" / "moe_001_chunk.safetensors"
    edit_file(path, lambda t: t.update({"input.positions": t["input.positions"] + 1}))
    fragment = graph_parity(build, threads=1)
    assert outcome(fragment) == ("q_pe_rotated", {"context_length_off_by_one"})


def test_two_layers_weights_exchanged(build: Path) -> None:
    files = [TensorFile.open(build / layer_file(layer)) for layer in (1, 2)]
    tensors = [{n: np.array(a) for n, a in file.tensors.items()} for file in files]
    spec = BuildSpec.load(build)
    for layer, content in zip((1, 2), reversed(tensors), strict=True):
        (build / layer_file(layer)).unlink()
        write_arrays(build / layer_file(layer), content, spec.file_metadata(f"layer {layer}"))
    fragment = graph_parity(build, threads=1)
    assert outcome(fragment) == ("x_attn", {"layers_exchanged"})
    texts = {hint.text for hint in fragment.hints}
    wanted = {f"Layer {a}'s weights lie in the file of layer {b}." for a, b in ((1, 2), (2, 1))}
    assert texts == wanted


WEIGHTS = [
    (0, "attention.input_norm.weight", "x_attn"),
    (0, "attention.qkv_a.weight", "c_q"),
    (0, "attention.q_norm.weight", "c_q_normed"),
    (0, "attention.kv_norm.weight", "new"),
    (0, "attention.q_b.weight", "q_nope"),
    (0, "attention.w_uk", "scores"),
    (0, "attention.w_uv", "mix"),
    (0, "attention.o.weight", "delta_attn"),
    (0, "post_norm.weight", "h"),
    (0, "mlp.gate_up.weight", "gate"),
    (0, "mlp.down.weight", "delta_mlp"),
    (1, "gate.weight", "gate_logits"),
    (1, "shared.down.weight", "shared"),
]


@pytest.mark.parametrize("layer, name, tap", WEIGHTS)
def test_a_random_perturbation_gets_no_hint(
    builds: Build, tmp_path: Path, layer: int, name: str, tap: str
) -> None:
    build = Path(shutil.copytree(builds("fp32"), tmp_path / "copy"))
    noise = np.random.default_rng(0)

    def edit(tensors: dict[str, Array]) -> None:
        weight = tensors[name]
        tensors[name] = weight + 0.02 * weight.std() * noise.standard_normal(
            weight.shape, np.float32
        )

    edit_file(build / layer_file(layer), edit)
    assert outcome(graph_parity(build, threads=1)) == (tap, set())


def test_a_correction_bias_that_is_off_changes_the_choice_without_a_hint(
    builds: Build, tmp_path: Path
) -> None:
    build = Path(shutil.copytree(builds("fp32"), tmp_path / "copy"))
    noise = np.random.default_rng(0)

    def edit(tensors: dict[str, Array]) -> None:
        tensors["gate.bias"] = tensors["gate.bias"] + noise.standard_normal(8).astype(np.float32)

    edit_file(build / layer_file(1), edit)
    assert outcome(graph_parity(build, threads=1)) == ("experts", set())


def test_rope_tables_with_noise_get_no_hint(builds: Build, tmp_path: Path) -> None:
    build = Path(shutil.copytree(builds("fp32"), tmp_path / "copy"))
    noise = np.random.default_rng(0)

    def edit(tensors: dict[str, Array]) -> None:
        cos = tensors["cos"]
        tensors["cos"] = cos + 0.01 * noise.standard_normal(cos.shape, np.float32)

    edit_file(build / ROPE_FILE, edit)
    tap, causes = outcome(graph_parity(build, threads=1))
    assert tap == "q_pe_rotated" and causes <= {"rope_frequencies", "rope_table_multiplier"}


def test_the_runtimes_own_positions(builds: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    right = runtime.step.chain.step_positions
    for module in (runtime.step.chain, runtime.parity):
        monkeypatch.setattr(
            module, "step_positions", lambda lengths, S, c: right(lengths + 1, S, c)
        )
    fragment = runtime_parity(load_chain(builds("fp32"), threads=1), builds("fp32"))
    assert outcome(fragment) == ("positions", {"context_length_off_by_one"})
    assert len(fragment.hints) == 1  # though every case shows it


CASE = ReplayCase("case", "dense", 0, "chunk")


def right_mask(lengths: list[int], S: int, L: int) -> Array:
    """[B, L+S, S], keys-major: 0 where query s of sequence b sees key t, else MASKED."""
    index, query = np.arange(L + S)[:, None], np.arange(S)
    cached = index < np.array(lengths)[:, None, None]
    seen = np.where(index < L, cached, index - L <= query)
    return np.where(seen, np.float32(0), np.float32(MASKED))


def test_a_mask_aligned_to_the_wrong_corner() -> None:
    """3 new tokens on 5 cached: query i sees keys 0 to 5+i, and not 0 to i."""
    right = right_mask([5], 3, 5)
    wrong = np.full_like(right, MASKED)
    for query in range(3):
        wrong[0, : query + 1, query] = 0
    (hint,) = mask_hint(CASE, "mask", wrong, right, 5)
    assert hint.cause == "mask_aligned_to_wrong_corner"
    assert mask_hint(CASE, "mask", right, right, 5) == []


def test_a_mask_with_one_key_flipped_gets_no_hint() -> None:
    right = right_mask([5, 2], 3, 6)
    wrong = right.copy()
    wrong[1, 3, 1] = 0
    assert mask_hint(CASE, "mask", wrong, right, 6) == []


def test_positions_shared_by_sequences_of_unequal_lengths() -> None:
    expected = np.array([[2], [5], [9]])
    (hint,) = position_hint(CASE, np.array([[9], [9], [9]]), expected)
    assert hint.cause == "positions_shared"
    assert position_hint(CASE, expected, expected) == []
    assert position_hint(CASE, np.array([[2], [5], [8]]), expected) == []
