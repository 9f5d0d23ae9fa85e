"""Stop strings in a text that comes in pieces, against a search of the whole."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.serving.sampling import SamplingError
from runtime.serving.stop_strings import StopStrings


def first_stop(text: str, stops: list[str]) -> tuple[int, int] | None:
    """Where the first stop string that becomes whole ends and begins; of several the longest."""
    spans = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    return min(spans) if spans else None


def needed(text: str, stops: list[str]) -> int:
    """How many characters at its end a stop string begins with."""
    beginnings = [stop[:length] for stop in stops for length in range(len(stop))]
    return max((len(b) for b in beginnings if text.endswith(b)), default=0)


@pytest.mark.parametrize(
    ("stops", "pieces", "shown"),
    [
        ([], ["ab", "c"], ["ab", "c"]),
        (["x"], ["ab", "c"], ["ab", "c"]),
        (["stop"], ["one st", "ep"], ["one ", "step"]),  # it might have been, and was not
        (["stop"], ["one s", "t", "o", "p two"], ["one ", "", "", ""]),
        (["stop"], ["one stop two stop"], ["one "]),
        (["two", "one"], ["a one two"], ["a "]),  # the first in the text, not in the list
        (["abcd", "bc"], ["xab", "c"], ["x", "a"]),  # the first to be whole
        (["abcd", "bc"], ["xabcd"], ["xa"]),  # … also where the other comes along
        (["bc", "abc"], ["x", "abc"], ["x", ""]),  # both at once: the longer
        (["aab"], ["aa", "ab"], ["", "a"]),  # a beginning within a beginning
        (["\n\n"], ["a\n", "b\n", "\nc"], ["a", "\nb", ""]),
        (["日本"], ["東日", "日", "本"], ["東", "日", ""]),
    ],
)
def test_what_is_shown_by_hand(stops: list[str], pieces: list[str], shown: list[str]) -> None:
    stream = StopStrings(stops)
    results = [stream.push(piece) for piece in pieces]
    assert [text for text, _ in results] == shown
    whole = "".join(pieces)
    assert results[-1][1] == any(stop in whole for stop in stops)


def test_what_was_held_back_comes_at_the_end_and_once() -> None:
    stream = StopStrings(["stop"])
    assert stream.push("a sto") == ("a ", False)
    assert stream.finish() == "sto"
    assert stream.finish() == ""


def test_after_a_stop_string_nothing_is_shown() -> None:
    stream = StopStrings(["stop"])
    assert stream.push("a stop") == ("a ", True)
    assert stream.push("more st") == ("", True)
    assert stream.finish() == ""


@pytest.mark.parametrize(
    ("stops", "shown"), [(["a", ""], "''"), ("stop", "'stop'"), ([3], "3"), ([b"x"], "b'x'")]
)
def test_what_is_no_list_of_strings_is_refused(stops: list[str], shown: str) -> None:
    with pytest.raises(SamplingError, match=rf"^stop strings: expected .*, got {shown}$"):
        StopStrings(stops)


@settings(max_examples=500)
@given(
    text=st.text("ab", max_size=24),
    stops=st.lists(st.text("abc", min_size=1, max_size=5), max_size=4),
    cuts=st.lists(st.integers(0, 24), max_size=8),
)
def test_any_cut_of_a_text_shows_what_stands_before_the_first_stop(
    text: str, stops: list[str], cuts: list[int]
) -> None:
    """At every piece: all that may be shown, no more, and the stop as soon as it is there."""
    bounds = sorted({0, len(text), *(min(cut, len(text)) for cut in cuts)})
    stream, shown = StopStrings(stops), ""
    for start, end in pairwise(bounds):
        piece, stopped = stream.push(text[start:end])
        shown += piece
        stop = first_stop(text[:end], stops)
        assert stopped == (stop is not None)
        if stop:
            assert shown == text[: stop[1]]
        else:
            assert shown == text[: end - needed(text[:end], stops)]
    rest = stream.finish()
    stop = first_stop(text, stops)
    assert shown + rest == (text[: stop[1]] if stop else text)
