"""Continuous batching: requests join and leave between steps of one chain.

A step runs in groups of contiguous slots. Decodes go together, in groups as wide as the profile's
batch; a slot in between that brings no token costs one padded row, less than a second run over all
weights. Each prefill is a group of its own, in chunks: at most what the profile takes, what is left
of the step's token budget, and what keeps the scores of attention within the scratch budget.

A request is admitted, in the order of arrival, when the cache holds it *and* all that run, each as
long as it may become; so nothing that runs is ever evicted, and one that waits is never overtaken.
Within a step, decodes come before prefills, and of each the one that was served longest ago first.

A failure stays where it belongs. A row or logit that is not finite ends the request it is of. A
group whose run failed is run again one sequence at a time, since the cache is as it was, and those
that fail alone end with the error. A callback that raises ends its own request.
"""

import logging
import math
from collections import deque

from runtime.backends import BackendError
from runtime.cache.errors import CacheError, CacheFullError, NonFiniteError
from runtime.cache.strides import stride_for
from runtime.devices.base import DeviceError
from runtime.serving.request import Completion, OnUpdate, Request, RequestError
from runtime.serving.running import RunningRequest
from runtime.serving.sampling import Sampler, SamplingError
from runtime.serving.text import TextStream
from runtime.step.chain import Chain, LogitsError, StepError, require_ids
from runtime.tokenizers.base import Tokenizer

log = logging.getLogger(__name__)

SCRATCH_BYTES = 2 * 2**30
SCORE_BUFFERS = 3  # of tokens × keys × heads, in a prefill (graphs/engines/activation_budget.py)

# Errors of a step that leave the cache and the other requests as they were.
FAILURES = (BackendError, StepError, CacheError, DeviceError, SamplingError, MemoryError)


_Work = dict[int, tuple[RunningRequest, list[int]]]  # by cache slot: a request, its ids to run


