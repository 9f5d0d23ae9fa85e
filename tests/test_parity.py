"""Goldens replayed on ONNX Runtime: they pass as they are, and each planted fault fails."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from conftest import Build

from graphs.metrics import FP8_FREE, FP32_OUTPUT, FP32_ROWS, RMS, Groups, compare, compare_routing
from graphs.parity import graph_parity
from graphs.spec import PRECISIONS, BuildError, BuildSpec, Precision, layer_file
from graphs.tensorfile import TensorFile, write_arrays
from runtime.chain import Chain
from runtime.parity import compare_tokens, runtime_parity


@pytest.mark.parametrize("precision", PRECISIONS)
def test_each_graph_alone_is_within_its_bar(nano: Build, precision: Precision) -> None:
    rows = graph_parity(nano(precision), threads=2)
    assert {r.case for r in rows} >= {"dense_000_decode", "moe_003_prefill", "experts_001", "head"}
    assert [r for r in rows if not r.passed] == []
    fed = [r for r in rows if r.case == "moe_001_chunk, fed"]
    expected = {"acc", "h", "attention.o's input"} if precision == "fp8" else set()
    assert {r.tensor for r in fed} >= expected and bool(fed) == bool(expected)


def test_no_block_of_the_small_model_needs_the_wide_limit_of_free_runs(nano: Build) -> None:
    """At its width an e4m3 flip is rare: freely, too, fp8 is within the limit of fed layers."""
    rows = [r for r in graph_parity(nano("fp8"), threads=2) if r.limit == FP8_FREE]
    assert len(rows) >= 8 and "free-running" in rows[0].remark
    assert [r for r in rows if r.rms_error > RMS["fp8"]] == []


def test_fed_layers_show_where_a_fault_lies(nano: Build, tmp_path: Path) -> None:
    """A norm that is off reaches the next linear layer, and what lies behind that is as it was."""
    name = "attention.q_norm.weight"
    build = copy_with(nano("fp8"), tmp_path / "copy", 0, name, 1.01)
    rows = [r for r in graph_parity(build, threads=2) if r.case == "dense_000_prefill, fed"]
    assert [r.tensor for r in rows if not r.passed] == ["attention.q_b's input"]


@pytest.mark.parametrize("precision", PRECISIONS)
def test_blocks_and_chain_are_within_their_bars(nano: Build, precision: Precision) -> None:
    build = nano(precision)
    rows = runtime_parity(Chain.load(build, threads=2), build)
    assert {r.case for r in rows} >= {"dense_000_chunk", "moe_002_prefill", "end_to_end"}
    assert [r for r in rows if not r.passed] == []


def test_the_tolerances_are_the_stated_ones() -> None:
    assert (FP32_OUTPUT, FP32_ROWS, RMS) == (1e-5, 5e-6, {"fp8": 2e-3, "bf16": 5e-3})
    assert FP8_FREE == 2e-2


def copy_with(build: Path, target: Path, layer: int, name: str, factor: float) -> Path:
    """A copy of a build in which one packed tensor is scaled."""
    shutil.copytree(build, target)
    spec = BuildSpec.load(build)
    source = TensorFile.open(build / layer_file(layer))
    tensors = dict(source.tensors)
    tensors[name] = (tensors[name].astype(np.float32) * factor).astype(tensors[name].dtype)
    write_arrays(target / layer_file(layer), tensors, spec.file_metadata(f"layer {layer}"))
    return target


@pytest.mark.parametrize(
    "layer, name, block",
    [
        (0, "attention.kv_norm.weight", "dense_000"),
        (0, "mlp.down.weight", "dense_000"),
        (1, "shared.down.weight", "moe_001"),
        (1, "gate.weight", "moe_001"),
    ],
)
def test_a_weight_that_is_off_by_a_thousandth_fails(
    nano: Build, tmp_path: Path, layer: int, name: str, block: str
) -> None:
    build = copy_with(nano("fp32"), tmp_path / "copy", layer, name, 1.001)
    failed = {r.case for r in graph_parity(build, threads=2) if not r.passed}
    assert failed == {f"{block}_{mode}" for mode in ("prefill", "chunk", "decode")}


def test_a_wrong_expert_fails_in_experts_and_block(nano: Build, tmp_path: Path) -> None:
    golden = TensorFile.open(nano("fp32") / "golden" / "experts_001.safetensors")
    expert = int(golden["slot_experts"][0])
    name = f"experts.{expert}.down.weight"
    build = copy_with(nano("fp32"), tmp_path / "copy", 1, name, 1.001)
    assert {r.case for r in graph_parity(build, threads=2) if not r.passed} == {"experts_001"}
    rows = runtime_parity(Chain.load(build, threads=2), build)
    assert {"moe_001_prefill", "end_to_end"} <= {r.case for r in rows if not r.passed}


def test_a_build_without_goldens_is_an_error(nano: Build, tmp_path: Path) -> None:
    shutil.copytree(nano("fp32"), tmp_path / "copy", ignore=shutil.ignore_patterns("golden"))
    with pytest.raises(BuildError, match="no goldens"):
        graph_parity(tmp_path / "copy")


def test_errors_are_over_the_whole_tensor() -> None:
    expected = np.array([1.0, -4.0, 2.0], np.float32)
    row = compare("case", "y", expected + np.float32([0, 2e-5, 0]), expected, "fp32")
    assert row.passed and row.max_error == pytest.approx(5e-6, rel=0.05)
    assert not compare("case", "new", expected * 1.00001, expected, "fp32").passed
    assert not compare("case", "y", expected * np.nan, expected, "fp8").passed


def test_experts_are_compared_as_sets_and_ties_are_told_apart() -> None:
    scores, one = np.array([[0.9, 0.5, 0.4999999, 0.1]], np.float32), Groups(1, 1, "max")
    weights = np.array([[0.7, 0.3]], np.float32)
    expected = np.array([[0, 1]]), weights
    swapped = np.array([[1, 0]]), weights[:, ::-1]
    rows, same = compare_routing("case", swapped, expected, scores, one, "fp32")
    assert same.all() and all(r.passed for r in rows)
    tied = np.array([[0, 2]]), weights
    rows, same = compare_routing("case", tied, expected, scores, one, "fp32")
    assert not same.any() and rows[0].passed and "1 of 1 tokens tied" in rows[0].remark
    wrong = np.array([[0, 3]]), weights
    rows, _ = compare_routing("case", wrong, expected, scores, one, "fp32")
    assert not rows[0].passed and rows[0].max_error == pytest.approx(0.4)
    rows, _ = compare_routing("case", expected, wrong, scores, one, "fp32")
    assert not rows[0].passed


def test_experts_of_a_group_that_was_barred_are_not_a_tie() -> None:
    """Two groups of three, one kept. By their two best, 1.1 beats 1.0999999 and not 1.05."""
    weights = np.array([[0.7, 0.3]], np.float32)
    expected = np.array([[0, 1]]), weights

    def error(found: list[int], second: float) -> float:
        scores = np.array([[0.9, 0.2, 0.1, 0.6, second, 0.0]], np.float32)
        chosen = np.array([found]), weights
        groups = Groups(2, 1, "top2_sum")
        rows, _ = compare_routing("case", chosen, expected, scores, groups, "fp32")
        assert rows[0].passed == (rows[0].max_error <= 1e-5)
        return rows[0].max_error

    assert error([3, 4], 0.4999999) <= 1e-6
    assert error([3, 4], 0.45) == pytest.approx(0.05, abs=1e-6)
    assert error([3, 5], 0.4999999) == pytest.approx(0.5, abs=1e-6)
    assert error([0, 3], 0.4999999) == np.inf
    assert error([0, 2], 0.45) == pytest.approx(0.1, abs=1e-6)


def test_a_differing_token_passes_only_where_its_logit_hardly_led(nano: Build) -> None:
    golden = TensorFile.open(nano("fp32") / "golden" / "end_to_end.safetensors")
    tokens = golden["tokens"].tolist()
    assert compare_tokens("case", tokens, golden, 0.0).passed
    tokens[5] += 1
    margin = float(golden["margins"][5])
    row = compare_tokens("case", tokens, golden, margin / 2)
    assert not row.passed and "5 of 64 equal" in row.remark
    assert compare_tokens("case", tokens, golden, margin * 2).passed


def test_goldens_hold_every_comparable_tap(nano: Build) -> None:
    taps = {
        name: {t.removeprefix("tap.") for t in TensorFile.open(path).tensors if "tap." in t}
        for name in ("dense_000_prefill", "dense_000_decode", "moe_001_chunk")
        for path in [nano("fp32") / "golden" / f"{name}.safetensors"]
    }
    attention = {"x_attn", "c_q", "c_q_normed", "c_kv", "c_kv_normed", "k_pe_rotated", "q_nope"}
    attention |= {"q_pe_rotated", "mix", "delta_attn", "x_mid", "h", "y"}
    swiglu = {"gate", "up", "activated", "product", "delta_mlp"}
    routing = {"gate_logits", "gate_scores", "experts", "expert_weights", "routed", "shared"}
    assert taps["dense_000_prefill"] >= attention | swiglu | {"scores", "probabilities"}
    assert taps["dense_000_decode"] >= attention | swiglu
    assert taps["moe_001_chunk"] >= attention | routing
    assert not taps["dense_000_prefill"] & {"k_nope", "keys", "values"}
