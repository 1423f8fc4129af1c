"""AWQ and GPTQ checkpoints, packed by the tests' own code, against the plain checkpoint of the same values."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from kernels import cpu
from kernels.cpu.tiles import Kind
from tandem.lm.config import UnsupportedModel
from tandem.lm.loading import load_model
from tandem.lm.models.compiled import CompiledModel
from tandem.lm.runner import load_runner
from tandem.lm.runner_settings import RunnerSettings
from tandem.lm.types import SamplingParams
from tandem.lm.weights import WeightError, open_source
from tests.lm.driver import Driver, Job
from tests.lm.test_families import SMALL, VOCAB, load

GROUP = 32
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def word(nibbles: list[int]) -> int:
    """Eight 4-bit values as one int32, the first in the lowest bits."""
    value = sum(int(nibble) << (4 * place) for place, nibble in enumerate(nibbles))
    return value - (1 << 32) if value >= 1 << 31 else value


def quantise(weight: np.ndarray, groups: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Asymmetric 4 bits per (output, group): values, zeros [groups, out], scales fp16, and what they decode to."""
    out, inputs = weight.shape
    count = int(groups.max()) + 1
    values = np.zeros((out, inputs), np.int64)
    zeros, scales = np.zeros((count, out), np.int64), np.zeros((count, out), np.float16)
    decoded = np.zeros_like(weight)
    for group in range(count):
        columns = np.flatnonzero(groups == group)
        part = weight[:, columns]
        low, high = part.min(1), part.max(1)
        scale = ((high - low) / 15).astype(np.float16)
        # GPTQ stores zeros minus one in four bits: 1 to 15 suits both.
        zero = np.clip(np.round(-low / scale.astype(np.float32)), 1, 15).astype(np.int64)
        quantised = np.clip(np.round(part / scale.astype(np.float32)[:, None]) + zero[:, None], 0, 15).astype(np.int64)
        values[:, columns], zeros[group], scales[group] = quantised, zero, scale
        decoded[:, columns] = (quantised - zero[:, None]).astype(np.float32) * scale.astype(np.float32)[:, None]
    return values, zeros, scales, decoded


def awq_words(rows: np.ndarray) -> torch.Tensor:
    """[rows, out] → int32 [rows, out / 8]; nibble n of a word is output (0, 2, 4, 6, 1, 3, 5, 7)[n]."""
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    return torch.tensor(
        [[word([row[base + place] for place in order]) for base in range(0, len(row), 8)] for row in rows.tolist()],
        dtype=torch.int32,
    )


def plain_words(rows: np.ndarray) -> torch.Tensor:
    return torch.tensor(
        [[word(row[base : base + 8]) for base in range(0, len(row), 8)] for row in rows.tolist()], dtype=torch.int32
    )


def pack_matrix(
    weight: np.ndarray, method: str, act_order: bool, v2: bool
) -> tuple[dict[str, torch.Tensor], np.ndarray]:
    inputs = weight.shape[1]
    groups = np.arange(inputs) // GROUP
    if act_order:
        groups = np.random.default_rng(1).permutation(groups)
    values, zeros, scales, decoded = quantise(weight, groups)
    if method == "awq":
        parts = {"qweight": awq_words(values.T), "qzeros": awq_words(zeros), "scales": torch.from_numpy(scales)}
        return parts, decoded
    parts = {
        # Eight inputs per word, down the first dimension.
        "qweight": plain_words(values).t().contiguous(),
        "qzeros": plain_words(zeros if v2 else zeros - 1),
        "scales": torch.from_numpy(scales),
    }
    if act_order:
        parts["g_idx"] = torch.from_numpy(groups.astype(np.int32))
    return parts, decoded


