"""Builds the events of one Generate stream from what the step loop reports. Runs on the event loop, beside compute."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine_service.outbox import DRAFTED_BITS, Outbox, merge_delta
from engine_service.requests import Request
from engine_service.text import Finish, StopRules
from tandem.inference.v1 import inference_pb2 as pb
from tandem.lm.types import TokenScore
from tandem.tokenizer import Tokenizer

_REASONS = {
    "stop": pb.FINISH_REASON_STOP,
    "length": pb.FINISH_REASON_LENGTH,
    "cancelled": pb.FINISH_REASON_CANCELLED,
    "error": pb.FINISH_REASON_ERROR,
}


@dataclass(frozen=True, slots=True)
class ChoiceUpdate:
    """What a step, or several in a row, gave one choice."""

    choice: int
    ids: list[int]
    scores: list[TokenScore] | None
    # Bit i: id i was a draft.
    drafted: int
    # Text that these ids release, or None: it is this side's to make.
    text: str | None
    finish: Finish | None

    def then(self, more: ChoiceUpdate) -> ChoiceUpdate:
        """This update and the one that follows it as one."""
        scored = self.scores is not None or more.scores is not None
        return ChoiceUpdate(
            self.choice,
            self.ids + more.ids,
            [*(self.scores or ()), *(more.scores or ())] if scored else None,
            self.drafted | more.drafted << len(self.ids),
            None if more.text is None else (self.text or "") + more.text,
            more.finish,
        )


def singles(update: ChoiceUpdate) -> list[ChoiceUpdate]:
    """The same update as one per token. Text that was made for all of them comes with the last."""
    last = len(update.ids) - 1
    return [
        ChoiceUpdate(
            update.choice,
            [token],
            None if update.scores is None else [update.scores[number]],
            update.drafted >> number & 1,
            update.text if number == last or update.text is None else "",
            update.finish if number == last else None,
        )
        for number, token in enumerate(update.ids)
    ]


def to_logprob(score: TokenScore) -> pb.TokenLogprob:
    return pb.TokenLogprob(
        id=score.id,
        logprob=score.logprob,
        rank=score.rank,
        top_ids=score.top_ids,
        top_logprobs=score.top_logprobs,
    )


def prompt_event(first_token: int, scores: Sequence[TokenScore]) -> pb.GenerateEvent:
    """Scores of a whole prompt; the first token has none."""
    tokens = [pb.TokenLogprob(id=first_token), *map(to_logprob, scores)]
    return pb.GenerateEvent(prompt=pb.PromptScores(tokens=tokens))


class ChoiceOutput:
    """Offsets, text and held-back deltas of one choice."""

    def __init__(
        self, index: int, rules: StopRules, tokenizer: Tokenizer, final_only: bool, single_tokens: bool = False
    ) -> None:
        self.index = index
        self._rules = rules
        # Where there are stop strings the step thread has read the text already.
        self._text = None if rules.stops else rules.text_stream(tokenizer)
        self._tokens = 0
        self._text_bytes = 0
        self._carry = ""
        self._final_only = final_only
        self._single_tokens = single_tokens
        self._held: pb.Delta | None = None

    @property
    def tokens(self) -> int:
        """Output tokens so far, those of an earlier stream included."""
        return self._tokens

    def resume(self, shown: Sequence[int], text: str | None, text_bytes_sent: int, tokens: int) -> None:
        """Continues after `tokens` output tokens, of whose text the first bytes were sent already.

        shown: those ids whose text belongs to the output; text: their text, if somebody has made it.

        Raises:
            ValueError: more text was sent than the ids have, or a character was cut.
        """
        if text is None:
            text = "".join(self._text.push(token, 0)[0] for token in shown) if self._text else ""
        data = text.encode()
        if text_bytes_sent > len(data):
            raise ValueError(f"the text of emitted_ids has {len(data)} bytes")
        try:
            self._carry = data[text_bytes_sent:].decode()
        except UnicodeDecodeError as error:
            raise ValueError("that cuts a character") from error
        self._tokens = tokens
        self._text_bytes = text_bytes_sent

    def events(self, update: ChoiceUpdate) -> list[pb.GenerateEvent]:
        """The events that this update gives rise to, in order."""
        if self._single_tokens and len(update.ids) > 1:
            return [event for single in singles(update) for event in self.events(single)]
        delta = self._delta(update)
        events = []
        if self._final_only:
            if self._held is None:
                self._held = delta
            else:
                merge_delta(self._held, delta)
            delta = self._held
        due = update.finish is not None or not self._final_only
        if due and (delta.ids or delta.text):
            events.append(pb.GenerateEvent(delta=delta))
        if update.finish is not None:
            events.append(pb.GenerateEvent(finished=self._finished(update.finish)))
        return events

    def _delta(self, update: ChoiceUpdate) -> pb.Delta:
        text = self._carry + (update.text if update.text is not None else self._read(update))
        self._carry = ""
        delta = pb.Delta(
            choice=self.index,
            token_offset=self._tokens,
            text_offset=self._text_bytes,
            ids=update.ids,
            text=text,
            drafted=update.drafted if len(update.ids) <= DRAFTED_BITS else 0,
        )
        if update.scores is not None:
            delta.logprobs.extend(map(to_logprob, update.scores))
        self._tokens += len(update.ids)
        self._text_bytes += len(text.encode())
        return delta

    def _read(self, update: ChoiceUpdate) -> str:
        if self._text is None:
            return ""
        shown = update.ids if self._rules.shows(update.finish) else update.ids[:-1]
        text = "".join(self._text.push(token, 0)[0] for token in shown)
        return text + self._text.end() if update.finish is not None else text

    def _finished(self, finish: Finish) -> pb.Finished:
        message = pb.Finished(choice=self.index, reason=_REASONS[finish.reason])
        if finish.stop_string is not None:
            message.stop_string = finish.stop_string
        elif finish.stop_token_id is not None:
            message.stop_token_id = finish.stop_token_id
        return message


@dataclass(frozen=True, slots=True)
class Identity:
    """What an engine says of itself in receipts and accepted events."""

    epoch: int
    engine: str
    model: str
    numerics_id: str
    batch_invariant: bool
    kernel_path: str


def usage_event(request: Request, completion_tokens: int, identity: Identity, attempt: int, receipt: bool) -> pb.Usage:
    """The last message of a stream; times in milliseconds."""
    usage = pb.Usage(
        prompt_tokens=len(request.prompt),
        completion_tokens=completion_tokens,
        cached_tokens=request.cached_tokens,
    )
    if receipt:
        usage.receipt.CopyFrom(make_receipt(request, identity, attempt))
    return usage


def _ms(start: float | None, end: float | None) -> float:
    return 0.0 if start is None or end is None else round((end - start) * 1000, 3)


def make_receipt(request: Request, identity: Identity, attempt: int) -> pb.Receipt:
    return pb.Receipt(
        queued_ms=_ms(request.arrival, request.first_step),
        prefill_ms=_ms(request.first_step, request.first_token),
        decode_ms=_ms(request.first_token, request.last_token),
        cached_blocks=request.cached_blocks,
        preemptions=request.preemptions,
        drafts_proposed=request.drafts_proposed,
        drafts_accepted=request.drafts_accepted,
        steps=request.steps,
        seed=request.params.seed,
        numerics_id=identity.numerics_id,
        kernel_path=identity.kernel_path,
        engine=identity.engine,
        attempts=max(1, attempt),
        accepted_by_proposer=request.accepted_by_proposer,
        proposed_by_proposer=request.proposed_by_proposer,
        accepted_by_position=request.accepted_by_position,
        verifications=request.verifications,
    )


class Stream:
    """One live Generate call on the event loop: its outbox and its choices' outputs."""

    def __init__(self, request: Request, outputs: list[ChoiceOutput], outbox: Outbox, attempt: int, receipt: bool):
        self.request = request
        self.outputs = {output.index: output for output in outputs}
        self.outbox = outbox
        self.attempt = attempt
        self.receipt = receipt
        self.unfinished = len(outputs)
        # Output tokens of choices that had finished before this stream began.
        self.earlier_tokens = 0
        self.finish_reasons: list[str] = []
        self.done = False
        # When a step last gave it tokens, time.monotonic; kept only where metrics are served.
        self.last_delivery: float | None = None

    @property
    def completion_tokens(self) -> int:
        return self.earlier_tokens + sum(output.tokens for output in self.outputs.values())

    def apply(self, updates: Sequence[ChoiceUpdate], identity: Identity) -> bool:
        """Turns updates into events. False if the reader is too slow and the stream has failed."""
        for update in updates:
            for event in self.outputs[update.choice].events(update):
                if not self.outbox.put(event):
                    return False
            if update.finish is not None:
                self.unfinished -= 1
                self.finish_reasons.append(update.finish.reason)
        if not self.unfinished and not self.done:
            self.done = True
            usage = usage_event(self.request, self.completion_tokens, identity, self.attempt, self.receipt)
            self.outbox.put(pb.GenerateEvent(usage=usage))
            self.outbox.close()
        return True
