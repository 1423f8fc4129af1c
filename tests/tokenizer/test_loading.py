"""Bundles from directories in Hugging Face's layout."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Inner

from tandem.tokenizer import Tokenizer, TokenizerError, load_bundle


def _write_model(folder: Path, **config: object) -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Inner(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([AddedToken("<eos>", special=True), AddedToken("<x>", special=True)])
    inner.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def test_stop_ids_are_the_union_of_all_places(tmp_path: Path) -> None:
    _write_model(tmp_path, eos_token={"content": "<eos>"}, chat_template="T")
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 5}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 5]}))
    bundle = load_bundle(tmp_path)
    assert bundle.stop_token_ids == (5, 7, 256)
    assert bundle.special_token_ids == (256, 257)
    assert bundle.chat_template == "T"
    tokenizer = Tokenizer(bundle)
    assert tokenizer.decode(tokenizer.encode("héllo")) == "héllo"


def test_templates_by_name_and_from_files(tmp_path: Path) -> None:
    templates = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "U"}]
    _write_model(tmp_path, chat_template=templates)
    bundle = load_bundle(tmp_path)
    assert (bundle.chat_template, bundle.named_templates) == ("D", {"tool_use": "U"})
    (tmp_path / "chat_template.jinja").write_text("F")
    assert load_bundle(tmp_path).chat_template == "F"


def test_missing_and_broken_files_are_told(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"no tokenizer\.json"):
        load_bundle(tmp_path)
    with pytest.raises(TokenizerError, match="does not exist"):
        load_bundle(tmp_path / "absent.gguf")
    _write_model(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(TokenizerError, match=r"config\.json is not valid JSON"):
        load_bundle(tmp_path)
