"""GPUs that engines can be built for: which compiler knows which, and what a precision needs."""

import re
import shutil
import subprocess

from graphs.contract.manifest import Compiler
from graphs.contract.shapes import CompileError
from graphs.contract.spec import Precision

DEFAULT_TARGET = 120

# Compute capabilities, major · 10 + minor. Those of `rtx` are the ones its builder names (1.7.1);
# those of `tensorrt`, whose builder takes the GPU it finds, have not been run.
TARGETS: dict[Compiler, tuple[int, ...]] = {
    "rtx": (75, 80, 86, 89, 120, 121),
    "tensorrt": (75, 80, 86, 89, 90, 100, 103, 120, 121),
}
LEAST_TARGET: dict[Precision, int] = {"fp32": 75, "bf16": 80, "fp8": 89}


def resolve_target(target: str, compiler: Compiler, precision: Precision) -> int:
    """The capability that `sm120` stands for, or `auto`. Raises CompileError.

    `auto` is the GPU of this machine, and sm120 where there is none.
    """
    here = _gpu() if target == "auto" or compiler == "tensorrt" else None
    if compiler == "tensorrt" and here is None:
        raise CompileError(
            "target: expected a GPU of this machine with the compiler tensorrt, got none; run it "
            f"where the engines will run, or use the compiler rtx for {_names(TARGETS['rtx'])}"
        )
    sm = _parse(target, compiler) if target != "auto" else here or DEFAULT_TARGET
    if sm not in TARGETS[compiler]:
        instead = "; use the compiler tensorrt" if sm in TARGETS["tensorrt"] else ""
        raise CompileError(
            f"target: expected one of {_names(TARGETS[compiler])} with the compiler {compiler}, "
            f"got sm{sm}{instead}"
        )
    if compiler == "tensorrt" and sm != here:
        raise CompileError(
            f"target: expected sm{here}, the GPU of this machine, with the compiler tensorrt, got "
            f"sm{sm}; use the target auto here, or run it on the other machine"
        )
    if sm < LEAST_TARGET[precision]:
        raise CompileError(
            f"target: expected sm{LEAST_TARGET[precision]} or later for {precision}, got sm{sm}; "
            "use another target or a build of another precision"
        )
    return sm


def _parse(target: str, compiler: Compiler) -> int:
    digits = target.removeprefix("sm")
    if target == digits or not (digits.isascii() and digits.isdigit()):
        raise CompileError(
            f"target: expected auto or one of {_names(TARGETS[compiler])}, got {target!r}"
        )
    return int(digits)


def _gpu() -> int | None:
    """The first GPU's capability, asked of the driver; None where there is no GPU."""
    query = ("nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader")
    if shutil.which(query[0]) is None:
        return None
    done = subprocess.run(query, capture_output=True, text=True, check=False)
    capability = re.match(r"(\d+)\.(\d+)", done.stdout)
    return int(capability[1] + capability[2]) if capability else None


def _names(targets: tuple[int, ...]) -> str:
    return ", ".join(f"sm{sm}" for sm in targets)
