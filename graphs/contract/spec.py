"""The contents of a build folder: the contract between `export`, `graphs` and `runtime`.

    build/<model>/<precision>/
        spec.json                       this module: graphs, their inputs and outputs, hashes
        onnx/<graph>.onnx               dense, moe, experts, head
        weights/embed.safetensors       embed.weight [vocab, D]
        weights/layer_000.safetensors   one layer's weights in the engines' layout
        weights/head.safetensors        final norm and lm_head
        rope.safetensors                cos, sin [P, r]
        tokenizer/, generation_config.json
        golden/                         what the reference computed for fixed inputs
        parity/                         results of the parity commands (graphs.parity.findings)
        standalone/<graph>_<layer>/     a copy of one graph (graphs.parity.standalone)
        <compiler>-<sm>-<profile>/      engines and their manifest

Dimension key: in every tensor name and einsum of the project a letter means this, and nothing else.

    B  batch: sequences of a step
    S  tokens of each sequence in this step
    L  cached rows of each sequence
    T  L + S, the rows that attention reads
    M  B · S, the rows of a linear layer
    P  positions in the rope tables
    D  hidden_size
    H  attention heads
    Q  q_lora_rank
    C  kv_lora_rank
    N  qk_nope_head_dim
    R  qk_rope_head_dim
    r  R / 2
    W  C + R, the width of a cached row
    V  v_head_dim
    E  routed experts
    K  experts per token
    F  intermediate size of a SwiGLU
    U  vocabulary
    n  rows that an expert slot gets
"""

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

from graphs.contract.config import ModelConfig
from graphs.contract.files import write_text
from graphs.contract.json_records import decode
from graphs.contract.rope_config import ConfigError

SPEC_FORMAT = 4
EXPERT_SLOTS = 8  # experts that one run of the experts graph computes

Precision = Literal["fp32", "bf16", "fp8"]
GraphName = Literal["dense", "moe", "experts", "head"]
GoldenMode = Literal["prefill", "chunk", "decode"]  # how a golden's tokens reached the cache
TensorKind = Literal["activation", "table", "weight"]
GRAPHS: tuple[GraphName, ...] = get_args(GraphName)
GOLDEN_MODES: tuple[GoldenMode, ...] = get_args(GoldenMode)
PRECISIONS: tuple[Precision, ...] = get_args(Precision)
_T = TypeVar("_T")


class BuildError(ValueError):
    """A build folder that is absent, incomplete, or of another model or precision."""


def load_record(kind: type[_T], path: Path, version: int, again: str) -> _T:
    """The dataclass in a JSON file of this format.

    Raises BuildError where it is absent, damaged or of another format; `again` says how to make it.
    """
    if not path.is_file():
        raise BuildError(f"{path.parent}: no {path.name}; {again}")
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        if raw["format"] != version:
            raise BuildError(f"{path}: expected format {version}, got {raw['format']!r}; {again}")
        return decode(kind, raw)
    except (KeyError, TypeError, AttributeError, UnicodeDecodeError, json.JSONDecodeError) as e:
        raise BuildError(f"{path}: damaged or incomplete ({e!r}); {again}") from e


@dataclass(frozen=True)
class TensorSpec:
    """A graph's input or output. dims: sizes, or names of dynamic dimensions."""

    name: str
    dtype: str  # ONNX's name in lower case: float, bfloat16, float8e4m3fn, int64
    dims: tuple[int | str, ...]
    kind: TensorKind = "activation"

    def shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """The shape for these sizes of the dynamic dimensions; a name may be a product, `a*b`."""
        return tuple(
            d if isinstance(d, int) else math.prod(sizes[name] for name in d.split("*"))
            for d in self.dims
        )


@dataclass(frozen=True)
class TapSpec:
    """An intermediate that parity compares: where it is in a graph as exported, and its layout.

    `value` is the graph's, or, where `inner` is given, names the custom op's node by its first
    output, and `inner` the value in the op's body, or its parts along S. `columns` are those of its
    last axis. `axes` are the graph's, `dims` the reference's, one dimension letter each; see
    graphs/parity/taps.py. The last axis of an `interleaved` one is in half layout in the graph and
    interleaved in the reference.
    """

    name: str
    symbol: str
    value: str
    inner: tuple[str, ...]
    axes: tuple[str, ...]
    dims: str
    columns: tuple[int, int] | None = None
    interleaved: bool = False


