"""Engines on several hosts come, drain and vanish under load, found by DNS alone: nothing is lost.

Stands in for a cluster: each host is a network namespace, names come from a real DNS server, the services are the real
gateway and router with the flags of deploy/kubernetes. Needs root, iproute2 and dnsmasq; see docs/scaling.md.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.hosts import Hosts, missing
from tests.e2e.stack import eventually

pytestmark = pytest.mark.slow

PORT = 50051
STEP_S = 0.04
MODEL = "smollm2-135m-instruct"
TOKEN = "a-token-that-services-share"


class Site:
    """A gateway, routers and engines, each on a host of its own, and clients on another."""

    def __init__(self, hosts: Hosts, folder: Path) -> None:
        self.hosts, self.folder = hosts, folder
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.latest: dict[str, Any] = {}
        self._addresses: dict[str, str] = {}
        (folder / "token").write_text(TOKEN)

    def host(self, name: str) -> str:
        """The host's address; it is made if need be."""
        if name not in self._addresses:
            self._addresses[name] = self.hosts.add(name)
        return self._addresses[name]

    def at(self, engine: str) -> str:
        return f"{self.host(engine)}:{PORT}"

    def tandem(self, host: str, *arguments: str) -> None:
        self.host(host)
        log = (self.folder / f"{host}.log").open("ab")
        self.processes[host] = self.hosts.start(host, sys.executable, "-m", "tandem.cli", *arguments, stderr=log)

    def start_front(self, *routers: str, **settings: object) -> None:
        """Routers and the gateway, with the flags that deploy/kubernetes gives them."""
        more = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]
        for router in routers:
            self.start_router(router, *more)
        self.hosts.resolve("routers.lab", *routers)
        admin = ["--router-admin=routers.lab:8101", f"--service-token-file={self.folder}/token"]
        self.tandem("gateway", "gateway", "--host=0.0.0.0", "--port=8000", "--router=routers.lab:8100", *admin)

    def start_router(self, name: str, *more: str) -> None:
        """Returns when it listens."""
        listen = ["--listen=0.0.0.0:8100", "--admin-listen=0.0.0.0:8101", f"--service-token-file={self.folder}/token"]
        self.tandem(name, "router", *listen, f"--engines=dns:engines.lab:{PORT}", "--resolve-interval-s=1", *more)
        self.host("clients")
        eventually(lambda: self.health(f"{self.host(name)}:8100"), 60, f"{name} listens")

    def used_router(self) -> str:
        """The router that the gateway has calls at."""
        found = self.hosts.run("gateway", "ss", "-Htn", "state", "established", "dport", "=", ":8100").stdout
        # gRPC's sockets are IPv6 ones with IPv4 inside: [::ffff:10.77.0.13]:8100.
        peers = set(re.findall(r"([0-9.]+)\]?:8100\b", found))
        (name,) = [name for name, address in self._addresses.items() if address in peers]
        return name

    def start_engine(self, name: str) -> None:
        """A mock engine; it is in no DNS record yet."""
        self.host(name)
        command = ["-m", "tests.e2e.host_engine", f"--listen=0.0.0.0:{PORT}", f"--name={name}", f"--step-s={STEP_S}"]
        log = (self.folder / f"{name}.log").open("ab")
        process = self.hosts.start(name, sys.executable, *command, stdout=subprocess.PIPE, stderr=log)
        assert process.stdout is not None and process.stdout.readline(), self.log(name)
        self.processes[name] = process

    def start_real_engine(self, name: str) -> None:
        memory = ["--threads=1", f"--kv-cache-bytes={128 << 20}", "--max-model-len=1024"]
        self.tandem(name, "engine", f"--listen=0.0.0.0:{PORT}", f"--model={MODEL}", "--grace=1", *memory)

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")[-3000:]

    def health(self, address: str, *more: str) -> bool:
        done = self.hosts.run("clients", sys.executable, "-m", "tandem.cli", "health", address, *more)
        return done.returncode == 0

    def ask(self) -> None:
        """One request of a new client, which must be answered."""
        code = "import httpx, sys; print(httpx.post(sys.argv[1], json={'prompt': [5], 'max_tokens': 5}, timeout=90))"
        url = f"http://{self.host('gateway')}:8000/v1/completions"
        done = self.hosts.run("clients", sys.executable, "-c", code, url, limit_s=120)
        assert "200 OK" in done.stdout, done

    # -- load

    def start_load(self, router: str = "", clients: int = 10, **more: object) -> None:
        """Clients of the gateway, and of a router too if one is named (nobody else can carry its clients on)."""
        # Clients know addresses: what becomes of names is the services' concern.
        gateway = f"http://{self.host('gateway')}:8000"
        eventually(lambda: self.health(gateway, "--ready"), 90, "the gateway is ready")
        command = ["-m", "tests.e2e.host_load", f"--gateway={gateway}", f"--token={TOKEN}", f"--clients={clients}"]
        command += [f"--{name}={value}" for name, value in more.items()]
        if router:
            command.append(f"--router={self.host(router)}:8100")
        log = (self.folder / "clients.log").open("ab")
        process = self.hosts.start("clients", sys.executable, *command, stdout=subprocess.PIPE, stderr=log)
        self.processes["clients"] = process

        def read() -> None:
            assert process.stdout is not None
            for line in process.stdout:
                self.latest = json.loads(line)

        threading.Thread(target=read, daemon=True).start()
        self.work(clients)

    def work(self, more: int = 20) -> None:
        """Waits until so many further requests have ended well."""
        goal = self.latest.get("done", 0) + more
        eventually(lambda: self.healthy() and self.latest.get("done", 0) >= goal, 120, f"{more} further requests")

    def healthy(self) -> bool:
        assert not self.latest.get("failures"), self.latest["failures"]
        assert self.processes["clients"].poll() is None, self.log("clients")
        return True

    def state(self, engine: str) -> str:
        """As the gateway's live page shows it; empty if the router does not know it."""
        return str(self.latest.get("fleet", {}).get(self.at(engine), ""))

    def until(self, engine: str, *states: str, within_s: float = 45.0) -> float:
        """Waits for a state under load; returns the seconds that it took."""
        began = time.monotonic()
        eventually(lambda: self.healthy() and self.state(engine) in states, within_s, f"{engine} is {states}")
        return time.monotonic() - began

    def gets_work(self, engine: str) -> None:
        before = self.latest["engines"].get(engine, 0)
        eventually(lambda: self.healthy() and self.latest["engines"].get(engine, 0) > before, 60, f"{engine} works")

    def finish(self) -> dict[str, Any]:
        """Ends the load: what runs is finished. Returns what the clients saw."""
        self.processes["clients"].send_signal(signal.SIGTERM)
        assert self.processes["clients"].wait(200) == 0, self.log("clients")
        eventually(lambda: self.latest.get("over"), 10, "the last line")
        assert self.latest["failures"] == [] and self.latest["open"] == 0
        return self.latest


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    if reason := missing():
        pytest.skip(reason)
    with Hosts(tmp_path) as hosts:
        yield Site(hosts, tmp_path)


