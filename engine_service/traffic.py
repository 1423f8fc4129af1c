"""Which finished requests go into the log of traffic, where the engine is told to keep one."""

from __future__ import annotations

from pathlib import Path

from engine_service.output import Stream
from engine_service.settings import EngineSettings
from tandem.lm.types import ModelSpec
from tandem.traffic import Entry, Header, TrafficLog

_WHOLE = ("stop", "length")


def open_log(settings: EngineSettings, spec: ModelSpec, tokenizer_digest: str) -> TrafficLog | None:
    """The log that the settings ask for; None: none. Raises OSError if its directory cannot be used."""
    if not settings.traffic_log:
        return None
    header = Header(spec.model_digest, tokenizer_digest, spec.vocab_size)
    return TrafficLog(Path(settings.traffic_log), header, settings.traffic_log_bytes)


def entry(stream: Stream) -> Entry | None:
    """What to log of a stream that has ended; None: nothing.

    A salt says whose a request is, and what may not share a cache may not share a draft either. So with API keys,
    each of which salts its requests, there is nothing to log.
    """
    request = stream.request
    if request.no_store or request.salt or not stream.done:
        return None
    if not all(reason in _WHOLE for reason in stream.finish_reasons):
        return None
    outputs = [choice.sequence.token_ids[choice.sequence.prompt_len :] for choice in request.choices]
    if not any(outputs):
        return None
    return Entry(request.prompt, outputs, request.params.temperature, request.params.seed)
