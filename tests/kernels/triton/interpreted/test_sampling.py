"""Noise, logits processing, truncation and sampling against the references."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kernels.reference import sampling as reference
from kernels.triton.noise import noise
from kernels.triton.sampling import LogitEdits, RowParams, edit_logits, mask_logits, sample, token_scores
from kernels.triton.truncation import truncate
from tandem.lm import noise as reference_noise
from tandem.lm.noise import Purpose


def row_params(rows: int, **values: list[float]) -> RowParams:
    def column(name: str, default: float, dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values.get(name, [default] * rows)).to(dtype)

    return RowParams(
        temperatures=column("temperature", 1.0, torch.float32),
        min_ps=column("min_p", 0.0, torch.float32),
        top_ks=column("top_k", 0, torch.int32),
        top_ps=column("top_p", 1.0, torch.float32),
        seeds=torch.arange(rows) * 0x123456789ABCDEF - 99,
        positions=torch.arange(rows, dtype=torch.int32) * 7,
        choices=torch.arange(rows, dtype=torch.int32) % 2,
        purposes=torch.zeros(rows, dtype=torch.int32),
    )


def noise_row(params: RowParams, row: int, vocab: int) -> torch.Tensor:
    seed = params.seeds[row : row + 1].numpy().view(np.uint64)
    position, choice = int(params.positions[row]), int(params.choices[row])
    return torch.from_numpy(reference_noise.gumbel(seed, position, np.arange(vocab), choice))


def expected(logits: torch.Tensor, params: RowParams) -> list[int]:
    return [
        reference.sample_row(
            logits[row],
            float(params.temperatures[row]),
            float(params.min_ps[row]),
            int(params.top_ks[row]),
            float(params.top_ps[row]),
            lambda vocab, row=row: noise_row(params, row, vocab),
        )
        for row in range(logits.shape[0])
    ]


def kept(logits: torch.Tensor, params: RowParams) -> torch.Tensor:
    """The device's survivors as bool [R, V]."""
    thresholds, last_ties = truncate(logits, params.temperatures, params.min_ps, params.top_ks, params.top_ps)
    scaled = logits / params.temperatures[:, None]
    bits = (scaled + 0.0).numpy().view(np.uint32)
    keys = np.where(bits >> 31 == 1, ~bits, bits | np.uint32(0x80000000))
    limit = thresholds.numpy().view(np.uint32)[:, None]
    tied = (keys == limit) & (np.arange(logits.shape[1])[None, :] <= last_ties.numpy()[:, None])
    return torch.from_numpy((keys > limit) | tied)


@pytest.mark.parametrize("purpose", list(Purpose))
def test_noise_has_the_reference_bits(purpose: Purpose) -> None:
    count = 300
    seeds = torch.randint(-(2**63), 2**63 - 1, (count,))
    positions, tokens, choices = (torch.randint(0, limit, (count,)).int() for limit in (1 << 20, 150_000, 8))
    words, uniforms, gumbels = noise(seeds, positions, tokens, choices, torch.full((count,), int(purpose)).int())
    arguments = (seeds.numpy().view(np.uint64), positions.numpy(), tokens.numpy(), choices.numpy(), purpose)
    assert np.array_equal(words.numpy().view(np.uint32), reference_noise.words(*arguments))
    assert np.array_equal(uniforms.numpy(), reference_noise.uniform(*arguments))
    # fp64 logarithms rounded to fp32: at most the last place may differ on another libm.
    np.testing.assert_array_max_ulp(gumbels.numpy(), reference_noise.gumbel(*arguments), maxulp=1)


def test_sampling_equals_the_reference() -> None:
    logits = torch.randn(9, 3001) * 3
    logits[5] = logits[5].round()
    logits[6] = float("-inf")
    logits[7] = 0.0
    logits[8, 11] = float("nan")
    params = row_params(
        9,
        temperature=[0.0, 1.0, 0.7, 1.3, 1.0, 1.0, 1.0, 1.0, 1.0],
        min_p=[0.0, 0.0, 0.1, 0.0, 0.02, 0.0, 0.0, 0.0, 0.0],
        top_k=[0, 0, 0, 40, 50, 7, 3, 5, 0],
        top_p=[1.0, 1.0, 1.0, 1.0, 0.8, 0.9, 0.5, 0.5, 1.0],
    )
    found = sample(logits, params).tolist()
    assert found == expected(logits, params)
    assert found[6:] == [-1, found[7], -2]


