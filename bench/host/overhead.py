"""The chain's own cost, a layer and step: a model of K2's size on engines that do nothing.

    python -m bench.host.overhead build/k2/fp8

Three chains take turns: K2's 61 layers, as many dense ones, and a single dense one. Their
differences are the cost of a layer of each type; the rest is the cost of a step without layers:
checks, embedding, logits, commit. On TensorRT torch's CPU tensors stand in for a GPU's
memory, so neither the driver's calls nor the copies' latency are in it.
"""

import dataclasses
import os
import sys
import tempfile
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from rich.table import Table

from bench.host.null_engines import (
    NullBackend,
    OpenBackend,
    null_chain,
    null_onnxruntime,
    null_tensorrt,
)
from graphs.cli import make_app, run, wide_console
from graphs.contract.manifest import Profile
from graphs.contract.spec import BuildError, BuildSpec
from runtime.benchmark.measurements import BenchReport, Measurement, in_turns
from runtime.step.chain import Chain

CACHED = 1000
SEQUENCES = (1, 8)
WHOLE, NOTHING = "layer, everything included", "nothing"
LIMIT = 100e-6  # seconds of the whole, on nothing, with 1 sequence: the first measurement
PACKAGES = ("numpy", "torch", "onnxruntime-gpu")

app = make_app("The chain's own cost a layer and step, on engines that do nothing.")


def variant(spec: BuildSpec, **changes: int) -> BuildSpec:
    """The same graphs in a model with other layers."""
    return dataclasses.replace(spec, raw_config=spec.raw_config | changes)


def overheads(
    by: str, open_backend: OpenBackend, spec: BuildSpec, sequences: int, rounds: int
) -> list[Measurement]:
    """Seconds of a layer on average, a dense one, a MoE one, and a step without its layers."""
    layers, dense = spec.config.num_hidden_layers, spec.config.count("dense")
    models = {
        "all": spec,
        "dense": variant(spec, first_k_dense_replace=layers),
        "one": variant(spec, first_k_dense_replace=1, num_hidden_layers=1),
    }
    profile = Profile(batch=max(SEQUENCES))
    chains = {n: null_chain(m, open_backend, profile, sequences, CACHED) for n, m in models.items()}
    runs = {name: partial(step, chain) for name, chain in chains.items()}
    seconds = in_turns(runs, rounds, warm_up=3)
    whole, only_dense, one = (np.array(seconds[name]) for name in models)
    dense_layer = (only_dense - one) / (layers - 1)
    parts = {
        WHOLE: whole / layers,
        "dense layer": dense_layer,
        "MoE layer": (whole - one - dense_layer * (dense - 1)) / (layers - dense),
        "step, layers apart": one - dense_layer,
    }
    case = {"sequences": sequences, "cached": CACHED}
    return [Measurement(what, by, case, tuple(values.tolist())) for what, values in parts.items()]


def step(chain: Chain) -> None:
    """Run a token of each sequence and drop its rows, so that every step has as many."""
    chain.step([[1]] * len(chain.cache.handles))
    for handle in chain.cache.handles:
        chain.cache.truncate(handle, CACHED)


def table(measurements: list[Measurement]) -> Table:
    shown = Table(title="µs, medians (middle halves)")
    for column in ("", "on", "1 sequence", "8 sequences"):
        shown.add_column(column, justify="right" if "seq" in column else "left")
    cells: dict[tuple[str, str], list[str]] = {}
    for m in measurements:
        low, high = m.middle_half
        text = f"{m.median * 1e6:,.0f} ({low * 1e6:,.0f}–{high * 1e6:,.0f})"
        cells.setdefault((m.what, m.by), []).append(text)
    for (what, by), row in cells.items():
        shown.add_row(what, by, *row)
    return shown


@app.command()
def main(
    build: Annotated[
        Path, typer.Argument(help="Build folder with the graphs of k2; weights are not needed.")
    ] = Path("build/k2/fp8"),
    rounds: Annotated[int, typer.Option(min=1)] = 31,
    out: Annotated[Path, typer.Option(help="The JSON to write.")] = Path(
        "build/bench/overhead.json"
    ),
) -> None:
    """Measure it on a backend that does nothing, on ONNX Runtime's, and on TensorRT's.

    Exit status 1 where one sequence on nothing takes more than 100 µs a layer and step.
    """
    torch.set_num_threads(1)
    spec = BuildSpec.load(build)
    if not spec.config.count("moe"):
        raise BuildError(f"{build}: expected a model with MoE layers, got dense layers only")
    measurements: list[Measurement] = []
    with tempfile.TemporaryDirectory() as folder:
        backends: dict[str, OpenBackend] = {
            NOTHING: lambda spec, profile, count: NullBackend(),
            "ONNX Runtime": lambda spec, _, count: null_onnxruntime(Path(folder), spec, count),
            "TensorRT": lambda spec, profile, _: null_tensorrt(spec, profile),
        }
        for by, open_backend in backends.items():
            for sequences in SEQUENCES:
                measurements += overheads(by, open_backend, spec, sequences, rounds)
    machine, versions = {"cores": os.cpu_count()}, {name: version(name) for name in PACKAGES}
    BenchReport(machine, versions, measurements).save(out)
    wide_console().print(table(measurements))
    if measurements[0].median > LIMIT:
        print(f"expected at most {LIMIT * 1e6:.0f} µs a layer and step", file=sys.stderr)
        raise typer.Exit(1)


if __name__ == "__main__":
    run(app)
