"""Bits per byte of a text under the whole chain."""

import math
from collections.abc import Callable

import numpy as np

from graphs.scoring import WINDOW, surprisal, windows
from runtime.chain import Chain, StepError
from runtime.generate import prefill


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
