"""The chain on ONNX Runtime: ragged batches, chunks, limits, and steps that fail."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from conftest import Build
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from export.checkpoint import Checkpoint
from graphs.manifest import Profile
from graphs.session import ort_value
from graphs.tensorfile import Array
from runtime.backends.onnxruntime import OnnxRuntimeBackend
from runtime.chain import Chain, StepError, step_mask
from runtime.generate import generate, prefill
from runtime.kv_cache import CacheError
from runtime.routing import add_experts, expert_slots
from runtime.sampling import Sampler

TEXT = b"In the beginning God created the heaven and the earth. And the earth was without form"
IDS = [256, *TEXT]


def run_alone(chain: Chain, ids: Sequence[int], chunk: int = 128) -> Array:
    """Logits of every position of one sequence with a cache of its own."""
    handle = chain.cache.allocate()
    logits = np.concatenate(list(prefill(chain, handle, ids, chunk, all_logits=True)))
    chain.cache.free(handle)
    return logits


class Tampering:
    """A backend that runs another one and then lets a function change what a block wrote."""

    def __init__(self, inner: Any, change: Callable[[int, dict[str, Array]], None]) -> None:
        self.inner, self.change, self.blocks = inner, change, 0

    def block(
        self, block: Any, layer: int, inputs: Mapping[str, Array], outputs: Mapping[str, Array]
    ) -> None:
        self.inner.block(block, layer, inputs, outputs)
        self.blocks += 1
        self.change(layer, dict(outputs))

    def experts(self, *arguments: Any) -> None:
        self.inner.experts(*arguments)

    def head(self, *arguments: Any) -> None:
        self.inner.head(*arguments)


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
    """Case 13: prompts of 2, 5 and 9 tokens in one step, then one token each."""
    prompts = [IDS[:2], IDS[3:8], IDS[10:19]]
    nexts = [[101], [102], [103]]
    alone = [run_alone(chain, p + n) for p, n in zip(prompts, nexts, strict=True)]
    for _ in prompts:
        chain.cache.allocate()
    together = chain.step(prompts, all_logits=True)
    then = chain.step(nexts)
    for b, expected in enumerate(alone):
        found = np.concatenate([together[b], then[b]])
        np.testing.assert_allclose(found, expected, atol=1e-4)
    assert chain.cache.slots.lengths == [3, 6, 10]
    chain.cache.check()


def test_a_sequence_without_tokens_takes_no_part(chain: Chain) -> None:
    """Case 17: its one padded row is routed nowhere and not committed."""
    expected = run_alone(chain, IDS[:6])
    for _ in range(2):
        chain.cache.allocate()
    found = chain.step([[], IDS[:6]], all_logits=True)
    assert found[0].shape == (0, 258)
    np.testing.assert_allclose(found[1], expected, atol=1e-4)
    assert chain.cache.slots.lengths == [0, 6]


def test_an_empty_step_is_refused(chain: Chain) -> None:
    chain.cache.allocate()
    with pytest.raises(StepError, match="at least one token"):
        chain.step([[]])


def test_overflow_is_an_error_before_any_engine_runs(nano: Build) -> None:
    """Case 14, by the cache's capacity and by the profile's context."""
    chain = Chain.load(nano("fp32"), Profile(context=128), cache_rows=64, threads=1)
    spy = Tampering(chain.backend, lambda layer, outputs: None)
    chain.backend = spy
    chain.cache.allocate()
    chain.step([IDS[:60]])
    before, blocks = chain.cache.rows.copy(), spy.blocks
    with pytest.raises(CacheError, match=r"holds 64 rows a layer.* = 65"):
        chain.step([IDS[:5]])
    with pytest.raises(StepError, match=r"context: 134 asked for, the limit is 128 .*b8t128c128"):
        chain.step([IDS[:74]])
    assert spy.blocks == blocks
    np.testing.assert_array_equal(chain.cache.rows, before)
    assert chain.cache.slots.lengths == [60]


def test_a_step_beyond_the_profile_names_limit_engine_and_profile(nano: Build) -> None:
    """Case 20."""
    chain = Chain.load(nano("fp32"), Profile(batch=2, tokens=128, context=512), threads=1)
    for _ in range(3):
        chain.cache.allocate()
    with pytest.raises(StepError, match=r"tokens: 129 .* 128 \(engines dense and moe, profile b2t"):
        chain.step([IDS + IDS[:43]])
    with pytest.raises(StepError, match="batch: 3 asked for, the limit is 2"):
        chain.step([[1], [2], [3]])
    with pytest.raises(StepError, match=r"token 258: below vocab_size \(258\)"):
        chain.step([[258]])


def test_padding_that_is_nan_does_not_reach_a_neighbour(chain: Chain) -> None:
    """Case 18: lengths 3 and 9; NaN in the rows behind the shorter one is never committed."""
    expected = run_alone(chain, [*IDS[:9], 101])
    for _ in range(2):
        chain.cache.allocate()

    def poison(layer: int, outputs: dict[str, Array]) -> None:
        outputs["new"][0, 3:] = np.nan

    honest = chain.backend
    chain.backend = Tampering(honest, poison)
    found = chain.step([IDS[:3], IDS[:9]], all_logits=True)[1]
    chain.backend = honest
    last = chain.step([[101], [101]])[1]
    np.testing.assert_allclose(np.concatenate([found, last]), expected, atol=1e-4)
    chain.cache.check()


def test_nan_in_a_real_row_is_refused_and_a_retry_is_right(chain: Chain) -> None:
    expected = run_alone(chain, IDS[:9])
    handle = chain.cache.allocate()
    chain.step([IDS[:4]])
    before = chain.cache.rows.copy()

    def poison(layer: int, outputs: dict[str, Array]) -> None:
        if layer == 2:
            outputs["new"][0, 1, 7] = np.nan

    honest = chain.backend
    chain.backend = Tampering(honest, poison)
    with pytest.raises(CacheError, match=f"layer 2, sequence {handle}"):
        chain.step([IDS[4:9]])
    chain.backend = honest
    np.testing.assert_array_equal(chain.cache.rows, before)
    np.testing.assert_allclose(chain.step([IDS[4:9]])[0], expected[-1:], atol=1e-4)


def test_nan_behind_the_last_cached_row_is_refused_too(chain: Chain) -> None:
    """The last block's output reaches no cache row, only the logits."""
    chain.cache.allocate()

    def poison(layer: int, outputs: dict[str, Array]) -> None:
        if layer == chain.config.num_hidden_layers - 1:
            outputs["acc"][:] = np.nan

    chain.backend = Tampering(chain.backend, poison)
    with pytest.raises(StepError, match="sequence 1: logits hold NaN"):
        chain.step([IDS[:3]])
    assert chain.cache.slots.lengths == [0]


