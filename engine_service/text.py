"""From ids to text: whole characters only, and stop strings, matched across tokens and held back meanwhile."""

from __future__ import annotations

from dataclasses import dataclass

from engine_service.grammar import GrammarMatcher
from engine_service.requests import Choice
from tandem.tokenizer import IncrementalDetokenizer, Tokenizer


@dataclass(frozen=True, slots=True)
class Finish:
    """Why a choice ended. reason: "stop", "length", "cancelled" or "error"."""

    reason: str
    stop_string: str | None = None
    stop_token_id: int | None = None


class _StopMatcher:
    """Knuth, Morris, Pratt (1977): `state` = length of the longest prefix of the stop string that ends the text."""

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.state = 0
        self._fail = [0] * len(stop)
        length = 0
        for index in range(1, len(stop)):
            while length and stop[index] != stop[length]:
                length = self._fail[length - 1]
            length += stop[index] == stop[length]
            self._fail[index] = length

    def step(self, char: str) -> bool:
        """Reads one character; True if the stop string ends with it."""
        if self.state == len(self.stop):
            self.state = self._fail[-1]
        while self.state and char != self.stop[self.state]:
            self.state = self._fail[self.state - 1]
        self.state += char == self.stop[self.state]
        return self.state == len(self.stop)


class TextStream:
    """The text of one choice. Of several stop strings the one that ends first matches; of those the longest."""

    def __init__(
        self, tokenizer: Tokenizer, *, skip_special: bool, stops: tuple[str, ...], include: bool, min_tokens: int
    ) -> None:
        self._detokenizer = IncrementalDetokenizer(tokenizer, skip_special)
        self._matchers = [_StopMatcher(stop) for stop in stops]
        self._include = include
        self._min_tokens = min_tokens
        self._pending = ""

    def push(self, token: int, count: int) -> tuple[str, str | None]:
        """Text that may be shown after this token, the choice's `count`-th, and the stop string that it completes."""
        new = self._detokenizer.push((token,))
        if not self._matchers:
            return new, None
        for char in new:
            self._pending += char
            ended = [matcher.stop for matcher in self._matchers if matcher.step(char)]
            if ended and count >= self._min_tokens:
                stop = max(ended, key=len)
                text = self._pending if self._include else self._pending[: -len(stop)]
                self._pending = ""
                return text, stop
        hold = 0 if self._include else max(self._held(matcher) for matcher in self._matchers)
        cut = len(self._pending) - hold
        text, self._pending = self._pending[:cut], self._pending[cut:]
        return text, None

    @staticmethod
    def _held(matcher: _StopMatcher) -> int:
        # A whole match that min_tokens made void is not held for itself.
        return matcher.state if matcher.state < len(matcher.stop) else matcher._fail[-1]

    def end(self) -> str:
        """What was held back, at an end that is not a stop string."""
        text, self._pending = self._pending + self._detokenizer.flush(), ""
        return text


@dataclass(frozen=True, slots=True)
class StopRules:
    """When a choice ends, besides grammar and deadline. Ids, texts, counts of output tokens."""

    stop_ids: frozenset[int] = frozenset()
    stops: tuple[str, ...] = ()
    include: bool = False
    min_tokens: int = 0
    skip_special: bool = True

    def text_stream(self, tokenizer: Tokenizer) -> TextStream:
        return TextStream(
            tokenizer,
            skip_special=self.skip_special,
            stops=self.stops,
            include=self.include,
            min_tokens=self.min_tokens,
        )

    def shows(self, finish: Finish | None) -> bool:
        """Whether the last token's own text belongs to the output."""
        return finish is None or finish.stop_token_id is None or self.include


@dataclass(frozen=True, slots=True)
class Settled:
    """What of a step's tokens became output. `text` is None if nobody had to read text to decide."""

    ids: list[int]
    finish: Finish | None
    text: str | None


class StopTracker:
    """Decides in the step thread, for one choice, where its output ends. Reads text only if there are stop strings.

    It feeds the choice's grammar, because a complete grammar ends the output too.
    """

    def __init__(
        self, choice: Choice, rules: StopRules, tokenizer: Tokenizer, matcher: GrammarMatcher | None = None
    ) -> None:
        self._choice = choice
        self._rules = rules
        self._matcher = matcher
        self._text = rules.text_stream(tokenizer) if rules.stops else None

    def settle(self, ids: list[int], count: int | None = None) -> Settled:
        """Cuts newly sampled ids at the first stop id, completed stop string, or limit.

        count: output tokens before them; by default what the sequence holds.

        Raises:
            TandemError: GRAMMAR, if the grammar refuses a token or is too complex to go on.
        """
        count = self._choice.sequence.output_len if count is None else count
        kept: list[int] = []
        text = "" if self._text else None
        finish = Finish("length") if count >= self._choice.max_output else None
        for token in ids if finish is None else ():
            count += 1
            kept.append(token)
            if token in self._rules.stop_ids and count > self._rules.min_tokens:
                finish = Finish("stop", stop_token_id=token)
            if self._matcher is not None:
                self._matcher.accept((token,))
            if self._text is not None and text is not None and self._rules.shows(finish):
                piece, matched = self._text.push(token, count)
                text += piece
                if matched is not None:
                    finish = Finish("stop", stop_string=matched)
            if finish is None and self._matcher is not None and self._matcher.complete:
                finish = Finish("stop")
            if finish is None and count >= self._choice.max_output:
                finish = Finish("length")
            if finish is not None:
                break
        if finish is not None and finish.stop_string is None and self._text is not None and text is not None:
            text += self._text.end()
        return Settled(kept, finish, text)
