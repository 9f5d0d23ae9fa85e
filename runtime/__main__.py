"""`python -m runtime`: generate, evaluate, check parity and measure speed from a build folder."""

import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.filesize import decimal
from rich.progress import TextColumn, TimeElapsedColumn

from graphs.cli import make_app, progress_bar, run, wide_console
from graphs.contract.manifest import Profile
from graphs.contract.spec import BuildError, BuildSpec
from graphs.engines.tensorrt import TensorRTError
from graphs.report.terminal import show as show_report
from graphs.scoring import WINDOW, Scores
from graphs.session import SessionError
from runtime.backends import BackendError
from runtime.benchmark.bench import BenchError
from runtime.benchmark.bench import bench as run_bench
from runtime.benchmark.cases import usual_batches, usual_lengths
from runtime.benchmark.table import notes as bench_notes
from runtime.benchmark.table import table as bench_table
from runtime.cache.errors import CacheError
from runtime.commands import options as arg
from runtime.commands.jobs import Job, make_jobs
from runtime.commands.options import given_prompts, load_options
from runtime.commands.results import Results, json_line, plain_text
from runtime.commands.run_jobs import run_jobs, stream_job
from runtime.commands.signals import Interruption, without_traceback
from runtime.devices.base import DeviceError
from runtime.evaluate import evaluate as evaluate_text
from runtime.load import LoadOptions, load_chain
from runtime.parity import runtime_parity
from runtime.serving.encoder import Encoder, GenerationOptions
from runtime.serving.request import Completion, Request
from runtime.serving.sampling import SamplingError, SamplingParams
from runtime.serving.scheduler import Scheduler
from runtime.step.chain import Chain, StepError
from runtime.tokenizers.base import PromptError
from runtime.tokenizers.load import load_tokenizer

# What ends a command with one line; anything else is a bug of ours.
ENDING = (
    *(PromptError, SamplingError, StepError, CacheError, BackendError, DeviceError),
    *(SessionError, TensorRTError, BenchError),
)

app = make_app("Tokens from a build folder, on ONNX Runtime or TensorRT.")


@app.command()
def generate(
    build: arg.Build,
    prompt: arg.PromptTexts = None,
    prompt_ids: arg.PromptIds = None,
    messages: arg.Messages = None,
    prompts: arg.PromptsFile = None,
    max_new_tokens: arg.MaxNewTokens = Request.max_new_tokens,
    temperature: arg.Temperature = SamplingParams.temperature,
    top_k: arg.TopK = SamplingParams.top_k,
    top_p: arg.TopP = SamplingParams.top_p,
    min_p: arg.MinP = SamplingParams.min_p,
    repetition_penalty: arg.RepetitionPenalty = SamplingParams.repetition_penalty,
    seed: arg.Seed = SamplingParams.seed,
    stop: arg.Stop = None,
    backend: arg.Backend = "onnxruntime",
    provider: arg.OnProvider = None,
    engines: arg.Engines = None,
    cache: arg.Cache = None,
    context: arg.Context = None,
    batch: arg.Batch = None,
    chunk: arg.Chunk = None,
    threads: arg.Threads = None,
    batch_invariant: arg.BatchInvariant = False,
    verify: arg.Verify = False,
    as_json: arg.AsJson = False,
    out: arg.Out = None,
) -> None:
    """Write text: one prompt's as it comes; of several, which run side by side, in their order.

    Exit status 1 where one ended in an error. SIGINT or SIGTERM keeps what is finished by then.
    """
    limits = {"context": context, "batch": batch, "chunk": chunk}
    options = load_options(backend, provider, engines, threads, verify, limits, cache)
    options["batch_invariant"] = batch_invariant
    sampling = SamplingParams(temperature, top_k, top_p, min_p, repetition_penalty, seed)
    common: GenerationOptions = {
        "max_new_tokens": max_new_tokens,
        "sampling": sampling,
        "stop": stop or [],
    }
    asked = given_prompts(prompt, prompt_ids, messages, prompts)
    config = BuildSpec.load(build).config
    encoder = Encoder(build, config)
    jobs = make_jobs(asked, encoder, common, config, options.get("profile"))
    if encoder.no_tokenizer:
        print(f"token ids are printed instead of text: {encoder.no_tokenizer}", file=sys.stderr)
    streaming = len(jobs) == 1 and not as_json
    results = Results(jobs, _shown_as(as_json, streaming), out)
    with Interruption() as interruption, results:
        chain = _load(build, options)
        scheduler = Scheduler(chain, encoder.tokenizer)
        with closing(chain.backend), closing(scheduler):
            interruption.patient = True
            start = time.perf_counter()
            if streaming:
                stream_job(scheduler, jobs[0], interruption, results, _write)
            else:
                run_jobs(scheduler, jobs, interruption, results)
            seconds = time.perf_counter() - start
    for job, error in results.failed:
        print(f"error: {job.where}: {' '.join(str(error).split())}", file=sys.stderr)
    if interruption.received:
        _leave(interruption, f": {len(results.ended)} of {len(jobs)} finished")
    if not as_json:
        rate = f"{results.tokens / seconds:.1f} tokens/s"
        print(f"{results.tokens} tokens in {seconds:.2f} s, {rate}", file=sys.stderr)
    if results.failed:
        raise typer.Exit(1)