def test_several_sequences_are_bound_with_their_stride(nano: Build) -> None:
    chain = Chain.load(nano("fp32"), Profile(batch=2, tokens=256, context=96), cache_rows=512)
    for _ in range(2):
        chain.cache.allocate()
    with pytest.raises(StepError, match="context: 128 asked for, the limit is 96"):
        chain.step([[1], [*IDS[:64], 1]])
    assert chain.cache.slots.lengths == [0, 0]


def test_a_step_that_fails_midway_changes_nothing(chain: Chain) -> None:
    chain.cache.allocate()
    chain.step([IDS[:4]])
    before = chain.cache.rows.copy()

    def fail(layer: int, outputs: dict[str, Array]) -> None:
        if layer == 1:
            raise RuntimeError("planted")

    chain.backend = Tampering(chain.backend, fail)
    with pytest.raises(RuntimeError, match="planted"):
        chain.step([IDS[4:9]])
    np.testing.assert_array_equal(chain.cache.rows, before)
    assert chain.cache.slots.lengths == [4]


def test_generation_frees_its_sequence_however_it_ends(chain: Chain) -> None:
    tokens = generate(chain, IDS[:4], 10, Sampler())
    next(tokens)
    tokens.close()
    with pytest.raises(StepError, match="shorten the prompt"):
        next(generate(chain, IDS[:4], 5000, Sampler()))
    assert chain.cache.slots.handles == []


