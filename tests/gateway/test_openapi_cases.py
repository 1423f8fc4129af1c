"""schemathesis on /openapi.json: no 5xx, no status, media type or answer that the document does not tell.

Needs `pip install -e '.[proofs]'`. Runs against the mock router, or against the server that TANDEM_PROOF_URL names.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import hypothesis
import pytest

from tests.gateway import admin_mock
from tests.gateway.conftest import LoopThread

schemathesis = pytest.importorskip("schemathesis", reason="schemathesis is not installed: pip install -e '.[proofs]'")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3000)]

FULL = 120
# Valid and as many broken requests per operation.
EXAMPLES = int(os.environ.get("TANDEM_PROOF_EXAMPLES", str(FULL)))
CHECKS = ("not_a_server_error", "status_code_conformance", "content_type_conformance", "response_schema_conformance")
LEAST_CASES = 2000
# This stream has no end, so no case of it would return; test_page.py reads it.
ENDLESS = ["/tandem/events"]
MUST_ANSWER = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/embeddings",
    "/tokenize",
)
LIMITED = ("max_tokens", "max_completion_tokens", "max_output_tokens", "min_tokens")
FEW = 4
REQUIRED = {"messages", "prompt", "input", "tokens"}

counted: Counter[tuple[str, int]] = Counter()


@pytest.fixture(scope="module")
def api_url(router_loop: LoopThread, mock: tuple[Any, int]) -> Iterator[str]:
    """The server under test."""
    if given := os.environ.get("TANDEM_PROOF_URL"):
        yield given.rstrip("/")
        return
    from tests.gateway.conftest import RunningGateway

    admin_server, admin, admin_port = router_loop.run(admin_mock.start())
    admin.engines = [admin_mock.engine("engine-0")]
    admin.decisions = [admin_mock.decision("one")]
    gateway = RunningGateway(router=f"127.0.0.1:{mock[1]}", router_admin=f"127.0.0.1:{admin_port}")
    yield gateway.url
    gateway.stop()
    router_loop.run(admin_server.stop(0))


@pytest.fixture(scope="module")
def api(api_url: str) -> Any:
    return schemathesis.openapi.from_url(api_url + "/openapi.json").exclude(path=ENDLESS)


def shortened(body: Any) -> Any:
    """The body with few tokens to make; what is invalid for its range stays so."""
    if not isinstance(body, dict):
        return body
    short = dict(body)
    for name in LIMITED:
        value = short.get(name)
        if isinstance(value, int) and FEW < value < 2**31:
            short[name] = FEW
    for name in ("n", "best_of"):
        value = short.get(name)
        if isinstance(value, int) and 3 < value < 2**31:
            short[name] = 3
    if not any(short.get(name) is not None for name in LIMITED[:3]):
        # Alone these would be answered to the end of the context.
        if "input" in short and "dimensions" not in short:
            short["max_output_tokens"] = FEW
        elif "messages" in short:
            short["max_tokens"] = FEW
    return short


def thinned(body: Any, required: set[str], draw: Any) -> Any:
    """The body with at most three optional fields: all at once, some rule between two of them is always broken."""
    if not isinstance(body, dict):
        return body
    optional = sorted(name for name in body if name not in required)
    kept = {draw(hypothesis.strategies.sampled_from(optional)) for _ in range(3)} if optional else set()
    return {name: value for name, value in body.items() if name in required or name in kept}


def check(case: Any) -> None:
    case.body = shortened(case.body)
    answer = case.call(timeout=60)
    counted[f"{case.method} {case.operation.path}", answer.status_code] += 1
    named = schemathesis.checks.CHECKS.get_one
    case.validate_response(answer, checks=[named(name) for name in CHECKS])


def run_cases(operation: Any, mode: Any) -> None:
    """Draws cases of one operation, valid ones or broken ones, and checks their answers."""

    @hypothesis.settings(
        max_examples=EXAMPLES,
        deadline=None,
        database=None,
        # A failing case is short enough to read; making it shorter takes minutes.
        phases=[hypothesis.Phase.generate],
        derandomize=True,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(case=operation.as_strategy(generation_mode=mode), data=hypothesis.strategies.data())
    def one(case: Any, data: Any) -> None:
        if mode is schemathesis.GenerationMode.POSITIVE:
            case.body = thinned(case.body, REQUIRED, data.draw)
        check(case)

    one()


def test_answers_are_as_documented(api: Any) -> None:
    failed: list[str] = []
    began = time.monotonic()
    for found in api.get_all_operations():
        operation = found.ok()
        for mode in schemathesis.GenerationMode:
            try:
                run_cases(operation, mode)
            except hypothesis.errors.Unsatisfiable:
                # Nothing can be broken in a request without parameters.
                assert operation.method == "get" and mode is schemathesis.GenerationMode.NEGATIVE
            except Exception as error:
                failed.append(f"{operation.label} ({mode.value}): {error}")
            print(f"{counted.total():>6} {operation.label} {mode.value}", flush=True)
    for (label, status), count in sorted(counted.items()):
        print(f"{label:<36} {status} {count:>6}")
    print(f"cases: {counted.total()} in {time.monotonic() - began:.0f} s")
    assert not failed, "\n\n".join(failed)
    answered = {label for (label, status), count in counted.items() if status == 200}
    # Otherwise all cases would be refused at the door, and prove little.
    assert {"POST " + path for path in MUST_ANSWER} <= answered, counted
    if EXAMPLES >= FULL:
        assert counted.total() >= LEAST_CASES