@app.command()
def evaluate(
    build: arg.Build,
    text: Annotated[Path, typer.Option(help="File to score.")],
    out: Annotated[
        Path | None,
        typer.Option(
            help="Write every token's score here: id, surprisal, likeliest id and its logit's lead."
        ),
    ] = None,
    against: Annotated[
        Path | None, typer.Option(help="What another build's --out wrote: compare with it.")
    ] = None,
    backend: arg.Backend = "onnxruntime",
    provider: arg.OnProvider = None,
    engines: arg.Engines = None,
    threads: arg.Threads = None,
    verify: arg.Verify = False,
) -> None:
    """Bits per byte and per token, in windows of 512 tokens with at least 255 tokens of context."""
    options = load_options(backend, provider, engines, threads, verify)
    options["cache"] = WINDOW
    if "profile" in options:
        options["profile"] = Profile(tokens=WINDOW, context=WINDOW)
    if not text.is_file():
        raise BuildError(f"{text}: no such file")
    if out is not None and not out.parent.is_dir():
        raise BuildError(f"{out.parent}: no such folder for --out")
    reference = None if against is None else Scores.load(against)
    tokenizer = load_tokenizer(build, BuildSpec.load(build).config)
    chain = _load(build, options)
    with closing(chain.backend), progress_bar() as progress:
        task = progress.add_task("scoring", total=None)
        scores = evaluate_text(
            chain,
            tokenizer,
            text.read_bytes(),
            progress=lambda done, total: progress.update(task, completed=done, total=total),
        )
    print(
        f"{scores.bits_per_byte:.4f} bits per byte, {scores.bits_per_token:.4f} bits per token: "
        f"{scores.text_bytes:,} bytes, {len(scores.tokens):,} tokens"
    )
    if out is not None:
        scores.save(out)
    if reference is not None:
        print(f"against {against}: {scores.against(reference)}")


@app.command()
def parity(
    build: arg.Build,
    backend: arg.Backend = "onnxruntime",
    provider: arg.OnProvider = None,
    engines: arg.Engines = None,
    threads: arg.Threads = None,
    verify: arg.Verify = False,
) -> None:
    """Replay the goldens of blocks and of the whole chain; exit status 1 past tolerance.

    What was found goes to BUILD/parity/chain.json, of which `python -m graphs report` makes a page.
    """
    chain = _load(build, load_options(backend, provider, engines, threads, verify))
    with closing(chain.backend):
        fragment = runtime_parity(chain, build)
    fragment.save(build)
    if not show_report(wide_console(), fragment):
        raise typer.Exit(1)


@app.command()
def bench(
    build: arg.Build,
    sequences: arg.Sequences = None,
    cached: arg.Cached = None,
    rounds: Annotated[int, typer.Option(min=1, help="Samples of each that count.")] = 7,
    backend: arg.Backend = "onnxruntime",
    provider: arg.OnProvider = None,
    engines: arg.Engines = None,
    cache: arg.Cache = None,
    context: arg.Context = None,
    batch: arg.Batch = None,
    chunk: arg.Chunk = None,
    threads: arg.Threads = None,
    verify: arg.Verify = False,
    out: Annotated[Path | None, typer.Option(help="Write every sample here, as JSON.")] = None,
) -> None:
    """Time each engine alone and the whole chain, decode and prefill, beside the GPU's roofline.

    On a GPU between CUDA events and by the wall clock. What is beyond a limit is left out, and said
    to be.
    """
    limits = {"context": context, "batch": batch, "chunk": chunk}
    options = load_options(backend, provider, engines, threads, verify, limits, cache)
    if out is not None and (out.is_dir() or not out.parent.is_dir()):
        raise BuildError(f"{out}: a file in a folder that exists expected for --out")
    chain = _load(build, options)
    with closing(chain.backend), progress_bar(TimeElapsedColumn()) as progress:
        task = progress.add_task("measuring", total=None)
        report = run_bench(
            chain,
            {"tensorrt": "TensorRT", "onnxruntime": "ONNX Runtime"}[backend],
            sequences or usual_batches(chain),
            usual_lengths(chain) if cached is None else cached,
            rounds,
            lambda what: progress.update(task, description=what),
        )
    if out is not None:
        report.save(out)
    console = wide_console()
    console.print(bench_table(report, f"{report.machine['device']}, {build}"))
    for note in bench_notes(report):
        console.print(note, soft_wrap=True, highlight=False)


def _write(text: str) -> None:
    print(text, end="", flush=True)


def _shown_as(as_json: bool, streaming: bool) -> Callable[[Job, Completion], None]:
    """Prints a result, above a bar on the same terminal."""
    # Rich puts a bar's own output, which is standard error, in the place of sys.stdout.
    stdout = None if sys.stdout.isatty() else sys.stdout

    def show(job: Job, completion: Completion) -> None:
        if as_json:
            print(json_line(job, completion), file=stdout, flush=True)
        elif not streaming:
            print(f"[{job.id}]\n{plain_text(completion)}\n", file=stdout, flush=True)

    return show


def _load(build: Path, options: LoadOptions) -> Chain:
    """A chain, with a progress bar on standard error."""
    with progress_bar(TextColumn("{task.fields[bytes]}"), TimeElapsedColumn()) as bar:
        task = bar.add_task("loading", total=None, bytes="")

        def progress(what: str, done: int, total: int) -> None:
            text = f"{decimal(done)} of {decimal(total)}"
            bar.update(task, description=what, completed=done, total=total, bytes=text)

        return load_chain(build, progress, **options)


def _leave(interruption: Interruption, done: str = "") -> NoReturn:
    print(f"interrupted{done}", file=sys.stderr)
    sys.exit(interruption.status)


def main() -> None:
    without_traceback()
    with Interruption() as interruption:
        run(app, *ENDING)
    _leave(interruption)


if __name__ == "__main__":
    main()
