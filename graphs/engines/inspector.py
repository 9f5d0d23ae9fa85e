"""The FP8 products of an engine of `tensorrt`, from its engine inspector; needs a GPU.

Such an engine holds no text of its program, and has to be loaded to be inspected. Built with
detailed verbosity, the inspector gives a JSON object for each layer: the nodes it was made from
("Metadata") and what it reads ("Inputs", with "Datatype", until TensorRT 11 "Format/Datatype").
Never run yet: `make gpu-check` does, and a text of another form fails there.
"""

import json
from collections.abc import Iterator
from typing import Any

from graphs.engines.program import LinearLayers, layer_name

Inspected = list[dict[str, Any]]


def inspect_engine(trt: Any, engine: bytes) -> Inspected:
    """The layers of an engine, which is loaded on the GPU; trt: of `load_tensorrt`."""
    loaded = trt.Runtime(trt.Logger(trt.Logger.ERROR)).deserialize_cuda_engine(engine)
    inspector, form = loaded.create_engine_inspector(), trt.LayerInformationFormat.JSON
    layers = (inspector.get_layer_information(i, form) for i in range(loaded.num_layers))
    return [json.loads(layer) for layer in layers]


def inspected_faults(inspected: Inspected, layers: LinearLayers) -> list[str]:
    """The FP8 layers that no layer of the engine multiplies as FP8 by FP8, and what it reads."""
    types: dict[str, list[str]] = {}
    for layer in inspected:
        read = [_type(tensor) for tensor in layer.get("Inputs") or []]
        _, weights = layers.weights_of(layer.get("Metadata") or "")
        for weight in weights:
            types.setdefault(layer_name(weight), read)
    return list(_faults(layers.fp8, types))


def _faults(fp8: tuple[str, ...], types: dict[str, list[str]]) -> Iterator[str]:
    for layer in fp8:
        if layer not in types:
            yield f"{layer}: expected a layer with its node, got none"
        elif sum("FP8" in name.upper() for name in types[layer][:2]) != 2:
            yield f"{layer}: expected FP8 × FP8, got {' × '.join(types[layer]) or 'no inputs'}"


def _type(tensor: dict[str, Any]) -> str:
    return str(tensor.get("Datatype") or tensor.get("Format/Datatype") or "an unknown type")
