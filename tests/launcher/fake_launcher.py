"""A launcher over stand-in services: python fake_launcher.py RUN_DIR PORT BEHAVIOUR_OF_ENGINE [LIMIT_S]."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from pathlib import Path

from tandem.launcher.plan import ChildSpec, Plan
from tandem.launcher.supervisor import Supervisor
from tandem.launcher.watchdog import Watchdog

FAKE = str(Path(__file__).with_name("fake_service.py"))


def make_plan(run_dir: Path, port: int, engine: str) -> Plan:
    url = f"http://127.0.0.1:{port}"

    def child(name: str, address: str, behaviour: str = "good") -> ChildSpec:
        service = name.partition("-")[0]
        return ChildSpec(name, service, (service, address, behaviour), address)

    children = (
        child("gateway", url),
        child("router", f"unix:{run_dir}/router.sock"),
        child("engine-0", f"unix:{run_dir}/engine-0.sock", engine),
    )
    return Plan(children, dict(os.environ), url, children[1].address, "", 1)


async def run(run_dir: Path, port: int, engine: str, limit_s: float) -> int:
    watchdog = Watchdog(run_dir)
    supervisor = Supervisor(make_plan(run_dir, port, engine), watchdog, limit_s, command=(sys.executable, FAKE))

    async def on_ready(children: object) -> None:
        pids = " ".join(str(child.pid) for child in supervisor.children)
        print(f"ready {pids}", flush=True)

    try:
        return await supervisor.run(on_ready)
    finally:
        watchdog.close()


if __name__ == "__main__":
    logging.basicConfig(level="INFO")
    limit = float(sys.argv[4]) if len(sys.argv) > 4 else 60.0
    sys.exit(asyncio.run(run(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], limit)))
