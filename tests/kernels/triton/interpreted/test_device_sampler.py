"""The sampler on the device against the host's: same rows, same tokens."""

from __future__ import annotations

import numpy as np
import torch

from tandem.lm.device_sampler import DeviceSampler
from tandem.lm.processors import Row
from tandem.lm.sampler import Sampler
from tandem.lm.types import SamplingParams, Sequence

VOCAB = 300


def mask_of(ids: list[int]) -> np.ndarray:
    bits = np.zeros(320, dtype=np.uint8)
    bits[ids] = 1
    return np.packbits(bits, bitorder="little").view("<i4")


def row(params: SamplingParams, drafts: tuple[int, ...] = (), mask: np.ndarray | None = None, choice: int = 0) -> Row:
    tokens = [5, 6, 7, 5, 9, 10, 9]
    return Row(Sequence(id(params), choice, params, tokens, 4), drafts, mask)


ROWS = [
    row(SamplingParams(temperature=0.0)),
    row(SamplingParams(seed=2**64 - 3), choice=3),
    row(SamplingParams(seed=4, top_k=9, top_p=0.8, temperature=1.5)),
    row(SamplingParams(seed=5, repetition_penalty=1.7, temperature=0.3), drafts=(11, 12)),
    row(SamplingParams(seed=6, frequency_penalty=1.1, presence_penalty=-0.4), drafts=(9, 9)),
    row(SamplingParams(temperature=0.0, logit_bias=((5, 50.0), (6, 20.0), (7, float("-inf"))))),
    row(SamplingParams(seed=7, allowed_token_ids=(3, 8, 299))),
    row(SamplingParams(seed=8, allowed_token_ids=(3, 8)), mask=mask_of([8, 9])),
    row(SamplingParams(temperature=0.0, bad_words=((10, 9, 40), (41,), (9, 10, 42))), drafts=()),
    row(SamplingParams(temperature=0.0, min_tokens=9, stop_token_ids=(1, 2), logit_bias=((1, 90.0), (2, 80.0)))),
    row(SamplingParams(temperature=0.0, min_tokens=9, stop_token_ids=(1, 2)), mask=mask_of([2])),
    row(SamplingParams(seed=9), mask=mask_of([])),
    row(SamplingParams(seed=10, min_p=0.2, temperature=2.0)),
]


def test_rows_equal_the_host_sampler() -> None:
    logits = torch.randn(len(ROWS), VOCAB) * 3
    logits[8, 40:43] = 60.0
    before = logits.clone()
    wanted = Sampler(VOCAB).sample(logits.numpy(), ROWS)
    found = DeviceSampler(VOCAB, torch.device("cpu")).sample(logits, ROWS)
    assert torch.equal(logits, before), "the raw logits are still wanted for scores"
    assert found.errors == wanted.errors == {11: "NO_ALLOWED_TOKEN"}
    answered = [index for index in range(len(ROWS)) if index not in wanted.errors]
    assert found.ids[answered].tolist() == wanted.ids[answered].tolist()
    assert found.ids[7] == 8 and found.ids[10] == 2


def test_broken_logits_are_an_error_of_their_row() -> None:
    logits = torch.zeros(2, VOCAB)
    logits[1, 3] = float("nan")
    errors = DeviceSampler(VOCAB, torch.device("cpu")).sample(logits, [ROWS[0], ROWS[1]]).errors
    assert errors == {1: "INTERNAL"}
