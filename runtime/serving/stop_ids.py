"""The token ids that end a text."""

from pathlib import Path

from graphs.contract.config import ModelConfig
from graphs.contract.spec import BuildError
from runtime.tokenizers.build_json import read_object


def stop_ids(build: Path, config: ModelConfig) -> frozenset[int]:
    """End-of-text ids of the config and, where there is one, of generation_config.json.

    The two differ in published checkpoints; an id of either ends a text. Raises BuildError.
    """
    path = build / "generation_config.json"
    if not path.is_file():
        return frozenset(config.eos_token_id)
    eos = read_object(path).get("eos_token_id")
    listed = eos if isinstance(eos, list) else [] if eos is None else [eos]
    for token in listed:
        if type(token) is not int or not 0 <= token < config.vocab_size:
            raise BuildError(
                f"{path}: eos_token_id: expected a whole number below vocab_size "
                f"({config.vocab_size}), or a list of them, got {eos!r}"
            )
    return frozenset((*config.eos_token_id, *listed))
