"""Continuous batching: every request as if it ran alone, in fair order, within its budgets."""

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from graphs.contract.manifest import Profile
from graphs.contract.tensorfile import Array
from runtime.cache.errors import CacheFullError
from runtime.serving.request import Completion, Request, RequestError, Update
from runtime.serving.running import CallbackError
from runtime.serving.sampling import SamplingParams
from runtime.serving.scheduler import Scheduler, largest_chunk
from runtime.step.chain import StepError
from runtime.tokenizers.base import byte_tokenizer
from tests.support.builds import OpenChain
from tests.support.requests import TEXT, Alone, prompt, run_alone
from tests.support.sampling_margin import margin

CLOSE = 1e-4  # of logits, and of what decides between two tokens


class Recording(Scheduler):
    """Keeps the logits that each token was chosen from, and the steps' groups."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.logits: dict[int, list[Array]] = {}
        self.taken: list[list[int]] = []  # of each step, the tokens of its groups

    def submit(self, *arguments: Any) -> int:
        ticket = super().submit(*arguments)
        item = self.waiting[-1]
        kept, sample = self.logits.setdefault(ticket, []), item.sampler

        def record(row: Array) -> int:
            kept.append(row)
            return sample(row)

        item.sampler = record  # type: ignore[assignment]
        return ticket

    def step(self) -> dict[int, Completion]:
        self.taken.append([])
        return super().step()

    def _run(self, group: range, work: Any) -> None:
        served = [work[s][1] for s in group if s in work]
        self.taken[-1].append(sum(map(len, served)) if len(group) == 1 else len(served))
        super()._run(group, work)


def near_ties(request: Request, done: Completion, logits: Sequence[Array], alone: Alone) -> int:
    """1 where the tokens part at a choice that was near another; raises where they part at none."""
    pairs = zip(done.tokens, alone.tokens, strict=False)
    same = next((i for i, (a, b) in enumerate(pairs) if a != b), len(done.tokens))
    for row, expected in zip(logits[: same + 1], alone.logits, strict=False):
        np.testing.assert_allclose(row, expected, atol=CLOSE, rtol=0)
    if same == len(done.tokens):
        assert done.reason == "cancelled" or done.tokens == tuple(alone.tokens)
        return 0
    draws = np.random.default_rng(request.sampling.seed).random(same + 1)
    seen = (*request.prompt, *alone.tokens[:same])
    near = margin(request.sampling, seen, alone.logits[same], float(draws[same]))
    assert near <= CLOSE, f"token {same}: {done.tokens[same]} for {alone.tokens[same]}, {near:.1e}"
    return 1


def random_requests(generator: np.random.Generator, count: int) -> list[Request]:
    samplings = [
        SamplingParams(),
        SamplingParams(temperature=0.8, top_k=12),
        SamplingParams(temperature=1.0, top_p=0.9, repetition_penalty=1.2),
        SamplingParams(temperature=1.3, min_p=0.05),
    ]
    requests = []
    for index in range(count):
        sampling = samplings[index % len(samplings)]
        params = {**vars(sampling), "seed": int(generator.integers(1000))}
        start, length = 30 * int(generator.integers(3)), int(generator.integers(1, 120))
        new = int(generator.integers(1, 16))
        requests.append(Request(prompt(start, length), new, SamplingParams(**params)))
    return requests


@pytest.mark.parametrize("seed", range(2))
def test_requests_equal_their_own_runs_whatever_ran_beside_them(
    open_chain: OpenChain, seed: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Random arrivals, lengths, samplings and cancellations; prefixes are shared, and reused."""
    generator = np.random.default_rng(seed)
    chain = open_chain(profile=Profile(batch=4, tokens=32, context=512), cache=2048)
    requests = random_requests(generator, 12)
    scheduler, tickets = Recording(chain), {}
    results: dict[int, Completion] = {}
    waiting = list(requests)
    cancelled = 0
    while waiting or scheduler.busy:
        for _ in range(int(generator.integers(0, 3))):
            if waiting:
                request = waiting.pop(0)
                tickets[scheduler.submit(request)] = request
        if tickets and generator.random() < 0.1:
            scheduler.cancel(int(generator.choice(list(tickets))))
        results |= scheduler.step()
        chain.cache.check()
        assert len(chain.cache.handles) * chain.cache.stride <= 2048
    assert sorted(results) == sorted(tickets)
    ties = 0
    for ticket, request in tickets.items():
        done = results[ticket]
        assert done.error is None
        cancelled += done.reason == "cancelled"
        alone = run_alone(chain, request)
        ties += near_ties(request, done, scheduler.logits.get(ticket, []), alone)
    assert chain.cache.handles == [] and cancelled < len(requests)
    assert any(result.reused > 16 for result in results.values())
    with capsys.disabled():
        print(f"[{ties} of {len(requests)} requests parted at a choice within {CLOSE:g}]", end=" ")


