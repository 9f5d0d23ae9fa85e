"""Bits per byte of a text under the whole chain."""

import math
from collections.abc import Callable

import numpy as np

from graphs.tensorfile import Array
from runtime.chain import Chain, StepError
from runtime.generate import prefill

WINDOW = 512  # tokens, BOS included


def windows(length: int, window: int = WINDOW) -> list[tuple[int, int, int]]:
    """(start, end, first scored) of each window over `length` bytes.

    A window is BOS and window−1 bytes; the first half of every window but the first is context
    only, so each byte is scored once, with at least half a window before it (but for the text's
    start).
    """
    step = window // 2
    result = [(0, min(window - 1, length), 0)]
    while result[-1][1] < length:
        scored = result[-1][1]
        start = scored - (window - 1 - step)
        result.append((start, min(start + window - 1, length), scored))
    return result


def bits_per_byte(
    chain: Chain,
    text: bytes,
    window: int = WINDOW,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> float:
    """Mean −log2 p of every byte, for models with a byte vocabulary. Raises StepError."""
    if not text:
        raise StepError("text: at least one byte expected, found none")
    nats = 0.0
    spans = windows(len(text), window)
    for done, (start, end, scored) in enumerate(spans):
        progress(done, len(spans))
        part = text[start:end]
        handle = chain.cache.allocate()
        try:
            ids = [chain.config.bos_token_id, *part[:-1]]
            chunks = list(prefill(chain, handle, ids, chain.profile.tokens, all_logits=True))
        finally:
            chain.cache.free(handle)
        surprise = surprisal(np.concatenate(chunks), np.frombuffer(part, np.uint8))
        nats += float(surprise[scored - start :].sum())
    return nats / math.log(2) / len(text)


def surprisal(logits: Array, targets: Array) -> Array:
    """−ln softmax(logits)[target] of each row, in float64."""
    wide = logits.astype(np.float64)
    peak = wide.max(axis=1)
    total = np.log(np.exp(wide - peak[:, None]).sum(axis=1)) + peak
    result: Array = total - wide[np.arange(len(wide)), targets]
    return result
