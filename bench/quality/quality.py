"""The cost of each precision to a model on a text it has not seen.

    python -m bench.quality.quality models/k2-nano build/k2-nano --text models/k2-nano/heldout.txt

The first table is of the whole text: the builds for fp32, bf16 and fp8, the latter two also with
every bf16 value rounded as in an engine, and the fp8 build of the same model with INT4 experts,
each through its graphs on ONNX Runtime; and the two checkpoints,
decoded exactly, through the torch reference in fp32, which shares neither packing nor graphs with
the builds. The second is of the text's beginning, through the reference alone: each kind of
linear layer in fp8 while all others are wide, the costliest first. Costs are ranked by the
divergence from fp32's predictions, which is never below 0: the change in bits, where better and
worse guesses cancel, is noise on a short text. Exit status 1 where fp8, or one of the rounded
builds, costs more than `BAR`.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer

from bench.quality.fp8_by_layer import KINDS, with_fp8
from export.checkpoint.open import Checkpoint
from export.checkpoint.shards import CheckpointError
from export.reference.block import ReferenceModel
from export.synthetic.write_checkpoint import write_indented_json
from graphs.cli import make_app, progress_bar, run
from graphs.contract.manifest import Profile
from graphs.contract.quantization import Int4Groups
from graphs.contract.spec import BuildError
from graphs.contract.tensorfile import Array
from graphs.scoring import WINDOW, Logits, Scores, divergence, scored_logits
from runtime.evaluate import chain_logits, text_tokens
from runtime.load import LoadOptions, open_chain
from runtime.step.chain import StepError
from runtime.tokenizers.base import PromptError, Tokenizer
from runtime.tokenizers.load import load_tokenizer

BAR = (
    0.0025  # by how much the bits of fp8, and of what is rounded as in an engine, may exceed fp32's
)
FP32, FP8, STORED = "fp32", "fp8: per channel × per token", "checkpoint decoded exactly"
ROUNDED = {"bf16": "bf16, rounded", "fp8": "fp8, rounded"}
INT4, INT4_FP8 = "INT4 experts decoded exactly", "INT4 experts → fp8"


@dataclass(frozen=True)
class Scored:
    """A model's scores of a text, and the logits [tokens, vocab] behind them."""

    scores: Scores
    logits: Array

    @classmethod
    def from_logits(
        cls, logits: Logits, tokens: Sequence[int], bos: int, text_bytes: int
    ) -> "Scored":
        rows = np.concatenate([rows for _, rows in scored_logits(logits, tokens, bos)])
        return cls(Scores.from_logits([(np.array(tokens), rows)], text_bytes), rows)


@dataclass(frozen=True)
class QualityRow:
    """One model against another: relative change of its bits, share of tokens with the same
    likeliest one, mean KL divergence from the other in bits a token.
    """

    name: str
    against: str
    bits_per_byte: float
    change: float
    agreement: float
    divergence: float

    @classmethod
    def compare(cls, name: str, against: str, scored: Scored, reference: Scored) -> "QualityRow":
        compared = scored.scores.against(reference.scores)
        nats = divergence(reference.logits, scored.logits).mean()
        return cls(
            name,
            against,
            scored.scores.bits_per_byte,
            compared.change,
            compared.agreement,
            float(nats) / float(np.log(2)),
        )


@dataclass(frozen=True)
class QualityModel:
    """A model as checkpoint, builds and INT4 checkpoint; `text` in the tokens of its tokenizer."""

    checkpoint: Checkpoint
    int4: Checkpoint
    builds: Path  # holds fp32, bf16, fp8 and int4/fp8
    tokenizer: Tokenizer
    text: bytes
    threads: int

    def score_build(self, name: str, rounded: bool = False) -> Scored:
        options = LoadOptions(
            profile=Profile(tokens=WINDOW, context=WINDOW), threads=self.threads, rounded=rounded
        )
        chain = open_chain(self.builds / name, options)
        return self._score(chain_logits(chain), self.text)

    def score_model(self, model: ReferenceModel, text_bytes: int | None = None) -> Scored:
        def logits(ids: Sequence[int]) -> Iterator[Array]:
            with torch.inference_mode():
                yield model(torch.tensor([ids]))[0].numpy()

        return self._score(logits, self.text[:text_bytes])

    def _score(self, logits: Logits, text: bytes) -> Scored:
        tokens = text_tokens(self.tokenizer, text)
        return Scored.from_logits(logits, tokens, self.checkpoint.config.bos_token_id, len(text))


