"""Ratios that show in parity whether a weight was packed with a transposed scale grid.

A value of a block-FP8 weight is its e4m3 code times the scale of its scale block. If the grid was
read transposed, the value is off by the ratio of two scales. Goldens hold these ratios, so that a
parity run, which has no checkpoint, can correct a suspected weight. A grid that is not square can
only be misread by reshaping its transpose row by row.
"""

import torch
from torch import Tensor

from export.checkpoint.weight_forms import SCALE_SUFFIX
from export.packing.layer_weights import LayerPacker, Source
from graphs.contract.quantization import FP8Blocks


def regrid(packer: LayerPacker, module: str) -> Tensor | None:
    """Scale over transposed grid's scale, fp32 [out, scale blocks of in], rows as packed.

    None where the module's weights are not block FP8. `attention` is kv_b_proj, its rows in the
    checkpoint's order.
    """
    quantization = packer.config.quantization
    if not isinstance(quantization, FP8Blocks):
        return None
    sources = [Source("self_attn.kv_b_proj")] if module == "attention" else packer.sources(module)
    parts = []
    for source in sources:
        name = f"{packer.prefix}{source.name}.weight"
        scale = packer.checkpoint.stored[name + SCALE_SUFFIX].read().to(torch.float32)
        square = scale.shape[0] == scale.shape[1]
        transposed = scale.T if square else scale.T.reshape(scale.shape)
        rows = (scale / transposed).repeat_interleave(quantization.block[0], dim=0)
        rows = rows[: packer.checkpoint.shapes[name][0]]
        parts.append(rows if source.rows is None else rows[source.rows])
    return torch.cat(parts)
