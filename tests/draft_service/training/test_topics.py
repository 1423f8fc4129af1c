"""Composed prompts: the same in every run, varied, and none of those that speed is measured with."""

from __future__ import annotations

from benchmarks.spec_prompts import CHAT, COPY
from draft_service.training.topics import compose


def test_depends_on_seed_and_index_alone() -> None:
    assert [compose(3, index) for index in range(50)] == [compose(3, index) for index in range(50)]
    assert compose(3, 1) != compose(4, 1)


def test_varied_and_whole() -> None:
    texts = [compose(0, index) for index in range(2000)]
    assert len(set(texts)) > 1800
    assert not any("{" in text or "}" in text for text in texts)


def test_benchmark_prompts_are_not_among_them() -> None:
    texts = [compose(seed, index) for seed in (0, 11, 12) for index in range(4000)]
    assert not any(prompt in text for text in texts for prompt in CHAT + COPY)
