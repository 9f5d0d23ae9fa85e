"""The budget for activation memory, against what TensorRT-RTX 1.7.1 took on SM120.

tests/graphs/engines/test_compile.py builds some of these engines; here are the figures of more.
"""

import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from graphs.contract.config import ModelConfig, load_raw_config
from graphs.contract.manifest import ENGINE_MODES, EngineMode, EngineRecord, Profile
from graphs.contract.spec import (
    GRAPHS,
    PRECISIONS,
    BuildSpec,
    GraphName,
    GraphSpec,
    Precision,
    TensorSpec,
)
from graphs.engines.activation_budget import activation_budget, excesses

NANO = Path(__file__).parents[3] / "models" / "k2-nano"
MB = 1_000_000

# MB of dense, moe, experts and head, each in decode and prefill; no weight is copied in any.
MEASURED = """
k2               fp8  b8t128c4096     14.31  124.81   13.92  124.81   10.99   22.17    8.31   10.03
deepseek-v3      fp8  b8t128c4096     26.96  238.59   27.10  238.59   10.99   22.17    8.31   10.03
moonlight        fp8  b8t128c4096     11.17   31.97   10.65   31.97   10.48   14.04    8.22    8.72
deepseek-v2-lite fp8  b8t128c4096     11.15   31.97   10.65   31.97   10.48   14.04    8.22    8.72
k2-nano          fp8  b8t128c4096      8.48   10.77    8.48   10.81    8.22    8.63    8.20    8.25
k2               bf16 b8t128c4096     13.93  124.79   13.75  124.79   10.91   20.99    8.31   10.03
deepseek-v2-lite bf16 b8t128c4096     10.88   32.43   10.60   31.07   10.45   13.58    8.22    8.72
k2               fp32 b8t128c4096     19.24  228.07   18.65  228.07   11.13   23.35   10.47   13.91
moonlight        fp32 b8t128c4096     12.88   59.51   12.54   59.51   10.53   14.83   10.31   11.29
k2               fp8  b1t128c4096     10.67  124.81   10.58  124.81   10.43   22.17    8.22   10.03
k2               fp8  b2t2c1          10.68   10.75   10.56   10.53   10.43   10.43    8.22    8.22
k2               fp8  b64t128c4096   109.74  124.81  111.38  124.81   16.20   22.17    9.11   10.03
k2               fp8  b8t512c4096     14.31  509.74   13.92  509.74   10.99   57.96    8.31   15.53
k2               fp8  b8t128c32768   102.39  829.47  102.00  829.47   10.99   22.17    8.31   10.03
k2               fp8  b16t8c4096      28.30   12.36   27.85   11.47   11.73   10.99    8.42    8.31
k2               fp8  b32t16c1024     17.65   14.37   17.94   12.60   13.22   11.73    8.65    8.42
k2               fp8  b16t4c128       13.78   11.26   12.80   10.82   11.73   10.61    8.42    8.25
k2               fp8  b256t256c256    74.84   77.14   61.21   56.17   34.10   34.10   11.86   11.86
k2               fp32 b8t512c4096     19.24  962.66   18.65  962.66   11.13   62.67   10.47   24.92
moonlight        fp8  b4t2048c8192    10.71 1086.86   10.45 1086.86   10.36   71.07    8.21   16.58
moonlight        fp8  b8t512c4096     11.17  132.78   10.65  132.78   10.48   25.45    8.22   10.29
moonlight        fp8  b8t128c131072  135.15  812.11  134.63  812.11   10.48   14.04    8.22    8.72
moonlight        fp8  b256t256c256    41.36   41.29   24.25   23.99   17.84   17.84    9.24    9.24
deepseek-v2-lite fp8  b8t32c512       11.13   14.00   10.64   11.92   10.48   11.19    8.22    8.32
deepseek-v2-lite fp8  b256t256c256    40.70   40.63   24.25   23.99   17.84   17.84    9.24    9.24
deepseek-v2-lite fp8  b1t1024c65536   21.02 3311.67   21.03 3311.67   10.30   40.66    8.20   12.39
k2-nano          fp8  b8t32c512        8.26    8.47    8.25    8.38    8.22    8.30    8.20    8.21
"""


def spec_of(model: str, precision: Precision = "fp8") -> BuildSpec:
    source = str(NANO / "config.json") if model == "k2-nano" else model
    return BuildSpec(precision, load_raw_config(source), "", {})


def profile_of(name: str) -> Profile:
    batch, tokens, context = (int(n) for n in re.findall(r"\d+", name))
    return Profile(batch, tokens, context)


@pytest.mark.parametrize("row", MEASURED.strip().splitlines())
def test_engines_that_copy_nothing_are_within_their_budget(row: str) -> None:
    model, written, profile, *figures = row.split()
    (precision,) = (p for p in PRECISIONS if p == written)
    spec = spec_of(model, precision)
    pairs = [(graph, mode) for graph in GRAPHS for mode in ENGINE_MODES]
    for (graph, mode), figure in zip(pairs, figures, strict=True):
        budget = activation_budget(spec, graph, mode, profile_of(profile))
        assert float(figure) * MB <= 0.98 * budget, (graph, mode, budget)


