"""The native decoder against fp64, and bitwise independence of how work is cut into steps."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kernels import cpu
from kernels.cpu import sampling
from kernels.cpu.decoder import Decoder
from kernels.cpu.tiles import Kind, pack_float
from tests.kernels.cpu.helpers import new_cache, reference_logits, run_step, tiny_model

SHAPES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"biases": True, "heads": 6, "kv_heads": 2},
    "qwen3": {"qk_norm": True, "head_dim": 48, "heads": 2, "kv_heads": 1},
    "mha": {"heads": 2, "kv_heads": 2, "rotary_dim": 16},
    "mqa": {"heads": 14, "kv_heads": 1, "head_dim": 16, "hidden": 96},
    "gemma": {
        "sandwich": True, "qk_norm": True, "window": 24, "attn_softcap": 5.0, "logit_softcap": 8.0,
        "activation": "gelu_tanh", "embed_scale": 8.0, "attn_scale": 0.2,
    },
    "granite": {"residual_scale": 0.22, "logit_scale": 0.125, "embed_scale": 12.0, "attn_scale": 0.0156},
}  # fmt: skip


def prompt(rng: np.random.Generator, length: int, vocab: int = 101) -> list[int]:
    return [int(token) for token in rng.integers(0, vocab, length)]


@pytest.mark.parametrize("shape", SHAPES)
def test_fp32_logits_equal_fp64(isa: str, shape: str) -> None:
    rng = np.random.default_rng(7)
    model = tiny_model(rng, **SHAPES[shape])
    decoder = Decoder(model, new_cache(model, 12, "float32"), 128, 128, 2048)
    tokens = prompt(rng, 77)
    blocks = [3, 1, 7, 0, 9]
    logits = run_step(decoder, [(tokens, 0, blocks)])
    assert np.abs(logits - reference_logits(model, tokens)).max() < 2e-4


@pytest.mark.parametrize(("kv_dtype", "bound"), [("bfloat16", 0.1), ("int8", 0.25)])
def test_narrow_kv_is_close(isa: str, kv_dtype: str, bound: float) -> None:
    rng = np.random.default_rng(8)
    model = tiny_model(rng)
    decoder = Decoder(model, new_cache(model, 12, kv_dtype), 128, 128, 2048)
    tokens = prompt(rng, 70)
    logits = run_step(decoder, [(tokens, 0, [5, 4, 3, 2, 1])])
    assert np.abs(logits - reference_logits(model, tokens)).max() < bound


@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("kind", list(Kind), ids=lambda kind: kind.name)
def test_bits_do_not_depend_on_batch_chunks_or_cache(isa: str, kind: Kind, kv_dtype: str) -> None:
    """Alone = in a batch = chunked = with a cached prefix = row by row = under verification, past one KV split."""
    rng = np.random.default_rng(9)
    model = tiny_model(rng, kind, layers=2, window=100 if kind is Kind.Q4_1 else 0)
    length = 150 if isa == "generic" else 590
    tokens, others = prompt(rng, length), [prompt(rng, size) for size in (33, 5)]
    decoder = Decoder(model, new_cache(model, 100, kv_dtype), 800, 800, 2048)
    own, second = list(range(40)), list(range(40, 80))
    whole = run_step(decoder, [(tokens, 0, own)])
    assert np.isfinite(whole).all()
    again, at = [], 0
    for size in (37, 1, 16, 3, 1, 90, length):
        size = min(size, length - at)
        if size:
            step = [(others[0], 0, [81, 82, 83]), (tokens[at : at + size], at, second), (others[1], 0, [84])]
            again.append(run_step(decoder, step)[33 : 33 + size])
            at += size
    assert np.array_equal(np.concatenate(again), whole)
    for size in (1, 2, 4, 7, 12):
        # The cached prefix of the second table, the last tokens as decode or as a drafted run.
        assert np.array_equal(run_step(decoder, [(tokens[-size:], length - size, second)]), whole[-size:])
    batch = [(tokens[-1:], length - 1, second), (others[1], 0, [84]), (tokens[-3:], length - 3, own)]
    assert np.array_equal(run_step(decoder, batch)[[0, 6, 7, 8]], whole[[-1, -3, -2, -1]])


def test_bits_do_not_depend_on_threads(isa: str) -> None:
    rng = np.random.default_rng(10)
    model = tiny_model(rng, Kind.Q4_1)
    tokens = prompt(rng, 100)
    found = []
    before = int(cpu.library().td_threads())
    try:
        for threads in (1, 2, 3):
            cpu.set_threads(threads)
            decoder = Decoder(model, new_cache(model, 12, "bfloat16"), 128, 128, 2048)
            found.append(run_step(decoder, [(tokens, 0, list(range(7)))]))
            decoder.close()
    finally:
        cpu.set_threads(before)
    assert np.array_equal(found[0], found[1])
    assert np.array_equal(found[0], found[2])


def test_more_threads_than_cores_change_no_bit_and_finish(isa: str) -> None:
    """Threads that come late to a phase, or to none of a step: many steps, with threads waiting for a core."""
    rng = np.random.default_rng(16)
    model = tiny_model(rng, Kind.Q4_1, vocab=700)
    tokens = prompt(rng, 40, 700)
    before = int(cpu.library().td_threads())
    try:
        cpu.set_threads(1)
        decoder = Decoder(model, new_cache(model, 12, "bfloat16"), 64, 64, 2048)
        whole = run_step(decoder, [(tokens, 0, [0, 1, 2])])
        decoder.close()
        cpu.set_threads(4 * len(os.sched_getaffinity(0)))
        decoder = Decoder(model, new_cache(model, 12, "bfloat16"), 64, 64, 2048)
        for _ in range(10 if isa == "generic" else 60):
            assert np.array_equal(run_step(decoder, [(tokens, 0, [0, 1, 2])]), whole)
            assert np.array_equal(run_step(decoder, [(tokens, 0, [0, 1, 2])], [0, 7, 39]), whole[[0, 7, 39]])
            assert np.array_equal(run_step(decoder, [(tokens[:1], 0, [5])]), whole[:1])
        decoder.close()
    finally:
        cpu.set_threads(before)


def test_only_wanted_rows_and_hidden_states(isa: str) -> None:
    rng = np.random.default_rng(11)
    model = tiny_model(rng, Kind.Q8_0)
    decoder = Decoder(model, new_cache(model, 12, "float32"), 64, 64, 2048)
    tokens = prompt(rng, 40)
    whole = run_step(decoder, [(tokens, 0, [0, 1, 2])])
    some = run_step(decoder, [(tokens, 0, [4, 5, 6])], [0, 7, 39])
    assert np.array_equal(some, whole[[0, 7, 39]])
    hidden = np.full((2, 64), np.nan, np.float32)
    decoder.forward(
        np.asarray(tokens, np.int32), np.asarray([0, 40], np.int32), np.asarray([0], np.int32),
        np.asarray([[4, 5, 6]], np.int32), np.asarray([7, 39], np.int32), None, hidden,
    )  # fmt: skip
    logits = np.full((2, 101), np.nan, np.float32)
    decoder.logits(hidden, logits)
    assert np.array_equal(logits, whole[[7, 39]])
    run_step(decoder, [(tokens, 0, [7, 8, 9])], [])


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("softcap", [0.0, 8.0])
def test_the_greatest_logit_is_the_samplers(isa: str, softcap: float, threads: int) -> None:
    """Ties over lanes, tiles and threads, rows without an allowed id, infinities and NaN: as the sampler decides."""
    rng = np.random.default_rng(14)
    before = int(cpu.library().td_threads())
    cpu.set_threads(threads)
    try:
        never = dict.fromkeys(range(101), -np.inf)
        for bias in ({}, {0: -np.inf, 1: -np.inf}, {17: np.inf}, {99: np.nan, 3: np.inf}, never):
            model = tiny_model(rng, vocab=101, logit_softcap=softcap)
            # Seven different rows, so that each logit occurs about fifteen times.
            rows = rng.standard_normal((7, model.hidden)).astype(np.float32)
            added = np.zeros(101, np.float32)
            added[list(bias)] = list(bias.values())
            model = replace(model, head=pack_float(rows[np.arange(101) % 7].copy(), Kind.F32), head_bias=added)
            decoder = Decoder(model, new_cache(model, 12, "float32"), 64, 64, 2048)
            logits, best = np.empty((40, 101), np.float32), np.empty(40, np.int32)
            decoder.forward(
                np.asarray(prompt(rng, 40), np.int32), np.asarray([0, 40], np.int32), np.asarray([0], np.int32),
                np.asarray([[4, 5, 6]], np.int32), np.arange(40, dtype=np.int32), logits, best=best,
            )  # fmt: skip
            assert best.tolist() == sampling.sample(logits, np.zeros(40, sampling.SAMPLE)).tolist()
            if not bias:
                assert len(set(best.tolist())) > 1 and best.max() < 7
            decoder.close()
    finally:
        cpu.set_threads(before)


@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("shared", [20, 21])
def test_copied_blocks_continue_alike(isa: str, kv_dtype: str, shared: int) -> None:
    """Both copies go on from an even and an odd slot, each with its own tokens, and disturb no other's."""
    rng = np.random.default_rng(12)
    model = tiny_model(rng)
    cache = new_cache(model, 12, kv_dtype)
    decoder = Decoder(model, cache, 64, 64, 2048)
    tokens = prompt(rng, shared + 3)
    run_step(decoder, [(tokens[:shared], 0, [0, 1])])
    cache.copy_blocks([(1, 6)])
    own = [run_step(decoder, [([token], shared + i, [0, 1])]) for i, token in enumerate(tokens[shared:])]
    run_step(decoder, [(prompt(rng, 1), shared, [0, 6])])
    copied = [run_step(decoder, [([token], shared + i, [0, 6])]) for i, token in enumerate(tokens[shared:])]
    assert np.array_equal(copied, own)
    assert np.array_equal(run_step(decoder, [(tokens[-1:], shared + 2, [0, 1])]), own[-1])


