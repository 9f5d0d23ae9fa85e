"""Runs the engines: each is loaded once, and has one execution context per layer that it serves.

A layer's weights and the rope tables are bound when they are loaded: to one context per mode, and
in decode per group of slots (further groups when they first run). A step sets shapes and addresses
of what moves, and enqueues: nothing here waits for the GPU. All contexts share one scratch buffer.

Experts come by number, so their contexts, one per mode, are bound anew for each group of slots,
from a table of addresses. Rows and gates of all slots of a layer go to the GPU in one copy.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from graphs.config import BlockType
from graphs.manifest import MODES, Manifest, Mode, Profile
from graphs.shapes import dimension_ranges
from graphs.spec import BuildError, BuildSpec, GraphName, expert_weight
from graphs.tensorfile import ALIGNMENT, Array
from graphs.tensorrt import load_tensorrt
from runtime.backends import Slot
from runtime.backends.engine import Context, Engine, Library, RtxOptions
from runtime.backends.engine_check import check_engine
from runtime.backends.engine_folder import check_target, check_version, read_engines
from runtime.backends.kernel_cache import KernelCache, cache_path
from runtime.cuda import CudaDevice
from runtime.device import Buffer, Device, DeviceError, Progress
from runtime.weights import Weights

Addresses = dict[str, int]


class TensorRTBackend:
    """See the module's docstring; the protocol is `runtime.backends.Backend`."""

    least_rows = 1  # a lone token has the decode profile's kernels, as every batch has

    def __init__(
        self,
        spec: BuildSpec,
        profile: Profile,
        device: CudaDevice,
        engines: Mapping[GraphName, Engine],
        caches: Sequence[KernelCache],
    ) -> None:
        self.spec, self.profile, self.engines, self.caches = spec, profile, engines, caches
        self.device: Device = device
        self._gpu = device
        self._few = dimension_ranges("decode", profile)["rows"][2]
        self._engine_bytes = max(engine.scratch_bytes for engine in engines.values())
        self._slot_bytes = _most_slot_bytes(spec, max(profile.batch, profile.tokens, 2))
        self.scratch_bytes = self._engine_bytes + self._slot_bytes
        names = [t.name for t in spec.graphs["experts"].weights]
        self._slot_weights = [
            [name for name in names if name.startswith(f"slots.{slot}.")]
            for slot in range(spec.slots)
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
        engines: dict[GraphName, Engine] = {}
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

    def load_weights(self, weights: Weights, progress: Progress) -> None:
        zeros, config = self._gpu.zeros, self.spec.config
        self._scratch = zeros((self._engine_bytes,), np.dtype(np.uint8))
        self._slots = zeros((self._slot_bytes,), np.dtype(np.uint8))
        self._weights = _Uploads(self._gpu, weights.device_bytes, progress)
        self._layers: list[Addresses] = []  # what every context of a layer is bound to
        self._blocks: dict[tuple[int, Mode, int], Context] = {}  # by layer, mode and group
        self._experts: dict[tuple[int, int], list[int]] = {}  # by layer and expert: its weights'
        tables = self._weights.place(weights.rope.tensors)
        for layer, file in enumerate(weights.layers):
            block = config.block_type(layer)
            placed = self._weights.place(file.tensors)
            own = {t.name: placed[t.name] for t in self.spec.graphs[block].weights}
            self._layers.append(tables | own)
            for mode in MODES:
                self._block_context(layer, mode, 0)
            for expert in range(config.n_routed_experts if block == "moe" else 0):
                names = (expert_weight(name, expert) for name in self._slot_weights[0])
                self._experts[layer, expert] = [placed[name] for name in names]
        head = self._weights.place(weights.head.tensors)
        self._expert_contexts = {mode: self._context("experts", mode, {}) for mode in MODES}
        self._head_contexts = {mode: self._context("head", mode, head) for mode in MODES}

    def block(
        self,
        block: BlockType,
        layer: int,
        inputs: Mapping[str, Buffer],
        outputs: Mapping[str, Buffer],
        group: int = 0,
    ) -> None:
        if inputs["positions"].shape[1] == 1:
            context = self._block_context(layer, "decode", group)
        else:
            context = self._block_context(layer, "prefill", 0)
        self._run(context, inputs, outputs, f"layer {layer}")

    def experts(
        self,
        layer: int,
        groups: Sequence[Sequence[Slot]],
        h: Buffer,
        acc: Buffer,
        spare: Buffer,
    ) -> tuple[Buffer, Buffer]:
        context = self._expert_contexts[self._mode(h)]
        places = self._upload(groups)
        for group in groups:
            for index, slot in enumerate(group):
                names, addresses = self._slot_weights[index], self._experts[layer, slot.expert]
                for name, address in zip(names, addresses, strict=True):
                    context.bind(name, address)
                for name, array in (f"rows_{index}", slot.rows), (f"gates_{index}", slot.gates):
                    context.resize(name, array.shape)
                    context.bind(name, next(places))
            self._run(context, {"h": h, "acc": acc}, {"acc_out": spare}, f"layer {layer}")
            acc, spare = spare, acc
        return acc, spare

    def head(self, hidden: Buffer, logits: Buffer) -> None:
        context = self._head_contexts[self._mode(hidden)]
        self._run(context, {"hidden": hidden}, {"logits": logits}, "the model")

    def close(self) -> None:
        with suppress(DeviceError):  # whoever read from a GPU that failed has been told
            self._gpu.wait()
        for cache in self.caches:
            cache.save()

    def _mode(self, rows: Buffer) -> Mode:
        """Of a graph that knows rows only: the decode profile's, as long as it admits them."""
        return "decode" if len(rows) <= self._few else "prefill"

    def _block_context(self, layer: int, mode: Mode, group: int) -> Context:
        key = layer, mode, group
        if key not in self._blocks:
            block = self.spec.config.block_type(layer)
            self._blocks[key] = self._context(block, mode, self._layers[layer])
        return self._blocks[key]

    def _context(self, graph: GraphName, mode: Mode, bound: Addresses) -> Context:
        scratch = self._gpu.address(self._scratch), self._engine_bytes
        context = self.engines[graph].context(mode, scratch, self._gpu.driver.stream)
        for name, address in bound.items():
            context.bind(name, address)
        return context

    def _upload(self, groups: Sequence[Sequence[Slot]]) -> Iterator[int]:
        """Copy every slot's rows and gates to the GPU; their addresses, in order."""
        arrays = [a for group in groups for slot in group for a in (slot.rows, slot.gates)]
        starts = np.cumsum([0, *(_aligned(a.nbytes) for a in arrays)])
        packed = np.zeros(starts[-1], np.uint8)
        for start, array in zip(starts, arrays, strict=False):
            packed[start : start + array.nbytes] = array.reshape(-1).view(np.uint8)
        if packed.size > len(self._slots):  # by no step's routing, which was provided for
            self._slots = self._gpu.zeros((packed.size,), packed.dtype)
        if arrays:
            self._gpu.write(self._slots[: packed.size], packed)
        return iter((self._gpu.address(self._slots) + starts).tolist())

    def _run(
        self,
        context: Context,
        inputs: Mapping[str, Buffer],
        outputs: Mapping[str, Buffer],
        of: str,
    ) -> None:
        for name, buffer in inputs.items():
            context.resize(name, buffer.shape)
            context.bind(name, self._gpu.address(buffer))
        for name, buffer in outputs.items():
            context.bind(name, self._gpu.address(buffer))
        context.run(of)


class _Uploads:
    """All weights on the GPU, and how many bytes of them so far."""

    def __init__(self, gpu: CudaDevice, total: int, progress: Progress) -> None:
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
    """Of one layer's rows and gates, each array on a boundary of its own, for this many tokens."""
    chosen = rows * spec.config.num_experts_per_tok
    groups = -(-min(chosen, spec.config.n_routed_experts) // spec.slots)
    return (chosen + groups * spec.slots) * (8 + 4) + groups * spec.slots * 2 * ALIGNMENT


def _aligned(count: int) -> int:
    return -(-count // ALIGNMENT) * ALIGNMENT