def least_fp8_matrix(config: ModelConfig, graph: GraphName) -> int:
    """Bytes of the smallest matrix of an FP8 linear layer, for lm_head at 16 bits."""
    D, H, Q = config.hidden_size, config.num_attention_heads, config.q_lora_rank
    heads, cache = H * config.qk_head_dim, config.cache_width
    attention = [D * (heads + cache)] if Q is None else [D * (Q + cache), Q * heads]
    attention.append(H * config.v_head_dim * D)
    return min(
        {
            "dense": [*attention, config.intermediate_size * D],
            "moe": [*attention, config.shared_intermediate_size * D],
            "experts": [config.moe_intermediate_size * D],
            "head": [2 * config.vocab_size * D],
        }[graph]
    )


@pytest.mark.parametrize("row", MEASURED.strip().splitlines()[:4])
def test_a_decode_step_has_less_to_spare_than_any_fp8_matrix_takes(row: str) -> None:
    """No such copy goes unseen, in any preset and graph with the default profile."""
    model, _, profile, *figures = row.split()
    spec = spec_of(model)
    for graph, figure in zip(GRAPHS, figures[::2], strict=True):
        spare = activation_budget(spec, graph, "decode", profile_of(profile)) - float(figure) * MB
        assert spare < least_fp8_matrix(spec.config, graph), graph


def k2_with_graphs() -> BuildSpec:
    """K2's weights as its dense and experts graphs read them."""
    dense = {
        "attention.qkv_a.weight": (7168, 2112),
        "attention.q_b.weight": (1536, 12288),
        "attention.w_uk": (64, 128, 512),
        "attention.w_uv": (64, 512, 128),
        "attention.o.weight": (8192, 7168),
        "mlp.gate_up.weight": (7168, 36864),
        "mlp.down.weight": (18432, 7168),
        "mlp.down.scale": (7168,),
    }
    experts = {f"slots.{i}.gate_up.weight": (7168, 4096) for i in range(8)}
    experts |= {f"slots.{i}.down.weight": (2048, 7168) for i in range(8)}

    def graph(name: GraphName, weights: Mapping[str, tuple[int, ...]]) -> GraphSpec:
        def tensor(name: str, dims: tuple[int, ...]) -> TensorSpec:
            dtype = "bfloat16" if len(dims) == 3 else "float8e4m3fn"
            return TensorSpec(name, "float" if len(dims) == 1 else dtype, dims, "weight")

        inputs = [tensor(*item) for item in weights.items()]
        inputs.append(TensorSpec("context", "bfloat16", ("batch", "context", 576)))
        return GraphSpec(name, "", "", tuple(inputs), (), ())

    graphs: dict[GraphName, GraphSpec] = {
        "dense": graph("dense", dense),
        "experts": graph("experts", experts),
    }
    return BuildSpec("fp8", load_raw_config("k2"), "", graphs)


def record(spec: BuildSpec, graph: GraphName, decode: float | None) -> EngineRecord:
    size = None if decode is None else int(decode * MB)
    activation: dict[EngineMode, int | None] = {"decode": size, "prefill": None}
    budget = {mode: activation_budget(spec, graph, mode, Profile()) for mode in ENGINE_MODES}
    return EngineRecord("", "", 0, "", {}, {}, activation, budget, None, {}, "", 0, 0)


# What engines took in which one thing was planted: a linear layer that reads 3 dimensions, a query
# of 4 dimensions, a cache that is sliced (these two in engines that multiplied bf16).
PLANTED: list[tuple[GraphName, float, str]] = [
    ("dense", 25.92, "attention.qkv_a.weight"),
    ("dense", 28.84, "attention.q_b.weight"),
    ("dense", 69.67, "attention.o.weight"),
    ("dense", 142.99, "mlp.down.weight"),
    ("dense", 275.98, "mlp.gate_up.weight or mlp.down.weight in 16 bits"),
    ("dense", 84.79, "attention.w_uk once a sequence or attention.w_uv once a sequence"),
    ("dense", 47.12, "the cache's latent part"),
    ("experts", 25.63, "slots.*.down.weight"),
    ("experts", 40.25, "slots.*.gate_up.weight or slots.*.down.weight in 16 bits"),
]


@pytest.mark.parametrize(("graph", "decode", "likely"), PLANTED)
def test_an_excess_names_what_was_copied(graph: GraphName, decode: float, likely: str) -> None:
    spec = k2_with_graphs()
    (excess,) = excesses(spec, graph, record(spec, graph, decode), Profile())
    assert (excess.graph, excess.mode, excess.likely) == (graph, "decode", likely)
    assert f"of activation memory, got {decode:.1f} MB; " in str(excess)
    assert f"likely copied at every run: {likely} (" in str(excess)


@pytest.mark.parametrize("decode", [14.31, None])
def test_an_engine_within_its_budget_or_without_a_figure_has_no_excess(
    decode: float | None,
) -> None:
    spec = k2_with_graphs()
    assert excesses(spec, "dense", record(spec, "dense", decode), Profile()) == []
