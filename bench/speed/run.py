"""Speed against transformers and against the machine's memory; `make bench`.

    python -m bench.speed.run measure BLOCK BLOCK_CHECKPOINT MODEL MODEL_CHECKPOINT \
        --text FILE --out DIR
    python -m bench.speed.run markdown DIR/bench.json

Two sides that are compared run in turns, in one process. A missed bar is reported and is no error:
the machine may be the cause, which the spread and the bandwidth of the same run show.
"""

import statistics
import sys
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import torch
import typer

from bench.speed.bars import judge, rates
from bench.speed.deepseek_v3 import DeepseekLayer
from bench.speed.dense_block import MeasuredBlock, SpeedError, compare, growth
from bench.speed.end_to_end import compare_generation
from bench.speed.limits import multiplying, reading
from bench.speed.plots import bars_plot, decode_plot
from bench.speed.tables import notes, sheets
from export.checkpoint.open import Checkpoint
from export.checkpoint.shards import CheckpointError
from graphs.cli import make_app, run, wide_console
from graphs.contract.spec import BuildSpec
from runtime.benchmark.cases import BenchCase
from runtime.benchmark.machine import describe_machine, describe_versions
from runtime.benchmark.measurements import BenchReport, BenchReportError
from runtime.tokenizers.load import load_tokenizer


@dataclass(frozen=True)
class SpeedPlan:
    """What to measure: steps of the block, slow ones with half the rounds; bytes of the buffer that
    is read; rows in use, in caches of `cache_rows`; and the whole model's batches and tokens.
    """

    cases: tuple[BenchCase, ...]
    slow: tuple[BenchCase, ...]
    memory: int
    in_use: int
    cache_rows: tuple[int, ...]
    batches: tuple[int, ...]
    new_tokens: int


FULL = SpeedPlan(
    cases=(
        BenchCase(1, 1, 1000),
        BenchCase(1, 1, 4096),
        BenchCase(8, 1, 1000),
        BenchCase(1, 128, 0),
    ),
    slow=(BenchCase(1, 1, 32768), BenchCase(1, 512, 0)),
    memory=2 << 30,
    in_use=100,
    cache_rows=(1024, 32768),
    batches=(1, 8),
    new_tokens=128,
)
QUICK = SpeedPlan(
    cases=(BenchCase(1, 1, 100), BenchCase(1, 1, 400), BenchCase(4, 1, 100), BenchCase(1, 16, 0)),
    slow=(),
    memory=32 << 20,
    in_use=100,
    cache_rows=(256, 1024),
    batches=(1, 4),
    new_tokens=8,
)

app = make_app("Speed against transformers and against the machine's memory.")


@app.command()
def measure(
    block: Annotated[Path, typer.Argument(help="fp32 build whose first layer is the block.")],
    block_checkpoint: Annotated[Path, typer.Argument(help="Checkpoint that it was packed from.")],
    model: Annotated[Path, typer.Argument(help="fp32 build of a small model with a tokenizer.")],
    model_checkpoint: Annotated[
        Path, typer.Argument(help="Checkpoint that the small model was packed from.")
    ],
    text: Annotated[Path, typer.Option(help="File to cut prompts from.")],
    out: Annotated[Path, typer.Option(help="Folder for bench.json and the plots.")],
    rounds: Annotated[
        int,
        typer.Option(
            min=1, help="Runs of each; half as many of slow steps, 3 times as many of the caches'."
        ),
    ] = 9,
    threads: Annotated[int, typer.Option(min=1, help="Threads of every side.")] = 2,
    quick: Annotated[bool, typer.Option(help="Sizes that suit a small model.")] = False,
) -> None:
    """Write bench.json and two plots; print tables, and which bars are met."""
    plan = QUICK if quick else FULL
    torch.set_num_threads(threads)
    report = _measure_block(plan, block, block_checkpoint, rounds, threads)
    _measure_model(report, plan, model, model_checkpoint, text, rounds, threads)
    bars = list(judge(report))
    report.computed["bars"] = [bar.as_dict() for bar in bars]
    report.computed["bandwidth"] = statistics.median(rates(report, "read"))
    report.save(out / "bench.json")
    decode_plot(report, out / "decode.png")
    bars_plot(bars, out / "bars.png")
    console = wide_console()
    for sheet in sheets(report):
        console.print(sheet.rich)
    for line in notes(report):
        console.print(line, highlight=False)


@app.command()
def markdown(report: Annotated[Path, typer.Argument(help="A bench.json.")]) -> None:
    """Print the tables of a report as Markdown."""
    loaded = BenchReport.load(report)
    print("\n\n".join(sheet.markdown for sheet in sheets(loaded)) + "\n")
    for line in notes(loaded):
        print(f"- {line}")


def _measure_block(
    plan: SpeedPlan, build: Path, checkpoint: Path, rounds: int, threads: int
) -> BenchReport:
    layer = DeepseekLayer(Checkpoint.open(checkpoint))
    subject = MeasuredBlock(build, layer, reading(plan.memory), multiplying(), threads)
    chain = subject.open(plan.cases[0], batch_invariant=False)
    versions = describe_versions(chain) | {"transformers": version("transformers")}
    report = BenchReport(describe_machine(chain) | {"threads": threads}, versions)
    errors = report.computed["max_error"] = {}
    for case in (*plan.cases, *plan.slow):
        print(f"the block, {case}", file=sys.stderr)
        compared = compare(subject, case, (rounds + 1) // 2 if case in plan.slow else rounds)
        report.measurements += compared.measurements
        errors[str(case)] = compared.error
    print("a step in a small and in a large cache", file=sys.stderr)
    report.measurements += growth(subject, plan.in_use, plan.cache_rows, 3 * rounds)
    return report


def _measure_model(
    report: BenchReport,
    plan: SpeedPlan,
    build: Path,
    checkpoint: Path,
    text: Path,
    rounds: int,
    threads: int,
) -> None:
    tokenizer = load_tokenizer(build, BuildSpec.load(build).config)
    ids = tokenizer.ordinary(text.read_text("utf-8"))
    same = report.computed["tokens_equal"] = {}
    for batch in plan.batches:
        print(f"the whole model, {batch} prompts", file=sys.stderr)
        generated = compare_generation(
            build, checkpoint, ids, batch, plan.new_tokens, rounds, threads
        )
        report.measurements += generated.measurements
        same[str(batch)] = generated.same


if __name__ == "__main__":
    run(app, CheckpointError, SpeedError, BenchReportError)
