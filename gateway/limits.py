"""Request and token rates per key, in one small file that all workers of a gateway share.

Each key has a slot with two token buckets (capacity = one minute's allowance, refilled steadily). Tokens of the answer
are charged when it is done, so a bucket may go below zero; the next request then waits.
"""

from __future__ import annotations

import fcntl
import hashlib
import mmap
import os
import struct
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from gateway.errors import RATE, ApiError
from gateway.keys import ApiKey

SLOTS = 4096
# Key digest (8 bytes), requests left, tokens left, time of the last refill (wall clock, seconds).
_SLOT = struct.Struct("<8sddd")
_FREE = bytes(8)


@dataclass(frozen=True, slots=True)
class _State:
    requests: float
    tokens: float
    at: float


class RateLimiter:
    """Buckets by key id. `path` names the shared file; without it a private one is made and removed."""

    def __init__(self, path: str = "", clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._own = not path
        if path:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        else:
            self._fd, path = tempfile.mkstemp(prefix="tandem-rates-")
            os.unlink(path)
        if os.fstat(self._fd).st_size < SLOTS * _SLOT.size:
            os.ftruncate(self._fd, SLOTS * _SLOT.size)
        self._map = mmap.mmap(self._fd, SLOTS * _SLOT.size)

    def close(self) -> None:
        self._map.close()
        os.close(self._fd)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        fcntl.flock(self._fd, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._fd, fcntl.LOCK_UN)

    def _slot(self, key: ApiKey) -> tuple[int, bytes]:
        """Offset of the key's slot (open addressing)."""
        digest = hashlib.sha256(key.id.encode()).digest()[:8]
        start = int.from_bytes(digest, "little") % SLOTS
        for step in range(SLOTS):
            offset = (start + step) % SLOTS * _SLOT.size
            if self._map[offset : offset + 8] in (digest, _FREE):
                return offset, digest
        raise RuntimeError(f"more than {SLOTS} keys have used this gateway since it started")

    def _read(self, key: ApiKey, offset: int, now: float) -> _State:
        digest, requests, tokens, at = _SLOT.unpack_from(self._map, offset)
        most_requests = float(key.requests_per_minute or 0)
        most_tokens = float(key.tokens_per_minute or 0)
        if digest == _FREE:
            return _State(most_requests, most_tokens, now)
        share = max(0.0, now - at) / 60.0
        return _State(
            min(most_requests, requests + most_requests * share), min(most_tokens, tokens + most_tokens * share), now
        )

    def take(self, key: ApiKey | None, requests: int, tokens: int) -> dict[str, str]:
        """Charges a key and returns the x-ratelimit headers.

        Raises:
            ApiError: 429 with the time after which it would work.
        """
        if key is None or (key.requests_per_minute is None and key.tokens_per_minute is None):
            return {}
        with self._locked():
            offset, digest = self._slot(key)
            state = self._read(key, offset, self._clock())
            wait, what = _shortage(key, state, requests, tokens)
            if wait == 0.0:
                state = _State(state.requests - requests, state.tokens - tokens, state.at)
            _SLOT.pack_into(self._map, offset, digest, state.requests, state.tokens, state.at)
        headers = _headers(key, state)
        if wait > 0.0:
            limit = key.requests_per_minute if what == "requests" else key.tokens_per_minute
            raise ApiError(
                429,
                f"Rate limit reached: {limit} {what} per minute. Try again in {wait:.1f} s.",
                kind=RATE,
                code="rate_limit_exceeded",
                retry_after_s=wait,
                headers=headers,
            )
        return headers

    def charge(self, key: ApiKey | None, tokens: int) -> None:
        """Charges tokens that have been spent; never refuses."""
        if key is None or key.tokens_per_minute is None or tokens <= 0:
            return
        with self._locked():
            offset, digest = self._slot(key)
            state = self._read(key, offset, self._clock())
            _SLOT.pack_into(self._map, offset, digest, state.requests, state.tokens - tokens, state.at)


def _shortage(key: ApiKey, state: _State, requests: int, tokens: int) -> tuple[float, str]:
    """Seconds until the buckets hold enough, and which one is short."""
    if key.requests_per_minute is not None and state.requests < requests:
        return (requests - state.requests) * 60.0 / key.requests_per_minute, "requests"
    # More than a minute's allowance at once passes when the bucket is full, else it never could.
    if key.tokens_per_minute is not None and tokens > 0:
        needed = min(float(tokens), float(key.tokens_per_minute))
        if state.tokens < needed:
            return (needed - state.tokens) * 60.0 / key.tokens_per_minute, "tokens"
    return 0.0, ""


def _headers(key: ApiKey, state: _State) -> dict[str, str]:
    result: dict[str, str] = {}
    for name, limit, left in (
        ("requests", key.requests_per_minute, state.requests),
        ("tokens", key.tokens_per_minute, state.tokens),
    ):
        if limit is not None:
            result[f"x-ratelimit-limit-{name}"] = str(limit)
            result[f"x-ratelimit-remaining-{name}"] = str(max(0, int(left)))
            result[f"x-ratelimit-reset-{name}"] = f"{max(0.0, (limit - left) * 60.0 / limit):.1f}s"
    return result
