"""Opens a build folder as a chain: checks all, and counts memory, before taking any of it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from graphs.contract.manifest import Profile
from graphs.contract.spec import BuildError, BuildSpec
from graphs.contract.tensorfile import DTYPES
from runtime.backends import Backend
from runtime.backends.engine import RtxOptions
from runtime.backends.engine_folder import find_engines
from runtime.backends.onnxruntime import OnnxRuntimeBackend
from runtime.backends.tensorrt import TensorRTBackend
from runtime.cache.budget import BudgetError, CacheBudget, rows_within
from runtime.cache.strides import least_stride, stride_for
from runtime.devices.base import HostDevice, LoadProgress, no_progress
from runtime.devices.cuda import CudaDevice
from runtime.devices.memory_plan import MemoryPlan
from runtime.devices.weights import Weights
from runtime.step.buffers import buffer_bytes
from runtime.step.chain import Chain

BackendName = Literal["onnxruntime", "tensorrt"]
Provider = Literal["cpu", "cuda"]


class OptionError(BuildError):
    """An option that belongs to another backend than the one that was chosen."""

    def __init__(self, option: str, owner: BackendName, chosen: BackendName) -> None:
        super().__init__(f"{option}: expected backend {owner!r}, got {chosen!r}; leave it out")
        self.option, self.owner, self.chosen = option, owner, chosen


@dataclass(frozen=True)
class LoadOptions:
    """Options of opening a build. Raises OptionError where one is another backend's.

    backend, provider: what runs the graphs; the provider, "cpu" by default, is ONNX Runtime's.
    profile: the limits of a step on ONNX Runtime; on TensorRT they are the engines'. engines: their
    folder, by default the one made for this GPU. rtx: what TensorRT-RTX decides at run time. cache:
    rows a layer, or memory as "8GiB" or, of what is left free, "90%"; by default room for the
    profile's batch of sequences, each as long as its context. threads: ONNX Runtime's, by default
    and with 0 one per core. batch_invariant: whether, on ONNX Runtime, a lone token runs as two
    rows, so that a request gives, bit for bit, what it gives beside others; it is slower then.
    rounded: whether, on ONNX Runtime on the CPU, every value that the graph has in bf16 is rounded
    to it, as in an engine; else it stays fp32. verify: recompute the checksums of all weight files,
    not only of small ones.
    """

    backend: BackendName = "onnxruntime"
    provider: Provider | None = None
    profile: Profile | None = None
    engines: Path | None = None
    rtx: RtxOptions | None = None
    cache: int | str | None = None
    threads: int | None = None
    batch_invariant: bool = False
    rounded: bool | None = None
    verify: bool = False

    def __post_init__(self) -> None:
        for owner, names in _OWN_OPTIONS.items():
            for name in names:
                if owner != self.backend and getattr(self, name) is not None:
                    raise OptionError(name, owner, self.backend)

    @property
    def limits(self) -> Profile | None:
        """The limits of a step; None on TensorRT, whose engines have them."""
        return None if self.backend == "tensorrt" else self.profile or Profile()


_OWN_OPTIONS: dict[BackendName, tuple[str, ...]] = {
    "onnxruntime": ("provider", "threads", "profile", "rounded"),
    "tensorrt": ("engines", "rtx"),
}


def load_chain(build: Path, progress: LoadProgress = no_progress, **options: Any) -> Chain:
    """Open a build folder with LoadOptions as keywords. Raises as `open_chain`."""
    return open_chain(build, LoadOptions(**options), progress)


def open_chain(build: Path, options: LoadOptions, progress: LoadProgress = no_progress) -> Chain:
    """Open a build folder.

    Raises BuildError where it is incomplete, damaged or of another GPU or version; DeviceError
    where there is no GPU, or not the memory; CacheError where the cache would hold too little.
    """
    spec = BuildSpec.load(build)
    weights = Weights.open(build, spec, options.verify)
    backend, profile = _open_backend(build, spec, options)
    return _assemble(spec, weights, backend, profile, options.cache, progress)


def _open_backend(build: Path, spec: BuildSpec, options: LoadOptions) -> tuple[Backend, Profile]:
    limits = options.limits
    if limits is None:
        gpu = CudaDevice.open()
        folder = options.engines or find_engines(build, gpu)
        engines = TensorRTBackend.open(build, spec, folder, gpu, options.rtx)
        return engines, engines.profile
    if options.rounded and options.provider == "cuda":
        raise BuildError(
            "rounded: expected provider 'cpu', got 'cuda', which runs graphs as exported; leave it "
            "out"
        )
    device = CudaDevice.open() if options.provider == "cuda" else HostDevice()
    backend = OnnxRuntimeBackend(
        build, spec, device, options.threads or 0, options.batch_invariant, bool(options.rounded)
    )
    return backend, limits


def _assemble(
    spec: BuildSpec,
    weights: Weights,
    backend: Backend,
    profile: Profile,
    cache: int | str | None,
    progress: LoadProgress,
) -> Chain:
    """Count memory, then take it: weights, cache, buffers."""
    on_host = backend.device.kind == "cpu"  # where weights stay mapped
    plan = MemoryPlan(
        free=backend.device.free_bytes(),
        weights=0 if on_host else weights.device_bytes,
        scratch=backend.scratch_bytes,
        buffers=buffer_bytes(spec, profile),
    )
    rows = _cache_rows(spec, profile, cache, plan.left)
    plan.require(rows * cache_row_bytes(spec))
    backend.load_weights(weights, progress)
    return Chain(spec, weights, backend, profile, rows)


def cache_row_bytes(spec: BuildSpec) -> int:
    """The bytes of one token's rows in all layers."""
    item = DTYPES[spec.cache_dtype][1].itemsize
    return spec.config.num_hidden_layers * spec.config.cache_width * item


def _cache_rows(spec: BuildSpec, profile: Profile, cache: int | str | None, left: int) -> int:
    """Rows a layer, a multiple of 64. Raises BudgetError."""
    config, item = spec.config, DTYPES[spec.cache_dtype][1].itemsize
    if isinstance(cache, str):
        budget = CacheBudget.parse(cache).bytes_of(left)
        layers, width = config.num_hidden_layers, config.cache_width
        return rows_within(budget, layers, width, item, [profile.context])
    if cache is not None and cache < 1:
        raise BudgetError(f"cache: expected at least 1 row a layer, got {cache}")
    return least_stride(1, cache or profile.batch * stride_for(profile.context))
