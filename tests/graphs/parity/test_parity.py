"""Goldens replayed on ONNX Runtime: they pass as they are, and each planted fault fails."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from graphs.contract.spec import BuildError, BuildSpec, Precision, layer_file
from graphs.contract.tensorfile import Array, TensorFile, write_arrays
from graphs.ops import MASKED
from graphs.parity.compare import (
    FP8_FREE,
    FP32_OUTPUT,
    FP32_ROWS,
    RMS,
    ComparedTensor,
    ErrorLimit,
    ReplayCase,
    compare,
    limit_for,
)
from graphs.parity.findings import TapComparison, first_bad
from graphs.parity.graphs import graph_parity
from runtime.load import load_chain
from runtime.parity import compare_tokens, runtime_parity
from tests.support.builds import EACH_PRECISION, Build

CASE = ReplayCase("case", "dense", 0, "prefill")
ATTENTION = {"x_attn", "c_q", "c_kv", "k_pe", "c_q_normed", "q_nope", "q_pe", "q_pe_rotated", "new"}
ATTENTION |= {"scores", "probabilities", "mix", "delta_attn", "x_mid", "h"}
DENSE = ATTENTION | {"gate", "up", "product", "delta_mlp", "y"}
MOE = ATTENTION | {"gate_logits", "gate_scores", "experts", "expert_weights", "acc"}
MOE |= {"shared_gate", "shared_up", "shared_product", "shared"}
EXPERTS = {f"slots.{s}.{t}" for s in range(8) for t in ("gate", "up", "product", "output")}


def subject(tap: str) -> ComparedTensor:
    return ComparedTensor(CASE, tap, tap, 0, "output")


def found(expected: Array, actual: Array, tap: str, precision: Precision) -> TapComparison:
    return compare(subject(tap), actual, expected, limit_for(precision, tap))


@EACH_PRECISION
def test_every_tap_of_each_graph_is_within_its_bar(nano: Build, precision: Precision) -> None:
    fragment = graph_parity(nano(precision), threads=1)
    assert fragment.passed and fragment.hints == [] and first_bad(fragment.rows) is None
    taps: dict[str, set[str]] = {}
    for row in fragment.rows:
        taps.setdefault(row.case, set()).add(row.tap)
    for mode in ("prefill", "chunk", "decode"):
        assert taps[f"dense_000_{mode}"] == DENSE and taps[f"moe_001_{mode}"] == MOE
        assert taps[f"experts_001_{mode}_0"] == EXPERTS | {"acc_out"}
    assert taps["moe_003_prefill"] == MOE and taps["head"] == {"logits"}
    fed = {(r.case, r.tap) for r in fragment.rows if r.fed}
    assert ("moe_001_chunk", "mix") in fed or precision != "fp8"
    assert bool(fed) == (precision == "fp8")
    assert all(len(r.positions) in (48, 32) for r in fragment.rows if r.graph == "dense")


def test_no_block_of_the_small_model_needs_the_wide_limit_of_free_runs(nano: Build) -> None:
    """At its width an e4m3 flip is rare: freely, too, fp8 is within the limit of fed layers."""
    rows = [r for r in graph_parity(nano("fp8"), threads=1).rows if r.limit == FP8_FREE]
    assert len(rows) >= 8 and "free-running" in rows[0].remark
    assert [r for r in rows if r.rms_error > RMS["fp8"]] == []


def test_fed_layers_show_where_a_fault_lies(nano: Build, tmp_path: Path) -> None:
    """A norm that is off reaches the next linear layer, and what lies behind that is as it was."""
    name = "attention.q_norm.weight"
    build = copy_with(nano("fp8"), tmp_path / "copy", 0, name, 1.01)
    rows = [r for r in graph_parity(build, threads=1).rows if r.case == "dense_000_prefill"]
    assert [r.tap for r in rows if r.fed and not r.passed] == ["c_q_normed"]


@EACH_PRECISION
def test_blocks_and_chain_are_within_their_bars(nano: Build, precision: Precision) -> None:
    build = nano(precision)
    fragment = runtime_parity(load_chain(build, threads=1), build)
    cases = {r.case for r in fragment.rows}
    assert cases >= {"dense_000_chunk", "moe_002_prefill", "end_to_end"}
    assert fragment.passed and fragment.hints == [] and fragment.not_run == []
    by_tap = {r.tap: r for r in fragment.rows if r.case == "end_to_end"}
    assert len(by_tap["logits"].positions) == len(by_tap["rows"].positions) == 96
    assert by_tap["tokens"].remark.startswith("64 of 64")


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
    "layer, name, block, tap",
    [
        (0, "attention.kv_norm.weight", "dense_000", "new"),
        (0, "mlp.down.weight", "dense_000", "delta_mlp"),
        (1, "shared.down.weight", "moe_001", "shared"),
        (1, "gate.weight", "moe_001", "gate_logits"),
    ],
)
def test_a_weight_that_is_off_by_a_thousandth_fails_where_it_is_read(
    nano: Build, tmp_path: Path, layer: int, name: str, block: str, tap: str
) -> None:
    build = copy_with(nano("fp32"), tmp_path / "copy", layer, name, 1.001)
    fragment = graph_parity(build, threads=1)
    failed = [r for r in fragment.rows if not r.passed]
    assert {r.case for r in failed} == {
        f"{block}_{mode}" for mode in ("prefill", "chunk", "decode")
    }
    bad = first_bad(fragment.rows)
    assert bad is not None and (bad.case, bad.tap) == (f"{block}_prefill", tap)
    assert fragment.hints == []


def test_a_wrong_expert_fails_in_experts_and_block(nano: Build, tmp_path: Path) -> None:
    golden = TensorFile.open(nano("fp32") / "golden" / "experts_001_prefill_0.safetensors")
    expert = int(golden["slot_experts"][0])
    name = f"experts.{expert}.down.weight"
    build = copy_with(nano("fp32"), tmp_path / "copy", 1, name, 1.001)
    fragment = graph_parity(build, threads=1)
    bad = first_bad(fragment.rows)
    assert bad is not None and (bad.case, bad.tap) == ("experts_001_prefill_0", "slots.0.output")
    assert {r.graph for r in fragment.rows if not r.passed} == {"experts"}
    rows = runtime_parity(load_chain(build, threads=1), build).rows
    assert {"moe_001_prefill", "end_to_end"} <= {r.case for r in rows if not r.passed}


def test_a_build_without_goldens_is_an_error(nano: Build, tmp_path: Path) -> None:
    shutil.copytree(nano("fp32"), tmp_path / "copy", ignore=shutil.ignore_patterns("golden"))
    with pytest.raises(BuildError, match="no goldens"):
        graph_parity(tmp_path / "copy")


def test_a_golden_that_lacks_a_tap_is_an_error(nano: Build, tmp_path: Path) -> None:
    build = Path(shutil.copytree(nano("fp32"), tmp_path / "copy"))
    path = build / "golden" / "dense_000_prefill.safetensors"
    file = TensorFile.open(path)
    tensors = {n: np.array(a) for n, a in file.tensors.items() if n != "tap.mix"}
    path.unlink()
    write_arrays(path, tensors, {k: v for k, v in file.metadata.items() if k != "sha256"})
    with pytest.raises(BuildError, match=r"dense_000_prefill.*no mix; make it again"):
        graph_parity(build)


def test_errors_are_over_the_whole_tensor() -> None:
    expected = np.array([1.0, -4.0, 2.0], np.float32)
    row = found(expected, expected + np.array([0, 2e-5, 0], np.float32), "y", "fp32")
    assert row.passed and row.max_error == pytest.approx(5e-6, rel=0.05) and row.worst == [1]
    assert not found(expected, expected * 1.00001, "new", "fp32").passed
    assert not found(expected, expected * np.nan, "y", "fp8").passed
    with pytest.raises(ValueError, match=r"case y: expected shape \(3,\), got \(2,\)"):
        found(expected, expected[:2], "y", "fp32")


def test_a_key_that_only_one_side_masks_fails_however_small_its_score() -> None:
    """Of masked scores only that they are masked is compared, not by how much."""
    expected = np.array([3.0, MASKED, 0.0], np.float32)
    row = found(expected, expected * np.array([1, 1.5, 1], np.float32), "scores", "fp32")
    assert row.passed and row.max_error == 0
    row = found(expected, np.array([3.0, 0.0, 0.0], np.float32), "scores", "fp32")
    assert not row.passed and "1 keys masked by one of both only" in row.remark
    row = found(expected, np.array([3.0, MASKED, MASKED], np.float32), "scores", "fp32")
    assert not row.passed


def test_a_differing_token_passes_only_where_its_logit_hardly_led(nano: Build) -> None:
    golden = TensorFile.open(nano("fp32") / "golden" / "end_to_end.safetensors")
    tokens = golden["tokens"].tolist()

    def row(limit: float) -> TapComparison:
        return compare_tokens(subject("tokens"), tokens, golden, ErrorLimit("max", limit))

    assert row(0.0).passed
    tokens[5] += 1
    margin = float(golden["margins"][5])
    bad = row(margin / 2)
    assert not bad.passed and "5 of 64 equal" in bad.remark and bad.worst == [5]
    assert row(margin * 2).passed


def test_goldens_hold_what_the_graphs_have_and_no_keys_or_values_of_heads(nano: Build) -> None:
    taps = {
        t for t in TensorFile.open(nano("fp32") / "golden/dense_000_prefill.safetensors").tensors
    }
    assert not {t.removeprefix("tap.") for t in taps} & {"k_nope", "keys", "values"}
