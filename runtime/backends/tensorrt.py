"""Runs the engines: each is loaded once, and has one execution context per layer that it serves.

A layer's weights and the rope tables are bound when they are loaded: to one context per mode, and
in decode per step group (further ones when they first run). A step sets shapes and addresses
of what moves, and enqueues: nothing here waits for the GPU. All contexts share one scratch buffer.

Experts come by number, so their contexts, one per mode, are bound anew for each run from a table of
addresses. Rows and gates of all expert slots of a layer go to the GPU in one copy.
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from graphs.contract.config import BlockType
from graphs.contract.manifest import ENGINE_MODES, EngineMode, Manifest, Profile
from graphs.contract.shapes import dimension_ranges
from graphs.contract.spec import BuildError, BuildSpec, GraphName, expert_weight
from graphs.contract.tensorfile import ALIGNMENT, Array
from graphs.engines.tensorrt import load_tensorrt
from runtime.backends import ExpertSlot
from runtime.backends.engine import Context, Library, LoadedEngine, RtxOptions
from runtime.backends.engine_check import check_engine
from runtime.backends.engine_folder import check_target, check_version, read_engines
from runtime.backends.kernel_cache import KernelCache, cache_path
from runtime.devices.base import Buffer, Device, DeviceError, LoadProgress
from runtime.devices.cuda import CudaDevice
from runtime.devices.weights import Weights

Addresses = dict[str, int]


class TensorRTBackend:
    """runtime.backends.Backend on TensorRT's engines."""

    least_rows = 1  # a lone token has the decode profile's kernels, as every batch has

    def __init__(
        self,
        spec: BuildSpec,
        profile: Profile,
        device: CudaDevice,
        engines: Mapping[GraphName, LoadedEngine],
        caches: Sequence[KernelCache],
    ) -> None:
        self.spec, self.profile, self.engines, self.caches = spec, profile, engines, caches
        self.device: Device = device
        self._gpu = device
        self._few = dimension_ranges("decode", profile)["rows"][2]
        self._engine_bytes = max(engine.scratch_bytes for engine in engines.values())
        self._slot_bytes = _most_slot_bytes(spec, max(profile.batch, profile.tokens, 2))
        self.scratch_bytes = self._engine_bytes + self._slot_bytes
        self._slot_inputs = [
            [f"rows_{slot}", f"gates_{slot}", *(t.name for t in weights)]
            for slot, weights in enumerate(spec.slot_weights)
        ]

    @classmethod
    def open(
        cls,
        build: Path,
        spec: BuildSpec,
        folder: Path,
        device: CudaDevice,
        options: RtxOptions | None = None,
        trt: Any = None,
    ) -> "TensorRTBackend":
        """Load a folder's engines. `trt` is TensorRT's module, by default the one installed.

        Raises BuildError where the engines are incomplete, or of another build, GPU or version;
        BackendError where TensorRT refuses one; TensorRTError where it is not installed.
        """
        manifest = Manifest.load(folder)
        check_target(manifest, folder, device)
        if options and manifest.compiler != "rtx":
            raise BuildError(f"{folder}: engines of {manifest.compiler}, which has no {options}")
        contents = read_engines(folder, manifest, spec)
        library = Library(trt or load_tensorrt(manifest.compiler))
        check_version(manifest, folder, library.version)
        engines: dict[GraphName, LoadedEngine] = {}
        caches = []
        for graph, content in contents.items():
            engine = library.open(graph, content, manifest.engines[graph])
            check_engine(engine, spec.graphs[graph])
            if manifest.compiler == "rtx":
                path = cache_path(folder / engine.record.file, device.name, library.version)
                caches.append(KernelCache(path, engine.configure(options or RtxOptions())))
                engine.share(caches[-1].cache)
            engines[graph] = engine
        return cls(spec, manifest.profile, device, engines, caches)

    def load_weights(self, weights: Weights, progress: LoadProgress) -> None:
        zeros, config = self._gpu.zeros, self.spec.config
        self._scratch = zeros((self._engine_bytes,), np.dtype(np.uint8))
        self._slots = zeros((self._slot_bytes,), np.dtype(np.uint8))
        self._weights = _Uploads(self._gpu, weights.device_bytes, progress)
        self._layers: list[
            Addresses
        ] = []  # weights and tables that a layer's contexts are bound to
        self._blocks: dict[
            tuple[int, EngineMode, int], Context
        ] = {}  # by layer, mode and step group
        self._experts: list[dict[int, list[int]]] = []  # addresses, by layer and expert
        tables = self._weights.place(weights.rope.tensors)
        for layer, file in enumerate(weights.layers):
            block = config.block_type(layer)
            placed = self._weights.place(file.tensors)
            weight_names = [t.name for t in self.spec.graphs[block].weights]
            self._layers.append(tables | {name: placed[name] for name in weight_names})
            for mode in ENGINE_MODES:
                self._block_context(layer, mode, 0)
            experts = range(config.n_routed_experts if block == "moe" else 0)
            self._experts.append({expert: self._addresses_of(expert, placed) for expert in experts})
        head = self._weights.place(weights.head.tensors)
        self._expert_contexts = {mode: self._context("experts", mode, {}) for mode in ENGINE_MODES}
        self._slot_rows = {mode: [0] * self.spec.slots for mode in ENGINE_MODES}  # the last run's
        self._head_contexts = {mode: self._context("head", mode, head) for mode in ENGINE_MODES}

    def block(
        self,
        block: BlockType,
        layer: int,
        inputs: Mapping[str, Buffer],
        outputs: Mapping[str, Buffer],
        step_group: int = 0,
    ) -> None:
        if inputs["positions"].shape[1] == 1:
            context = self._block_context(layer, "decode", step_group)
        else:
            context = self._block_context(layer, "prefill", 0)
        self._run(context, inputs, outputs, f"layer {layer}")

    def experts(
        self,
        layer: int,
        runs: Sequence[Sequence[ExpertSlot]],
        h: Buffer,
        acc: Buffer,
        spare: Buffer,
    ) -> tuple[Buffer, Buffer]:
        mode, weights, places = self._mode(h), self._experts[layer], self._upload(runs)
        context, rows = self._expert_contexts[mode], self._slot_rows[mode]
        sums = deque((buffer, self._gpu.address(buffer)) for buffer in (acc, spare))
        context.resize("h", h.shape)
        context.resize("acc", acc.shape)
        context.bind(["h"], [self._gpu.address(h)])
        for run in runs:
            for index, (names, slot) in enumerate(zip(self._slot_inputs, run, strict=True)):
                if rows[index] != len(slot.rows):
                    context.resize(names[0], slot.rows.shape)
                    context.resize(names[1], slot.gates.shape)
                    rows[index] = len(slot.rows)
                context.bind(names, (next(places), next(places), *weights[slot.expert]))
            context.bind(("acc", "acc_out"), (address for _, address in sums))
            context.run(f"layer {layer}")
            sums.rotate()
        return sums[0][0], sums[1][0]

    def head(self, hidden: Buffer, logits: Buffer) -> None:
        context = self._head_contexts[self._mode(hidden)]
        self._run(context, {"hidden": hidden}, {"logits": logits}, "the model")

    def close(self) -> None:
        with suppress(DeviceError):  # a GPU that failed was reported where it was read from
            self._gpu.wait()
        for cache in self.caches:
            cache.save()

    def _mode(self, rows: Buffer) -> EngineMode:
        """Mode of a graph that knows rows only: decode, as long as its profile admits them."""
        return "decode" if len(rows) <= self._few else "prefill"

    def _block_context(self, layer: int, mode: EngineMode, step_group: int) -> Context:
        key = layer, mode, step_group
        if key not in self._blocks:
            block = self.spec.config.block_type(layer)
            self._blocks[key] = self._context(block, mode, self._layers[layer])
        return self._blocks[key]

    def _context(self, graph: GraphName, mode: EngineMode, bound: Addresses) -> Context:
        scratch = self._gpu.address(self._scratch), self._engine_bytes
        context = self.engines[graph].context(mode, scratch, self._gpu.driver.stream)
        context.bind(list(bound), bound.values())
        return context

    def _addresses_of(self, expert: int, placed: Addresses) -> list[int]:
        """Addresses of an expert's weights, in the order of an expert slot's inputs."""
        return [placed[expert_weight(name, expert)] for name in self._slot_inputs[0][2:]]

    def _upload(self, runs: Sequence[Sequence[ExpertSlot]]) -> Iterator[int]:
        """Copy every expert slot's rows and gates to the GPU; yields their addresses in order."""
        arrays = (array for run in runs for slot in run for array in (slot.rows, slot.gates))
        pieces = [_padded(array.tobytes()) for array in arrays]
        packed = np.frombuffer(b"".join(pieces), np.uint8)
        if packed.size > len(self._slots):  # not from a step: its routing always fits
            self._slots = self._gpu.zeros((packed.size,), packed.dtype)
        if pieces:
            self._gpu.write(self._slots[: packed.size], packed)
        return accumulate(map(len, pieces), initial=self._gpu.address(self._slots))

    def _run(
        self,
        context: Context,
        inputs: Mapping[str, Buffer],
        outputs: Mapping[str, Buffer],
        subject: str,
    ) -> None:
        for name, buffer in inputs.items():
            context.resize(name, buffer.shape)
        for buffers in (inputs, outputs):
            context.bind(list(buffers), map(self._gpu.address, buffers.values()))
        context.run(subject)


