"""The range lint: each rule at its edge, and what does not count."""

import ml_dtypes
import numpy as np
import pytest
import torch

from graphs.contract.spec import Precision
from graphs.contract.tensorfile import Array, TensorFile
from graphs.ops import MASKED
from graphs.ops.fp8_linear import E4M3_MAX, SMALLEST_SCALE, reference
from graphs.parity.ranges import RangeFinding, RangeRole, golden_findings, range_findings
from tests.support.builds import Build


def found(values: object, role: RangeRole = "value") -> dict[str, RangeFinding]:
    array = np.asarray(values, dtype=np.float32)
    return {f.rule: f for f in range_findings("case", "tap", array, role=role)}


def ordinary(rows: int = 4, columns: int = 64) -> Array:
    """Values between 0.5 and 1.5 of either sign."""
    generator = np.random.default_rng(0)
    sizes = generator.uniform(0.5, 1.5, (rows, columns))
    values: Array = sizes * generator.choice([-1, 1], sizes.shape)
    return values.astype(np.float32)


@pytest.mark.parametrize("role", ["value", "norm_input", "fp8_input"])
def test_ordinary_values_have_no_findings(role: RangeRole) -> None:
    assert found(ordinary(), role) == {}
    assert found(np.zeros((0, 8)), role) == {}
    assert found(ordinary().astype(ml_dtypes.bfloat16), role) == {}


@pytest.mark.parametrize(
    ("value", "rule"),
    [
        (65504, None),
        (65519, None),
        (-65520, "fp16 overflow"),
        (2.0**-24, None),
        (2.0**-25, "fp16 flush"),
        (-1e-30, "fp16 flush"),
        (0, None),
    ],
)
def test_fp16_at_its_edges(value: float, rule: str | None) -> None:
    """As numpy's own cast does it."""
    with np.errstate(over="ignore"):
        narrow = np.float16(value)
    assert (rule == "fp16 overflow") == bool(np.isinf(narrow))
    assert (rule == "fp16 flush") == (value != 0 and narrow == 0)
    values = ordinary()
    values[2, 5] = value
    findings = found(values)
    assert list(findings) == ([rule] if rule else [])
    if rule:
        assert (findings[rule].count, findings[rule].total) == (1, values.size)
        assert findings[rule].worst == np.float32(abs(value))
        assert findings[rule].text.startswith("1 of 256 values become ")


def test_a_flush_says_what_is_lost() -> None:
    text = found([1e-9, 3e-9, 1e-5, 2.0])["fp16 flush"].text
    assert "2 of 4 values become 0 in fp16, 2e-09 of the sum of all, the smallest 1e-09" in text
    assert text.endswith("1 more lose bits")


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite(value: float) -> None:
    """They count once, and their row under no other rule."""
    for role in ("value", "norm_input", "fp8_input"):
        values = ordinary()
        values[1, 3] = value
        findings = found(values, role)
        assert list(findings) == ["not finite"]
        assert (findings["not finite"].count, findings["not finite"].total) == (1, 256)
        assert str(findings["not finite"]).startswith("case: tap: not finite: 1 of 256 values ")


def test_masks_do_not_count() -> None:
    scores = ordinary()
    scores[:, 32:] += MASKED
    assert (scores[:, 32:] < -65520).all()
    assert found(scores) == {}
    scores[0, 0] = -1e6  # no mask
    assert found(scores)["fp16 overflow"].total == scores.size // 2


@pytest.mark.parametrize(("value", "over"), [(-300, True), (255.94, True), (255.93, False)])
def test_a_norm_whose_square_overflows(value: float, over: bool) -> None:
    with np.errstate(over="ignore"):
        assert bool(np.isinf(np.float16(value) ** 2)) == over
    values = ordinary()
    values[3, 7] = value
    assert found(values) == {}
    findings = found(values, "norm_input")
    assert list(findings) == (["fp16 norm"] if over else [])
    if over:
        finding = findings["fp16 norm"]
        assert (finding.count, finding.total) == (1, 4)
        assert finding.worst == np.float32(abs(value))


def test_rows_of_zeros_stay_zeros() -> None:
    values = ordinary()
    values[1] = 0
    assert found(values, "fp8_input") == {}


