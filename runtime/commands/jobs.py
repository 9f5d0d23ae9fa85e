"""What the command line asked, as requests: all checked before a model is loaded."""

from collections.abc import Sequence
from dataclasses import dataclass

from graphs.contract.config import ModelConfig
from graphs.contract.manifest import Profile
from runtime.cache.errors import CacheError
from runtime.commands.prompts import PromptRequest
from runtime.serving.encoder import Encoder, GenerationOptions
from runtime.serving.request import Request, RequestError
from runtime.serving.sampling import SamplingError
from runtime.serving.text import TextStream
from runtime.step.chain import StepError, require_ids
from runtime.tokenizers.base import PromptError

REFUSALS = (PromptError, RequestError, SamplingError, StepError, CacheError)


@dataclass(frozen=True)
class Job:
    """A request, and what to call it: in results, and in errors."""

    id: str | int
    where: str
    request: Request


def make_jobs(
    asked: Sequence[PromptRequest],
    encoder: Encoder,
    common: GenerationOptions,
    config: ModelConfig,
    profile: Profile | None,
) -> list[Job]:
    """`profile` where it is known by now. Raises PromptError; BuildError as Encoder.request."""
    return [_job(one, encoder, common, config, profile) for one in asked]


def _job(
    asked: PromptRequest,
    encoder: Encoder,
    common: GenerationOptions,
    config: ModelConfig,
    profile: Profile | None,
) -> Job:
    try:
        request = encoder.request(asked.prompt, **asked.options(common))
        require_ids(request.prompt, config.vocab_size)
        TextStream(encoder.tokenizer, request.stop_strings)
    except REFUSALS as e:
        raise PromptError(f"{asked.where}: {e}") from e
    limits = {"max_position_embeddings": config.max_position_embeddings}
    if profile is not None:
        limits["context"] = profile.context
    for name, limit in limits.items():
        if request.final_rows > limit:
            raise PromptError(
                f"{asked.where}: {name}: at most {limit} tokens expected, found "
                f"{request.final_rows}: {len(request.prompt)} of the prompt and up to "
                f"{request.max_new_tokens} new ones, the last of which is not run"
            )
    return Job(asked.id, asked.where, request)
