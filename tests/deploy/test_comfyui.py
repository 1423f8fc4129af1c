"""The ComfyUI nodes against a real gateway, without ComfyUI; and the request shapes of other OpenAI nodes."""

from __future__ import annotations

import base64
import importlib
import json
import socket
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gateway.keys import hash_key

# The gateway's own fixtures.
from tests.gateway.conftest import Stand, make_stand, mock, router_loop, shared_stand, stand  # noqa: F401

FOLDER = Path(__file__).resolve().parents[2] / "deploy/comfyui"
SAMPLING = {"max_tokens": 16, "temperature": 0.0, "seed": 7}
PIXEL = base64.b64encode(b"\x89PNG\r\n\x1a\n").decode()


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The package, as ComfyUI imports it: by its folder, without ComfyUI's own modules."""
    monkeypatch.syspath_prepend(str(FOLDER))
    for name in ("TANDEM_COMFYUI_URL", "TANDEM_COMFYUI_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    assert not {"server", "comfy", "torch"} & _imports()
    yield importlib.import_module("tandem_nodes")
    for name in [name for name in sys.modules if name.startswith("tandem_nodes")]:
        del sys.modules[name]


def _imports() -> set[str]:
    """Top-level modules that the nodes import when they are loaded."""
    import ast

    found = set()
    for path in (FOLDER / "tandem_nodes").glob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                found.add(node.module.partition(".")[0])
    return found


def plain(stand: Stand, **body: Any) -> str:  # noqa: F811
    model = stand.http.get("/v1/models").json()["data"][0]["id"]
    answer = stand.post("/v1/chat/completions", {"model": model, **SAMPLING, **body})
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["message"]["content"])


def test_nodes_follow_the_contract(nodes: Any) -> None:
    assert set(nodes.NODE_CLASS_MAPPINGS) == set(nodes.NODE_DISPLAY_NAME_MAPPINGS)
    for cls in nodes.NODE_CLASS_MAPPINGS.values():
        inputs = cls.INPUT_TYPES()
        assert set(inputs) <= {"required", "optional", "hidden"}
        assert len(cls.RETURN_TYPES) == len(cls.RETURN_NAMES)
        assert callable(getattr(cls, cls.FUNCTION)) and cls.CATEGORY
        code = getattr(cls, cls.FUNCTION).__code__
        taken = set(code.co_varnames[1 : code.co_argcount])
        assert taken == {name for group in inputs.values() for name in group}
        assert not any("key" in name for name in taken), "workflows are shared, keys are not"


def test_the_workflow_fits_the_nodes(nodes: Any) -> None:
    workflow = json.loads((FOLDER / "workflow.json").read_text())
    by_id = {node["id"]: node for node in workflow["nodes"]}
    for node in workflow["nodes"]:
        if node["type"] == "PreviewAny":
            continue
        cls = nodes.NODE_CLASS_MAPPINGS[node["type"]]
        assert [output["name"] for output in node["outputs"]] == list(cls.RETURN_NAMES)
        inputs = cls.INPUT_TYPES()
        widgets: list[Any] = []
        for name, spec in [*inputs["required"].items(), *inputs.get("optional", {}).items()]:
            widgets.append((name, spec))
            if len(spec) > 1 and spec[1].get("control_after_generate"):
                widgets.append(("control_after_generate", (["fixed", "increment", "decrement", "randomize"],)))
        assert len(widgets) == len(node["widgets_values"])
        for (name, spec), value in zip(widgets, node["widgets_values"], strict=True):
            if isinstance(spec[0], list):
                assert value in spec[0], name
            else:
                assert isinstance(value, {"STRING": str, "INT": int, "FLOAT": float}[spec[0]]), name
    for link, source, slot, target, place, _ in workflow["links"]:
        assert link in by_id[source]["outputs"][slot]["links"]
        assert by_id[target]["inputs"][place]["link"] == link
    assert workflow["last_node_id"] == max(by_id)


@pytest.mark.parametrize("suffix", ["", "/", "/v1", "/v1/"])
def test_chat_gives_the_gateways_answer(nodes: Any, stand: Stand, suffix: str) -> None:  # noqa: F811
    chat = nodes.NODE_CLASS_MAPPINGS["TandemChat"]()
    (answer,) = chat.run("Name three rivers.", **SAMPLING, base_url=stand.url + suffix)
    assert answer == plain(stand, messages=[{"role": "user", "content": "Name three rivers."}])
    assert stand.router.requests[0].sampling.seed == 7


