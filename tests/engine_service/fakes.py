"""Stand-ins for a model: its next token is a hash of its prefix, and its KV cache proves what was read and written."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Callable, Iterable

import numpy as np

from engine_service.requests import Choice
from engine_service.scheduler import Scheduler
from engine_service.speculation import Draft, NullSpeculation, SpecCandidate
from tandem.lm.block_pool import BlockPool
from tandem.lm.types import ModelSpec, SamplingParams, Sequence, Slice, SliceOutput, TokenScore
from tandem.tokenizer import Tokenizer, TokenizerBundle

EOS = 256
EOT = 257
BYTE_VOCAB = 258

NextToken = Callable[[list[int], SamplingParams, int], int]


def digest(parent: bytes, token: int) -> bytes:
    """What a KV slot holds: a hash of its token, all before it, and the salt under which they were computed."""
    return hashlib.blake2b(parent + token.to_bytes(4, "little"), digest_size=8).digest()


def hashed_next(vocab_size: int) -> NextToken:
    """Next token = hash of prefix; with temperature also of seed and choice."""

    def next_token(prefix: list[int], params: SamplingParams, choice: int) -> int:
        noise = b"" if params.greedy else f"{params.seed},{choice}".encode()
        state = hashlib.blake2b(np.asarray(prefix, dtype="<u4").tobytes() + noise, digest_size=4)
        return int.from_bytes(state.digest(), "little") % vocab_size

    return next_token


def scripted(text: str, end: int = EOS, prompt_len: int | None = None) -> NextToken:
    """Says the bytes of `text` after any prompt of `prompt_len` tokens (or all up to the last EOT), then `end`."""
    data = text.encode()

    def next_token(prefix: list[int], params: SamplingParams, choice: int) -> int:
        start = prompt_len if prompt_len is not None else len(prefix) - prefix[::-1].index(EOT)
        position = len(prefix) - start
        return data[position] if position < len(data) else end

    return next_token


class KvError(AssertionError):
    """A slot was read that does not hold what the reader needs."""


class FakeRunner:
    """Runner whose every read of KV is checked against what must be there."""

    def __init__(
        self,
        num_blocks: int = 64,
        block_size: int = 4,
        vocab_size: int = BYTE_VOCAB,
        max_model_len: int = 128,
        next_token: NextToken | None = None,
    ) -> None:
        self.spec = ModelSpec(
            architecture="fake",
            vocab_size=vocab_size,
            hidden_size=8,
            max_model_len=max_model_len,
            block_size=block_size,
            num_blocks=num_blocks,
            block_bytes=64,
            weight_bytes=0,
            model_digest="fake",
            numerics_id="fake-1",
            batch_invariant=True,
            kernel_path="fake",
            threads=1,
        )
        self.next_token = next_token or hashed_next(vocab_size)
        self.kv: list[list[bytes | None]] = [[None] * block_size for _ in range(num_blocks)]
        # By sequence id, where a test tells them: then KV that was written under another salt is wrong content.
        self.salts: dict[int, bytes] = {}
        self.slices: list[Slice] = []
        self.steps = 0
        self.max_tokens_seen = 0
        self.max_seqs_seen = 0
        self.forgotten: list[int] = []
        # Cleared: the next step waits until it is set again.
        self.gate = threading.Event()
        self.gate.set()
        self.step_began = threading.Event()
        # The step of this number closes the gate before itself: a test that came later could miss the whole request.
        self.hold_at: int | None = None
        # What a step costs; drafts pay only where steps cost something, and the control of drafts knows it.
        self.step_seconds = 0.0
        self.fail_next: Exception | None = None
        self.closed = False

    def execute(self, slices: list[Slice]) -> list[SliceOutput]:
        if self.steps == self.hold_at:
            self.gate.clear()
        self.step_began.set()
        if not self.gate.wait(30):
            raise TimeoutError("the test never opened the gate")
        if self.fail_next is not None:
            error, self.fail_next = self.fail_next, None
            raise error
        time.sleep(self.step_seconds)
        self.steps += 1
        self.slices = slices
        self.max_tokens_seen = max(self.max_tokens_seen, sum(s.count + len(s.drafts) for s in slices))
        self.max_seqs_seen = max(self.max_seqs_seen, len(slices))
        for piece in slices:
            self._write(piece)
        # After all writes, so that a slot written by two sequences shows.
        for piece in slices:
            self._check(piece)
        return [self._sample(piece) for piece in slices]

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        assert len({target for _source, target in pairs}) == len(pairs), "two copies into one block"
        for source, target in pairs:
            self.kv[target] = list(self.kv[source])

    def embed(self, prompts: list[list[int]], pooling: str, normalize: bool) -> np.ndarray:
        vectors = np.array([[float(sum(p)), float(len(p)), *([0.0] * 6)] for p in prompts], dtype=np.float32)
        return vectors / np.linalg.norm(vectors, axis=1, keepdims=True) if normalize else vectors

    def forget(self, sequence_id: int) -> None:
        self.forgotten.append(sequence_id)

    def close(self) -> None:
        self.closed = True

    def expected(self, tokens: Iterable[int], salt: bytes = b"") -> list[bytes]:
        chain, parent = [], salt
        for token in tokens:
            parent = digest(parent, token)
            chain.append(parent)
        return chain

    def slot(self, table: list[int], position: int) -> tuple[int, int]:
        return table[position // self.spec.block_size], position % self.spec.block_size

    def _write(self, piece: Slice) -> None:
        ids = piece.sequence.token_ids
        assert piece.count >= 1 and piece.start + piece.count <= len(ids)
        assert not piece.drafts or piece.start + piece.count == len(ids)
        tokens = [*ids[: piece.start + piece.count], *piece.drafts]
        chain = self.expected(tokens, self.salts.get(piece.sequence.id, b""))
        for position in range(piece.start, len(tokens)):
            block, offset = self.slot(piece.block_table, position)
            self.kv[block][offset] = chain[position]

    def _check(self, piece: Slice) -> None:
        tokens = [*piece.sequence.token_ids[: piece.start + piece.count], *piece.drafts]
        salt = self.salts.get(piece.sequence.id, b"")
        for position, wanted in enumerate(self.expected(tokens, salt)):
            block, offset = self.slot(piece.block_table, position)
            if self.kv[block][offset] != wanted:
                raise KvError(f"sequence {piece.sequence.id} reads position {position} in block {block}: wrong content")

    def _score(self, prefix: list[int], token: int, top: int) -> TokenScore:
        value = -(int.from_bytes(digest(b"score", sum(prefix) % 65536), "little") % 1000) / 100
        ids = tuple(range(top))
        return TokenScore(token, value, 1 + token % 7, ids, tuple(value - i for i in ids))

    def _allowed(self, wanted: int, mask: np.ndarray | None, row: int) -> int | None:
        """The wanted token, or the next allowed one above it (cyclic)."""
        if mask is None:
            return wanted
        bits = np.unpackbits(mask[row].view(np.uint8), bitorder="little")[: self.spec.vocab_size]
        allowed = np.flatnonzero(bits)
        if not len(allowed):
            return None
        above = allowed[allowed >= wanted]
        return int(above[0] if len(above) else allowed[0])

    def _sample(self, piece: Slice) -> SliceOutput:
        out = SliceOutput()
        sequence, params = piece.sequence, piece.sequence.params
        if piece.score_prompt and params.prompt_logprobs is not None:
            last = min(piece.start + piece.count, sequence.prompt_len - 1)
            ids = sequence.token_ids
            out.prompt_scores = [
                self._score(ids[:position], ids[position], params.prompt_logprobs)
                for position in range(piece.start + 1, last + 1)
            ]
        if not piece.sample:
            return out
        out.scores = [] if params.logprobs is not None else None
        for row in range(1 + len(piece.drafts)):
            prefix = [*sequence.token_ids, *piece.drafts[:row]]
            token = self._allowed(self.next_token(prefix, params, sequence.choice), piece.mask, row)
            if token is None:
                out.error = "NO_ALLOWED_TOKEN"
                return out
            out.token_ids.append(token)
            if out.scores is not None and params.logprobs is not None:
                out.scores.append(self._score(prefix, token, params.logprobs))
            if row == len(piece.drafts) or token != piece.drafts[row]:
                break
            out.accepted += 1
        return out

    # For tests

    def poison(self, scheduler: Scheduler, pool: BlockPool) -> None:
        """Voids every slot that nobody may read again: free and not cached, rejected drafts, unused tails."""
        valid: set[tuple[int, int]] = set()
        for choice in scheduler.running:
            valid |= {self.slot(choice.blocks, position) for position in range(choice.num_computed)}
        for block, slots in enumerate(self.kv):
            if pool.is_registered(block):
                continue
            for offset in range(len(slots)):
                if (block, offset) not in valid:
                    slots[offset] = None

    def verify(self, choice: Choice) -> None:
        """A choice's computed KV is that of its own prefix, whoever wrote it."""
        chain = self.expected(choice.sequence.token_ids[: choice.num_computed], choice.request.salt)
        for position, wanted in enumerate(chain):
            block, offset = self.slot(choice.blocks, position)
            if self.kv[block][offset] != wanted:
                raise KvError(f"sequence {choice.sequence.id} holds wrong KV at {position}")


