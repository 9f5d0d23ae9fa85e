"""Two routings compared: experts as sets, ties told from errors, and what a tie may do bounded."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from export.checkpoint.open import Checkpoint
from export.synthetic.write_checkpoint import write_checkpoint
from graphs.contract.config import ModelConfig
from graphs.contract.spec import BuildSpec, layer_file
from graphs.contract.tensorfile import Array, TensorFile, write_arrays
from graphs.parity.compare import TIE_MARGIN, ReplayCase
from graphs.parity.findings import RoutingRecord, Tie
from graphs.parity.graphs import graph_parity
from graphs.parity.routing import ExpertGroups, bound_effect, compare_routing, lead, tie_limits
from runtime.load import load_chain
from runtime.parity import runtime_parity
from tests.support.builds import Build
from tests.support.helpers import random_state, tiny_config
from tests.support.shared_builds import shared_build

CASE = ReplayCase("case", "moe", 1, "prefill")
ONE = ExpertGroups(1, 1, "max")


def routing(
    found: tuple[Array, Array],
    expected: tuple[Array, Array],
    scores: Array,
    groups: ExpertGroups = ONE,
) -> RoutingRecord:
    limits = np.full(len(scores), TIE_MARGIN["fp32"])
    return compare_routing(CASE, found, expected, scores, groups, limits)


def test_experts_are_compared_as_sets_and_ties_are_told_apart() -> None:
    scores = np.array([[0.9, 0.5, 0.4999999, 0.1]], np.float32)
    weights = np.array([[0.7, 0.3]], np.float32)
    expected = np.array([[0, 1]]), weights
    swapped = np.array([[1, 0]]), weights[:, ::-1]
    same = routing(swapped, expected, scores)
    assert same.agree == [True] and same.ties == []
    (tie,) = routing((np.array([[2, 0]]), weights), expected, scores).ties
    assert tie.passed and (tie.expected, tie.chosen) == ([0, 1], [0, 2])
    assert tie.margin == pytest.approx(1e-7, rel=0.2)
    (wrong,) = routing((np.array([[0, 3]]), weights), expected, scores).ties
    assert not wrong.passed and wrong.margin == pytest.approx(0.4)
    (wrong,) = routing(expected, (np.array([[0, 3]]), weights), scores).ties
    assert not wrong.passed


def test_experts_of_a_group_that_was_barred_are_not_a_tie() -> None:
    """Two groups of three, one kept. By their two best, 1.1 beats 1.0999999 and not 1.05."""
    weights = np.array([[0.7, 0.3]], np.float32)
    expected = np.array([[0, 1]]), weights

    def error(found: list[int], second: float) -> float:
        scores = np.array([[0.9, 0.2, 0.1, 0.6, second, 0.0]], np.float32)
        (tie,) = routing(
            (np.array([found]), weights), expected, scores, ExpertGroups(2, 1, "top2_sum")
        ).ties
        assert tie.passed == (tie.margin <= 1e-5)
        return tie.margin

    assert error([3, 4], 0.4999999) <= 1e-6
    assert error([3, 4], 0.45) == pytest.approx(0.05, abs=1e-6)
    assert error([3, 5], 0.4999999) == pytest.approx(0.5, abs=1e-6)
    assert error([0, 3], 0.4999999) == np.inf
    assert error([0, 2], 0.45) == pytest.approx(0.1, abs=1e-6)


def test_a_margin_is_the_lead_of_the_last_chosen_or_of_the_last_group() -> None:
    scores = np.array([0.9, 0.5, 0.45, 0.1])
    assert lead(scores, ONE, 2) == pytest.approx(0.05)
    assert lead(scores, ONE, 1) == pytest.approx(0.4)
    assert lead(scores, ONE, 4) == np.inf
    assert lead(scores, ExpertGroups(2, 1, "top2_sum"), 1) == pytest.approx(0.4)  # 0.9 before 0.5
    grouped = np.array([0.9, 0.1, 0.6, 0.38])
    assert lead(grouped, ExpertGroups(2, 1, "top2_sum"), 1) == pytest.approx(
        0.02
    )  # 1.0 before 0.98


@pytest.mark.parametrize("scoring, scale", [("sigmoid", 1.0), ("softmax", 0.25)])
def test_the_noise_of_a_softmaxs_scores_is_as_small_as_they_are(scoring: str, scale: float) -> None:
    method = {"sigmoid": "noaux_tc", "softmax": "greedy"}[scoring]
    config = ModelConfig.from_dict(tiny_config(scoring_func=scoring, topk_method=method))
    golden = TensorFile(Path("golden"), {}, {"tap.gate_scores": np.array([[0.25, 0.2, 0.2]])})
    assert tie_limits(golden, config, "bf16") == [TIE_MARGIN["bf16"] * scale]


def test_a_bound_holds_for_any_outputs_of_the_experts() -> None:
    generator = np.random.default_rng(0)
    outputs, y = generator.normal(size=(4, 8)), generator.normal(size=(1, 8))
    found = np.array([[0, 2]]), np.array([[0.6, 0.4]], np.float32)
    expected = np.array([[0, 1]]), np.array([[0.7, 0.3]], np.float32)
    tie = Tie(0, [0, 1], [0, 2], 0.0, 1.0, None, None, True)
    h = np.zeros((1, 8), np.float32)
    bound = bound_effect(tie, found, expected, h, y, lambda expert, _: outputs[expert])
    change = -0.1 * outputs[0] - 0.3 * outputs[1] + 0.4 * outputs[2]
    assert np.linalg.norm(change) / np.linalg.norm(y) <= bound
    sizes = np.linalg.norm(outputs, axis=1)
    expected_bound = (0.1 * sizes[0] + 0.3 * sizes[1] + 0.4 * sizes[2]) / np.linalg.norm(y)
    assert bound == pytest.approx(expected_bound, rel=1e-6)


def copy_with_bias(build: Path, target: Path, changes: dict[int, float]) -> Path:
    """A copy of a build in which layer 1's correction bias is raised for these experts."""
    shutil.copytree(build, target)
    spec = BuildSpec.load(build)
    tensors = dict(TensorFile.open(build / layer_file(1)).tensors)
    bias = np.array(tensors["gate.bias"])
    for expert, amount in changes.items():
        bias[expert] += np.float32(amount)
    tensors["gate.bias"] = bias
    write_arrays(target / layer_file(1), tensors, spec.file_metadata("layer 1"))
    return target


