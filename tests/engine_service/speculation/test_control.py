"""Length control: what it learns, what it chooses, and what it costs when drafts do not pay."""

from __future__ import annotations

import itertools
import random

import pytest

from engine_service.speculation.control import Acceptance, AskPolicy, CostModel, LengthControl, Offer


def taught(cost: dict[int, float]) -> LengthControl:
    control = LengthControl()
    for _ in range(20):
        for rows, took in cost.items():
            control.learn(rows, took)
    return control


# Milliseconds per step of a CPU engine: verifying four rows costs little more than one.
CPU = {1: 5.0, 2: 5.5, 4: 6.0, 8: 9.0, 16: 15.0, 32: 26.0, 64: 48.0}
# An engine whose steps cost in proportion to their rows.
LINEAR = {rows: 4.0 * rows for rows in (1, 2, 3, 4, 5, 6, 8, 9, 16, 32)}


def test_cost_is_interpolated_between_measured_rows() -> None:
    cost = taught(CPU).cost
    assert cost.predict(4) == pytest.approx(6.0)
    assert cost.predict(6) == pytest.approx(7.5)
    assert cost.predict(128) > cost.predict(64)


def test_more_rows_that_were_cheaper_since_correct_a_bad_moment() -> None:
    cost = CostModel()
    for rows, took in ((1, 4.0), (2, 6.0), (3, 4.4), (4, 4.6)):
        for _ in range(5):
            cost.learn(rows, took)
    assert cost.predict(2) == pytest.approx(cost.predict(3))
    # What was measured last is believed, though it is more.
    for _ in range(5):
        cost.learn(2, 6.0)
    assert cost.predict(2) > cost.predict(3)


def test_cost_follows_a_change_and_shrugs_off_outliers() -> None:
    cost = taught(CPU).cost
    cost.learn(1, 5000.0)
    assert cost.predict(1) < 7.0
    for _ in range(60):
        cost.learn(1, 8.0)
    assert cost.predict(1) == pytest.approx(8.0, rel=0.02)


def test_a_slow_moment_does_not_make_drafts_look_dear() -> None:
    """Rows measured while others had the core stay comparable with those measured after it."""
    cost = CostModel()
    for rows, took in ((1, 14.0), (1, 14.0), (2, 16.0), (1, 13.5), (2, 16.5), (3, 19.0), (1, 14.0), (1, 14.0)):
        cost.learn(rows, took)
    for _ in range(40):
        cost.learn(1, 6.2)
    assert cost.predict(2) < 1.32 * cost.predict(1) < 8.5


def test_cost_never_predicts_zero_or_less() -> None:
    cost = CostModel()
    cost.learn(8, 4.0)
    cost.learn(2, 6.0)
    assert all(cost.predict(rows) > 0 for rows in range(1, 500))


def test_sure_drafts_are_run_long_and_unlikely_ones_not_at_all() -> None:
    control = taught(CPU)
    assert control.allocate(1, [Offer(7, (0.97,) * 8)])[7] >= 7
    assert control.allocate(1, [Offer(7, (0.02,) * 8)]) == {}


def test_no_drafts_where_rows_cost_as_much_as_steps() -> None:
    control = taught(LINEAR)
    control.trial_interval = 10**9
    assert control.allocate(1, [Offer(7, (0.9,) * 8)]) == {}


def test_rows_go_to_the_likeliest_sequences() -> None:
    lengths = taught(CPU).allocate(2, [Offer(1, (0.3,) * 8), Offer(2, (0.95,) * 8)])
    assert lengths.get(2, 0) > lengths.get(1, 0)


def test_full_load_seeks_nothing_and_tries_nothing() -> None:
    control = taught({**CPU, 33: 28.0, 40: 33.0})
    assert not any(control.seek(32, 0.9) for _ in range(10_000))
    assert control.seek(1, 0.9)


@pytest.mark.parametrize("batch", [1, 4])
def test_best_fixed_length_is_not_beaten_by_much(batch: int) -> None:
    """No regret: over the chance of a draft, choosing by the model is near the best fixed length in hindsight."""
    control = taught(CPU)
    cost = control.cost
    for chance in (0.05, 0.2, 0.5, 0.7, 0.9):

        def rate(length: int, chance: float = chance) -> float:
            tokens = batch * sum(chance**i for i in range(length + 1))
            return tokens / cost.predict(batch * (1 + length))

        lengths = control.allocate(batch, [Offer(i, (chance,) * 12) for i in range(batch)])
        gained = sum(sum(chance**i for i in range(1, count + 1)) for count in lengths.values())
        chosen = (batch + gained) / cost.predict(batch + sum(lengths.values()))
        assert chosen >= 0.97 * max(rate(length) for length in range(13))


def test_trials_that_change_nothing_become_rare() -> None:
    control = taught(LINEAR)
    tried = [step for step in range(20_000) if control.allocate(1, [Offer(1, (0.9,) * 8)])]
    assert 3 <= len(tried) <= 20
    gaps = [b - a for a, b in itertools.pairwise(tried)]
    assert gaps[-1] > 4 * gaps[0]


def test_a_cost_measured_in_a_bad_moment_is_corrected_by_trials() -> None:
    control = taught({1: 5.0, 4: 60.0})
    ran = 0
    for _ in range(3_000):
        count = control.allocate(1, [Offer(1, (0.9,) * 3)]).get(1, 0)
        control.learn(1 + count, 5.0 + 0.3 * count)
        ran += count > 0
    assert ran > 1_000


def test_acceptance_is_learnt_separately_for_first_and_following() -> None:
    acceptance = Acceptance()
    rng = random.Random(1)
    for _ in range(500):
        if rng.random() < 0.3:
            acceptance.learn(True, 9, True)
        else:
            acceptance.learn(True, 0, True)
    assert acceptance.first(0.5) == pytest.approx(0.3, abs=0.12)
    assert acceptance.following(0.5) == pytest.approx(8 / 9, abs=0.05)


def test_false_claims_lose_their_credit() -> None:
    acceptance = Acceptance()
    assert acceptance.first_given(0.9) == pytest.approx(0.9)
    for _ in range(50):
        acceptance.learn(True, 0, True, claimed=0.9)
    assert acceptance.first_given(0.9) < 0.1


def test_fruitless_questions_become_rare_and_a_fruitful_one_restores_them() -> None:
    policy = AskPolicy()
    asked = []
    for step in range(2_000):
        policy.skip()
        if policy.ripe:
            policy.asked()
            asked.append(step)
            policy.learn(0, pays=False)
    assert len(asked) < 45
    policy.learn(5, pays=False)
    assert policy.interval == 1


def test_the_plain_step_stays_measured() -> None:
    """Drafts that once paid are given up when plain steps have become cheap."""
    control = taught({1: 50.0, 4: 52.0, 9: 55.0})
    plain = 0
    for _ in range(2_000):
        count = control.allocate(1, [Offer(1, (0.8,) * 8)]).get(1, 0)
        control.learn(1 + count, 5.0 * (1 + count))
        plain += count == 0
    assert plain > 1_000


def test_a_first_measurement_in_a_bad_moment_is_not_believed_whole() -> None:
    cost = taught({1: 20.0, 2: 21.0}).cost
    cost.learn(4, 200.0)
    assert cost.predict(4) < 40.0
    for _ in range(10):
        cost.learn(4, 200.0)
    assert cost.predict(4) > 120.0
