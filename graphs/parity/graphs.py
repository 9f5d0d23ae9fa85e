"""Replay each graph's goldens alone, in plain ONNX Runtime on the CPU with no custom library.

Every tap is compared with the reference's, in the order of the dataflow, so that the first one that
is off says where a fault lies. At fp8 a graph runs twice: with its linear layers fed the
reference's own inputs, where every tap is compared, and freely, where the outputs are.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from graphs.contract.spec import BuildSpec, GraphName, GraphSpec
from graphs.contract.tensorfile import Array, TensorFile
from graphs.parity.compare import ComparedTensor, ErrorLimit, ReplayCase, compare, limit_for
from graphs.parity.findings import FP8Stats, Fragment, RangeWarning, RoutingRecord, TapComparison
from graphs.parity.fp8_stats import activation_stats, weight_stats
from graphs.parity.hints import diagnose
from graphs.parity.hints.evidence import Evidence
from graphs.parity.ranges import NORM_INPUTS, RangeRole, range_findings
from graphs.parity.replay import (
    ExpertOutput,
    GraphReplay,
    expected_tap,
    golden_inputs,
    graph_cases,
    graph_weights,
)
from graphs.parity.routing import (
    ExpertGroups,
    agreed_weights,
    bound_effect,
    choice_scores,
    compare_routing,
    tie_limits,
)
from graphs.parity.taps import to_graph
from graphs.passes.feed_linears import FED

ROUTING = ("experts", "expert_weights")


def graph_parity(build: Path, threads: int = 0) -> Fragment:
    """All that the goldens of single graphs show. Raises BuildError."""
    spec = BuildSpec.load(build)
    runs = _GraphRuns(build, spec, threads, {g.path.stem: g for g in graph_cases(build, spec)})
    for golden in runs.goldens.values():
        runs.case(golden)
    return Fragment(
        model=build.resolve().parent.name,
        precision=spec.precision,
        config_sha256=spec.config_sha256,
        source="graphs",
        rows=runs.rows,
        routing=runs.routing,
        fp8=runs.fp8,
        ranges=runs.ranges,
        hints=diagnose(runs.rows, runs.evidence, runs.other_layer),
    )


@dataclass
class _GraphRuns:
    """The graphs' sessions, opened when needed, and the findings so far."""

    build: Path
    spec: BuildSpec
    threads: int
    goldens: dict[str, TensorFile]
    graphs: dict[GraphName, GraphReplay] = field(default_factory=dict)
    rows: list[TapComparison] = field(default_factory=list)
    routing: list[RoutingRecord] = field(default_factory=list)
    fp8: list[FP8Stats] = field(default_factory=list)
    ranges: list[RangeWarning] = field(default_factory=list)

    def graph(self, name: str) -> GraphReplay:
        known = next(g for g in self.spec.graphs if g == name)
        if known not in self.graphs:
            self.graphs[known] = GraphReplay.open(self.build, self.spec, known, self.threads)
        return self.graphs[known]

    def case(self, golden: TensorFile) -> None:
        replay = self.graph(golden.metadata["graph"])
        case = ReplayCase.from_golden(golden, fed=bool(replay.fed))
        actual = replay.run(golden)
        self._compare(case, replay.graph, golden, actual)
        self._numbers(case, replay, golden, actual)
        if replay.free is not None:
            self._compare(replace(case, fed=False), replay.graph, golden, replay.run_free(golden))

    def evidence(self, case: str) -> Evidence:
        """A failed case, run again with its taps kept."""
        golden = self.goldens[case]
        replay = self.graph(golden.metadata["graph"])
        weights = graph_weights(self.build, self.spec, replay.graph, golden)
        replay_case = ReplayCase.from_golden(golden, fed=bool(replay.fed))
        return Evidence(self.spec, replay_case, replay.graph, golden, replay.run(golden), weights)

    def other_layer(self, case: str) -> int | None:
        """The layer whose weights make the case pass, or None."""
        golden, config = self.goldens[case], self.spec.config
        replay = self.graph(golden.metadata["graph"])
        fed = ReplayCase.from_golden(golden, fed=True)
        if fed.layer is None:
            return None
        for layer in range(config.num_hidden_layers):
            if layer != fed.layer and config.block_type(layer) == config.block_type(fed.layer):
                actual = replay.run(golden, layer)
                rows, _ = compare_taps(self.spec, fed, replay.graph, golden, actual)
                if all(row.passed for row in rows):
                    return layer
        return None

    def _compare(
        self, case: ReplayCase, graph: GraphSpec, golden: TensorFile, actual: dict[str, Array]
    ) -> None:
        rows, routing = compare_taps(self.spec, case, graph, golden, actual)
        self.rows += rows
        if routing is not None:
            assert case.layer is not None
            output = self.graph("experts").expert_output(case.layer)
            self.routing.append(with_bounds(routing, golden, actual, output))

    def _numbers(
        self, case: ReplayCase, replay: GraphReplay, golden: TensorFile, actual: dict[str, Array]
    ) -> None:
        """Ranges of all taps, and the scales of FP8 linear layers, the weights' once a layer."""
        reads: dict[str, list[str]] = {}
        for name, tap in replay.fed.items():
            reads.setdefault(tap.name, []).append(name.removeprefix(FED))
        for name in ("x", "hidden"):
            if name in (inputs := golden_inputs(golden)):
                self._range(case, name, inputs[name], "norm_input")
        for tap in replay.graph.taps:
            value = actual[tap.name]
            if tap.name in reads:
                value = to_graph(tap, value)
                self.fp8 += [activation_stats(case, m, value) for m in reads[tap.name]]
            role: RangeRole = "fp8_input" if tap.name in reads else "value"
            self._range(case, tap.name, value, "norm_input" if tap.name in NORM_INPUTS else role)
        if replay.fed and case.mode == "prefill":
            weights = graph_weights(self.build, self.spec, replay.graph, golden)
            for name in (n for n in weights if n.endswith(".scale")):
                module = name.removesuffix(".scale")
                self.fp8.append(
                    weight_stats(case, module, weights[f"{module}.weight"], weights[name])
                )

    def _range(self, case: ReplayCase, tap: str, value: Array, role: RangeRole) -> None:
        for finding in range_findings(case.name, tap, value, role=role):
            self.ranges.append(RangeWarning(case.name, tap, finding.rule, finding.text))


