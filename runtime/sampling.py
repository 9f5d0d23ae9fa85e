"""Choosing the next token from logits."""

from dataclasses import dataclass, field

import numpy as np

from graphs.tensorfile import Array


class SamplingError(ValueError):
    """A sampling setting that is out of range."""


@dataclass
class Sampler:
    """Greedy at temperature 0; otherwise draws from softmax(logits / temperature), seeded.

    Raises SamplingError where the temperature is negative or not finite.
    """

    temperature: float = 0.0
    seed: int = 0
    generator: np.random.Generator = field(init=False)

    def __post_init__(self) -> None:
        if not (np.isfinite(self.temperature) and self.temperature >= 0):
            raise SamplingError(f"temperature: at least 0 expected, found {self.temperature}")
        self.generator = np.random.default_rng(self.seed)

    def __call__(self, logits_V: Array) -> int:
        """The next token's id from logits fp32 [vocab]; the lowest id among equals when greedy."""
        if self.temperature == 0:
            return int(np.argmax(logits_V))
        scaled = logits_V.astype(np.float64) / self.temperature
        weights = np.exp(scaled - scaled.max())
        cumulative = np.cumsum(weights)
        threshold = self.generator.random() * cumulative[-1]
        return int(np.searchsorted(cumulative, threshold, side="right"))
