"""One sequence from prompt to tokens: chunked prefill, then one token a step."""

from collections.abc import Callable, Iterator, Sequence

from graphs.tensorfile import Array
from runtime.chain import Chain, StepError, require_ids


def prefill(
    chain: Chain, handle: int, ids: Sequence[int], chunk: int, all_logits: bool = False
) -> Iterator[Array]:
    """Run a prompt in chunks on the newest sequence; yields logits of the last (or every) token.

    Raises StepError, before anything ran, where any of the prompt is beyond a limit.
    """
    if not 1 <= chunk <= chain.profile.tokens:
        raise StepError(
            f"chunk: {chunk} asked for, supported: 1 to {chain.profile.tokens}, the token limit of "
            f"profile {chain.profile.name}"
        )
    require_ids(ids, chain.config.vocab_size)
    require_room(chain, handle, len(ids))
    slot = chain.cache.slots.slot(handle)
    for start in range(0, len(ids), chunk):
        yield chain.step([ids[start : start + chunk]], slot, all_logits)[0]


def require_room(chain: Chain, handle: int, count: int) -> None:
    """Raises StepError where `count` more tokens exceed the profile, the model or the cache."""
    total = chain.cache.length(handle) + count
    limits = {
        f"the context limit of profile {chain.profile.name}": chain.profile.context,
        "the model's max_position_embeddings": chain.config.max_position_embeddings,
        "the cache's rows": chain.cache.capacity,
    }
    for name, limit in limits.items():
        if total > limit:
            raise StepError(
                f"prompt and new tokens need {total} positions, {name}: {limit}; shorten the "
                "prompt, ask for fewer tokens, or raise --context"
            )


def generate(
    chain: Chain,
    prompt: Sequence[int],
    max_new_tokens: int,
    sample: Callable[[Array], int],
    stop: frozenset[int] = frozenset(),
    chunk: int | None = None,
) -> Iterator[int]:
    """Yield new tokens, a stop id last; the sequence is freed however this ends.

    Raises StepError, before anything ran, where prompt and new tokens exceed a limit.
    """
    if not prompt:
        raise StepError("prompt: at least one token expected, found none")
    handle = chain.cache.allocate()
    try:
        require_room(chain, handle, len(prompt) + max(max_new_tokens - 1, 0))
        *_, logits = prefill(chain, handle, prompt, chunk or chain.profile.tokens)
        for remaining in range(max_new_tokens, 0, -1):
            token = sample(logits[-1])
            yield token
            if token in stop or remaining == 1:
                return
            logits = chain.step([[token]], chain.cache.slots.slot(handle))[0]
    finally:
        chain.cache.free(handle)
