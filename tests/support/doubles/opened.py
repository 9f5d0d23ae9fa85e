"""A loaded backend on a double of its own, and one run of one of its graphs."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from graphs.contract.manifest import Profile
from graphs.contract.spec import BuildSpec, GraphName
from graphs.contract.tensorfile import DTYPES, Array
from runtime.devices.base import no_progress
from runtime.devices.weights import Weights
from tests.support.doubles.tensorrt import open_double

PROFILE = Profile(batch=4, tokens=16, context=256)
FP32 = np.dtype(np.float32)


class Opened:
    """A loaded backend on a double of its own, and the build it is of."""

    def __init__(
        self, build: Path, folder: Path, profile: Profile = PROFILE, **options: Any
    ) -> None:
        self.build, self.spec = build, BuildSpec.load(build)
        self.weights = Weights.open(build, self.spec)
        self.backend, self.double = open_double(build, self.spec, profile, folder, **options)
        self.backend.load_weights(self.weights, no_progress)

    def counted(self, work: Callable[[], object]) -> dict[str, int]:
        """How often each method of a context was called meanwhile."""
        self.double.calls.clear()
        work()
        return dict(self.double.calls)


def run_graph(
    backend: Any, graph: GraphName, B: int, S: int, L: int, layer: int = 1
) -> dict[str, Array]:
    """Outputs of one run on random inputs, the same for all backends."""
    spec, device, rng = backend.spec.graphs[graph], backend.device, np.random.default_rng(B + S + L)
    sizes = {"batch": B, "tokens": S, "context": L, "rows": B * S}
    dtypes = {t.name: DTYPES[t.dtype][1] for t in (*spec.inputs, *spec.outputs)}
    inputs = {}
    for tensor in spec.inputs:
        if tensor.kind == "activation" and "slot" not in str(tensor.dims):
            shape = tensor.shape(sizes)
            values = (
                rng.normal(size=shape)
                if tensor.name != "positions"
                else rng.integers(9, size=shape)
            )
            inputs[tensor.name] = device.zeros(shape, dtypes[tensor.name])
            device.write(inputs[tensor.name], values.astype(dtypes[tensor.name]))
    outputs = {t.name: device.zeros(t.shape(sizes), dtypes[t.name]) for t in spec.outputs}
    if graph == "head":
        backend.head(inputs["hidden"], outputs["logits"])
    else:
        assert graph in ("dense", "moe")
        backend.block(graph, layer if graph == "moe" else 0, inputs, outputs)
    return {name: device.read(buffer) for name, buffer in outputs.items()}