def test_engines_come_drain_and_vanish(site: Site) -> None:
    engines = ["e0", "e1"]

    def announce() -> None:
        site.hosts.resolve("engines.lab", *engines)

    for name in engines:
        site.start_engine(name)
    announce()
    site.start_front("router")
    site.start_load("router")

    # One more appears.
    site.start_engine("e2")
    engines.append("e2")
    announce()
    site.until("e2", "ready")
    site.gets_work("e2")

    # One is told to go: SIGTERM, with streams that are longer than its grace.
    site.processes["e0"].send_signal(signal.SIGTERM)
    site.until("e0", "draining", "down")
    assert site.processes["e0"].wait(30) == 0, site.log("e0")
    engines.remove("e0")
    announce()
    site.until("e0", "")
    site.work()

    # A pod is replaced: preStop's drain, the name drops it, then it is killed.
    site.start_engine("e3")
    engines.append("e3")
    announce()
    site.until("e3", "ready")
    command = [sys.executable, "-m", "tandem.cli", "drain", f"127.0.0.1:{PORT}", "--grace", "1"]
    drained = site.hosts.run("e1", *command)
    assert drained.returncode == 0 and "draining, 0 requests left" in drained.stdout, drained
    engines.remove("e1")
    announce()
    site.processes["e1"].kill()
    site.until("e1", "")
    site.work()

    # One dies and comes back at the same address: another epoch, the same name.
    site.processes["e2"].kill()
    site.until("e2", "down")
    site.work()
    site.start_engine("e2")
    site.until("e2", "ready")
    site.gets_work("e2")

    # DNS goes away, and answers that the name does not exist: engines that answer stay.
    site.hosts.stop_dns()
    site.work()
    site.hosts.start_dns()
    site.hosts.resolve("engines.lab")
    site.work()
    assert {site.state(name) for name in engines} == {"ready"}
    announce()

    seen = site.finish()
    assert seen["resumed"], "no stream was ever moved: the test disturbed nothing"


