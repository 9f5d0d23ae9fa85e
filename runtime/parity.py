"""Replay a build's goldens on a backend: blocks with their routed experts, and the whole chain.

A MoE block's experts run twice: on what the block's graph gave, and fed what the reference gave.
"""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from graphs.metrics import FP8_FREE, RMS, TIE_MARGIN, Row, compare, not_run
from graphs.parity import compare_outputs, golden_inputs, graph_cases, routing_rows
from graphs.tensorfile import Array, TensorFile
from runtime.chain import Chain
from runtime.generate import generate, prefill
from runtime.routing import add_experts, expert_slots
from runtime.sampling import Sampler


def runtime_parity(chain: Chain, build: Path) -> list[Row]:
    """A row per output; one that says so where there is no end-to-end golden.

    Raises BuildError where there are no goldens.
    """
    rows: list[Row] = []
    for golden in graph_cases(build, chain.spec):
        if golden.metadata["graph"] in ("dense", "moe"):
            rows += _block(chain, golden)
    name = "end_to_end"
    path = build / "golden" / f"{name}.safetensors"
    if not path.is_file():
        return [*rows, not_run(name, "no such golden: the chain was not compared")]
    return rows + _chain(chain, TensorFile.open(path, chain.spec.file_metadata(name)))


def _block(chain: Chain, golden: TensorFile) -> list[Row]:
    spec, layer = chain.spec, int(golden.metadata["layer"])
    block = spec.config.block_type(layer)
    names = [t.name for t in spec.graphs[block].outputs]
    outputs = {name: np.empty_like(golden[f"output.{name}"]) for name in names}
    chain.backend.block(block, layer, golden_inputs(golden), outputs)
    if block == "dense":
        return compare_outputs(golden, outputs, spec, free=True)
    rows, same = routing_rows(golden, outputs["experts"], outputs["expert_weights"], spec)
    case = golden.path.stem
    expected = golden["output.y"].reshape(outputs["acc"].shape)
    y = _experts(chain, layer, outputs)
    remark = "" if same.all() else f"{same.sum()} of {len(same)} tokens, with the same experts"
    rows.append(compare(case, "y", y[same], expected[same], spec.precision, remark, free=True))
    new = outputs["new"], golden["output.new"]
    rows.append(compare(case, "new", *new, spec.precision, free=True))
    fed = _experts(chain, layer, {name: golden[f"output.{name}"] for name in names})
    rows.append(compare(f"{case}, fed", "y", fed, expected, spec.precision))
    return rows


def _experts(chain: Chain, layer: int, outputs: Mapping[str, Array]) -> Array:
    """y [M,D]: the routed experts on what a MoE block's graph gave."""
    valid = np.ones(len(outputs["h"]), dtype=bool)
    groups = expert_slots(outputs["experts"], outputs["expert_weights"], valid, chain.spec.slots)
    acc = outputs["acc"].copy()
    y, _ = add_experts(chain.backend, layer, groups, outputs["h"], acc, np.empty_like(acc))
    return y


def _chain(chain: Chain, golden: TensorFile) -> list[Row]:
    """Prefill of the prompt in one step, then greedy decoding."""
    precision, case = chain.spec.precision, golden.path.stem
    ids, expected = golden["prompt_ids"].tolist(), golden["tokens"]
    handle = chain.cache.allocate()
    try:
        (logits,) = prefill(chain, handle, ids, len(ids), all_logits=True)
        slot = chain.cache.slots.slot(handle)
        cached = np.stack(
            [chain.cache.context(i, slot, 1)[0] for i in range(len(chain.cache.rows))]
        )
    finally:
        chain.cache.free(handle)
    found = list(generate(chain, ids, len(expected), Sampler(), chunk=len(ids)))
    noise = {"fp32": TIE_MARGIN["fp32"], "bf16": RMS["bf16"], "fp8": FP8_FREE}[precision]
    return [
        compare(case, "logits", logits, golden["logits"], precision, free=True),
        compare(case, "rows", cached, golden["rows"], precision, free=True),
        compare_tokens(case, found, golden, noise * float(np.abs(golden["logits"]).max())),
    ]


def compare_tokens(case: str, found: list[int], golden: TensorFile, noise: float) -> Row:
    """Greedy tokens, equal up to the first whose logit led by less than `noise`: a tie."""
    expected = golden["tokens"].tolist()
    pairs = zip(found, expected, strict=True)
    same = next((i for i, (a, b) in enumerate(pairs) if a != b), len(expected))
    if same == len(expected):
        return Row(case, "tokens", 0.0, 0.0, noise, True, f"{same} of {same} equal")
    margin = float(golden["margins"][same])
    remark = f"{same} of {len(expected)} equal, then one that led by {margin:.1e}"
    return Row(case, "tokens", margin, margin, noise, margin <= noise, remark)
