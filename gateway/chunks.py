"""Chunks of a stream, written without building objects for every token: the head is serialised once."""

from __future__ import annotations

from typing import Any

import orjson

from gateway.generation import usage_dict


class ChunkWriter:
    """Writes the chunks of one stream. All share id, created and model."""

    def __init__(self, head: dict[str, Any], include_usage: bool, continuous: bool) -> None:
        # {"id":…,"model":… without the closing brace.
        self._head = b"data: " + orjson.dumps(head)[:-1] + b',"choices":['
        self._usage_null = b',"usage":null' if include_usage else b""
        self._plain_tail = b',"logprobs":null,"finish_reason":null}]' + self._usage_null + b"}\n\n"
        self._include_usage = include_usage
        self._continuous = continuous
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.completion_tokens = 0
        self._starts: dict[int, bytes] = {}

    def choice(
        self,
        index: int,
        payload: bytes,
        logprobs: Any = None,
        finish: str | None = None,
        extra: dict[str, Any] | None = None,
    ) -> bytes:
        """One chunk of one choice. `payload` is its own member, such as b'"text":"a"'."""
        start = self._starts.get(index)
        if start is None:
            start = self._starts[index] = self._head + b'{"index":%d,' % index
        if logprobs is None and finish is None and extra is None and not self._continuous:
            return start + payload + self._plain_tail
        rest = {"logprobs": logprobs, "finish_reason": finish, **(extra or {})}
        return start + payload + b"," + orjson.dumps(rest)[1:] + b"]" + self._usage() + b"}\n\n"

    def _usage(self) -> bytes:
        if not self._continuous:
            return self._usage_null
        return b',"usage":' + orjson.dumps(usage_dict(self.prompt_tokens, self.completion_tokens, self.cached_tokens))

    def last(self, receipt: Any = None) -> bytes:
        """The chunk with no choices that carries the usage, if it was asked for."""
        if not self._include_usage and receipt is None:
            return b""
        usage = usage_dict(self.prompt_tokens, self.completion_tokens, self.cached_tokens)
        tail = {"usage": usage} if receipt is None else {"usage": usage, "receipt": receipt}
        return self._head + b"]," + orjson.dumps(tail)[1:] + b"\n\n"
