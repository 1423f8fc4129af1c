"""Fits a head to conversations and the target's hidden states, and measures it as it will be served."""

from __future__ import annotations

import argparse
import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from draft_service.training import logged, states
from draft_service.training.gather import Place
from draft_service.training.generate import Plan
from draft_service.training.head_fit import HeadPlan, Labels, Target, Trainer, choose_vocab, label
from draft_service.training.head_measure import measure_head
from draft_service.training.states import Corpus
from draft_service.training.talks import Divided, describe, of_options
from tandem.lm.proposers.head_file import GAINS, MATRICES, HeadFile, quantize, save_head
from tandem.lm.proposers.head_net import HeadNet, TorchNet, head_net
from tandem.lm.weights import open_source

# Held-out positions that are measured, of greedy and of sampled answers each: more take minutes and tell no more.
_MEASURED = 6_000


def fit(options: argparse.Namespace, spent: float) -> dict[str, object]:
    """Writes draft.head.safetensors. Returns its card. `spent`: seconds that gathering took.

    Raises:
        StatesError: conversations without hidden states.
        UnsupportedModel: a target whose weights are not read by this package's own loaders.
    """
    # Under load several threads wait for each other in every product; the process may be given others.
    torch.set_num_threads(options.threads or 1)
    plan = HeadPlan(
        seed=options.seed,
        intermediate=options.intermediate,
        vocab=options.vocab,
        epochs=options.epochs,
        batch=options.rows,
        rate=options.rate,
        out_kind=options.out_weights,
    )
    target = read_target(options.target)
    divided = of_options(options)
    train, test = corpora(divided, target.embedding.shape[1])
    part = divided.logged()
    of_traffic = None if part is None else held_out_corpus(part, target.embedding.shape[1])
    ids = choose_vocab(train.tokens, plan.vocab, len(target.embedding))
    labels = cached_labels(options.out / "labels.npz", train, target, ids, plan)
    trainer = Trainer(plan, target, train, ids, labels)
    trainer.run(options.out / "head.checkpoint", _progress)
    print()
    head = pack(trainer, target, options.weights)
    card: dict[str, object] = {
        "kind": "recurrent head",
        "target": options.target,
        "target_digest": target.digest,
        **describe(divided),
        "gathering_seconds": round(spent, 1),
        "training_seconds": round(trainer.seconds, 1),
        "steps": trainer.steps,
        "plan": {name: getattr(plan, name) for name in plan.__slots__},
        "forms": {name: getattr(head, name).kind for name in MATRICES},
        "bytes_per_drafted_token": head.bytes_per_token,
        "coverage": round(float(np.isin(test.tokens, ids).mean()), 4),
        "held_out": measured(head_net(head), ids, test, target),
        "held_out_fp32": measured(TorchNet(pack(trainer, target, "F32", "F32")), ids, test, target),
    }
    if of_traffic is not None and len(of_traffic):
        card["held_out_logged"] = measured(head_net(head), ids, of_traffic, target)
    save_head(options.out / "draft.head.safetensors", pack(trainer, target, options.weights, card=card))
    return card


def read_target(name: str) -> Target:
    """Embeddings and output rows of a model by name or path."""
    from tandem.models.store import resolve

    source = open_source(resolve(name).path)
    try:
        embedding = source.tensor("embed.weight", torch.float32)
        tied = source.config.tied_embeddings or not source.has("head.weight")
        output = embedding if tied else source.tensor("head.weight", torch.float32)
        config = source.config
        return Target(embedding, output, source.digest(), config.logit_divisor, config.logit_softcap or 0.0)
    finally:
        source.close()


def corpora(divided: Divided, hidden: int) -> tuple[Corpus, Corpus]:
    """(learnt from, held out). Corpus.talk are sampling seeds here."""
    train: list[Corpus] = []
    for place, talks, held, dropped in zip(
        divided.places, divided.talks, divided.held_out, divided.dropped, strict=True
    ):
        if talks:
            found = states.load(place.states, talks, hidden)
            rows = ~np.isin(found.talk, sorted(held | dropped))
            train.append(_seeded(place, found.where(rows)))
    return states.join(train), held_out_corpus(divided, hidden)


