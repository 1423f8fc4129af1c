"""Loading holds the weights once, and tells how far it is."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from tandem.lm.runner import load_runner
from tandem.lm.runner_settings import RunnerSettings

# Checkpoint name → GGUF name, rows and columns in units of the hidden size.
MATRICES = {
    "self_attn.q_proj": ("attn_q", 1, 1),
    "self_attn.k_proj": ("attn_k", 1, 1),
    "self_attn.v_proj": ("attn_v", 1, 1),
    "self_attn.o_proj": ("attn_output", 1, 1),
    "mlp.gate_proj": ("ffn_gate", 3, 1),
    "mlp.up_proj": ("ffn_up", 3, 1),
    "mlp.down_proj": ("ffn_down", 1, 3),
}

# Peaks of resident bytes over what there was before, in a process of its own: pages of mapped files count.
MEASURE = """
import json, sys, threading, time
from pathlib import Path
import kernels.cpu, tandem.lm.loading, tandem.lm.models.compiled, tandem.lm.weights.gguf_file
import tandem.lm.weights.safetensors_dir
from tandem.lm import runner
from tandem.lm.runner_settings import RunnerSettings

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

peak, done = 0, False

def watch():
    global peak
    while not done:
        peak = max(peak, resident())
        time.sleep(0.001)

watcher = threading.Thread(target=watch, daemon=True)
before = resident()
watcher.start()
settings = RunnerSettings(Path(sys.argv[1]), kernels=sys.argv[2], threads=1, kv_cache_bytes=8 << 20)
spec = runner.load_runner(settings).spec
done = True
watcher.join()
print(json.dumps([peak - before, spec.weight_bytes, spec.kernel_path]))
"""


def save(path: Path, layers: int, hidden: int) -> None:
    """A Llama of constant weights: bf16 safetensors in the folder, and Q8_0 in model.gguf."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // 64,
        "num_key_value_heads": hidden // 64,
        "vocab_size": 10 * hidden,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "torch_dtype": "bfloat16",
    }
    (path / "config.json").write_text(json.dumps(config))
    shapes: dict[str, tuple[str, tuple[int, ...]]] = {
        "model.embed_tokens": ("token_embd", (10 * hidden, hidden)),
        "lm_head": ("output", (10 * hidden, hidden)),
        "model.norm": ("output_norm", (hidden,)),
    }
    for layer in range(layers):
        for name, (short, rows, columns) in MATRICES.items():
            shapes[f"model.layers.{layer}.{name}"] = (f"blk.{layer}.{short}", (rows * hidden, columns * hidden))
        for name, short in (("input_layernorm", "attn_norm"), ("post_attention_layernorm", "ffn_norm")):
            shapes[f"model.layers.{layer}.{name}"] = (f"blk.{layer}.{short}", (hidden,))
    tensors = {f"{name}.weight": torch.full(s, 0.01, dtype=torch.bfloat16) for name, (_short, s) in shapes.items()}
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    writer = gguf.GGUFWriter(path / "model.gguf", "llama")
    writer.add_block_count(layers)
    writer.add_context_length(256)
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(3 * hidden)
    writer.add_head_count(hidden // 64)
    writer.add_head_count_kv(hidden // 64)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(10 * hidden)
    for short, shape in shapes.values():
        if len(shape) == 1:
            writer.add_tensor(f"{short}.weight", np.ones(shape, np.float32))
            continue
        blocks = np.full((shape[0], shape[1] // 32, 34), 3, np.uint8)
        blocks[..., :2] = np.frombuffer(np.float16(0.01).tobytes(), np.uint8)
        writer.add_tensor(f"{short}.weight", blocks.reshape(shape[0], -1), raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    for step in ("write_header_to_file", "write_kv_data_to_file", "write_tensors_to_file", "close"):
        getattr(writer, step)()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.slow
@pytest.mark.parametrize("kernels", ["native", "torch"])
@pytest.mark.parametrize("form", ["safetensors", "gguf"])
def test_weights_are_in_memory_once(form: str, kernels: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if kernels == "native":
        cpu = pytest.importorskip("kernels.cpu")
        if not cpu.available():
            pytest.skip(cpu.reason())
    save(tmp_path, layers=24, hidden=768)
    # The tile file of a GGUF is written anew.
    monkeypatch.setenv("TANDEM_CACHE_DIR", str(tmp_path / "cache"))
    path = tmp_path if form == "safetensors" else tmp_path / "model.gguf"
    command = [sys.executable, "-c", MEASURE, str(path), kernels]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    peak, weights, kernel_path = json.loads(done.stdout.splitlines()[-1])
    assert weights > 150 << 20 and kernel_path.endswith("torch") == (kernels == "torch")
    # A matrix on its way, in fp32 too, is far below a quarter of the whole.
    assert peak < 1.35 * weights, f"{peak >> 20} MiB at the peak for {weights >> 20} MiB of weights"


@pytest.mark.parametrize("form", ["safetensors", "gguf"])
def test_loading_tells_how_far_it_is(form: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save(tmp_path, layers=10, hidden=64)
    path = tmp_path if form == "safetensors" else tmp_path / "model.gguf"
    with caplog.at_level(logging.INFO):
        load_runner(RunnerSettings(path, kernels="torch", threads=1, kv_cache_bytes=4 << 20)).close()
    told = [record.getMessage() for record in caplog.records]
    assert [line for line in told if line.startswith("loading weights")] == [
        f"loading weights: {tenth}0%" for tenth in range(1, 11)
    ]