def test_expander_and_list(nodes: Any, stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    monkeypatch.setenv("TANDEM_COMFYUI_URL", stand.url)
    (prompt,) = nodes.NODE_CLASS_MAPPINGS["TandemPromptExpander"]().run("a cat", "anime", **SAMPLING)
    assert prompt and "\n" not in prompt
    models, first = nodes.NODE_CLASS_MAPPINGS["TandemModelList"]().run()
    served = [item["id"] for item in stand.http.get("/v1/models").json()["data"]]
    assert models.splitlines() == served and first == served[0]


def test_preview_grows_and_interruption_stops(
    nodes: Any,
    stand: Stand,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shown: list[tuple[str, str]] = []
    server = types.ModuleType("server")
    instance = types.SimpleNamespace(send_progress_text=lambda text, node: shown.append((text, node)))
    server.PromptServer = types.SimpleNamespace(instance=instance)  # type: ignore[attr-defined]
    management = types.ModuleType("comfy.model_management")

    class Interrupted(Exception):
        pass

    def check() -> None:
        if len(shown) >= 2:
            raise Interrupted

    management.throw_exception_if_processing_interrupted = check  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "server", server)
    monkeypatch.setitem(sys.modules, "comfy", types.ModuleType("comfy"))
    monkeypatch.setitem(sys.modules, "comfy.model_management", management)
    stand.router.token_delay = 0.01
    with pytest.raises(Interrupted):
        nodes.NODE_CLASS_MAPPINGS["TandemChat"]().run("Hi", **SAMPLING, base_url=stand.url, node_id="5")
    assert len(shown) == 2 and shown[1][0].startswith(shown[0][0]) and shown[0][1] == "5"


def test_errors_say_what_to_do(nodes: Any, stand: Stand) -> None:  # noqa: F811
    chat = nodes.NODE_CLASS_MAPPINGS["TandemChat"]()
    error = importlib.import_module("tandem_nodes.client").TandemNodeError
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        closed = f"http://127.0.0.1:{probe.getsockname()[1]}"
        with pytest.raises(error, match="cannot be reached"):
            chat.run("Hi", **SAMPLING, base_url=closed)
    with pytest.raises(error, match="must begin with http"):
        chat.run("Hi", **SAMPLING, base_url="localhost:8000")
    with pytest.raises(error, match="no-such-model"):
        chat.run("Hi", **SAMPLING, model="no-such-model", base_url=stand.url)
    with pytest.raises(error, match="prompt is empty"):
        chat.run("  ", **SAMPLING, base_url=stand.url)


def test_a_key_is_asked_for_by_name_and_used(
    nodes: Any,
    make_stand: Any,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    keys = tmp_path / "keys.json"
    keys.write_text(json.dumps({"keys": [{"id": "comfy", "sha256": hash_key("sk-test")}]}))
    made = make_stand(keys_file=str(keys))
    chat = nodes.NODE_CLASS_MAPPINGS["TandemChat"]()
    with pytest.raises(importlib.import_module("tandem_nodes.client").TandemNodeError, match="TANDEM_COMFYUI_KEY"):
        chat.run("Hi", **SAMPLING, base_url=made.url)
    monkeypatch.setenv("TANDEM_COMFYUI_KEY", "sk-test")
    assert chat.run("Hi", **SAMPLING, base_url=made.url)[0]


def test_request_shapes_of_other_openai_nodes(stand: Stand) -> None:  # noqa: F811
    model = stand.http.get("/v1/models").json()["data"][0]["id"]
    content = [{"type": "text", "text": "Hi"}]
    body = {"model": model, "max_tokens": 4, "messages": [{"role": "user", "content": content}]}
    # No key, an empty one, and one that nobody asked for.
    for headers in ({}, {"Authorization": "Bearer"}, {"Authorization": "Bearer none"}):
        assert stand.post("/v1/chat/completions", body, headers=headers).status_code == 200
    # "/chat/completions" after a base URL with a slash at its end.
    assert stand.post("/v1//chat/completions", body).status_code == 200
    # A picture for a model that sees none is refused in OpenAI's shape, not dropped.
    picture = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PIXEL}", "detail": "auto"}}
    content.append(picture)  # type: ignore[arg-type]
    refused = stand.post("/v1/chat/completions", body)
    assert refused.status_code == 400 and "text only" in refused.json()["error"]["message"]
