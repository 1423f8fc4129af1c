"""The live page in a real browser, before the real stack. Screenshots go to tests/artifacts/page/."""

from __future__ import annotations

import json
import os
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gateway.keys import hash_key
from tests.e2e.browser import Browser, missing
from tests.e2e.conftest import _port
from tests.e2e.stack import Stack
from tests.gateway.conftest import RunningGateway

ARTEFACTS = Path(__file__).resolve().parents[1] / "artifacts" / "page"
REPEAT = "Repeat this ten times: the quick brown fox jumps over the lazy dog."

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(missing()), reason=missing() or "-")]


@pytest.fixture(scope="module")
def stack(start_stack: Callable[..., Stack]) -> Stack:
    return start_stack("--engines", "2", "--kv-cache-bytes", str(256 * 1024 * 1024))


@pytest.fixture
def browser() -> Iterator[Browser]:
    with tempfile.TemporaryDirectory(prefix="tt-chromium-", ignore_cleanup_errors=True) as folder:
        started = Browser(Path(folder), _port())
        try:
            yield started
        finally:
            started.close()


def wait_live(browser: Browser) -> None:
    browser.eventually(lambda: browser.text("#link") == "live", what="live")


def load(stack: Stack, streams: int = 3, rounds: int = 4) -> list[threading.Thread]:
    """Starts streams of short chats, so that the curves have something to show."""

    def ask(number: int) -> None:
        with stack.client() as http:
            for turn in range(rounds):
                question = f"Tell me about the number {number * 10 + turn}."
                message = {"role": "user", "content": question}
                body = {"messages": [message], "max_tokens": 48, "seed": turn, "stream": True}
                answer = http.post("/v1/chat/completions", json=body)
                assert answer.status_code == 200 and "[DONE]" in answer.text

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(streams)]
    for thread in threads:
        thread.start()
    return threads


def test_fleet_and_both_themes(browser: Browser, stack: Stack) -> None:
    browser.dark(False)
    browser.go(stack.url)
    wait_live(browser)
    browser.eventually(lambda: browser.count("tr[data-state=ready]") == 2, what="two engines ready")
    row = browser.text("tr[data-engine=engine-0]")
    assert "smollm2-135m-instruct" in row and "closed" in row
    threads = load(stack)
    browser.eventually(lambda: "ms" in browser.text("#now-ttft"), what="a time to the first token")
    browser.eventually(lambda: "ms" in browser.text("#now-itl"), what="a time between tokens")
    browser.eventually(lambda: browser.text("#now-tps") not in ("", "0"), what="tokens per second")
    for thread in threads:
        thread.join()
    light = browser.run("return getComputedStyle(document.body).backgroundColor")
    browser.dark(True)
    assert browser.run("return getComputedStyle(document.body).backgroundColor") != light
    browser.screenshot(ARTEFACTS / "fleet-dark.png")
    # The button goes against what the system prefers.
    browser.click("#theme-button")
    assert browser.run("return getComputedStyle(document.body).backgroundColor") == light
    browser.screenshot(ARTEFACTS / "fleet-light.png")
    assert browser.errors() == []


def test_chat_shows_where_tokens_come_from(browser: Browser, stack: Stack) -> None:
    browser.go(f"{stack.url}/#/playground")
    wait_live(browser)
    browser.eventually(lambda: browser.count("#options select option") == 1, what="the model")
    browser.run("document.forms.options.elements.temperature.value = '0'")
    browser.run("document.forms.options.elements.max_tokens.value = '80'")
    browser.type("#message", REPEAT)
    browser.press("Enter")
    browser.eventually(lambda: browser.count("#log details") == 1, within_s=120, what="the receipt")
    assert "fox" in browser.text(".turn[data-who=assistant]")
    assert browser.count(".turn .tok.draft") > 0 and browser.count(".turn .tok.engine") > 0
    live = browser.text("#live")
    assert "tok/s" in live and "from drafts" in live
    colour = "return getComputedStyle(document.querySelector('.turn .tok.draft')).backgroundColor"
    coloured = browser.run(colour)
    browser.screenshot(ARTEFACTS / "playground.png")
    browser.click("#colour")
    assert browser.run(colour) != coloured
    browser.type("#message", "And where now?")
    browser.click("#explain")
    browser.eventually(lambda: "It would go to engine-" in browser.text("#log"), what="an explanation")
    browser.click("#tab-routes")
    browser.eventually(lambda: browser.count("#decisions tr[data-key]") >= 1, what="a decision")
    browser.click("#decisions tr[data-key] button")
    browser.eventually(lambda: "engine-1" in browser.text("#decisions tr.more"), what="its candidates")
    browser.screenshot(ARTEFACTS / "routes.png")
    browser.click("#tab-requests")
    browser.click("#finished tr[data-key] button")
    browser.eventually(lambda: "of its prompt in the cache" in browser.text("#finished tr.more"), what="a receipt")
    browser.screenshot(ARTEFACTS / "requests.png")
    assert browser.errors() == []


