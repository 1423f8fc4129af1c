"""Building tokenizer.json from the vocabulary inside a GGUF file.

The pre-tokenizer is named by `tokenizer.ggml.pre`; a name that is not in PRE_TOKENIZERS is refused, because a wrong
splitter gives plausible but wrong ids. Token types: 1 normal, 2 unknown, 3 control, 4 user-defined, 5 unused, 6 byte.
"""

from __future__ import annotations

from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from tandem.tokenizer.bundle import TokenizerBundle

CONTROL, USER_DEFINED = 3, 4

_LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class TokenizerError(ValueError):
    """A tokenizer that cannot be built exactly: names what is unknown and what is known."""


def _gpt2() -> Any:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _digits_then_gpt2() -> Any:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


def _words(pattern: str) -> Any:
    split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _llama3() -> Any:
    return _words(_LLAMA3_WORDS % r"\p{N}{1,3}")


def _qwen2() -> Any:
    return _words(_LLAMA3_WORDS % r"\p{N}")


# Splitters by the name that GGUF gives them.
PRE_TOKENIZERS = {
    "gpt-2": _gpt2,
    "smollm": _digits_then_gpt2,
    "starcoder": _digits_then_gpt2,
    "refact": _digits_then_gpt2,
    "command-r": _digits_then_gpt2,
    "llama-bpe": _llama3,
    "llama3": _llama3,
    "qwen2": _qwen2,
}
# Llama 3's merges are consulted only for words that are not in the vocabulary as a whole.
_IGNORE_MERGES = {"llama-bpe", "llama3"}
_NFC = {"qwen2"}

# Control tokens that end a turn or a text in the chat formats in use, whatever the file names as EOS.
STOP_NAMES = frozenset(
    (
        "<|endoftext|>",
        "<|im_end|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<|end_of_text|>",
        "<|end|>",
        "<end_of_turn>",
        "<eos>",
        "</s>",
        "<|EOT|>",
        "<|endofturn|>",
        "<|return|>",
        "<｜end▁of▁sentence｜>",
    )
)


def bundle_from_metadata(metadata: dict[str, Any]) -> TokenizerBundle:
    """Builds the bundle from a GGUF file's metadata.

    Raises:
        TokenizerError: model kind or pre-tokenizer unknown, or the vocabulary is missing.
    """
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not tokens:
        raise TokenizerError("the GGUF file holds no vocabulary (tokenizer.ggml.tokens)")
    types = metadata.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    kind = metadata.get("tokenizer.ggml.model")
    if kind == "gpt2":
        inner = _byte_level_bpe(metadata, tokens)
    elif kind == "llama":
        inner = _sentencepiece_bpe(metadata, tokens, types)
    else:
        raise TokenizerError(f"tokenizer.ggml.model is {kind!r}, but only 'gpt2' and 'llama' can be built")
    _add_tokens(inner, tokens, types)
    add_bos = bool(metadata.get("tokenizer.ggml.add_bos_token", kind == "llama"))
    bos = metadata.get("tokenizer.ggml.bos_token_id")
    if add_bos and bos is not None:
        name = tokens[bos]
        inner.post_processor = processors.TemplateProcessing(
            single=f"{name} $A", pair=f"{name} $A {name} $B", special_tokens=[(name, bos)]
        )
    return TokenizerBundle(
        tokenizer_json=inner.to_str().encode(),
        chat_template=str(metadata.get("tokenizer.chat_template", "")),
        special_tokens=_special_tokens(metadata, tokens),
        stop_token_ids=_stop_ids(metadata, tokens, types),
        special_token_ids=tuple(i for i, kind_of in enumerate(types) if kind_of == CONTROL),
        named_templates={
            key.removeprefix("tokenizer.chat_template."): str(value)
            for key, value in metadata.items()
            if key.startswith("tokenizer.chat_template.")
        },
        add_bos=add_bos and bos is not None,
    )


def _byte_level_bpe(metadata: dict[str, Any], tokens: list[str]) -> tokenizers.Tokenizer:
    pre = metadata.get("tokenizer.ggml.pre")
    if pre not in PRE_TOKENIZERS:
        known = ", ".join(sorted(PRE_TOKENIZERS))
        raise TokenizerError(f"tokenizer.ggml.pre is {pre!r}, which is unknown; known: {known}")
    merges = [tuple(merge.split(" ", 1)) for merge in metadata.get("tokenizer.ggml.merges", ())]
    vocab = {token: i for i, token in enumerate(tokens)}
    inner = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=pre in _IGNORE_MERGES))
    inner.pre_tokenizer = PRE_TOKENIZERS[pre]()
    if pre in _NFC:
        inner.normalizer = normalizers.NFC()
    inner.decoder = decoders.ByteLevel()
    return inner


def _sentencepiece_bpe(metadata: dict[str, Any], tokens: list[str], types: list[int]) -> tokenizers.Tokenizer:
    """SentencePiece BPE: the merge order follows the tokens' scores, best first."""
    scores = metadata.get("tokenizer.ggml.scores")
    if not scores:
        raise TokenizerError("the GGUF file's SentencePiece vocabulary has no scores (tokenizer.ggml.scores)")
    vocab = {token: i for i, token in enumerate(tokens)}
    ranked: list[tuple[float, int, int, str, str]] = []
    for index, token in enumerate(tokens):
        if types[index] != 1:
            continue
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocab and right in vocab:
                ranked.append((-scores[index], vocab[left], vocab[right], left, right))
    ranked.sort()
    unknown = next((tokens[i] for i, kind in enumerate(types) if kind == 2), None)
    merges = [(left, right) for *_, left, right in ranked]
    inner = tokenizers.Tokenizer(
        models.BPE(vocab=vocab, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    prefix = [normalizers.Prepend("\u2581")] if metadata.get("tokenizer.ggml.add_space_prefix", True) else []
    inner.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", "\u2581")])
    inner.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return inner


def _add_tokens(inner: tokenizers.Tokenizer, tokens: list[str], types: list[int]) -> None:
    for index, kind in enumerate(types):
        if kind in (CONTROL, USER_DEFINED):
            token = AddedToken(tokens[index], normalized=False, special=kind == CONTROL)
            if kind == CONTROL:
                inner.add_special_tokens([token])
            else:
                inner.add_tokens([token])


def _special_tokens(metadata: dict[str, Any], tokens: list[str]) -> dict[str, str]:
    names = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
    found = {}
    for key, name in names.items():
        index = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if index is not None and 0 <= index < len(tokens):
            found[name] = tokens[index]
    return found


def _stop_ids(metadata: dict[str, Any], tokens: list[str], types: list[int]) -> tuple[int, ...]:
    named = {metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom")}
    by_name = {i for i, kind in enumerate(types) if kind == CONTROL and tokens[i] in STOP_NAMES}
    return tuple(sorted({i for i in named if i is not None} | by_name))
