"""The same request along different paths: equal tokens and bitwise-equal logprobs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tandem.lm.types import Runner, SamplingParams
from tests.lm.driver import Driver, Job, Proposer

LENGTH = 8
SAMPLINGS = {
    "greedy": SamplingParams(temperature=0.0, logprobs=3),
    "seeded": SamplingParams(temperature=1.0, seed=2**63 + 11, logprobs=3),
    "truncated": SamplingParams(temperature=0.9, top_k=40, top_p=0.9, min_p=0.01, seed=3, logprobs=3),
    "penalties": SamplingParams(
        temperature=0.7, seed=5, repetition_penalty=1.3, frequency_penalty=0.4, presence_penalty=0.2, logprobs=3
    ),
}


def prompt_of(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 1000, size=length).tolist()


PROMPT = prompt_of(0, 150)


@pytest.fixture(scope="module")
def alone(tiny: Runner) -> dict[str, Job]:
    """Each sampling run alone, in one piece, without drafts."""
    found = {name: Job(PROMPT, params, LENGTH) for name, params in SAMPLINGS.items()}
    for job in found.values():
        Driver(tiny).run([job])
    assert found["greedy"].output != found["seeded"].output
    return found


def same(job: Job, expected: Job) -> None:
    assert job.output == expected.output
    # Dataclass equality of floats: bit for bit.
    assert job.scores == expected.scores


@pytest.mark.parametrize("chunk", [1_000, 64, 37, 16])
def test_chunked_in_a_batch(tiny: Runner, alone: dict[str, Job], chunk: int) -> None:
    jobs = {name: Job(PROMPT, params, LENGTH) for name, params in SAMPLINGS.items()}
    mates = [Job(prompt_of(1 + i, 3 + 29 * i), SAMPLINGS["seeded"], LENGTH + i) for i in range(3)]
    Driver(tiny).run([mates[0], *jobs.values(), *mates[1:]], chunk=chunk)
    for name, job in jobs.items():
        same(job, alone[name])


def right(expected: list[int]) -> Proposer:
    return lambda tokens: tuple(expected[len(tokens) - len(PROMPT) :][:4])


def wrong(tokens: list[int]) -> tuple[int, ...]:
    return (7, 8, 9)


def half_right(expected: list[int]) -> Proposer:
    def propose(tokens: list[int]) -> tuple[int, ...]:
        ahead = expected[len(tokens) - len(PROMPT) :][:2]
        return (*ahead, 11, 12)

    return propose


@pytest.mark.parametrize("name", list(SAMPLINGS))
def test_speculation(tiny: Runner, alone: dict[str, Job], name: str) -> None:
    for propose in (right(alone[name].output), wrong, half_right(alone[name].output)):
        job = Job(PROMPT, SAMPLINGS[name], LENGTH)
        Driver(tiny).run([job], propose=propose)
        same(job, alone[name])
        assert (job.accepted == 0) == (propose is wrong)


@pytest.mark.parametrize("cached", [16, 128, 149])
def test_cached_prefix(tiny: Runner, alone: dict[str, Job], cached: int) -> None:
    driver = Driver(tiny)
    first = Job(PROMPT[:cached], SAMPLINGS["greedy"], 1)
    table = driver.blocks(len(PROMPT) + LENGTH + 8)
    driver.run([first], tables=[table])
    for name in ("greedy", "seeded"):
        job = Job(PROMPT, SAMPLINGS[name], LENGTH)
        driver.run([job], tables=[table], computed=[cached])
        same(job, alone[name])


def test_recomputed_after_preemption(tiny: Runner, alone: dict[str, Job]) -> None:
    """Output tokens that are recomputed as context give the same next tokens."""
    from tandem.lm.types import Sequence, Slice

    expected = alone["seeded"]
    tokens = PROMPT + expected.output[:4]
    sequence = Sequence(99, 0, SAMPLINGS["seeded"], list(tokens), len(PROMPT))
    table = Driver(tiny).blocks(len(tokens))
    output = tiny.execute([Slice(sequence, table, 0, len(tokens))])[0]
    assert output.token_ids == [expected.output[4]]
    assert output.scores == [expected.scores[4]]


def kv_tensors(runner: Runner) -> list[Any]:
    """K and V of all layers, as what can be filled with NaN."""
    kv = runner._kv  # type: ignore[attr-defined]
    cache = getattr(kv, "_cache", kv)
    found = [*cache.keys, *cache.values]
    # The kernels hold bf16 as uint16; all ones there is a NaN.
    return [
        torch.from_numpy(item).view(torch.bfloat16) if getattr(item, "dtype", None) == "uint16" else item
        for item in found
    ]


def test_unused_slots_may_hold_nan(tiny: Runner, alone: dict[str, Job]) -> None:
    tensors = kv_tensors(tiny)
    for tensor in tensors:
        tensor[:] = float("nan")
    job = Job(PROMPT, SAMPLINGS["seeded"], 3)
    Driver(tiny).run([job, Job(prompt_of(5, 20), SAMPLINGS["greedy"], 3)], propose=wrong)
    assert job.output == alone["seeded"].output[:3]
    assert job.scores == alone["seeded"].scores[:3]
    for tensor in tensors:
        tensor[:] = 0


def test_copied_blocks_are_equal(tiny: Runner, alone: dict[str, Job]) -> None:
    driver = Driver(tiny)
    first = Job(PROMPT, SAMPLINGS["greedy"], 1)
    table = driver.run([first])[0]
    copy = driver.blocks(len(PROMPT) + LENGTH + 8)
    tiny.copy_blocks(list(zip(table, copy, strict=False)))
    job = Job(PROMPT, SAMPLINGS["seeded"], LENGTH)
    driver.run([job], tables=[copy], computed=[len(PROMPT) - 1])
    same(job, alone["seeded"])


@pytest.mark.parametrize("threads", [3])
def test_thread_counts_keep_the_promise(tiny: Runner, threads: int) -> None:
    if not tiny.spec.kernel_path.endswith("torch"):
        pytest.skip("the kernels' own tests vary their threads")
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        job, again = (Job(PROMPT, SAMPLINGS["seeded"], 4) for _ in range(2))
        Driver(tiny).run([job])
        mates = [Job(prompt_of(1 + i, 3 + 29 * i), SAMPLINGS["seeded"], 4) for i in range(3)]
        Driver(tiny).run([*mates, again], chunk=37, propose=wrong)
        same(again, job)
    finally:
        torch.set_num_threads(before)


def test_real_model_on_two_paths(smollm: Runner) -> None:
    """The default model: alone in one piece, and chunked in a batch with drafts."""
    params = SAMPLINGS["seeded"]
    alone, again = (Job([1, 4093, 198, *prompt_of(0, 70)], params, 4) for _ in range(2))
    Driver(smollm).run([alone])
    mates = [Job(prompt_of(1 + i, 5 + 20 * i), params, 4) for i in range(2)]
    Driver(smollm).run([mates[0], again, mates[1]], chunk=29, propose=wrong)
    same(again, alone)
