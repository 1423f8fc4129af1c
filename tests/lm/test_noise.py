"""Philox against the published known answers; uniforms, noise and keys."""

from __future__ import annotations

import numpy as np
import pytest

from tandem.lm import noise
from tandem.lm.noise import Purpose

# Known answers of Random123 1.x (kat_vectors), philox4x32 with 10 rounds: counter, key, output.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "output"), KNOWN)
def test_philox_known_answers(counter: tuple[int, ...], key: tuple[int, ...], output: tuple[int, ...]) -> None:
    arrays = tuple(np.asarray([word], dtype=np.uint64) for word in counter)
    keys = tuple(np.asarray([word], dtype=np.uint64) for word in key)
    found = noise.philox4x32(arrays, keys)
    assert tuple(int(word[0]) for word in found) == output


def test_words_key_and_counter_order() -> None:
    counter, key, output = KNOWN[2]
    # The last counter word is a purpose, so the known answer is reached through philox4x32; here the layout is pinned.
    seed = key[0] | key[1] << 32
    expected = noise.philox4x32(
        tuple(np.asarray([w], dtype=np.uint64) for w in (*counter[:3], Purpose.DRAFT)),
        tuple(np.asarray([w], dtype=np.uint64) for w in key),
    )[0]
    assert noise.words(seed, counter[0], counter[1], counter[2], Purpose.DRAFT) == expected[0]
    assert output


def test_uniforms_never_reach_zero_or_one() -> None:
    edges = noise.uniforms(np.asarray([0, 0xFFFFFFFF, 511, 512], dtype=np.uint32))
    assert edges[0] == np.float32(2.0**-24) and edges[1] == np.float32(1 - 2.0**-24)
    assert edges[2] == edges[0] and edges[3] == np.float32(1.5 * 2.0**-23)
    gumbel = -np.log(-np.log(edges.astype(np.float64)))
    assert np.isfinite(gumbel).all() and gumbel.max() <= noise.GUMBEL_MAX


def test_noise_depends_on_each_part_of_the_key() -> None:
    base = noise.gumbel(7, 3, 11, 0)
    others = [
        noise.gumbel(8, 3, 11, 0),
        noise.gumbel(7 + (1 << 32), 3, 11, 0),
        noise.gumbel(7, 4, 11, 0),
        noise.gumbel(7, 3, 12, 0),
        noise.gumbel(7, 3, 11, 1),
        noise.gumbel(7, 3, 11, 0, Purpose.ACCEPT),
    ]
    assert len({float(value) for value in (base, *others)}) == 7


def test_noise_of_an_id_does_not_depend_on_its_neighbours() -> None:
    whole = noise.gumbel(5, 2, np.arange(1000), 0)
    some = noise.gumbel(5, 2, np.asarray([999, 3, 500]), 0)
    assert np.array_equal(some, whole[[999, 3, 500]])


def test_gumbel_moments() -> None:
    values = noise.gumbel(1, np.arange(200_000), 0, 0).astype(np.float64)
    assert abs(values.mean() - np.euler_gamma) < 0.01
    assert abs(values.var() - np.pi**2 / 6) < 0.02
