"""Everything that needs a GPU, in one table: the runtime's tests, and parity of every precision.

The tests are those of the suite that run on every backend, here on TensorRT and on ONNX Runtime's
CUDA provider, and those of the GPU's memory. Parity compiles the engines of each build for this GPU
first, and reads from them which products are of FP8. Without a GPU there is nothing to check, which
is an error.
"""

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any
from xml.etree import ElementTree

import onnx
import typer
from rich.table import Table

from graphs.cli import make_app, run, wide_console
from graphs.contract.manifest import Compiler, Manifest
from graphs.contract.shapes import CompileError
from graphs.contract.spec import BuildSpec
from graphs.engines.compile import compile_build
from graphs.engines.inspector import inspect_engine, inspected_faults
from graphs.engines.program import LinearLayers
from graphs.engines.targets import LEAST_TARGET, TARGETS
from graphs.engines.tensorrt import load_tensorrt
from runtime.devices.base import DeviceError
from runtime.devices.cuda import CudaDevice
from runtime.load import load_chain
from runtime.parity import runtime_parity

ROOT = Path(__file__).parent.parent
PROBLEMS = (CompileError, RuntimeError)  # what compiling, loading and running fail with


@dataclass(frozen=True)
class CheckRow:
    """A check, and how many of its comparisons or tests passed, failed and were skipped."""

    what: str
    passed: int
    failed: int
    skipped: int
    seconds: float
    remark: str = ""


def tests() -> CheckRow:
    """Run the tests marked gpu; pytest's output goes to the terminal."""
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-m", "gpu", "--junit-xml", str(report)]
        status = subprocess.run(command, cwd=ROOT, check=False).returncode
        suite = ElementTree.parse(report).getroot().find("testsuite")
    assert suite is not None
    counts = {n: int(suite.get(n, 0)) for n in ("tests", "failures", "errors", "skipped")}
    failed = counts["failures"] + counts["errors"]
    passed = counts["tests"] - failed - counts["skipped"]
    remark = "" if status == 0 else f"pytest ended with status {status}"
    what = "tests marked gpu"
    return CheckRow(what, passed, failed, counts["skipped"], time.perf_counter() - start, remark)


def parity(build: Path, gpu: CudaDevice) -> Iterator[CheckRow]:
    """Compare a build's blocks and chain with its goldens, on each backend of the GPU."""
    spec = BuildSpec.load(build)
    if gpu.sm < LEAST_TARGET[spec.precision]:
        why = f"{spec.precision} needs sm{LEAST_TARGET[spec.precision]}, this is sm{gpu.sm}"
        yield CheckRow(f"parity, {spec.precision}", 0, 0, 1, 0.0, why)
        return
    compiler: Compiler = "rtx" if gpu.sm in TARGETS["rtx"] else "tensorrt"
    on_engines: dict[str, Any] = {"backend": "tensorrt"}
    on_cuda: dict[str, Any] = {"backend": "onnxruntime", "provider": "cuda"}
    for name, options in ((f"TensorRT ({compiler})", on_engines), ("ONNX Runtime", on_cuda)):
        what, start = f"parity, {spec.precision}, {name}", time.perf_counter()
        try:
            if options["backend"] == "tensorrt":
                manifest = compile_build(build, "auto", None, compiler)
                options["engines"] = build / manifest.folder
                if spec.precision == "fp8":
                    yield fp8_products(build, manifest)
            findings = runtime_parity(load_chain(build, **options), build)
        except PROBLEMS as e:
            yield CheckRow(what, 0, 1, 0, time.perf_counter() - start, " ".join(str(e).split()))
            continue
        failed = [row for row in findings.rows if not row.passed]
        remark = f"first: {failed[0].tap} of {failed[0].case}" if failed else ""
        passed = len(findings.rows) - len(failed)
        yield CheckRow(what, passed, len(failed), 0, time.perf_counter() - start, remark)


def fp8_products(build: Path, manifest: Manifest) -> CheckRow:
    """The FP8 layers that the engines multiply as FP8 by FP8, read from the engines."""
    start, spec, folder = time.perf_counter(), BuildSpec.load(build), build / manifest.folder
    faults: list[str] = []
    count = 0
    for graph, record in manifest.engines.items():
        layers = LinearLayers.from_model(onnx.load_from_string(spec.onnx_bytes(build, graph)))
        count += len(layers.fp8)
        if record.programs:  # compiled without a fault
            continue
        if manifest.compiler == "rtx":
            faults += [f"{layer}: {record.not_read}" for layer in layers.fp8]
            continue
        engine = manifest.engine_bytes(folder, graph, spec.graphs[graph].sha256)
        inspected = inspect_engine(load_tensorrt(manifest.compiler), engine)
        faults += [f"{graph}: {fault}" for fault in inspected_faults(inspected, layers)]
    what, remark = f"FP8 products ({manifest.compiler})", f"first: {faults[0]}" if faults else ""
    passed, seconds = count - len(faults), time.perf_counter() - start
    return CheckRow(what, passed, len(faults), 0, seconds, remark)


app = make_app(__doc__.splitlines()[0])


@app.command()
def main(
    builds: Annotated[list[Path], typer.Argument(help="Build folders with goldens.")],
) -> None:
    """Run all of it; exit status 1 where something failed, or no GPU can be used."""
    gpu = CudaDevice.open()
    rows = [tests(), *(row for build in builds for row in parity(build, gpu))]
    table = Table(title=f"{gpu.name} (sm{gpu.sm})")
    table.add_column("check")
    for column in ("passed", "failed", "skipped", "seconds"):
        table.add_column(column, justify="right")
    table.add_column("")
    for row in rows:
        numbers = (row.passed, row.failed, row.skipped)
        table.add_row(row.what, *map(str, numbers), f"{row.seconds:.0f}", row.remark)
    wide_console().print(table)
    if any(row.failed or (row.remark and not row.skipped) for row in rows) or not rows[0].passed:
        raise typer.Exit(1)


if __name__ == "__main__":
    run(app, DeviceError)
