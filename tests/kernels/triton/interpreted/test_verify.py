"""Verification of drafts: keep-while-equal exactly, rejection sampling by its distribution and by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kernels.reference import sampling as reference
from kernels.triton.verify import keep_while_equal, rejection_sample
from tandem.lm import noise
from tandem.lm.noise import Purpose
from tests.kernels.triton.interpreted.test_sampling import row_params

VOCAB = 40


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), min_size=1, max_size=9), max_size=4))
def test_keep_while_equal(sequences: list[list[tuple[int, int]]]) -> None:
    flat = [pair for rows in sequences for pair in rows]
    starts = torch.tensor([0, *np.cumsum([len(rows) for rows in sequences])], dtype=torch.int32)
    sampled, drafts = (torch.tensor([pair[side] for pair in flat], dtype=torch.int32) for side in (0, 1))
    found = keep_while_equal(sampled, drafts, starts, 9).tolist()
    wanted = [
        reference.keep_while_equal([pair[0] for pair in rows], [pair[1] for pair in rows[:-1]]) for rows in sequences
    ]
    assert found == wanted


def draft_lists(probabilities: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Sparse lists [R, width] of dense draft distributions [R, V]."""
    tokens = torch.full((probabilities.shape[0], width), -1, dtype=torch.int32)
    masses = torch.zeros(probabilities.shape[0], width)
    for row, dense in enumerate(probabilities):
        ids = dense.nonzero()[:, 0]
        tokens[row, : len(ids)] = ids.int()
        masses[row, : len(ids)] = dense[ids]
    return tokens, masses


def by_hand(
    logits: torch.Tensor, drafts: list[int], draft: torch.Tensor, params: object, first: int
) -> tuple[int, int]:
    """(accepted, token) of one sequence whose rows start at `first`, from the definition."""
    for index in range(len(drafts) + 1):
        row = first + index
        seed = params.seeds[row : row + 1].numpy().view(np.uint64)
        position, choice = int(params.positions[row]), int(params.choices[row])
        target = torch.softmax(logits[row].double() / float(params.temperatures[row]), -1)
        kept = reference.survivors(
            logits[row] / params.temperatures[row],
            float(params.min_ps[row]),
            int(params.top_ks[row]),
            float(params.top_ps[row]),
        )
        target = torch.where(kept, target, 0.0)
        target = target / target.sum()
        purpose = Purpose.SAMPLE
        if index < len(drafts):
            token = drafts[index]
            u = float(noise.uniform(seed, position, token, choice, Purpose.ACCEPT)[0])
            if float(draft[row, token]) > 0.0 and u * float(draft[row, token]) < float(target[token]):
                continue
            if float(draft[row, token]) > 0.0:
                target, purpose = reference.residual(target, draft[row].double()), Purpose.RESIDUAL
        gumbel = torch.from_numpy(noise.gumbel(seed, position, np.arange(VOCAB), choice, purpose))
        return index, int(torch.argmax(torch.log(target) + gumbel))
    raise AssertionError("the last row always answers")


def test_rejection_by_hand() -> None:
    """Ragged sequences of 3, 0, 2 drafts under truncation, against the definition in fp64."""
    for _ in range(2):
        lengths = [4, 1, 3]
        starts = torch.tensor([0, 4, 5, 8], dtype=torch.int32)
        logits = torch.randn(8, VOCAB) * 2
        draft = torch.softmax(torch.randn(8, VOCAB) * 2, -1)
        draft = torch.where(draft >= draft.topk(8, -1).values[:, -1:], draft, 0.0)
        draft = draft / draft.sum(-1, keepdim=True)
        drafts = torch.multinomial(draft, 1)[:, 0].int()
        # One draft that its distribution does not name: the row is sampled as without drafts.
        drafts[0] = int(draft[0].argmin())
        params = row_params(8, temperature=[0.8] * 8, top_k=[0, 20, 0, 5, 0, 10, 10, 10], top_p=[0.95] * 8)
        accepted, tokens = rejection_sample(logits.clone(), params, drafts, *draft_lists(draft, 8), starts)
        first = 0
        for sequence, length in enumerate(lengths):
            wanted = by_hand(logits, drafts[first : first + length - 1].tolist(), draft, params, first)
            assert (int(accepted[sequence]), int(tokens[sequence])) == wanted
            first += length


@pytest.mark.slow
def test_rejection_keeps_the_target_distribution() -> None:
    """Over many seeds the first token follows the target, whatever the draft proposes."""
    trials, vocab = 600, 4
    target = torch.tensor([0.5, 0.25, 0.2, 0.05])
    draft = torch.tensor([0.1, 0.2, 0.3, 0.4])
    proposed = torch.multinomial(draft, trials, replacement=True).int()
    params = row_params(2 * trials)
    starts = torch.arange(0, 2 * trials + 1, 2, dtype=torch.int32)
    drafts = torch.stack([proposed, torch.zeros_like(proposed)], 1).flatten()
    lists = (torch.arange(vocab, dtype=torch.int32).expand(2 * trials, vocab).contiguous(), draft.repeat(2 * trials, 1))
    logits = torch.log(target).repeat(2 * trials, 1)
    accepted, tokens = rejection_sample(logits, params, drafts, *lists, starts)
    first = torch.where(accepted > 0, proposed, tokens)
    share = torch.bincount(first.long(), minlength=vocab) / trials
    # Five standard deviations of a share of 600.
    assert bool(((share - target).abs() < 5 * (target * (1 - target) / trials).sqrt()).all()), share
    assert 0.3 < float((accepted > 0).float().mean()) < 0.8


def test_greedy_rows_accept_only_the_argmax() -> None:
    logits = torch.zeros(4, VOCAB)
    logits[:, 7] = 1.0
    draft = torch.full((4, VOCAB), 1 / VOCAB)
    starts = torch.tensor([0, 2, 4], dtype=torch.int32)
    params = row_params(4, temperature=[0.0] * 4)
    accepted, tokens = rejection_sample(
        logits, params, torch.tensor([7, 0, 3, 0], dtype=torch.int32), *draft_lists(draft, 64), starts
    )
    assert accepted.tolist() == [1, 0] and tokens.tolist() == [7, 7]