def test_neighbouring_slots_do_not_share_values(isa: str) -> None:
    """bf16 KV interleaves neighbouring positions: one more token, or what an earlier owner left, changes no other."""
    rng = np.random.default_rng(14)
    model = tiny_model(rng, layers=1)
    tokens, found = prompt(rng, 40), []
    for poison in (0x7FC0, 0x7F80, 0x4000):
        cache = new_cache(model, 4, "bfloat16")
        for array in (*cache.keys, *cache.values):
            array[:] = poison
        decoder = Decoder(model, cache, 64, 64, 2048)
        found.append(np.concatenate([run_step(decoder, [([t], i, [2, 0, 1])]) for i, t in enumerate(tokens)]))
        assert np.isfinite(found[-1]).all()
    assert np.array_equal(found[0], found[1])
    assert np.array_equal(found[0], found[2])


def test_steps_that_contradict_themselves_are_refused() -> None:
    if not cpu.available():
        pytest.skip(cpu.reason())
    model = tiny_model(np.random.default_rng(13), positions=64)
    decoder = Decoder(model, new_cache(model, 4, "float32"), 8, 8, 64)
    with pytest.raises(ValueError, match="too many rows"):
        run_step(decoder, [(list(range(9)), 0, [0])])
    with pytest.raises(ValueError, match="inconsistent"):
        run_step(decoder, [([101], 0, [0])])
    with pytest.raises(ValueError, match="inconsistent"):
        run_step(decoder, [([1], 0, [4])])
    with pytest.raises(ValueError, match="inconsistent"):
        run_step(decoder, [([1], 16, [0])])
    with pytest.raises(ValueError, match="inconsistent"):
        run_step(decoder, [([1], 64, [0, 1, 2, 3, 0])])
    with pytest.raises(ValueError, match="inconsistent"):
        run_step(decoder, [([1, 2], 0, [0])], [1, 0])
    with pytest.raises(ValueError, match="multiple of 16"):
        new_cache(model, 4, "float32", block_size=8)
    with pytest.raises(ValueError, match="kv_dtype"):
        new_cache(model, 4, "float16")
