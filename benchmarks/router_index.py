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

from router.index import PrefixIndex, match_depths
from tandem.block_hash import hash_chain


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
    """Applications per second of single-block stored and removed events, half each."""
    keys = [rng.randbytes(16) for _ in range(count // 2)]
    began = time.perf_counter()
    for number, key in enumerate(keys):
        index.stored(slots[number % len(slots)], (key,))
    for number, key in enumerate(keys):
        index.removed(slots[number % len(slots)], (key,))
    return 2 * len(keys) / (time.perf_counter() - began)


def lookups(index: PrefixIndex, slots: list[int], tokens: int, block: int, repeat: int) -> tuple[list[float], float]:
    """Seconds of look-ups of a prompt that all engines hold to different depths, and of hashing it once."""
    rng = random.Random(5)
    ids = [rng.randrange(50_000) for _ in range(tokens)]
    began = time.perf_counter()
    chain = hash_chain(ids, block)
    hashing = time.perf_counter() - began
    for number, slot in enumerate(slots):
        index.stored(slot, chain[: len(chain) * (number + 1) // len(slots)])
    mask = sum(1 << slot for slot in slots)
    times = []
    for _ in range(repeat):
        began = time.perf_counter()
        depths = match_depths(chain, mask, index)
        times.append(time.perf_counter() - began)
    assert len(depths) == len(slots)
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
    print(f"memory: {held / len(index) / 1e0:.0f} bytes per block, {held / len(index):.0f} MB per million")
    times, hashing = lookups(index, slots, options.tokens, options.block_size, options.repeat)
    print(
        f"look-up of {options.tokens} tokens over {options.engines} engines: p50 {1e3 * percentile(times, 0.5):.3f} ms, "
        f"p99 {1e3 * percentile(times, 0.99):.3f} ms; hashing them once {1e3 * hashing:.2f} ms"
    )
    print(f"events: {events(index, slots, 200_000, rng):,.0f} applications/s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
