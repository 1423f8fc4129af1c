"""What the scheduler decides, case by case."""

from __future__ import annotations

import pytest

from engine_service.policy import SchedulerConfig, prefill_budget
from engine_service.requests import Status
from tandem.errors import TandemError
from tandem.lm.types import SamplingParams
from tests.engine_service.fakes import FakeRunner, FakeSpeculation
from tests.engine_service.harness import Harness


def harness(
    blocks: int = 64,
    seqs: int = 4,
    budget: int = 16,
    chunk: int = 8,
    policy: str = "fcfs",
    speculation: bool = False,
    age: float = 10.0,
) -> Harness:
    runner = FakeRunner(num_blocks=blocks, max_model_len=200)
    spec = FakeSpeculation(runner.next_token, 258) if speculation else None
    return Harness(runner, SchedulerConfig(seqs, budget, chunk, policy, age), spec)


def work(h: Harness) -> dict[int, tuple[int, int, int]]:
    """Per request of the last step: start, count, drafts."""
    owners = {c.sequence.id: r.id for r in h.requests.values() for c in r.choices}
    return {owners[s.sequence.id]: (s.start, s.count, len(s.drafts)) for s in h.runner.slices}


def test_a_lone_prompt_gets_the_whole_budget() -> None:
    h = harness()
    one = h.add(list(range(40)), 4)
    h.step()
    assert work(h) == {one: (0, 16, 0)}


def test_decodes_come_first_and_cap_prefill() -> None:
    h = harness()
    one = h.add([1, 2, 3], 20)
    h.step()
    two = h.add(list(range(40)), 4)
    h.step()
    assert work(h) == {one: (3, 1, 0), two: (0, 8, 0)}
    for start in range(8, 40, 8):
        h.step()
        assert work(h)[two] == (start, 8, 0), "a long prompt goes on in chunks"
        assert one in work(h), "and nobody who decodes waits for it"


def test_of_two_prompts_the_one_with_least_left_finishes_first() -> None:
    h = harness(budget=16, chunk=16)
    long, short = h.add(list(range(100)), 2), h.add(list(range(100, 120)), 2)
    h.step()
    h.step()
    steps = 0
    while h.requests[short].first_token is None:
        h.step()
        steps += 1
        assert long in work(h), "the oldest always gets a share"
    assert h.requests[long].first_token is None and steps <= 3
    h.finish()


def test_prompts_that_share_a_step_share_its_prefill_budget() -> None:
    config = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64, prefill_chunk=16, prefill_budget=12)
    h = Harness(FakeRunner(num_blocks=64, max_model_len=200), config, None)
    alone = h.add(list(range(40)), 4)
    h.step()
    assert work(h) == {alone: (0, 40, 0)}, "a lone prompt is not held back"
    prompts = [h.add([10 + index] * 8, 1) for index in range(4)]
    done: list[int] = []
    for _ in range(6):
        h.step()
        sizes = {request: count for request, (_, count, _) in work(h).items() if request != alone}
        assert sum(sizes.values()) <= 12
        done += [request for request in prompts if request not in done and h.requests[request].first_token is not None]
    assert done == prompts, "and they finish one after another, not all at the end"


def test_a_cpu_has_a_prefill_budget_of_its_own() -> None:
    assert prefill_budget(0, "cpu/avx2") == 64
    assert prefill_budget(7, "cpu/avx2") == 7
    assert prefill_budget(0, "triton/sm_90") == 0


def test_the_oldest_prompt_is_not_starved_by_short_ones() -> None:
    h = harness(seqs=3, budget=16, chunk=8)
    long = h.add(list(range(80)), 1)
    for index in range(200):
        if len(h.scheduler.requests) < 3:
            h.add([index % 250] * 9, 1)
        h.step()
        if h.requests[long].first_token is not None:
            break
    assert h.requests[long].first_token is not None and index < 60


def test_fcfs_preempts_the_latest_and_resumes_it() -> None:
    h = harness(blocks=10, seqs=3)
    first, second = h.add([1] * 9, 20), h.add([2] * 9, 20)
    h.finish()
    assert h.requests[first].preemptions == 0 and h.requests[second].preemptions > 0
    params = SamplingParams(temperature=0.0)
    for request, token in ((first, 1), (second, 2)):
        assert h.results[request].outputs[0] == h.expect([token] * 9, params, 0, 20), "recomputed output stays output"


