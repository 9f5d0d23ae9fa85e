"""FP8Linear(x [M, in], weight [out, in] e4m3, scale [out] fp32) → y [M, out], in x's type.

Activations are quantised per token as they come (scale = row's peak / 448, never 0), weights per
output channel; no calibration. The product is that of the e4m3 values alone: both sides are
dequantised by 1, and what scales them is multiplied with the fp32 result, before it is rounded
once. Only this form compiles to an FP8 product: with the channel's scale in the weight's
DequantizeLinear, TensorRT widens the weight and multiplies in 16 bits. `Gemm(transB=1)` reads the
weight as it lies, in an engine and in ONNX Runtime. M is at least 1: a reduction over the last axis
of zero rows has the wrong shape in ONNX Runtime.
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
    product = torch.nn.functional.linear(quantised, weight.to(torch.float32))
    return (product * row_scale * scale).to(x.dtype)


def outputs(x: "Tensor", weight: "Tensor", scale: "Tensor") -> list[Output]:
    return [((x.shape[0], weight.shape[0]), x.dtype)]


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
        x_e4m3 = DequantizeLinear<output_dtype = 1>(quantised, one)
        weight_e4m3 = DequantizeLinear<output_dtype = 1>(weight, one)
        product = Gemm<transB = 1>(x_e4m3, weight_e4m3)
        by_row = Mul(product, row_scale)
        by_channel = Mul(by_row, scale)
        y = CastLike(by_channel, x)
        """,
    )


fp8_linear = CustomOp("FP8Linear", reference, outputs, body)
