"""Statistics of quantising to e4m3: scales, values at the peak, values lost."""

from typing import Literal

import numpy as np

from graphs.contract.tensorfile import DTYPES, Array
from graphs.ops.fp8_linear import E4M3_MAX, SMALLEST_SCALE
from graphs.parity.compare import ReplayCase
from graphs.parity.findings import FP8Stats

E4M3 = DTYPES["float8e4m3fn"][1]
PEAK_CODE = 0x7E  # the byte of 448, sign apart


def activation_stats(case: ReplayCase, module: str, inputs: Array) -> FP8Stats:
    """Statistics of an FP8 linear layer's input [M, inputs], quantised as the layer does it."""
    wide = inputs.astype(np.float32)
    peaks = np.abs(wide).max(axis=1, keepdims=True)
    scales = np.maximum(peaks / np.float32(E4M3_MAX), np.float32(SMALLEST_SCALE))
    quantised = (wide / scales).astype(E4M3)
    flushed = int(((quantised.astype(np.float32) == 0) & (wide != 0)).sum())
    return _stats(case, module, "activation", scales, quantised, flushed)


def weight_stats(case: ReplayCase, module: str, weight: Array, scales: Array) -> FP8Stats:
    """Statistics of a packed weight [outputs, inputs], with one scale per output channel.

    What packing flushed to zero is lost, so `flushed` is 0.
    """
    return _stats(case, module, "weight", scales, weight.view(E4M3), 0)


def _stats(
    case: ReplayCase,
    module: str,
    kind: Literal["activation", "weight"],
    scales: Array,
    values: Array,
    flushed: int,
) -> FP8Stats:
    bins, counts = np.unique(np.floor(np.log2(scales)).astype(int), return_counts=True)
    assert case.layer is not None
    return FP8Stats(
        case=case.name,
        layer=case.layer,
        module=module,
        kind=kind,
        log2_scale=list(zip(bins.tolist(), counts.tolist(), strict=True)),
        values=values.size,
        at_peak=int(((values.view(np.uint8) & 0x7F) == PEAK_CODE).sum()),
        flushed=flushed,
        rows=scales.size,
        floor_rows=int((scales <= np.float32(SMALLEST_SCALE)).sum()),
    )