def test_a_differing_token_that_was_not_near_is_found(open_chain: OpenChain) -> None:
    chain = open_chain(cache=512)
    request = Request(prompt(0, 20), 5)
    alone = run_alone(chain, request)
    wrong = list(alone.tokens)
    wrong[2] = (wrong[2] + 1) % 256
    done = Completion(request.prompt, tuple(wrong), None, "length")
    with pytest.raises(AssertionError, match="token 2"):
        near_ties(request, done, alone.logits, alone)
    off = [logits + np.float32(1e-3) for logits in alone.logits]
    right = Completion(request.prompt, tuple(alone.tokens), None, "length")
    with pytest.raises(AssertionError, match="Not equal"):
        near_ties(request, right, off, alone)


def test_prefills_and_decodes_share_steps_within_the_token_budget(open_chain: OpenChain) -> None:
    chain = open_chain(profile=Profile(batch=4, tokens=32, context=512), cache=2048)
    scheduler = Recording(chain, token_budget=20)
    for start in range(3):
        scheduler.submit(Request(prompt(start, 90), 8))
    scheduler.run()
    assert all(sum(groups) <= 20 for groups in scheduler.taken)
    mixed = [groups for groups in scheduler.taken if len(groups) > 1]
    assert mixed, "no step ran a decode beside a prefill"
    assert max(map(max, scheduler.taken)) == 20


def test_the_scratch_budget_sets_the_chunk(open_chain: OpenChain) -> None:
    """tokens × keys × heads × 3 buffers × 4 bytes stays below it, also late in a long prompt."""
    chain = open_chain(profile=Profile(batch=4, tokens=64, context=512), cache=512)
    budget = 3 * 4 * chain.config.num_attention_heads * 64 * 100
    scheduler = Recording(chain, scratch_bytes=budget)
    scheduler.submit(Request(prompt(0, 300), 1))
    scheduler.run()
    chunks = [groups[0] for groups in scheduler.taken]
    done = list(itertools.accumulate(chunks))
    assert done[-1] == 300 and chunks[0] > chunks[-2]
    for chunk, total in zip(chunks, done, strict=True):
        assert chunk * total <= 6400
        assert (chunk + 1) * (total + 1) > 6400 or total == 300 or chunk == 64


def test_largest_chunk_is_the_largest() -> None:
    for cached, scores in itertools.product((0, 1, 17, 1000), (1, 2, 63, 64, 100_000)):
        size = largest_chunk(cached, scores)
        assert size * (cached + size) <= scores or size == 1
        assert (size + 1) * (cached + size + 1) > scores


def test_order_of_arrival_is_the_order_of_admission(open_chain: OpenChain) -> None:
    """A large request waits for room and is not overtaken by a small one behind it."""
    chain = open_chain(profile=Profile(batch=4, tokens=32, context=512), cache=512)
    scheduler = Scheduler(chain)
    first = scheduler.submit(Request(prompt(0, 40), 8))
    large = scheduler.submit(Request(prompt(0, 250), 20))
    small = scheduler.submit(Request(prompt(9, 5), 2))
    order: list[int] = []
    while scheduler.busy:
        order += scheduler.step()
    assert order.index(first) < order.index(large)
    assert order.index(first) < order.index(small)
    admitted_together = chain.cache.stats.rows_peak
    assert admitted_together <= 512
    assert order == [first, large, small]


def test_prefills_take_turns(open_chain: OpenChain) -> None:
    chain = open_chain(profile=Profile(batch=4, tokens=16, context=512), cache=2048)
    scheduler = Scheduler(chain, token_budget=16)
    long = scheduler.submit(Request(prompt(0, 250), 1))
    short = scheduler.submit(Request(prompt(50, 20), 1))
    order: list[int] = []
    while scheduler.busy:
        order += scheduler.step()
    assert order == [short, long]


def test_one_long_beside_many_short_is_deferred(open_chain: OpenChain) -> None:
    """Case 19: 1 of 500 beside 15 of 10; together they would take 16 × 512 rows."""
    chain = open_chain(profile=Profile(batch=8, tokens=64, context=512), cache=2048)
    scheduler = Scheduler(chain)
    tickets = [scheduler.submit(Request(prompt(start, 8), 3)) for start in range(15)]
    tickets.append(scheduler.submit(Request(prompt(0, 480), 20)))
    most, results = 0, dict[int, Completion]()
    while scheduler.busy:
        results |= scheduler.step()
        most = max(most, len(chain.cache.handles) * chain.cache.stride)
    assert sorted(results) == sorted(tickets) and most <= 2048
    assert all(result.error is None for result in results.values())
    with pytest.raises(CacheFullError, match=r"16 × 512 = 8192"):
        chain.cache.require([10] * 15 + [500])


