"""A text's scores under the whole chain."""

from collections.abc import Callable, Iterator, Sequence

from graphs.contract.tensorfile import Array
from graphs.scoring import WINDOW, Logits, Scores, scored_logits
from runtime.step.chain import Chain, StepError
from runtime.step.prefill import prefill
from runtime.tokenizers.base import Tokenizer


def evaluate(
    chain: Chain,
    tokenizer: Tokenizer,
    text: bytes,
    window: int = WINDOW,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Scores:
    """Score a text; `progress` is called with the tokens done and the tokens in all.

    Raises StepError, also where the tokens do not spell the text, and PromptError where it cannot
    be encoded.
    """
    tokens = text_tokens(tokenizer, text)

    def scored() -> Iterator[tuple[Array, Array]]:
        done = 0
        for targets, logits in scored_logits(
            chain_logits(chain), tokens, chain.config.bos_token_id, window
        ):
            yield targets, logits
            done += len(targets)
            progress(done, len(tokens))

    return Scores.from_logits(scored(), len(text))


def text_tokens(tokenizer: Tokenizer, text: bytes) -> list[int]:
    """The text's ids. Raises StepError where it is empty, or where they do not spell it."""
    if not text:
        raise StepError("text: expected at least one byte, got none")
    ids = tokenizer.ordinary(text.decode(errors="surrogateescape"))
    if tokenizer.spell(ids) != text:
        raise StepError(
            "text: expected tokens that spell it, got a tokenizer that changes it: its bits per "
            "byte would be those of another text"
        )
    return ids


def chain_logits(chain: Chain) -> Logits:
    """The chain as a scorer takes it: each sequence is prefilled in a cache slot, then freed."""

    def logits(ids: Sequence[int]) -> Iterator[Array]:
        handle = chain.cache.allocate()
        try:
            yield from prefill(chain, handle, ids, chain.profile.tokens, all_logits=True)
        finally:
            chain.cache.free(handle)

    return logits
