"""The roofline of a checkpoint as it is published, for comparison with other people's figures.

A column is a block or the model in one stored format, a row a number of sequences with one new
token each. What is counted, beside what `graphs.budget.traffic` says of every step:

- the checkpoint's own bytes: bf16; FP8 with one fp32 scale a block, W_UK and W_UV in FP8 too; INT4
  for the routed experts, with a bf16 scale a group and 8 bytes of shape a matrix, and bf16 for the
  rest. The embedding is not read, lm_head is, in bf16 in every format;
- 16-bit cache rows and activations;
- FP8 products for FP8 linear layers, but bf16 for W_UK, W_UV, attention, router and lm_head.

The model's columns assume one GPU that has room for it.
"""

from dataclasses import dataclass

from graphs.budget.accounting import Part
from graphs.budget.gpus import Gpu
from graphs.budget.traffic import (
    Traffic,
    WeightForm,
    chain_traffic,
    compute_seconds,
    distinct_experts,
    graph_traffic,
    memory_seconds,
)
from graphs.contract.config import ModelConfig
from graphs.contract.quantization import FP8Blocks, Int4Groups

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)
BLOCK, GROUP = (128, 128), 32  # where the config is not of that format


@dataclass(frozen=True)
class Cell:
    """Of one step, on one GPU; seconds by what they are spent on."""

    bytes: float
    memory_seconds: float
    compute_seconds: float


@dataclass(frozen=True)
class Row:
    """`cells` by what is computed and its stored format, as `dense fp8`."""

    sequences: int
    distinct_experts: float
    cells: dict[str, Cell]


def stored_forms(config: ModelConfig) -> dict[str, WeightForm]:
    """By the format's name."""
    block, group = BLOCK, GROUP
    match config.quantization:
        case FP8Blocks(size):
            block = size
        case Int4Groups(size):
            group = size

    def fp8(part: Part) -> int:
        return part.fp8_bytes(block)

    def int4(part: Part) -> int:
        return part.int4_bytes(group)

    return {
        "bf16": WeightForm(lambda part: part.bf16_bytes, "bf16", "bf16", "bf16"),
        "fp8": WeightForm(fp8, "fp8", "bf16", "bf16"),
        "int4": WeightForm(int4, "bf16", "bf16", "bf16"),
    }


def roofline(config: ModelConfig, gpu: Gpu, cached: int) -> list[Row]:
    """A row for 1 to 128 sequences, each with so many cached rows."""
    return [
        Row(
            batch,
            distinct_experts(config, batch),
            {name: _cell(of, gpu) for name, of in _columns(config, batch, cached).items()},
        )
        for batch in BATCHES
    ]


def _columns(config: ModelConfig, batch: int, cached: int) -> dict[str, Traffic]:
    forms = stored_forms(config)
    found: dict[str, Traffic] = {}
    for name in ("bf16", "fp8"):
        if config.count("dense"):
            found[f"dense {name}"] = graph_traffic(
                config, "dense", forms[name], batch=batch, tokens=1, cached=cached
            )
    for name in ("bf16", "fp8"):
        if config.count("moe"):
            of_layer = (
                graph_traffic(config, graph, forms[name], batch=batch, tokens=1, cached=cached)
                for graph in ("moe", "experts")
            )
            found[f"MoE {name}"] = sum(of_layer, Traffic())
    for name, form in forms.items():
        found[f"model {name}"] = chain_traffic(config, form, batch=batch, tokens=1, cached=cached)
    return found


def _cell(traffic: Traffic, gpu: Gpu) -> Cell:
    return Cell(traffic.bytes, memory_seconds(traffic, gpu), compute_seconds(traffic, gpu))
