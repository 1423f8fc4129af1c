"""Reading server-sent events in tests."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import httpx


@dataclass(frozen=True)
class Event:
    """One event as it came."""

    name: str | None
    data: str

    @property
    def json(self) -> Any:
        return json.loads(self.data)


def read_events(response: httpx.Response) -> list[Event]:
    """All events of a stream; comments are skipped, any other line is an error."""
    events: list[Event] = []
    name = None
    for line in response.iter_lines():
        if line.startswith("event: "):
            name = line[7:]
        elif line.startswith("data: "):
            events.append(Event(name, line[6:]))
            name = None
        else:
            assert line == "" or line.startswith(":"), f"not a server-sent-events line: {line!r}"
    return events
