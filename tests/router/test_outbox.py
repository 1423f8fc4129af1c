"""The outbox: first bytes at once, a backlog in few messages, a bound for slow readers."""

from __future__ import annotations

import asyncio

from router.outbox import MAX_WRITE_BYTES, Outbox
from tandem.pace import Pace


class Writer:
    """A client that takes `pause` seconds per message."""

    def __init__(self, pause: float = 0.0) -> None:
        self.messages: list[bytes] = []
        self.pause = pause

    async def write(self, data: bytes) -> None:
        self.messages.append(data)
        await asyncio.sleep(self.pause)


async def test_each_message_at_once_while_there_is_no_backlog() -> None:
    writer = Writer()
    outbox = Outbox(writer.write, 1000)
    task = asyncio.create_task(outbox.run())
    for number in range(5):
        outbox.put(bytes([number]))
        await asyncio.sleep(0.001)
    assert writer.messages == [bytes([number]) for number in range(5)]
    outbox.close()
    await task


async def test_backlog_is_joined_in_order() -> None:
    writer = Writer(0.02)
    outbox = Outbox(writer.write, 1000)
    task = asyncio.create_task(outbox.run())
    for number in range(50):
        outbox.put(bytes([number]))
        await asyncio.sleep(0.001)
    outbox.close()
    await task
    assert b"".join(writer.messages) == bytes(range(50))
    assert len(writer.messages) < 15


async def test_full_buffer_holds_the_engine_back() -> None:
    writer = Writer(0.05)
    outbox = Outbox(writer.write, 100)
    task = asyncio.create_task(outbox.run())
    assert not outbox.put(bytes(50))
    assert outbox.put(bytes(80))
    await asyncio.wait_for(outbox.room(), 1)
    outbox.close()
    await task
    assert sum(map(len, writer.messages)) == 130


async def test_messages_stay_under_the_clients_limit() -> None:
    writer = Writer()
    outbox = Outbox(writer.write, 10 * MAX_WRITE_BYTES)
    for _ in range(5):
        outbox.put(bytes(MAX_WRITE_BYTES // 2))
    outbox.close()
    await outbox.run()
    assert [len(message) for message in writer.messages] == [MAX_WRITE_BYTES, MAX_WRITE_BYTES, MAX_WRITE_BYTES // 2]


async def test_busy_process_spaces_its_writes_but_not_the_first_token() -> None:
    writer = Writer()
    pace = Pace(0.05)
    pace.seconds = 0.05
    outbox = Outbox(writer.write, 1000, pace)
    task = asyncio.create_task(outbox.run())
    outbox.put(b"a")
    await asyncio.sleep(0.001)
    outbox.no_pause()
    outbox.put(b"f")
    await asyncio.sleep(0.001)
    assert writer.messages == [b"a", b"f"]
    for _ in range(20):
        outbox.put(b"x")
        await asyncio.sleep(0.001)
    outbox.close()
    await task
    assert b"".join(writer.messages) == b"af" + 20 * b"x"
    assert len(writer.messages) <= 5


def test_pace_follows_the_load() -> None:
    pace = Pace(0.02)
    pace._busy, pace._cpu, pace._wall = 0.0, pace._cpu, pace._wall - 1.0
    pace.tick()
    assert pace.seconds == 0.0
    pace._cpu, pace._wall, pace._busy = pace._cpu - 1.0, pace._wall - 1.0, 0.9
    pace.tick()
    assert pace.seconds == 0.02
