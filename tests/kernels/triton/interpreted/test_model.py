"""The Triton model against the plain torch model: logits of one step, for families and weight formats."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from tandem.lm.batch import StepBatch, build_batch
from tandem.lm.models.native import NativeModel
from tandem.lm.models.triton_model import TritonModel
from tandem.lm.types import SamplingParams, Sequence, Slice
from tandem.lm.weights import RawTensor, open_source

BLOCKS = 12
COMMON = {
    "vocab_size": 150,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "initializer_range": 0.15,
}


def save(family: str, path: Path) -> Path:
    """A tiny random checkpoint of a family."""
    import transformers

    name = {"llama": "Llama", "qwen3": "Qwen3", "gemma2": "Gemma2"}[family]
    extra: dict[str, Any] = {"sliding_window": 8, "query_pre_attn_scalar": 16} if family == "gemma2" else {}
    torch.manual_seed(3)
    config = getattr(transformers, f"{name}Config")(**COMMON, **extra)
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    model.save_pretrained(path)
    return path


class QuantisedSource:
    """A checkpoint whose matrices are GGUF blocks of one kind."""

    def __init__(self, path: Path, kind: str) -> None:
        self._source = open_source(path)
        self.config, self.stored_bytes = self._source.config, 0
        self._kind, self._type = kind, getattr(gguf.GGMLQuantizationType, kind)

    def _matrix(self, name: str) -> bool:
        return name.startswith("layers.") and "norm" not in name

    def has(self, name: str) -> bool:
        return self._source.has(name)

    def tensor(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        raw = self.raw(name)
        if raw is None:
            return self._source.tensor(name, dtype)
        return torch.from_numpy(gguf.quants.dequantize(raw.data, self._type).astype(np.float32)).to(dtype)

    def raw(self, name: str) -> RawTensor | None:
        if not self._matrix(name):
            return None
        values = self._source.tensor(name, torch.float32).numpy()
        return RawTensor(self._kind, values.shape, gguf.quants.quantize(values, self._type))

    def digest(self) -> str:
        return self._kind

    def close(self) -> None:
        self._source.close()


def step() -> StepBatch:
    """Two prompts of 19 and 5 tokens; logits of some rows of each."""
    slices = []
    for index, (length, table) in enumerate(((19, [7, 2]), (5, [4]))):
        tokens = [(7 * index + 3 * place) % 150 for place in range(length)]
        slices.append(Slice(Sequence(index, 0, SamplingParams(), tokens, length), table, 0, length))
    return build_batch(slices, np.asarray([0, 12, 18, 23]), 16, BLOCKS)


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        ("llama", "Q4_1"),
        ("gemma2", ""),
        pytest.param("llama", "Q8_0", marks=pytest.mark.slow),
        pytest.param("qwen3", "", marks=pytest.mark.slow),
    ],
)
def test_logits_equal_plain_torch(family: str, kind: str, tmp_path: Path) -> None:
    path = save(family, tmp_path)
    source: Any = QuantisedSource(path, kind) if kind else open_source(path)
    native = NativeModel(source, torch.float32, torch.device("cpu"))
    triton_model = TritonModel(source, torch.float32, torch.device("cpu"), 256)
    if kind:
        assert triton_model.layers[0].qkv.packed and triton_model.weight_bytes < native.weight_bytes
    wanted = native.logits(step(), native.new_kv(BLOCKS, 16, "float32", 32))
    found = triton_model.logits(step(), triton_model.new_kv(BLOCKS, 16, "float32", 32))
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)


def test_fp8_kv_is_close_and_copies_with_its_scales(tmp_path: Path) -> None:
    source = open_source(save("llama", tmp_path))
    model = TritonModel(source, torch.float32, torch.device("cpu"), 256)
    kv = model.new_kv(BLOCKS, 16, "fp8", 32)
    assert model.kv_block_bytes(16, "fp8") == 2 * 2 * 2 * 16 * (16 + 4)
    wanted = model.logits(step(), model.new_kv(BLOCKS, 16, "float32", 32))
    found = model.logits(step(), kv)
    # e4m3 keeps four significant bits: about 3% per value.
    assert 0 < np.abs(found - wanted).max() < 0.15 * np.abs(wanted).max()
    kv.copy([(7, 9), (2, 3)])
    for tensors in (kv.keys, kv.key_scales, kv.value_scales):
        assert torch.equal(tensors[1][9].float(), tensors[1][7].float())


def test_what_it_cannot_do_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = open_source(save("llama", tmp_path))
    model = TritonModel(source, torch.float32, torch.device("cpu"), 64)
    with pytest.raises(ValueError, match="kv_dtype is 'int8'"):
        model.kv_block_bytes(16, "int8")
    with pytest.raises(ValueError, match="keep float32 or fp8"):
        model.kv_block_bytes(16, "bfloat16")
    monkeypatch.setattr("tandem.lm.models.triton_model.interpreting", lambda: False)
    with pytest.raises(ValueError, match="need a GPU"):
        TritonModel(source, torch.float32, torch.device("cpu"), 64)
