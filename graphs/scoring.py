"""The rule by which a text is scored in bits per byte, in training and in the runtime alike."""

import numpy as np

from graphs.tensorfile import Array

WINDOW = 512  # tokens, BOS included


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


def surprisal(logits: Array, targets: Array) -> Array:
    """−ln softmax(logits)[target] of each row, in float64."""
    wide = logits.astype(np.float64)
    peak = wide.max(axis=1)
    total = np.log(np.exp(wide - peak[:, None]).sum(axis=1)) + peak
    result: Array = total - wide[np.arange(len(wide)), targets]
    return result
