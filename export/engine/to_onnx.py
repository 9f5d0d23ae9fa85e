"""The four graphs as ONNX, exported under FakeTensorMode: from shapes alone, without weights.

Weights are graph inputs, not initialisers, so one compiled engine serves every layer of its type.
Custom ops are nodes of domain `kimi` whose bodies are attached as functions. The bytes depend on
the config and precision only: metadata with paths and stack traces is dropped.
"""

import hashlib
import json
import logging
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir
import onnxscript.optimizer
import torch
from onnx_ir.passes.common import ClearMetadataAndDocStringPass
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from export.engine.blocks import DenseBlock, Experts, Head, MoEBlock
from export.engine.layers import LinearForm
from graphs.contract.config import ModelConfig
from graphs.contract.files import replacing
from graphs.contract.spec import (
    EXPERT_SLOTS,
    GRAPHS,
    BuildError,
    BuildSpec,
    GraphName,
    GraphSpec,
    Precision,
    TensorKind,
    TensorSpec,
    config_hash,
)
from graphs.ops import OPSET
from graphs.parity.taps import find_taps
from graphs.passes.attach_functions import attach_functions
from graphs.passes.infer_shapes import infer_shapes


@dataclass(frozen=True)
class GraphRecipe:
    """A graph's arguments for torch.onnx.export. No two sizes of its example inputs are equal."""

    module: Callable[[ModelConfig, LinearForm], nn.Module]
    inputs: Callable[[ModelConfig, LinearForm], dict[str, Any]]
    dynamic: dict[str, Any]
    outputs: tuple[str, ...]


def _block_inputs(config: ModelConfig, form: LinearForm) -> dict[str, torch.Tensor]:
    B, S, L, act = 2, 3, 5, form.activation
    P, r = config.max_position_embeddings, config.qk_rope_head_dim // 2
    return {
        "x": torch.empty(B, S, config.hidden_size),
        "positions": torch.empty(B, S, dtype=torch.int64),
        "context": torch.empty(B, L, config.cache_width, dtype=act),
        "cos": torch.empty(P, r),
        "sin": torch.empty(P, r),
    }


def _experts_inputs(config: ModelConfig, form: LinearForm) -> dict[str, Any]:
    M, D, act = 31, config.hidden_size, form.activation
    return {
        "h": torch.empty(M, D, dtype=act),
        "acc": torch.empty(M, D),
        "rows": [torch.empty(2 + i, dtype=torch.int64) for i in range(EXPERT_SLOTS)],
        "gates": [torch.empty(2 + i, 1) for i in range(EXPERT_SLOTS)],
    }


_BLOCK_DYNAMIC: dict[str, Any] = {
    "x": {0: "batch", 1: "tokens"},
    "positions": {0: "batch", 1: "tokens"},
    "context": {0: "batch", 1: "context"},
    "cos": {},
    "sin": {},
}

RECIPES: dict[GraphName, GraphRecipe] = {
    "dense": GraphRecipe(DenseBlock, _block_inputs, _BLOCK_DYNAMIC, ("y", "new")),
    "moe": GraphRecipe(
        MoEBlock, _block_inputs, _BLOCK_DYNAMIC, ("acc", "h", "experts", "expert_weights", "new")
    ),
    "experts": GraphRecipe(
        Experts,
        _experts_inputs,
        {
            "h": {0: "tokens"},
            "acc": {0: "tokens"},
            "rows": [{0: f"rows_{i}"} for i in range(EXPERT_SLOTS)],
            "gates": [{0: f"rows_{i}"} for i in range(EXPERT_SLOTS)],
        },
        ("acc_out",),
    ),
    "head": GraphRecipe(
        Head,
        lambda config, form: {"hidden": torch.empty(5, config.hidden_size)},
        {"hidden": {0: "rows"}},
        ("logits",),
    ),
}