def test_ties_go_to_the_lowest_ids() -> None:
    logits = torch.zeros(3, 2500)
    logits[:, 2000] = 5.0
    params = row_params(3, temperature=[0.0, 1.0, 1.0], top_k=[0, 3, 1])
    assert sample(logits, params)[0] == 2000
    assert kept(logits[1:], row_params(2, top_k=[3, 1])).nonzero().tolist() == [[0, 0], [0, 1], [0, 2000], [1, 2000]]


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_drawn_truncations(data: st.DataObject) -> None:
    vocab = data.draw(st.sampled_from([1, 2, 37, 1024, 1025]))
    values = st.one_of(st.floats(-20, 20, width=32), st.sampled_from([0.0, -0.0, 1.0, float("-inf")]))
    few = data.draw(st.lists(values, min_size=1, max_size=6))
    logits = torch.randn(1, vocab) * data.draw(st.sampled_from([0.1, 3.0, 10.0]))
    logits[0, : min(vocab, len(few))] = torch.tensor(few)[:vocab]
    if data.draw(st.booleans()):
        logits = logits.round()
    min_p = data.draw(st.sampled_from([0.0, 0.0, 0.013, 0.37]))
    top_k = data.draw(st.sampled_from([0, 1, 2, 17, vocab, 5000]))
    top_p = data.draw(st.sampled_from([1.0, 0.05, 0.613, 0.9717]))
    ours = kept(logits, row_params(1, min_p=[min_p], top_k=[top_k], top_p=[top_p]))[0]
    wanted = reference.survivors(logits[0], min_p, top_k, top_p)
    allowed = logits[0] > float("-inf")
    if bool(allowed.any()) and not torch.equal(ours & allowed, wanted):
        # fp32 against fp64 sums: only the token at the crossing itself may differ.
        assert top_p < 1.0 and int((ours & allowed).sum() - wanted.sum()) in (-1, 1)


def test_edits_and_masks() -> None:
    logits = torch.randn(3, 700)
    entries = [
        [(5, 1.5, -1), (6, float("-inf"), 2), (7, 0.0, 3), (699, -2.0, 0)],
        [],
        [(token, 0.25, token % 4 - 1) for token in range(0, 690, 2)],
    ]
    penalties = [(1.3, 0.4, 0.1), (1.0, 0.0, 0.0), (0.8, -0.5, 0.7)]
    flat = [entry for row in entries for entry in row]
    edits = LogitEdits(
        torch.tensor([0, *np.cumsum([len(row) for row in entries])], dtype=torch.int32),
        torch.tensor([entry[0] for entry in flat], dtype=torch.int32),
        torch.tensor([entry[1] for entry in flat]),
        torch.tensor([entry[2] for entry in flat], dtype=torch.int32),
        *(torch.tensor(column) for column in zip(*penalties, strict=True)),
    )
    wanted = torch.stack([reference.edit_row(logits[row], entries[row], *penalties[row]) for row in range(3)])
    edit_logits(logits, edits)
    torch.testing.assert_close(logits, wanted, rtol=1e-6, atol=1e-6)

    edited = logits.clone()
    masks = torch.randint(-(2**31), 2**31 - 1, (2, 22), dtype=torch.int64).int()
    mask_logits(logits, masks, torch.tensor([1, -1, 0], dtype=torch.int32))
    ids = torch.arange(700)
    for row, mask in ((0, 1), (2, 0)):
        allowed = (masks[mask][ids // 32] >> (ids % 32)) & 1 == 1
        assert torch.equal(logits[row], torch.where(allowed, edited[row], float("-inf")))
    assert torch.equal(logits[1], edited[1])
    with pytest.raises(ValueError, match="21 words"):
        mask_logits(logits, masks[:, :21], torch.zeros(3, dtype=torch.int32))


def test_token_scores() -> None:
    logits = torch.randn(4, 2100) * 4
    logits[2] = logits[2].round()
    tokens = torch.tensor([0, 2099, 55, 1024], dtype=torch.int32)
    logprobs, ranks = token_scores(logits, tokens)
    for row, token in enumerate(tokens.tolist()):
        logprob, rank = reference.token_score(logits[row], token)
        assert abs(float(logprobs[row]) - logprob) < 1e-5 and int(ranks[row]) == rank