@pytest.fixture(scope="module")
def twins(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny build whose experts 0 and 1 of every layer have the same gate row and bias."""
    raw = tiny_config()
    state = random_state(ModelConfig.from_dict(raw))
    for name, tensor in state.items():
        if name.endswith(("mlp.gate.weight", "e_score_correction_bias")):
            tensor[1] = tensor[0]
    folder = tmp_path_factory.mktemp("twins")
    write_checkpoint(folder, raw, state)
    return shared_build(Checkpoint.open(folder), "fp32")


def test_a_tie_is_reported_with_margin_and_bound_and_fails_nothing(
    twins: Path, tmp_path: Path
) -> None:
    """Twins may change places: whichever the reference has, one of two biases prefers the other."""
    ties: list[Tie] = []
    for number, changes in enumerate(({0: 5e-6}, {1: 5e-6})):
        build = copy_with_bias(twins, tmp_path / str(number), changes)
        alone = graph_parity(build, threads=1)
        blocks = runtime_parity(load_chain(build, threads=1), build)
        layer = [r for r in blocks.routing if r.layer == 1]
        ties += [tie for r in layer for tie in r.ties]
        assert alone.passed and alone.hints == []
        assert all(r.passed for r in blocks.rows if r.layer == 1)
        bounds = [tie.bound for r in alone.routing for tie in r.ties]
        assert all(bound is not None and bound > 0 for bound in bounds)
    assert ties and all(t.passed and t.margin <= TIE_MARGIN["fp32"] for t in ties)
    assert all({0, 1} >= set(t.expected) ^ set(t.chosen) for t in ties)
    for tie in ties:
        assert tie.bound is not None and tie.effect is not None
        assert 0.01 < tie.effect <= tie.bound * (1 + 1e-4)


def test_a_choice_that_is_no_tie_fails(nano: Build, tmp_path: Path) -> None:
    build = copy_with_bias(nano("fp32"), tmp_path / "copy", {0: 0.3})
    fragment = graph_parity(build, threads=1)
    rows = [r for r in fragment.rows if r.tap == "experts" and not r.passed]
    assert {r.layer for r in rows} == {1}
    assert not fragment.passed
    assert any(not tie.passed for r in fragment.routing for tie in r.ties)
