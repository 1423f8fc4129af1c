"""Structured output by llguidance: what the contract offers, compiled under limits, and the state of each sequence.

Compilation runs in a worker thread (llguidance releases the GIL), bounded in size and time. A sequence's matcher has
read exactly its committed output: drafts are only looked at, and replay rebuilds it anywhere.
"""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import llguidance
import numpy as np

from tandem.errors import TandemError
from tandem.inference.v1 import inference_pb2 as pb
from tandem.tokenizer import Tokenizer

log = logging.getLogger(__name__)

# Whitespace in JSON is free, but not endless: a small model could fill its whole budget with it.
_JSON_OPTIONS: Any = {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{0,20}"}
_CACHED = 64
_WORKERS = 2


class GrammarMatcher:
    """Where one sequence stands in its grammar. Used by the step thread."""

    def __init__(self, matcher: llguidance.LLMatcher, vocab_size: int, stop_ids: frozenset[int]) -> None:
        self._matcher = matcher
        self._words = (vocab_size + 31) // 32
        self._stop_ids = stop_ids

    def copy(self) -> GrammarMatcher:
        """An independent matcher in the same state."""
        copied = GrammarMatcher.__new__(GrammarMatcher)
        copied._matcher, copied._words, copied._stop_ids = self._matcher.deep_copy(), self._words, self._stop_ids
        return copied

    @property
    def complete(self) -> bool:
        """Nothing but an end can follow."""
        return self._matcher.is_stopped()

    def accept(self, ids: Sequence[int]) -> None:
        """Reads committed tokens. The model's stop ids end the output and are not read.

        Raises:
            TandemError: GRAMMAR, if a token is refused or the grammar is too complex to go on.
        """
        for token in ids:
            if token in self._stop_ids:
                return
            if not self._matcher.consume_token(token):
                raise self._failed()

    def valid_prefix(self, drafts: Sequence[int]) -> int:
        """How many drafts the grammar allows; a stop id ends them, where the grammar accepts it."""
        for index, token in enumerate(drafts):
            if token in self._stop_ids:
                return self._matcher.validate_tokens(list(drafts[: index + 1]))
        return self._matcher.validate_tokens(list(drafts))

    def masks(self, drafts: Sequence[int]) -> np.ndarray:
        """int32 [1 + len(drafts), ceil(vocab / 32)]: what may follow the output, and each draft after it.

        Raises:
            TandemError: GRAMMAR, if a limit on the work per step is exceeded.
        """
        masks = np.zeros((1 + len(drafts), self._words), dtype=np.int32)
        read = 0
        for row in range(1 + len(drafts)):
            address = masks[row].ctypes.data
            self._matcher.unsafe_compute_mask_ptr(address, 4 * self._words)
            if self._matcher.is_error():
                raise self._failed()
            if row == len(drafts) or drafts[row] in self._stop_ids or not self._matcher.consume_token(drafts[row]):
                # After a stop nothing is sampled, so the rows that are left may stay as this one.
                masks[row + 1 :] = masks[row]
                break
            read += 1
        if read and not self._matcher.rollback(read):
            raise self._failed()
        return masks

    def _failed(self) -> TandemError:
        return TandemError("GRAMMAR", f"the grammar cannot go on: {_first_line(self._matcher.get_error())}")


def _first_line(text: str) -> str:
    lines = [line.strip() for line in text.strip().splitlines() if line.strip()]
    detail = next((line for line in lines if line.startswith("error:")), "")
    return " ".join(part for part in (lines[0] if lines else "unknown error", detail) if part)[:500]


class GrammarCompiler:
    """Turns the contract's StructuredOutput into matchers. One per engine.

    max_bytes limits the source text; timeout_s the compilation, after which the caller gets GRAMMAR. llguidance's own
    limits bound the work of one compilation and of one step.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, *, max_bytes: int, timeout_s: float) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._stop_ids = frozenset(tokenizer.stop_token_ids)
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s
        self._limits = llguidance.LLParserLimits(verbose_errors=False, max_lexer_states=50_000)
        self._native: llguidance.LLTokenizer | None = None
        self._native_lock = threading.Lock()
        self._cache: OrderedDict[bytes, GrammarMatcher] = OrderedDict()
        self._pool = ThreadPoolExecutor(_WORKERS, thread_name_prefix="grammar")

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def warm(self) -> Future[None]:
        """Builds in a worker what all grammars need (some 0.3 s), so that the first request need not wait for it."""
        return self._pool.submit(self._warm)

    def _warm(self) -> None:
        try:
            self._build(pb.StructuredOutput(json_object=True), "json_object")
        except Exception:
            # Each request with a grammar will be told; others need none.
            log.exception("structured output does not work with this tokenizer")

    async def compile(self, structured: pb.StructuredOutput) -> GrammarMatcher:
        """A matcher in its first state.

        Raises:
            TandemError: GRAMMAR, naming the field and what is wrong or unsupported.
        """
        key = structured.SerializeToString(deterministic=True)
        kind = structured.WhichOneof("kind") or ""
        if len(key) > self._max_bytes:
            raise _refused(kind, f"is {len(key)} bytes long, but at most {self._max_bytes} are allowed")
        if key in self._cache:
            self._cache.move_to_end(key)
            return self._cache[key].copy()
        work = asyncio.get_running_loop().run_in_executor(self._pool, self._build, structured, kind)
        try:
            matcher = await asyncio.wait_for(work, self._timeout_s)
        except TimeoutError:
            raise _refused(kind, f"takes longer than {self._timeout_s} s to compile") from None
        self._cache[key] = matcher
        if len(self._cache) > _CACHED:
            self._cache.popitem(last=False)
        return matcher.copy()

    def _build(self, structured: pb.StructuredOutput, kind: str) -> GrammarMatcher:
        grammar = self._source(structured, kind)
        matcher = llguidance.LLMatcher(self._vocabulary(), grammar, log_level=0, limits=self._limits)
        if matcher.is_error():
            raise _refused(kind, f"cannot be compiled: {_first_line(matcher.get_error())}")
        return GrammarMatcher(matcher, self._vocab_size, self._stop_ids)

    def _vocabulary(self) -> llguidance.LLTokenizer:
        """The tokenizer as llguidance knows it; built once, whichever worker comes first."""
        with self._native_lock:
            if self._native is None:
                spec = self._tokenizer.bundle.tokenizer_json.decode()
                self._native = llguidance.LLTokenizer(spec, n_vocab=self._vocab_size, eos_token=sorted(self._stop_ids))
            return self._native

    def _source(self, structured: pb.StructuredOutput, kind: str) -> str:
        from_schema = llguidance.LLMatcher.grammar_from_json_schema
        if kind == "json_object":
            return from_schema('{"type": "object"}', defaults=_JSON_OPTIONS)
        if kind == "json_schema":
            return from_schema(json.dumps(_load(structured.json_schema, kind)), defaults=_JSON_OPTIONS)
        if kind == "regex":
            return llguidance.LLMatcher.grammar_from_regex(structured.regex)
        if kind == "choice":
            options = " | ".join(json.dumps(option) for option in structured.choice.options)
            return llguidance.LLMatcher.grammar_from_lark(f"start: {options}")
        if kind == "grammar":
            return _lark(structured.grammar)
        return self._structural(structured.structural_tag)

    def _structural(self, text: str) -> str:
        """Lark source for {"structures": [{"begin", "schema", "end"}], "triggers": [text]}."""
        kind = "structural_tag"
        spec = _load(text, kind)
        structures, triggers = (spec.get(name) if isinstance(spec, dict) else None for name in _STRUCTURAL)
        if not isinstance(structures, list) or not structures or not isinstance(triggers, list) or not triggers:
            raise _refused(kind, 'must be {"structures": [{"begin", "schema", "end"}, ...], "triggers": [text, ...]}')
        lines = ["%llguidance {}", "TEXT: /(.|\\n)*/"]
        for index, structure in enumerate(structures):
            begin = structure.get("begin") if isinstance(structure, dict) else None
            trigger = next((t for t in triggers if t and isinstance(begin, str) and begin.startswith(t)), None)
            if begin is None or trigger is None:
                raise _refused(kind, f"structures[{index}].begin must start with one of the triggers")
            schema = {"x-guidance": _JSON_OPTIONS, **(structure.get("schema") or {})}
            rest = begin[len(trigger) :]
            body = (
                f"{json.dumps(rest) if rest else ''} %json {json.dumps(schema)} {json.dumps(structure.get('end', ''))}"
            )
            if self._tokenizer.id_of(trigger) in self._tokenizer.special_token_ids:
                lines.append(f"tag_{index}: TEXT {trigger} {body}")
            else:
                lines.append(f"head_{index}[lazy]: TEXT {json.dumps(trigger)}")
                lines.append(f"tag_{index}: head_{index} {body}")
        tags = " | ".join(f"tag_{index}" for index in range(len(structures)))
        lines.append(f"start: ({tags})* rest")
        lines.append("rest: TEXT")
        return llguidance.LLMatcher.grammar_from_lark("\n".join(lines))


_STRUCTURAL = ("structures", "triggers")


def _lark(text: str) -> str:
    """Lark source, or GBNF (rules written with ::=), which is converted."""
    if "::=" not in text:
        return llguidance.LLMatcher.grammar_from_lark(text)
    try:
        return llguidance.grammar_from("gbnf", text)
    except ValueError as error:
        raise _refused("grammar", f"cannot be read as GBNF: {error}") from error


def _load(text: str, kind: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _refused(kind, f"is no valid JSON: {error}") from error


def _refused(kind: str, why: str) -> TandemError:
    field = f"structured.{kind}" if kind else "structured"
    return TandemError("GRAMMAR", f"{field} {why}", field=field)
