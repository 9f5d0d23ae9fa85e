"""Replay a build's goldens on a backend: blocks with their routed experts, and the whole chain.

Positions of a case are made as a step makes them and compared first. A MoE block's experts run
twice: on the outputs of the block's graph, and on those of the reference.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from graphs.contract.config import BlockType
from graphs.contract.spec import GRAPHS, TapSpec
from graphs.contract.tensorfile import Array, TensorFile
from graphs.parity.compare import (
    FP8_FREE,
    RMS,
    TIE_MARGIN,
    ComparedTensor,
    ErrorLimit,
    ReplayCase,
    compare,
    limit_for,
    relative_rms,
)
from graphs.parity.findings import Fragment, Hint, RoutingRecord, TapComparison, Tie, distinct
from graphs.parity.graphs import compare_taps, with_bounds
from graphs.parity.hints.masks import position_hint
from graphs.parity.replay import ExpertOutput, golden_inputs, graph_cases
from graphs.parity.taps import SYMBOLS
from runtime.backends import ExpertSlot
from runtime.devices.base import Buffer
from runtime.serving.request import Request
from runtime.serving.scheduler import Scheduler
from runtime.step.chain import Chain, step_positions
from runtime.step.expert_routing import expert_slots
from runtime.step.prefill import prefill

END_TO_END = "end_to_end"


def runtime_parity(chain: Chain, build: Path) -> Fragment:
    """A chain's comparison with its build's goldens. Raises BuildError where there are none."""
    run = _Run(chain)
    for golden in graph_cases(build, chain.spec):
        if golden.metadata["graph"] in ("dense", "moe"):
            run.block(golden)
    path, not_run = build / "golden" / f"{END_TO_END}.safetensors", []
    if path.is_file():
        run.chain_case(TensorFile.open(path, chain.spec.file_metadata(END_TO_END)))
    else:
        not_run = [f"{END_TO_END}: no such golden, so the chain was not compared"]
    return Fragment(
        model=build.resolve().parent.name,
        precision=chain.spec.precision,
        config_sha256=chain.spec.config_sha256,
        source="chain",
        rows=run.rows,
        routing=run.routing,
        hints=distinct(run.hints),
        not_run=not_run,
    )


@dataclass
class _Run:
    """The findings so far."""

    chain: Chain
    rows: list[TapComparison] = field(default_factory=list)
    routing: list[RoutingRecord] = field(default_factory=list)
    hints: list[Hint] = field(default_factory=list)

    def block(self, golden: TensorFile) -> None:
        case = ReplayCase.from_golden(golden)
        self._step_inputs(case, golden)
        spec, chain = self.chain.spec, self.chain
        block = spec.config.block_type(int(golden.metadata["layer"]))
        graph = spec.graphs[block]
        outputs = {t.name: np.empty_like(golden[f"output.{t.name}"]) for t in graph.outputs}
        run_block(chain, block, case_layer(case), golden_inputs(golden), outputs)
        if block == "dense":
            rows, _ = compare_taps(spec, case, graph, golden, outputs)
            self.rows += rows
        else:
            self._experts(case, golden, outputs)

    def _step_inputs(self, case: ReplayCase, golden: TensorFile) -> None:
        """Positions, as the chain makes them for a step of this case."""
        expected = golden_inputs(golden)
        positions = expected["positions"]
        made = step_positions(positions[:, 0], positions.shape[1], self.chain.config)
        exact = ErrorLimit("max", 0.0)
        subject = ComparedTensor(case, "positions", "positions", 0, "input")
        self.rows.append(compare(subject, made, positions, exact))
        self.hints += position_hint(case, made, positions)

    def _experts(self, case: ReplayCase, golden: TensorFile, outputs: dict[str, Array]) -> None:
        """Compare y of a MoE block, made of the graph's outputs and of the reference's."""
        spec, layer = self.chain.spec, case_layer(case)
        names = ("new", "experts", "expert_weights")
        tapped = {name: outputs[name] for name in names}
        rows, routing = compare_taps(spec, case, spec.graphs["moe"], golden, tapped)
        assert routing is not None
        expected = golden["output.y"].reshape(outputs["acc"].shape)
        y = self._sum(layer, outputs)
        routing = with_bounds(routing, golden, outputs, self._expert_output(layer))
        ties = [replace(t, effect=_effect(t, y, expected)) for t in routing.ties]
        self.routing.append(replace(routing, ties=ties))
        self.rows += rows
        same = np.array(routing.agree)
        remark = "" if same.all() else f"{same.sum()} of {len(same)} tokens, with the same experts"
        limit = limit_for(spec.precision, "y", free=True)
        self.rows.append(compare(_y(case), y[same], expected[same], limit, remark=remark))
        fed = self._sum(layer, {name: golden[f"output.{name}"] for name in outputs})
        limit = limit_for(spec.precision, "y")
        self.rows.append(compare(_y(replace(case, fed=True)), fed, expected, limit))

    def _sum(self, layer: int, outputs: Mapping[str, Array]) -> Array:
        """y [M,D]: the routed experts on the outputs of a MoE block's graph."""
        backend, h = self.chain.backend, outputs["h"]
        chosen = outputs["experts"], outputs["expert_weights"]
        valid, slots = np.ones(len(h), dtype=bool), self.chain.spec.slots
        groups = list(expert_slots(*chosen, valid, slots, backend.least_rows))
        return run_experts(self.chain, layer, groups, h, outputs["acc"])

    def _expert_output(self, layer: int) -> ExpertOutput:
        """A function that runs one expert on one token."""

        def output(expert: int, h_1D: Array) -> Array:
            slot = ExpertSlot(expert, np.zeros(1, np.int64), np.ones((1, 1), np.float32))
            idle = ExpertSlot(expert, slot.rows, np.zeros((1, 1), np.float32))
            group = [slot] + [idle] * (self.chain.spec.slots - 1)
            row: Array = run_experts(self.chain, layer, [group], h_1D, np.zeros_like(h_1D))[0]
            return row

        return output

    def chain_case(self, golden: TensorFile) -> None:
        """Compare prefill of the prompt in one step, then greedy decoding."""
        chain, case = self.chain, ReplayCase.from_golden(golden)
        ids, expected = golden["prompt_ids"].tolist(), golden["tokens"]
        handle = chain.cache.allocate()
        try:
            (logits,) = prefill(chain, handle, ids, len(ids), all_logits=True)
            slot = chain.cache.slots.slot(handle)
            for layer, rows in enumerate(golden["rows"]):
                cached = chain.device.read(chain.cache.context(layer, slot, 1))[0]
                self._free(replace(case, layer=layer), 0, "rows", cached, rows)
        finally:
            chain.cache.free(handle)
        self._free(case, 1, "logits", logits, golden["logits"])
        scheduler = Scheduler(chain)
        ticket = scheduler.submit(Request(tuple(ids), len(expected)))
        done = scheduler.run()[ticket]
        if done.error:
            raise done.error
        noise = {"fp32": TIE_MARGIN["fp32"], "bf16": RMS["bf16"], "fp8": FP8_FREE}
        largest = float(np.abs(golden["logits"]).max())
        limit = ErrorLimit("max", noise[chain.spec.precision] * largest)
        subject = ComparedTensor(case, "tokens", "tokens", 2, "output")
        self.rows.append(compare_tokens(subject, list(done.tokens), golden, limit))

    def _free(
        self, case: ReplayCase, order: int, name: str, actual: Array, expected: Array
    ) -> None:
        """Compare the chain's rows, one a token: [M, …], made from its own earlier results."""
        subject = ComparedTensor(case, name, name, order, "output")
        limit = limit_for(self.chain.spec.precision, name, free=True)
        tap = TapSpec(name, name, name, (), ("M", "W"), "MW")
        self.rows.append(compare(subject, actual, expected, limit, tap))