def write(path: Path, method: str, act_order: bool = False, v2: bool = False) -> Path:
    """Writes path/packed and path/plain, two checkpoints of the same values; returns path."""
    torch.manual_seed(4)
    model = LlamaForCausalLM(LlamaConfig(**SMALL))
    model.save_pretrained(path / "plain")
    model.save_pretrained(path / "packed")
    packed: dict[str, torch.Tensor] = {}
    plain: dict[str, torch.Tensor] = {}
    for name, value in load_file(path / "plain" / "model.safetensors").items():
        stem = name.removesuffix(".weight")
        if stem.endswith(PROJECTIONS):
            parts, decoded = pack_matrix(value.numpy(), method, act_order, v2)
            packed |= {f"{stem}.{part}": tensor for part, tensor in parts.items()}
            plain[name] = torch.from_numpy(decoded)
        else:
            packed[name] = plain[name] = value
    save_file(plain, path / "plain" / "model.safetensors")
    save_file(packed, path / "packed" / "model.safetensors")
    config_file = path / "packed" / "config.json"
    config = json.loads(config_file.read_text())
    quantization = {"quant_method": method, "bits": 4, "group_size": GROUP}
    if method == "gptq":
        quantization |= {"desc_act": act_order, "checkpoint_format": "gptq_v2" if v2 else "gptq"}
    config_file.write_text(json.dumps(config | {"quantization_config": quantization}))
    return path


@pytest.mark.parametrize(
    ("method", "act_order", "v2"),
    [("awq", False, False), ("gptq", False, False), ("gptq", True, False), ("gptq", True, True)],
)
def test_packed_equals_plain(method: str, act_order: bool, v2: bool, tmp_path: Path) -> None:
    write(tmp_path, method, act_order, v2)
    packed, plain = open_source(tmp_path / "packed"), open_source(tmp_path / "plain")
    for name in ("layers.0.q.weight", "layers.1.down.weight", "layers.2.gate.weight"):
        assert torch.equal(packed.tensor(name, torch.float32), plain.tensor(name, torch.float32))
    params = SamplingParams(temperature=0.0, logprobs=1)
    prompt = np.random.default_rng(0).integers(3, VOCAB, size=30).tolist()
    jobs = []
    for name in ("packed", "plain"):
        job = Job(prompt, params, 8)
        Driver(load(tmp_path / name)).run([job])
        jobs.append(job)
    assert jobs[0].output == jobs[1].output and jobs[0].scores == jobs[1].scores


@pytest.mark.skipif(not cpu.available(), reason="CPU kernels are not built")
@pytest.mark.parametrize(
    ("method", "act_order", "kind"), [("awq", False, Kind.Q4_K), ("gptq", False, Kind.Q4_K), ("gptq", True, Kind.F32)]
)
def test_native_kernels_keep_four_bits(method: str, act_order: bool, kind: Kind, tmp_path: Path) -> None:
    write(tmp_path, method, act_order)
    settings = RunnerSettings(tmp_path / "packed", kernels="native", threads=1, kv_cache_bytes=4 << 20)
    model = load_model(settings, lambda done, total: None).model
    assert isinstance(model, CompiledModel)
    layer, plain = model.decoder_model.layers[1], open_source(tmp_path / "plain")
    for name in ("q", "o", "gate", "down"):
        tile = getattr(layer, name)
        expected = plain.tensor(f"layers.1.{name}.weight", torch.float32).numpy()
        # code * scale and the minimum are each rounded when a row is read back.
        assert tile.kind is kind and np.abs(tile.dequantize() - expected).max() < 1e-6
    jobs = [Job(list(range(3, 30)), SamplingParams(temperature=0.0, logprobs=1), 4) for _ in range(2)]
    Driver(load_runner(settings)).run([jobs[0]])
    Driver(load(tmp_path / "plain")).run([jobs[1]])
    for mine, theirs in zip(jobs[0].scores[:1], jobs[1].scores[:1], strict=True):
        assert abs(mine.logprob - theirs.logprob) < 0.1


@pytest.mark.parametrize(
    ("change", "reason"),
    [({"bits": 8}, "8 bits"), ({"quant_method": "hqq"}, "hqq"), ({"group_size": 48}, "group size")],
)
def test_what_cannot_be_unpacked_is_refused(change: dict[str, object], reason: str, tmp_path: Path) -> None:
    write(tmp_path, "awq")
    config_file = tmp_path / "packed" / "config.json"
    config = json.loads(config_file.read_text())
    config["quantization_config"] |= change
    config_file.write_text(json.dumps(config))
    with pytest.raises((UnsupportedModel, WeightError), match=reason):
        load(tmp_path / "packed", model_impl="native")
