"""A tokenizer at work: text to ids, ids to the exact bytes they stand for."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import tokenizers

from tandem.tokenizer.bundle import TokenizerBundle


def _byte_level_alphabet() -> dict[str, int]:
    """The printable stand-in of each byte in byte-level BPE (Radford et al. 2019, GPT-2), inverted."""
    kept = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in kept}
    spare = 0x100
    for byte in range(256):
        if byte not in kept:
            table[chr(spare)] = byte
            spare += 1
    return table


def _decoder_types(decoder: dict[str, Any] | None) -> set[str]:
    if not decoder:
        return set()
    if decoder["type"] == "Sequence":
        return {name for part in decoder["decoders"] for name in _decoder_types(part)}
    return {decoder["type"]}


class Tokenizer:
    """Encodes and decodes for one bundle. Thread-safe: all state is fixed at construction."""

    def __init__(self, bundle: TokenizerBundle) -> None:
        self.bundle = bundle
        self._inner = tokenizers.Tokenizer.from_str(bundle.tokenizer_json.decode())
        self._inner.no_truncation()
        self._inner.no_padding()
        # Padding ids inside the vocabulary count too, hence not len(vocabulary).
        self._vocab: dict[str, int] = self._inner.get_vocab(with_added_tokens=True)
        self.vocab_size = max(self._vocab.values(), default=-1) + 1
        self.stop_token_ids = bundle.stop_token_ids
        self.special_token_ids = frozenset(bundle.special_token_ids)
        self._bytes = self._byte_table()

    def encode(self, text: str, add_special: bool = False) -> list[int]:
        """Token ids of the text. Special tokens written in the text are recognised. `add_special` adds bos where the
        tokenizer says so.

        Raises:
            ValueError: the text cannot be encoded as UTF-8 (lone surrogates).
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"text holds a lone surrogate at character {error.start}") from error
        # The batch call lets other threads run meanwhile; the single one holds the interpreter, seconds per megabyte.
        return list(self._inner.encode_batch_fast([text], add_special_tokens=add_special)[0].ids)

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """Text of the ids; bytes that are no UTF-8 become U+FFFD. Ids outside the vocabulary stand for nothing."""
        skipped = self.special_token_ids if skip_special else ()
        data = b"".join(self.token_bytes(token) for token in ids if token not in skipped)
        return data.decode("utf-8", errors="replace")

    def token_bytes(self, token: int) -> bytes:
        """The bytes that a token contributes to text; a special token's are its name."""
        return self._bytes[token] if 0 <= token < len(self._bytes) else b""

    def token_text(self, token: int) -> str:
        """A token's own text for people and logprobs; bytes that are no UTF-8 become U+FFFD."""
        return self.token_bytes(token).decode("utf-8", errors="replace")

    def id_of(self, text: str) -> int | None:
        """Id of the token with exactly this name in the vocabulary, or None."""
        return self._vocab.get(text)

    def _byte_table(self) -> list[bytes]:
        spec = json.loads(self.bundle.tokenizer_json)
        added = {entry["id"]: entry["content"].encode() for entry in spec.get("added_tokens", ())}
        kinds = _decoder_types(spec.get("decoder"))
        table = [b""] * self.vocab_size
        alphabet = _byte_level_alphabet()
        for name, token in self._vocab.items():
            if token in added:
                table[token] = added[token]
            elif "ByteLevel" in kinds:
                table[token] = bytes(alphabet[char] for char in name if char in alphabet)
            elif "ByteFallback" in kinds or "Metaspace" in kinds or "Replace" in kinds:
                table[token] = _sentencepiece_bytes(name)
            else:
                table[token] = self._inner.decode([token], skip_special_tokens=False).encode()
        return table


def _sentencepiece_bytes(name: str) -> bytes:
    """Bytes of a SentencePiece token: <0xNN> is one byte, U+2581 is a space."""
    if len(name) == 6 and name.startswith("<0x") and name.endswith(">"):
        try:
            return bytes([int(name[3:5], 16)])
        except ValueError:
            return name.encode()
    return name.replace("\u2581", " ").encode()
