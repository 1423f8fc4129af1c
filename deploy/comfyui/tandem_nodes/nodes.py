"""The nodes: chat, prompt expander, model list. Outside ComfyUI they work too, without preview and interruption."""

from __future__ import annotations

from typing import Any

from .client import TandemNodeError, find_server, list_models, stream_chat

CATEGORY = "Tandem"

_EXPAND = (
    "You write prompts for an image generator. Expand the user's idea into one prompt of at most 80 words: subject, "
    "setting, light, composition, medium. Answer with the prompt alone."
)
STYLES = ("none", "photograph", "illustration", "oil painting", "3D render", "pixel art", "anime")


def _text(**more: Any) -> tuple[str, dict[str, Any]]:
    return "STRING", {"default": "", **more}


_COMMON: dict[str, Any] = {
    "max_tokens": ("INT", {"default": 256, "min": 1, "max": 32768}),
    "temperature": ("FLOAT", {"default": 0.7, "min": 0.0, "max": 2.0, "step": 0.05}),
    "seed": ("INT", {"default": 0, "min": 0, "max": 2**63 - 1, "control_after_generate": True}),
}
_WHERE: dict[str, Any] = {
    "model": _text(tooltip="Name of a served model; empty: the first"),
    "base_url": _text(tooltip="Empty: TANDEM_COMFYUI_URL, settings.json or http://127.0.0.1:8000/v1"),
}


class _Preview:
    """Shows text in the node while it is written, and stops when the user does."""

    def __init__(self, node_id: Any) -> None:
        self._node_id = node_id
        try:
            from server import PromptServer  # type: ignore[import-not-found]

            self._server = PromptServer.instance
        except (ImportError, AttributeError):
            self._server = None

    def show(self, text: str) -> None:
        """Raises ComfyUI's own exception if the user has interrupted the run."""
        try:
            from comfy.model_management import (  # type: ignore[import-not-found]
                throw_exception_if_processing_interrupted as check,
            )
        except ImportError:
            check = None
        if check is not None:
            check()
        send = getattr(self._server, "send_progress_text", None)
        if send is not None and self._node_id is not None:
            send(text, self._node_id)


def ask(messages: list[dict[str, str]], model: str, base_url: str, node_id: Any, **sampling: Any) -> str:
    """The whole answer, shown while it comes. Raises TandemNodeError."""
    server = find_server(base_url)
    if not model.strip():
        served = list_models(server)
        if not served:
            raise TandemNodeError(f"{server.url} serves no model yet: wait until an engine is ready")
        model = served[0]
    preview, pieces = _Preview(node_id), []
    for piece in stream_chat(server, {"model": model.strip(), "messages": messages, **sampling}):
        pieces.append(piece)
        preview.show("".join(pieces))
    return "".join(pieces)


class TandemChat:
    """One question, one answer."""

    CATEGORY = CATEGORY
    FUNCTION = "run"
    RETURN_TYPES = ("STRING",)
    RETURN_NAMES = ("answer",)
    DESCRIPTION = "Asks a language model."

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {
            "required": {"prompt": _text(multiline=True), **_COMMON},
            "optional": {"system": _text(multiline=True), **_WHERE},
            "hidden": {"node_id": "UNIQUE_ID"},
        }

    def run(
        self,
        prompt: str,
        max_tokens: int,
        temperature: float,
        seed: int,
        system: str = "",
        model: str = "",
        base_url: str = "",
        node_id: Any = None,
    ) -> tuple[str]:
        if not prompt.strip():
            raise TandemNodeError("prompt is empty")
        messages = [{"role": "system", "content": system}] if system.strip() else []
        messages.append({"role": "user", "content": prompt})
        return (ask(messages, model, base_url, node_id, max_tokens=max_tokens, temperature=temperature, seed=seed),)


class TandemPromptExpander:
    """An idea becomes a prompt for an image model."""

    CATEGORY = CATEGORY
    FUNCTION = "run"
    RETURN_TYPES = ("STRING",)
    RETURN_NAMES = ("prompt",)
    DESCRIPTION = "Expands an idea into a prompt for an image model."

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {
            "required": {"idea": _text(multiline=True), "style": (list(STYLES),), **_COMMON},
            "optional": {"instructions": _text(multiline=True, default=_EXPAND), **_WHERE},
            "hidden": {"node_id": "UNIQUE_ID"},
        }

    def run(
        self,
        idea: str,
        style: str,
        max_tokens: int,
        temperature: float,
        seed: int,
        instructions: str = _EXPAND,
        model: str = "",
        base_url: str = "",
        node_id: Any = None,
    ) -> tuple[str]:
        if not idea.strip():
            raise TandemNodeError("idea is empty")
        content = idea if style == "none" else f"{idea}\nMedium: {style}"
        messages = [{"role": "system", "content": instructions or _EXPAND}, {"role": "user", "content": content}]
        answer = ask(messages, model, base_url, node_id, max_tokens=max_tokens, temperature=temperature, seed=seed)
        # One line, without the quotes that small models like to put around it.
        return (" ".join(answer.split()).strip('"'),)


class TandemModelList:
    """What a server serves now."""

    CATEGORY = CATEGORY
    FUNCTION = "run"
    RETURN_TYPES = ("STRING", "STRING")
    RETURN_NAMES = ("models", "first")
    DESCRIPTION = "Lists the served models, one per line."

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {}, "optional": {"base_url": _WHERE["base_url"]}}

    @classmethod
    def IS_CHANGED(cls, **_: Any) -> float:
        # Not equal to itself: ComfyUI asks anew each time.
        return float("nan")

    def run(self, base_url: str = "") -> tuple[str, str]:
        models = list_models(find_server(base_url))
        return "\n".join(models), models[0] if models else ""


NODE_CLASS_MAPPINGS: dict[str, type] = {
    "TandemChat": TandemChat,
    "TandemPromptExpander": TandemPromptExpander,
    "TandemModelList": TandemModelList,
}
NODE_DISPLAY_NAME_MAPPINGS = {
    "TandemChat": "Tandem: chat",
    "TandemPromptExpander": "Tandem: prompt expander",
    "TandemModelList": "Tandem: models",
}
