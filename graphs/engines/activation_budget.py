"""The activation memory that an engine may take where no weight and no cache is copied.

The builder says one figure a profile: the most that buffers alive at one time take. It is the only
sign of a copy on a machine without a GPU, and it depends on the profile. So it is held against a
budget, computed from the config:

- every graph: a workspace for matrix products, whose size does not grow;
- a block at its linear layers: the rows' widest values there, which are fp32 after an FP8 product;
  and, with a smaller workspace in fp8, one buffer of scores;
- a block at its softmax: three buffers of scores (keys × tokens × heads, of one query block)
  and the rows' queries; in some profiles also a fourth, or the workspace. The cache and the weights
  are read in place;
- experts: the rows of one expert slot where they are few, of several or all where they are many;
- head: the normed rows. Logits are written where they are bound.

This was fitted to TensorRT-RTX 1.7.1: SM120 engines of five models, in three precisions and up to
15 profiles, are all within the budget. What could be copied unseen is `budget − activation`. In a
decode step of the default profile that is less than any FP8 matrix, in every preset (K2: 10.1 MB,
and 14.7 MB the least matrix); with more scores it is more. Beyond 2^31 scores the builder's figure
falls below their own size, and shows nothing.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from graphs.contract.config import ModelConfig
from graphs.contract.manifest import ENGINE_MODES, EngineMode, EngineRecord, Profile
from graphs.contract.shapes import dimension_ranges
from graphs.contract.spec import BuildSpec, GraphName, Precision
from graphs.contract.tensorfile import DTYPES
from graphs.ops.latent_attention import QUERY_BLOCKS

WORKSPACE = 10_240_000  # of a matrix product
# Of those of attention and head, which are bf16 in an fp8 build.
ATTENTION_WORKSPACE: dict[Precision, int] = {"fp32": WORKSPACE, "bf16": WORKSPACE, "fp8": 8_192_000}
Estimate = Literal["mostly", "at most", "at a linear layer"]
MARGIN = 1.1  # by which an engine may exceed what is expected at most


@dataclass(frozen=True)
class Excess:
    """An engine above its budget; what would explain it best if it were copied, and its bytes."""

    graph: GraphName
    mode: EngineMode
    activation: int
    budget: int
    likely: str
    copied: int

    def __str__(self) -> str:
        return (
            f"{self.graph}: {self.mode}: expected at most {self.budget / 1e6:.1f} MB of activation "
            f"memory, got {self.activation / 1e6:.1f} MB; likely copied at every run: "
            f"{self.likely} ({self.copied / 1e6:.1f} MB)"
        )


def expected_activation(
    spec: BuildSpec, graph: GraphName, mode: EngineMode, profile: Profile
) -> int:
    """Bytes that a run takes at most where nothing is copied, as far as was seen."""
    return _estimate(spec, graph, mode, profile, "at most")


def activation_budget(spec: BuildSpec, graph: GraphName, mode: EngineMode, profile: Profile) -> int:
    """Bytes that a run may take at most: 10 % more than expected."""
    return int(MARGIN * expected_activation(spec, graph, mode, profile))


def _estimate(
    spec: BuildSpec, graph: GraphName, mode: EngineMode, profile: Profile, what: Estimate
) -> int:
    """Bytes that a run takes: mostly, at most, or at least at a linear layer, with no scores."""
    c = spec.config
    sizes = {name: most for name, (_, _, most) in dimension_ranges(mode, profile).items()}
    rows, act = sizes["rows"], 4 if spec.precision == "fp32" else 2
    gate_up = 4 if spec.precision == "fp8" else act  # an FP8 product is fp32 until it is scaled
    D, attention_workspace = c.hidden_size, ATTENTION_WORKSPACE[spec.precision]
    if graph == "head":
        return attention_workspace + rows * D * act
    if graph == "experts":
        slot = 8 * D + act * D + (act + 2 * gate_up) * c.moe_intermediate_size
        return WORKSPACE + _slots_at_once(rows, spec.slots) * rows * slot
    if what == "at a linear layer":
        return WORKSPACE
    queries = sizes["batch"] * math.ceil(sizes["tokens"] / QUERY_BLOCKS)  # of the greatest one
    scores = queries * (sizes["context"] + sizes["tokens"]) * c.num_attention_heads * act
    attention, linear = _row_bytes(c, graph, act, gate_up)
    more = max(attention_workspace, scores) if what == "at most" else 0
    at_softmax = 3 * scores + more + rows * attention
    at_linears = max(WORKSPACE, attention_workspace + scores) + rows * max(attention, linear)
    return max(at_linears, at_softmax)


def _row_bytes(c: ModelConfig, graph: GraphName, act: int, gate_up: int) -> tuple[int, int]:
    """Bytes of one row of a block: at its attention, with queries of all heads; at its SwiGLU."""
    H, D = c.num_attention_heads, c.hidden_size
    width = c.intermediate_size if graph == "dense" else c.shared_intermediate_size
    residual = 4 * D
    attention = act * H * (c.qk_head_dim + c.cache_width)
    return residual + attention, residual + act * D + (act + 2 * gate_up) * width


def _slots_at_once(rows: int, slots: int) -> int:
    """The expert slots whose rows the builder keeps at once: seen are 1, up to 2.8, up to 8.1."""
    return 1 if rows <= 64 else 3 if rows <= 128 else slots


def excesses(
    spec: BuildSpec, graph: GraphName, engine: EngineRecord, profile: Profile
) -> list[Excess]:
    """One for each mode in which an engine takes more than its budget."""
    over: list[Excess] = []
    for mode in ENGINE_MODES:
        activation, budget = engine.activation_bytes[mode], engine.budget_bytes[mode]
        if activation is None or activation <= budget:
            continue
        copies = list(_copies(spec, graph, mode, profile))
        size = min(copies, key=lambda copy: abs(copy.activation - activation)).size
        likely = " or ".join(copy.name for copy in copies if copy.size == size)
        over.append(Excess(graph, mode, activation, budget, likely, size))
    return over


@dataclass(frozen=True)
class _Copy:
    """Something that could be copied, its bytes, and what a run would take with them."""

    name: str
    size: int
    activation: int


def _copies(
    spec: BuildSpec, graph: GraphName, mode: EngineMode, profile: Profile
) -> Iterator[_Copy]:
    """Each thing that could be copied: the cache, or a matrix in several forms."""
    for name, size, dims in _copied(spec, graph, mode, profile):
        what: Estimate = "at a linear layer" if dims == 2 else "mostly"
        yield _Copy(name, size, size + _estimate(spec, graph, mode, profile, what))


def _copied(
    spec: BuildSpec, graph: GraphName, mode: EngineMode, profile: Profile
) -> Iterator[tuple[str, int, int]]:
    """Names, bytes and dimensions."""
    c = spec.config
    sizes = {name: most for name, (_, _, most) in dimension_ranges(mode, profile).items()}
    for tensor in spec.graphs[graph].inputs:
        name, itemsize = tensor.name, DTYPES[tensor.dtype][1].itemsize
        if name == "context":
            cache = math.prod(tensor.shape(sizes)) * itemsize
            yield "the cache", cache, 3
            yield "the cache's latent part", cache // c.cache_width * c.kv_lora_rank, 3
        if tensor.kind != "weight" or len(tensor.dims) == 1:
            continue
        if name.startswith("slots."):  # all alike
            if not name.startswith("slots.0."):
                continue
            name = name.replace(".0.", ".*.")
        size = math.prod(tensor.shape({})) * itemsize
        ways = {name: size}
        if itemsize == 1:
            ways[f"{name} in 16 bits"] = 2 * size
        if len(tensor.dims) == 3:
            ways[f"{name} once a sequence"] = sizes["batch"] * size
        dims = len(tensor.dims)
        yield from ((way, n, dims) for way, n in ways.items())
        if graph == "experts":
            yield from ((f"{way} of every slot", spec.slots * n, dims) for way, n in ways.items())
