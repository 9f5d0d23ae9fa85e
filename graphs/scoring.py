"""The rule by which a text is scored, in training, in the runtime and in `make quality` alike.

Of every token its surprisal is kept, the id that was the likeliest in its place, and by how much
that one led: enough to compare two builds token by token, in 24 bytes a token.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from graphs.contract.spec import BuildError
from graphs.contract.tensorfile import Array, TensorFile, write_arrays

WINDOW = 512  # tokens, BOS included
WIDENED = 1 << 20  # logits that are widened to float64 at a time

# Token ids of one sequence -> logits fp32 [n, vocab] after each of them, in pieces of whole rows.
Logits = Callable[[Sequence[int]], Iterable[Array]]

_FORMAT = {"content": "scores of a text, token by token"}  # metadata of a scores file


def windows(length: int, window: int = WINDOW) -> list[tuple[int, int, int]]:
    """(start, end, first scored) of each window over `length` tokens of text.

    A window is BOS and window−1 tokens; the first half of every window but the first is context
    only, so each token is scored once, with at least half a window before it (but for the text's
    start).
    """
    step = window // 2
    result = [(0, min(window - 1, length), 0)]
    while result[-1][1] < length:
        scored = result[-1][1]
        start = scored - (window - 1 - step)
        result.append((start, min(start + window - 1, length), scored))
    return result


def scored_logits(
    logits: Logits, tokens: Sequence[int], bos: int, window: int = WINDOW
) -> Iterator[tuple[Array, Array]]:
    """Pieces of the text, in order and each token once: ids [n], and the logits that foretold them.

    Every window starts with `bos`, whatever stands before a prompt.
    """
    for start, end, scored in windows(len(tokens), window):
        part = np.array(list(tokens[start:end]))  # a sequence of ids may be bytes
        for piece in logits([bos, *part[:-1].tolist()]):
            targets, part = part[: len(piece)], part[len(piece) :]
            context = min(max(scored - start, 0), len(piece))
            start += len(piece)
            if context < len(piece):
                yield targets[context:], piece[context:]


@dataclass(frozen=True)
class ScoreComparison:
    """One build's scores beside another's, the reference's.

    `change` of the bits, relative; `agreement`: the share of tokens with the same likeliest id;
    `margin`: the largest lead, in the reference, of a likeliest id that the other build has not.
    """

    change: float
    agreement: float
    margin: float

    def __str__(self) -> str:
        text = f"{self.change:+z.3%} bits, the same likeliest token for {self.agreement:.2%}"
        return text + (f"; the others led by at most {self.margin:.3f}" if self.margin else "")


@dataclass(frozen=True)
class Scores:
    """A model's scores of a text of `text_bytes` bytes, token by token.

    `tokens` int64: the text's ids; `nats` fp32: −ln of each one's probability; `top` int64: the
    likeliest id in its place; `margin` fp32: by how much that one's logit leads the second.
    """

    text_bytes: int
    tokens: Array
    nats: Array
    top: Array
    margin: Array

    @classmethod
    def from_logits(cls, scored: Iterable[tuple[Array, Array]], text_bytes: int) -> "Scores":
        """Score what `scored_logits` yields. Memory: `WIDENED` values in float64, a few times."""
        parts = [
            (targets[rows], *_score(logits[rows], targets[rows]))
            for targets, logits in scored
            for rows in row_slices(logits)
        ]
        tokens, nats, top, margin = (np.concatenate(column) for column in zip(*parts, strict=True))
        return cls(text_bytes, tokens, nats, top, margin)

    @property
    def bits(self) -> float:
        """Bits of the whole text."""
        return float(self.nats.sum(dtype=np.float64)) / math.log(2)

    @property
    def bits_per_byte(self) -> float:
        return self.bits / self.text_bytes

    @property
    def bits_per_token(self) -> float:
        return self.bits / len(self.tokens)

    def against(self, reference: "Scores") -> ScoreComparison:
        """Raises BuildError where the reference scored another text, or in other tokens."""
        if not np.array_equal(self.tokens, reference.tokens):
            raise BuildError(
                f"scores: expected the same {len(self.tokens)} tokens to compare with, got "
                f"{len(reference.tokens)} of another text or tokenizer; score the same text again"
            )
        other = self.top != reference.top
        return ScoreComparison(
            change=self.bits / reference.bits - 1,
            agreement=1 - float(other.mean()),
            margin=float(reference.margin[other].max(initial=0)),
        )

    def save(self, path: Path) -> None:
        arrays = {name: getattr(self, name) for name in ("tokens", "nats", "top", "margin")}
        write_arrays(path, arrays, _FORMAT | {"text_bytes": str(self.text_bytes)})

    @classmethod
    def load(cls, path: Path) -> "Scores":
        """Raises BuildError where it is no file that `save` wrote."""
        file = TensorFile.open(path, _FORMAT)
        columns = (file[name] for name in ("tokens", "nats", "top", "margin"))
        return cls(int(file.metadata["text_bytes"]), *columns)


def divergence(reference: Array, logits: Array) -> Array:
    """KL(reference ‖ other) of each row's softmax, in nats, float64."""
    return np.concatenate([_divergence(reference[b], logits[b]) for b in row_slices(logits)])


def row_slices(logits: Array) -> Iterator[slice]:
    """Slices of whole rows, `WIDENED` values in each but for a longer row."""
    step = max(WIDENED // logits.shape[1], 1)
    for start in range(0, len(logits), step):
        yield slice(start, start + step)


def _score(logits: Array, targets: Array) -> tuple[Array, Array, Array]:
    rows, wide = np.arange(len(logits)), logits.astype(np.float64)
    nats = _log_total(wide)[:, 0] - wide[rows, targets]
    top = wide.argmax(axis=1)
    best = wide[rows, top]
    wide[rows, top] = -np.inf
    return nats.astype(np.float32), top, (best - wide.max(axis=1)).astype(np.float32)


def _divergence(reference: Array, logits: Array) -> Array:
    ours, others = reference.astype(np.float64), logits.astype(np.float64)
    ours -= _log_total(ours)
    others -= _log_total(others)
    result: Array = (np.exp(ours) * (ours - others)).sum(axis=1)
    return result


def _log_total(wide: Array) -> Array:
    """ln Σ exp of each row, [n, 1]."""
    peak = wide.max(axis=1, keepdims=True)
    total: Array = np.log(np.exp(wide - peak).sum(axis=1, keepdims=True)) + peak
    return total