def compare_taps(
    spec: BuildSpec,
    case: ReplayCase,
    graph: GraphSpec,
    golden: TensorFile,
    actual: Mapping[str, Array],
) -> tuple[list[TapComparison], RoutingRecord | None]:
    """A comparison of each tap that was computed, and the routing where the graph has one."""
    rows, routing = [], None
    subjects = {
        t.name: ComparedTensor.from_tap(case, graph, t) for t in graph.taps if t.name in actual
    }
    free = spec.precision == "fp8" and not case.fed and graph.name in ("dense", "moe")
    for tap in (t for t in graph.taps if t.name in actual and t.name not in ROUTING):
        limit = limit_for(spec.precision, tap.name, free)
        rows.append(
            compare(subjects[tap.name], actual[tap.name], expected_tap(golden, tap), limit, tap)
        )
    if "experts" in actual:
        pairs = [(side["experts"], side["expert_weights"]) for side in (actual, _outputs(golden))]
        groups, choice = ExpertGroups.from_config(spec.config), choice_scores(golden, spec.config)
        limits = tie_limits(golden, spec.config, spec.precision)
        routing = compare_routing(case, pairs[0], pairs[1], choice, groups, limits)
        rows.append(routing_row(subjects["experts"], routing, float(limits.max())))
        weights, reference = agreed_weights(pairs[0], pairs[1], routing.agree)
        limit = limit_for(spec.precision, "expert_weights", free)
        rows.append(compare(subjects["expert_weights"], weights, reference, limit))
    return rows, routing


def routing_row(subject: ComparedTensor, routing: RoutingRecord, limit: float) -> TapComparison:
    """The routing's line among the taps: the widest margin of a token that chose otherwise."""
    widest = max((tie.margin for tie in routing.ties), default=0.0)
    remark = "same experts"
    if routing.ties:
        remark = f"{len(routing.ties)} of {routing.tokens} tokens differ, by margins ≤ {widest:.1e}"
    passed = all(tie.passed for tie in routing.ties)
    return subject.judged(ErrorLimit("max", limit), widest, widest, passed, remark=remark)


def with_bounds(
    routing: RoutingRecord, golden: TensorFile, actual: Mapping[str, Array], output: ExpertOutput
) -> RoutingRecord:
    """The routing with a bound on what each tie may do to its token's output."""
    expected = _outputs(golden)
    pairs = [(side["experts"], side["expert_weights"]) for side in (actual, expected)]
    y_MD = expected["y"].reshape(expected["h"].shape)
    ties = [
        replace(tie, bound=bound_effect(tie, pairs[0], pairs[1], expected["h"], y_MD, output))
        for tie in routing.ties
    ]
    return replace(routing, ties=ties)


def _outputs(golden: TensorFile) -> dict[str, Array]:
    prefix = "output."
    return {n.removeprefix(prefix): a for n, a in golden.tensors.items() if n.startswith(prefix)}
