"""The native sampler against the reference's words and uniforms, and against plain numpy."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from kernels.cpu import abi, library
from kernels.cpu.sampling import NO_ALLOWED_TOKEN, NOT_A_NUMBER, SAMPLE, sample, score

VOCAB = 1003


def philox(seed: int, position: int, ids: np.ndarray, choice: int, purpose: int) -> np.ndarray:
    """First word of Philox4x32-10, in Python integers' own arithmetic."""
    words = []
    for token in ids.tolist():
        c, k = [position, token, choice, purpose], [seed & 0xFFFFFFFF, seed >> 32]
        for _ in range(10):
            a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
            c = [(b >> 32) ^ c[1] ^ k[0], b & 0xFFFFFFFF, (a >> 32) ^ c[3] ^ k[1], a & 0xFFFFFFFF]
            k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
        words.append(c[0])
    return np.asarray(words, np.uint32)


def gumbel(seed: int, position: int, ids: np.ndarray, choice: int = 0, purpose: int = 0) -> np.ndarray:
    u = ((philox(seed, position, ids, choice, purpose) >> 9).astype(np.float32) + 0.5) * np.float32(2.0**-23)
    return (-np.log(-np.log(u.astype(np.float64)))).astype(np.float32)


def params(rows: int, **values: float) -> np.ndarray:
    out = np.zeros(rows, SAMPLE)
    out["top_p"] = 1.0
    for name, value in values.items():
        out[name] = value
    return out


def expected(logits: np.ndarray, p: np.ndarray) -> int:
    """One row by full sort."""
    x = (logits / p["temperature"]).astype(np.float32)
    order = np.lexsort((np.arange(len(x)), -x))
    keep = np.isfinite(x[order])
    if p["min_p"] > 0:
        keep &= x[order] >= x.max() + np.log(p["min_p"])
    if p["top_k"] > 0:
        keep &= np.arange(len(x)) < p["top_k"]
    order = order[keep]
    if p["top_p"] < 1:
        weights = np.exp(x[order].astype(np.float64) - x.max())
        before = np.cumsum(weights) - weights
        order = order[(before < float(p["top_p"]) * weights.sum()) | (np.arange(len(order)) == 0)]
    y = x[order] + gumbel(int(p["seed"]), int(p["position"]), order, int(p["choice"]), int(p["purpose"]))
    return int(min(order[y == y.max()]))


def test_noise_is_the_reference(isa: str) -> None:
    seed = 0x9876543210ABCDEF
    fast, exact = np.empty(777, np.float32), np.empty(777, np.float32)
    view = abi.Sample(seed=seed, position=41, choice=3, purpose=0)
    library().td_noise(ctypes.byref(view), 777, fast.ctypes.data, exact.ctypes.data)
    reference = gumbel(seed, 41, np.arange(777), 3)
    assert np.array_equal(exact, reference)
    assert np.abs(fast - reference).max() < 2e-5


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"temperature": 0.3},
        {"temperature": 3.0},
        {"top_k": 1},
        {"top_k": 40},
        {"top_p": 0.95},
        {"top_p": 0.1},
        {"top_p": 0.9999},
        {"min_p": 0.05},
        {"top_k": 50, "top_p": 0.7, "min_p": 0.01},
        {"top_p": 0.8, "min_p": 0.1, "temperature": 2.0},
    ],
    ids=str,
)
@pytest.mark.parametrize("spread", [0.05, 2.0, 12.0])
def test_sampled_ids_equal_full_sort(isa: str, values: dict[str, float], spread: float) -> None:
    rng = np.random.default_rng(3)
    logits = (rng.standard_normal((24, VOCAB)) * spread).astype(np.float32)
    logits[rng.random(logits.shape) < 0.1] = -np.inf
    logits[:, ::7] = np.round(logits[:, ::7])
    given = params(24, **{"temperature": 1.0, **values})
    given["seed"] = rng.integers(0, 2**63, 24, dtype=np.uint64)
    given["position"], given["choice"] = np.arange(24), np.arange(24) % 3
    assert sample(logits, given).tolist() == [expected(logits[row], given[row]) for row in range(24)]


def test_greedy_takes_the_lowest_of_equals(isa: str) -> None:
    logits = np.zeros((3, VOCAB), np.float32)
    logits[1, [500, 77, 1002]] = 3.0
    logits[2] = -np.inf
    logits[2, 1002] = -5.0
    assert sample(logits, params(3)).tolist() == [0, 77, 1002]


def test_rows_without_an_answer(isa: str) -> None:
    logits = np.zeros((4, VOCAB), np.float32)
    logits[0] = -np.inf
    logits[1, 1001] = np.nan
    logits[2, 3] = np.inf
    for temperature in (0.0, 0.8):
        ids = sample(logits, params(4, temperature=temperature))
        assert ids[:3].tolist() == [NO_ALLOWED_TOKEN, NOT_A_NUMBER, NOT_A_NUMBER]
        assert ids[3] >= 0


def test_frequencies_follow_the_distribution(isa: str) -> None:
    weights = np.asarray([0.5, 0.3, 0.15, 0.05])
    logits = np.tile(np.log(weights).astype(np.float32), (20_000, 1))
    given = params(20_000, temperature=1.0)
    given["position"] = np.arange(20_000)
    counts = np.bincount(sample(logits, given), minlength=4)
    chi = ((counts - 20_000 * weights) ** 2 / (20_000 * weights)).sum()
    # 99.99% quantile of chi-square with three degrees of freedom.
    assert chi < 21.1


def test_scores_equal_log_softmax(isa: str) -> None:
    rng = np.random.default_rng(5)
    logits = (rng.standard_normal((9, VOCAB)) * 4).astype(np.float32)
    logits[4, :100] = -np.inf
    logits[5] = np.round(logits[5])
    rows = np.asarray([0, 3, 4, 5, 8], np.int32)
    ids = np.asarray([5, 100, 200, 300, 1002], np.int32)
    counts = np.asarray([0, 5, 20, 7, VOCAB], np.int32)
    found = score(logits, rows, ids, counts)
    for index, (row, token, count) in enumerate(zip(rows, ids, counts, strict=True)):
        x = logits[row].astype(np.float64)
        logprobs = x - x.max() - np.log(np.exp(x - x.max()).sum())
        assert abs(found.logprobs[index] - logprobs[token]) < 2e-6
        assert found.ranks[index] == (x > x[token]).sum() + 1
        order = np.lexsort((np.arange(VOCAB), -x))[:count]
        assert found.top_ids[index, :count].tolist() == order.tolist()
        assert np.allclose(found.top_logprobs[index, :count], logprobs[order], atol=2e-6)


def test_bad_arrays_are_refused(isa: str) -> None:
    logits = np.zeros((2, VOCAB), np.float32)
    with pytest.raises(ValueError, match="SAMPLE"):
        sample(logits, params(3))
    with pytest.raises(ValueError, match="fp32"):
        sample(logits.astype(np.float64), params(2))
    with pytest.raises(ValueError, match="below"):
        score(logits, np.asarray([2], np.int32), np.asarray([0], np.int32), np.asarray([0], np.int32))
