"""Options that the runtime's commands share, and what they say about opening a build."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from graphs.contract.manifest import Profile
from runtime.commands.prompts import (
    PromptRequest,
    given_file,
    given_ids,
    given_messages,
    given_texts,
)
from runtime.load import BackendName, LoadOptions, Provider

Build = Annotated[Path, typer.Argument(help="Build folder, build/MODEL/PRECISION.")]
Backend = Annotated[BackendName, typer.Option(help="What runs the graphs.")]
OnProvider = Annotated[
    Provider | None,
    typer.Option("--provider", help="Where ONNX Runtime runs them.", show_default="cpu"),
]
Engines = Annotated[
    Path | None,
    typer.Option(
        help="Folder of TensorRT's engines.", show_default="the one in BUILD made for this GPU"
    ),
]
Threads = Annotated[
    int | None,
    typer.Option(min=0, help="ONNX Runtime's threads; 0: one per core.", show_default="0"),
]
BatchInvariant = Annotated[
    bool,
    typer.Option(
        "--batch-invariant",
        help="Give each prompt, bit for bit, what it gives beside others; a lone one is slower.",
    ),
]
Verify = Annotated[
    bool,
    typer.Option("--verify", help="Recompute the checksums of all weight files, however large."),
]


def _limit(text: str, default: int) -> Any:
    """An option of ONNX Runtime's: engines were made for their own limits."""
    return typer.Option(min=1, help=text, show_default=str(default))


Batch = Annotated[int | None, _limit("Sequences that a decode step takes.", Profile.batch)]
Chunk = Annotated[int | None, _limit("Prompt tokens that a step takes.", Profile.tokens)]
Context = Annotated[int | None, _limit("Tokens of the longest sequence.", Profile.context)]
Cache = Annotated[
    str | None,
    typer.Option(
        help="Rows a layer, memory as 8GiB, or of what weights leave free as 90%.",
        show_default="BATCH sequences of CONTEXT tokens",
    ),
]
Sequences = Annotated[
    list[int] | None,
    typer.Option(
        min=1, help="Sequences of a decode step; may be repeated.", show_default="1 and the most"
    ),
]
Cached = Annotated[
    list[int] | None,
    typer.Option(
        min=0,
        help="Cached rows of each sequence; may be repeated.",
        show_default="1000, and CONTEXT less a prompt's chunk",
    ),
]

PromptTexts = Annotated[
    list[str] | None, typer.Option("--prompt", help="Text to go on from; may be repeated.")
]
PromptIds = Annotated[
    list[str] | None, typer.Option(help="Token ids instead: 1,2,3; may be repeated.")
]
Messages = Annotated[
    Path | None,
    typer.Option(help="Chat instead: a JSON list of role and content; -: standard input."),
]
PromptsFile = Annotated[
    Path | None,
    typer.Option(
        help="Many instead: a JSON object a line, with prompt, prompt_ids or messages and, where "
        "they are its own, id, max_new_tokens, temperature, top_k, top_p, min_p, "
        "repetition_penalty, seed, stop; -: standard input."
    ),
]
MaxNewTokens = Annotated[int, typer.Option(min=1)]
Temperature = Annotated[float, typer.Option(help="0: the likeliest token.")]
TopK = Annotated[int, typer.Option(help="Choose among the likeliest so many; 0: among all.")]
TopP = Annotated[
    float, typer.Option(help="Among the likeliest that have this probability together.")
]
MinP = Annotated[
    float, typer.Option(help="Among those with this share of the likeliest one's probability.")
]
RepetitionPenalty = Annotated[
    float, typer.Option(help="Above 1, what was there before is less likely to come again.")
]
Seed = Annotated[
    int, typer.Option(help="The same for each prompt: none depends on what runs beside it.")
]
Stop = Annotated[list[str] | None, typer.Option(help="Text that ends a result; may be repeated.")]
AsJson = Annotated[
    bool,
    typer.Option(
        "--json",
        help="Print an object a prompt, one a line: id, prompt_ids, tokens, text, finish_reason, "
        "error.",
    ),
]
Out = Annotated[
    Path | None, typer.Option(help="Write those objects to this file when all is done.")
]


def load_options(
    backend: BackendName,
    provider: Provider | None,
    engines: Path | None,
    threads: int | None,
    verify: bool,
    limits: Mapping[str, int | None] | None = None,
    cache: str | None = None,
) -> LoadOptions:
    """As `load_chain` takes them; `limits`: batch, chunk and context, where they were given.

    `cache`: rows, or memory.

    Raises BadParameter where an option is another backend's.
    """
    given = {name: value for name, value in (limits or {}).items() if value is not None}
    own: dict[BackendName, dict[str, object]] = {
        "onnxruntime": {"provider": provider, "threads": threads, **given},
        "tensorrt": {"engines": engines},
    }
    for other, values in own.items():
        foreign = [name for name, value in values.items() if value is not None]
        if other != backend and foreign:
            raise typer.BadParameter(
                f"--{foreign[0]} is for --backend {other}, found with --backend {backend}"
            )
    options: LoadOptions = {"backend": backend, "verify": verify}
    if backend == "onnxruntime":
        options["provider"] = provider or "cpu"
        options["threads"] = threads or 0
        options["profile"] = Profile(
            batch=given.get("batch", Profile.batch),
            tokens=given.get("chunk", Profile.tokens),
            context=given.get("context", Profile.context),
        )
    elif engines is not None:
        options["engines"] = engines
    if cache is not None:
        options["cache"] = int(cache) if cache.isdecimal() else cache
    return options


def given_prompts(
    prompt: list[str] | None,
    prompt_ids: list[str] | None,
    messages: Path | None,
    prompts: Path | None,
) -> list[PromptRequest]:
    """Raises BadParameter where they are of no kind or of several; PromptError."""
    if sum(bool(given) for given in (prompt, prompt_ids, messages, prompts)) != 1:
        raise typer.BadParameter(
            "exactly one of --prompt, --prompt-ids, --messages and --prompts is needed"
        )
    if prompt:
        return given_texts(prompt)
    if prompt_ids:
        return given_ids(prompt_ids)
    if messages:
        return given_messages(messages)
    assert prompts is not None
    return given_file(prompts)
