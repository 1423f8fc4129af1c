"""The examples run, or at least hold together."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.gateway.conftest import Stand

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_each_says_how_it_is_run(path: Path) -> None:
    text = ast.get_docstring(ast.parse(path.read_text())) or ""
    assert f"python examples/{path.name}" in text


def test_mcp_configuration_names_our_path() -> None:
    (server,) = json.loads((EXAMPLES / "mcp.json").read_text())["mcpServers"].values()
    assert server["type"] == "http" and server["url"].endswith(":8000/mcp")


def test_mcp_client(stand: Stand) -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "mcp_client.py"), "one two three"],
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, "TANDEM_URL": stand.url, "TANDEM_API_KEY": ""},
    )
    assert done.returncode == 0, done.stderr
    assert "tools: chat, complete, list_models, status" in done.stdout and "prompt tokens" in done.stdout


def test_tools_of_the_agent() -> None:
    agent = load("tool_agent")
    assert agent.calculate("3*(4+5) - 6/2") == "24.0" and agent.calculate("-2 * 3") == "-6"
    for bad in ("__import__('os')", "2 ** 99", "1/0", "2 +", "x", "'a'*9"):
        assert agent.calculate(bad).startswith("error"), bad
    assert agent.run("calculate", '{"expression": "17*23"}') == "391"
    assert agent.run("nothing", "{}").startswith("error") and agent.run("today", "{no").startswith("error")
    assert {tool["function"]["name"] for tool in agent.SCHEMAS} == set(agent.TOOLS)


def shown(stand: Stand, *command: str) -> str:
    """What a program prints that talks to the stand."""
    environment = {**os.environ, "TANDEM_URL": stand.url, "TANDEM_API_KEY": "none"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_chats_by_curl_and_by_openais_client(stand: Stand) -> None:
    whole, _, streamed = shown(stand, "sh", str(EXAMPLES / "chat.sh"), "one two three").partition("\n")
    pieces = [json.loads(line[6:]) for line in streamed.splitlines() if line.startswith("data: {")]
    said = json.loads(whole)["choices"][0]["message"]["content"]
    assert said and said == "".join(piece["choices"][0]["delta"].get("content") or "" for piece in pieces)
    assert "prompt tokens" in shown(stand, sys.executable, str(EXAMPLES / "openai_chat.py"), "one two three")


def test_the_readmes_calls_are_answered(stand: Stand) -> None:
    blocks = re.findall(r"```(bash|python)\n(.*?)```", (EXAMPLES.parent / "README.md").read_text(), re.S)
    calls = [(kind, text) for kind, text in blocks if "127.0.0.1:8000/v1" in text]
    assert [kind for kind, _ in calls] == ["bash", "python"]
    for kind, text in calls:
        command = {"bash": ["bash", "-ec"], "python": [sys.executable, "-c"]}[kind]
        said = shown(stand, *command, text.replace("http://127.0.0.1:8000", stand.url))
        if kind == "bash":
            said = json.loads(said)["choices"][0]["message"]["content"]
        assert said.strip()