@dataclass(frozen=True)
class GraphSpec:
    """One ONNX file: its path in the build folder, its content's hash, what it reads and writes.

    `taps` are what parity compares, outputs among them, in the order of the dataflow.
    """

    name: GraphName
    file: str
    sha256: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    taps: tuple[TapSpec, ...]

    @property
    def weights(self) -> tuple[TensorSpec, ...]:
        return tuple(t for t in self.inputs if t.kind == "weight")


@dataclass(frozen=True)
class BuildSpec:
    """The content of `spec.json`."""

    precision: Precision
    raw_config: dict[str, Any]
    config_sha256: str
    graphs: dict[GraphName, GraphSpec]
    slots: int = EXPERT_SLOTS
    format: int = SPEC_FORMAT

    @cached_property
    def config(self) -> ModelConfig:
        return ModelConfig.from_dict(self.raw_config)

    @property
    def cache_dtype(self) -> str:
        """The type of the latent cache and of the rows that a step adds to it."""
        return "float" if self.precision == "fp32" else "bfloat16"

    @property
    def slot_weights(self) -> list[list[TensorSpec]]:
        """The weights that the experts graph reads in each expert slot, in one order."""
        weights = self.graphs["experts"].weights
        prefixes = (f"slots.{slot}." for slot in range(self.slots))
        return [[t for t in weights if t.name.startswith(prefix)] for prefix in prefixes]

    def layer_tensors(self, layer: int) -> dict[str, TensorSpec]:
        """The contents of a layer's file: its block's weights, and those of every routed expert."""
        block = self.config.block_type(layer)
        tensors = {t.name: t for t in self.graphs[block].weights}
        if block == "moe":
            slot = self.slot_weights[0]
            for expert in range(self.config.n_routed_experts):
                tensors |= {expert_weight(t.name, expert): t for t in slot}
        return tensors

    @property
    def weight_files(self) -> list[str]:
        """Every file of packed weights, from the build folder."""
        layers = [layer_file(layer) for layer in range(self.config.num_hidden_layers)]
        return [EMBED_FILE, *layers, HEAD_FILE, ROPE_FILE]

    def file_metadata(self, content: str) -> dict[str, str]:
        """The metadata of every weight file, checked when it is read."""
        return {
            "content": content,
            "precision": self.precision,
            "config_sha256": self.config_sha256,
        }

    def save(self, build: Path) -> None:
        text = json.dumps(dataclasses.asdict(self), indent=1) + "\n"
        write_text(build / "spec.json", text)

    @classmethod
    def load(cls, build: Path) -> "BuildSpec":
        """Read and check `spec.json`. Raises BuildError."""
        path, again = build / "spec.json", "export again with `python -m export graphs`"
        spec = load_record(cls, path, SPEC_FORMAT, again)
        if spec.config_sha256 != config_hash(spec.raw_config):
            raise BuildError(f"{path}: config_sha256 does not match its config; {again}")
        try:
            _ = spec.config
        except ConfigError as e:
            raise BuildError(f"{path}: damaged or incomplete ({e!r}); {again}") from e
        if missing := set(GRAPHS) - set(spec.graphs):
            raise BuildError(f"{path}: graph {min(missing)} is missing; {again}")
        return spec

    def onnx_bytes(self, build: Path, graph: GraphName) -> bytes:
        """A graph's file, checked against its recorded hash. Raises BuildError."""
        path = build / self.graphs[graph].file
        if not path.is_file():
            raise BuildError(f"{path}: missing; make it with `python -m export graphs`")
        content = path.read_bytes()
        expected, digest = self.graphs[graph].sha256, hashlib.sha256(content).hexdigest()
        if digest != expected:
            raise BuildError(
                f"{path}: expected sha256 {expected[:12]}… from spec.json, got {digest[:12]}…; "
                "export again"
            )
        return content


def config_hash(raw_config: dict[str, Any]) -> str:
    """The hash of a config's content, whatever the order and spacing of its file."""
    return hashlib.sha256(json.dumps(raw_config, sort_keys=True).encode()).hexdigest()


EMBED_FILE = "weights/embed.safetensors"
HEAD_FILE = "weights/head.safetensors"
ROPE_FILE = "rope.safetensors"


def layer_file(layer: int) -> str:
    """A layer's weight file, relative to the build folder."""
    return f"weights/layer_{layer:03d}.safetensors"


def expert_weight(slot_weight: str, expert: int) -> str:
    """The name in a layer's file of what the experts graph reads as `slots.<slot>.…`."""
    return f"experts.{expert}." + slot_weight.split(".", 2)[2]
