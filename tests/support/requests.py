"""Requests of the tests, and what each gives when nothing else runs."""

from dataclasses import dataclass, field

from graphs.contract.tensorfile import Array
from runtime.serving.request import Completion, Request
from runtime.serving.sampling import Sampler
from runtime.serving.scheduler import Scheduler
from runtime.step.chain import Chain
from runtime.step.prefill import prefill

TEXT = (
    b"In the beginning God created the heaven and the earth. And the earth was without form, and "
    b"void; and darkness was upon the face of the deep. And the Spirit of God moved upon the face "
    b"of the waters. And God said, Let there be light: and there was light."
)


def prompt(start: int, length: int) -> tuple[int, ...]:
    return 256, *(TEXT + TEXT)[start : start + length - 1]


@dataclass
class Alone:
    """What a request gives when it is all that the chain runs: no scheduler, no other sequence."""

    tokens: list[int] = field(default_factory=list)
    logits: list[Array] = field(default_factory=list)


def run_alone(chain: Chain, request: Request) -> Alone:
    alone, handle = Alone(), chain.cache.allocate()
    sampler = Sampler(request.sampling, request.prompt)
    *_, last = prefill(chain, handle, request.prompt, chain.profile.tokens)
    while True:
        alone.logits.append(last[-1])
        alone.tokens.append(sampler(last[-1]))
        ended = alone.tokens[-1] in request.stop_ids
        if ended or len(alone.tokens) == request.max_new_tokens:
            break
        last = chain.step([alone.tokens[-1:]], chain.cache.slot(handle))[0]
    chain.cache.free(handle)
    return alone


REQUESTS = [Request(prompt(start, 20 + start), 8) for start in (0, 10, 25)]  # prompts of 20, 30, 45


def run(chain: Chain, requests: list[Request]) -> list[Completion]:
    scheduler = Scheduler(chain)
    tickets = [scheduler.submit(request) for request in requests]
    results = scheduler.run()
    chain.cache.check()
    assert chain.cache.handles == []
    return [results[ticket] for ticket in tickets]
