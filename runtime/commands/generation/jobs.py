"""Requests of the command line, all checked before a model is loaded."""

from collections.abc import Sequence
from dataclasses import dataclass

from graphs.contract.config import ModelConfig
from graphs.contract.manifest import Profile
from runtime.cache.errors import CacheError
from runtime.commands.generation.prompts import PromptRequest
from runtime.serving.encoder import Encoder, GenerationOptions
from runtime.serving.request import Request, RequestError
from runtime.serving.sampling import SamplingError
from runtime.serving.text import TextStream
from runtime.step.chain import StepError, require_ids
from runtime.tokenizers.base import PromptError

REFUSALS = (PromptError, RequestError, SamplingError, StepError, CacheError)


@dataclass(frozen=True)
class Job:
    """A request, its id in results and its place in errors."""

    id: str | int
    where: str
    request: Request


def make_jobs(
    prompts: Sequence[PromptRequest],
    encoder: Encoder,
    common: GenerationOptions,
    config: ModelConfig,
    profile: Profile | None,
) -> list[Job]:
    """Jobs of prompts; `profile` where it is known already.

    Raises PromptError, and BuildError as Encoder.request.
    """
    return [_job(prompt, encoder, common, config, profile) for prompt in prompts]


def _job(
    prompt: PromptRequest,
    encoder: Encoder,
    common: GenerationOptions,
    config: ModelConfig,
    profile: Profile | None,
) -> Job:
    try:
        request = encoder.request(prompt.prompt, prompt.options(common))
        require_ids(request.prompt, config.vocab_size)
        TextStream(encoder.tokenizer, request.stop_strings)
    except REFUSALS as e:
        raise PromptError(f"{prompt.where}: {e}") from e
    limits = {"max_position_embeddings": config.max_position_embeddings}
    if profile is not None:
        limits["context"] = profile.context
    for name, limit in limits.items():
        if request.final_rows > limit:
            raise PromptError(
                f"{prompt.where}: {name}: expected at most {limit} tokens, got "
                f"{request.final_rows}: {len(request.prompt)} of the prompt and up to "
                f"{request.max_new_tokens} new ones, the last of which is not run; shorten the "
                "prompt, or lower max_new_tokens"
            )
    return Job(prompt.id, prompt.where, request)