def by_precision(subject: QualityModel) -> Iterator[QualityRow]:
    """The first table."""
    fp32 = subject.score_build("fp32")
    yield QualityRow.compare(FP32, FP32, fp32, fp32)
    yield QualityRow.compare("bf16, widened", FP32, subject.score_build("bf16"), fp32)
    yield QualityRow.compare(FP8, FP32, subject.score_build("fp8"), fp32)
    for precision, name in ROUNDED.items():
        yield QualityRow.compare(name, FP32, subject.score_build(precision, rounded=True), fp32)
    yield QualityRow.compare(
        STORED, FP32, subject.score_model(subject.checkpoint.reference()), fp32
    )
    int4 = subject.score_model(subject.int4.reference())
    yield QualityRow.compare(INT4, FP32, int4, fp32)
    int4_fp8 = subject.score_build("int4/fp8")
    yield QualityRow.compare(INT4_FP8, FP32, int4_fp8, fp32)
    yield QualityRow.compare(INT4_FP8, INT4, int4_fp8, int4)


def by_layer(subject: QualityModel, text_bytes: int) -> Iterator[QualityRow]:
    """The second table, of the text's first bytes."""
    wide = subject.score_model(subject.checkpoint.reference(), text_bytes)
    groups = {kind: (kind,) for kind in KINDS} | {"all of these": tuple(KINDS)}
    for name, kinds in groups.items():
        model = with_fp8(subject.checkpoint, *kinds)
        yield QualityRow.compare(name, "all wide", subject.score_model(model, text_bytes), wide)


def failure(rows: Sequence[QualityRow]) -> str | None:
    """The error message where fp8, or a rounded build, misses the bar in the first table."""
    for row in rows:
        if row.name in (FP8, *ROUNDED.values()) and row.change > BAR:
            return (
                f"{row.name}: expected at most {BAR:.2%} more bits than fp32, got "
                f"{row.change:+.3%}; the second table shows which linear layers cost it"
            )
    return None


def markdown(rows: Sequence[QualityRow]) -> str:
    lines = [
        "| | bits per byte | against | change | same likeliest token | KL, bits a token |",
        "|---|---:|---|---:|---:|---:|",
    ]
    for row in rows:
        lines.append(
            f"| {row.name} | {row.bits_per_byte:.4f} | {row.against} | {row.change:+z.3%} | "
            f"{row.agreement:.2%} | {row.divergence:.5f} |"
        )
    return "\n".join(lines)


app = make_app("The cost of each precision to a model on a text.")


@app.command()
def main(
    checkpoint: Annotated[Path, typer.Argument(help="Folder with config.json and shards.")],
    builds: Annotated[
        Path,
        typer.Argument(help="Folder of the builds fp32, bf16, fp8, int4/checkpoint and int4/fp8."),
    ],
    text: Annotated[Path, typer.Option(help="File to score.")],
    part: Annotated[
        int, typer.Option(min=1, help="Bytes of the text for the second table.")
    ] = 16384,
    threads: Annotated[
        int,
        typer.Option(
            help="ONNX Runtime's; 0: one per core. One is the fastest for graphs of k2-nano's size."
        ),
    ] = 1,
) -> None:
    """Print two Markdown tables and write BUILDS/quality.json; exit status 1 past the bar."""
    if not text.is_file():
        raise BuildError(f"{text}: no such file")
    opened = Checkpoint.open(checkpoint)
    tokenizer = load_tokenizer(builds / "fp32", opened.config)
    int4 = Checkpoint.open(builds / "int4" / "checkpoint")
    subject = QualityModel(opened, int4, builds, tokenizer, text.read_bytes(), threads)
    with progress_bar() as progress:
        first = list(progress.track(by_precision(subject), total=9, description="precisions"))
        layers = progress.track(by_layer(subject, part), total=len(KINDS) + 1, description="layers")
        second = sorted(layers, key=lambda row: -row.divergence)
    assert isinstance(int4.config.quantization, Int4Groups)
    group = int4.config.quantization.group_size
    print(f"{text}, {len(subject.text):,} bytes; INT4 in groups of {group}\n\n{markdown(first)}\n")
    print(f"Alone in fp8, on the first {part:,} bytes, torch reference:\n\n{markdown(second)}")
    result = {
        "text_bytes": len(subject.text),
        "int4_group_size": group,
        "bar": BAR,
        "by_precision": [asdict(row) for row in first],
        "by_layer_bytes": part,
        "by_layer": [asdict(row) for row in second],
    }
    write_indented_json(builds / "quality.json", result)
    if message := failure(first):
        print(f"error: {message}", file=sys.stderr)
        raise typer.Exit(1)


if __name__ == "__main__":
    run(app, CheckpointError, StepError, PromptError)
