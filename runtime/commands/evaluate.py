"""`python -m runtime evaluate`."""

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from graphs.cli import progress_bar
from graphs.contract.manifest import Profile
from graphs.contract.spec import BuildError, BuildSpec
from graphs.scoring import WINDOW, Scores
from runtime.commands.loading import load
from runtime.commands.options import BuildArgument, OpeningOptions, RoundedOption, with_groups
from runtime.evaluate import evaluate as score
from runtime.load import LoadOptions
from runtime.tokenizers.load import load_tokenizer


@with_groups
def evaluate(
    build: BuildArgument,
    text: Annotated[Path, typer.Option(help="File to score.")],
    opening: OpeningOptions,
    out: Annotated[
        Path | None,
        typer.Option(
            help="File for every token's score: id, surprisal, likeliest id and its logit's lead."
        ),
    ] = None,
    against: Annotated[
        Path | None, typer.Option(help="File that another build's --out wrote, to compare with.")
    ] = None,
    rounded: RoundedOption = False,
) -> None:
    """Bits per byte and per token, in windows of 512 tokens with at least 255 tokens of context."""
    options = _for_a_window(opening.load_options(rounded=rounded or None))
    if not text.is_file():
        raise BuildError(f"{text}: no such file")
    if out is not None and not out.parent.is_dir():
        raise BuildError(f"{out.parent}: no such folder for --out")
    reference = None if against is None else Scores.load(against)
    tokenizer = load_tokenizer(build, BuildSpec.load(build).config)
    chain = load(build, options)
    with closing(chain.backend), progress_bar() as progress:
        task = progress.add_task("scoring", total=None)
        scores = score(
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


def _for_a_window(options: LoadOptions) -> LoadOptions:
    """The options with a cache, and limits where they are ours to set, of one window."""
    if options.limits is not None:
        options = replace(options, profile=Profile(tokens=WINDOW, context=WINDOW))
    return replace(options, cache=WINDOW)