class FakeSpeculation(NullSpeculation):
    """Drafts that are right for a while: how long depends on a hash of the prefix."""

    def __init__(self, next_token: NextToken, vocab_size: int, most: int = 5) -> None:
        self.next_token = next_token
        self.vocab_size = vocab_size
        self.most = most
        self.live: set[int] = set()
        self.proposed = 0
        self.accepted = 0

    def propose(self, candidates: list[SpecCandidate]) -> dict[int, Draft]:
        drafts = {}
        for candidate in candidates:
            sequence = candidate.sequence
            assert sequence.id in self.live, "asked about a sequence that never started"
            prefix = list(sequence.token_ids)
            good = digest(b"good", sum(prefix))[0] % (self.most + 1)
            ids = []
            for index in range(min(self.most, candidate.max_drafts)):
                token = self.next_token(prefix, sequence.params, sequence.choice)
                ids.append(token if index < good else (token + 1) % self.vocab_size)
                prefix.append(ids[-1])
            if ids:
                drafts[sequence.id] = Draft(tuple(ids), "fake")
        return drafts

    def observe(self, sequence_id: int, proposer: str, proposed: int, accepted: int, committed_ids: list[int]) -> None:
        self.proposed += proposed
        self.accepted += accepted

    def started(self, sequence: Sequence, salt: str) -> None:
        assert sequence.id not in self.live
        self.live.add(sequence.id)

    def finished(self, sequence_id: int) -> None:
        self.live.remove(sequence_id)


def byte_bundle() -> TokenizerBundle:
    """A tokenizer with one token per byte (id = byte), then <eos> and <eot>; both are special, <eos> stops."""
    import tokenizers

    kept = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    names, spare = {byte: chr(byte) for byte in kept}, 0x100
    for byte in range(256):
        if byte not in names:
            names[byte], spare = chr(spare), spare + 1
    inner = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab={names[byte]: byte for byte in range(256)}, merges=[], fuse_unk=False)
    )
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    inner.add_special_tokens(["<eos>", "<eot>"])
    spec = json.loads(inner.to_str())
    return TokenizerBundle(
        tokenizer_json=json.dumps(spec).encode(),
        special_tokens={"eos_token": "<eos>"},
        stop_token_ids=(EOS,),
        special_token_ids=(EOS, EOT),
    )


def byte_tokenizer() -> Tokenizer:
    return Tokenizer(byte_bundle())
