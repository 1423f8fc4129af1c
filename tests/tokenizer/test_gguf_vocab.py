"""The tokenizer built from a GGUF file gives exactly the ids of the model's own tokenizer."""

from __future__ import annotations

from typing import Any

import pytest

from tandem.models.store import DEFAULT_MODEL, resolve
from tandem.tokenizer import Tokenizer, TokenizerBundle, TokenizerError, load_bundle
from tandem.tokenizer.gguf_vocab import bundle_from_metadata


@pytest.fixture(scope="module")
def bundle() -> TokenizerBundle:
    return load_bundle(resolve(DEFAULT_MODEL).path)


@pytest.fixture(scope="module")
def tokenizer(bundle: TokenizerBundle) -> Tokenizer:
    return Tokenizer(bundle)


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        # llama.cpp's ids: digits stand alone, newlines and spaces merge as GPT-2 splits them.
        ("\n\n1. one", [1116, 33, 30, 582]),
        ("a  1987", [81, 256, 33, 41, 40, 39]),
        ("x = 10\n    20", [104, 446, 216, 33, 32, 2367, 34, 32]),
        ("The capital of France is", [504, 3575, 282, 4649, 314]),
        ("😀🎉", [10813, 242, 218, 10813, 232, 227]),
    ],
)
def test_known_ids(tokenizer: Tokenizer, text: str, ids: list[int]) -> None:
    assert tokenizer.encode(text) == ids
    assert tokenizer.decode(ids) == text


def test_special_tokens_and_stop_ids(bundle: TokenizerBundle, tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("<|im_start|>user\nhi<|im_end|>")[0] == 1
    assert bundle.special_tokens["eos_token"] == "<|im_end|>"
    # The file names only id 2 as EOS; <|endoftext|> must stop too.
    assert bundle.stop_token_ids == (0, 2)
    assert not bundle.add_bos
    assert "add_generation_prompt" in bundle.chat_template


def test_skipping_special_tokens(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("<|im_start|>hi<|im_end|>")
    assert tokenizer.decode(ids) == "hi"
    assert tokenizer.decode(ids, skip_special=False) == "<|im_start|>hi<|im_end|>"


def test_lone_surrogates_are_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(ValueError, match="surrogate at character 2"):
        tokenizer.encode("ab\ud800")


def test_bundle_survives_proto_and_json(bundle: TokenizerBundle) -> None:
    assert TokenizerBundle.from_proto(bundle.to_proto()) == bundle
    assert TokenizerBundle.from_json(bundle.to_json()).digest == bundle.digest
    message = bundle.to_proto()
    message.chat_template += " "
    with pytest.raises(ValueError, match="digest"):
        TokenizerBundle.from_proto(message)


def test_an_unknown_pre_tokenizer_is_refused() -> None:
    metadata = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "mystery", "tokenizer.ggml.tokens": ["a"]}
    with pytest.raises(TokenizerError, match=r"'mystery'.*known: .*smollm"):
        bundle_from_metadata(metadata)


def test_an_unknown_tokenizer_model_is_refused() -> None:
    with pytest.raises(TokenizerError, match="'t5'"):
        bundle_from_metadata({"tokenizer.ggml.model": "t5", "tokenizer.ggml.tokens": ["a"]})


def _sentencepiece(**extra: Any) -> dict[str, Any]:
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    types = [2, 3, 3, *[6] * 256]
    words = ["\u2581", "h", "e", "l", "o", "he", "ll", "hell", "hello", "\u2581hello"]
    scores = [0.0] * len(pieces) + [-100.0, -90.0, -91.0, -92.0, -93.0, -2.0, -1.0, -3.0, -4.0, -5.0]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": pieces + words,
        "tokenizer.ggml.token_type": types + [1] * len(words),
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        **extra,
    }


def test_sentencepiece_vocabulary_merges_by_score_and_falls_back_to_bytes() -> None:
    tokenizer = Tokenizer(bundle_from_metadata(_sentencepiece()))
    assert tokenizer.encode("hello") == [tokenizer.id_of("\u2581hello")]
    assert tokenizer.encode("hello", add_special=True)[0] == 1
    ids = tokenizer.encode("é")
    assert [tokenizer.token_bytes(i) for i in ids] == [b" ", b"\xc3", b"\xa9"]
    assert tokenizer.stop_token_ids == (2,)
