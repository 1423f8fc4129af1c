from __future__ import annotations

import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.e2e.stack import Stack

ENGINES = 2


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/e2e" in str(item.path):
            item.add_marker("e2e")
            # A generous limit: these start several processes, maybe on a busy machine.
            item.add_marker(pytest.mark.timeout(600))


def _port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="session")
def start_stack() -> Iterator[Callable[..., Stack]]:
    """Starts any number of stacks, which are stopped at the end."""
    stacks: list[Stack] = []
    folders: list[Path] = []

    def start(*arguments: str, env: dict[str, str] | None = None, wait: bool = True) -> Stack:
        folder = Path(tempfile.mkdtemp(prefix="tt-", dir="/tmp"))
        folders.append(folder)
        stack = Stack(folder, _port(), *arguments, env=env)
        stacks.append(stack)
        return stack.wait_ready() if wait else stack

    yield start
    for stack in stacks:
        stack.stop()
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def stack(start_stack: Callable[..., Stack]) -> Stack:
    """Two engines with drafts, shared by the tests; each test leaves it as it found it."""
    return start_stack("--engines", str(ENGINES), "--kv-cache-bytes", str(256 * 1024 * 1024))
