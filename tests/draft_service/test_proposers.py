"""Proposers that copy: what they find, what they learn, what they hold."""

from __future__ import annotations

import json
import random
import stat
from pathlib import Path

import pytest

from tandem.lm.proposers import CombinedProposer, DraftSequence, NgramProposer, Proposer, SuffixProposer
from tandem.lm.proposers.automaton import ROOT, SuffixAutomaton
from tandem.lm.proposers.base import periodic
from tandem.lm.proposers.suffix_file import SuffixFile


def begin(
    proposer: Proposer, tokens: list[int], identity: int = 1, salt: str = "", prompt_len: int = 0
) -> DraftSequence:
    sequence = DraftSequence(identity, [], prompt_len=prompt_len, salt=salt)
    proposer.start(sequence)
    grow(proposer, sequence, tokens)
    return sequence


def grow(proposer: Proposer, sequence: DraftSequence, tokens: list[int]) -> None:
    start = len(sequence.tokens)
    sequence.tokens.extend(tokens)
    proposer.extend(sequence, start)


def naive_longest_match(tokens: list[int]) -> tuple[int, set[int]]:
    """Length of the longest suffix that occurred before, and the ids that followed it."""
    for length in range(len(tokens) - 1, 0, -1):
        ends = [e for e in range(length, len(tokens)) if tokens[e - length : e] == tokens[-length:]]
        if ends:
            return length, {tokens[end] for end in ends}
    return 0, set()


def test_periodic_goes_on_with_its_own_copy() -> None:
    assert periodic([1, 2, 3, 4], 2, 5) == (3, 4, 3, 4, 3)
    assert periodic([1, 2, 3, 4], 0, 2) == (1, 2)


def test_ngram_copies_what_followed_the_latest_occurrence() -> None:
    proposer = NgramProposer((3, 2))
    sequence = begin(proposer, [1, 2, 3, 9, 1, 2, 3, 7, 8, 1, 2, 3])
    guess = proposer.propose([(sequence, 2)])[0]
    assert guess.ids == (7, 8)
    assert guess.match == 3


def test_ngram_prefers_the_longest_context() -> None:
    proposer = NgramProposer((2, 4))
    sequence = begin(proposer, [1, 2, 3, 4, 5, 9, 3, 4, 6, 1, 2, 3, 4])
    assert proposer.propose([(sequence, 1)])[0].ids == (5,)


def test_ngram_never_finds_itself_and_says_nothing_without_a_match() -> None:
    proposer = NgramProposer((2,))
    sequence = begin(proposer, [1, 2, 3])
    assert proposer.propose([(sequence, 4)])[0].ids == ()


def test_ngram_incremental_equals_whole() -> None:
    rng = random.Random(5)
    tokens = [rng.randrange(4) for _ in range(300)]
    proposer = NgramProposer()
    whole = begin(proposer, tokens)
    pieces = begin(proposer, tokens[:7], identity=2)
    place = 7
    while place < len(tokens):
        step = rng.randrange(1, 9)
        grow(proposer, pieces, tokens[place : place + step])
        place += step
    assert proposer.propose([(whole, 8)])[0] == proposer.propose([(pieces, 8)])[0]


def test_ngram_lengths_must_be_positive() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        NgramProposer((0, 2))


@pytest.mark.parametrize("alphabet", [1, 2, 3, 8])
def test_suffix_finds_the_longest_earlier_match(alphabet: int) -> None:
    rng = random.Random(alphabet)
    proposer = SuffixProposer(min_match=1)
    sequence = begin(proposer, [])
    for _ in range(120):
        grow(proposer, sequence, [rng.randrange(alphabet)])
        length, followers = naive_longest_match(sequence.tokens)
        guess = proposer.propose([(sequence, 1)])[0]
        assert guess.match == length
        assert (guess.ids[0] in followers) if length else guess.ids == ()


def test_automaton_of_several_sequences_knows_exactly_their_substrings() -> None:
    rng = random.Random(3)
    texts = [[rng.randrange(3) for _ in range(rng.randrange(1, 20))] for _ in range(12)]
    automaton = SuffixAutomaton()
    for text in texts:
        automaton.add(text)
    substrings = {tuple(t[i:j]) for t in texts for i in range(len(t)) for j in range(i + 1, len(t) + 1)}

    def accepts(word: tuple[int, ...]) -> bool:
        state = ROOT
        for token in word:
            following = automaton.next[state].get(token)
            if following is None:
                return False
            state = following
        return True

    assert all(accepts(word) for word in substrings)
    for _ in range(2000):
        word = tuple(rng.randrange(3) for _ in range(rng.randrange(1, 10)))
        assert accepts(word) == (word in substrings)
    assert len(automaton) <= 2 * sum(map(len, texts)) + 1


