"""Finds and checks the engines of a build that this GPU and this TensorRT can run."""

from pathlib import Path

from graphs.contract.manifest import ENGINE_MODES, Manifest
from graphs.contract.shapes import input_bounds
from graphs.contract.spec import GRAPHS, BuildError, BuildSpec, GraphName
from graphs.engines.tensorrt import MODULES
from runtime.devices.cuda import CudaDevice


def find_engines(build: Path, device: CudaDevice) -> Path:
    """The one folder of engines for this GPU. Raises BuildError where there is none, or several."""
    folders = sorted(path.parent for path in build.glob("*/manifest.json"))
    fitting = [folder for folder in folders if f"-sm{device.sm}-" in folder.name]
    if len(fitting) == 1:
        return fitting[0]
    names = ", ".join(folder.name for folder in fitting or folders)
    if fitting:
        raise BuildError(f"{build}: engines for sm{device.sm} in {names}; name one with --engines")
    others = f", only {names}" if folders else ""
    raise BuildError(f"{build}: no engines for this GPU, {device.name}{others}; {_compile(device)}")


def check_target(manifest: Manifest, folder: Path, device: CudaDevice) -> None:
    """Raises BuildError where the engines are another GPU's."""
    if manifest.target != f"sm{device.sm}":
        raise BuildError(
            f"{folder}: expected engines for this GPU, {device.name}, sm{device.sm}, got "
            f"{manifest.target}; {_compile(device)}"
        )


def read_engines(folder: Path, manifest: Manifest, spec: BuildSpec) -> dict[GraphName, bytes]:
    """Every engine's bytes. Raises BuildError where one is absent, damaged, or of another build."""
    contents = {}
    for graph in GRAPHS:
        contents[graph] = manifest.engine_bytes(folder, graph, spec.graphs[graph].sha256)
        for mode in ENGINE_MODES:
            expected = input_bounds(spec.graphs[graph], mode, manifest.profile)
            if manifest.engines[graph].shapes[mode] != expected:
                raise BuildError(
                    f"{folder / manifest.engines[graph].file}: {mode}: expected the shapes of "
                    f"profile {manifest.profile.name}, got others; compile it again"
                )
    return contents


def check_version(manifest: Manifest, folder: Path, installed: str) -> None:
    """Raises BuildError where another TensorRT than the one installed built an engine."""
    module = MODULES[manifest.compiler]
    for record in manifest.engines.values():
        if (version := record.versions.get(module)) != installed:
            raise BuildError(
                f"{folder / record.file}: expected an engine built by {module} {installed}, got "
                f"one by {version}; compile it again, or install that version"
            )


def _compile(device: CudaDevice) -> str:
    return f"compile them: `python -m graphs compile BUILD --target sm{device.sm}`"
