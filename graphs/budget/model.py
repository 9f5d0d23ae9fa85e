"""The budget of one model at one precision and profile: what steps, sequences and cards take.

From the config alone: no graph and no engine is needed. Times are bounds, computed from public
figures of GPUs (graphs/budget/gpus.py); a step on whole layers of several cards takes at least as
long as on one with room for all, since a token passes through the layers in turn.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from graphs.budget.gpus import Gpu
from graphs.budget.memory import (
    Memory,
    cache_bytes,
    cards_of_whole_layers,
    cards_split_evenly,
    memory,
)
from graphs.budget.traffic import (
    Traffic,
    chain_traffic,
    compute_seconds,
    graph_traffic,
    memory_seconds,
    roofline_seconds,
)
from graphs.contract.config import load_config, load_raw_config
from graphs.contract.manifest import ENGINE_MODES, EngineMode, Profile
from graphs.contract.spec import GRAPHS, BuildSpec, Precision, config_hash
from graphs.engines.activation_budget import expected_activation

MODEL = "model"
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)


@dataclass(frozen=True)
class StepBudget:
    """A full step of a mode: of one graph on one layer, or of the model with all its layers."""

    what: str
    mode: EngineMode
    traffic: Traffic
    scratch: int


@dataclass(frozen=True)
class SequencesBudget:
    """So many sequences in one decode step, each on the profile's context of cached rows."""

    count: int
    cache: int
    traffic: Traffic


@dataclass(frozen=True)
class ModelBudget:
    """A model's budget; `source` is a preset or a path."""

    source: str
    precision: Precision
    profile: Profile
    memory: Memory
    steps: tuple[StepBudget, ...]
    sequences: tuple[SequencesBudget, ...]

    def as_dict(self, gpus: Sequence[Gpu]) -> dict[str, Any]:
        """Every figure, for `--json`; seconds, cards and tokens a second by the GPU's name."""
        m = self.memory
        return {
            "precision": self.precision,
            "profile": dataclasses.asdict(self.profile),
            "memory": {
                "weights": m.weights,
                "cache": m.cache_of_all_layers,
                "scratch": m.scratch,
                "cards": {
                    gpu.name: {
                        "whole_layers": cards_of_whole_layers(m, gpu),
                        "split_evenly": cards_split_evenly(m, gpu),
                    }
                    for gpu in gpus
                },
            },
            "steps": [
                {"graph": s.what, "mode": s.mode, "scratch": s.scratch} | _figures(s.traffic, gpus)
                for s in self.steps
            ],
            "sequences": [
                {
                    "sequences": s.count,
                    "cache": s.cache,
                    "tokens_per_second": {gpu.name: tokens_per_second(s, gpu) for gpu in gpus},
                }
                | _figures(s.traffic, gpus)
                for s in self.sequences
            ],
        }


def tokens_per_second(sequences: SequencesBudget, gpu: Gpu) -> float:
    """Tokens a second of all sequences together, at most."""
    return sequences.count / roofline_seconds(sequences.traffic, gpu)


def model_budget(source: str, precision: Precision, profile: Profile) -> ModelBudget:
    """The budget of a preset, a config.json, or a checkpoint's folder. Raises ConfigError."""
    config, raw = load_config(source), load_raw_config(source)
    spec = BuildSpec(precision, raw, config_hash(raw), {})
    steps = [step for mode in ENGINE_MODES for step in _steps(spec, mode, profile)]
    sequences = []
    for count in BATCHES:
        cache = cache_bytes(spec, count * profile.context) * config.num_hidden_layers
        sizes = {"batch": count, "tokens": 1, "cached": profile.context}
        sequences.append(SequencesBudget(count, cache, chain_traffic(config, precision, **sizes)))
    return ModelBudget(
        source, precision, profile, memory(spec, profile), tuple(steps), tuple(sequences)
    )


def _steps(spec: BuildSpec, mode: EngineMode, profile: Profile) -> list[StepBudget]:
    """The steps of every graph that the model has, then of the model."""
    config = spec.config
    batch, tokens = (profile.batch, 1) if mode == "decode" else (1, profile.tokens)
    sizes = {"batch": batch, "tokens": tokens, "cached": profile.context}
    steps = [
        StepBudget(
            graph,
            mode,
            graph_traffic(config, graph, spec.precision, **sizes),
            expected_activation(spec, graph, mode, profile),
        )
        for graph in GRAPHS
        if graph == "head" or config.count("dense" if graph == "dense" else "moe")
    ]
    whole = chain_traffic(config, spec.precision, **sizes)
    return [*steps, StepBudget(MODEL, mode, whole, max(step.scratch for step in steps))]


def _figures(traffic: Traffic, gpus: Sequence[Gpu]) -> dict[str, Any]:
    return {
        "bytes": {
            "weights": traffic.weights,
            "cache": traffic.cache,
            "activations": traffic.activations,
            "all": traffic.bytes,
        },
        "flops": traffic.flops,
        "seconds": {
            gpu.name: {
                "memory": memory_seconds(traffic, gpu),
                "compute": compute_seconds(traffic, gpu),
                "roofline": roofline_seconds(traffic, gpu),
            }
            for gpu in gpus
        },
    }
