"""The chain on ONNX Runtime: ragged batches, chunks, limits, and steps that fail."""

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from export.checkpoint.open import Checkpoint
from graphs.contract.config import ModelConfig
from graphs.contract.manifest import Profile
from graphs.contract.spec import BuildSpec, Precision
from graphs.contract.tensorfile import Array
from graphs.session import ort_value
from runtime.backends import BackendError
from runtime.backends.onnxruntime import OnnxRuntimeBackend
from runtime.cache.errors import CacheFullError, NonFiniteError
from runtime.devices.weights import Weights
from runtime.parity import run_experts, runtime_parity
from runtime.serving.request import Request
from runtime.serving.scheduler import Scheduler
from runtime.step.chain import Chain, LogitsError, StepError, _all_finite, step_positions
from runtime.step.expert_routing import expert_slots
from runtime.step.prefill import prefill
from tests.support.builds import EACH_PRECISION, ON_GPU, PROFILE, Build, OpenBackend, OpenChain
from tests.support.doubles.tampering import Block, restore, tamper
from tests.support.helpers import tiny_config

TEXT = b"In the beginning God created the heaven and the earth. And the earth was without form"
IDS = [256, *TEXT]


def run_alone(chain: Chain, ids: Sequence[int], chunk: int = 128) -> Array:
    """Logits of every position of one sequence with a cache of its own."""
    handle = chain.cache.allocate()
    logits = np.concatenate(list(prefill(chain, handle, ids, chunk, all_logits=True)))
    chain.cache.free(handle)
    return logits


def test_positions_of_padding_stay_within_the_rope_table() -> None:
    config = ModelConfig.from_dict(tiny_config(max_position_embeddings=512))
    positions = step_positions(np.array([0, 509, 511]), 4, config)
    assert positions.tolist() == [[0, 1, 2, 3], [509, 510, 511, 511], [511, 511, 511, 511]]


def test_prefill_then_decode_equals_one_prefill(chain: Chain) -> None:
    """Case 12."""
    whole = run_alone(chain, IDS[:5])
    chain.cache.allocate()
    first = chain.step([IDS[:4]], all_logits=True)[0]
    second = chain.step([IDS[4:5]])[0]
    np.testing.assert_allclose(np.concatenate([first, second]), whole, atol=1e-4)