def export_graph(config: ModelConfig, precision: Precision, graph: GraphName) -> onnx.ModelProto:
    """Export one graph: weights are inputs, and every value has a shape."""
    recipe, form = RECIPES[graph], LinearForm.from_precision(precision)
    with FakeTensorMode():
        module = recipe.module(config, form).eval()
        example = recipe.inputs(config, form)
    model = _export(module, example, recipe).model
    model.graph.name = graph
    _weights_to_inputs(model, module)
    onnxscript.optimizer.optimize_ir(model)
    ClearMetadataAndDocStringPass()(model)
    return infer_shapes(attach_functions(ir.serde.serialize_model(model)))


def _export(
    module: nn.Module, example: dict[str, Any], recipe: GraphRecipe
) -> torch.onnx.ONNXProgram:
    """torch.onnx.export, silent about torchvision and about axes that share a name."""
    logger = logging.getLogger("torch.onnx._internal.exporter._registration")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            program = torch.onnx.export(
                module,
                kwargs=example,
                dynamo=True,
                opset_version=OPSET,
                verbose=False,
                optimize=False,  # the optimiser reads initialisers; fake tensors have no bytes
                output_names=list(recipe.outputs),
                dynamic_shapes=recipe.dynamic,
            )
    finally:
        logger.setLevel(level)
    assert program is not None
    return program


def _weights_to_inputs(model: ir.Model, module: nn.Module) -> None:
    for name, _ in module.named_parameters():
        value = model.graph.initializers.pop(name)
        value.const_value = None
        model.graph.inputs.append(value)


def export_graphs(raw_config: dict[str, Any], precision: Precision, build: Path) -> BuildSpec:
    """Write the four graphs and `spec.json` into a build folder.

    Raises ConfigError, and BuildError where the folder holds another model or precision, before
    anything is written.
    """
    config = ModelConfig.from_dict(raw_config)
    _refuse_other_build(raw_config, precision, build)
    models = {name: export_graph(config, precision, name) for name in GRAPHS}
    (build / "onnx").mkdir(parents=True, exist_ok=True)
    graphs: dict[GraphName, GraphSpec] = {}
    for name, model in models.items():
        content = model.SerializeToString(deterministic=True)
        file = f"onnx/{name}.onnx"
        with replacing(build / file) as temporary:
            temporary.write_bytes(content)
        graphs[name] = GraphSpec(
            name,
            file,
            hashlib.sha256(content).hexdigest(),
            tuple(_tensor_spec(v) for v in model.graph.input),
            tuple(_tensor_spec(v) for v in model.graph.output),
            find_taps(model, config),
        )
    spec = BuildSpec(precision, raw_config, config_hash(raw_config), graphs)
    spec.save(build)
    return spec


def _refuse_other_build(raw_config: dict[str, Any], precision: Precision, build: Path) -> None:
    """A spec of an older format has these fields too, and is replaced."""
    path = build / "spec.json"
    if not path.exists():
        return
    try:
        old = json.loads(path.read_text(encoding="utf-8"))
        old_precision, old_config = old["precision"], old["config_sha256"]
    except (KeyError, TypeError, ValueError) as e:
        raise BuildError(f"{path}: damaged ({e!r}); remove it and export again") from e
    if (old_precision, old_config) != (precision, config_hash(raw_config)):
        raise BuildError(
            f"{build}: expected a build of precision {precision} and config "
            f"{config_hash(raw_config)[:12]}…, got one of {old_precision} and "
            f"{old_config[:12]}…; choose another --out, or remove it"
        )


def _tensor_spec(value: onnx.ValueInfoProto) -> TensorSpec:
    tensor = value.type.tensor_type
    dims = tuple(d.dim_param or d.dim_value for d in tensor.shape.dim)
    kind: TensorKind = "table" if value.name in ("cos", "sin") else "activation"
    if "." in value.name:  # only parameters have dotted names
        kind = "weight"
    dtype = onnx.TensorProto.DataType.Name(tensor.elem_type).lower()
    return TensorSpec(value.name, dtype, dims, kind)
