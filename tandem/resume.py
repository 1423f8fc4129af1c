"""Going on with a broken stream: what has reached the client becomes a `ResumeState`.

One helper for both who resume: the router (an engine was lost) and the gateway (a router was lost). Both keep the
response bytes that they passed on; concatenated serialized responses are one response, so keeping them is cheap and
they are parsed only when a stream breaks.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from tandem.inference.v1 import inference_pb2 as pb


class BrokenStreamError(ValueError):
    """The forwarded bytes are no valid stream: a gap, a repeat, or bytes that do not parse."""


@dataclass
class ChoiceProgress:
    """What one choice has reached."""

    ids: list[int] = field(default_factory=list)
    text_bytes: int = 0
    finished: bool = False


@dataclass
class Progress:
    """What a stream has reached, over all its attempts."""

    accepted: pb.Accepted | None = None
    choices: dict[int, ChoiceProgress] = field(default_factory=dict)
    complete: bool = False

    def choice(self, index: int) -> ChoiceProgress:
        return self.choices.setdefault(index, ChoiceProgress())

    @property
    def tokens(self) -> int:
        """Output tokens over all choices."""
        return sum(len(choice.ids) for choice in self.choices.values())


def read_progress(request: pb.GenerateRequest, forwarded: Iterable[bytes]) -> Progress:
    """Reads what a client has received.

    Args:
        request: as it was sent; if it resumed an earlier stream, its `resume` is where counting starts.
        forwarded: serialized GenerateResponses, in order.

    Raises:
        BrokenStreamError: tokens or text bytes are missing or doubled, or the bytes do not parse.
    """
    progress = Progress()
    for old in request.resume.choices:
        progress.choices[old.index] = ChoiceProgress(list(old.emitted_ids), old.text_bytes_sent, old.finished)
    try:
        events = pb.GenerateResponse.FromString(b"".join(forwarded)).events
    except Exception as error:
        raise BrokenStreamError(f"forwarded bytes do not parse: {error}") from error
    for event in events:
        kind = event.WhichOneof("event")
        if kind == "accepted":
            progress.accepted = progress.accepted or event.accepted
        elif kind == "delta":
            _add_delta(progress, event.delta)
        elif kind == "finished":
            progress.choice(event.finished.choice).finished = True
        elif kind == "usage":
            progress.complete = True
    return progress


def _add_delta(progress: Progress, delta: pb.Delta) -> None:
    choice = progress.choice(delta.choice)
    if delta.ids:
        if delta.token_offset != len(choice.ids):
            raise BrokenStreamError(
                f"choice {delta.choice} goes on at token {delta.token_offset}, but {len(choice.ids)} were sent"
            )
        choice.ids.extend(delta.ids)
    if delta.text:
        if delta.text_offset != choice.text_bytes:
            raise BrokenStreamError(
                f"choice {delta.choice} goes on at text byte {delta.text_offset}, but {choice.text_bytes} were sent"
            )
        choice.text_bytes += len(delta.text.encode())


def build_resume(request: pb.GenerateRequest, forwarded: Iterable[bytes]) -> pb.GenerateRequest | None:
    """The request that goes on where the forwarded bytes end, or None if the stream is already complete.

    The copy carries the seed in use, the next attempt number and, if anything was accepted, a ResumeState.
    Remaining time is the caller's to set.

    Raises:
        BrokenStreamError: see `read_progress`.
    """
    progress = read_progress(request, forwarded)
    if progress.complete:
        return None
    again = pb.GenerateRequest()
    again.CopyFrom(request)
    again.attempt = max(request.attempt, 1) + 1
    accepted = progress.accepted
    if accepted is None:
        return again
    again.sampling.seed = accepted.seed
    state = again.resume
    if not request.HasField("resume"):
        state.prompt_tokens = accepted.prompt_tokens
    state.numerics_id = state.numerics_id or accepted.numerics_id
    del state.choices[:]
    for index, choice in sorted(progress.choices.items()):
        state.choices.add(
            index=index, emitted_ids=choice.ids, text_bytes_sent=choice.text_bytes, finished=choice.finished
        )
    return again


_EVENTS_TAG = 0x0A
# First byte of a serialized GenerateEvent → kind of the event (field number, wire type 2).
KIND_OF_TAG = {0x0A: "accepted", 0x12: "prompt", 0x1A: "delta", 0x22: "finished", 0x2A: "usage"}


def split_events(data: bytes) -> list[tuple[str, int, int]]:
    """Finds the events in a serialized GenerateResponse without parsing them.

    Returns:
        (kind, start, end) per event; data[start:end] is again a serialized GenerateResponse with that one event.
        Unknown kinds are "" and unknown fields are skipped.

    Raises:
        BrokenStreamError: the bytes are not a serialized message.
    """
    events: list[tuple[str, int, int]] = []
    position, total = 0, len(data)
    try:
        while position < total:
            start = position
            tag, position = _varint(data, position)
            if tag & 7 != 2:
                raise BrokenStreamError(f"unexpected wire type {tag & 7} at byte {start}")
            size, position = _varint(data, position)
            end = position + size
            if end > total:
                raise BrokenStreamError(f"an event ends at byte {end} of {total}")
            if tag == _EVENTS_TAG:
                events.append((KIND_OF_TAG.get(data[position], "") if size else "", start, end))
            position = end
    except IndexError as error:
        raise BrokenStreamError(f"{total} bytes end inside a varint") from error
    return events


def _varint(data: bytes, position: int) -> tuple[int, int]:
    byte = data[position]
    if byte < 0x80:
        return byte, position + 1
    value, shift = byte & 0x7F, 7
    while True:
        position += 1
        byte = data[position]
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position + 1
        shift += 7
        if shift > 63:
            raise BrokenStreamError("a varint of more than ten bytes")
