"""`python -m runtime`: generate, evaluate and check parity from a build folder."""

import json
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from graphs.cli import make_app, progress_bar, run, wide_console
from graphs.config import ModelConfig
from graphs.manifest import Profile
from graphs.report.terminal import show
from graphs.scoring import Scores
from graphs.spec import GRAPHS, BuildError, BuildSpec
from runtime.chain import Chain, StepError, require_ids
from runtime.chat import Chat, parse_messages
from runtime.evaluate import evaluate as evaluate_text
from runtime.generate import generate as generate_tokens
from runtime.kv_cache import CacheError
from runtime.parity import runtime_parity
from runtime.sampling import Sampler, SamplingError
from runtime.stop_ids import stop_ids
from runtime.tokenizer import PromptError, Tokenizer
from runtime.tokenizer_files import load_tokenizer

app = make_app("Tokens from a build folder, on ONNX Runtime.")

Build = Annotated[Path, typer.Argument(help="Build folder, build/MODEL/PRECISION.")]
Threads = Annotated[int, typer.Option(help="ONNX Runtime's threads; 0: one per core.")]
Context = Annotated[int, typer.Option(min=1, help="Cache rows, and the longest sequence.")]
Chunk = Annotated[int, typer.Option(min=1, help="Prompt tokens a step.")]


@app.command()
def generate(
    build: Build,
    prompt: Annotated[str | None, typer.Option(help="Text to go on from.")] = None,
    prompt_ids: Annotated[str | None, typer.Option(help="Token ids instead: 1,2,3")] = None,
    messages: Annotated[
        Path | None,
        typer.Option(help="Chat instead: a JSON list of role and content; -: standard input."),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 128,
    temperature: Annotated[float, typer.Option(help="0: greedy.")] = 0.0,
    seed: int = 0,
    context: Context = 4096,
    chunk: Chunk = 128,
    threads: Threads = 0,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one object: prompt_ids, tokens, text.")
    ] = False,
) -> None:
    """Write text: streamed as it comes, with tokens/s at the end."""
    if sum(given is not None for given in (prompt, prompt_ids, messages)) != 1:
        raise typer.BadParameter("exactly one of --prompt, --prompt-ids and --messages is needed")
    config = BuildSpec.load(build).config
    stop = stop_ids(build, config)
    tokenizer = _tokenizer(build, config, required=prompt_ids is None)
    if prompt_ids is not None:
        ids = _parse_ids(prompt_ids)
    else:
        assert tokenizer is not None
        ids, more = _encode(build, tokenizer, prompt, messages)
        stop |= more
    require_ids(ids, config.vocab_size)
    sampler = Sampler(temperature, seed)
    chain = _load(build, Profile(tokens=chunk, context=context), threads)
    stream = tokenizer.stream() if tokenizer else None
    tokens: list[int] = []
    text = ""

    def emit(piece: str) -> None:
        nonlocal text
        text += piece
        if not as_json:
            sys.stdout.write(piece)
            sys.stdout.flush()

    start = time.perf_counter()
    for token in generate_tokens(chain, ids, max_new_tokens, sampler, stop):
        tokens.append(token)
        emit(stream.push(token) if stream else f"{token} ")
    seconds = time.perf_counter() - start
    emit(stream.finish() if stream else "")
    if as_json:
        print(json.dumps({"prompt_ids": ids, "tokens": tokens, "text": text if stream else None}))
    else:
        print()
        rate = len(tokens) / seconds
        print(f"{len(tokens)} tokens in {seconds:.2f} s, {rate:.1f} tokens/s", file=sys.stderr)


@app.command()
def evaluate(
    build: Build,
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
    threads: Threads = 0,
) -> None:
    """Bits per byte and per token, in windows of 512 tokens with at least 255 tokens of context."""
    if not text.is_file():
        raise BuildError(f"{text}: no such file")
    if out is not None and not out.parent.is_dir():
        raise BuildError(f"{out.parent}: no such folder for --out")
    reference = None if against is None else Scores.load(against)
    tokenizer = load_tokenizer(build, BuildSpec.load(build).config)
    chain = _load(build, Profile(tokens=512, context=512), threads)
    with progress_bar() as progress:
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
def parity(build: Build, threads: Threads = 0) -> None:
    """Replay the goldens of blocks and of the whole chain; exit status 1 past tolerance.

    What was found goes to BUILD/parity/chain.json, of which `python -m graphs report` makes a page.
    """
    chain = _load(build, Profile(), threads)
    fragment = runtime_parity(chain, build)
    fragment.save(build)
    if not show(wide_console(), fragment):
        raise typer.Exit(1)


def _load(build: Path, profile: Profile, threads: int) -> Chain:
    """A chain, with a progress bar on standard error."""
    steps = len(GRAPHS) + BuildSpec.load(build).config.num_hidden_layers
    with progress_bar() as progress:
        task = progress.add_task("loading", total=steps)
        return Chain.load(
            build,
            profile,
            threads=threads,
            progress=lambda what: progress.update(task, description=what, advance=1),
        )


def _tokenizer(build: Path, config: ModelConfig, required: bool) -> Tokenizer | None:
    """None, with a word on standard error, where it is not required and cannot be read."""
    try:
        return load_tokenizer(build, config)
    except BuildError as e:
        if required:
            raise
        print(f"token ids are printed instead of text: {e}", file=sys.stderr)
        return None


def _encode(
    build: Path, tokenizer: Tokenizer, prompt: str | None, messages: Path | None
) -> tuple[list[int], set[int]]:
    """The ids of the one that is given, and the stop ids that it brings."""
    if prompt is not None:
        return tokenizer.encode(prompt), set()
    assert messages is not None
    chat = Chat.open(build, tokenizer)
    return chat.ids(parse_messages(*_read(messages))), {chat.end}


def _read(messages: Path) -> tuple[bytes, str]:
    """The file's content, and what to call it in errors."""
    if str(messages) == "-":
        return sys.stdin.buffer.read(), "standard input"
    if not messages.is_file():
        raise PromptError(f"{messages}: no such file")
    return messages.read_bytes(), str(messages)


def _parse_ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as e:
        raise StepError(f"--prompt-ids: whole numbers as 1,2,3 expected, found {text!r}") from e


if __name__ == "__main__":
    run(app, StepError, CacheError, SamplingError, PromptError)