def test_suffix_learns_from_finished_outputs_of_the_same_salt_only() -> None:
    proposer = SuffixProposer()
    first = begin(proposer, [1, 2, 50, 51, 52, 53, 54], salt="a", prompt_len=2)
    proposer.finish(first, completed=True)
    same = begin(proposer, [7, 8, 50, 51], identity=2, salt="a", prompt_len=2)
    other = begin(proposer, [7, 8, 50, 51], identity=3, salt="b", prompt_len=2)
    assert proposer.propose([(same, 3)])[0].ids == (52, 53, 54)
    assert proposer.propose([(other, 3)])[0].ids == ()


def test_suffix_does_not_learn_from_what_was_cut_off() -> None:
    proposer = SuffixProposer()
    first = begin(proposer, [1, 2, 50, 51, 52, 53, 54], prompt_len=2)
    proposer.finish(first, completed=False)
    assert proposer.stored_tokens == 0


def test_suffix_gives_the_most_frequent_continuation() -> None:
    proposer = SuffixProposer()
    for identity, last in enumerate([60, 61, 61, 61, 62]):
        sequence = begin(proposer, [1, 50, 51, last], identity=identity, prompt_len=1)
        proposer.finish(sequence, completed=True)
    asked = begin(proposer, [9, 50, 51], identity=99, prompt_len=1)
    guess = proposer.propose([(asked, 1)])[0]
    assert guess.ids == (61,)
    assert guess.confidence == pytest.approx(3 / 5)


def test_suffix_store_is_bounded_in_tokens_and_salts() -> None:
    proposer = SuffixProposer(max_store_tokens=100, max_salts=3)
    for index in range(50):
        tokens = [index * 100 + i for i in range(30)]
        proposer.finish(begin(proposer, tokens, identity=index, salt=str(index % 7)), completed=True)
        assert proposer.stored_tokens <= 100
        assert len(proposer._stores) <= 3


def test_combined_learns_which_proposer_is_right() -> None:
    class Fixed:
        """Always guesses one id."""

        def __init__(self, name: str, token: int) -> None:
            self.name = name
            self.token = token

        def start(self, sequence: DraftSequence) -> None: ...
        def extend(self, sequence: DraftSequence, start: int) -> None: ...
        def finish(self, sequence: DraftSequence, completed: bool) -> None: ...
        def close(self) -> None: ...
        def propose(self, wants):  # type: ignore[no-untyped-def]
            from tandem.lm.proposers import Guess

            return [Guess((self.token,) * count, self.name, match=5) for _, count in wants]

    combined = CombinedProposer([Fixed("wrong", 1), Fixed("right", 2)])
    sequence = begin(combined, [0])
    for _ in range(10):
        combined.propose([(sequence, 3)])
        grow(combined, sequence, [2])
    guess = combined.propose([(sequence, 3)])[0]
    assert guess.proposer == "right"
    assert guess.confidence > 0.8


def test_combined_respects_the_allowed_proposers() -> None:
    combined = CombinedProposer([NgramProposer(), SuffixProposer()])
    sequence = DraftSequence(1, [], allowed=("ngram",))
    combined.start(sequence)
    sequence.tokens.extend([1, 2, 3, 1, 2])
    combined.extend(sequence, 0)
    assert combined.propose([(sequence, 2)])[0].proposer == "ngram"
    combined.finish(sequence, completed=True)
    assert sequence.state == {}


def test_combined_refuses_two_of_one_name() -> None:
    with pytest.raises(ValueError, match="unique"):
        CombinedProposer([NgramProposer(), NgramProposer()])


def test_learnt_outputs_are_kept_between_runs_only_on_request(tmp_path: Path) -> None:
    path = tmp_path / "store.jsonl"
    first = SuffixProposer(store=SuffixFile(path, 100))
    first.finish(begin(first, [1, 2, 50, 51, 52, 53], salt="a", prompt_len=2), completed=True)
    first.close()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    second = SuffixProposer(store=SuffixFile(path, 100))
    assert second.propose([(begin(second, [9, 50, 51], salt="a"), 2)])[0].ids == (52, 53)
    assert second.propose([(begin(second, [9, 50, 51], salt="b"), 2)])[0].ids == ()
    second.close()
    assert len(path.read_text().splitlines()) == 1


def test_store_on_disk_is_bounded_and_checked(tmp_path: Path) -> None:
    path = tmp_path / "store.jsonl"
    proposer = SuffixProposer(max_store_tokens=30, store=SuffixFile(path, 30))
    for index in range(10):
        tokens = list(range(10 * index, 10 * index + 10))
        proposer.finish(begin(proposer, tokens, identity=index), completed=True)
    proposer.close()
    assert [json.loads(line)["ids"][0] for line in path.read_text().splitlines()] == [70, 80, 90]
    path.write_text('{"salt": "a"}\n')
    with pytest.raises(ValueError, match="line 1"):
        SuffixProposer(store=SuffixFile(path, 100))
