"""Incremental text equals the whole text, and never holds half a character."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.models.store import DEFAULT_MODEL, resolve
from tandem.tokenizer import IncrementalDetokenizer, Tokenizer, load_bundle


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(load_bundle(resolve(DEFAULT_MODEL).path))


# The model's vocabulary has no token for these bytes, so its own tokenizer drops them too.
NO_TOKEN = "\x04\x06\x13\x14\x16\x1d"
_TOKENIZER = None


def _shared() -> Tokenizer:
    global _TOKENIZER
    if _TOKENIZER is None:
        _TOKENIZER = Tokenizer(load_bundle(resolve(DEFAULT_MODEL).path))
    return _TOKENIZER


@settings(deadline=None)
@given(st.lists(st.integers(0, 49151), max_size=40))
def test_pushed_text_equals_decoded_text(ids: list[int]) -> None:
    tokenizer = _shared()
    detokenizer = IncrementalDetokenizer(tokenizer)
    text = "".join(detokenizer.push([token]) for token in ids) + detokenizer.flush()
    assert text == tokenizer.decode(ids)


@settings(deadline=None)
@given(st.text(st.characters(max_codepoint=0x1F9FF, exclude_characters=NO_TOKEN), max_size=60))
def test_valid_text_round_trips_without_replacement_characters(text: str) -> None:
    tokenizer = _shared()
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special=False)
    try:
        ids = tokenizer.encode(text)
    except ValueError:
        return  # a lone surrogate, refused
    pieces = [detokenizer.push([token]) for token in ids]
    assert "".join(pieces) == text
    assert detokenizer.flush() == ""


def test_emoji_appear_whole(tokenizer: Tokenizer) -> None:
    detokenizer = IncrementalDetokenizer(tokenizer)
    ids = tokenizer.encode("😀🎉")
    assert [detokenizer.push([token]) for token in ids] == ["", "", "😀", "", "", "🎉"]


def test_a_cut_off_character_is_told_at_the_end(tokenizer: Tokenizer) -> None:
    detokenizer = IncrementalDetokenizer(tokenizer)
    assert detokenizer.push(tokenizer.encode("😀")[:2]) == ""
    assert detokenizer.pending
    assert detokenizer.flush() == "\ufffd"
