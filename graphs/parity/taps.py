"""The comparable intermediates of each graph, and how each maps to the reference's.

A tap is found by what stands still: the names of weights and of the custom ops. So it needs no node
of its own, and an exported graph is the same with and without taps. `find_taps` resolves them when
a graph is exported, and `spec.json` lists them in the order of the dataflow; the copy of a graph
that gives them as outputs is made by `graphs.passes.expose_taps`, for parity alone.

The reference has three more that no graph has, since the engines attend over the latent: k^C, and
the keys and values of every head.

A layout is a tuple of axes, each a product of dimension letters: ("BS", "HV") is a matrix of B·S
rows and H·V columns. The reference has one letter an axis.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod

import numpy as np
import onnx

from graphs.contract.config import ModelConfig
from graphs.contract.spec import EXPERT_SLOTS, GRAPHS, TapSpec
from graphs.contract.tensorfile import Array
from graphs.ops.latent_attention import in_blocks

SYMBOLS = {
    "x_attn": "x_attn",
    "c_q": "c^Q",
    "c_q_normed": "ĉ^Q",
    "c_kv": "c^KV",
    "k_pe": "k^pe before RoPE",
    "q_nope": "q^C",
    "q_pe": "q^pe before RoPE",
    "q_pe_rotated": "q^pe",
    "new": "ĉ^KV ‖ k^pe",
    "scores": "scores",
    "probabilities": "probabilities",
    "mix": "mix",
    "delta_attn": "Δ_attn",
    "x_mid": "x'",
    "h": "h",
    "gate": "gate",
    "up": "up",
    "product": "a⊙u",
    "delta_mlp": "Δ",
    "y": "y",
    "gate_logits": "gate logits",
    "gate_scores": "gate scores",
    "experts": "chosen experts",
    "expert_weights": "expert weights",
    "shared_gate": "shared gate",
    "shared_up": "shared up",
    "shared_product": "shared a⊙u",
    "shared": "shared output",
    "acc": "x' + shared",
    "output": "expert output",
    "acc_out": "x' + shared + routed",
    "logits": "logits",
}


@dataclass(frozen=True)
class _Finder:
    """Looks taps up in a graph as exported. Raises ValueError where one is not there."""

    model: onnx.ModelProto
    config: ModelConfig

    def reader(self, weight: str) -> onnx.NodeProto:
        """The one node that reads a weight or an op's result."""
        nodes: Iterable[onnx.NodeProto] = self.model.graph.node
        for node in nodes:
            if weight in list(node.input)[1:]:
                return node
        raise ValueError(
            f"{self.model.graph.name}: no node reads {weight}, which taps are found by; "
            "mend graphs.parity.taps to fit this graph"
        )

    def producer(self, value: str) -> onnx.NodeProto:
        nodes: Iterable[onnx.NodeProto] = self.model.graph.node
        return next(node for node in nodes if value in node.output)

    def reads(self, weight: str, name: str, axes: tuple[str, ...], dims: str) -> TapSpec:
        """The first input of the node that reads a weight."""
        return self._tap(name, self.reader(weight).input[0], axes, dims)

    def gives(
        self,
        weight: str,
        name: str,
        axes: tuple[str, ...],
        dims: str,
        columns: tuple[int, int] | None = None,
        interleaved: bool = False,
    ) -> TapSpec:
        """The output of the node that reads a weight, or some of its columns."""
        value = self.reader(weight).output[0]
        return self._tap(name, value, axes, dims, (), columns, interleaved)

    def inside(
        self, weight: str, inner: tuple[str, ...], name: str, axes: tuple[str, ...], dims: str
    ) -> TapSpec:
        """A value of the body of the custom op that reads a weight, or its parts by tokens."""
        return self._tap(name, self.reader(weight).output[0], axes, dims, inner)

    def output(self, name: str, axes: tuple[str, ...], dims: str) -> TapSpec:
        return self._tap(name, name, axes, dims)

    def _tap(
        self,
        name: str,
        value: str,
        axes: tuple[str, ...],
        dims: str,
        inner: tuple[str, ...] = (),
        columns: tuple[int, int] | None = None,
        interleaved: bool = False,
    ) -> TapSpec:
        symbol = SYMBOLS[name.rpartition(".")[2]]
        return TapSpec(name, symbol, value, inner, axes, dims, columns, interleaved)


def find_taps(model: onnx.ModelProto, config: ModelConfig) -> tuple[TapSpec, ...]:
    """The taps of a graph as exported, in the order of the dataflow.

    Raises ValueError where the graph lacks what one is found by.
    """
    finder = _Finder(model, config)
    match model.graph.name:
        case "dense":
            return (*_attention(finder), *_dense(finder))
        case "moe":
            return (*_attention(finder), *_moe(finder))
        case "experts":
            return tuple(_experts(finder))
        case "head":
            return (finder.output("logits", ("M", "U"), "MU"),)
    raise ValueError(f"graph {model.graph.name!r}: expected one of {', '.join(GRAPHS)}")


