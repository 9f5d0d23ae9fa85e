"""Runs one prompt in chunks, for scoring and parity."""

from collections.abc import Iterator, Sequence

from graphs.contract.tensorfile import Array
from runtime.step.chain import Chain, StepError, require_ids


def prefill(
    chain: Chain, handle: int, ids: Sequence[int], chunk: int, all_logits: bool = False
) -> Iterator[Array]:
    """Run a prompt in chunks on a sequence; yields logits of each chunk's last (or every) token.

    Raises StepError before anything ran where any of the prompt is beyond a limit.
    """
    if chunk < 1:
        raise StepError(f"chunk: expected at least 1, got {chunk}")
    rows = chain.cache.length(handle) + len(ids)
    require_ids(ids, chain.config.vocab_size)
    chain.require("tokens", chunk, chain.profile.tokens)
    chain.require_length(rows)
    for start in range(0, len(ids), chunk):
        slot = chain.cache.slot(handle)
        yield chain.step([ids[start : start + chunk]], slot, all_logits)[0]