class _Uploads:
    """The weights on the GPU, and how many bytes of them are there so far."""

    def __init__(self, gpu: CudaDevice, total: int, progress: LoadProgress) -> None:
        self.gpu, self.total, self.progress = gpu, total, progress
        self.done = 0
        self.placed: list[Mapping[str, Buffer]] = []

    def place(self, tensors: Mapping[str, Array]) -> Addresses:
        """Copy a file's tensors. Raises DeviceError."""
        before = self.done

        def progress(what: str, done: int, total: int) -> None:
            self.done = before + done
            self.progress(what, self.done, self.total)

        self.placed.append(self.gpu.place(tensors, progress))
        return {name: self.gpu.address(buffer) for name, buffer in self.placed[-1].items()}


def _most_slot_bytes(spec: BuildSpec, rows: int) -> int:
    """Bytes of one layer's rows and gates, each array on a boundary, for this many tokens."""
    chosen = rows * spec.config.num_experts_per_tok
    runs = -(-min(chosen, spec.config.n_routed_experts) // spec.slots)
    return (chosen + runs * spec.slots) * (8 + 4) + runs * spec.slots * 2 * ALIGNMENT


def _padded(content: bytes) -> bytes:
    """The content with zeros up to the next boundary."""
    return content.ljust(-(-len(content) // ALIGNMENT) * ALIGNMENT, b"\0")
