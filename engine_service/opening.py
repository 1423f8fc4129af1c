"""A validated request on its way in: its choices, what a resumed one had said already, and its first event."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

from engine_service.grammar import GrammarMatcher
from engine_service.jobs import Job
from engine_service.kv_events import KvEventLog
from engine_service.outbox import Outbox
from engine_service.output import ChoiceOutput, ChoiceUpdate, Identity, Stream
from engine_service.requests import Choice, Request, Status
from engine_service.settings import EngineSettings
from engine_service.text import Finish, StopTracker
from engine_service.validate import Resumed, Validated
from tandem.block_hash import hash_chain
from tandem.errors import invalid
from tandem.inference.v1 import inference_pb2 as pb
from tandem.lm.types import Sequence
from tandem.tokenizer import Tokenizer


@dataclass(slots=True)
class Opened:
    """One request, ready to run: the step loop's side and the stream's."""

    message: pb.GenerateRequest
    valid: Validated
    grammar: GrammarMatcher | None
    # Chain hashes of the prompt's full blocks.
    hashes: list[bytes]
    job: Job
    stream: Stream
    # Last updates of resumed choices that had reached their end.
    ended: list[ChoiceUpdate] = field(default_factory=list)


class Openings:
    """Makes requests, choices and streams, and numbers them."""

    def __init__(self, settings: EngineSettings, tokenizer: Tokenizer, identity: Identity, kv_log: KvEventLog) -> None:
        self._settings = settings
        self._tokenizer = tokenizer
        self._identity = identity
        self._kv_log = kv_log
        self._request_ids = itertools.count(1)
        self._sequence_ids = itertools.count(1)

    def open(
        self,
        message: pb.GenerateRequest,
        valid: Validated,
        grammar: GrammarMatcher | None,
        arrival: float,
        trace: str,
    ) -> Opened:
        """Raises TandemError if the request's resume state contradicts itself; nothing is kept then."""
        request = Request(
            id=next(self._request_ids),
            name=message.request_id,
            params=valid.params,
            prompt=valid.prompt,
            arrival=arrival,
            salt=message.cache_salt.encode(),
            priority=message.priority,
            deadline=arrival + message.timeout_ms / 1000 if message.timeout_ms else None,
            score_prompt=valid.score_prompt,
            trace=trace,
            no_store=message.no_store,
        )
        outbox = Outbox(self._settings.stream_buffer_bytes, merge=not message.output.single_tokens)
        stream = Stream(request, [], outbox, message.attempt, message.output.receipt)
        hashes = hash_chain(valid.prompt, self._kv_log.block_size, request.salt)
        opened = Opened(message, valid, grammar, hashes, Job(request, {}), stream)
        outbox.put(self._accepted(opened))
        for index, resumed in enumerate(valid.resumed):
            self._add_choice(opened, index, resumed)
        return opened

    def _accepted(self, opened: Opened) -> pb.GenerateEvent:
        valid, identity = opened.valid, self._identity
        cached = 0 if valid.score_prompt else self._kv_log.cached_prefix(opened.hashes) * self._kv_log.block_size
        previous = opened.message.resume.numerics_id
        return pb.GenerateEvent(
            accepted=pb.Accepted(
                seed=valid.params.seed,
                prompt_tokens=len(valid.prompt),
                cached_tokens=min(cached, len(valid.prompt) - 1),
                numerics_id=identity.numerics_id,
                epoch=identity.epoch,
                model=identity.model,
                exact_resume=not previous or (previous == identity.numerics_id and identity.batch_invariant),
                engine=identity.engine,
                batch_invariant=identity.batch_invariant,
            )
        )

    def _add_choice(self, opened: Opened, index: int, resumed: Resumed) -> None:
        """Makes one choice by replaying what it had emitted."""
        valid, job, stream = opened.valid, opened.job, opened.stream
        sequence = Sequence(
            id=next(self._sequence_ids),
            choice=index,
            params=valid.params,
            token_ids=[*valid.prompt, *resumed.ids],
            prompt_len=len(valid.prompt),
            trace=job.request.trace,
            no_store=job.request.no_store,
        )
        choice = Choice(job.request, sequence, valid.max_output, hashes=list(opened.hashes))
        job.request.choices.append(choice)
        if resumed.finished:
            choice.status = Status.FINISHED
            stream.earlier_tokens += len(resumed.ids)
            return
        shape = opened.message.output
        output = ChoiceOutput(index, valid.rules, self._tokenizer, shape.final_only, shape.single_tokens)
        stream.outputs[index] = output
        stream.unfinished += 1
        matcher = opened.grammar.copy() if opened.grammar is not None else None
        if matcher is not None:
            job.matchers[index] = matcher
        tracker = job.trackers[index] = StopTracker(choice, valid.rules, self._tokenizer, matcher)
        if not resumed.ids:
            return
        finish, text = _replay(index, resumed, valid, tracker, output)
        if finish is not None:
            choice.status = Status.FINISHED
            opened.ended.append(ChoiceUpdate(index, [], None, 0, text, finish))


def _replay(
    index: int, resumed: Resumed, valid: Validated, tracker: StopTracker, output: ChoiceOutput
) -> tuple[Finish | None, str | None]:
    """Brings tracker, grammar and output to where the emitted tokens had led."""
    field = f"resume.choices[{index}]"
    ids = list(resumed.ids)
    settled = tracker.settle(ids, count=0)
    finish, text = settled.finish, settled.text
    if len(settled.ids) < len(ids):
        raise invalid(f"{field}.emitted_ids", len(ids), f"the output ended after {len(settled.ids)} tokens")
    shown = ids if valid.rules.shows(finish) else ids[:-1]
    try:
        output.resume(shown, text, resumed.text_bytes_sent, len(ids))
    except ValueError as error:
        raise invalid(f"{field}.text_bytes_sent", resumed.text_bytes_sent, str(error)) from error
    return finish, None if text is None else ""
