"""The sampler on the device: the same order and noise as tandem.lm.sampler, on logits that stay where they are.

The host turns each row's parameters into sparse edits and bit masks; only they and the sampled ids cross the bus.
"""

from __future__ import annotations

import numpy as np
import torch

from kernels.triton.sampling import LogitEdits, RowParams, edit_logits, mask_logits, sample
from tandem.lm.processors import Row, TokenCounts, has_penalties
from tandem.lm.sampler import Sampled

_ERRORS = {-1: "NO_ALLOWED_TOKEN", -2: "INTERNAL"}
# Bias and uses of one token in one row; uses −1: not seen.
_Entry = tuple[float, int]


class DeviceSampler:
    """Samples rows of logits on a device; holds token counts of sequences with penalties until they are forgotten."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self.vocab_size, self.device = vocab_size, device
        self._counts: dict[int, TokenCounts] = {}

    def forget(self, sequence_id: int) -> None:
        self._counts.pop(sequence_id, None)

    def sample(self, logits: torch.Tensor, rows: list[Row]) -> Sampled:
        """Samples each row of raw logits, fp32 [rows, vocab] on the device; does not change them."""
        masks = [self._mask(row) for row in rows]
        entries = [self._entries(row, mask) for row, mask in zip(rows, masks, strict=True)]
        if any(entries) or any(mask is not None for mask in masks):
            logits = logits.clone()
            self._edit(logits, rows, entries)
            self._apply_masks(logits, masks)
        ids = sample(logits, self._params(rows)).cpu().numpy().astype(np.int64)
        errors = {int(row): _ERRORS[int(ids[row])] for row in np.flatnonzero(ids < 0)}
        return Sampled(ids, errors)

    def _tensor(self, values: object, dtype: torch.dtype) -> torch.Tensor:
        return torch.as_tensor(values).to(self.device, dtype)

    def _params(self, rows: list[Row]) -> RowParams:
        params = [row.params for row in rows]
        seeds = np.asarray([item.seed for item in params], dtype=np.uint64).view(np.int64)
        return RowParams(
            temperatures=self._tensor([item.temperature for item in params], torch.float32),
            min_ps=self._tensor([item.min_p for item in params], torch.float32),
            top_ks=self._tensor([item.top_k for item in params], torch.int32),
            top_ps=self._tensor([item.top_p for item in params], torch.float32),
            seeds=self._tensor(seeds, torch.int64),
            positions=self._tensor([row.position for row in rows], torch.int32),
            choices=self._tensor([row.sequence.choice for row in rows], torch.int32),
            purposes=torch.zeros(len(rows), dtype=torch.int32, device=self.device),
        )

    def _mask(self, row: Row) -> np.ndarray | None:
        """Allowed tokens as int32 words: the grammar's and the request's; None: all."""
        words = None if row.mask is None else np.asarray(row.mask, dtype=np.int32)
        if not row.params.allowed_token_ids:
            return words
        bits = np.zeros(-(-self.vocab_size // 32) * 32, dtype=np.uint8)
        bits[list(row.params.allowed_token_ids)] = 1
        own = np.packbits(bits, bitorder="little").view("<i4").astype(np.int32)
        return own if words is None else own & words

    def _entries(self, row: Row, mask: np.ndarray | None) -> dict[int, _Entry]:
        """Token → (bias, uses) where anything but the mask changes a logit."""
        params = row.params
        found: dict[int, _Entry] = {}
        for token, bias in params.logit_bias:
            found[token] = (found.get(token, (0.0, -1))[0] + bias, -1)
        banned = [word[-1] for word in params.bad_words if word and row.ends_with(word[:-1])]
        if params.min_tokens > row.position and not self._only_stops(row, mask, banned):
            banned += params.stop_token_ids
        for token in banned:
            found[token] = (float("-inf"), -1)
        if has_penalties(params):
            counts = self._counts.setdefault(row.sequence.id, TokenCounts())
            counts.update(row.sequence)
            output = counts.output(row.drafts)
            for token in counts.seen(row.drafts) if params.repetition_penalty != 1.0 else output:
                found[token] = (found.get(token, (0.0, -1))[0], output.get(token, 0))
        return found

    def _only_stops(self, row: Row, mask: np.ndarray | None, banned: list[int]) -> bool:
        """Whether a grammar leaves nothing but stop tokens: it beats min_tokens, so they stay."""
        if row.mask is None or mask is None:
            return False
        bits = np.unpackbits(mask.astype("<i4").view(np.uint8), count=self.vocab_size, bitorder="little")
        bits[[*row.params.stop_token_ids, *banned]] = 0
        return not bits.any()

    def _edit(self, logits: torch.Tensor, rows: list[Row], entries: list[dict[int, _Entry]]) -> None:
        flat = [(token, *entry) for row in entries for token, entry in row.items()]
        if not flat:
            return
        tokens, biases, uses = zip(*flat, strict=True)
        params = [row.params for row in rows]
        edits = LogitEdits(
            self._tensor(np.cumsum([0, *(len(row) for row in entries)]), torch.int32),
            self._tensor(tokens, torch.int32),
            self._tensor(biases, torch.float32),
            self._tensor(uses, torch.int32),
            self._tensor([item.repetition_penalty for item in params], torch.float32),
            self._tensor([item.frequency_penalty for item in params], torch.float32),
            self._tensor([item.presence_penalty for item in params], torch.float32),
        )
        edit_logits(logits, edits)

    def _apply_masks(self, logits: torch.Tensor, masks: list[np.ndarray | None]) -> None:
        stacked = [mask for mask in masks if mask is not None]
        if not stacked:
            return
        places, count = [], 0
        for mask in masks:
            places.append(-1 if mask is None else count)
            count += mask is not None
        mask_logits(logits, self._tensor(np.stack(stacked), torch.int32), self._tensor(places, torch.int32))