class Scheduler:
    """See the module's docstring. Not thread-safe; callbacks may submit and cancel."""

    def __init__(
        self,
        chain: Chain,
        tokenizer: Tokenizer | None = None,
        token_budget: int | None = None,
        scratch_bytes: int = SCRATCH_BYTES,
    ) -> None:
        """`token_budget` bounds a step's tokens, by default to one full prefill and one decode.

        `scratch_bytes` bounds a prefill's scores. Raises RequestError.
        """
        self.chain, self.tokenizer, self.scratch_bytes = chain, tokenizer, scratch_bytes
        self.token_budget = token_budget or chain.profile.tokens + chain.profile.batch
        if self.token_budget < 1 or scratch_bytes < 1:
            raise RequestError(
                f"token_budget, scratch_bytes: expected at least 1, got {token_budget}, "
                f"{scratch_bytes}"
            )
        self.waiting: deque[RunningRequest] = deque()
        self.running: list[RunningRequest] = []
        self.steps = 0
        self._issued = 0
        self._stepping = False
        self._ended: dict[int, Completion] = {}  # what the next step returns

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.running)

    def submit(self, request: Request, on_update: OnUpdate | None = None) -> int:
        """Queue a request; returns the ticket of its result. Nothing runs yet.

        Raises StepError or CacheFullError where model, engines or cache could never hold it,
        RequestError or SamplingError where it makes no sense.
        """
        self._require(request)
        self._issued += 1
        stream = TextStream(self.tokenizer, request.stop_strings)
        sampler = Sampler(request.sampling, request.prompt)
        self.waiting.append(
            RunningRequest(self._issued, request, sampler, stream, on_update, list(request.prompt))
        )
        return self._issued

    def cancel(self, ticket: int) -> None:
        """End a request with the tokens it has; does nothing where it has ended already."""
        for item in (*self.waiting, *self.running):
            if item.ticket == ticket:
                item.end("cancelled")
        if not self._stepping:
            self._retire()

    def step(self) -> dict[int, Completion]:
        """Admit, run one step of everything that runs, and return what has ended, by ticket."""
        self._stepping = True
        try:
            self._retire()
            self._admit()
            self.steps += 1
            work = self._plan()
            for group in self._groups(work):
                self._run(group, work)
            self._retire()
        finally:
            self._stepping = False
        ended, self._ended = self._ended, {}
        return ended

    def run(self) -> dict[int, Completion]:
        """Step until no request is left; returns every result by ticket."""
        results: dict[int, Completion] = {}
        while self.busy:
            results |= self.step()
        return results

    def close(self) -> None:
        """Drop all requests and free their rows, whatever state an interrupted step left."""
        for item in self.running:
            self.chain.cache.free(item.handle)
        self.running.clear()
        self.waiting.clear()

    def _require(self, request: Request) -> None:
        chain, rows = self.chain, request.final_rows
        require_ids(request.prompt, chain.config.vocab_size)
        chain.require_length(rows)
        chain.cache.require([rows])

    def _admit(self) -> None:
        cache = self.chain.cache
        while self.waiting:
            item = self.waiting[0]
            finals = [running.request.final_rows for running in self.running]
            try:
                cache.require([*finals, item.request.final_rows])
            except CacheFullError:
                return  # until others have ended: alone it fits, as submit made sure
            item.handle = cache.allocate(item.request.prompt)
            item.reused = cache.length(item.handle)
            item.pending = list(item.request.prompt[item.reused :])
            self.running.append(self.waiting.popleft())

    def _plan(self) -> _Work:
        """The requests that this step serves, by cache slot, each with the ids that it runs."""
        budget = self.token_budget
        work: _Work = {}
        in_turn = sorted(self.running, key=lambda r: (len(r.pending) > 1, r.served, r.ticket))
        for item in in_turn:
            chunk = self._chunk(self.chain.cache.length(item.handle))
            count = min(len(item.pending), budget, chunk)
            if count:
                budget -= count
                item.served = self.steps
                work[self.chain.cache.slot(item.handle)] = item, item.pending[:count]
        return work

    def _chunk(self, cached: int) -> int:
        """The most tokens of a prefill on `cached` rows."""
        config, item = self.chain.config, self.chain.activation.itemsize
        widened = 4 if self.chain.device.kind == "cpu" else item
        per_score = SCORE_BUFFERS * config.num_attention_heads * widened
        return min(
            self.chain.profile.tokens, largest_chunk(cached, self.scratch_bytes // per_score)
        )

    def _groups(self, work: _Work) -> list[range]:
        """Ranges of cache slots to run, decodes first."""
        decodes = sorted(slot for slot, (_, ids) in work.items() if len(ids) == 1)
        prefills = [range(slot, slot + 1) for slot, (_, ids) in work.items() if len(ids) > 1]
        cells: dict[int, list[int]] = {}
        for slot in decodes:
            cells.setdefault(slot // self.chain.profile.batch, []).append(slot)
        spans = [range(cell[0], cell[-1] + 1) for cell in cells.values()]
        if self._stride(work) > self.chain.profile.context:
            spans = [range(slot, slot + 1) for slot in decodes]  # each bound with its own length
        return [*spans, *prefills]

    def _stride(self, work: _Work) -> int:
        """The cache's stride once it holds this step's rows."""
        lengths = self.chain.cache.lengths
        longest = max((lengths[slot] + len(ids) for slot, (_, ids) in work.items()), default=0)
        return max(self.chain.cache.stride, stride_for(longest))

    def _run(self, group: range, work: _Work) -> None:
        """Run one group; where it fails as a whole, run its sequences one by one."""
        decode = len(group) > 1
        served = [s for s in group if s in work and (not decode or len(work[s][1]) == 1)]
        tokens = [work[s][1] if s in served else [] for s in group]
        try:
            logits = self.chain.step(tokens, group.start)
        except (NonFiniteError, LogitsError) as e:
            for slot in served:
                if work[slot][0].handle == e.handle:
                    work[slot][0].end("error", e)
        except FAILURES as e:
            if len(served) == 1:
                work[served[0]][0].end("error", e)
                return
            log.warning("%d sequences failed together, now each alone: %s", len(served), e)
            for slot in served:
                self._run(range(slot, slot + 1), work)
        else:
            for slot in served:
                item, ids = work[slot]
                item.advance(len(ids), logits[slot - group.start][-1])

    def _retire(self) -> None:
        """Free ended requests; rows of those without an error stay for later prompts."""
        for item in [r for r in self.running if r.ended]:
            self.chain.cache.free(item.handle, keep=item.ended != "error")
            self.running.remove(item)
            self._ended[item.ticket] = item.completion()
        for item in [w for w in self.waiting if w.ended]:
            self.waiting.remove(item)
            self._ended[item.ticket] = item.completion()


def largest_chunk(cached: int, scores: int) -> int:
    """The most new tokens S on L = `cached` rows with S · (L + S) ≤ scores; at least one."""
    return max(1, (math.isqrt(cached * cached + 4 * scores) - cached) // 2)