def test_every_expert_is_reachable(chain: Chain, checkpoint: Checkpoint) -> None:
    """Case 15: whatever the export's example chose, each expert computes its own output."""
    import torch

    reference = checkpoint.reference()
    layer, c = 2, chain.config
    h = np.random.default_rng(0).standard_normal((5, c.hidden_size)).astype(np.float32)
    for expert in range(c.n_routed_experts):
        chosen, weights = np.full((5, 1), expert), np.full((5, 1), 0.5, np.float32)
        groups = expert_slots(chosen, weights, np.ones(5, bool), chain.spec.slots)
        acc = np.zeros_like(h)
        out, _ = add_experts(chain.backend, layer, groups, h, acc, np.empty_like(acc))
        module = reference.get_submodule(f"model.layers.{layer}.mlp.experts.{expert}")
        expected = 0.5 * module(torch.from_numpy(h)).numpy()
        np.testing.assert_allclose(out, expected, atol=1e-5 * np.abs(expected).max())


def test_idle_slots_add_nothing_even_from_poisoned_rows(chain: Chain) -> None:
    """Case 17: a gate of 0 selects 0; it does not multiply."""
    c = chain.config
    h = np.zeros((2, c.hidden_size), np.float32)
    h[0] = np.nan
    acc = np.ones_like(h)
    chosen, weights = np.array([[0], [3]]), np.ones((2, 1), np.float32)
    groups = expert_slots(chosen, weights, np.array([False, True]), chain.spec.slots)
    out, _ = add_experts(chain.backend, 1, groups, h, acc, np.empty_like(acc))
    np.testing.assert_array_equal(out[0], 1.0)


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
        for m in np.flatnonzero(valid)
        for k in range(4)
    }
    assert found == expected


def test_the_mask_aligns_with_the_last_keys() -> None:
    """Case 11: 3 new tokens on 5 cached, in a stride of 8; query i sees keys 0 … 5+i."""
    mask = step_mask(np.array([5]), np.array([3]), S=3, L=8)[0, :, 0]
    seen = mask == 0
    assert seen[:5].all() and not seen[5:8].any()
    np.testing.assert_array_equal(seen[8:], np.triu(np.ones((3, 3), bool)))
    assert np.isfinite(mask).all()


def test_padding_sees_itself_only() -> None:
    mask = step_mask(np.array([2, 2]), np.array([1, 3]), S=3, L=4)[0, :, 0]
    np.testing.assert_array_equal(mask[:, 1] == 0, [0, 0, 0, 0, 0, 1, 0])
    np.testing.assert_array_equal(mask[:, 2] == 0, [0, 0, 0, 0, 0, 0, 1])


def test_a_strided_view_is_refused_by_the_binding() -> None:
    """Case 21."""
    view = np.zeros((2, 8, 4), np.float32)[:, :4]
    with pytest.raises(ValueError, match="contiguous"):
        ort_value(view)


def test_weights_and_cache_are_bound_where_they_lie(chain: Chain) -> None:
    """No copy: an OrtValue has the address of the mapped file, or of the cache's prefix."""
    chain.cache.allocate()
    chain.step([IDS[:5]])
    arrays = [*chain.weights.layers[1].tensors.values(), *chain.weights.rope.tensors.values()]
    arrays.append(chain.cache.context(3, 0, 1))
    for array in arrays:
        assert ort_value(array).data_ptr() == array.ctypes.data
    assert chain.cache.context(3, 0, 1).ctypes.data == chain.cache.rows[3].ctypes.data


def test_one_session_per_graph_serves_all_layers(chain: Chain) -> None:
    assert isinstance(chain.backend, OnnxRuntimeBackend)
    assert len(chain.backend.sessions) == 4
    assert len(chain.backend.layers) == chain.config.num_hidden_layers == 4
