"""Each graph alone: runs on random inputs, with the weights of another layer every time.

This way, what one layer's run left in a GPU's cache does not speed up the next. Inputs are bound as
in a step: the cache's own rows as context, and the step's buffers.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle

import numpy as np

from graphs.contract.config import BlockType
from graphs.contract.spec import GraphName
from graphs.contract.tensorfile import Array
from runtime.backends import ExpertSlot
from runtime.benchmark.cases import BenchCase
from runtime.devices.base import Buffer
from runtime.step.chain import Chain, step_positions
from runtime.step.expert_routing import expert_slots

BLOCKS: tuple[BlockType, ...] = ("dense", "moe")


@dataclass(frozen=True)
class EngineRun:
    """`run` queues one run with the next layer's weights; for experts, all runs of that layer.

    `sizes` are those of the case's sizes that matter; `outputs` are buffers that random inputs
    leave finite.
    """

    graph: GraphName
    sizes: dict[str, int]
    layers: int
    run: Callable[[], object]
    outputs: Sequence[Buffer]


def engine_runs(chain: Chain, case: BenchCase) -> Iterator[EngineRun]:
    """Runs for the case that the cache was filled for; use each up before taking the next."""
    random = np.random.default_rng(0)
    for block in BLOCKS:
        if chain.config.count(block):
            yield _block(chain, case, block, random)
    if chain.config.count("moe"):
        yield _experts(chain, case, random)
    yield _head(chain, case.batch, random)


def _block(
    chain: Chain, case: BenchCase, block: BlockType, random: np.random.Generator
) -> EngineRun:
    device, buffers, (B, S, M) = chain.device, chain.buffers, (case.batch, case.tokens, case.rows)
    lengths = np.full(B, case.cached)
    x, y = (stream[:M] for stream in buffers.streams)
    device.write(x, _noise(random, x))
    common = {
        "x": x.reshape(B, S, -1),
        "positions": buffers.written(buffers.positions, step_positions(lengths, S, chain.config)),
    }
    fixed: dict[str, Buffer] = {"y": y.reshape(B, S, -1)}
    if block == "moe":
        experts, gates = buffers.routing.buffers(M)
        fixed = {"acc": y, "h": buffers.h[:M], "experts": experts, "expert_weights": gates}

    def bound(layer: int) -> tuple[int, dict[str, Buffer], dict[str, Buffer]]:
        inputs = common | {"context": chain.cache.context(layer, 0, B)}
        return layer, inputs, fixed | {"new": buffers.staged[layer, :M].reshape(B, S, -1)}

    layers = _layers(chain, block)
    turns = cycle([bound(layer) for layer in layers])
    outputs = [y, *(buffers.staged[layer, :M] for layer in layers[:1])]
    run = _run_block(chain, block, turns)
    return EngineRun(block, case.sizes, len(layers), run, outputs)


def _run_block(
    chain: Chain,
    block: BlockType,
    turns: Iterator[tuple[int, dict[str, Buffer], dict[str, Buffer]]],
) -> Callable[[], None]:
    def run() -> None:
        layer, inputs, outputs = next(turns)
        chain.backend.block(block, layer, inputs, outputs)

    return run


def _experts(chain: Chain, case: BenchCase, random: np.random.Generator) -> EngineRun:
    """All expert runs of a layer's step, its routing drawn with all experts equally likely."""
    device, buffers, M = chain.device, chain.buffers, case.rows
    h, (acc, spare) = buffers.h[:M], (stream[:M] for stream in buffers.streams)
    for buffer in (h, acc):
        device.write(buffer, _noise(random, buffer).astype(device.dtype(buffer)))
    layers = _layers(chain, "moe")
    turns = cycle([(layer, _routing(chain, M, random)) for layer in layers])

    def run() -> None:
        layer, runs = next(turns)
        chain.backend.experts(layer, runs, h, acc, spare)

    sizes = {"batch": case.batch, "tokens": case.tokens}
    return EngineRun("experts", sizes, len(layers), run, [spare])


def _routing(chain: Chain, M: int, random: np.random.Generator) -> list[list[ExpertSlot]]:
    E, K = chain.config.n_routed_experts, chain.config.num_experts_per_tok
    experts = random.random((M, E)).argsort(axis=1)[:, :K]
    gates = np.full((M, K), 1 / K, np.float32)
    every, least = np.ones(M, bool), chain.backend.least_rows
    return list(expert_slots(experts, gates, every, chain.spec.slots, least))


def _head(chain: Chain, rows: int, random: np.random.Generator) -> EngineRun:
    hidden, logits = chain.buffers.head(rows)
    chain.device.write(hidden, _noise(random, hidden))
    return EngineRun(
        "head", {"batch": rows}, 1, lambda: chain.backend.head(hidden, logits), [logits]
    )


def _layers(chain: Chain, block: BlockType) -> list[int]:
    every = range(chain.config.num_hidden_layers)
    return [layer for layer in every if chain.config.block_type(layer) == block]


def _noise(random: np.random.Generator, like: Buffer) -> Array:
    noise: Array = random.standard_normal(tuple(like.shape), np.float32)
    return noise
