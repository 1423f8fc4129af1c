from __future__ import annotations

from tandem.launcher.child import MAX_BACKOFF_S, Backoff, _exit_text


def test_backoff_grows_and_the_fifth_crash_within_a_minute_is_the_last() -> None:
    backoff = Backoff()
    waits = [backoff.crashed(float(second)) for second in range(5)]
    assert waits[4] is None
    grown = [wait for wait in waits if wait is not None]
    assert len(grown) == 4
    assert grown == sorted(grown)
    assert grown[0] < grown[-1] <= MAX_BACKOFF_S


def test_old_crashes_are_forgotten() -> None:
    backoff = Backoff()
    first = backoff.crashed(0.0)
    assert [backoff.crashed(minute * 61.0) for minute in range(1, 20)] == [first] * 19


def test_exit_codes_and_signals_are_told_apart() -> None:
    assert _exit_text(2) == "exit code 2"
    assert _exit_text(-9) == "signal SIGKILL"
