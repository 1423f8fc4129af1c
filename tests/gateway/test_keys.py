"""Keys, rates, priorities and salts."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from gateway.errors import ApiError
from gateway.keys import ApiKey, KeyFileError, KeyRing, cache_salt, hash_key, main, read_keys
from gateway.limits import RateLimiter

BODY = {"prompt": "one two", "max_tokens": 2}


def write(path: Path, *keys: dict[str, Any]) -> str:
    path.write_text(json.dumps({"keys": list(keys)}))
    return str(path)


def entry(name: str, **more: Any) -> dict[str, Any]:
    return {"id": name, "sha256": hash_key(f"sk-{name}"), **more}


def bearer(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer sk-{name}"}


def test_keys_are_asked_for_where_they_matter(make_stand: Any, tmp_path: Path) -> None:
    stand = make_stand(keys_file=write(tmp_path / "keys.json", entry("alice")))
    for path in ("/health", "/ready", "/version", "/metrics", "/openapi.json"):
        assert stand.http.get(path).status_code == 200
    for headers in ({}, bearer("bob"), {"authorization": "Basic x"}, {"authorization": "Bearer"}):
        for method, path in (("POST", "/v1/completions"), ("GET", "/v1/models"), ("POST", "/tokenize")):
            answer = stand.http.request(method, path, json=BODY, headers=headers)
            assert answer.status_code == 401 and answer.json()["error"]["code"] == "invalid_api_key"
    assert stand.post("/v1/completions", BODY, headers=bearer("alice")).status_code == 200
    assert stand.router.requests[-1].tenant == "alice"


def test_the_key_file_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.keys.CHECK_EVERY_S", 0.0)
    path = tmp_path / "keys.json"
    ring = KeyRing(write(path, entry("alice")))
    assert ring.find("sk-alice")
    write(path, entry("bob"))
    os.utime(path, ns=(1, 1))
    assert ring.find("sk-bob")
    with pytest.raises(ApiError):
        ring.find("sk-alice")
    path.write_text("{ broken")
    os.utime(path, ns=(2, 2))
    assert ring.find("sk-bob"), "a broken file leaves the old keys in force"


@pytest.mark.parametrize(
    "text",
    [
        "nonsense",
        "{}",
        '{"keys": [{"id": "a"}]}',
        '{"keys": [{"id": "a", "sha256": "plain"}]}',
        json.dumps({"keys": [entry("a"), entry("a")]}),
        json.dumps({"keys": [entry("a", colour="red")]}),
    ],
)
def test_broken_key_files_are_refused_at_start(tmp_path: Path, text: str) -> None:
    path = tmp_path / "keys.json"
    path.write_text(text)
    with pytest.raises(KeyFileError, match=r"keys\.json"):
        read_keys(path)


def test_making_a_key(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["keys", "carol"]) == 0
    out = capsys.readouterr().out
    secret = out.split("once): ")[1].split("\n")[0]
    assert json.loads(out.split("entry: ")[1]) == {"id": "carol", "sha256": hash_key(secret)}


def test_requests_per_minute(make_stand: Any, tmp_path: Path) -> None:
    stand = make_stand(keys_file=write(tmp_path / "k.json", entry("a", requests_per_minute=2), entry("b")))
    answers = [stand.post("/v1/completions", BODY, headers=bearer("a")) for _ in range(3)]
    assert [answer.status_code for answer in answers] == [200, 200, 429]
    assert answers[0].headers["x-ratelimit-limit-requests"] == "2"
    assert [answer.headers["x-ratelimit-remaining-requests"] for answer in answers] == ["1", "0", "0"]
    assert int(answers[2].headers["retry-after"]) >= 1 and answers[2].json()["error"]["code"] == "rate_limit_exceeded"
    assert stand.post("/v1/completions", BODY, headers=bearer("b")).status_code == 200


def test_tokens_per_minute_count_prompt_and_answer(make_stand: Any, tmp_path: Path) -> None:
    stand = make_stand(keys_file=write(tmp_path / "k.json", entry("a", tokens_per_minute=20)))
    body = {"prompt": "one two three four", "max_tokens": 14}
    first = stand.post("/v1/completions", body, headers=bearer("a"))
    assert first.status_code == 200 and first.headers["x-ratelimit-remaining-tokens"] == "16"
    second = stand.post("/v1/completions", body, headers=bearer("a"))
    assert second.status_code == 429 and "tokens per minute" in second.json()["error"]["message"]


def test_buckets_refill_and_are_shared(tmp_path: Path) -> None:
    now = [1000.0]
    path = str(tmp_path / "rates")
    one, two = RateLimiter(path, lambda: now[0]), RateLimiter(path, lambda: now[0])
    key = ApiKey(id="a", sha256="0" * 64, requests_per_minute=2)
    one.take(key, 1, 0)
    two.take(key, 1, 0)
    with pytest.raises(ApiError) as caught:
        one.take(key, 1, 0)
    assert caught.value.status == 429 and caught.value.retry_after_s == pytest.approx(30.0)
    now[0] += 30.0
    assert two.take(key, 1, 0)["x-ratelimit-remaining-requests"] == "0"
    one.close()
    two.close()


def test_answers_may_overdraw_and_then_the_key_waits() -> None:
    now = [0.0]
    limiter = RateLimiter(clock=lambda: now[0])
    key = ApiKey(id="a", sha256="0" * 64, tokens_per_minute=60)
    limiter.take(key, 0, 10)
    limiter.charge(key, 110)
    with pytest.raises(ApiError) as caught:
        limiter.take(key, 0, 1)
    assert caught.value.retry_after_s == pytest.approx(61.0)
    # A prompt of more than a minute's tokens passes a full bucket.
    now[0] += 200.0
    limiter.take(key, 0, 1000)
    limiter.close()


def test_a_request_may_not_outrank_its_key(make_stand: Any, tmp_path: Path) -> None:
    stand = make_stand(keys_file=write(tmp_path / "k.json", entry("a", priority=5)))
    answer = stand.post("/v1/completions", {**BODY, "priority": 4}, headers=bearer("a"))
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "priority"
    stand.post("/v1/completions", {**BODY, "priority": 6}, headers=bearer("a"))
    stand.post("/v1/completions", BODY, headers=bearer("a"))
    assert [request.priority for request in stand.router.requests] == [6, 5]


def test_salts_keep_tenants_apart(make_stand: Any, tmp_path: Path) -> None:
    alice, bob = (ApiKey(id=name, sha256="0" * 64) for name in ("alice", "bob"))
    assert cache_salt(None, "x", False) == "x" and cache_salt(alice, "x", True) == "x"
    assert len({cache_salt(alice, None, False), cache_salt(bob, None, False), cache_salt(alice, "x", False)}) == 3
    stand = make_stand(keys_file=write(tmp_path / "k.json", entry("alice")))
    stand.post("/v1/completions", BODY, headers=bearer("alice"))
    assert stand.router.requests[-1].cache_salt == cache_salt(alice, None, False)
