"""A whole small model from prompts to greedy tokens: ours, and transformers' `generate`, in turns.

Prompts are all of one length, so that transformers need not pad them, and other ones every round,
so that ours does not find them in its cache. Both generate all tokens.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, get_args

import torch

from bench.speed.deepseek_v3 import AttentionKind, deepseek_model
from bench.speed.dense_block import INVARIANT, OURS, SETTLE, TRANSFORMERS, SpeedError
from export.checkpoint.open import Checkpoint
from runtime import LLM
from runtime.benchmark.measurements import Measurement, in_turns
from runtime.serving.request import Request

PROMPT_TOKENS = 32

Ids = list[list[int]]  # of each sequence


@dataclass
class Side:
    """An implementation that generates; `answers` has each round's tokens, the warm-up's first."""

    generate: Callable[[Ids], Ids]
    prompts: Iterator[Ids]
    answers: list[Ids] = field(default_factory=list)

    def run(self) -> None:
        self.answers.append(self.generate(next(self.prompts)))


@dataclass(frozen=True)
class Generated:
    """`same` is the share of our tokens, batch-invariant or not, that equals theirs."""

    measurements: list[Measurement]
    same: float


def compare_generation(
    build: Path,
    checkpoint: Path,
    text: Sequence[int],
    batch: int,
    new_tokens: int,
    rounds: int,
    threads: int,
) -> Generated:
    """Seconds from prompts, pieces of the text, to `new_tokens` of each.

    Raises BuildError, CheckpointError, and SpeedError where the text is too short.
    """
    needed = (rounds + 1) * batch * PROMPT_TOKENS
    if len(text) < needed:
        raise SpeedError(f"text: expected at least {needed} tokens, got {len(text)}")
    with ExitStack() as stack:
        generators: dict[str, Callable[[Ids], Ids]] = {}
        for name, invariant in ((OURS, False), (INVARIANT, True)):
            llm = LLM.load(build, threads=threads, batch_invariant=invariant)
            generators[name] = partial(_our_answers, stack.enter_context(llm), new_tokens)
        opened = Checkpoint.open(checkpoint)
        for name, attention in zip(TRANSFORMERS, get_args(AttentionKind), strict=True):
            generators[name] = partial(
                _transformers_answers, deepseek_model(opened, attention), new_tokens
            )
        sides = {n: Side(run, pieces(text, batch)) for n, run in generators.items()}
        runs = {name: side.run for name, side in sides.items()}
        seconds = in_turns(runs, rounds, pause=SETTLE)
    case = {"batch": batch, "prompt": PROMPT_TOKENS, "new_tokens": new_tokens}
    measurements = [Measurement("generate", name, case, seconds[name]) for name in sides]
    return Generated(measurements, _same(sides))


def pieces(text: Sequence[int], batch: int) -> Iterator[Ids]:
    """The prompts of each round, cut from the text's beginning on."""
    step = batch * PROMPT_TOKENS
    for start in range(0, len(text) - step + 1, step):
        ends = range(start, start + step, PROMPT_TOKENS)
        yield [list(text[end : end + PROMPT_TOKENS]) for end in ends]


def _our_answers(llm: LLM, new_tokens: int, prompts: Ids) -> Ids:
    done = llm.generate([Request(tuple(prompt), new_tokens) for prompt in prompts])
    return [list(answer.tokens) for answer in done]


def _transformers_answers(model: Any, new_tokens: int, prompts: Ids) -> Ids:
    ids = torch.tensor(prompts)
    with torch.inference_mode():
        tokens = model.generate(
            ids, max_new_tokens=new_tokens, do_sample=False, eos_token_id=None, pad_token_id=0
        )
    answered: Ids = tokens[:, ids.shape[1] :].tolist()
    return answered


def _same(sides: dict[str, Side]) -> float:
    """The share of equal tokens; greedy ones part where two logits are nearly equal."""
    pairs = [
        (a, b)
        for name in (OURS, INVARIANT)
        for ours, reference in zip(sides[name].answers, sides[TRANSFORMERS[0]].answers, strict=True)
        for answer, expected in zip(ours, reference, strict=True)
        for a, b in zip(answer, expected, strict=True)
    ]
    return sum(a == b for a, b in pairs) / len(pairs)
