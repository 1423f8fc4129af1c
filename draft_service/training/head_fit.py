"""Fits a head: its vocabulary, the target's distributions as labels, and the training loop with checkpoints."""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from draft_service.training.head_init import warm_start
from draft_service.training.head_module import HeadModule, soft_cross_entropy
from draft_service.training.states import Corpus
from tandem.lm.proposers.head_file import quantize


class CheckpointError(ValueError):
    """A checkpoint that belongs to another training."""


# Called with steps done, steps in all, mean loss of late, seconds left.
Progress = Callable[[int, int, float, float], None]


@dataclass(frozen=True, slots=True)
class HeadPlan:
    """What is trained and how. Changes to it make other weights."""

    seed: int = 0
    intermediate: int = 512
    vocab: int = 8192
    # Ids that a batch's loss sees beside its labels: a sample that stands for all others.
    negatives: int = 512
    # Drafts per training row: the weight of each one's loss, and the share of a batch's rows that get so far.
    weights: tuple[float, ...] = (1.0, 0.6, 0.4)
    shares: tuple[float, ...] = (1.0, 0.5, 0.25)
    # Ids of the target's distribution that are kept as labels, and the temperature they are taken at.
    labels: int = 8
    label_temperature: float = 1.0
    epochs: float = 2.0
    batch: int = 256
    rate: float = 1e-3
    warmup: int = 100
    decay: float = 0.01
    clip: float = 1.0
    # Form that w_out is rounded to before training, that of the file.
    out_kind: str = "Q4_0"
    # Positions that the closed-form start is fitted to; 0: a random start.
    warm_rows: int = 100_000

    def steps(self, rows: int) -> int:
        return max(1, math.ceil(self.epochs * rows / self.batch))


@dataclass(frozen=True, eq=False)
class Target:
    """What training needs of the target: fp32 [vocab, hidden] input embeddings and LM-head rows."""

    embedding: Tensor
    head: Tensor
    digest: str
    # Logits are divided by this, then soft-capped (0: not).
    divisor: float = 1.0
    softcap: float = 0.0


@dataclass(frozen=True, eq=False)
class Labels:
    """The target's likeliest ids in the head's vocabulary at each row: int32 and fp16 [N, labels], chances sum to 1."""

    ids: np.ndarray
    chances: np.ndarray


def choose_vocab(tokens: np.ndarray, size: int, target_vocab: int) -> np.ndarray:
    """The `size` ids most frequent in `tokens`, of equals the lowest; int32, ascending.

    A byte-pair vocabulary is numbered by the order of its merges, so low numbers are frequent in text at large.
    """
    counts = np.bincount(tokens, minlength=target_vocab)
    return np.sort(np.lexsort((np.arange(target_vocab), -counts))[: min(size, target_vocab)]).astype(np.int32)


def label(corpus: Corpus, target: Target, ids: np.ndarray, count: int, temperature: float) -> Labels:
    """The target's own next-token distribution at each row, over `ids`, cut to its `count` likeliest."""
    rows = target.head[torch.from_numpy(ids.astype(np.int64))]
    count = min(count, len(ids))
    found = np.empty((len(corpus), count), np.int32)
    chances = np.empty((len(corpus), count), np.float16)
    for start in range(0, len(corpus), 1024):
        hidden = torch.from_numpy(corpus.hidden[start : start + 1024].astype(np.float32))
        logits = hidden @ rows.T / target.divisor
        if target.softcap:
            logits = target.softcap * torch.tanh(logits / target.softcap)
        top = torch.topk(logits / temperature, count, dim=1)
        found[start : start + 1024] = top.indices.numpy()
        chances[start : start + 1024] = torch.softmax(top.values, dim=1).numpy()
    return Labels(found, chances)


def rounded(weight: Tensor, kind: str) -> Tensor:
    """The weight as a file of this form gives it back."""
    return torch.from_numpy(quantize(weight.numpy(), kind).dequantize())


