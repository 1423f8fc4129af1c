"""Fits an n-gram table to conversations."""

from __future__ import annotations

import argparse

from draft_service.training.measure import measure
from draft_service.training.talks import describe, of_options
from tandem.lm.proposers.table import TableProposer, build

Answers = list[tuple[list[int], int]]


def fit(options: argparse.Namespace, spent: float) -> dict[str, object]:
    """Writes draft.npz. Returns its card. `spent`: seconds that gathering took."""
    divided = of_options(options)
    orders = tuple(int(part) for part in options.orders.split(","))
    table = build([(ids, answer) for _, ids, answer in divided.train()], orders, options.max_bytes)
    table.save(options.out / "draft.npz")
    test = divided.test()
    card: dict[str, object] = {
        "kind": "n-gram table",
        "target": options.target,
        **describe(divided),
        "gathering_seconds": round(spent, 1),
        "bytes": table.size_bytes,
        "orders": list(orders),
        "held_out_all": report([(ids, answer) for _, ids, answer in test], table),
        "held_out_greedy": report([(ids, answer) for index, ids, answer in test if index % 2 == 0], table),
        "held_out_sampled": report([(ids, answer) for index, ids, answer in test if index % 2], table),
    }
    if (part := divided.logged()) is not None:
        card["held_out_logged"] = report([(ids, answer) for _, ids, answer in part.test()], table)
    return card


def report(answers: Answers, table: TableProposer) -> dict[str, object]:
    """Acceptance of the table over these answers."""
    found = measure(answers, lambda ids, most: table.draft(ids, most).ids)
    return {
        "acceptance_by_position": found.by_position(),
        "acceptance_length": round(found.length, 4),
        "share_of_positions_with_drafts": round(found.proposed / max(1, found.positions), 4),
    }
