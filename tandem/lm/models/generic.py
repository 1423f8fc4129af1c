"""Any decoder-only architecture of transformers, over our paged KV.

transformers looks attention up by name; ours is registered under a name of this model's own and reads the step from the
model object. Rows of all sequences are one flat row of tokens with their positions. Matrix products, activations and
rotary tables are replaced by versions whose rows do not depend on the batch. At load, a probe prompt is run both ways
and compared with the model's own attention: what cannot be right is refused.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from tandem.lm import ops
from tandem.lm.attention import AttentionSpec, paged_attention
from tandem.lm.batch import KV, StepBatch, build_batch
from tandem.lm.config import UnsupportedModel
from tandem.lm.kv import KVCache, KVShape, block_bytes, torch_dtype
from tandem.lm.models.replacement import replace_modules
from tandem.lm.types import SamplingParams, Sequence, Slice

log = logging.getLogger(__name__)

_PROBE_BLOCK = 16
# Largest difference of log-probabilities between our attention and the model's own, by dtype.
_TOLERANCE = {torch.float32: 2e-3, torch.bfloat16: 0.5, torch.float16: 0.1}


@dataclass
class _Layer:
    """What the probe saw of one layer's attention."""

    shape: KVShape
    window: int


class GenericModel:
    """Model over transformers. Implements tandem.lm.batch.Model."""

    def __init__(self, path: Path, dtype: torch.dtype, device: torch.device, trust_remote_code: bool) -> None:
        """Loads a checkpoint directory (safetensors only).

        Raises:
            UnsupportedModel: this architecture cannot be run rightly; the message says why.
        """
        from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM

        self.dtype, self.device = dtype, device
        self.dtype_name = self.default_kv_dtype = str(dtype).removeprefix("torch.")
        self.kernel_path = f"{device.type}/transformers"
        self._name = f"tandem_paged_{id(self):x}"
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code, local_files_only=True)
        _check_config(config)
        AttentionInterface.register(self._name, self._attend)
        model = AutoModelForCausalLM.from_pretrained(
            path, dtype=dtype, use_safetensors=True, trust_remote_code=trust_remote_code, local_files_only=True
        )
        if not getattr(model, "_supports_attention_backend", False):
            raise UnsupportedModel(
                f"{type(model).__name__} has attention code of its own that cannot read a paged cache"
            )
        self._model = cast(Any, model).to(device).eval().requires_grad_(False)
        self.config = model.config.get_text_config(decoder=True)
        self.vocab_size, self.hidden_size = int(self.config.vocab_size), int(self.config.hidden_size)
        self.max_position = int(
            getattr(self.config, "max_position_embeddings", 0) or getattr(self.config, "n_positions", 0) or 2048
        )
        # A head drafts from what the output layer reads.
        self.gives_hidden = self._model.get_output_embeddings() is not None
        self.weight_bytes = sum(value.nbytes for value in self._model.parameters())
        self._step: tuple[StepBatch, KVCache] | None = None
        self._seen: dict[int, _Layer] = {}
        self._prove()

    # The attention that transformers calls.

    def _attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scaling: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        """query [1, heads, rows, dim]; key and value [1, kv heads, rows, dim]; returns [1, rows, heads, value dim]."""
        layer = int(getattr(module, "layer_idx", -1))
        if self._step is None:
            return self._observe(layer, query, key, value, attention_mask, sliding_window, kwargs)
        batch, kv = self._step
        rows = batch.rows
        slots = torch.from_numpy(batch.slots).to(query.device)
        kv.write(
            layer,
            slots // batch.block_size,
            slots % batch.block_size,
            key[0, :, :rows].transpose(0, 1),
            value[0, :, :rows].transpose(0, 1),
        )
        spec = AttentionSpec(
            scale=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
            window=self._seen[layer].window,
            softcap=float(softcap or 0.0),
            sinks=s_aux,
        )
        out = paged_attention(query[0].transpose(0, 1).contiguous(), kv.keys[layer], kv.values[layer], batch, spec)
        return out.unsqueeze(0), None

    def _observe(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        window: int | None,
        kwargs: dict[str, Any],
    ) -> tuple[torch.Tensor, None]:
        """First pass: learns the shapes of each layer's KV, and refuses what our attention does not do."""
        if layer < 0 or layer in self._seen:
            raise UnsupportedModel(f"attention of layer {layer} is called without its number or more than once")
        if mask is not None:
            raise UnsupportedModel("the model passes a mask of its own to attention")
        for name in ("position_bias", "alibi", "cu_seq_lens_q", "indices"):
            if kwargs.get(name) is not None:
                raise UnsupportedModel(f"the model passes {name} to attention")
        if query.shape[1] % key.shape[1]:
            raise UnsupportedModel(f"{query.shape[1]} query heads do not divide over {key.shape[1]} KV heads")
        self._seen[layer] = _Layer(KVShape(key.shape[1], key.shape[3], value.shape[3]), int(window or 0))
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3]), None

    # The proof at load.

    @torch.inference_mode()
    def _prove(self) -> None:
        """Learns the layers, replaces modules, and compares with the model's own attention."""
        ids = (torch.arange(40) * 7 + 3) % self.vocab_size
        rows = ids.to(self.device)[None]
        own = self._model(input_ids=rows, use_cache=False).logits[0].float().log_softmax(-1).cpu().numpy()
        self.config._attn_implementation = self._name
        positions = torch.arange(len(ids), device=self.device)[None]
        self._model(input_ids=rows, position_ids=positions, use_cache=False)
        self._check_layers()
        unknown = replace_modules(self._model)
        prompt = ids.tolist()
        alone = self._probe([prompt], 40)
        apart = float(np.abs(_log_softmax(alone) - own).max())
        if not apart < _TOLERANCE[self.dtype]:
            raise UnsupportedModel(
                f"log-probabilities through paged attention differ from the model's own by {apart:.3g} "
                f"(at most {_TOLERANCE[self.dtype]} is rounding): it does something that our attention does not"
            )
        mates = self._probe([prompt[5:30], prompt, prompt[::-1]], 17)
        equal = np.array_equal(alone, mates)
        if unknown or not equal or self.device.type != "cpu":
            log.warning("tolerance only: %s", unknown or "rows depend on their batch in the last bits")
        self.batch_invariant = equal and not unknown and self.device.type == "cpu"

    def _check_layers(self) -> None:
        layers = int(self.config.num_hidden_layers)
        if sorted(self._seen) != list(range(layers)):
            missing = sorted(set(range(layers)) - set(self._seen))
            raise UnsupportedModel(
                f"layers {missing[:4]} of {layers} do not use attention over a cache (recurrent or convolutional state)"
            )
        kinds = getattr(self.config, "layer_types", None) or []
        for layer, kind in enumerate(kinds):
            if kind not in ("full_attention", "sliding_attention", "attention"):
                raise UnsupportedModel(f"layer {layer} is {kind!r}, which our attention does not do")
            if kind == "sliding_attention" and not self._seen[layer].window:
                raise UnsupportedModel(f"layer {layer} has a sliding window that it does not tell to attention")

    def _probe(self, prompts: list[list[int]], chunk: int) -> np.ndarray:
        """Logits [40, vocab] of the 40-token prompt among `prompts`, computed in chunks."""
        blocks = 3
        kv = self.new_kv(blocks * len(prompts), _PROBE_BLOCK, self.default_kv_dtype, 0)
        parts = []
        for start in range(0, 40, chunk):
            slices, wanted, base = [], np.empty(0, dtype=np.int64), 0
            for index, prompt in enumerate(prompts):
                count = min(chunk, len(prompt) - start)
                if count <= 0:
                    continue
                sequence = Sequence(index, 0, SamplingParams(), prompt, len(prompt))
                table = [index * blocks + block for block in range(blocks)]
                slices.append(Slice(sequence, table, start, count))
                if index == len(prompts) // 2:
                    wanted = np.arange(base, base + count)
                base += count
            batch = build_batch(slices, wanted, _PROBE_BLOCK, kv.num_blocks)
            parts.append(self.logits(batch, kv))
        return np.concatenate(parts)

    # The Model interface.

    def kv_block_bytes(self, block_size: int, kv_dtype: str) -> int:
        return block_bytes(self._kv_shapes(), block_size, kv_dtype)

    def new_kv(self, num_blocks: int, block_size: int, kv_dtype: str, max_rows: int) -> KVCache:
        return KVCache(self._kv_shapes(), num_blocks, block_size, torch_dtype(kv_dtype), self.device)

    def _kv_shapes(self) -> list[KVShape]:
        return [self._seen[layer].shape for layer in sorted(self._seen)]

    def _inputs(self, batch: StepBatch) -> dict[str, Any]:
        return {
            "input_ids": torch.from_numpy(batch.token_ids).to(self.device)[None],
            "position_ids": torch.from_numpy(batch.positions).to(self.device)[None],
            "use_cache": False,
        }

    def _rows(self, batch: StepBatch) -> torch.Tensor:
        """logit_rows, padded to the row tile by repeating row 0."""
        rows = np.zeros(ops.padded(len(batch.logit_rows)), dtype=np.int64)
        rows[: len(batch.logit_rows)] = batch.logit_rows
        return torch.from_numpy(rows).to(self.device)

    @torch.inference_mode()
    def logits(self, batch: StepBatch, kv: KV) -> np.ndarray:
        self._step = (batch, cast(KVCache, kv))
        try:
            out = self._model(**self._inputs(batch), logits_to_keep=self._rows(batch)).logits[0]
        finally:
            self._step = None
        return out[: len(batch.logit_rows)].float().cpu().numpy()

    def logits_and_hidden(self, batch: StepBatch, kv: KV) -> tuple[np.ndarray, np.ndarray]:
        """The states are what the output layer reads in the pass that gives the logits."""
        seen: list[torch.Tensor] = []
        hook = self._model.get_output_embeddings().register_forward_pre_hook(
            lambda _module, inputs: seen.append(inputs[0])
        )
        try:
            logits = self.logits(batch, kv)
        finally:
            hook.remove()
        states = seen[0].reshape(-1, seen[0].shape[-1])
        return logits, states[: len(batch.logit_rows)].float().cpu().numpy()

    @torch.inference_mode()
    def embedding_rows(self, ids: list[int]) -> np.ndarray:
        weight = self._model.get_input_embeddings().weight
        return weight[torch.tensor(ids, dtype=torch.int64, device=weight.device)].float().cpu().numpy()

    @torch.inference_mode()
    def hidden(self, batch: StepBatch, kv: KV) -> np.ndarray:
        self._step = (batch, cast(KVCache, kv))
        try:
            out = self._model.base_model(**self._inputs(batch)).last_hidden_state[0]
        finally:
            self._step = None
        return out[torch.from_numpy(batch.logit_rows).to(self.device)].float().cpu().numpy()


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    return torch.from_numpy(logits).log_softmax(-1).numpy()


def _ropes(config: Any) -> Iterator[dict[str, Any]]:
    """Every set of rope parameters in a config, nested per layer type or not."""
    for name in ("rope_parameters", "rope_scaling"):
        found = getattr(config, name, None)
        if isinstance(found, dict):
            yield found
            yield from (value for value in found.values() if isinstance(value, dict))


def _check_config(config: Any) -> None:
    """Raises UnsupportedModel for what the config alone shows to be wrong here."""
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModel(f"{config.model_type} has an encoder; only decoder-only models are served")
    for rope in _ropes(config.get_text_config(decoder=True)):
        kind = rope.get("rope_type", rope.get("type"))
        if kind in ("dynamic", "longrope", "su"):
            raise UnsupportedModel(
                f"rope_type {kind!r} changes its frequencies with the longest request of a batch, "
                "so one request would change its neighbours' answers"
            )
