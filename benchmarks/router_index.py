"""Measures the router's prefix index: look-ups, event applications, memory.

python -m benchmarks.router_index
python -m benchmarks.router_index --engines 64 --blocks 1000000
"""

from __future__ import annotations

import argparse
import random
import resource
import sys
import time

import numpy as np

from router.index import PrefixIndex, match_depths
from router.kv_feed import KvFeed
from tandem.block_hash import SCHEME, hash_chain
from tandem.engine.v1 import engine_pb2 as pb


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def resident_bytes() -> int:
    """Peak resident set of this process."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def fill(index: PrefixIndex, slots: list[int], blocks: int, rng: random.Random) -> None:
    """Spreads random blocks over all engines."""
    for number in range(0, blocks, 64):
        index.stored(slots[number // 64 % len(slots)], [rng.randbytes(16) for _ in range(64)])


def events(index: PrefixIndex, slots: list[int], count: int, rng: random.Random) -> float:
    """Applications per second and core of single-block stored and removed events, half each, to the index alone."""
    keys = [rng.randbytes(16) for _ in range(count // 2)]
    began = time.thread_time()
    for number, key in enumerate(keys):
        index.stored(slots[number % len(slots)], (key,))
    for number, key in enumerate(keys):
        index.removed(slots[number % len(slots)], (key,))
    return 2 * len(keys) / (time.thread_time() - began)


def feed_events(index: PrefixIndex, count: int, per_message: int, rng: random.Random) -> float:
    """The same through a feed: serialized messages of `per_message` events are parsed, checked and applied."""
    feed = KvFeed(index)
    feed.apply(pb.SubscribeKvEventsResponse(epoch=1, snapshot=pb.KvSnapshot(scheme=SCHEME, complete=True)))
    keys = [rng.randbytes(16) for _ in range(count // 2)]
    made = [pb.KvEvent(stored=pb.KvStored(hashes=key)) for key in keys]
    made += [pb.KvEvent(removed=pb.KvRemoved(hashes=key)) for key in keys]
    messages = []
    for start in range(0, len(made), per_message):
        part = made[start : start + per_message]
        message = pb.SubscribeKvEventsResponse(epoch=1, number=start + len(part), events=part)
        messages.append(message.SerializeToString())
    began = time.thread_time()
    for data in messages:
        feed.apply(pb.SubscribeKvEventsResponse.FromString(data))
    return len(made) / (time.thread_time() - began)


def lookups(
    index: PrefixIndex, slots: list[int], tokens: int, block: int, repeat: int
) -> tuple[list[float], list[float]]:
    """Look-ups of a prompt that the engines hold to different depths: seconds of CPU of each, and of its hashing."""
    rng = random.Random(5)
    ids = [rng.randrange(50_000) for _ in range(tokens)]
    chain = hash_chain(ids, block)
    for number, slot in enumerate(slots):
        index.stored(slot, chain[: len(chain) * (number + 1) // len(slots)])
    mask = sum(1 << slot for slot in slots)
    times, hashing = [], []
    array = np.asarray(ids, dtype="<u4")
    for _ in range(repeat):
        began = time.thread_time()
        depths = match_depths(chain, mask, index)
        times.append(time.thread_time() - began)
        assert len(depths) == len(slots)
    for _ in range(max(1, repeat // 10)):
        began = time.thread_time()
        hash_chain(array, block)
        hashing.append(time.thread_time() - began)
    return times, hashing


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Measures the router's prefix index.")
    parser.add_argument("--engines", type=int, default=64)
    parser.add_argument("--blocks", type=int, default=100_000, help="blocks in the index before measuring")
    parser.add_argument("--tokens", type=int, default=32_768, help="prompt length of the look-ups")
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--repeat", type=int, default=300)
    options = parser.parse_args(arguments)
    rng = random.Random(1)
    index = PrefixIndex(max_pairs=2 * options.blocks + options.engines * options.tokens)
    slots = [index.new_slot() for _ in range(options.engines)]
    before = resident_bytes()
    fill(index, slots, options.blocks, rng)
    held = resident_bytes() - before
    print(f"memory: {held / len(index):.0f} bytes per block, {held / len(index):.0f} MB per million blocks")
    times, hashing = lookups(index, slots, options.tokens, options.block_size, options.repeat)
    print(
        f"look-up of {options.tokens} tokens over {options.engines} engines, CPU time: "
        f"p50 {1e3 * percentile(times, 0.5):.3f} ms, p99 {1e3 * percentile(times, 0.99):.3f} ms; "
        f"hashing the prompt p50 {1e3 * percentile(hashing, 0.5):.2f} ms"
    )
    print(f"events, index alone: {events(index, slots, 200_000, rng):,.0f} applications per second of CPU")
    for per_message in (1, 16):
        rate = feed_events(index, 100_000, per_message, rng)
        print(f"events, parsed from messages of {per_message}: {rate:,.0f} applications per second of CPU")
    return 0


if __name__ == "__main__":
    sys.exit(main())
