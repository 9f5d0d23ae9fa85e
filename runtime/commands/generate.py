"""`python -m runtime generate`."""

import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Annotated

import typer

from graphs.contract.spec import BuildSpec
from runtime.commands.generation.jobs import Job, make_jobs
from runtime.commands.generation.options import PromptOptions, SettingOptions
from runtime.commands.generation.results import Results, json_line, plain_text
from runtime.commands.generation.run_jobs import run_jobs, stream_job
from runtime.commands.loading import load
from runtime.commands.options import BuildArgument, SizedOptions, with_groups
from runtime.commands.signals import Interruption
from runtime.serving.encoder import Encoder
from runtime.serving.request import Completion
from runtime.serving.scheduler import Scheduler


@with_groups
def generate(
    build: BuildArgument,
    prompts: PromptOptions,
    settings: SettingOptions,
    opening: SizedOptions,
    batch_invariant: Annotated[
        bool,
        typer.Option(
            "--batch-invariant",
            help="Give a prompt the same result, bit for bit, whatever runs beside it; slower "
            "where it runs alone.",
        ),
    ] = False,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json",
            help="Print a JSON object for each prompt, one a line: id, prompt_ids, tokens, text, "
            "finish_reason, error.",
        ),
    ] = False,
    out: Annotated[
        Path | None, typer.Option(help="File for those objects, written when all is done.")
    ] = None,
) -> None:
    """Continue prompts: the text of one as it comes; several run side by side, shown in order.

    Exit status 1 where one ended in an error. SIGINT or SIGTERM keeps the finished results.
    """
    options = opening.load_options(batch_invariant=batch_invariant)
    common, requests = settings.generation_options(), prompts.requests()
    config = BuildSpec.load(build).config
    encoder = Encoder(build, config)
    jobs = make_jobs(requests, encoder, common, config, options.limits)
    if encoder.no_tokenizer:
        _say(f"token ids are printed instead of text: {encoder.no_tokenizer}")
    streaming = len(jobs) == 1 and not as_json
    results = Results(jobs, _shown_as(as_json, streaming), out)
    with Interruption() as interruption, results:
        chain = load(build, options)
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
        _say(f"error: {job.where}: {' '.join(str(error).split())}")
    if interruption.received:
        interruption.leave(f": {len(results.ended)} of {len(jobs)} finished")
    if not as_json:
        rate = f"{results.tokens / seconds:.1f} tokens/s"
        _say(f"{results.tokens} tokens in {seconds:.2f} s, {rate}")
    if results.failed:
        raise typer.Exit(1)


def _write(text: str) -> None:
    print(text, end="", flush=True)


def _say(line: str) -> None:
    print(line, file=sys.stderr)


def _shown_as(as_json: bool, streaming: bool) -> Callable[[Job, Completion], None]:
    """A function that prints a result above a progress bar on the same terminal."""
    # Rich replaces sys.stdout, while a bar is shown, by the bar's own output: standard error.
    stdout = None if sys.stdout.isatty() else sys.stdout

    def show(job: Job, completion: Completion) -> None:
        if as_json:
            print(json_line(job, completion), file=stdout, flush=True)
        elif not streaming:
            print(f"[{job.id}]\n{plain_text(completion)}\n", file=stdout, flush=True)

    return show
