"""Engines, weights and cache → tokens, from Python by way of LLM. Opens no file outside a build."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from runtime.llm import LLM
    from runtime.serving.request import Completion, Request, Update
    from runtime.serving.sampling import SamplingParams

__all__ = ["LLM", "Completion", "Request", "SamplingParams", "Update"]

_MODULES = {"LLM": "runtime.llm", "SamplingParams": "runtime.serving.sampling"}


def __getattr__(name: str) -> object:
    """A public name, imported when it is first used: the command line needs none of them."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_MODULES.get(name, "runtime.serving.request")), name)
    globals()[name] = value
    return value
