"""Bits per byte of a text under the whole chain."""

import math
from collections.abc import Callable

import numpy as np

from graphs.scoring import WINDOW, surprisal, windows
from runtime.chain import Chain, StepError
from runtime.generate import prefill
from runtime.tokenizer import Tokenizer


def bits_per_byte(
    chain: Chain,
    tokenizer: Tokenizer,
    text: bytes,
    window: int = WINDOW,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> float:
    """Sum of −log2 p of the text's tokens over the number of its bytes.

    Every window starts with the config's BOS, whatever stands before a prompt. Raises StepError,
    also where the tokens do not spell the text, PromptError where it cannot be encoded.
    """
    if not text:
        raise StepError("text: at least one byte expected, found none")
    ids = tokenizer.ordinary(text.decode(errors="surrogateescape"))
    if tokenizer.spell(ids) != text:
        raise StepError(
            "text: tokens that spell it expected, found a tokenizer that changes it, so that its "
            "bits per byte would be another text's"
        )
    nats = 0.0
    spans = windows(len(ids), window)
    for done, (start, end, scored) in enumerate(spans):
        progress(done, len(spans))
        part = ids[start:end]
        handle = chain.cache.allocate()
        try:
            seen = [chain.config.bos_token_id, *part[:-1]]
            chunks = list(prefill(chain, handle, seen, chain.profile.tokens, all_logits=True))
        finally:
            chain.cache.free(handle)
        surprise = surprisal(np.concatenate(chunks), np.array(part))
        nats += float(surprise[scored - start :].sum())
    return nats / math.log(2) / len(text)
