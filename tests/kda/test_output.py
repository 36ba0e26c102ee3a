"""Stop strings in a growing text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch_kda.kda.output import OutputText
from torch_kda.kda.tokenizer import Tokenizer

TOKENIZER = Tokenizer.byte_level()


def pieces_of(text: str, stop: tuple[str, ...]) -> tuple[list[str], OutputText]:
    output = OutputText(TOKENIZER, stop)
    return [output.push([byte]) for byte in text.encode()], output


@pytest.mark.parametrize(
    ("text", "stop", "expected"),
    [
        ("one two", (), ["o", "n", "e", " ", "t", "w", "o"]),
        ("one END two", ("END",), ["o", "n", "e", " ", "", "", "", "", "", "", ""]),
        ("EEND", ("END",), ["", "E", "", ""]),
        ("ENter", ("END",), ["", "", "ENt", "e", "r"]),
        ("aab", ("ab",), ["", "a", ""]),
        ("é\nx", ("\n",), ["", "é", "", ""]),
        ("abcd", ("cd", "bcde"), ["a", "", "", "b"]),
    ],
    ids=["none", "middle", "restart", "almost", "again", "wide", "two"],
)
def test_push(text: str, stop: tuple[str, ...], expected: list[str]):
    pieces, output = pieces_of(text, stop)
    assert pieces == expected
    assert output.is_stopped == any(s in text for s in stop)
    assert output.finish() == ""


def test_finish_gives_what_waited():
    pieces, output = pieces_of("the EN", ("END",))
    assert "".join(pieces) == "the " and output.finish() == "EN"
    pieces, output = pieces_of("abé"[:2], ("é",))
    assert output.push([0xC3]) == "" and output.finish() == "\ufffd"


@given(st.text("abé", max_size=12), st.lists(st.text("abé", min_size=1, max_size=4), max_size=3))
def test_push_is_find(text: str, stop: list[str]):
    """The joined pieces are the text before the stop string that is complete first."""
    pieces, output = pieces_of(text, tuple(stop))
    ends = [(text.find(s) + len(s), text.find(s)) for s in stop if s in text]
    expected = text
    if ends:
        first_end = min(ends)[0]
        expected = text[: min(start for end, start in ends if end == first_end)]
    assert "".join(pieces) + output.finish() == expected
