"""Logit processing before temperature: masks, bias, bad words, min_tokens, penalties. Vectorised over rows."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tandem.lm.types import SamplingParams, Sequence

NEVER = np.float32(-np.inf)


@dataclass(frozen=True)
class Row:
    """One row to sample: a sequence, as if `drafts` were committed; mask: int32 words, bit = allowed, or None."""

    sequence: Sequence
    drafts: tuple[int, ...] = ()
    mask: np.ndarray | None = None

    @property
    def params(self) -> SamplingParams:
        return self.sequence.params

    @property
    def position(self) -> int:
        """Output position of the token that this row yields."""
        return self.sequence.output_len + len(self.drafts)

    def ends_with(self, suffix: tuple[int, ...]) -> bool:
        """Whether the tokens so far, drafts included, end with `suffix`."""
        missing = len(suffix) - len(self.drafts)
        if missing <= 0:
            return not suffix or self.drafts[-len(suffix) :] == suffix
        committed = self.sequence.token_ids
        return (
            len(committed) >= missing
            and tuple(committed[-missing:]) == suffix[:missing]
            and self.drafts == suffix[missing:]
        )


class TokenCounts:
    """Tokens of a sequence so far: which occurred, and how often in the output. Follows the sequence as it grows."""

    def __init__(self) -> None:
        self._length = 0
        self._seen: set[int] = set()
        self._output: dict[int, int] = {}

    def update(self, sequence: Sequence) -> None:
        """Takes in what was committed since the last call."""
        tokens = sequence.token_ids
        if len(tokens) < self._length:
            self.__init__()  # type: ignore[misc]
        for index in range(self._length, len(tokens)):
            token = tokens[index]
            self._seen.add(token)
            if index >= sequence.prompt_len:
                self._output[token] = self._output.get(token, 0) + 1
        self._length = len(tokens)

    def seen(self, drafts: tuple[int, ...]) -> list[int]:
        """Ids in prompt, output and drafts."""
        return list(self._seen.union(drafts)) if drafts else list(self._seen)

    def output(self, drafts: tuple[int, ...]) -> dict[int, int]:
        """Count per id in output and drafts."""
        if not drafts:
            return self._output
        counts = dict(self._output)
        for token in drafts:
            counts[token] = counts.get(token, 0) + 1
        return counts


def has_penalties(params: SamplingParams) -> bool:
    return params.repetition_penalty != 1.0 or params.frequency_penalty != 0.0 or params.presence_penalty != 0.0


def needs_processing(row: Row) -> bool:
    """Whether anything but temperature and truncation changes this row's logits."""
    params = row.params
    return (
        row.mask is not None
        or bool(params.logit_bias or params.allowed_token_ids or params.bad_words)
        or params.min_tokens > row.position
        or has_penalties(params)
    )


class Processors:
    """Applies them in their order; keeps token counts per sequence for penalties."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._counts: dict[int, TokenCounts] = {}

    def forget(self, sequence_id: int) -> None:
        self._counts.pop(sequence_id, None)

    def apply(self, logits: np.ndarray, rows: list[Row]) -> None:
        """Changes fp32 logits [rows, vocab] in place."""
        self._mask(logits, rows)
        self._bias(logits, rows)
        self._allowed(logits, rows)
        self._bad_words(logits, rows)
        self._min_tokens(logits, rows)
        self._repetition(logits, rows)
        self._frequency_presence(logits, rows)

    def _mask(self, logits: np.ndarray, rows: list[Row]) -> None:
        masked = [index for index, row in enumerate(rows) if row.mask is not None]
        if not masked:
            return
        words = np.stack([np.asarray(rows[index].mask, dtype="<i4") for index in masked])
        bits = np.unpackbits(words.view(np.uint8), axis=1, count=self._vocab_size, bitorder="little")
        logits[masked] = np.where(bits.astype(bool), logits[masked], NEVER)

    def _bias(self, logits: np.ndarray, rows: list[Row]) -> None:
        flat = [(index, token, bias) for index, row in enumerate(rows) for token, bias in row.params.logit_bias]
        if flat:
            where, tokens, values = zip(*flat, strict=True)
            np.add.at(logits, (list(where), list(tokens)), np.asarray(values, dtype=np.float32))

    def _allowed(self, logits: np.ndarray, rows: list[Row]) -> None:
        limited = [index for index, row in enumerate(rows) if row.params.allowed_token_ids]
        if not limited:
            return
        allowed = np.zeros((len(limited), self._vocab_size), dtype=bool)
        for line, index in enumerate(limited):
            allowed[line, list(rows[index].params.allowed_token_ids)] = True
        logits[limited] = np.where(allowed, logits[limited], NEVER)

    def _bad_words(self, logits: np.ndarray, rows: list[Row]) -> None:
        flat = [
            (index, word[-1])
            for index, row in enumerate(rows)
            for word in row.params.bad_words
            if word and row.ends_with(word[:-1])
        ]
        if flat:
            where, tokens = zip(*flat, strict=True)
            logits[list(where), list(tokens)] = NEVER

    def _min_tokens(self, logits: np.ndarray, rows: list[Row]) -> None:
        for index, row in enumerate(rows):
            params = row.params
            if params.min_tokens <= row.position or not params.stop_token_ids:
                continue
            stops = list(params.stop_token_ids)
            kept = logits[index, stops]
            logits[index, stops] = NEVER
            # A grammar beats min_tokens: where it accepts nothing but a stop, the stop stays.
            if row.mask is not None and logits[index].max() == NEVER:
                logits[index, stops] = kept

    def _token_counts(self, row: Row) -> TokenCounts:
        counts = self._counts.setdefault(row.sequence.id, TokenCounts())
        counts.update(row.sequence)
        return counts

    def _repetition(self, logits: np.ndarray, rows: list[Row]) -> None:
        where: list[np.ndarray] = []
        tokens: list[np.ndarray] = []
        penalties: list[np.ndarray] = []
        for index, row in enumerate(rows):
            penalty = row.params.repetition_penalty
            if penalty != 1.0:
                seen = np.asarray(self._token_counts(row).seen(row.drafts), dtype=np.int64)
                where.append(np.full(len(seen), index))
                tokens.append(seen)
                penalties.append(np.full(len(seen), penalty, dtype=np.float32))
        if where:
            at = (np.concatenate(where), np.concatenate(tokens))
            values, penalty_values = logits[at], np.concatenate(penalties)
            logits[at] = np.where(values > 0, values / penalty_values, values * penalty_values)

    def _frequency_presence(self, logits: np.ndarray, rows: list[Row]) -> None:
        where: list[np.ndarray] = []
        tokens: list[np.ndarray] = []
        amounts: list[np.ndarray] = []
        for index, row in enumerate(rows):
            params = row.params
            if params.frequency_penalty == 0.0 and params.presence_penalty == 0.0:
                continue
            counts = self._token_counts(row).output(row.drafts)
            times = np.fromiter(counts.values(), dtype=np.float32, count=len(counts))
            where.append(np.full(len(counts), index))
            tokens.append(np.fromiter(counts, dtype=np.int64, count=len(counts)))
            amount = np.float32(params.frequency_penalty) * times + np.float32(params.presence_penalty)
            amounts.append(amount.astype(np.float32))
        if where:
            # Ids are unique per row, so plain indexing subtracts each once.
            logits[np.concatenate(where), np.concatenate(tokens)] -= np.concatenate(amounts)
