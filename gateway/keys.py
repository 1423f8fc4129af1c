"""API keys: kept as SHA-256 hashes in a JSON file that is read again when it changes.

The file: {"keys": [{"id": "alice", "sha256": "<hex>", "priority": 0, "requests_per_minute": 60,
"tokens_per_minute": 100000}]}. Keys are long random strings, so a fast hash is enough. `python -m gateway.keys NAME`
makes a key and prints it with its entry.
"""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
import sys
import time
from pathlib import Path

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gateway.errors import ApiError

log = logging.getLogger("gateway.keys")

CHECK_EVERY_S = 2.0


class ApiKey(BaseModel):
    """One key: who it is, and what it may."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: str = Field(min_length=1, max_length=128)
    sha256: str = Field(pattern="^[0-9a-f]{64}$")
    priority: int = 0
    requests_per_minute: int | None = Field(None, ge=1)
    tokens_per_minute: int | None = Field(None, ge=1)


class _KeyFile(BaseModel):
    model_config = ConfigDict(extra="forbid")

    keys: list[ApiKey]


class KeyFileError(ValueError):
    """The keys file cannot be used."""


def hash_key(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()


def read_keys(path: Path) -> dict[str, ApiKey]:
    """Keys by hash. Raises KeyFileError."""
    try:
        parsed = _KeyFile.model_validate(orjson.loads(path.read_bytes()))
    except OSError as error:
        raise KeyFileError(f"keys file {path}: {error.strerror}") from error
    except (orjson.JSONDecodeError, ValidationError) as error:
        first = error.errors()[0] if isinstance(error, ValidationError) else {"loc": (), "msg": str(error)}
        where = ".".join(str(item) for item in first["loc"])
        raise KeyFileError(f"keys file {path}: {where} {first['msg']}".replace("  ", " ")) from None
    ids = [key.id for key in parsed.keys]
    doubled = {name for name in ids if ids.count(name) > 1}
    if doubled:
        raise KeyFileError(f"keys file {path}: the id {sorted(doubled)[0]!r} is given twice")
    return {key.sha256: key for key in parsed.keys}


class KeyRing:
    """Finds the key that a request shows. Without a file everyone may ask."""

    def __init__(self, path: str = "") -> None:
        self._path = Path(path) if path else None
        self._keys: dict[str, ApiKey] = read_keys(self._path) if self._path else {}
        self._stamp = self._state()
        self._checked = time.monotonic()

    @property
    def required(self) -> bool:
        return self._path is not None

    def _state(self) -> tuple[int, int, int] | None:
        if self._path is None:
            return None
        try:
            stat = os.stat(self._path)
        except OSError:
            return None
        return stat.st_mtime_ns, stat.st_size, stat.st_ino

    def reload_if_changed(self) -> None:
        """Reads the file again if it changed; a broken one leaves the old keys in force and is logged."""
        if self._path is None or time.monotonic() - self._checked < CHECK_EVERY_S:
            return
        self._checked = time.monotonic()
        stamp = self._state()
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._keys = read_keys(self._path)
            log.info("keys file was read again", extra={"keys": len(self._keys)})
        except KeyFileError as error:
            log.error("keys file is broken; the old keys stay in force", extra={"reason": str(error)})

    def find(self, secret: str | None) -> ApiKey | None:
        """The key of a request; None where no keys are in use.

        Raises:
            ApiError: 401.
        """
        if self._path is None:
            return None
        self.reload_if_changed()
        if not secret:
            raise ApiError(
                401,
                "You did not provide an API key. Send it as 'Authorization: Bearer KEY'.",
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )
        found = self._keys.get(hash_key(secret))
        if found is None:
            raise ApiError(
                401, "Incorrect API key provided.", code="invalid_api_key", headers={"www-authenticate": "Bearer"}
            )
        return found


def cache_salt(key: ApiKey | None, asked: str | None, shared: bool) -> str:
    """The salt of a request's prefix cache: tied to the key, so that no tenant can time another's prompts."""
    if key is None or shared:
        return asked or ""
    return hashlib.sha256(f"{key.id}\0{asked or ''}".encode()).hexdigest()[:32]


def main(argv: list[str]) -> int:
    """Makes a key; prints the secret once, and the entry for the file."""
    if len(argv) != 2:
        print("usage: python -m gateway.keys NAME", file=sys.stderr)
        return 2
    secret = "sk-" + secrets.token_urlsafe(32)
    print(f"key (shown once): {secret}")
    print("entry:", orjson.dumps({"id": argv[1], "sha256": hash_key(secret)}).decode())
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv))
