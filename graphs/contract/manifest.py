"""The contents of a folder of engines: the contract between `graphs compile` and the runtime.

build/<model>/<precision>/<compiler>-<sm>-<profile>/        e.g. rtx-sm120-b8t128c4096
    <graph>.engine      dense, moe, experts, head
    manifest.json       this module; written last

Every engine has two optimisation profiles: `decode`, up to `batch` sequences of one token each, and
`prefill`, one sequence of up to `tokens` tokens; both on up to `context` cached rows.
"""

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from graphs.contract.files import write_text
from graphs.contract.program import Program
from graphs.contract.spec import BuildError, GraphName, load_record

MANIFEST_FORMAT = 3

Compiler = Literal["rtx", "tensorrt"]
Bounds = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]  # least, usual, greatest shape

EngineMode = Literal["decode", "prefill"]
# The order of the modes is that of the profiles in an engine.
ENGINE_MODES: tuple[EngineMode, ...] = get_args(EngineMode)


@dataclass(frozen=True)
class Profile:
    """Sequences of a decode step, tokens of a prefill step, cached rows of a sequence: at most."""

    batch: int = 8
    tokens: int = 128
    context: int = 4096

    @property
    def name(self) -> str:
        return f"b{self.batch}t{self.tokens}c{self.context}"


@dataclass(frozen=True)
class EngineRecord:
    """One engine file: what it was made from and by, what it accepts, what building it showed.

    `shapes` bounds every dynamic input as (least, usual, greatest). `activation_bytes` and
    `weight_bytes` are the builder's own figures, None where it logged none; `budget_bytes` is what
    the first may be where nothing is copied (graphs/engines/activation_budget.py).
    `programs` is what was read from the engine; where it is empty, `not_read` says why.
    """

    file: str
    sha256: str
    bytes: int
    onnx_sha256: str
    versions: dict[str, str]
    shapes: dict[EngineMode, dict[str, Bounds]]
    activation_bytes: dict[EngineMode, int | None]
    budget_bytes: dict[EngineMode, int]
    weight_bytes: int | None
    programs: dict[EngineMode, Program]
    not_read: str
    seconds: float
    peak_resident_bytes: int

    def launches(self, mode: EngineMode) -> str:
        """How many launches a step of this mode takes, or "not read"."""
        program = self.programs.get(mode)
        return "not read" if program is None else str(program.launch_count)

    @property
    def fp8_products(self) -> str:
        """FP8 products and FP8 layers, as "5 of 5", the fewer of the modes; or "not read"."""
        programs = self.programs.values()
        if not programs:
            return "not read"
        layers = max(len(program.fp8_layers) for program in programs)
        return f"{min(p.fp8_products for p in programs)} of {layers}" if layers else "–"


@dataclass(frozen=True)
class Manifest:
    """The content of `manifest.json`. It lists only engines that match their ONNX file."""

    compiler: Compiler
    target: str
    profile: Profile
    engines: dict[GraphName, EngineRecord]
    format: int = MANIFEST_FORMAT

    @property
    def folder(self) -> str:
        """The engines' folder, relative to the build folder."""
        return f"{self.compiler}-{self.target}-{self.profile.name}"

    def save(self, folder: Path) -> None:
        text = json.dumps(dataclasses.asdict(self), indent=1) + "\n"
        write_text(folder / "manifest.json", text)

    @classmethod
    def load(cls, folder: Path) -> "Manifest":
        """Read `manifest.json`. Raises BuildError."""
        again = "compile again with `python -m graphs compile`"
        return load_record(cls, folder / "manifest.json", MANIFEST_FORMAT, again)

    def engine_bytes(self, folder: Path, graph: GraphName, onnx_sha256: str) -> bytes:
        """An engine's file, checked: its record, and its ONNX file's hash. Raises BuildError."""
        record = self.engines.get(graph)
        if record is None or not (path := folder / record.file).is_file():
            raise BuildError(f"{folder}: no engine for {graph}; compile it again")
        if record.onnx_sha256 != onnx_sha256:
            raise BuildError(
                f"{path}: made from another {graph}.onnx (expected sha256 {onnx_sha256[:12]}…, "
                f"got {record.onnx_sha256[:12]}…); compile it again"
            )
        content = path.read_bytes()
        if (digest := hashlib.sha256(content).hexdigest()) != record.sha256:
            raise BuildError(
                f"{path}: expected sha256 {record.sha256[:12]}… from manifest.json, got "
                f"{digest[:12]}…; compile it again"
            )
        return content
