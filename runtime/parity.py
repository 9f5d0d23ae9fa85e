"""Replay a build's goldens on a backend: blocks with their routed experts, and the whole chain."""

from pathlib import Path

import numpy as np

from graphs.metrics import FP8_CHAIN, RMS, TIE_MARGIN, Row, compare
from graphs.parity import compare_outputs, golden_inputs, graph_cases, routing_rows
from graphs.tensorfile import TensorFile
from runtime.chain import Chain
from runtime.generate import generate, prefill
from runtime.routing import add_experts, expert_slots
from runtime.sampling import Sampler


def runtime_parity(chain: Chain, build: Path) -> list[Row]:
    """A row per output. Raises BuildError where there are no goldens."""
    rows: list[Row] = []
    for golden in graph_cases(build, chain.spec):
        if golden.metadata["graph"] in ("dense", "moe"):
            rows += _block(chain, golden)
    name = "end_to_end"
    path = build / "golden" / f"{name}.safetensors"
    return rows + _chain(chain, TensorFile.open(path, chain.spec.file_metadata(name)))


def _block(chain: Chain, golden: TensorFile) -> list[Row]:
    spec, layer = chain.spec, int(golden.metadata["layer"])
    block = spec.config.block_type(layer)
    names = [t.name for t in spec.graphs[block].outputs]
    outputs = {name: np.empty_like(golden[f"output.{name}"]) for name in names}
    chain.backend.block(block, layer, golden_inputs(golden), outputs)
    if block == "dense":
        return compare_outputs(golden, outputs, spec)
    rows, same = routing_rows(golden, outputs["experts"], outputs["expert_weights"], spec)
    valid = np.ones(len(outputs["h"]), dtype=bool)
    groups = expert_slots(outputs["experts"], outputs["expert_weights"], valid, spec.slots)
    acc = outputs["acc"]
    y, _ = add_experts(chain.backend, layer, groups, outputs["h"], acc, np.empty_like(acc))
    expected = golden["output.y"].reshape(y.shape)
    remark = "" if same.all() else "tokens with the same experts"
    case = golden.path.stem
    rows.append(compare(case, "y", y[same], expected[same], spec.precision, remark))
    rows.append(compare(case, "new", outputs["new"], golden["output.new"], spec.precision))
    return rows


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
    limits = RMS | {"fp8": FP8_CHAIN}
    remark = "free-running" if precision == "fp8" else ""
    found = list(generate(chain, ids, len(expected), Sampler(), chunk=len(ids)))
    noise = TIE_MARGIN["fp32"] if precision == "fp32" else limits[precision]
    return [
        compare(case, "logits", logits, golden["logits"], precision, remark, limits),
        compare(case, "rows", cached, golden["rows"], precision, remark, limits),
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
