"""The one hash of KV blocks, used by engines (prefix cache) and routers (prefix index).

hash(block) = BLAKE2b-128(parent hash or 16 zero bytes ‖ u32 length of salt ‖ salt ‖ token ids as little-endian u32).
Only full blocks are hashed. Vectors: protos/tandem/engine/v1/block_hash_vectors.json.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

import numpy as np

SCHEME = "tandem-blake2b128-v1"
DIGEST_BYTES = 16
ROOT = bytes(DIGEST_BYTES)


def hash_block(parent: bytes, salt: bytes, token_ids: Sequence[int] | np.ndarray) -> bytes:
    """Hash of one full block after `parent` (ROOT for the first block of a chain). Returns 16 bytes."""
    state = hashlib.blake2b(parent, digest_size=DIGEST_BYTES)
    state.update(struct.pack("<I", len(salt)) + salt)
    state.update(np.asarray(token_ids, dtype="<u4").tobytes())
    return state.digest()


def hash_chain(token_ids: Sequence[int] | np.ndarray, block_size: int, salt: bytes = b"") -> list[bytes]:
    """Hashes of all full blocks of a sequence, in order. A partial last block has none."""
    data = np.asarray(token_ids, dtype="<u4").tobytes()
    step = 4 * block_size
    prefix = struct.pack("<I", len(salt)) + salt
    hashes: list[bytes] = []
    parent = ROOT
    for start in range(0, len(data) - step + 1, step):
        parent = hashlib.blake2b(parent + prefix + data[start : start + step], digest_size=DIGEST_BYTES).digest()
        hashes.append(parent)
    return hashes
