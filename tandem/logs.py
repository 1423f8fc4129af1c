"""Logging: coloured lines with a service prefix on a terminal, JSON lines otherwise, always to stderr."""

from __future__ import annotations

import json
import logging
import os
import sys
import time

_COLOURS = {"DEBUG": "\x1b[2m", "WARNING": "\x1b[33m", "ERROR": "\x1b[31m", "CRITICAL": "\x1b[31;1m"}
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


def _extras(record: logging.LogRecord) -> dict[str, object]:
    return {key: value for key, value in vars(record).items() if key not in _STANDARD}


class JsonFormatter(logging.Formatter):
    """One JSON object a line; what was passed as `extra=` becomes fields."""

    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, object] = {
            "time": round(record.created, 3),
            "level": record.levelname.lower(),
            "service": self._service,
            "logger": record.name,
            "message": record.getMessage(),
            **_extras(record),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str, ensure_ascii=False)


class TerminalFormatter(logging.Formatter):
    """A short line for people."""

    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        extras = " ".join(f"{key}={value}" for key, value in _extras(record).items())
        text = f"{record.getMessage()} {extras}".rstrip()
        if record.exc_info:
            text += "\n" + self.formatException(record.exc_info)
        return f"\x1b[36m{self._service:<8}\x1b[0m {clock} {_COLOURS.get(record.levelname, '')}{text}\x1b[0m"


def setup(service: str, level: str = "info") -> None:
    """Sends all logging of this process to stderr in the form that suits it.

    A launcher that reads its children's stderr tells them by TANDEM_LOG_STYLE (terminal or json) what it writes to, and
    by TANDEM_LOG_NAME what to call themselves.
    """
    service = os.environ.get("TANDEM_LOG_NAME") or service
    style = os.environ.get("TANDEM_LOG_STYLE") or ("terminal" if sys.stderr.isatty() else "json")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(TerminalFormatter(service) if style == "terminal" else JsonFormatter(service))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    # These are loud at info and say nothing that our own line per request does not.
    for noisy in ("httpx", "httpcore", "uvicorn.access", "uvicorn.error", "huggingface_hub", "asyncio"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
