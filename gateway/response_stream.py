"""The event stream of /v1/responses: items and parts are opened, filled by deltas, and closed, in order."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator
from typing import Any

from gateway.chat_job import ChatJob
from gateway.context import Gateway, RequestContext
from gateway.errors import ApiError
from gateway.piece_stream import End, pieces_of
from gateway.sse import named
from gateway.tools.base import CallArgs, CallStart, Content, Piece, Reasoning


class ResponseStream:
    """Events of one response. One item is open at a time."""

    def __init__(self, job: ChatJob, shell: dict[str, Any], gateway: Gateway, context: RequestContext) -> None:
        self._job = job
        self._shell = shell
        self._gateway = gateway
        self._context = context
        self._number = 0
        self._items: list[dict[str, Any]] = []
        self._open: dict[str, Any] | None = None
        self._text: list[str] = []

    def _event(self, kind: str, **fields: Any) -> bytes:
        event = named(kind, {"type": kind, "sequence_number": self._number, **fields})
        self._number += 1
        return event

    async def chunks(self) -> AsyncIterator[bytes]:
        """The events, as bytes. Raises ApiError where the generation fails."""
        yield self._event("response.created", response=self._shell) + self._event(
            "response.in_progress", response=self._shell
        )
        async for item in pieces_of(self._job, self._gateway, self._context):
            if isinstance(item, End):
                yield self._end(item)
            else:
                out = b"".join(self._piece(piece) for piece in item)
                if out:
                    yield out

    def _end(self, end: End) -> bytes:
        from gateway.routes.responses import finish_response

        out = b""
        if not self._items and self._open is None:
            # An empty answer is still a message.
            out += self._start_text("message")
        out += self._close("incomplete" if end.reason == "length" else "completed")
        finish_response(self._shell, end.reason, end.usage)
        self._shell["output"] = self._items
        return out + self._event(f"response.{self._shell['status']}", response=self._shell)

    def error(self, error: ApiError) -> bytes:
        """What a stream says when it fails."""
        detail = {"code": error.code or "server_error", "message": error.message}
        self._shell.update(status="failed", error=detail, output=self._items)
        return self._event("error", **detail, param=error.param, **error.to_dict()) + self._event(
            "response.failed", response=self._shell
        )

    def _piece(self, piece: Piece) -> bytes:
        if isinstance(piece, CallStart):
            return self._close() + self._start_call(piece)
        if isinstance(piece, CallArgs):
            self._text.append(piece.text)
            return self._event("response.function_call_arguments.delta", **self._place(), delta=piece.text)
        kind = "message" if isinstance(piece, Content) else "reasoning"
        current = self._open["type"] if self._open else None
        out = b""
        if current != kind:
            if isinstance(piece, Content) and current == "function_call" and not piece.text.strip():
                return b""
            out = self._close() + self._start_text(kind)
        self._text.append(piece.text)
        if isinstance(piece, Reasoning):
            return out + self._event(
                "response.reasoning_text.delta", **self._place(), content_index=0, delta=piece.text
            )
        return out + self._event(
            "response.output_text.delta", **self._place(), content_index=0, delta=piece.text, logprobs=[]
        )

    def _place(self) -> dict[str, Any]:
        assert self._open is not None
        return {"item_id": self._open["id"], "output_index": len(self._items)}

    def _start(self, item: dict[str, Any]) -> bytes:
        self._open, self._text = item, []
        return self._event("response.output_item.added", output_index=len(self._items), item=item)

    def _start_text(self, kind: str) -> bytes:
        if kind == "message":
            item = {
                "id": "msg_" + secrets.token_hex(12),
                "type": "message",
                "status": "in_progress",
                "role": "assistant",
                "content": [],
            }
        else:
            item = {"id": "rs_" + secrets.token_hex(12), "type": "reasoning", "summary": [], "status": "in_progress"}
        return self._start(item) + self._event(
            "response.content_part.added", **self._place(), content_index=0, part=self._part(kind, "")
        )

    def _start_call(self, piece: CallStart) -> bytes:
        return self._start(
            {
                "id": "fc_" + secrets.token_hex(12),
                "type": "function_call",
                "status": "in_progress",
                "call_id": piece.id,
                "name": piece.name,
                "arguments": "",
            }
        )

    @staticmethod
    def _part(kind: str, text: str) -> dict[str, Any]:
        if kind == "message":
            return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
        return {"type": "reasoning_text", "text": text}

    def _close(self, status: str = "completed") -> bytes:
        """Closes the open item, if there is one."""
        item = self._open
        if item is None:
            return b""
        text, place = "".join(self._text), self._place()
        if item["type"] == "function_call":
            done = {**item, "arguments": text, "status": status}
            out = self._event("response.function_call_arguments.done", **place, arguments=text, name=item["name"])
        else:
            part = self._part(item["type"], text)
            done = {**item, "content": [part], "status": status}
            kind = "output_text" if item["type"] == "message" else "reasoning_text"
            extra: dict[str, Any] = {"logprobs": []} if kind == "output_text" else {}
            out = self._event(f"response.{kind}.done", **place, content_index=0, text=text, **extra)
            out += self._event("response.content_part.done", **place, content_index=0, part=part)
        out += self._event("response.output_item.done", output_index=len(self._items), item=done)
        self._items.append(done)
        self._open = None
        return out
