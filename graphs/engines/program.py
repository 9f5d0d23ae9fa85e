"""The program of a TensorRT-RTX engine, read from the engine's file; needs no GPU.

An engine holds its compiled program as text: for each optimisation profile a header with streams
and flags, the tensors with their types, and `main` with one line a launch. A fusion that is
compiled on the user's machine has a short program of its own behind the one that launches it.

    header {  n_streams = 1 …  tf32=1 … }
    descriptors {  tensor={ … name="x.1" … type=fp8_e4m3 }  sub_tensor={ base="x.1" … } … }
    main {  function={ name=… layers="[ONNX Layer: Mul_22]…" }
            fully_connected={ name="Gemm_20" output={"…" } input={"…" "…" …} … layers="…" } … }
    shape_main { … }

The format is TensorRT's own and undocumented. It was read in TensorRT-RTX 1.7.1, whose programs are
of version 5 and those of fusions of version 4; any other is refused, since what it says is unknown.
"""

import itertools
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import onnx

from graphs.contract.program import Product, Program
from graphs.engines.lint_rules.graph import LintGraph
from graphs.engines.lint_rules.linear import FP8_TYPES

PROGRAM_VERSION, FUSION_VERSION = "5", "4"
NO_LAUNCH = {"shape_call", "signal", "wait"}  # host work, and order between streams
FUSION_REGION = "name=runtime-fusion-consts"

_NODE = re.compile(r"\[ONNX Layer: ([^\]]+)\]")

_PROFILE = re.compile(r" \[profile (\d+)\]")
_LINE = re.compile(r"^  ([a-z_]+)=\{ (.*)\}$", re.MULTILINE)
_TENSOR = re.compile(r"^  tensor=\{.* name=\"([^\"]+)\".* type=(\w+) \}$", re.MULTILINE)
_VIEW = re.compile(
    r"^  sub_tensor=\{.*base=\"([^\"]+)\".* name=\"([^\"]+)\".* type=(\w+) \}$", re.MULTILINE
)
_OPERANDS = re.compile(r"output=\{\"([^\"]+)\"[^}]*\} input=\{\"([^\"]+)\" \"([^\"]+)\"")


class ProgramTextError(ValueError):
    """An engine whose program is not of the form that this module knows."""


@dataclass(frozen=True)
class LinearLayers:
    """A graph's linear layers, called as their weights: `attention.o` for `attention.o.weight`.

    weights: the one that a node multiplies by. fp8: the layers whose weights are FP8.
    """

    weights: Mapping[str, str]
    fp8: tuple[str, ...]

    @classmethod
    def from_model(cls, model: onnx.ModelProto) -> "LinearLayers":
        """Those of an exported graph."""
        graph = LintGraph.from_model(model.graph.name, model, {})
        types = {v.name: v.type.tensor_type.elem_type for v in graph.flat.graph.input}
        fp8 = (layer_name(name) for name in graph.weights if types[name] in FP8_TYPES)
        return cls({p.node.name: p.weight for p in graph.products}, tuple(fp8))

    def weights_of(self, layers_text: str) -> tuple[list[str], list[str]]:
        """The nodes that TensorRT names in what it made of them, and the weights they read."""
        nodes = _NODE.findall(layers_text)
        return nodes, sorted({self.weights[n] for n in nodes if n in self.weights})


@dataclass
class _Text:
    """One program's text, and the texts of its fusions."""

    header: str
    descriptors: str
    main: str
    fusions: list["_Text"] = field(default_factory=list)

    def flag(self, name: str) -> str:
        match = re.search(rf"^  {name} ?= ?(\w+)$", self.header, re.MULTILINE)
        if match is None:
            raise ProgramTextError(f"expected a flag {name}, got none")
        return match[1]

    @property
    def is_fusion(self) -> bool:
        return FUSION_REGION in self.header

    @property
    def profile(self) -> int:
        numbers = {int(n) for n in _PROFILE.findall(self.descriptors)} or {0}
        if len(numbers) > 1:
            raise ProgramTextError(f"a program of profiles {sorted(numbers)}")
        return numbers.pop()


def read_programs(engine: bytes, layers: LinearLayers, profiles: int) -> list[Program]:
    """The programs of an engine's optimisation profiles, in their order.

    Raises ProgramTextError where the text is of another form than known.
    """
    programs: list[_Text] = []
    for text in _texts(engine):
        version, expected = text.flag("version"), _version(text)
        if version != expected:
            raise ProgramTextError(f"expected a program of version {expected}, got {version}")
        if not text.is_fusion:
            programs.append(text)
        elif programs:
            programs[-1].fusions.append(text)
        else:
            raise ProgramTextError("a fusion before any program")
    numbers = [program.profile for program in programs]
    if numbers != list(range(profiles)):
        raise ProgramTextError(f"expected programs of {profiles} profiles, got those of {numbers}")
    return [_program(text, layers) for text in programs]


def _version(text: _Text) -> str:
    return FUSION_VERSION if text.is_fusion else PROGRAM_VERSION


def _texts(engine: bytes) -> Iterator[_Text]:
    starts = [m.start() for m in re.finditer(rb"header \{\n", engine)]
    for start, end in itertools.pairwise([*starts, len(engine)]):
        text = engine[start:end].partition(b"\0")[0].decode("latin1")
        parts = re.split(r"^(?:header|descriptors|main|shape_main) \{$", text, flags=re.MULTILINE)
        if len(parts) not in (4, 5):
            raise ProgramTextError("a header with no descriptors and main")
        header, descriptors, main = parts[1:4]
        yield _Text(header, descriptors, main)


def _program(text: _Text, layers: LinearLayers) -> Program:
    launches = Counter(kind for kind, _ in _LINE.findall(text.main) if kind not in NO_LAUNCH)
    if launches["runtime_fusion"] != len(text.fusions):
        raise ProgramTextError(
            f"expected {launches['runtime_fusion']} fusions, got {len(text.fusions)}"
        )
    products = [p for part in (text, *text.fusions) for p in _products(part, layers)]
    return Program(
        dict(sorted(launches.items())),
        tuple(products),
        layers.fp8,
        int(text.flag("n_streams")),
        int(text.flag("n_events")),
        text.flag("tf32") != "0",
    )


def _products(text: _Text, layers: LinearLayers) -> Iterator[Product]:
    types = dict(_TENSOR.findall(text.descriptors))
    bases: dict[str, str] = {}
    for base, name, view_type in _VIEW.findall(text.descriptors):
        types[name], bases[name] = view_type, base
    for kind, rest in _LINE.findall(text.main):
        if kind != "fully_connected":
            continue
        operands = _OPERANDS.search(rest)
        if operands is None:
            raise ProgramTextError(f"a product without operands: {rest[:80]}")
        result, x, weight = operands.groups()
        try:
            operand_types = types[x], types[weight], types[result]
        except KeyError as e:
            raise ProgramTextError(f"a product's operand without a type: {e}") from e
        nodes, weights = layers.weights_of(rest)
        in_place = [_graph_name(bases.get(weight, weight))] == weights
        yield Product(tuple(map(layer_name, weights)) or tuple(nodes), operand_types, in_place)


def layer_name(weight: str) -> str:
    return weight.removesuffix(".weight")


def _graph_name(value: str) -> str:
    """The graph's name of a bound value: `attention.o.weight [profile 1].1` is its weight's."""
    return re.sub(r"\.\d+(__mye\d+)?$", "", _PROFILE.sub("", value))
