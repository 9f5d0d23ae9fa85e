"""FP8Linear(x [M, in] bf16, weight [in, out] e4m3, scale [out] fp32) → y [M, out] bf16.

Activations are quantised per token as they come (scale = row's peak / 448, never 0), weights per
output channel; no calibration. Standard operators in this order stay fused in TensorRT. M is at
least 1: a reduction over the last axis of zero rows has the wrong shape in ONNX Runtime.
"""

from typing import TYPE_CHECKING

from graphs.ops import CustomOp, Output, function_text

if TYPE_CHECKING:
    from torch import Tensor

E4M3_MAX = 448.0
SMALLEST_SCALE = 1e-30  # a row of zeros is divided by this and stays zero


def reference(x: "Tensor", weight: "Tensor", scale: "Tensor") -> "Tensor":
    import torch

    wide = x.to(torch.float32)
    row_scale = (wide.abs().amax(dim=-1, keepdim=True) / E4M3_MAX).clamp_min(SMALLEST_SCALE)
    quantised = (wide / row_scale).to(torch.float8_e4m3fn).to(torch.float32)
    return (quantised @ (weight.to(torch.float32) * scale) * row_scale).to(x.dtype)


def outputs(x: "Tensor", weight: "Tensor", scale: "Tensor") -> list[Output]:
    return [((x.shape[0], weight.shape[1]), x.dtype)]


def body(inputs: int) -> str:
    return function_text(
        "FP8Linear",
        "x, weight, scale",
        "y",
        f"""
        peak = Constant<value_float = {E4M3_MAX}>()
        tiny = Constant<value_float = {SMALLEST_SCALE}>()
        one = Constant<value_float = 1.0>()
        last = Constant<value_ints = [-1]>()
        wide = Cast<to = 1>(x)
        magnitude = Abs(wide)
        row_peak = ReduceMax<keepdims = 1>(magnitude, last)
        raw_scale = Div(row_peak, peak)
        row_scale = Max(raw_scale, tiny)
        scaled = Div(wide, row_scale)
        quantised = QuantizeLinear<output_dtype = 17>(scaled, one)
        x_e4m3 = DequantizeLinear<output_dtype = 16>(quantised, one)
        w_e4m3 = DequantizeLinear<axis = 1, output_dtype = 16>(weight, scale)
        product = MatMul(x_e4m3, w_e4m3)
        row_scale_narrow = CastLike(row_scale, product)
        y = Mul(product, row_scale_narrow)
        """,
    )


fp8_linear = CustomOp("FP8Linear", reference, outputs, body)
