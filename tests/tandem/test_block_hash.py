"""The block hash is a contract between engine and router: it must not change by accident."""

from __future__ import annotations

import hashlib
import json
import struct
from pathlib import Path

import numpy as np

import tandem
from tandem.block_hash import ROOT, SCHEME, hash_block, hash_chain

VECTORS = Path(tandem.__file__).parent.parent / "protos/tandem/engine/v1/block_hash_vectors.json"


def test_vectors() -> None:
    data = json.loads(VECTORS.read_text())
    assert data["scheme"] == SCHEME
    for vector in data["vectors"]:
        salt = bytes.fromhex(vector["salt_hex"])
        hashes = hash_chain(vector["token_ids"], vector["block_size"], salt)
        assert [h.hex() for h in hashes] == vector["hashes_hex"]


def test_against_the_written_definition() -> None:
    first = hashlib.blake2b(bytes(16) + struct.pack("<I", 1) + b"s" + struct.pack("<II", 1, 2), digest_size=16).digest()
    second = hashlib.blake2b(first + struct.pack("<I", 1) + b"s" + struct.pack("<II", 3, 4), digest_size=16).digest()
    assert hash_chain([1, 2, 3, 4, 5], 2, b"s") == [first, second]
    assert hash_block(hash_block(ROOT, b"s", [1, 2]), b"s", np.array([3, 4])) == second


def test_salt_parent_and_content_all_matter() -> None:
    base = hash_chain([1, 2, 3, 4], 2)
    assert hash_chain([1, 2, 3, 4], 2, b"x")[0] != base[0]
    assert hash_chain([9, 2, 3, 4], 2)[1] != base[1]
    assert hash_chain([1], 2) == []
