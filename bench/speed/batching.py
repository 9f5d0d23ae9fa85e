"""Tokens per second of eight prompts together, against one alone, in turns."""

import statistics
import time
from pathlib import Path
from typing import Annotated

import typer

from graphs.cli import make_app, run
from runtime import LLM

BEGINNING = "And it came to pass in the "
PLACES = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth")

app = make_app(__doc__)


@app.command()
def main(
    build: Annotated[Path, typer.Argument(help="Build folder, build/MODEL/PRECISION.")],
    rounds: Annotated[int, typer.Option(min=1)] = 5,
    new_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens to generate for each prompt.")
    ] = 128,
    threads: Annotated[int, typer.Option(help="ONNX Runtime's; 0: one per core.")] = 2,
) -> None:
    """Print medians and their ratio."""
    with LLM.load(build, threads=threads) as llm:
        rates: dict[int, list[float]] = {1: [], len(PLACES): []}
        for _ in range(rounds):
            for count, samples in rates.items():
                prompts = [BEGINNING + place for place in PLACES[:count]]
                start = time.perf_counter()
                done = llm.generate(prompts, max_new_tokens=new_tokens)
                seconds = time.perf_counter() - start
                samples.append(sum(len(answer.tokens) for answer in done) / seconds)
    alone, together = (statistics.median(samples) for samples in rates.values())
    print(
        f"{build}: {alone:.0f} tokens/s alone, {together:.0f} of {len(PLACES)} together, "
        f"{together / alone:.1f} times (medians of {rounds})"
    )


if __name__ == "__main__":
    run(app)
