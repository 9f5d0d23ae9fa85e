"""Each filter by hand, all together against their definitions and against transformers'."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from graphs.contract.tensorfile import Array
from runtime.serving.sampling import SORTED_FIRST, Sampler, SamplingError, SamplingParams
from tests.support.sampling_margin import decide, margin

PROBABILITIES = (0.1, 0.4, 0.2, 0.3)


def logits_of(probabilities: Sequence[float]) -> Array:
    return np.log(np.array(probabilities, np.float32))


def draws(count: int, row: Array, seen: Sequence[int] = (), **params: Any) -> Array:
    """The first tokens of numbers that lie evenly in [0, 1), in place of random ones."""
    tokens = []
    for u in (np.arange(count) + 0.5) / count:
        sampler = Sampler(SamplingParams(**{"temperature": 1.0} | params), seen)
        sampler._generator = Fixed(u)  # type: ignore[assignment]
        tokens.append(sampler(row))
    return np.array(tokens)


class Fixed:
    """A generator of one number."""

    def __init__(self, number: float) -> None:
        self.number = number

    def random(self) -> float:
        return self.number


@pytest.mark.parametrize(
    ("name", "wrong", "right"),
    [
        ("temperature", [-0.1, 100.1, "1", None, 10**400], [0, 5e-324, 1, 100.0]),
        ("top_k", [-1, 1.0, "1", None], [0, 1, 10**400]),
        ("top_p", [0, 0.0, -1, 1.1, None], [1e-9, 0.5, 1]),
        ("min_p", [-0.1, 1.1, None], [0, 0.5, 1]),
        ("repetition_penalty", [0, -1, 0.009, 101, None], [0.01, 1, 1.3, 100]),
        ("seed", [-1, 2**64, 1.0, None], [0, 2**64 - 1]),
    ],
)
def test_settings_out_of_range_are_refused_by_name(
    name: str, wrong: list[Any], right: list[Any]
) -> None:
    for value in [*wrong, True, False, math.nan, math.inf, -math.inf]:
        expected = rf"^{name}: expected a .*number.*, got {value!r}$"
        with pytest.raises(SamplingError, match=expected):
            SamplingParams(**{name: value})
    for value in right:
        params = SamplingParams(**{"temperature": 1.0} | {name: value})
        assert 0 <= Sampler(params, [1])(logits_of(PROBABILITIES)) < 4


def test_sampling_is_seeded_and_follows_the_softmax() -> None:
    logits = logits_of([0.1, 0.6, 0.3])
    one = SamplingParams(temperature=1.0, seed=7)
    tokens = [Sampler(SamplingParams(temperature=1.0, seed=seed))(logits) for seed in range(2000)]
    assert np.bincount(tokens) / 2000 == pytest.approx([0.1, 0.6, 0.3], abs=0.04)
    first, second, other = (Sampler(p) for p in (one, one, SamplingParams(1.0, seed=8)))
    runs = [[sampler(logits) for _ in range(20)] for sampler in (first, second, other)]
    assert runs[0] == runs[1] != runs[2]
    cold = [SamplingParams(temperature=1e-3, seed=seed) for seed in range(50)]
    assert {Sampler(params)(logits) for params in cold} == {1}


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({}, [0.1, 0.4, 0.2, 0.3]),
        ({"temperature": 0.5}, np.array([1, 16, 4, 9]) / 30),
        ({"top_k": 2}, np.array([0, 4, 0, 3]) / 7),
        ({"top_k": 4}, [0.1, 0.4, 0.2, 0.3]),
        ({"top_k": 5}, [0.1, 0.4, 0.2, 0.3]),
        ({"top_p": 0.39}, [0, 1, 0, 0]),
        ({"top_p": 0.41}, np.array([0, 4, 0, 3]) / 7),
        ({"top_p": 0.71}, np.array([0, 4, 2, 3]) / 9),
        ({"top_p": 0.91}, [0.1, 0.4, 0.2, 0.3]),
        ({"min_p": 0.49}, np.array([0, 4, 2, 3]) / 9),
        ({"min_p": 0.51}, np.array([0, 4, 0, 3]) / 7),
        ({"min_p": 1}, [0, 1, 0, 0]),
        # of temperature 0.5, whose largest is 16/30; and not of temperature 1
        ({"temperature": 0.5, "top_p": 0.5}, [0, 1, 0, 0]),
        ({"temperature": 0.5, "min_p": 0.5}, np.array([0, 16, 0, 9]) / 25),
        # of what top-k left, whose largest is 4/7
        ({"top_k": 2, "top_p": 0.55}, [0, 1, 0, 0]),
        # of all, and not of what min-p leaves
        ({"top_p": 0.55, "min_p": 0.6}, np.array([0, 4, 0, 3]) / 7),
    ],
)
def test_filters_by_hand(params: dict[str, Any], expected: Sequence[float]) -> None:
    tokens = draws(1000, logits_of(PROBABILITIES), **params)
    assert np.bincount(tokens, minlength=4) / 1000 == pytest.approx(expected, abs=1.1e-3)


@pytest.mark.parametrize("seen", [(0, 1, 4), (1, 0, 1, 4, 0, 0)])
def test_the_penalty_divides_positive_logits_and_multiplies_negative(seen: Sequence[int]) -> None:
    """Once, however often a token was seen."""
    tokens = draws(1000, np.array([2, -2, 1, -1, 0], np.float32), seen, repetition_penalty=2.0)
    expected = np.exp([1, -4, 1, -1, 0])
    frequencies = np.bincount(tokens, minlength=5) / 1000
    assert frequencies == pytest.approx(expected / expected.sum(), abs=1.1e-3)


def test_a_sampler_penalises_what_it_chose() -> None:
    sampler = Sampler(SamplingParams(repetition_penalty=2.0))
    logits = np.array([3, 2, 1.4, -5], np.float32)
    assert [sampler(logits) for _ in range(4)] == [0, 1, 0, 0]


def test_of_equals_the_lower_id_goes_first() -> None:
    equal = np.array([0, 1, 1, 1, 1], np.float32)
    assert set(draws(64, equal, temperature=0)) == {1}
    assert set(draws(64, equal, top_k=1)) == {1}
    assert set(draws(64, equal, top_k=3)) == {1, 2, 3}
    assert set(draws(64, equal[1:], top_p=0.5)) == {0, 1}
    assert set(draws(64, equal, min_p=1)) == {1, 2, 3, 4}


@pytest.mark.filterwarnings("error")
def test_neither_the_tiniest_temperature_nor_the_largest_logits_overflow() -> None:
    largest = np.finfo(np.float32).max
    logits = np.array([-largest, largest, largest, 0], np.float32)
    assert set(draws(64, logits, temperature=5e-324)) == {1, 2}
    assert set(draws(64, logits, [0, 1, 2], repetition_penalty=100.0)) == {1, 2}
    assert set(draws(64, logits, [0, 1, 2], repetition_penalty=0.01, top_p=0.5)) == {1}


def test_what_has_no_probability_is_never_drawn() -> None:
    sampler = Sampler(SamplingParams(1.0))
    sampler._generator = Fixed(0.0)  # type: ignore[assignment]
    assert sampler(np.array([-1000, 0, 0], np.float32)) == 1


@pytest.mark.parametrize("planted", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_are_refused_and_nothing_is_drawn(
    planted: float, temperature: float
) -> None:
    params = SamplingParams(temperature, repetition_penalty=1.5, seed=3)
    sampler, untouched = Sampler(params, [0]), Sampler(params, [0])
    logits = np.linspace(-1, 1, 50, dtype=np.float32)
    damaged = logits.copy()
    damaged[[7, 9]] = planted
    with pytest.raises(
        SamplingError, match=rf"^logits: expected finite values, got {planted} for id 7$"
    ):
        sampler(damaged)
    assert [sampler(logits) for _ in range(9)] == [untouched(logits) for _ in range(9)]


def settings_of_all_kinds() -> st.SearchStrategy[SamplingParams]:
    return st.builds(
        SamplingParams,
        temperature=st.sampled_from([0.0, 0.3, 1.0, 1.0, 1.7]),
        top_k=st.integers(0, 12),
        top_p=st.floats(0.05, 1),
        min_p=st.sampled_from([0.0, 0.0, 0.03, 0.2, 0.9]),
        repetition_penalty=st.sampled_from([1.0, 0.7, 1.2, 3.0]),
        seed=st.integers(0, 1000),
    )


LOGITS = st.lists(st.floats(-8, 8, width=32), min_size=1, max_size=30, unique=True)


@settings(max_examples=300, deadline=None)
@given(params=settings_of_all_kinds(), logits=LOGITS, data=st.data())
def test_all_settings_together_follow_their_definitions(
    params: SamplingParams, logits: list[float], data: st.DataObject
) -> None:
    """Token by token, one number drawn for each, and all that came before in mind."""
    seen = data.draw(st.lists(st.integers(0, len(logits) - 1), max_size=5))
    sampler, row = Sampler(params, seen), np.array(logits, np.float32)
    for u in np.random.default_rng(params.seed).random(4):
        expected, near = decide(params, seen, row, u)
        token = sampler(row)
        assert token == expected or near < 1e-12, near
        seen.append(token)
        row = np.roll(row, 1)


@pytest.mark.parametrize("width", [0.01, 1.0, 6.0])
@pytest.mark.parametrize(
    "params", [{"top_p": 0.9}, {"top_p": 0.999}, {"top_k": 2000, "top_p": 0.5}, {"min_p": 0.01}]
)
def test_a_large_vocabulary_gives_the_same(width: float, params: dict[str, float]) -> None:
    """Flat, so that top-p needs more than what is sorted first; and peaked."""
    logits = np.random.default_rng(0).normal(0, width, 3 * SORTED_FIRST).astype(np.float32)
    for seed in range(5):
        chosen = SamplingParams(temperature=1.0, seed=seed, **params)  # type: ignore[arg-type]
        u = np.random.default_rng(seed).random()
        assert Sampler(chosen)(logits) == decide(chosen, [], logits, u)[0]


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.7},
        {"top_k": 12},
        {"top_p": 0.8},
        {"min_p": 0.1},
        {"repetition_penalty": 1.4},
        {"temperature": 1.3, "top_k": 40, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 0.8},
    ],
    ids=" ".join,
)
def test_filters_equal_those_of_transformers(params: dict[str, Any]) -> None:
    from transformers.generation.logits_process import (
        LogitsProcessorList,
        MinPLogitsWarper,
        RepetitionPenaltyLogitsProcessor,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    makers = {
        "repetition_penalty": RepetitionPenaltyLogitsProcessor,
        "temperature": TemperatureLogitsWarper,
        "top_k": TopKLogitsWarper,
        "top_p": TopPLogitsWarper,
        "min_p": MinPLogitsWarper,
    }
    process = LogitsProcessorList(make(params[n]) for n, make in makers.items() if n in params)
    for seed in range(40):
        generator = np.random.default_rng([seed, 1])
        logits = generator.normal(0, 2, 300).astype(np.float32)
        seen = np.argsort(logits)[-20:]
        scores = process(torch.tensor(seen)[None], torch.tensor(logits, dtype=torch.double)[None])
        cumulative = scores[0].softmax(0).cumsum(0).numpy()
        expected = np.searchsorted(cumulative, np.random.default_rng(seed).random())
        chosen = SamplingParams(**{"temperature": 1.0} | params, seed=seed)
        assert Sampler(chosen, seen.tolist())(logits) == expected


@pytest.mark.parametrize(
    ("params", "u", "expected"),
    [
        ({}, 0.35, 0.15),  # of 0.1, 0.5, 0.7
        ({"top_k": 2}, 0.1, math.log(3 / 2)),
        ({"top_k": 2}, 0.5, 4 / 7 - 0.5),
        ({"top_k": 4}, 0.1 + 1e-4, 1e-4),
        ({"top_p": 0.65}, 0.2, 0.05),  # of 0.4, 0.7, 0.9
        ({"top_p": 0.98}, 0.25, 0.08),
        ({"min_p": 0.7}, 0.2, 0.3 - 0.28),
        ({"min_p": 0.95}, 0.2, 0.38 - 0.3),
        ({"temperature": 0}, 0.1, math.log(4 / 3)),
        ({"top_k": 1}, 0.1, math.log(4 / 3)),
    ],
)
def test_margin_by_hand(params: dict[str, Any], u: float, expected: float) -> None:
    chosen = SamplingParams(**{"temperature": 1.0} | params)
    assert margin(chosen, [], logits_of(PROBABILITIES), u) == pytest.approx(expected, abs=1e-6)


def test_margin_of_ties_penalties_and_no_choice() -> None:
    greedy, nucleus = SamplingParams(), SamplingParams(1.0, top_p=0.5)
    assert margin(nucleus, [], logits_of([0.25, 0.375, 0.25, 0.125]), 0.1) == 0
    assert margin(greedy, [0], np.array([1.0, 1.0, -3.0]), 0.5) == 0
    halved = SamplingParams(repetition_penalty=2.0)
    assert margin(halved, [1], np.array([1.0, 5.0, -3.0]), 0.5) == 1.5
    assert margin(greedy, [], np.array([1.0]), 0.5) == math.inf
    assert margin(SamplingParams(1.0), [], np.array([1.0]), 0.5) == math.inf


@settings(max_examples=300, deadline=None)
@given(params=settings_of_all_kinds(), logits=LOGITS, noise=st.integers(0, 2**32))
def test_logits_that_move_by_less_than_the_margin_change_nothing(
    params: SamplingParams, logits: list[float], noise: int
) -> None:
    """Less by what penalty and temperature make of it, and the exponential on both sides."""
    row, seen = np.array(logits), [0, len(logits) // 2]
    u = np.random.default_rng(params.seed).random()
    token, near = decide(params, seen, row, u)
    stretch = max(params.repetition_penalty, 1 / params.repetition_penalty) / 0.3
    shift = np.random.default_rng(noise).choice([-1, 1], len(logits))
    moved = row + shift * min(near, 0.5) / (8 * stretch)
    assert decide(params, seen, moved, u)[0] == token
    assert near < 1e-9 or Sampler(params, seen)(moved) == token
