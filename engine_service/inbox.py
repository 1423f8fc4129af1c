"""What other threads want of the step loop. Any thread puts in, the step thread takes out between two steps."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from engine_service.jobs import Job
from tandem.errors import TandemError


@dataclass(frozen=True, slots=True)
class Cancel:
    """End a request. Its error is reported; None ends it silently."""

    request_id: int
    error: TandemError | None


@dataclass(frozen=True, slots=True)
class Call:
    """Something to run between two steps."""

    work: Callable[[], Any]
    future: Future[Any]


class Inbox:
    """Jobs and cancels in order of arrival, calls beside them, and the bell that wakes the loop."""

    def __init__(self) -> None:
        self._orders: deque[Job | Cancel] = deque()
        self._calls: deque[Call] = deque()
        self._bell = threading.Event()

    def put(self, order: Job | Cancel) -> None:
        self._orders.append(order)
        self._bell.set()

    def put_call(self, work: Callable[[], Any]) -> Future[Any]:
        call = Call(work, Future())
        self._calls.append(call)
        self._bell.set()
        return call.future

    def ring(self) -> None:
        """Wakes the loop without an order."""
        self._bell.set()

    # The step thread

    def quiet(self) -> None:
        """Forgets rings so far: call it before looking for orders, so that none is slept on."""
        self._bell.clear()

    def wait(self, timeout: float | None) -> None:
        self._bell.wait(timeout)

    def __bool__(self) -> bool:
        return bool(self._orders or self._calls)

    def orders(self) -> Iterator[Job | Cancel]:
        while self._orders:
            yield self._orders.popleft()

    def next_call(self) -> Call | None:
        """One that was not cancelled meanwhile; from here on it cannot be."""
        while self._calls:
            call = self._calls.popleft()
            if call.future.set_running_or_notify_cancel():
                return call
        return None

    def close(self) -> None:
        """Cancels the calls that nobody will run."""
        while self._calls:
            self._calls.popleft().future.cancel()
