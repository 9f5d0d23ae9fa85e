"""What each form of LatentAttention costs: the builder's scratch, and ONNX Runtime's time.

    make graphs PRESET=k2
    python -m bench.attention_forms build/k2/fp8 --run build/full-size/k2-dense/fp32

A form is the op's body with parts of its text replaced. Engines are TensorRT-RTX's for SM120, of
the dense block, each in a process of its own. With --run the forms also run one layer of a build
with weights, in turns.
"""

import multiprocessing
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import onnx
import typer
from onnx import parser
from rich.table import Table

from graphs.cli import make_app, run, wide_console
from graphs.contract.manifest import ENGINE_MODES, Profile
from graphs.contract.shapes import input_bounds
from graphs.contract.spec import BuildSpec
from graphs.contract.tensorfile import Array
from graphs.engines.tensorrt import build_engine
from graphs.ops import latent_attention
from graphs.passes.inline import inline
from graphs.session import open_session, ort_value
from runtime.benchmark.measurements import in_turns
from runtime.devices.weights import Weights

OP = "LatentAttention"
CONTEXTS = (4096, 32768)
STEPS = ((1, 1, 1000), (8, 1, 1000), (1, 128, 0), (1, 128, 4096))  # sequences, tokens, cached


@dataclass(frozen=True)
class Form:
    """`changes` are made for every block, with its number for {i}."""

    name: str
    blocks: int = latent_attention.QUERY_BLOCKS
    changes: tuple[tuple[str, str], ...] = ()

    def body(self, scale: float) -> str:
        before, latent_attention.QUERY_BLOCKS = latent_attention.QUERY_BLOCKS, self.blocks
        try:
            text = latent_attention.body(7, scale=scale)
        finally:
            latent_attention.QUERY_BLOCKS = before
        for i in range(self.blocks):
            for old, new in self.changes:
                text = text.replace(old.format(i=i), new.format(i=i, after=i + 1))
        return text


FORMS = (
    Form("as it is"),
    Form("1 block", 1),
    Form("4 blocks", 4),
    Form("8 blocks", 8),
    Form(
        "softmax as one operator",
        changes=(
            (
                "soft_BTHs_{i} = Div(raised_BTHs_{i}, total_B1Hs_{i})",
                "soft_BTHs_{i} = Softmax<axis = 1>(wide_BTHs_{i})",
            ),
        ),
    ),
    Form(
        "blocks that do not wait",
        changes=(("scale_{i} = Add(scale_0, late_{i})", "scale_{i} = Identity(scale_0)"),),
    ),
    Form(
        "sizes as differences",
        changes=(
            (
                "S_{i} = Div(more_{i}, blocks)",
                "up_{i} = Constant<value_ints = [{after}]>() part_{i} = Mul(S, up_{i}) "
                "end_{i} = Div(part_{i}, blocks) S_{i} = Sub(end_{i}, start_{i})",
            ),
        ),
    ),
    Form(
        "cache and new rows joined",
        changes=(
            (
                "plain_BLm_{i} = MatMul(context, query_BWm_{i})",
                "rows_BTW_{i} = Concat<axis = 1>(context, new) "
                "plain_BTm_{i} = MatMul(rows_BTW_{i}, query_BWm_{i}) "
                "plain_BLm_{i} = Slice(plain_BTm_{i}, zero, L, axis1)",
            ),
            (
                "plain_BSm_{i} = MatMul(new, query_BWm_{i})",
                "plain_BSm_{i} = Slice(plain_BTm_{i}, L, T, axis1)",
            ),
        ),
    ),
    Form(
        "divided after the mix",
        changes=(
            ("soft_BTHs_{i} = Div(raised_BTHs_{i}, total_B1Hs_{i})", ""),
            ("CastLike(soft_BTHs_{i}, q_nope)", "CastLike(raised_BTHs_{i}, q_nope)"),
            (
                "mix_BmC_{i} = Slice(mix_BmW_{i}, zero, C, axis2)",
                "shape_Bm1_{i} = Concat<axis = 0>(B, m_{i}, axis1) "
                "total_Bm1_{i} = Reshape<allowzero = 1>(total_B1Hs_{i}, shape_Bm1_{i}) "
                "narrow_Bm1_{i} = CastLike(total_Bm1_{i}, q_nope) "
                "shares_BmW_{i} = Div(mix_BmW_{i}, narrow_Bm1_{i}) "
                "mix_BmC_{i} = Slice(shares_BmW_{i}, zero, C, axis2)",
            ),
        ),
    ),
)


