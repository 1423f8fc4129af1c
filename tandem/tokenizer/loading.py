"""Loading a tokenizer bundle from a model: a directory in Hugging Face's layout, or a GGUF file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tandem.models.gguf_index import load_index
from tandem.paths import cache_dir, file_key, write_atomically
from tandem.tokenizer.bundle import TokenizerBundle
from tandem.tokenizer.gguf_vocab import STOP_NAMES, TokenizerError, bundle_from_metadata

__all__ = ["TokenizerError", "load_bundle"]

_VERSION = 1


def load_bundle(path: Path) -> TokenizerBundle:
    """Bundle of the model at `path`: a .gguf file, or a directory with tokenizer.json.

    Raises:
        TokenizerError: files are missing, unreadable, or of a kind that cannot be built exactly.
    """
    if path.is_dir():
        return _from_directory(path)
    if not path.is_file():
        raise TokenizerError(f"{path} does not exist")
    cached = cache_dir() / "tokenizers" / f"{file_key(path)}-v{_VERSION}.json"
    try:
        return TokenizerBundle.from_json(cached.read_bytes())
    except (OSError, ValueError, KeyError):
        pass
    bundle = bundle_from_metadata(load_index(path).metadata)
    try:
        write_atomically(cached, bundle.to_json())
    except OSError:
        # A cache that cannot be written costs time at the next start, nothing else.
        cached.unlink(missing_ok=True)
    return bundle


def _read_json(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise TokenizerError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(data, dict):
        raise TokenizerError(f"{path} holds {type(data).__name__}, not an object")
    return data


def _from_directory(path: Path) -> TokenizerBundle:
    source = path / "tokenizer.json"
    if not source.exists():
        raise TokenizerError(f"{path} has no tokenizer.json; slow tokenizers (tokenizer.model alone) are not read")
    tokenizer_json = source.read_bytes()
    spec = _read_json(source)
    config = _read_json(path / "tokenizer_config.json")
    added = {entry["content"]: entry for entry in spec.get("added_tokens", ())}
    specials = _special_tokens(config, _read_json(path / "special_tokens_map.json"))
    default, named = _templates(path, config)
    special_ids = {entry["id"] for entry in added.values() if entry.get("special")}
    stop_ids = _configured_eos(_read_json(path / "config.json"), _read_json(path / "generation_config.json"))
    stop_ids |= {added[name]["id"] for name in STOP_NAMES if name in added and added[name].get("special")}
    if specials.get("eos_token") in added:
        stop_ids.add(added[specials["eos_token"]]["id"])
    return TokenizerBundle(
        tokenizer_json=tokenizer_json,
        chat_template=default,
        special_tokens=specials,
        stop_token_ids=tuple(sorted(stop_ids)),
        special_token_ids=tuple(sorted(special_ids)),
        named_templates=named,
        add_bos=bool(config.get("add_bos_token", False)),
    )


def _special_tokens(config: dict[str, Any], mapping: dict[str, Any]) -> dict[str, str]:
    found: dict[str, str] = {}
    for key in ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token"):
        value = config.get(key, mapping.get(key))
        if isinstance(value, dict):
            value = value.get("content")
        if isinstance(value, str):
            found[key] = value
    return found


def _templates(path: Path, config: dict[str, Any]) -> tuple[str, dict[str, str]]:
    """The default chat template and the named ones; files win over tokenizer_config.json, as in transformers."""
    raw = config.get("chat_template", "")
    named: dict[str, str] = {}
    if isinstance(raw, list):
        named = {str(entry["name"]): str(entry["template"]) for entry in raw}
        raw = named.pop("default", "")
    default = str(raw or "")
    single = path / "chat_template.jinja"
    if single.exists():
        default = single.read_text(encoding="utf-8")
    folder = path / "additional_chat_templates"
    if folder.is_dir():
        named |= {file.stem: file.read_text(encoding="utf-8") for file in sorted(folder.glob("*.jinja"))}
    return default, named


def _configured_eos(*configs: dict[str, Any]) -> set[int]:
    found: set[int] = set()
    for config in configs:
        value = config.get("eos_token_id")
        ids = value if isinstance(value, list) else [value]
        found |= {int(token) for token in ids if isinstance(token, int)}
    return found