def test_priority_goes_first_until_age_outweighs_it() -> None:
    h = harness(seqs=1, policy="priority")
    running = h.add([9], 3)
    h.step()
    low, high = h.add([1], 1, priority=1), h.add([2], 1, priority=-1)
    h.finish()
    order = sorted((low, high, running), key=lambda r: h.requests[r].first_token or 0)
    assert order.index(high) < order.index(low) or h.requests[high].steps
    h = harness(seqs=1, policy="priority", age=10.0)
    h.add([9], 3)
    h.step()
    old = h.add([1], 1, priority=1)
    h.now = 11.0
    new = h.add([2], 1, priority=0)
    h.now = 12.0
    waiting = [choice.request.id for choice in h.scheduler.waiting]
    h.step()
    waiting = [choice.request.id for choice in h.scheduler.waiting]
    assert waiting == [old, new], "11 s of waiting outweigh one step of priority"
    h.finish()


def test_priority_order_of_the_queue() -> None:
    h = harness(seqs=1, policy="priority")
    h.add([9], 3, priority=-2)
    h.step()
    low, high = h.add([1], 1, priority=1), h.add([2], 1, priority=-1)
    h.step()
    assert [choice.request.id for choice in h.scheduler.waiting] == [high, low]


def test_a_low_priority_is_preempted_for_a_high_one_never_the_reverse() -> None:
    h = harness(blocks=10, seqs=3, policy="priority")
    low = h.add([1] * 9, 20, priority=5)
    h.step()
    high = h.add([2] * 9, 20, priority=0)
    h.finish()
    assert h.requests[low].preemptions > 0 and h.requests[high].preemptions == 0


def test_a_waiting_high_priority_takes_the_seat_of_the_last_in_order() -> None:
    h = harness(seqs=2, policy="priority")
    mid, low = h.add([1] * 9, 12, priority=1), h.add([2] * 9, 12, priority=2)
    h.step()
    h.step()
    high = h.add([3] * 9, 4, priority=0)
    h.step()
    assert set(work(h)) == {mid, high}, "seated in the step in which it came"
    h.finish()
    assert [h.requests[r].preemptions for r in (high, mid, low)] == [0, 0, 1]
    params = SamplingParams(temperature=0.0)
    for request, token, count in ((high, 3, 4), (mid, 1, 12), (low, 2, 12)):
        assert h.results[request].outputs[0] == h.expect([token] * 9, params, 0, count)


def test_a_request_of_several_choices_takes_seats_only_if_all_of_them_can_be_had() -> None:
    h = harness(seqs=3, policy="priority", budget=32, chunk=32)
    first, low = h.add([1] * 5, 12, priority=-1), h.add([2] * 5, 12, n=2, priority=5)
    h.step()
    h.step()
    three = h.add([3] * 5, 3, n=3, priority=0)
    h.step()
    assert h.requests[low].preemptions == 0, "two seats would not be enough, so none is taken"
    two = h.add([4] * 5, 3, n=2, priority=-1)
    h.step()
    assert set(work(h)) == {first, two} and h.requests[low].preemptions == 2
    h.finish()
    assert h.requests[three].preemptions == h.requests[two].preemptions == 0


@pytest.mark.parametrize("priority", [0, 3])
def test_no_seat_is_taken_from_an_equal_or_sooner_one(priority: int) -> None:
    h = harness(seqs=1, policy="priority")
    running = h.add([1] * 5, 8)
    h.step()
    h.add([2] * 5, 8, priority=priority)
    h.finish()
    assert h.requests[running].preemptions == 0


def test_fcfs_knows_no_priority() -> None:
    h = harness(seqs=1)
    running = h.add([1] * 5, 8, priority=5)
    h.step()
    h.add([2] * 5, 8, priority=-5)
    h.finish()
    assert h.requests[running].preemptions == 0


def test_expired_leaves_queue_and_batch_in_the_same_step() -> None:
    h = harness(seqs=1)
    running, waiting = h.add([1] * 5, 50, deadline=5.0), h.add([2] * 5, 5, deadline=5.0)
    h.step()
    h.now = 5.0
    assert not h.step()
    for request in (running, waiting):
        error = h.results[request].error
        assert error is not None and error.reason == "DEADLINE"
    assert h.pool.num_used == 0 and not h.scheduler.has_work


