"""A headless Chromium, driven by chromedriver over the WebDriver protocol (plain HTTP, no further packages)."""

from __future__ import annotations

import base64
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

ELEMENT = "element-6066-11e4-a52e-4f735466cecf"
KEYS = {"Enter": "\ue007", "Escape": "\ue00c", "Tab": "\ue004", "Left": "\ue012", "Right": "\ue014"}


def missing() -> str:
    """Why no browser can be started; empty if one can."""
    if shutil.which("chromedriver") is None:
        return "chromedriver is not installed (Debian: apt-get install chromium chromium-driver)"
    if not any(shutil.which(name) for name in ("chromium", "chromium-browser", "google-chrome")):
        return "no Chromium is installed (Debian: apt-get install chromium)"
    return ""


class Browser:
    """One window. Its profile lives in `folder`."""

    def __init__(self, folder: Path, port: int, size: str = "1500,1100") -> None:
        self._driver = subprocess.Popen(
            ["chromedriver", f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        self._http = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=90, trust_env=False)
        self._wait_for_driver()
        arguments = [
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--no-proxy-server",
            f"--window-size={size}",
            f"--user-data-dir={folder / 'profile'}",
        ]
        asked = {"alwaysMatch": {"goog:chromeOptions": {"args": arguments}, "goog:loggingPrefs": {"browser": "ALL"}}}
        value = self._call("POST", "/session", {"capabilities": asked})
        self._session = f"/session/{value['sessionId']}"

    def _wait_for_driver(self) -> None:
        until = time.monotonic() + 60
        while True:
            try:
                if self._http.get("/status").json()["value"]["ready"]:
                    return
            except httpx.TransportError:
                pass
            assert time.monotonic() < until and self._driver.poll() is None, "chromedriver does not answer"
            time.sleep(0.1)

    def _call(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        answer = self._http.request(method, path, json=body if method == "POST" else None)
        value = answer.json()["value"]
        assert answer.status_code == 200, f"{path}: {value}"
        return value

    def go(self, url: str) -> None:
        self._call("POST", f"{self._session}/url", {"url": url})

    def run(self, script: str, *arguments: Any) -> Any:
        """The value of a script's `return`."""
        return self._call("POST", f"{self._session}/execute/sync", {"script": script, "args": list(arguments)})

    def text(self, selector: str) -> str:
        return str(self.run("return document.querySelector(arguments[0])?.innerText ?? ''", selector))

    def count(self, selector: str) -> int:
        return int(self.run("return document.querySelectorAll(arguments[0]).length", selector))

    def _element(self, selector: str) -> str:
        found = self._call("POST", f"{self._session}/element", {"using": "css selector", "value": selector})
        return f"{self._session}/element/{found[ELEMENT]}"

    def click(self, selector: str) -> None:
        self._call("POST", f"{self._element(selector)}/click", {})

    def type(self, selector: str, text: str) -> None:
        self._call("POST", f"{self._element(selector)}/value", {"text": text})

    def press(self, *names: str) -> None:
        """Presses keys in whatever has the focus."""
        steps = [
            step
            for name in names
            for step in ({"type": "keyDown", "value": KEYS[name]}, {"type": "keyUp", "value": KEYS[name]})
        ]
        self._call("POST", f"{self._session}/actions", {"actions": [{"type": "key", "id": "keys", "actions": steps}]})

    def dark(self, on: bool) -> None:
        """What the system prefers, as far as pages see it."""
        feature = {"name": "prefers-color-scheme", "value": "dark" if on else "light"}
        command = {"cmd": "Emulation.setEmulatedMedia", "params": {"features": [feature]}}
        self._call("POST", f"{self._session}/goog/cdp/execute", command)

    def errors(self) -> list[str]:
        """Errors in the console since the last call: script errors, breaches of the page's policy, failed loads."""
        entries = self._call("POST", f"{self._session}/se/log", {"type": "browser"})
        return [entry["message"] for entry in entries if entry["level"] == "SEVERE"]

    def screenshot(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(base64.b64decode(self._call("GET", f"{self._session}/screenshot")))

    def eventually(self, check: Callable[[], Any], within_s: float = 60.0, what: str = "") -> Any:
        until = time.monotonic() + within_s
        while not (value := check()):
            assert time.monotonic() < until, (
                f"not within {within_s} s: {what}; the page says: {self.text('main')[:800]}"
            )
            time.sleep(0.2)
        return value

    def close(self) -> None:
        try:
            self._call("DELETE", self._session)
        except (httpx.TransportError, AssertionError):
            pass
        finally:
            self._driver.terminate()
            try:
                self._driver.wait(10)
            except subprocess.TimeoutExpired:
                self._driver.kill()
            self._http.close()
