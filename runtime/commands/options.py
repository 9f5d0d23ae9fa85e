"""Groups of options that commands share: a dataclass each, whose fields are the options."""

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from graphs.contract.manifest import Profile
from graphs.contract.spec import BuildError
from runtime.load import BackendName, LoadOptions, OptionError, Provider

RoundedOption = Annotated[
    bool,
    typer.Option(
        "--rounded",
        help="Round values to bf16 where the graph has bf16, as an engine does. Without it they "
        "stay fp32 on the CPU.",
    ),
]
BuildArgument = Annotated[Path, typer.Argument(help="Build folder, build/MODEL/PRECISION.")]


def with_groups(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command an option for every field of its parameters that are dataclasses."""
    parameters = inspect.signature(command).parameters
    groups: dict[str, Mapping[str, inspect.Parameter]] = {
        name: inspect.signature(cast(type, parameter.annotation)).parameters
        for name, parameter in parameters.items()
        if is_dataclass(parameter.annotation)
    }
    options = [
        option.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for name, parameter in parameters.items()
        for option in (groups[name].values() if name in groups else [parameter])
    ]

    @functools.wraps(command)
    def expanded(**values: Any) -> None:
        for name, group_options in groups.items():
            group = parameters[name].annotation
            values[name] = group(**{field: values.pop(field) for field in group_options})
        command(**values)

    expanded.__signature__ = inspect.Signature(options)  # type: ignore[attr-defined]
    return expanded


@dataclass(frozen=True)
class OpeningOptions:
    """Options of every command that opens a build."""

    backend: Annotated[BackendName, typer.Option(help="What runs the graphs.")] = "onnxruntime"
    provider: Annotated[
        Provider | None, typer.Option(help="Where ONNX Runtime runs them.", show_default="cpu")
    ] = None
    engines: Annotated[
        Path | None,
        typer.Option(
            help="Folder of the TensorRT engines.",
            show_default="the one in BUILD made for this GPU",
        ),
    ] = None
    threads: Annotated[
        int | None,
        typer.Option(min=0, help="Threads of ONNX Runtime; 0: one per core.", show_default="0"),
    ] = None
    verify: Annotated[
        bool,
        typer.Option("--verify", help="Recompute the checksums of all weight files, of any size."),
    ] = False

    def load_options(self, **more: Any) -> LoadOptions:
        """Raises BadParameter where an option is another backend's."""
        try:
            names = [field.name for field in fields(OpeningOptions)]
            return LoadOptions(**{name: getattr(self, name) for name in names}, **more)
        except OptionError as e:
            raise typer.BadParameter(
                f"--{self.option_name(e.option)} is for --backend {e.owner}, "
                f"got --backend {e.chosen}"
            ) from e

    def option_name(self, field: str) -> str:
        """The command line's name for a field of LoadOptions that was given."""
        return field


def _limit(text: str, default: int) -> Any:
    """An option of ONNX Runtime's: engines were made for their own limits."""
    return typer.Option(min=1, help=text, show_default=str(default))


@dataclass(frozen=True)
class SizedOptions(OpeningOptions):
    """Options of opening a build, with the sizes of its cache and of a step."""

    cache: Annotated[
        str | None,
        typer.Option(
            help="Size of the cache: rows a layer, memory (8GiB), or a share of what the weights "
            "leave free (90%).",
            show_default="BATCH sequences of CONTEXT tokens",
        ),
    ] = None
    context: Annotated[int | None, _limit("Tokens of the longest sequence.", Profile.context)] = (
        None
    )
    batch: Annotated[int | None, _limit("Most sequences of a decode step.", Profile.batch)] = None
    chunk: Annotated[int | None, _limit("Most prompt tokens of a step.", Profile.tokens)] = None

    def load_options(self, **more: Any) -> LoadOptions:
        cache = int(self.cache) if self.cache and self.cache.isdecimal() else self.cache
        profile = Profile(
            batch=self.batch or Profile.batch,
            tokens=self.chunk or Profile.tokens,
            context=self.context or Profile.context,
        )
        return super().load_options(profile=profile if self._limits else None, cache=cache, **more)

    def option_name(self, field: str) -> str:
        return self._limits[0] if field == "profile" else field

    @property
    def _limits(self) -> list[str]:
        """The limits that were given."""
        return [n for n in ("context", "batch", "chunk") if getattr(self, n) is not None]


def require_writable(out: Path | None) -> None:
    """Raises BuildError where `--out` cannot name a file."""
    if out is not None and (out.is_dir() or not out.parent.is_dir()):
        raise BuildError(f"--out: expected a file in a folder that exists, got {out}")
