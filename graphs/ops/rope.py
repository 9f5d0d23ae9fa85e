"""RoPE(x_BHSR, cos_Pr, sin_Pr, positions_BS) → y_BHSR, r = R/2.

Half layout in and out: pair i is (x[i], x[i + r]). The checkpoint's interleaved rows are permuted
once, at packing, so this equals the reference's rotation. Computed in fp32 and cast to x's dtype.
"""

from typing import TYPE_CHECKING

from graphs.ops import CustomOp, Output, function_text

if TYPE_CHECKING:
    from torch import Tensor


def reference(x: "Tensor", cos: "Tensor", sin: "Tensor", positions: "Tensor") -> "Tensor":
    import torch

    cos, sin = cos[positions][:, None], sin[positions][:, None]
    first, second = x.to(torch.float32).chunk(2, dim=-1)
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    return turned.to(x.dtype)


def outputs(x: "Tensor", cos: "Tensor", sin: "Tensor", positions: "Tensor") -> list[Output]:
    return [(tuple(x.shape), x.dtype)]


def body(inputs: int) -> str:
    return function_text(
        "RoPE",
        "x, cos, sin, positions",
        "y",
        """
        wide = Cast<to = 1>(x)
        turned = RotaryEmbedding<interleaved = 0>(wide, cos, sin, positions)
        y = CastLike(turned, x)
        """,
    )


rope = CustomOp("RoPE", reference, outputs, body)