def with_form(build: Path, spec: BuildSpec, form: Form) -> onnx.ModelProto:
    """The dense block with another body."""
    model = onnx.load_from_string(spec.onnx_bytes(build, "dense"))
    at = [function.name for function in model.functions].index(OP)
    text = form.body(spec.config.softmax_scale)
    model.functions[at].CopyFrom(parser.parse_function(text))
    return model


def scratch(build: Path, form: Form) -> list[int | None]:
    """Bytes in decode and prefill, for each context."""
    spec = BuildSpec.load(build)
    found: list[int | None] = []
    for context in CONTEXTS:
        bounds = [
            input_bounds(spec.graphs["dense"], mode, Profile(context=context))
            for mode in ENGINE_MODES
        ]
        model = inline(with_form(build, spec, form)).SerializeToString()
        engine = build_engine(model, bounds, "rtx", (12, 0), lambda share, phase: None)
        found += engine.activation_bytes
    return found


def seconds(build: Path, threads: int, rounds: int) -> dict[str, list[float]]:
    """Of each form, the median of every step, on random inputs."""
    spec = BuildSpec.load(build)
    weights = Weights.open(build, spec)
    found: dict[str, list[float]] = {form.name: [] for form in FORMS}
    fixed = weights.rope.tensors | weights.layers[0].tensors
    models = {f.name: with_form(build, spec, f).SerializeToString() for f in FORMS}
    sessions = {name: open_session(spec, model, threads) for name, model in models.items()}
    for step in STEPS:
        moving = _inputs(spec, *step)
        runs = {name: _run(session, fixed | moving) for name, session in sessions.items()}
        for name, times in in_turns(runs, rounds).items():
            found[name].append(statistics.median(times))
    return found


def _inputs(spec: BuildSpec, B: int, S: int, L: int) -> dict[str, Array]:
    """What of a step's inputs and outputs is not weights."""
    random, c = np.random.default_rng(0), spec.config
    return {
        "x": random.standard_normal((B, S, c.hidden_size), np.float32),
        "positions": np.tile(np.arange(L, L + S), (B, 1)),
        "context": random.standard_normal((B, L, c.cache_width), np.float32),
        "y": np.empty((B, S, c.hidden_size), np.float32),
        "new": np.empty((B, S, c.cache_width), np.float32),
    }


def _run(session: object, arrays: dict[str, Array]) -> Callable[[], None]:
    binding = session.io_binding()  # type: ignore[attr-defined]
    for name, array in arrays.items():
        bind = binding.bind_ortvalue_output if name in ("y", "new") else None
        (bind or binding.bind_ortvalue_input)(name, ort_value(array))
    return lambda: session.run_with_iobinding(binding)  # type: ignore[attr-defined]


app = make_app("Scratch and time of each form of LatentAttention.")


@app.command()
def main(
    build: Annotated[Path, typer.Argument(help="Build folder whose dense graph is compiled.")],
    run_build: Annotated[
        Path | None, typer.Option("--run", help="An fp32 build with weights, to run them on.")
    ] = None,
    threads: Annotated[int, typer.Option(help="ONNX Runtime's; 0: one per core.")] = 2,
    rounds: Annotated[int, typer.Option(min=1)] = 5,
) -> None:
    """One line a form: MB of scratch, and milliseconds."""
    modes = [f"{mode} on {context:,}, MB" for context in CONTEXTS for mode in ENGINE_MODES]
    steps = [f"{b} × {s} on {cached:,}, ms" for b, s, cached in STEPS] if run_build else []
    table = Table("form", *modes, *steps)
    times = seconds(run_build, threads, rounds) if run_build else {}
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        for form in FORMS:
            sizes = pool.apply(scratch, (build, form))
            cells = ["–" if size is None else f"{size / 1e6:.1f}" for size in sizes]
            cells += [f"{time * 1e3:.0f}" for time in times.get(form.name, [])]
            table.add_row(form.name, *cells)
    wide_console().print(table)


if __name__ == "__main__":
    run(app)
