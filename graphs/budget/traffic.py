"""The roofline of each graph: the least that one step moves and computes, from the config alone.

A step has `batch` sequences with `tokens` new tokens each, on `cached` rows of each. Counted are:

- every weight is read once. Of E routed experts, M = batch · tokens tokens that choose K each, at
  random and one as likely as another, need E · (1 − (1 − K/E)^M) distinct ones;
- the latent cache is read once, and the new rows are written;
- the values between linear layers are moved once: queries, the mix of all heads, o_proj's output,
  gate and up, and one output of the feed-forward. It is what the published roofline of Kimi K2
  counts, 0.14 MB a token and block;
- operations are two for each weight and token, and for each key, query and value of the absorbed
  attention. Norms, softmax and the choosing of experts count as nothing.

Left out is all that a better program could save: scratch, launches, copies, links between GPUs.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from graphs.budget.accounting import Account, Part
from graphs.budget.gpus import Gpu
from graphs.contract.config import ModelConfig
from graphs.contract.spec import PRECISIONS, GraphName, Precision


@dataclass(frozen=True)
class Traffic:
    """Bytes of one step by what they are, and its operations by the type of their factors."""

    weights: float = 0
    cache: float = 0
    activations: float = 0
    flops: dict[Precision, float] = field(default_factory=dict)

    @property
    def bytes(self) -> float:
        return self.weights + self.cache + self.activations

    def __add__(self, other: "Traffic") -> "Traffic":
        return Traffic(
            self.weights + other.weights,
            self.cache + other.cache,
            self.activations + other.activations,
            {p: self.flops.get(p, 0) + other.flops.get(p, 0) for p in PRECISIONS},
        )

    def __mul__(self, count: int) -> "Traffic":
        flops = {p: n * count for p, n in self.flops.items()}
        return Traffic(self.weights * count, self.cache * count, self.activations * count, flops)


def graph_traffic(
    config: ModelConfig,
    graph: GraphName,
    precision: Precision,
    *,
    batch: int,
    tokens: int,
    cached: int,
) -> Traffic:
    """One run of a graph on one layer; of `experts` all runs that a layer's step takes.

    `head` gives the logits of one row a sequence.
    """
    rows = batch * tokens
    match graph:
        case "head":
            parts = [part for end in Account.from_config(config).ends[1:] for part in end.parts]
            return _products(precision, parts, batch)
        case "experts":
            return _experts(config, precision, rows)
    block = Account.from_config(config).blocks[graph]
    parts = [part for component in block for part in component.parts if part.kind != "expert"]
    return (
        _products(precision, parts, rows)
        + _attention(config, precision, batch, tokens, cached)
        + _activations(precision, rows * _values(config, graph))
    )


def chain_traffic(
    config: ModelConfig, precision: Precision, *, batch: int, tokens: int, cached: int
) -> Traffic:
    """One step of the whole model; the embedding's rows and the logits are not counted."""
    step = graph_traffic(config, "head", precision, batch=batch, tokens=tokens, cached=cached)
    for block in Account.from_config(config).blocks:
        graphs: tuple[GraphName, ...] = ("dense",) if block == "dense" else ("moe", "experts")
        for graph in graphs:
            one = graph_traffic(config, graph, precision, batch=batch, tokens=tokens, cached=cached)
            step += one * config.count(block)
    return step


def memory_seconds(traffic: Traffic, gpu: Gpu) -> float:
    return traffic.bytes / gpu.bandwidth


def compute_seconds(traffic: Traffic, gpu: Gpu) -> float:
    return sum(count / gpu.flops[precision] for precision, count in traffic.flops.items())


def roofline_seconds(traffic: Traffic, gpu: Gpu) -> float:
    """The longer of moving the bytes and of computing, each at the GPU's public rate."""
    return max(memory_seconds(traffic, gpu), compute_seconds(traffic, gpu))


def distinct_experts(config: ModelConfig, rows: int) -> float:
    """The expected number of a layer's routed experts that so many tokens need."""
    E, K = config.n_routed_experts, config.num_experts_per_tok
    return float(E * (1 - (1 - K / E) ** rows))


def _factors(part: Part, precision: Precision) -> Precision:
    """The type of the factors of the part's products."""
    if part.kind == "router":
        return "fp32"
    if precision == "fp8" and part.kind not in ("linear", "expert"):
        return "bf16"
    return precision


def _itemsize(precision: Precision) -> int:
    """Bytes of a cached value, and of an activation."""
    return 4 if precision == "fp32" else 2


def _products(precision: Precision, parts: Iterable[Part], rows: int) -> Traffic:
    """Every weight read once and multiplied with `rows` rows."""
    weights, flops = 0, dict.fromkeys(PRECISIONS, 0.0)
    for part in parts:
        weights += part.packed_bytes(precision)
        if part.kind not in ("norm", "bias"):
            flops[_factors(part, precision)] += 2 * rows * part.parameters
    return Traffic(weights, flops=flops)


def _experts(config: ModelConfig, precision: Precision, rows: int) -> Traffic:
    E, K = config.n_routed_experts, config.num_experts_per_tok
    block = Account.from_config(config).blocks["moe"]
    parts = [part for component in block for part in component.parts if part.kind == "expert"]
    every = _products(precision, parts, rows)
    flops = {p: count * K / E for p, count in every.flops.items()}
    chosen = Traffic(every.weights * distinct_experts(config, rows) / E, flops=flops)
    values = 2 * K * config.moe_intermediate_size + config.hidden_size
    return chosen + _activations(precision, rows * values)


def _attention(
    config: ModelConfig, precision: Precision, batch: int, tokens: int, cached: int
) -> Traffic:
    """Scores over all W values of a key, the mix of its C latent ones."""
    H, W, C = config.num_attention_heads, config.cache_width, config.kv_lora_rank
    cache = batch * (cached + tokens) * W * _itemsize(precision)
    flops = 2.0 * batch * tokens * (cached + tokens) * H * (W + C)
    return Traffic(cache=cache, flops={"fp32" if precision == "fp32" else "bf16": flops})


def _values(config: ModelConfig, graph: GraphName) -> int:
    """Moved between a block's linear layers for one token; the experts add to `moe`'s output."""
    H, D = config.num_attention_heads, config.hidden_size
    attention = H * (config.qk_head_dim + config.v_head_dim) + D
    if graph == "dense":
        return attention + 2 * config.intermediate_size + D
    return attention + 2 * config.shared_intermediate_size


def _activations(precision: Precision, values: int) -> Traffic:
    return Traffic(activations=values * _itemsize(precision))