def test_keyboard_alone_is_enough(browser: Browser, stack: Stack) -> None:
    browser.go(stack.url)
    wait_live(browser)
    focus = "return document.activeElement.id || document.activeElement.className"
    browser.press("Tab")
    assert browser.run(focus) == "skip"
    browser.press("Tab")
    assert browser.run(focus) == "tab-fleet"
    browser.press("Left")
    assert browser.run(focus) == "tab-playground" and browser.run("return location.hash") == "#/playground"
    browser.press("Right", "Right")
    assert browser.run(focus) == "tab-routes" and not browser.run("return document.getElementById('routes').hidden")
    # Fields of the playground are reached one by one, and Escape ends an answer.
    browser.click("#tab-playground")
    browser.run("document.forms.options.elements.max_tokens.value = '2000'")
    browser.run("document.forms.options.elements.ignore_eos.checked = true")
    browser.type("#message", "Count from one to a thousand.")
    browser.press("Enter")
    browser.eventually(lambda: browser.count(".turn .tok") > 2, what="tokens")
    browser.press("Escape")
    browser.eventually(lambda: browser.count(".turn[data-who=stopped]") == 1, what="the end")
    assert browser.errors() == []


def test_bad_values_are_told(browser: Browser, stack: Stack) -> None:
    browser.go(f"{stack.url}/#/playground")
    wait_live(browser)
    browser.run("document.forms.options.elements.logit_bias.value = '{no'")
    browser.type("#message", "Hello")
    browser.press("Enter")
    browser.eventually(lambda: "logit bias, JSON" in browser.text(".turn.error"), what="the field's name")
    assert browser.run("return document.getElementById('message').value") == "Hello"


def test_a_key_is_asked_for(browser: Browser, tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    file.write_text(json.dumps({"keys": [{"id": "ann", "sha256": hash_key("right")}]}))
    gateway = RunningGateway(keys_file=str(file), router="127.0.0.1:9", router_admin="")
    try:
        browser.go(gateway.url)
        browser.eventually(lambda: browser.count("dialog[open]") == 1, what="the dialog")
        browser.type("#key", "wrong")
        browser.press("Enter")
        browser.eventually(lambda: browser.count("dialog[open]") == 0, what="the dialog gone")
        browser.eventually(lambda: browser.count("dialog[open]") == 1, what="the dialog again")
        browser.screenshot(ARTEFACTS / "key.png")
        browser.type("#key", "right")
        browser.press("Enter")
        browser.eventually(lambda: "--router-admin" in browser.text("#trouble"), what="what this gateway lacks")
        # The key is nowhere but in this tab.
        assert browser.run("return [localStorage.length, document.cookie, location.href.includes('right')]") == [
            0,
            "",
            False,
        ]
    finally:
        gateway.stop()


def test_an_engine_dies_and_comes_back(browser: Browser, stack: Stack) -> None:
    browser.go(stack.url)
    wait_live(browser)
    row = "tr[data-engine=engine-0]"
    browser.eventually(lambda: browser.count(f"{row}[data-state=ready]") == 1, what="engine-0 ready")
    epoch = browser.text(f"{row} td:nth-child(12)")
    os.kill(stack.pid("engine-0"), signal.SIGKILL)
    browser.eventually(lambda: browser.count(f"{row}:not([data-state=ready])") == 1, what="engine-0 not ready")
    assert "Last error of engine-0" in browser.text("#engines")
    browser.screenshot(ARTEFACTS / "engine-down.png")
    browser.eventually(lambda: browser.count(f"{row}[data-state=ready]") == 1, within_s=180, what="engine-0 back")
    browser.eventually(lambda: browser.text(f"{row} td:nth-child(12)") not in (epoch, "–"), what="a new epoch")
    browser.screenshot(ARTEFACTS / "engine-back.png")
    assert browser.errors() == []