def run_block(
    chain: Chain,
    block: BlockType,
    layer: int,
    inputs: Mapping[str, Array],
    outputs: Mapping[str, Array],
) -> None:
    """Run a block on host arrays, filling `outputs`; as many sequences at once as a step takes.

    Several sequences bring one token each, so that every output has a row for each.
    """
    B, S, _ = inputs["x"].shape
    assert B == 1 or S == 1, inputs["x"].shape
    for start in range(0, B, chain.profile.batch):
        part = slice(start, start + chain.profile.batch) if B > 1 else slice(None)
        placed = {name: _placed(chain, array[part]) for name, array in inputs.items()}
        device = chain.device
        made = {n: device.zeros(a[part].shape, a.dtype) for n, a in outputs.items()}
        chain.backend.block(block, layer, placed, made)
        for name, array in outputs.items():
            array[part] = device.read(made[name])


def run_experts(
    chain: Chain, layer: int, groups: Sequence[Sequence[ExpertSlot]], h_MD: Array, acc_MD: Array
) -> Array:
    """acc plus the outputs of the experts of `groups` on h: fp32 [M,D]; all are host arrays."""
    acc = _placed(chain, acc_MD.astype(np.float32))
    spare = chain.device.zeros(acc_MD.shape, np.dtype(np.float32))
    total, _ = chain.backend.experts(layer, groups, _placed(chain, h_MD), acc, spare)
    return chain.device.read(total)


def _placed(chain: Chain, array: Array) -> Buffer:
    buffer = chain.device.zeros(array.shape, array.dtype)
    chain.device.write(buffer, array)
    return buffer


def case_layer(case: ReplayCase) -> int:
    assert case.layer is not None, f"{case.name} has no layer"
    return case.layer


def _y(case: ReplayCase) -> ComparedTensor:
    """A MoE block's y, listed after the outputs of its graph."""
    return ComparedTensor(case, "y", SYMBOLS["y"], 1000 * (1 + len(GRAPHS)), "output")


def _effect(tie: Tie, y_MD: Array, expected_MD: Array) -> float:
    return relative_rms(y_MD[tie.token], expected_MD[tie.token])


def compare_tokens(
    subject: ComparedTensor, tokens: list[int], golden: TensorFile, limit: ErrorLimit
) -> TapComparison:
    """Greedy tokens, equal up to the first whose logit led by less than the limit: a tie."""
    expected = golden["tokens"].tolist()
    pairs = zip(tokens, expected, strict=True)
    same = next((i for i, (a, b) in enumerate(pairs) if a != b), len(expected))
    if same == len(expected):
        return subject.judged(limit, 0.0, 0.0, True, remark=f"{same} of {same} equal")
    margin = float(golden["margins"][same])
    remark = f"{same} of {len(expected)} equal, then one that led by {margin:.1e}"
    return subject.judged(limit, margin, margin, margin <= limit.value, [same], remark=remark)