class Trainer:
    """Trains one head; `run` goes on from the checkpoint if there is one of the same plan and data."""

    def __init__(self, plan: HeadPlan, target: Target, corpus: Corpus, ids: np.ndarray, labels: Labels) -> None:
        self.plan, self.ids = plan, ids
        self._corpus, self._labels, self._target = corpus, labels, target
        self._rows = np.flatnonzero(corpus.left >= 1)
        if not len(self._rows):
            raise ValueError("no answer has two tokens: there is nothing to learn from")
        sample = corpus.hidden[: min(len(corpus), 4096)].astype(np.float32)
        scale = float(np.sqrt((sample**2).mean()))
        out = rounded(target.head[torch.from_numpy(ids.astype(np.int64))], plan.out_kind)
        self._out = out
        self.module = HeadModule(out.shape[1], plan.intermediate, out, scale, plan.seed)
        self._optimizer = torch.optim.AdamW(self._groups(), lr=plan.rate, betas=(0.9, 0.95))
        self.steps = plan.steps(len(self._rows))
        self.step = 0
        self.seconds = 0.0

    def _groups(self) -> list[dict[str, object]]:
        """Matrices decay towards 0, gains do not, and neither does w_in, which begins as the identity."""
        named = dict(self.module.named_parameters())
        decaying = [named[name] for name in ("w_gate", "w_up", "w_down")]
        others = [value for name, value in named.items() if name not in ("w_gate", "w_up", "w_down")]
        return [{"params": decaying, "weight_decay": self.plan.decay}, {"params": others, "weight_decay": 0.0}]

    def fingerprint(self) -> str:
        """Of everything that decides the result."""
        state = hashlib.blake2b(json.dumps(asdict(self.plan), sort_keys=True).encode(), digest_size=16)
        for array in (self.ids, self._corpus.tokens, self._corpus.left):
            state.update(np.ascontiguousarray(array).tobytes())
        state.update(self._target.digest.encode())
        return state.hexdigest()

    def run(self, checkpoint: Path, progress: Progress, save_every_s: float = 60.0, stop_after: int = 0) -> None:
        """Trains to the end, or for `stop_after` steps if that is given."""
        if not self._resume(checkpoint) and self.plan.warm_rows:
            warm_start(self.module, self._corpus, self._target.embedding, self.plan.warm_rows)
        last = self.steps if not stop_after else min(self.steps, self.step + stop_after)
        began = saved = time.monotonic()
        before, from_step, mean = self.seconds, self.step, 0.0
        while self.step < last:
            loss = self._one()
            mean = loss if not mean else 0.98 * mean + 0.02 * loss
            now = time.monotonic()
            self.seconds = before + now - began
            if self.step % 10 == 0:
                progress(self.step, self.steps, mean, (now - began) / (self.step - from_step) * (last - self.step))
            if now - saved > save_every_s:
                self._save(checkpoint)
                saved = now
        self._save(checkpoint)

    def _one(self) -> float:
        for group in self._optimizer.param_groups:
            group["lr"] = self._rate()
        self._optimizer.zero_grad(set_to_none=True)
        loss = self._loss(self._batch())
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.module.parameters(), self.plan.clip)
        self._optimizer.step()
        self.step += 1
        return float(loss.detach())

    def _rate(self) -> float:
        """Linear warm-up, then cosine to a hundredth."""
        warm = min(self.plan.warmup, self.steps // 2)
        if self.step < warm:
            return self.plan.rate * (self.step + 1) / warm
        done = (self.step - warm) / max(1, self.steps - warm)
        return self.plan.rate * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * done)))

    def _batch(self) -> np.ndarray:
        """Rows of this step: epochs are permutations that depend on seed and epoch alone, joined end to end."""
        begin = self.step * self.plan.batch
        found: list[np.ndarray] = []
        for epoch in range(begin // len(self._rows), (begin + self.plan.batch - 1) // len(self._rows) + 1):
            order = self._order(epoch)
            start = epoch * len(self._rows)
            found.append(order[max(0, begin - start) : max(0, begin + self.plan.batch - start)])
        return self._rows[np.concatenate(found)]

    def _order(self, epoch: int) -> np.ndarray:
        if getattr(self, "_epoch", None) != epoch:
            self._permutation = np.random.default_rng((self.plan.seed, epoch)).permutation(len(self._rows))
            self._epoch = epoch
        return self._permutation

    def _candidates(self, rows: np.ndarray) -> tuple[Tensor, Tensor, Tensor]:
        """Places in the vocabulary int64 [c], what their logits get added, and the candidate of each place.

        Sampled softmax (Jean et al., 2015): a sampled id stands for several, so its share of the sum grows by as much.
        """
        vocab = len(self.ids)
        wanted = np.unique(
            np.concatenate([self._labels.ids[rows[part] + n] for n, part in enumerate(self._unrolled(rows), 1)])
        )
        rest = np.setdiff1d(np.arange(vocab), wanted, assume_unique=True)
        rng = np.random.default_rng((self.plan.seed, 1, self.step))
        others = np.sort(rng.choice(rest, min(len(rest), self.plan.negatives), replace=False))
        added = np.zeros(len(wanted) + len(others), np.float32)
        if len(others):
            added[len(wanted) :] = math.log(len(rest) / len(others))
        chosen = np.concatenate((wanted, others)).astype(np.int64)
        place = np.zeros(vocab, np.int64)
        place[chosen] = np.arange(len(chosen))
        return torch.from_numpy(chosen), torch.from_numpy(added), torch.from_numpy(place)

    def _unrolled(self, rows: np.ndarray) -> list[np.ndarray]:
        """Places in `rows` that get to each draft: a share of the batch, whose answers are long enough."""
        found, left = [], self._corpus.left[rows]
        for ahead, share in enumerate(self.plan.shares, 1):
            places = np.flatnonzero(left >= ahead)[: max(1, round(share * self.plan.batch))]
            if len(places):
                found.append(places)
        return found

    def _loss(self, rows: np.ndarray) -> Tensor:
        """Weighted mean over the unrolled drafts; rows whose answer ends leave the batch."""
        corpus, labels = self._corpus, self._labels
        chosen, added, place = self._candidates(rows)
        w_out = self._out[chosen]
        state = self.module.start(torch.from_numpy(corpus.hidden[rows].astype(np.float32)))
        at = np.arange(len(rows))
        total = torch.zeros(())
        for ahead, (weight, places) in enumerate(zip(self.plan.weights, self._unrolled(rows), strict=False), 1):
            if len(places) < len(at):
                state = state[torch.from_numpy(np.isin(at, places))]
            at = places
            here = rows[places]
            inputs = torch.from_numpy(corpus.tokens[here + ahead - 1])
            state = self.module.advance(state, self._target.embedding[inputs])
            logits = self.module.logits(state, w_out) + added
            ids = place[torch.from_numpy(labels.ids[here + ahead].astype(np.int64))]
            chances = torch.from_numpy(labels.chances[here + ahead].astype(np.float32))
            total = total + weight * soft_cross_entropy(logits, ids, chances)
        return total / sum(self.plan.weights)

    def _save(self, path: Path) -> None:
        partial = path.with_suffix(".partial")
        torch.save(
            {
                "fingerprint": self.fingerprint(),
                "step": self.step,
                "seconds": self.seconds,
                "module": self.module.state_dict(),
                "optimizer": self._optimizer.state_dict(),
            },
            partial,
        )
        partial.replace(path)

    def _resume(self, path: Path) -> bool:
        """Whether there was one. Raises CheckpointError if it is of another plan or other data."""
        if not path.exists():
            return False
        found = torch.load(path, weights_only=True)
        if found["fingerprint"] != self.fingerprint():
            raise CheckpointError(
                f"{path} is a checkpoint of another plan or other data: remove it, or choose another --out"
            )
        self.module.load_state_dict(found["module"])
        self._optimizer.load_state_dict(found["optimizer"])
        self.step, self.seconds = int(found["step"]), float(found["seconds"])
        return True
