"""A tiny shell process that outlives a killed launcher and leaves nothing behind.

It reads process groups from a pipe that only the launcher holds open. When the pipe ends, and that is also so after
`kill -9`, it kills the groups that are still listed and removes the run directory. A shell, because it costs 1 MB.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

_SCRIPT = r"""
trap '' INT TERM HUP QUIT
groups=" "
while read -r verb group; do
    case $verb in
        add) groups="$groups$group " ;;
        drop) groups="${groups%% "$group" *} ${groups#* "$group" }" ;;
    esac
done
for group in $groups; do kill -s KILL -- "-$group" 2>/dev/null; done
rm -rf -- "$1"
"""


class Watchdog:
    """Owns the pipe. `add` and `drop` name process groups; `close` lets the watchdog end."""

    def __init__(self, run_dir: Path) -> None:
        self._process = subprocess.Popen(
            ["/bin/sh", "-c", _SCRIPT, "tandem-watchdog", str(run_dir)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
            text=True,
        )

    def _say(self, verb: str, group: int) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(f"{verb} {group}\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            # Someone killed it: children still die with the launcher on Linux, so serving goes on.
            return

    def add(self, group: int) -> None:
        self._say("add", group)

    def drop(self, group: int) -> None:
        self._say("drop", group)

    def close(self) -> None:
        """Ends the watchdog, which kills what is still listed and removes the run directory."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.close()
        except BrokenPipeError:
            return
        self._process.wait(timeout=5)
