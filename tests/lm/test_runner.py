"""The runner's contract: prompt scores, masks in verification, bad slices, settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tandem.lm.runner import load_runner
from tandem.lm.runner_settings import RunnerSettings
from tandem.lm.types import Runner, SamplingParams, Sequence, Slice, TokenScore
from tests.lm.driver import Driver, Job

PROMPT = np.random.default_rng(2).integers(0, 1000, size=100).tolist()
GREEDY = SamplingParams(temperature=0.0, logprobs=2, prompt_logprobs=2)


def sequence(params: SamplingParams = GREEDY, tokens: list[int] = PROMPT) -> Sequence:
    return Sequence(7, 0, params, list(tokens), len(tokens))


def prompt_scores(runner: Runner, chunk: int, mate: bool) -> list[TokenScore]:
    own, table = sequence(), Driver(runner).blocks(len(PROMPT))
    other = Slice(sequence(tokens=PROMPT[:9]), [60], 0, 9)
    found: list[TokenScore] = []
    for start in range(0, len(PROMPT), chunk):
        count = min(chunk, len(PROMPT) - start)
        item = Slice(own, table, start, count, sample=start + count == len(PROMPT), score_prompt=True)
        outputs = runner.execute([other, item] if mate else [item])
        found += outputs[-1].prompt_scores or []
        assert bool(outputs[-1].token_ids) == item.sample
    return found


def test_prompt_scores_do_not_depend_on_the_path(tiny: Runner) -> None:
    whole = prompt_scores(tiny, 100, False)
    assert [score.id for score in whole] == PROMPT[1:]
    for chunk, mate in ((100, True), (31, False), (31, True), (64, True)):
        assert prompt_scores(tiny, chunk, mate) == whole


def test_prompt_scores_and_samples_together(tiny: Runner) -> None:
    table = Driver(tiny).blocks(len(PROMPT) + 1)
    scored = tiny.execute([Slice(sequence(), table, 0, len(PROMPT), score_prompt=True)])[0]
    plain = tiny.execute([Slice(sequence(), table, 0, len(PROMPT))])[0]
    assert scored.token_ids == plain.token_ids and scored.scores == plain.scores
    assert plain.prompt_scores is None


def test_a_mask_per_row_ends_acceptance(tiny: Runner) -> None:
    job = Job(PROMPT, GREEDY, 4)
    Driver(tiny).run([job])
    first, second = job.output[:2]
    words = -(-1000 // 32)
    mask = np.full((3, words), -1, np.int32)
    mask[1] = 0
    mask[1, 5] = 1 << 3
    own = sequence()
    item = Slice(own, Driver(tiny).blocks(120), 0, len(PROMPT), (first, second), mask=mask)
    output = tiny.execute([item])[0]
    assert output.token_ids == [first, 5 * 32 + 3] and output.accepted == 1
    mask[1, 5] = 0
    output = tiny.execute([item])[0]
    assert output.token_ids == [first] and output.accepted == 1 and output.error == "NO_ALLOWED_TOKEN"
    # A row after a mismatch is never reached, whatever its mask.
    wrong = Slice(own, item.block_table, 0, len(PROMPT), ((first + 1) % 1000, second), mask=mask)
    output = tiny.execute([wrong])[0]
    assert output.token_ids == [first] and output.error is None


def test_no_slices_no_work(tiny: Runner) -> None:
    assert tiny.execute([]) == []


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"start": 90, "count": 20}, "outside its 100 tokens"),
        ({"count": 0}, "outside its 100 tokens"),
        ({"count": 50, "drafts": (3,)}, "drafts need a slice that reaches token 100"),
        ({"block_table": [0, 1]}, "2 blocks of 16 do not hold 100 tokens"),
        ({"block_table": [0, 1, 2, 3, 4, 5, 10**6]}, "block table leaves"),
        ({"mask": np.zeros((2, 32), np.int32)}, "mask has 2 rows, expected 1"),
        ({"drafts": (3,), "distributions": ()}, "1 drafts, but 0 distributions"),
    ],
)
def test_bad_slices_name_what_is_wrong(tiny: Runner, change: dict[str, Any], reason: str) -> None:
    fields: dict[str, Any] = {"block_table": list(range(8)), "start": 0, "count": 100}
    with pytest.raises(ValueError, match=reason):
        tiny.execute([Slice(sequence(), **(fields | change))])


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dtype": "float8"}, "dtype is 'float8'"),
        ({"kv_dtype": "int4"}, "kv_dtype is 'int4'"),
        ({"block_size": 17}, "block_size is 17"),
        ({"max_num_seqs": 0}, "max_num_seqs is 0"),
        ({"max_model_len": 4096}, "max_model_len is 4096, but the model has 2048"),
        ({"kv_cache_bytes": 100}, "kv_cache_bytes is 100"),
        ({"numerics": "exact", "dtype": "bfloat16"}, "numerics exact means float32"),
        ({"kernels": "torch", "kv_dtype": "int8"}, "kv_dtype is 'int8'"),
    ],
)
def test_bad_settings_name_field_and_limit(tiny_path: Path, change: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        load_runner(RunnerSettings(tiny_path, **({"threads": 1, "kv_cache_bytes": 1 << 20} | change)))


def test_numerics_id_tells_what_changes_bits(tiny_path: Path) -> None:
    def id_of(**change: Any) -> str:
        settings = {"kernels": "torch", "threads": 1, "kv_cache_bytes": 1 << 20} | change
        return load_runner(RunnerSettings(tiny_path, **settings)).spec.numerics_id

    base = id_of()
    assert id_of(kv_cache_bytes=2 << 20, max_num_seqs=3) == base
    others = [id_of(kv_dtype="bfloat16"), id_of(dtype="bfloat16"), id_of(numerics="exact")]
    assert len({base, *others}) == 4


def test_numerics_id_tells_the_arithmetic_of_the_kernels(tiny_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = pytest.importorskip("kernels.cpu")
    if not cpu.available():
        pytest.skip(cpu.reason())

    def id_now() -> str:
        settings = RunnerSettings(tiny_path, kernels="native", threads=1, kv_cache_bytes=1 << 20)
        return load_runner(settings).spec.numerics_id

    before = id_now()
    assert id_now() == before
    monkeypatch.setitem(cpu.ARITHMETIC, cpu.isa(), 99)
    assert id_now() != before


def test_kv_memory_is_untouched_until_used(tiny_path: Path) -> None:
    import psutil

    before = psutil.Process().memory_info().rss
    runner = load_runner(RunnerSettings(tiny_path, kernels="torch", threads=1, kv_cache_bytes=1 << 30))
    assert runner.spec.num_blocks * runner.spec.block_bytes > 1000 << 20
    assert psutil.Process().memory_info().rss - before < 200 << 20
