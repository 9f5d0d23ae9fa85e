"""Engines, weights and cache → tokens, from Python by way of LLM. Opens no file outside a build."""

from runtime.llm import LLM
from runtime.serving.request import Completion, Request, Update
from runtime.serving.sampling import SamplingParams

__all__ = ["LLM", "Completion", "Request", "SamplingParams", "Update"]