def test_a_row_at_the_least_scale() -> None:
    """Its values are divided by more than their peak / 448, and round coarsely or to 0."""
    values = ordinary()
    values[0] *= E4M3_MAX * SMALLEST_SCALE / 100
    findings = found(values, "fp8_input")
    assert findings["FP8 scale at its floor"].count == 1
    assert findings["FP8 scale at its floor"].total == 4
    assert set(findings) == {"FP8 scale at its floor", "FP8 scale in fp16", "fp16 flush"}


@pytest.mark.parametrize(("peak", "outside"), [(2.9e7, False), (3e7, True), (1.3e-5, True)])
def test_a_scale_that_fp16_cannot_hold(peak: float, outside: bool) -> None:
    values = ordinary() / 1.5
    values[2] *= np.float32(peak) / np.abs(values[2]).max()
    scale = np.float32(peak / E4M3_MAX)
    with np.errstate(over="ignore"):
        assert (not np.isfinite(np.float16(scale)) or np.float16(scale) == 0) == outside
    findings = found(values, "fp8_input")
    assert ("FP8 scale in fp16" in findings) == outside
    if outside:
        assert findings["FP8 scale in fp16"].count == 1
        assert findings["FP8 scale in fp16"].worst == pytest.approx(peak)


def test_a_row_with_an_outlier_loses_the_rest() -> None:
    """A value of 1e6 in a row: what the op keeps of the others is 0."""
    values = ordinary()
    values[1, 9] = 1e6
    finding = found(values, "fp8_input")["FP8 outlier"]
    assert (finding.count, finding.total, finding.worst) == (1, 4, 1e6)
    identity = torch.eye(64).to(torch.float8_e4m3fn)
    kept = reference(torch.from_numpy(values), identity, torch.ones(64))
    assert (kept[1] != 0).nonzero().flatten().tolist() == [9]
    assert (kept[0] != 0).all()
    values[1, 9] = 1e5  # the others round coarsely, but not to 0
    assert "FP8 outlier" not in found(values, "fp8_input")


def test_half_of_a_row_may_be_lost() -> None:
    values = np.full((1, 8), 1000, np.float32)
    values[0, :4] = 1e-3
    assert "FP8 outlier" not in found(values, "fp8_input")
    values[0, 4] = 1e-3
    assert found(values, "fp8_input")["FP8 outlier"].count == 1


ROLES = [
    *((name, "fp16 norm") for name in ("input.x", "tap.c_q", "tap.c_kv", "tap.x_mid")),
    *((f"tap.{tap}", "FP8 outlier") for tap in ("x_attn", "c_q_normed", "mix", "h", "product")),
]


@pytest.mark.parametrize(("name", "rule"), ROLES)
def test_goldens_are_read_by_role(nano: Build, name: str, rule: str) -> None:
    """One large value in a tap breaks the rule of the tap's role; that of FP8 only at fp8."""
    tap, new = name.partition(".")[2], dict[Precision, set[str]]()
    precisions: tuple[Precision, ...] = ("fp8", "fp32")
    for precision in precisions:
        golden = TensorFile.open(nano(precision) / "golden/dense_000_chunk.safetensors")
        assert rule not in {f.rule for f in golden_findings(golden)}
        array = golden.tensors[name].copy()
        array.flat[5] = 3e7
        planted = TensorFile(golden.path, golden.metadata, golden.tensors | {name: array})
        new[precision] = {f.rule for f in golden_findings(planted) if f.tap == tap}
    assert rule in new["fp8"]
    assert (rule in new["fp32"]) == (rule == "fp16 norm")


def test_the_rows_of_a_mix_are_of_all_heads(nano: Build) -> None:
    """One value in one head of [B,H,S,V]: it drowns the same token's other heads."""
    golden = TensorFile.open(nano("fp8") / "golden/dense_000_chunk.safetensors")
    array = golden.tensors["tap.mix"].copy()
    array[0, 2, 7, 3] = 3e7
    planted = TensorFile(golden.path, golden.metadata, {"tap.mix": array})
    finding = next(f for f in golden_findings(planted) if f.rule == "FP8 outlier")
    assert (finding.count, finding.total) == (1, array.shape[0] * array.shape[2])
