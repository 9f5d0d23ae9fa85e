"""The memory that a model takes of GPUs while it runs, and how many GPUs of a kind hold it.

On a device lie all packed weights but the embedding, which stays on the host, the rope tables, the
latent cache, and one scratch buffer that all engines share. The buffers of a step, some megabytes,
are not counted.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from graphs.budget.accounting import Account, Component
from graphs.budget.gpus import Gpu
from graphs.contract.config import BlockType, ModelConfig
from graphs.contract.manifest import ENGINE_MODES, Profile
from graphs.contract.spec import GRAPHS, BuildSpec
from graphs.engines.activation_budget import expected_activation


@dataclass(frozen=True)
class Memory:
    """Bytes. `layers` are the weights of each, `cache` is a layer's; every device has `fixed`."""

    layers: tuple[int, ...]
    head: int
    cache: int
    scratch: int
    rope: int

    @property
    def weights(self) -> int:
        return sum(self.layers) + self.head + self.rope

    @property
    def cache_of_all_layers(self) -> int:
        return self.cache * len(self.layers)

    @property
    def fixed(self) -> int:
        return self.scratch + self.rope


def cache_bytes(spec: BuildSpec, rows: int) -> int:
    """Bytes of so many rows of one layer's latent cache."""
    return rows * spec.config.cache_width * (4 if spec.precision == "fp32" else 2)


def memory(spec: BuildSpec, profile: Profile) -> Memory:
    """A model's memory, with a cache for the profile's batch of sequences at full length."""
    account = Account.from_config(spec.config)

    def packed(components: Iterable[Component]) -> int:
        return account.figures(components).packed_bytes[spec.precision]

    blocks: dict[BlockType, int] = {kind: packed(c) for kind, c in account.blocks.items()}
    layers = range(spec.config.num_hidden_layers)
    scratch = (expected_activation(spec, g, m, profile) for g in GRAPHS for m in ENGINE_MODES)
    return Memory(
        tuple(blocks[spec.config.block_type(layer)] for layer in layers),
        packed(account.ends[1:]),
        cache_bytes(spec, profile.batch * profile.context),
        max(scratch),
        rope_bytes(spec.config),
    )


def rope_bytes(config: ModelConfig) -> int:
    """Bytes of the tables of cosines and sines, fp32 in every precision."""
    return 4 * config.max_position_embeddings * config.qk_rope_head_dim


def cards_split_evenly(memory: Memory, gpu: Gpu) -> int | None:
    """The fewest cards that hold all bytes, were every weight spread over them; None where scratch
    fills a card.

    A bound: nothing here splits a layer.
    """
    room = gpu.memory - memory.fixed
    needed = sum(memory.layers) + memory.head + memory.cache_of_all_layers
    return -(-needed // room) if room > 0 else None


def cards_of_whole_layers(memory: Memory, gpu: Gpu) -> int | None:
    """Cards that take whole layers in turn, each with its cache; None where a layer fits on none.

    The head is on the last card.
    """
    room = gpu.memory - memory.fixed
    pieces = [*(layer + memory.cache for layer in memory.layers), memory.head]
    if max(pieces) > room:
        return None
    cards, left = 1, room
    for piece in pieces:
        if piece > left:
            cards, left = cards + 1, room
        left -= piece
    return cards