def test_what_can_never_run_is_refused_at_once(open_chain: OpenChain) -> None:
    chain = open_chain(profile=Profile(batch=2, tokens=32, context=256), cache=128)
    scheduler = Scheduler(chain)
    with pytest.raises(CacheFullError, match="128"):
        scheduler.submit(Request(prompt(0, 100), 100))
    with pytest.raises(StepError, match="context: expected at most 256, got 299"):
        scheduler.submit(Request(prompt(0, 100), 200))
    with pytest.raises(StepError, match="token 999"):
        scheduler.submit(Request((1, 999)))
    with pytest.raises(RequestError, match="at least one token"):
        scheduler.submit(Request(()))
    with pytest.raises(RequestError, match="stop strings: expected a tokenizer"):
        scheduler.submit(Request((1,), stop_strings=("x",)))
    assert not scheduler.busy


def test_updates_stream_tokens_and_text_and_stop_strings_end_it(open_chain: OpenChain) -> None:
    chain = open_chain(cache=512)
    tokenizer = byte_tokenizer(chain.config)
    request = Request(prompt(0, 40), 30)
    whole = bytes(run_alone(chain, request).tokens).decode()
    stop = whole[9:12]
    updates: list[Update] = []
    scheduler = Scheduler(chain, tokenizer)
    ticket = scheduler.submit(Request(request.prompt, 30, stop_strings=(stop,)), updates.append)
    done = scheduler.run()[ticket]
    assert done.reason == "stop" and done.text == whole[: whole.index(stop)]
    assert "".join(u.text for u in updates) == done.text
    assert tuple(u.token for u in updates) == done.tokens
    unstopped = scheduler.submit(Request(request.prompt, 30, stop_strings=("\0",)))
    assert scheduler.run()[unstopped].text == whole


def test_a_stop_id_ends_the_text_and_is_its_last_token(open_chain: OpenChain) -> None:
    chain = open_chain(cache=512)
    request = Request(prompt(0, 40), 30)
    tokens = run_alone(chain, request).tokens
    stop = tokens[5]
    scheduler = Scheduler(chain)
    ticket = scheduler.submit(Request(request.prompt, 30, stop_ids=frozenset({stop})))
    done = scheduler.run()[ticket]
    assert done.reason == "stop" and list(done.tokens) == tokens[: tokens.index(stop) + 1]


def test_a_callback_may_cancel_and_submit(open_chain: OpenChain) -> None:
    chain = open_chain(cache=1024)
    scheduler, more = Scheduler(chain), list[int]()

    def third_token_is_enough(update: Update) -> None:
        seen.append(update.token)
        if len(seen) == 3:
            scheduler.cancel(ticket)
            more.append(scheduler.submit(Request(prompt(3, 9), 2)))

    seen: list[int] = []
    ticket = scheduler.submit(Request(prompt(0, 20), 50), third_token_is_enough)
    results = scheduler.run()
    assert results[ticket].reason == "cancelled" and len(results[ticket].tokens) == 3
    assert len(results[more[0]].tokens) == 2
    assert chain.cache.handles == []


def test_cancelling_frees_the_rows_at_once(open_chain: OpenChain) -> None:
    chain = open_chain(cache=1024)
    scheduler = Scheduler(chain)
    running, waiting = (scheduler.submit(Request(prompt(0, 20), 9)) for _ in range(2))
    scheduler.step()
    for ticket in (running, waiting, 12345):
        scheduler.cancel(ticket)
    assert chain.cache.handles == [] and not scheduler.busy
    assert {t: r.reason for t, r in scheduler.step().items()} == {
        running: "cancelled",
        waiting: "cancelled",
    }


def test_a_callback_that_raises_ends_its_own_request(open_chain: OpenChain) -> None:
    chain = open_chain(cache=1024)
    requests = [Request(prompt(start, 20), 6) for start in (0, 50)]
    expected = [run_alone(chain, request).tokens for request in requests]
    scheduler = Scheduler(chain)

    def fail(update: Update) -> None:
        raise KeyError("planted")

    bad = scheduler.submit(requests[0], fail)
    good = scheduler.submit(requests[1])
    results = scheduler.run()
    error = results[bad].error
    assert isinstance(error, CallbackError) and isinstance(error.__cause__, KeyError)
    assert results[bad].reason == "error" and len(results[bad].tokens) == 1
    assert list(results[good].tokens) == expected[1]
    again = scheduler.submit(requests[0])
    assert list(scheduler.run()[again].tokens) == expected[0]
    chain.cache.check()


def test_a_prompt_that_was_seen_is_not_computed_again(open_chain: OpenChain) -> None:
    chain = open_chain(cache=1024)
    scheduler = Recording(chain)
    request = Request(prompt(0, 100), 6)
    first = scheduler.submit(request)
    expected = scheduler.run()[first]
    scheduler.taken.clear()
    longer = Request((*request.prompt, *expected.tokens[:-1], *TEXT[:7]), 4)
    second = scheduler.submit(longer)
    done = scheduler.run()[second]
    assert expected.reused == 0 and done.reused == 105
    assert scheduler.taken[0] == [7]
    assert list(done.tokens) == run_alone(chain, longer).tokens
    assert chain.cache.stats.prefix_hits == 1
