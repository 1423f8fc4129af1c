"""The trained table: what it keeps, how it drafts, how its acceptance is measured."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from draft_service.training.measure import measure
from tandem.lm.proposers import CombinedProposer, DraftSequence, NgramProposer
from tandem.lm.proposers.table import Level, TableError, TableProposer, build, context_key


def corpus(count: int, seed: int = 1) -> list[tuple[list[int], int]]:
    """Texts of a second-order source with some noise."""
    rng = random.Random(seed)
    texts = []
    for _ in range(count):
        ids = [rng.randrange(20), rng.randrange(20)]
        while len(ids) < 60:
            ids.append((ids[-1] * 3 + ids[-2]) % 20 if rng.random() < 0.9 else rng.randrange(20))
        texts.append((ids, 2))
    return texts


def test_learns_the_source_and_says_how_sure_it_is() -> None:
    table = build(corpus(300), (1, 2, 3), 1_000_000)
    found = measure(corpus(20, seed=2), lambda ids, most: table.draft(ids, most).ids)
    assert found.by_position()[0] == pytest.approx(0.9, abs=0.03)
    assert found.length > 3
    guess = table.draft([7, 4], 3)
    assert guess.ids[0] == (4 * 3 + 7) % 20
    assert guess.confidence == pytest.approx(0.9, abs=0.1)


def test_a_small_table_keeps_the_contexts_that_are_worth_most() -> None:
    large, small = build(corpus(60), (1, 2, 3), 1_000_000), build(corpus(60), (1, 2, 3), 13 * 200)
    assert small.size_bytes <= 13 * 200 < large.size_bytes
    held_out = corpus(20, seed=2)
    worse = measure(held_out, lambda ids, most: small.draft(ids, most).ids)
    assert worse.length > 1.5


def test_backs_off_to_shorter_contexts_and_says_nothing_without_one() -> None:
    table = build([([1, 2, 3, 4], 0)], (1, 2), 1_000)
    assert table.draft([9, 2], 1).ids == (3,)
    assert table.draft([9, 9], 1).ids == ()


def test_saved_table_is_equal(tmp_path: Path) -> None:
    table = build(corpus(5), (1, 2), 10_000)
    table.save(tmp_path / "t.npz")
    loaded = TableProposer.load(tmp_path / "t.npz")
    assert all(table.draft([a, b], 5) == loaded.draft([a, b], 5) for a in range(20) for b in range(20))
    assert [path.name for path in tmp_path.iterdir()] == ["t.npz"]


def test_bad_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.npz"
    with pytest.raises(TableError, match="cannot be read"):
        TableProposer.load(path)
    path.write_bytes(b"no archive")
    with pytest.raises(TableError):
        TableProposer.load(path)
    np.savez(path, format=np.array(9))
    with pytest.raises(TableError, match="format is 9"):
        TableProposer.load(path)
    keys = np.array([2, 1], np.uint64)
    TableProposer([Level(1, keys, np.zeros(2, np.uint32), np.zeros(2, np.uint8))]).save(path)
    with pytest.raises(TableError, match="ascending"):
        TableProposer.load(path)


def test_keys_depend_on_every_token_and_on_order() -> None:
    keys = {context_key(tokens) for tokens in ([1], [1, 2], [2, 1], [0, 1], [1, 2, 3], [0])}
    assert len(keys) == 6


def test_measure_counts_by_position_given_those_before() -> None:
    found = measure([([0, 1, 2, 3, 9], 1)], lambda ids, most: [ids[-1] + 1, ids[-1] + 2], most=2)
    # From 0: 1, 2 right. From 1: 2, 3 right. From 2: 3 right, 4 wrong. From 3: 4 wrong.
    assert (found.reached, found.right, found.positions) == ([4, 3], [3, 2], 4)


def test_works_beside_other_proposers() -> None:
    combined = CombinedProposer([NgramProposer(), build(corpus(20), (2,), 10_000)])
    sequence = DraftSequence(1, [7, 4])
    combined.start(sequence)
    combined.extend(sequence, 0)
    assert combined.propose([(sequence, 4)])[0].proposer == "table"
