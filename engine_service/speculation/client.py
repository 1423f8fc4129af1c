"""The engine's end of the Propose stream: one question at a time, answers collected under a deadline, reconnects.

The step thread calls `ask` and `take`; neither blocks longer than told, and neither raises. A thread of its own reads
answers. At most one question is unanswered at any time, so a slow draft can never fill a socket or a queue.
"""

from __future__ import annotations

import logging
import queue
import random
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import grpc

from tandem.draft.v1 import draft_pb2 as pb
from tandem.draft.v1 import draft_pb2_grpc as rpc
from tandem.rpc import CHANNEL_OPTIONS, check_address

log = logging.getLogger(__name__)

_FIRST_BACKOFF_S = 0.1
_CONNECT_TIMEOUT_S = 2.0
# What an answer is believed to take before one was measured, milliseconds.
_EXPECTED_MS = 0.5
# Answers to no question, per stream, before it is broken off.
_MAX_UNASKED = 100


@dataclass(slots=True)
class ClientStats:
    """Counters since the start of the engine."""

    questions: int = 0
    answers: int = 0
    # Answers to a question that was given up: dropped by their number.
    dropped: int = 0
    # Questions whose answer was not there when the engine had to go on.
    misses: int = 0
    connects: int = 0
    disconnects: int = 0
    # Questions that were never answered because the stream ended.
    lost: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0
    # From question to answer, microseconds: sum, and moving average.
    latency_us_sum: float = 0.0
    latency_us: float = 0.0


