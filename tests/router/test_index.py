"""The prefix index, its feed of numbered events, and predictions."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.index import PredictedBlocks, PrefixIndex, match_depths, split_hashes
from router.kv_feed import KvFeed, Verdict
from tandem.block_hash import SCHEME, hash_chain
from tandem.engine.v1 import engine_pb2 as pb


def key(number: int) -> bytes:
    return number.to_bytes(16, "little")


def keys(*numbers: int) -> list[bytes]:
    return [key(number) for number in numbers]


def test_longest_prefix_per_engine() -> None:
    index = PrefixIndex(1000)
    a, b, c = index.new_slot(), index.new_slot(), index.new_slot()
    index.stored(a, keys(1, 2, 3))
    index.stored(b, keys(1))
    # c has a hole: what lies behind it is of no use.
    index.stored(c, keys(1, 3))
    everyone = 1 << a | 1 << b | 1 << c
    assert match_depths(keys(1, 2, 3, 4), everyone, index) == {a: 3, b: 1, c: 1}
    assert match_depths(keys(1, 2, 3, 4), 1 << b, index) == {b: 1}
    assert match_depths(keys(9), everyone, index) == {}
    assert match_depths([], everyone, index) == {}
    index.removed(a, keys(2))
    assert match_depths(keys(1, 2, 3), everyone, index) == {a: 1, b: 1, c: 1}


def test_cap_is_hard_and_counted() -> None:
    index = PrefixIndex(5)
    a, b = index.new_slot(), index.new_slot()
    index.stored(a, keys(1, 2, 3, 4))
    index.stored(b, keys(1, 2, 3))
    assert index.pairs == 5
    assert index.refused == 2
    assert index.count(a) + index.count(b) == 5
    index.removed(a, keys(1, 2))
    index.stored(b, keys(2, 3))
    assert index.pairs == 5


def test_retired_slots_are_swept_and_reused() -> None:
    index = PrefixIndex(1000)
    a, b = index.new_slot(), index.new_slot()
    index.stored(a, keys(*range(50)))
    index.stored(b, keys(*range(25)))
    index.retire(a)
    assert index.new_slot() not in (a, b), "a retired bit is not used before it is swept"
    while index.sweep(7):
        pass
    assert index.pairs == 25
    assert len(index) == 25
    assert index.new_slot() == a
    assert match_depths(keys(0), 1 << a, index) == {}


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 12), st.sampled_from(["store", "remove", "clear"]))))
def test_index_equals_a_model_of_sets(steps: list[tuple[int, int, str]]) -> None:
    index = PrefixIndex(10_000)
    slots = [index.new_slot() for _ in range(4)]
    model: list[set[bytes]] = [set() for _ in range(4)]
    for engine, number, what in steps:
        if what == "store":
            index.stored(slots[engine], [key(number)])
            model[engine].add(key(number))
        elif what == "remove":
            index.removed(slots[engine], [key(number)])
            model[engine].discard(key(number))
        else:
            index.retire(slots[engine])
            slots[engine] = index.new_slot()
            model[engine].clear()
            index.sweep(3)
    chain = keys(*range(13))
    found = match_depths(chain, sum(1 << slot for slot in slots), index)
    for slot, blocks in zip(slots, model, strict=True):
        depth = 0
        while depth < 13 and chain[depth] in blocks:
            depth += 1
        assert found.get(slot, 0) == depth
        assert index.count(slot) == len(blocks)
    while index.sweep():
        pass
    assert index.pairs == sum(map(len, model))


def test_predictions_expire_and_keep_to_the_size() -> None:
    predicted = PredictedBlocks()
    predicted.add_engine(0)
    predicted.touch(0, keys(1, 2, 3), now=0.0, capacity=4)
    predicted.touch(0, keys(1, 5, 6), now=1.0, capacity=4)
    assert predicted.count(0) == 4
    assert match_depths(keys(1, 5, 6), 1, predicted) == {0: 3}
    assert match_depths(keys(1, 2, 3), 1, predicted) == {0: 2}, "the end of the older chain went first"
    predicted.expire(0, before=0.5)
    assert match_depths(keys(1, 2), 1, predicted) == {0: 1}
    predicted.remove_engine(0)
    assert match_depths(keys(1), 1, predicted) == {}


def test_malformed_hashes_are_refused() -> None:
    with pytest.raises(ValueError, match="17 bytes"):
        split_hashes(bytes(17))


# -- numbered events


def snapshot(*numbers: int, epoch: int = 1, number: int = 0, complete: bool = True) -> pb.SubscribeKvEventsResponse:
    return pb.SubscribeKvEventsResponse(
        epoch=epoch,
        number=number,
        snapshot=pb.KvSnapshot(scheme=SCHEME, block_size=16, hashes=b"".join(keys(*numbers)), complete=complete),
    )


def stored(number: int, *numbers: int, epoch: int = 1) -> pb.SubscribeKvEventsResponse:
    events = [pb.KvEvent(stored=pb.KvStored(hashes=key(block))) for block in numbers]
    return pb.SubscribeKvEventsResponse(epoch=epoch, number=number, events=events)


def removed(number: int, *numbers: int) -> pb.SubscribeKvEventsResponse:
    return pb.SubscribeKvEventsResponse(
        epoch=1, number=number, events=[pb.KvEvent(removed=pb.KvRemoved(hashes=b"".join(keys(*numbers))))]
    )


def blocks(index: PrefixIndex, feed: KvFeed, upto: int = 20) -> set[int]:
    return {number for number in range(upto) if index.get(key(number)) >> feed.slot & 1}


def test_snapshot_then_events() -> None:
    index = PrefixIndex(1000)
    feed = KvFeed(index)
    assert feed.resume_point() == (0, 0)
    assert feed.apply(snapshot(1, 2, number=7, complete=False)) is Verdict.APPLIED
    assert not feed.live
    assert feed.apply(snapshot(3, number=7)) is Verdict.APPLIED
    assert feed.live and blocks(index, feed) == {1, 2, 3}
    assert feed.apply(stored(8, 4)) is Verdict.APPLIED
    assert feed.apply(removed(9, 1, 2)) is Verdict.APPLIED
    assert blocks(index, feed) == {3, 4}
    assert feed.resume_point() == (1, 9)


def test_duplicates_and_overlaps_are_applied_once() -> None:
    index = PrefixIndex(1000)
    feed = KvFeed(index)
    feed.apply(snapshot(number=0))
    feed.apply(stored(2, 1, 2))
    feed.apply(removed(3, 1))
    assert feed.apply(stored(2, 1, 2)) is Verdict.IGNORED
    assert blocks(index, feed) == {2}
    # Events 3 to 5 again: 3 is old, 4 and 5 are new.
    late = stored(5, 1, 4, 5)
    assert feed.apply(late) is Verdict.APPLIED
    assert blocks(index, feed) == {2, 4, 5}


def test_gap_and_reorder_ask_for_a_snapshot() -> None:
    index = PrefixIndex(1000)
    feed = KvFeed(index)
    feed.apply(snapshot(1, number=1))
    assert feed.apply(stored(3, 3)) is Verdict.RESUBSCRIBE
    assert blocks(index, feed) == set(), "after a gap nothing is known for sure"
    assert feed.resume_point() == (0, 0)
    assert feed.apply(stored(2, 2)) is Verdict.RESUBSCRIBE
    feed.apply(snapshot(1, 2, 3, number=3))
    assert blocks(index, feed) == {1, 2, 3}


def test_old_epochs_are_void() -> None:
    index = PrefixIndex(1000)
    feed = KvFeed(index)
    feed.apply(snapshot(1, epoch=5, number=1))
    assert feed.apply(stored(2, 9, epoch=4), current_epoch=5) is Verdict.IGNORED
    assert feed.apply(stored(2, 9, epoch=6)) is Verdict.RESUBSCRIBE
    assert blocks(index, feed) == {1}


def test_clear_and_interrupted_snapshot() -> None:
    index = PrefixIndex(1000)
    feed = KvFeed(index)
    feed.apply(snapshot(1, 2, number=1))
    feed.apply(snapshot(7, number=9, complete=False))
    feed.interrupted()
    assert blocks(index, feed) == {1, 2}, "half a snapshot replaces nothing"
    clear = pb.SubscribeKvEventsResponse(epoch=1, number=2, events=[pb.KvEvent(cleared=pb.KvCleared())])
    assert feed.apply(clear) is Verdict.APPLIED
    assert blocks(index, feed) == set()


def test_unknown_scheme_is_said() -> None:
    feed = KvFeed(PrefixIndex(10))
    message = snapshot(1)
    message.snapshot.scheme = "md5"
    assert feed.apply(message) is Verdict.IGNORED
    assert "md5" in feed.scheme_error
    assert not feed.live


def test_any_interleaving_ends_equal_to_the_engine() -> None:
    """Random engine, random losses: with the verdicts obeyed the index ends as the engine's cache."""
    rng = random.Random(3)
    for _ in range(30):
        index = PrefixIndex(10_000)
        feed = KvFeed(index)
        cache: set[int] = set()
        number = 0
        feed.apply(snapshot(number=0))
        for _ in range(100):
            block = rng.randrange(20)
            number += 1
            if block in cache and rng.random() < 0.5:
                cache.discard(block)
                message = removed(number, block)
            else:
                cache.add(block)
                message = stored(number, block)
            if rng.random() < 0.05:
                continue
            if feed.apply(message) is Verdict.RESUBSCRIBE:
                feed.apply(snapshot(*cache, number=number))
        number += 1
        if feed.apply(stored(number)) is Verdict.RESUBSCRIBE or feed.number < number - 1:
            feed.apply(snapshot(*cache, number=number))
        assert blocks(index, feed) == cache


def test_salts_do_not_share() -> None:
    ids = list(range(64))
    assert not set(hash_chain(ids, 16, b"a")) & set(hash_chain(ids, 16, b"b"))
