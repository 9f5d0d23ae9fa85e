"""GPUs by their public figures: memory, its bandwidth, and operations a second by type.

Every rate is for dense matrices: sheets that count structured sparsity say twice as much. Of the
rates that a card has for one type it is the one with sums in fp32; fp32 itself is the rate outside
the tensor cores. Memory is what a card is sold with, in 10^9 bytes: it shows a few per cent more,
and its driver takes some. `source` names NVIDIA's document and what was derived from it. The
figures were looked up in pages that quote these documents; none was measured.
"""

from dataclasses import dataclass

from graphs.contract.spec import Precision

GB, TERA = 10**9, 10**12


class UnknownGpuError(ValueError):
    """A name that the table does not have; the message lists those that it has."""


@dataclass(frozen=True)
class Gpu:
    """Bytes, bytes a second, and operations a second by the type of the factors."""

    name: str
    label: str
    sm: int  # compute capability, major · 10 + minor
    memory: int
    bandwidth: int
    flops: dict[Precision, float]
    source: str


def _gpu(
    name: str,
    label: str,
    sm: int,
    memory_gb: int,
    bandwidth_gb: int,
    tera: tuple[float, float, float],
    source: str,
) -> Gpu:
    """`tera` are the rates in fp32, bf16 and fp8, in 10^12 operations a second."""
    fp32, bf16, fp8 = (rate * TERA for rate in tera)
    flops: dict[Precision, float] = {"fp32": fp32, "bf16": bf16, "fp8": fp8}
    return Gpu(name, label, sm, memory_gb * GB, bandwidth_gb * GB, flops, source)


_HOPPER = (67, 989, 1979)
_TABLE = (
    _gpu(
        *("h100", "H100 SXM", 90, 80, 3350, _HOPPER),
        "H100 datasheet, SXM column: 1,979 bf16 and 3,958 fp8 with sparsity, halved",
    ),
    _gpu(
        *("h200", "H200 SXM", 90, 141, 4800, _HOPPER),
        "H200 datasheet, SXM column: 1,979 bf16 and 3,958 fp8 with sparsity, halved",
    ),
    _gpu(
        *("b200", "B200", 100, 180, 8000, (80, 2250, 4500)),
        "DGX B200 datasheet, an eighth of the system: 1,440 GB, 64 TB/s, 72 petaflops fp8 with "
        "sparsity, halved; bf16 and fp32: Blackwell architecture brief, HGX B200",
    ),
    _gpu(
        *("rtx-5090", "RTX 5090", 120, 32, 1792, (104.8, 209.5, 419)),
        "RTX Blackwell GPU architecture whitepaper, appendix A",
    ),
    _gpu(
        *("rtx-pro-6000", "RTX PRO 6000", 120, 96, 1792, (125, 500, 1000)),
        "RTX PRO 6000 Blackwell Workstation Edition datasheet: 4,000 TOPS fp4 with sparsity, of "
        "which dense fp8 is a quarter and bf16 an eighth",
    ),
    _gpu(
        *("rtx-4090", "RTX 4090", 89, 24, 1008, (82.6, 165.2, 330.3)),
        "Ada GPU architecture whitepaper, appendix A",
    ),
    _gpu(
        *("l40s", "L40S", 89, 48, 864, (91.6, 362, 733)),
        "L40S datasheet, figures without sparsity",
    ),
)

GPUS: dict[str, Gpu] = {gpu.name: gpu for gpu in _TABLE}


def find_gpu(name: str) -> Gpu:
    """The GPU of this name; case, blanks and hyphens do not matter. Raises UnknownGpuError."""
    for known, gpu in GPUS.items():
        if _plain(name) in (_plain(known), _plain(gpu.label)):
            return gpu
    raise UnknownGpuError(f"GPU: expected one of {', '.join(GPUS)}, got {name!r}")


def _plain(name: str) -> str:
    return "".join(c for c in name.lower() if c.isalnum())