@pytest.mark.parametrize("silent", [False, True], ids=["unplugged", "blackholed"])
def test_the_cable_is_pulled(site: Site, silent: bool) -> None:
    for name in ("e0", "e1"):
        site.start_engine(name)
    site.hosts.resolve("engines.lab", "e0", "e1")
    site.start_front("router")
    site.start_load("router")
    site.gets_work("e1")
    (site.hosts.blackhole if silent else site.hosts.unplug)("e1")
    # No packet says that it is gone: load reports stop, and after --stall-limit-s (10 s) it counts as hung.
    site.until("e1", "down")
    site.work()
    site.hosts.plug_in("e1")
    site.until("e1", "ready", within_s=90)
    site.gets_work("e1")

    # Again, and this time it never comes back: the name drops it.
    (site.hosts.blackhole if silent else site.hosts.unplug)("e1")
    site.hosts.resolve("engines.lab", "e0")
    site.until("e1", "", within_s=60)
    site.work()
    assert site.finish()["resumed"]


def test_keepalive_alone_notices_a_pulled_cable(site: Site) -> None:
    """With the watch over steps and reports as good as off, pings do it: 10 s apart, 10 s to answer."""
    for name in ("e0", "e1"):
        site.start_engine(name)
    site.hosts.resolve("engines.lab", "e0", "e1")
    site.start_front("router", stall_limit_s=3600)
    site.start_load("router")
    site.gets_work("e1")
    site.hosts.blackhole("e1")
    site.until("e1", "down", within_s=60)
    site.work()
    assert site.finish()["resumed"]


def test_routers_are_replaced_die_and_are_cut_off(site: Site) -> None:
    """Gateways carry streams from a lost router to the next under the same name, and so they do requests not begun."""
    for name in ("e0", "e1"):
        site.start_engine(name)
    site.hosts.resolve("engines.lab", "e0", "e1")
    site.start_front("r0", "r1")
    site.start_load()
    # A rolling update: SIGTERM, while the name still stands for both.
    first = site.used_router()
    site.processes[first].send_signal(signal.SIGTERM)
    site.work()
    assert site.processes[first].wait(40) == 0, site.log(first)
    second = site.used_router()
    assert second != first
    site.start_router(first)
    site.processes[second].kill()
    site.work()
    assert site.used_router() == first
    site.start_router(second)
    site.hosts.blackhole(first)
    time.sleep(1)
    # This one's call goes into the hole; pings find out, and it is answered all the same.
    site.ask()
    site.work()
    assert site.used_router() == second
    site.finish()


@pytest.mark.timeout(900)
def test_real_engines_die_are_cut_off_and_drain(site: Site) -> None:
    for name in ("e0", "e1"):
        site.start_real_engine(name)
    site.hosts.resolve("engines.lab", "e0", "e1")
    site.start_front("router")
    site.start_load(clients=4, tokens=60, model=MODEL)
    for name in ("e0", "e1"):
        site.until(name, "ready", within_s=120)
    site.work(4)
    site.processes["e0"].kill()
    site.until("e0", "down")
    site.work(4)
    site.start_real_engine("e0")
    site.until("e0", "ready", within_s=120)
    site.hosts.blackhole("e1")
    site.until("e1", "down", within_s=60)
    site.work(4)
    site.hosts.plug_in("e1")
    site.until("e1", "ready", within_s=90)
    site.processes["e0"].send_signal(signal.SIGTERM)
    assert site.processes["e0"].wait(30) == 0, site.log("e0")
    site.hosts.resolve("engines.lab", "e1")
    site.until("e0", "")
    site.work(4)
    site.finish()
