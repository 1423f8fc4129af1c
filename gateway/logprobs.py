"""Log probabilities in the chat shape, the legacy shape and vLLM's prompt_logprobs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tandem.inference.v1 import inference_pb2 as pb
from tandem.tokenizer import Tokenizer

# JSON has no -Infinity; OpenAI writes -9999 for a token of no probability.
FLOOR = -9999.0


def _finite(value: float) -> float:
    return value if value > FLOOR else FLOOR


def chat_token(tokenizer: Tokenizer, token: int) -> tuple[str, list[int]]:
    """Text and bytes of a token; bytes that are no UTF-8 are shown as \\xNN."""
    data = tokenizer.token_bytes(token)
    return data.decode("utf-8", errors="backslashreplace"), list(data)


def legacy_token(tokenizer: Tokenizer, token: int) -> str:
    """Text of a token; one that is no whole text is written bytes:\\xNN…, as OpenAI does."""
    data = tokenizer.token_bytes(token)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def chat_entries(tokenizer: Tokenizer, scores: Iterable[pb.TokenLogprob], top: int) -> list[dict[str, Any]]:
    """choices[].logprobs.content of the OpenAI API."""
    entries = []
    for score in scores:
        text, data = chat_token(tokenizer, score.id)
        alternatives = []
        for token, value in zip(score.top_ids[:top], score.top_logprobs[:top], strict=True):
            other, raw = chat_token(tokenizer, token)
            alternatives.append({"token": other, "logprob": _finite(value), "bytes": raw})
        entries.append({"token": text, "logprob": _finite(score.logprob), "bytes": data, "top_logprobs": alternatives})
    return entries


class LegacyLogprobs:
    """choices[].logprobs of /v1/completions; offsets count characters from the start of the returned text."""

    def __init__(self, tokenizer: Tokenizer, top: int, offset: int = 0) -> None:
        self._tokenizer = tokenizer
        self._top = top
        self._offset = offset

    def take(self, scores: Iterable[pb.TokenLogprob]) -> dict[str, Any]:
        """The lists for these tokens; the offset goes on from the last call."""
        tokens: list[str] = []
        values: list[float | None] = []
        tops: list[dict[str, float] | None] = []
        offsets: list[int] = []
        for score in scores:
            data = self._tokenizer.token_bytes(score.id)
            text = legacy_token(self._tokenizer, score.id)
            tokens.append(text)
            offsets.append(self._offset)
            # Continuation bytes begin no character.
            self._offset += sum(byte & 0xC0 != 0x80 for byte in data)
            if not score.HasField("logprob"):
                values.append(None)
                tops.append(None)
                continue
            values.append(_finite(score.logprob))
            tops.append(self._alternatives(score, text))
        return {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}

    def _alternatives(self, score: pb.TokenLogprob, text: str) -> dict[str, float]:
        result: dict[str, float] = {}
        for token, value in zip(score.top_ids[: self._top], score.top_logprobs[: self._top], strict=True):
            # Two ids may have one text; the likelier comes first and stays.
            result.setdefault(legacy_token(self._tokenizer, token), _finite(value))
        result[text] = _finite(score.logprob)
        return result


def prompt_logprobs(tokenizer: Tokenizer, scores: Iterable[pb.TokenLogprob], top: int) -> list[Any]:
    """vLLM's shape: per prompt token null or {id: {logprob, rank, decoded_token}}."""
    result: list[Any] = []
    for score in scores:
        if not score.HasField("logprob"):
            result.append(None)
            continue
        entry = {
            str(token): {
                "logprob": _finite(value),
                "rank": rank,
                "decoded_token": tokenizer.token_bytes(token).decode("utf-8", errors="replace"),
            }
            for rank, (token, value) in enumerate(
                zip(score.top_ids[:top], score.top_logprobs[:top], strict=True), start=1
            )
        }
        entry[str(score.id)] = {
            "logprob": _finite(score.logprob),
            "rank": score.rank,
            "decoded_token": tokenizer.token_bytes(score.id).decode("utf-8", errors="replace"),
        }
        result.append(entry)
    return result
