"""The Python interface, and the README's example of it."""

import contextlib
import io
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from graphs.contract.spec import BuildError
from runtime import LLM, SamplingParams
from runtime.evaluate import evaluate
from runtime.serving.request import Request, RequestError
from runtime.step.chain import StepError
from runtime.tokenizers.chat import Message
from tests.support.builds import Build, OpenChain
from tests.support.requests import prompt, run_alone

README = Path(__file__).parents[2] / "README.md"


@pytest.fixture
def llm(open_chain: OpenChain, nano: Build) -> LLM:
    return LLM(nano("fp32"), open_chain())


def test_the_example_of_the_readme(nano: Build) -> None:
    (example,) = re.findall(r"```python\n(from runtime import.*?)```", README.read_text(), re.S)
    assert "build/k2-nano/fp8" in example and len(example.splitlines()) <= 12
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(example.replace("build/k2-nano/fp8", str(nano("fp8"))), {})
    lines = printed.getvalue().splitlines()
    assert len(lines) >= 4 and float(lines[-1]) > 0


def test_generate_answers_every_prompt_in_order(llm: LLM) -> None:
    prompts: list[str | Sequence[int]] = ["And it came to pass", prompt(0, 30), "In the beginning"]
    results = llm.generate(prompts, max_new_tokens=6)
    assert llm.encoder.tokenizer is not None
    for given, done in zip(prompts, results, strict=True):
        ids = llm.encoder.tokenizer.encode(given) if isinstance(given, str) else given
        expected = run_alone(llm.chain, Request(tuple(ids), 6)).tokens
        assert list(done.tokens) == expected and done.text == bytes(expected).decode()
        assert (done.reason, done.prompt) == ("length", tuple(ids))
    assert llm.generate([]) == []


def test_options_reach_the_request(llm: LLM) -> None:
    sampling = SamplingParams(temperature=0.9, seed=4)
    (done,) = llm.generate(["And"], max_new_tokens=40, sampling=sampling, stop=["e"])
    assert done.reason == "stop" and "e" not in (done.text or "e")
    request = llm.request("And", max_new_tokens=3, stop=["x", "y"])
    assert (request.max_new_tokens, request.stop_strings) == (3, ("x", "y"))
    assert request.stop_ids == llm.encoder.stop_ids


def test_stream_yields_what_generate_returns(llm: LLM) -> None:
    (done,) = llm.generate(["And it came"], max_new_tokens=9)
    updates = list(llm.stream("And it came", max_new_tokens=9))
    assert tuple(u.token for u in updates) == done.tokens
    assert "".join(u.text for u in updates) == done.text


def test_streams_may_be_read_side_by_side(llm: LLM) -> None:
    expected = llm.generate(["And it came", "The LORD"], max_new_tokens=5)
    streams = [llm.stream(text, max_new_tokens=5) for text in ("And it came", "The LORD")]
    pairs = list(zip(*streams, strict=True))
    for index, done in enumerate(expected):
        assert tuple(pair[index].token for pair in pairs) == done.tokens


def test_a_stream_that_is_left_frees_its_rows(llm: LLM) -> None:
    stream = llm.stream("And it came", max_new_tokens=50)
    next(stream)
    assert len(llm.chain.cache.handles) == 1
    stream.close()  # type: ignore[attr-defined]
    assert llm.chain.cache.handles == [] and not llm.scheduler.busy
    assert len(llm.generate(["And"], max_new_tokens=2)[0].tokens) == 2


def test_one_that_can_never_run_stops_all_before_anything_runs(llm: LLM) -> None:
    with pytest.raises(StepError, match="context"):
        llm.generate(["And", "And"], max_new_tokens=5000)
    with pytest.raises(StepError, match="token 999"):
        llm.generate(["And", [1, 999]])
    with pytest.raises(RequestError, match="got a mixture"):
        llm.generate([[1, "a"]])  # type: ignore[list-item]
    with pytest.raises(RequestError, match="expected a list of prompts"):
        llm.generate("And it came")
    with pytest.raises(RequestError, match="expected a list of strings"):
        llm.generate(["And"], stop="abc")
    assert not llm.scheduler.busy and llm.chain.cache.stats.tokens_committed == 0


def test_a_chat_needs_a_model_with_roles(llm: LLM) -> None:
    with pytest.raises(BuildError, match="role tokens"):
        llm.request([Message("user", "Who came to pass?")])


def test_score_is_the_evaluation_of_the_text(llm: LLM) -> None:
    text = "In the beginning God created the heaven and the earth."
    scores = llm.score(text)
    assert scores.text_bytes == len(text) and len(scores.tokens) == len(text)
    assert llm.encoder.tokenizer is not None
    again = evaluate(llm.chain, llm.encoder.tokenizer, text.encode())
    np.testing.assert_allclose(scores.nats, again.nats, atol=1e-4)


def test_closing_frees_what_runs(llm: LLM) -> None:
    with llm:
        llm.scheduler.submit(llm.request("And it came"))
        llm.scheduler.step()
        assert llm.chain.cache.handles
    assert llm.chain.cache.handles == []
