"""The first code of a child process: ties its life to the launcher's, then becomes the service.

    python -m tandem.launcher.guard LAUNCHER_PID gateway --port 8000 …

On Linux the kernel kills the child when the launcher dies (PR_SET_PDEATHSIG); the launcher's watchdog (see
tandem.launcher.watchdog) kills whatever is left of the child's process group, and does the whole work elsewhere.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """Makes the kernel kill this process when its parent dies; exits at once if `parent` is gone already."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    # The parent may have died before the line above.
    if os.getppid() != parent:
        os._exit(1)


def main() -> None:
    parent, *arguments = sys.argv[1:]
    die_with_parent(int(parent))
    from tandem.cli.main import main as cli

    cli(arguments)


if __name__ == "__main__":
    main()