class DraftClient:
    """One long-lived stream. `generation` changes whenever the other side may have forgotten everything."""

    def __init__(self, address: str, stall_s: float = 1.0, max_backoff_s: float = 5.0) -> None:
        """stall_s: a question unanswered for longer breaks the stream off. Raises ValueError on a bad address."""
        self._target = check_address(address)
        self._stall_s = stall_s
        self._max_backoff_s = max_backoff_s
        self.stats = ClientStats()
        self.generation = 0
        self._condition = threading.Condition()
        self._questions: queue.SimpleQueue[pb.ProposeRequest | None] | None = None
        self._call: Any = None
        self._pending_step = 0
        self._asked_at = 0.0
        self._answer: pb.ProposeResponse | None = None
        self._first_answer = True
        self._step = 0
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="draft-client", daemon=True)
        self._thread.start()

    @property
    def connected(self) -> bool:
        return self._questions is not None

    @property
    def idle(self) -> bool:
        """A question can be asked now."""
        return self._questions is not None and not self._pending_step and self._answer is None

    def ask(self, question: pb.ProposeRequest) -> bool:
        """Numbers and sends a question; False if there is no connection or the one before is unanswered."""
        with self._condition:
            if not self.idle or self._questions is None:
                return False
            self._step += 1
            question.step = self._step
            self._pending_step = self._step
            self._asked_at = time.perf_counter()
            self.stats.questions += 1
            self.stats.sent_bytes += question.ByteSize()
            self._questions.put(question)
            return True

    def take(self, timeout_s: float) -> pb.ProposeResponse | None:
        """The answer to the question, waiting at most `timeout_s` (0: only looks)."""
        with self._condition:
            if self._answer is None and self._pending_step and timeout_s > 0:
                deadline = time.perf_counter() + timeout_s
                while self._answer is None and self._pending_step:
                    left = deadline - time.perf_counter()
                    if left <= 0 or not self._condition.wait(left):
                        break
                if self._answer is None:
                    self.stats.misses += 1
            answer, self._answer = self._answer, None
            overdue = self._pending_step and time.perf_counter() - self._asked_at > self._stall_s
        if overdue:
            self.break_off(f"no answer for {self._stall_s:g} s")
        return answer

    def remaining_ms(self) -> float:
        """How long the pending answer may still take: what answers usually take, or as long again if it is late."""
        elapsed = (time.perf_counter() - self._asked_at) * 1e3
        usual = self.stats.latency_us / 1e3 or _EXPECTED_MS
        return usual - elapsed if elapsed < usual else elapsed

    def break_off(self, reason: str) -> None:
        """Gives the question up and the stream with it; the thread connects anew after its backoff."""
        log.warning("draft stream broken off", extra={"reason": reason})
        self._lose()
        call = self._call
        if call is not None:
            call.cancel()

    def close(self) -> None:
        """Ends stream and thread. Takes at most about two seconds."""
        self._closing.set()
        self._lose()
        call = self._call
        if call is not None:
            call.cancel()
        self._thread.join(timeout=2.0)

    # The thread.

    def _run(self) -> None:
        backoff = _FIRST_BACKOFF_S
        known_down = False
        while not self._closing.is_set():
            began = time.monotonic()
            reason = self._stream()
            if self._closing.is_set():
                return
            if time.monotonic() - began > 10 * _CONNECT_TIMEOUT_S:
                backoff, known_down = _FIRST_BACKOFF_S, False
            if not known_down:
                log.warning("no draft service: going on without drafts", extra={"reason": reason})
                known_down = True
            self._closing.wait(backoff * (0.75 + random.random() / 2))
            backoff = min(2 * backoff, self._max_backoff_s)

    def _stream(self) -> str:
        """Connects and reads answers until the stream ends. Returns why it ended; never raises."""
        channel = grpc.insecure_channel(self._target, options=list(CHANNEL_OPTIONS))
        try:
            ready = grpc.channel_ready_future(channel)
            try:
                ready.result(timeout=_CONNECT_TIMEOUT_S)
            except grpc.FutureTimeoutError:
                ready.cancel()
                return "cannot connect"
            questions: queue.SimpleQueue[pb.ProposeRequest | None] = queue.SimpleQueue()
            call = rpc.DraftServiceStub(channel).Propose(_until_none(questions))
            self._call = call
            with self._condition:
                self.generation += 1
                self._first_answer = True
                self._questions = questions
                self.stats.connects += 1
            try:
                unasked = 0
                for answer in call:
                    unasked += not self._deliver(answer)
                    if unasked > _MAX_UNASKED:
                        call.cancel()
                        return "flood of answers that nobody asked for"
                return "stream ended"
            except grpc.RpcError as error:
                return str(error.code()) if isinstance(error, grpc.Call) else str(error)
            finally:
                self._lose()
                questions.put(None)
                self.stats.disconnects += 1
        except Exception as error:
            log.exception("draft stream failed")
            return str(error)
        finally:
            self._call = None
            channel.close()

    def _deliver(self, answer: pb.ProposeResponse) -> bool:
        """False if the answer is to no question that still waits."""
        with self._condition:
            self.stats.received_bytes += answer.ByteSize()
            if answer.step != self._pending_step:
                self.stats.dropped += 1
                return False
            elapsed = (time.perf_counter() - self._asked_at) * 1e6
            self.stats.answers += 1
            self.stats.latency_us_sum += elapsed
            self._note_latency(elapsed)
            self._pending_step = 0
            self._answer = answer
            self._condition.notify_all()
            return True

    def _note_latency(self, elapsed_us: float) -> None:
        """The first answer of a connection pays for its set-up and does not count; a fall is believed sooner."""
        first, self._first_answer = self._first_answer, False
        known = self.stats.latency_us
        if first:
            return
        rate = 1.0 if not known else 0.3 if elapsed_us < known else 0.1
        self.stats.latency_us += rate * (elapsed_us - known)

    def _lose(self) -> None:
        """Forgets the connection: what was asked is void."""
        with self._condition:
            if self._pending_step:
                self.stats.lost += 1
            self._questions = None
            self._pending_step = 0
            self._answer = None
            self._condition.notify_all()


class NoClient:
    """Stands for a client where no draft service is named: never connected, never asked."""

    connected = idle = False
    generation = 0

    def __init__(self) -> None:
        self.stats = ClientStats()

    def ask(self, question: pb.ProposeRequest) -> bool:
        return False

    def take(self, timeout_s: float) -> pb.ProposeResponse | None:
        return None

    def remaining_ms(self) -> float:
        return 0.0

    def break_off(self, reason: str) -> None:
        return

    def close(self) -> None:
        return


def _until_none(questions: queue.SimpleQueue[pb.ProposeRequest | None]) -> Iterator[pb.ProposeRequest]:
    while (question := questions.get()) is not None:
        yield question