@settings(
    max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(cuts=st.sets(st.integers(1, len(IDS) - 1), max_size=6))
def test_any_chunking_gives_the_same_logits(chain: Chain, cuts: set[int]) -> None:
    whole = run_alone(chain, IDS)
    handle = chain.cache.allocate()
    bounds = [0, *sorted(cuts), len(IDS)]
    parts = [chain.step([IDS[a:b]], all_logits=True)[0] for a, b in itertools.pairwise(bounds)]
    chain.cache.free(handle)
    np.testing.assert_allclose(np.concatenate(parts), whole, atol=1e-4)


def test_unequal_sequences_equal_their_own_runs(chain: Chain) -> None:
    """Case 13: prompts of 2, 5 and 9 tokens, then one token each in one step."""
    prompts = [IDS[:2], IDS[3:8], IDS[10:19]]
    nexts = [[101], [102], [103]]
    alone = [run_alone(chain, p + n) for p, n in zip(prompts, nexts, strict=True)]
    for _ in prompts:
        chain.cache.allocate()
    each = [chain.step([p], slot, all_logits=True)[0] for slot, p in enumerate(prompts)]
    then = chain.step(nexts)
    for b, expected in enumerate(alone):
        found = np.concatenate([each[b], then[b]])
        np.testing.assert_allclose(found, expected, atol=1e-4)
    assert chain.cache.lengths == [3, 6, 10]
    chain.cache.check()


def test_several_sequences_bring_one_token_each(chain: Chain) -> None:
    for _ in range(2):
        chain.cache.allocate()
    with pytest.raises(StepError, match=r"expected one each of several .* got \[1, 2\]"):
        chain.step([[1], [1, 2]])


def test_a_sequence_without_tokens_takes_no_part(chain: Chain) -> None:
    """Case 17: its one padded row is routed nowhere and not committed."""
    expected = run_alone(chain, IDS[:6])
    for _ in range(3):
        chain.cache.allocate()
    chain.step([IDS[:5]], 1)
    found = chain.step([[], IDS[5:6], []], all_logits=True)
    assert found[0].shape == found[2].shape == (0, 258)
    np.testing.assert_allclose(found[1], expected[5:], atol=1e-4)
    assert chain.cache.lengths == [0, 6, 0]
    chain.cache.check()


def test_an_empty_step_is_refused(chain: Chain) -> None:
    chain.cache.allocate()
    with pytest.raises(StepError, match="at least one token"):
        chain.step([[]])


def test_overflow_is_an_error_before_any_engine_runs(open_chain: OpenChain) -> None:
    """Case 14, by the cache's capacity and by the profile's context."""
    chain = open_chain(profile=Profile(context=128), cache=64)
    spy = tamper(chain, lambda layer, block: None)
    chain.cache.allocate()
    chain.step([IDS[:60]])
    before, blocks = chain.device.read(chain.cache.rows), spy.blocks
    with pytest.raises(CacheFullError, match=r"holds 64 rows a layer.* = "):
        chain.step([IDS[:5]])
    with pytest.raises(StepError, match=r"context: expected at most 128, got 134 .*b8t128c128"):
        chain.step([IDS[:74]])
    assert spy.blocks == blocks
    np.testing.assert_array_equal(chain.device.read(chain.cache.rows), before)
    assert chain.cache.lengths == [60]


def test_a_step_beyond_the_profile_names_limit_engine_and_profile(open_chain: OpenChain) -> None:
    """Case 20."""
    chain = open_chain(profile=Profile(batch=2, tokens=128, context=512))
    for _ in range(3):
        chain.cache.allocate()
    with pytest.raises(
        StepError,
        match=r"tokens: expected at most 128, got 129 \(engines dense and moe, profile b2t",
    ):
        chain.step([IDS + IDS[:43]])
    with pytest.raises(StepError, match="batch: expected at most 2, got 3"):
        chain.step([[1], [2], [3]])
    with pytest.raises(StepError, match=r"token 258: expected an id below vocab_size \(258\)"):
        chain.step([[258]])
    with pytest.raises(
        StepError, match="cache slots: expected a range within the 3 in use, got 3 to 3"
    ):
        chain.step([[1]], 3)


def test_padding_that_is_nan_does_not_reach_a_neighbour(chain: Chain) -> None:
    """Case 18: lengths 3 and 9; NaN in the row of the shorter one, which brings no token."""
    expected = run_alone(chain, [*IDS[:9], 101, 102])
    for slot, count in enumerate((3, 9)):
        chain.cache.allocate()
        chain.step([IDS[:count]], slot)
    tamper(chain, lambda layer, block: block.poison("new", 0))
    found = chain.step([[], [101]])[1]
    restore(chain)
    last = chain.step([[101], [102]])[1]
    np.testing.assert_allclose(np.concatenate([found, last]), expected[9:], atol=1e-4)
    chain.cache.check()


def test_nan_in_a_real_row_is_refused_and_a_retry_is_right(chain: Chain) -> None:
    expected = run_alone(chain, IDS[:9])
    handle = chain.cache.allocate()
    chain.step([IDS[:4]])
    before = chain.device.read(chain.cache.rows)

    def poison(layer: int, block: Block) -> None:
        if layer == 2:
            block.poison("new", (0, 1, 7))

    tamper(chain, poison)
    with pytest.raises(NonFiniteError, match=f"layer 2, sequence {handle}"):
        chain.step([IDS[4:9]])
    restore(chain)
    np.testing.assert_array_equal(chain.device.read(chain.cache.rows), before)
    np.testing.assert_allclose(chain.step([IDS[4:9]])[0], expected[-1:], atol=1e-4)


def test_nan_behind_the_last_cached_row_is_refused_too(chain: Chain) -> None:
    """The last block's output reaches no cache row, only the logits."""
    handle = chain.cache.allocate()

    def poison(layer: int, block: Block) -> None:
        if layer == chain.config.num_hidden_layers - 1:
            block.poison("acc", slice(None))

    tamper(chain, poison)
    with pytest.raises(LogitsError, match=f"sequence {handle}: logits hold NaN"):
        chain.step([IDS[:3]])
    assert chain.cache.lengths == [0]


def test_several_sequences_are_bound_with_their_stride(open_chain: OpenChain) -> None:
    chain = open_chain(profile=Profile(batch=2, tokens=128, context=96))
    for _ in range(2):
        chain.cache.allocate()
    chain.step([IDS[:65]])
    with pytest.raises(StepError, match="context: expected at most 96, got 128"):
        chain.step([[1], [2]])
    assert chain.cache.lengths == [65, 0]
    chain.step([[1]])  # alone it is bound with its own length


def test_a_step_that_fails_midway_changes_nothing(chain: Chain) -> None:
    chain.cache.allocate()
    chain.step([IDS[:4]])
    before = chain.device.read(chain.cache.rows)

    def fail(layer: int, block: Block) -> None:
        if layer == 1:
            raise BackendError("planted")

    tamper(chain, fail)
    with pytest.raises(BackendError, match="planted"):
        chain.step([IDS[4:9]])
    np.testing.assert_array_equal(chain.device.read(chain.cache.rows), before)
    assert chain.cache.lengths == [4]


def test_a_lone_token_gives_what_it_gives_beside_others(open_chain: OpenChain) -> None:
    """Bit for bit where it runs as two rows; another kernel's rounding off where it cannot."""
    chain = open_chain(profile=Profile(batch=8, tokens=128, context=512), cache=320)
    for slot in range(5):
        chain.cache.allocate()
        chain.step([IDS[slot : 5 + 2 * slot]], slot)
    lengths = chain.cache.lengths
    alone = [chain.step([[65]], slot)[0] for slot in range(5)]
    assert not chain.cache.has_room_behind(4)
    for handle, length in zip(chain.cache.handles, lengths, strict=True):
        chain.cache.truncate(handle, length)
    together = chain.step([[65]] * 5)
    for slot, (one, other) in enumerate(zip(alone, together, strict=True)):
        same = chain.backend.least_rows == 2 and slot < 4
        np.testing.assert_allclose(one, other, atol=0 if same else 2e-5, rtol=0)


def test_every_expert_is_reachable(chain: Chain, checkpoint: Checkpoint) -> None:
    """Case 15: whatever the export's example chose, each expert computes its own output."""
    import torch

    reference = checkpoint.reference()
    layer, c = 2, chain.config
    h = np.random.default_rng(0).standard_normal((5, c.hidden_size)).astype(np.float32)
    for expert in range(c.n_routed_experts):
        chosen, weights = np.full((5, 1), expert), np.full((5, 1), 0.5, np.float32)
        groups = list(expert_slots(chosen, weights, np.ones(5, bool), chain.spec.slots))
        out = run_experts(chain, layer, groups, h, np.zeros_like(h))
        module = reference.get_submodule(f"model.layers.{layer}.mlp.experts.{expert}")
        expected = 0.5 * module(torch.from_numpy(h)).numpy()
        np.testing.assert_allclose(out, expected, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("least_rows", [1, 2])
def test_idle_slots_add_nothing_even_from_poisoned_rows(chain: Chain, least_rows: int) -> None:
    """Case 17: a gate of 0 selects 0; it does not multiply."""
    c = chain.config
    h = np.zeros((2, c.hidden_size), np.float32)
    h[0] = np.nan
    chosen, weights = np.array([[0], [3]]), np.ones((2, 1), np.float32)
    valid = np.array([False, True])
    groups = list(expert_slots(chosen, weights, valid, chain.spec.slots, least_rows))
    assert len(groups[0][0].rows) == least_rows
    out = run_experts(chain, 1, groups, h, np.ones_like(h))
    np.testing.assert_array_equal(out[0], 1.0)
    assert (out[1] != 1.0).all() or np.isfinite(out[1]).all()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_one_logit_that_is_not_finite_is_found(value: float) -> None:
    logits = np.full((2, 5), 3e38, np.float32)
    assert _all_finite(logits) and _all_finite(-logits) and _all_finite(logits[:0])
    logits[1, 3] = value
    assert not _all_finite(logits)


def test_routing_groups_cover_every_choice_once_in_ascending_order() -> None:
    generator = np.random.default_rng(0)
    experts = np.stack([generator.permutation(20)[:4] for _ in range(7)])
    weights = generator.random((7, 4)).astype(np.float32)
    valid = np.array([1, 1, 0, 1, 1, 1, 1], bool)
    groups = list(expert_slots(experts, weights, valid, 8))
    assert all(len(group) == 8 for group in groups)
    used = [slot for group in groups for slot in group if slot.gates.any()]
    assert [s.expert for s in used] == sorted({s.expert for s in used})
    found = {
        (s.expert, int(r)): float(g)
        for s in used
        for r, g in zip(s.rows, s.gates[:, 0], strict=True)
    }
    expected = {
        (int(experts[m, k]), m): float(weights[m, k])
        for m in np.flatnonzero(valid).tolist()
        for k in range(4)
    }
    assert found == expected


def test_a_strided_view_is_refused_by_the_binding() -> None:
    """Case 21."""
    view = np.zeros((2, 8, 4), np.float32)[:, :4]
    with pytest.raises(ValueError, match="contiguous"):
        ort_value(view)


def test_weights_and_cache_are_bound_where_they_lie(chain: Chain) -> None:
    """No copy on the host: the address of the mapped file, or of the cache's prefix."""
    chain.cache.allocate()
    chain.step([IDS[:5]])
    rows = chain.cache.context(3, 0, 1)
    assert chain.device.address(rows) == chain.device.address(chain.cache.rows[3])
    backend = chain.backend
    if isinstance(backend, OnnxRuntimeBackend):
        arrays = [*chain.weights.layers[1].tensors.values(), *chain.weights.rope.tensors.values()]
        for array in arrays:
            assert ort_value(array).data_ptr() == array.ctypes.data
        assert len(backend.sessions) == 4
        assert len(backend.layers) == chain.config.num_hidden_layers == 4


@EACH_PRECISION
def test_greedy_tokens_are_equal_on_both_backends(
    onnxruntime_backend: OpenBackend, double_backend: OpenBackend, nano: Build, precision: Precision
) -> None:
    found = []
    for open_backend in (onnxruntime_backend, double_backend):
        spec = BuildSpec.load(nano(precision))
        weights = Weights.open(nano(precision), spec)
        chain = Chain(spec, weights, open_backend(precision, PROFILE), PROFILE, 1024)
        scheduler = Scheduler(chain)
        tickets = [scheduler.submit(Request(tuple(IDS[: 9 * n]), 32)) for n in (1, 3, 6)]
        results = scheduler.run()
        found.append([results[ticket].tokens for ticket in tickets])
    assert found[0] == found[1]


@EACH_PRECISION
@pytest.mark.parametrize("open_chain", ["double", *ON_GPU], indirect=True)
def test_parity_holds_on_the_other_backends_too(
    open_chain: OpenChain, nano: Build, precision: Precision
) -> None:
    found = runtime_parity(open_chain(precision), nano(precision))
    assert found.passed and not found.not_run and len(found.rows) > 40
