"""When the watchdog calls a step hung, on a clock of its own."""

from __future__ import annotations

from engine_service.stats import LoopStats
from engine_service.watchdog import TICK_S, Watchdog

LIMIT = 10.0


class World:
    """A step loop's stats and a clock."""

    def __init__(self) -> None:
        self.now = 100.0
        self.stats = LoopStats()
        self.watchdog = Watchdog(self.stats, LIMIT, clock=lambda: self.now)

    def step(self) -> None:
        self.stats.step_started = self.now

    def run(self, seconds: float) -> bool:
        """Looks every tick for so long. Whether the last look found a hang."""
        hung = self.watchdog.look()
        for _ in range(round(seconds / TICK_S)):
            self.now += TICK_S
            hung = self.watchdog.look()
        return hung


def test_a_step_hangs_after_the_limit_not_before() -> None:
    world = World()
    world.step()
    assert not world.run(LIMIT)
    assert world.run(2 * TICK_S)
    world.stats.step_started = None
    assert not world.run(TICK_S)


def test_many_steps_do_not_add_up() -> None:
    world = World()
    for _ in range(10):
        world.step()
        assert not world.run(LIMIT / 4)


def test_idle_time_does_not_count() -> None:
    world = World()
    world.run(5 * LIMIT)
    world.step()
    assert not world.run(LIMIT - TICK_S)


def test_a_process_that_stood_still_has_no_hung_step() -> None:
    world = World()
    world.step()
    for _ in range(5):
        assert not world.run(1.0)
        world.now += 600.0
        assert not world.watchdog.look(), "it was stopped, and its step with it"
    assert world.run(LIMIT), "but what goes on hanging is found"


def test_the_limit_grows_with_the_longest_step_that_ended() -> None:
    world = World()
    world.step()
    world.run(8.0)
    world.now += 600.0
    world.watchdog.look()
    world.step()
    assert not world.run(20.0), "three times eight seconds are allowed, since a step took so long before"
    assert world.run(6.0)
