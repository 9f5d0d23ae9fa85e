"""The options of `generate`: prompts and settings."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from runtime.commands.generation.prompts import (
    SAMPLING,
    PromptRequest,
    chat_request,
    file_requests,
    id_requests,
    text_requests,
)
from runtime.serving.encoder import GenerationOptions
from runtime.serving.sampling import SamplingParams


@dataclass(frozen=True)
class PromptOptions:
    """The prompts: exactly one of the four."""

    prompt: Annotated[list[str] | None, typer.Option(help="Prompt text; may be repeated.")] = None
    prompt_ids: Annotated[
        list[str] | None, typer.Option(help="Prompt as token ids: 1,2,3; may be repeated.")
    ] = None
    messages: Annotated[
        Path | None,
        typer.Option(help="File of a chat: a JSON list of role and content; -: standard input."),
    ] = None
    prompts: Annotated[
        Path | None,
        typer.Option(
            help="File of many prompts: a JSON object a line, with prompt, prompt_ids or messages, "
            "and any of id, max_new_tokens, temperature, top_k, top_p, min_p, repetition_penalty, "
            "seed, stop that differ for it; -: standard input."
        ),
    ] = None

    def requests(self) -> list[PromptRequest]:
        """Raises BadParameter where none or several kinds are given; PromptError."""
        kinds = (self.prompt, self.prompt_ids, self.messages, self.prompts)
        if sum(map(bool, kinds)) != 1:
            raise typer.BadParameter(
                "expected exactly one of --prompt, --prompt-ids, --messages and --prompts"
            )
        if self.prompt:
            return text_requests(self.prompt)
        if self.prompt_ids:
            return id_requests(self.prompt_ids)
        if self.messages:
            return chat_request(self.messages)
        assert self.prompts is not None
        return file_requests(self.prompts)


@dataclass(frozen=True)
class SettingOptions:
    """Settings that each prompt is continued with."""

    max_new_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of a result.")] = (
        GenerationOptions.max_new_tokens
    )
    temperature: Annotated[float, typer.Option(help="0: always the likeliest token.")] = (
        SamplingParams.temperature
    )
    top_k: Annotated[int, typer.Option(help="Choose among the K likeliest; 0: among all.")] = (
        SamplingParams.top_k
    )
    top_p: Annotated[
        float, typer.Option(help="Choose among the likeliest that have this probability together.")
    ] = SamplingParams.top_p
    min_p: Annotated[
        float,
        typer.Option(help="Choose among those with this share of the likeliest's probability."),
    ] = SamplingParams.min_p
    repetition_penalty: Annotated[
        float, typer.Option(help="Above 1, tokens that were there before become less likely.")
    ] = SamplingParams.repetition_penalty
    seed: Annotated[
        int, typer.Option(help="Seed of every prompt's own draws, whatever runs beside it.")
    ] = SamplingParams.seed
    stop: Annotated[
        list[str] | None, typer.Option(help="Text that ends a result; may be repeated.")
    ] = None

    def generation_options(self) -> GenerationOptions:
        """Raises SamplingError."""
        sampling = SamplingParams(**{name: getattr(self, name) for name in SAMPLING})
        return GenerationOptions(self.max_new_tokens, sampling, self.stop or ())