def held_out_corpus(divided: Divided, hidden: int) -> Corpus:
    """What is held out. Corpus.talk are sampling seeds here."""
    parts: list[Corpus] = []
    for place, talks, held in zip(divided.places, divided.talks, divided.held_out, strict=True):
        if talks:
            found = states.load(place.states, talks, hidden)
            parts.append(_seeded(place, found.where(np.isin(found.talk, sorted(held)))))
    return states.join(parts)


def _seeded(place: Place, rows: Corpus) -> Corpus:
    """Rows of a directory with seeds, choices and temperatures of their answers."""
    if place.logged:
        seeds, choices, temperatures = logged.per_row(rows.talk, logged.draws(place.talks))
    else:
        seeds = (rows.talk + (place.seed() << 32)).astype(np.uint64)
        choices = np.zeros(len(rows), np.int64)
        temperatures = np.where(rows.talk % 2 == 0, 0.0, Plan().answer_temperature).astype(np.float32)
    return replace(rows, talk=seeds, choice=choices, temperature=temperatures)


def cached_labels(path: Path, corpus: Corpus, target: Target, ids: np.ndarray, plan: HeadPlan) -> Labels:
    """Labels of these rows; kept in a file, since they take minutes."""
    state = hashlib.blake2b(f"{target.digest} {plan.labels} {plan.label_temperature}".encode(), digest_size=16)
    for array in (ids, corpus.tokens, corpus.left):
        state.update(np.ascontiguousarray(array).tobytes())
    if path.exists():
        with np.load(path) as found:
            if str(found["key"]) == state.hexdigest():
                return Labels(found["ids"], found["chances"])
    print(f"labels of {len(corpus):,} positions")
    labels = label(corpus, target, ids, plan.labels, plan.label_temperature)
    partial = path.with_suffix(".partial.npz")
    np.savez(partial, key=np.array(state.hexdigest()), ids=labels.ids, chances=labels.chances)
    partial.replace(path)
    return labels


def pack(
    trainer: Trainer,
    target: Target,
    kind: str,
    out_kind: str | None = None,
    card: dict[str, object] | None = None,
) -> HeadFile:
    """The trained head in these forms; out_kind None: the one it was trained with."""
    weights = {name: value.detach().numpy() for name, value in trainer.module.state_dict().items()}
    last = trainer.plan.out_kind if out_kind is None else out_kind
    # From the target's own rows: what is rounded already need not round to itself.
    weights["w_out"] = target.head[torch.from_numpy(trainer.ids.astype(np.int64))].numpy()
    parts: dict[str, Any] = {name: quantize(weights[name], last if name == "w_out" else kind) for name in MATRICES}
    parts |= {name: np.ascontiguousarray(weights[name]) for name in GAINS}
    return HeadFile(
        target_digest=target.digest,
        target_vocab=len(target.embedding),
        **parts,
        ids=trainer.ids,
        card=card or {},
    )


def measured(net: HeadNet, ids: np.ndarray, test: Corpus, target: Target) -> dict[str, object]:
    """Held-out acceptance of greedy and of sampled answers."""
    embedding = target.embedding.numpy()
    assert test.temperature is not None
    greedy = test.temperature == 0
    return {
        name: measure_head(net, ids, _first(test.where(rows)), embedding).report()
        for name, rows in (("greedy", greedy), ("sampled", ~greedy))
        if rows.any()
    }


def _first(corpus: Corpus) -> Corpus:
    """As many answers as there are within the first _MEASURED rows, at least one."""
    ends = np.flatnonzero(corpus.left[:_MEASURED] == 0)
    rows = np.arange(len(corpus)) <= (ends[-1] if len(ends) else int(np.argmax(corpus.left == 0)))
    return corpus.where(rows)


def _progress(step: int, steps: int, loss: float, left: float) -> None:
    print(
        f"\r{step:,} of {steps:,} steps ({step / steps:.0%}), loss {loss:.3f}, {left / 60:.0f} min left   ",
        end="",
        flush=True,
    )
