"""What a transposed grid of block scales would do to a packed weight, for goldens.

A value of a block-FP8 weight is its e4m3 code times its block's scale. Had the grid been read
transposed, it would be off by the ratio of two scales; a golden holds that ratio, so that a parity
run, which has no checkpoint, can turn a suspected weight back. A grid that is not square would have
to be reshaped on the way, row by row.
"""

import torch
from torch import Tensor

from export.checkpoint.weight_forms import SCALE_SUFFIX
from export.packing.layer_weights import LayerPacker, Source
from graphs.contract.quantization import FP8Blocks


def regrid(packer: LayerPacker, module: str) -> Tensor | None:
    """fp32 [out, blocks of in], scale / scale of the transposed grid, rows in the packed order.

    None where the module's weights are not stored with block scales. `attention` is kv_b_proj, its
    rows in the checkpoint's order.
    """
    blocks = packer.config.quantization
    if not isinstance(blocks, FP8Blocks):
        return None
    sources = [Source("self_attn.kv_b_proj")] if module == "attention" else packer.sources(module)
    parts = []
    for source in sources:
        name = f"{packer.prefix}{source.name}.weight"
        scale = packer.checkpoint.stored[name + SCALE_SUFFIX].read().to(torch.float32)
        square = scale.shape[0] == scale.shape[1]
        other = scale.T if square else scale.T.reshape(scale.shape)
        rows = (scale / other).repeat_interleave(blocks.block[0], dim=0)
        rows = rows[: packer.checkpoint.shapes[name][0]]
        parts.append(rows if source.rows is None else rows[source.rows])
    return torch.cat(parts)