def _attention(f: _Finder) -> Iterator[TapSpec]:
    c = f.config
    rows, C, R = ("BS", "D"), c.kv_lora_rank, c.qk_rope_head_dim
    Q = c.num_attention_heads * c.qk_head_dim if c.q_lora_rank is None else c.q_lora_rank
    first = "attention.qkv.weight" if c.q_lora_rank is None else "attention.qkv_a.weight"
    yield f.reads(first, "x_attn", rows, "BSD")
    if c.q_lora_rank is not None:
        yield f.gives(first, "c_q", ("BS", "Q"), "BSQ", (0, Q))
    yield f.gives(first, "c_kv", ("BS", "C"), "BSC", (Q, Q + C))
    yield f.gives(first, "k_pe", ("BS", "R"), "BSR", (Q + C, Q + C + R), interleaved=True)
    if c.q_lora_rank is not None:
        yield f.reads("attention.q_b.weight", "c_q_normed", ("BS", "Q"), "BSQ")
    attention = f.reader("attention.w_uk")
    q_nope, q_pe, heads = attention.input[0], attention.input[1], ("B", "H", "S")
    unrotated = f.producer(q_pe).input[0]
    yield f._tap("q_nope", q_nope, (*heads, "N"), "BHSN")
    yield f._tap("q_pe", unrotated, (*heads, "R"), "BHSR", interleaved=True)
    yield f._tap("q_pe_rotated", q_pe, (*heads, "R"), "BHSR")
    yield f.output("new", ("B", "S", "W"), "BSW")
    keys_major = ("B", "T", "H", "S")
    scores, soft = in_blocks("scores_BTHs"), in_blocks("soft_BTHs")
    yield f.inside("attention.w_uk", scores, "scores", keys_major, "BHST")
    yield f.inside("attention.w_uk", soft, "probabilities", keys_major, "BHST")
    yield f.reads("attention.o.weight", "mix", ("BS", "HV"), "BHSV")
    yield f.gives("attention.o.weight", "delta_attn", rows, "BSD")
    yield f.reads("post_norm.weight", "x_mid", rows, "BSD")


def _swiglu(f: _Finder, module: str, prefix: str, letters: str, width: int) -> Iterator[TapSpec]:
    """gate, up and their product, of rows with these dimension letters."""
    axes, dims = (letters, "F"), letters + "F"
    weight = f"{module}.gate_up.weight"
    yield f.gives(weight, f"{prefix}gate", axes, dims, (0, width))
    yield f.gives(weight, f"{prefix}up", axes, dims, (width, 2 * width))
    yield f.reads(f"{module}.down.weight", f"{prefix}product", axes, dims)


def _dense(f: _Finder) -> Iterator[TapSpec]:
    yield f.reads("mlp.gate_up.weight", "h", ("BS", "D"), "BSD")
    yield from _swiglu(f, "mlp", "", "BS", f.config.intermediate_size)
    yield f.gives("mlp.down.weight", "delta_mlp", ("BS", "D"), "BSD")
    yield f.output("y", ("B", "S", "D"), "BSD")


def _moe(f: _Finder) -> Iterator[TapSpec]:
    yield f.output("h", ("M", "D"), "MD")
    yield f.inside("gate.weight", ("logits",), "gate_logits", ("M", "E"), "ME")
    yield f.inside("gate.weight", ("scores",), "gate_scores", ("M", "E"), "ME")
    yield f.output("experts", ("M", "K"), "MK")
    yield f.output("expert_weights", ("M", "K"), "MK")
    yield from _swiglu(f, "shared", "shared_", "BS", f.config.shared_intermediate_size)
    yield f.gives("shared.down.weight", "shared", ("BS", "D"), "BSD")
    yield f.output("acc", ("M", "D"), "MD")


def _experts(f: _Finder) -> Iterator[TapSpec]:
    for slot in range(EXPERT_SLOTS):
        module = f"slots.{slot}"
        yield from _swiglu(f, module, f"{module}.", "n", f.config.moe_intermediate_size)
        yield f.gives(f"{module}.down.weight", f"{module}.output", ("n", "D"), "nD")
    yield f.output("acc_out", ("M", "D"), "MD")


def to_reference(tap: TapSpec, value: Array, shape: tuple[int, ...]) -> Array:
    """A graph's array in the reference's layout. shape: the reference's, which gives all sizes."""
    if tap.columns is not None:
        value = value[..., slice(*tap.columns)]
    sizes = dict(zip(tap.dims, shape, strict=True))
    letters = "".join(tap.axes)
    value = value.reshape([sizes[letter] for letter in letters])
    value = value.transpose([letters.index(letter) for letter in tap.dims])
    if tap.interleaved:
        halves = value.reshape(*value.shape[:-1], 2, -1)
        value = np.swapaxes(halves, -1, -2).reshape(value.shape)
    return np.ascontiguousarray(value)


def to_graph(tap: TapSpec, value: Array) -> Array:
    """A reference's array in the layout in which a graph reads it; not for a part of columns."""
    assert tap.columns is None and not tap.interleaved, f"{tap.name} is no whole value of a graph"
    sizes = dict(zip(tap.dims, value.shape, strict=True))
    value = value.transpose([tap.dims.index(letter) for letter in "".join(tap.axes)])
    value = value.reshape([prod(sizes[letter] for letter in axis) for axis in tap.axes])
    return np.ascontiguousarray(value)


def by_token(tap: TapSpec, value: Array) -> Array | None:
    """A reference's array as one row a token, [B·S, …]; None where its rows are no tokens."""
    for letters in ("BS", "M"):
        if set(letters) <= set(tap.dims):
            axes = [tap.dims.index(letter) for letter in letters]
            rows = prod(value.shape[axis] for axis in axes)
            return np.moveaxis(value, axes, range(len(axes))).reshape(rows, -1)
    return None