def test_fully_cached_prompt_recomputes_its_last_token_in_a_block_of_its_own() -> None:
    h = harness()
    prompt = list(range(16))
    h.add(prompt, 1)
    h.finish()
    copies: list[tuple[int, int]] = []
    copy_blocks = h.runner.copy_blocks
    h.runner.copy_blocks = lambda pairs: (copies.extend(pairs), copy_blocks(pairs))[1]  # type: ignore[method-assign]
    again = h.add(prompt, 3)
    h.step()
    assert work(h) == {again: (15, 1, 0)}
    assert h.requests[again].cached_tokens == 15 and len(copies) == 1
    h.finish()


def test_cached_block_is_given_up_when_no_other_is_free() -> None:
    h = harness(blocks=4)
    prompt = list(range(16))
    h.add(prompt, 1)
    h.finish()
    again = h.add(prompt, 1)
    h.finish(limit=5)
    assert h.results[again].error is None and h.results[again].outputs[0] == h.results[1].outputs[0]


def test_choices_prefill_once_and_fork() -> None:
    h = harness(seqs=4, budget=32, chunk=32)
    params = SamplingParams(temperature=1.0, seed=1)
    request = h.add(list(range(10)), 4, n=4, params=params)
    h.step()
    assert [s.count for s in h.runner.slices] == [10]
    h.step()
    assert sorted((s.start, s.count) for s in h.runner.slices) == [(9, 1)] * 3 + [(10, 1)]
    tables = [choice.blocks for choice in h.requests[request].choices]
    assert len({tuple(table[:2]) for table in tables}) == 1, "full prompt blocks are shared"
    assert len({table[2] for table in tables}) == 4, "the partial one is not"
    h.finish()
    for index in range(4):
        assert h.results[request].outputs[index] == h.expect(list(range(10)), params, index, 4)


def test_forked_choices_never_exceed_the_seats() -> None:
    h = harness(seqs=4)
    h.add(list(range(10)), 6, n=3)
    h.add(list(range(20, 30)), 6, n=3)
    h.finish()
    assert h.runner.max_seqs_seen <= 4


def test_drafts_are_cut_to_budget_and_memory() -> None:
    h = harness(blocks=8, budget=6, seqs=2, chunk=6, speculation=True)
    h.add([1] * 6, 20)
    h.add([2] * 6, 20)
    h.finish()
    assert h.runner.max_tokens_seen <= 6


def test_rejected_drafts_keep_no_blocks() -> None:
    h = harness(speculation=True, blocks=40)
    request = h.add([5] * 7, 40)
    h.step()
    while h.scheduler.has_work:
        h.step()
        for choice in h.requests[request].choices:
            if choice.status is Status.RUNNING:
                assert len(choice.blocks) == -(-choice.num_computed // 4)


def test_prompt_scores_read_no_cache_but_fill_it() -> None:
    h = harness()
    prompt = list(range(20))
    h.add(prompt, 1)
    h.finish()
    scored = h.add(prompt, 2, score_prompt=True)
    h.step()
    assert work(h)[scored][0] == 0
    h.finish()
    assert h.requests[scored].cached_tokens == 0 and h.results[scored].prompt_scores == 19


def test_salts_do_not_share() -> None:
    h = harness()
    h.add(list(range(16)), 1, salt=b"a")
    h.finish()
    other = h.add(list(range(16)), 1, salt=b"b")
    h.finish()
    assert h.requests[other].cached_tokens == 0


def test_whole_need_beyond_the_pool_is_refused() -> None:
    h = harness(blocks=4)
    request = h.add(list(range(10)), 8)
    h.step()
    error = h.results[request].error
    assert isinstance(error, TandemError) and error.reason == "NEVER_FITS"
    fits = h.add(list(range(10)), 7)
    h.finish()
    assert h.results[fits].finishes == {0: "length"}


def test_budget_below_seats_is_refused() -> None:
    with pytest.raises(ValueError, match="at least max_num_seqs"):
        SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=7, prefill_chunk=4)
