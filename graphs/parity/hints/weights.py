"""A fault of packing: the grid of block scales transposed.

For a block-FP8 checkpoint a golden holds, per fused weight, what each of its values would have to
be multiplied by had the grid of scales been transposed: `regrid.<module>` [out, blocks of in].
"""

from dataclasses import replace

import numpy as np

from graphs.contract.quantization import FP8Blocks
from graphs.contract.spec import TapSpec
from graphs.contract.tensorfile import DTYPES, Array
from graphs.ops.fp8_linear import E4M3_MAX, SMALLEST_SCALE
from graphs.parity.findings import Hint
from graphs.parity.hints.evidence import MATCH, Candidate, Evidence
from graphs.parity.replay import fed_tap, slot_of
from graphs.parity.taps import to_graph, to_reference

# An e4m3 weight that was rounded at the wrong scale keeps that rounding.
REGRID_MATCH = 0.25

# tap → the linear layer whose output it is, and the tap that the layer reads
LINEARS = {
    "c_q": ("attention.qkv_a", "x_attn"),
    "c_kv": ("attention.qkv_a", "x_attn"),
    "k_pe": ("attention.qkv_a", "x_attn"),
    "q_nope": ("attention.q_b", "c_q_normed"),
    "q_pe": ("attention.q_b", "c_q_normed"),
    "delta_attn": ("attention.o", "mix"),
    "gate": ("mlp.gate_up", "h"),
    "up": ("mlp.gate_up", "h"),
    "delta_mlp": ("mlp.down", "product"),
    "shared_gate": ("shared.gate_up", "h"),
    "shared_up": ("shared.gate_up", "h"),
    "shared": ("shared.down", "shared_product"),
}


def grid_hints(evidence: Evidence, tap: str) -> list[Hint]:
    """A hint if a linear layer's output is right once its weight's grid is turned back."""
    module, source = _linear(evidence, tap)
    ratio = regrid_ratio(evidence, module)
    if ratio is None:
        return []
    inputs, fp8 = _read(evidence, tap, source), evidence.spec.precision == "fp8"
    weight = evidence.weights[f"{module}.weight"].astype(np.float32)  # which may be a GB
    weight *= ratio
    if fp8:
        weight *= evidence.weights[f"{module}.scale"][:, None]
    inputs = _quantised(inputs) if fp8 else inputs
    expected, actual = evidence.expected(tap), evidence.computed(tap)
    output = (inputs.astype(np.float32) @ weight.T).astype(np.float64)
    turned = _output(evidence, evidence.tap(tap), output, expected.shape)
    return evidence.best(tap, [transposed(module, turned, fp8)], expected, actual)


def transposed(weight: str, turned: Array, fp8: bool) -> Candidate:
    """The candidate for a tensor that was computed with the grid turned back.

    Prediction and reference change places: it is the difference of the two that has to be gone.
    """
    text = f"the grid of block scales of {weight} was transposed"
    return Candidate("scale_grid_transposed", text, turned, REGRID_MATCH if fp8 else MATCH)


def regrid_ratio(evidence: Evidence, module: str) -> Array | None:
    """The factor for each value of a packed weight, [out, in]; `attention` [H,N+V,C].

    None if the checkpoint has no block scales, or the golden is not a prefill.
    """
    ratio = evidence.golden.tensors.get(f"regrid.{module}")
    if ratio is None:
        return None
    blocks, c = evidence.config.quantization, evidence.config
    assert isinstance(blocks, FP8Blocks), "goldens of other checkpoints hold no regrid.*"
    spread = np.repeat(ratio, blocks.block[1], axis=1)
    if module == "attention":
        shape = (c.num_attention_heads, -1, c.kv_lora_rank)
        return spread[:, : c.kv_lora_rank].reshape(shape)
    return spread[:, : evidence.weights[f"{module}.weight"].shape[1]]


def _linear(evidence: Evidence, tap: str) -> tuple[str, str]:
    c = evidence.config
    if tap.startswith("slots."):
        slot = f"slots.{slot_of(tap)}"
        down = tap.endswith(".output")
        return (f"{slot}.down", f"{slot}.product") if down else (f"{slot}.gate_up", "h")
    module, source = LINEARS[tap]
    if c.q_lora_rank is None and module in ("attention.qkv_a", "attention.q_b"):
        return "attention.qkv", "x_attn"
    return module, source


def _read(evidence: Evidence, tap: str, source: str) -> Array:
    """The reference's input of a linear layer, [M, in]."""
    if evidence.graph.name == "experts" and source == "h":
        inputs = evidence.inputs
        rows: Array = inputs["h"][inputs[f"rows_{slot_of(tap)}"]].astype(np.float64)
        return rows
    spec = evidence.tap(source)
    return to_graph(spec, fed_tap(evidence.golden, spec)).astype(np.float64)


def _quantised(inputs: Array) -> Array:
    """Rounded to e4m3 as an FP8 linear layer does it, one scale a row."""
    scale = np.maximum(np.abs(inputs).max(axis=1, keepdims=True) / E4M3_MAX, SMALLEST_SCALE)
    e4m3 = DTYPES["float8e4m3fn"][1]
    rounded: Array = (inputs / scale).astype(np.float32).astype(e4m3).astype(np.float64) * scale
    return rounded


def _output(evidence: Evidence, tap: TapSpec, output: Array, shape: tuple[int, ...]) -> Array:
    """A tap's part of a linear layer's output, in the reference's layout."""
    if tap.name not in ("q_nope", "q_pe"):
        return to_reference(tap, output, shape)
    c = evidence.config
    B, H, S, _ = shape
    q = output[:, : H * c.qk_head_dim].reshape(B, S, H, -1)
    nope, pe = np.split(q, [c.qk_nope_head_dim], axis=-1)
    part, columns = (nope, "N") if tap.name == "q_nope" else (pe, "R")
    axes = ("B", "S", "H", columns)
    return to_reference(replace(tap, axes=axes), part, shape)
