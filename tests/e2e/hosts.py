"""Several "hosts" on one machine: network namespaces on one bridge, with a real DNS server (dnsmasq) for their names.

Everything, the bridge too, lies in namespaces of its own: nothing of the machine's own network is touched.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

ETC_NETNS = Path("/etc/netns")
PREFIX = "tandem-"
DNS_PORT = 53
DNS_IP = "10.77.0.2"
FIRST_HOST = 10


def missing() -> str:
    """Why hosts cannot be made here; empty if they can."""
    for tool, package in (("ip", "iproute2"), ("dnsmasq", "dnsmasq-base")):
        if shutil.which(tool) is None:
            return f"{tool} is not here (apt-get install {package})"
    name = f"{PREFIX}{os.getpid()}-try"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if made.returncode:
        return f"no network namespaces for this user ({made.stderr.strip() or made.returncode}); root is needed"
    # The whole of what is needed: a bridge and a pair of cards inside.
    made = subprocess.run(
        ["ip", "-n", name, "link", "add", "bridge0", "type", "bridge"], capture_output=True, text=True, check=False
    )
    subprocess.run(["ip", "netns", "del", name], check=False)
    return f"the kernel makes no bridges ({made.stderr.strip()})" if made.returncode else ""


class Hosts:
    """A small network. Use as a context manager: whatever happens, all processes and namespaces go at the end."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._tag = f"{PREFIX}{os.getpid()}-"
        self._hosts: dict[str, str] = {}
        self._records: dict[str, list[str]] = {}
        self._processes: list[subprocess.Popen[bytes]] = []
        self._dns: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Hosts:
        _remove_stale()
        try:
            self._ip("netns", "add", self._tag + "switch")
            self._ip("-n", self._tag + "switch", "link", "add", "bridge0", "type", "bridge")
            self._ip("-n", self._tag + "switch", "link", "set", "bridge0", "up")
            self.add("dns", DNS_IP)
            self.start_dns()
        except BaseException:
            self._tear_down()
            raise
        return self

    def __exit__(self, *_error: object) -> None:
        self._tear_down()

    def _ip(self, *arguments: str) -> None:
        done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")

    # -- hosts and cables

    def add(self, name: str, address: str = "") -> str:
        """A new host on the bridge; returns its address."""
        address = address or f"10.77.0.{FIRST_HOST + len(self._hosts)}"
        space, switch = self._tag + name, self._tag + "switch"
        self._ip("netns", "add", space)
        self._hosts[name] = address
        resolver = ETC_NETNS / space / "resolv.conf"
        resolver.parent.mkdir(parents=True)
        resolver.write_text(f"nameserver {DNS_IP}\noptions timeout:1 attempts:2\n")
        self._ip("-n", switch, "link", "add", f"to-{name}", "type", "veth", "peer", "name", "eth0", "netns", space)
        self._ip("-n", switch, "link", "set", f"to-{name}", "master", "bridge0", "up")
        self._ip("-n", space, "link", "set", "lo", "up")
        self._ip("-n", space, "addr", "add", f"{address}/24", "dev", "eth0")
        self._ip("-n", space, "link", "set", "eth0", "up")
        return address

    def unplug(self, name: str) -> None:
        """Pulls the cable at the switch: the host sees no carrier, the others only that nothing comes back."""
        self._ip("-n", self._tag + "switch", "link", "set", f"to-{name}", "down")

    def blackhole(self, name: str) -> None:
        """Cuts the host off so that neither side sees anything but silence: no carrier is lost, no reset is sent."""
        self._ip("-n", self._tag + "switch", "link", "set", f"to-{name}", "nomaster")

    def plug_in(self, name: str) -> None:
        self._ip("-n", self._tag + "switch", "link", "set", f"to-{name}", "master", "bridge0", "up")

    # -- names

    def resolve(self, name: str, *hosts: str) -> None:
        """Makes a name stand for these hosts, and for no other; none: it no longer exists."""
        self._records[name] = [self._hosts[host] for host in hosts]
        lines = [f"{address} {name}\n" for name, found in self._records.items() for address in found]
        (self._folder / "names").write_text("".join(lines))
        if self._dns is not None:
            self._dns.send_signal(signal.SIGHUP)

    def start_dns(self) -> None:
        (self._folder / "names").touch()
        options = ["--keep-in-foreground", "--conf-file=/dev/null", "--pid-file=", "--user=root", "--no-resolv"]
        options += ["--no-hosts", f"--addn-hosts={self._folder}/names", "--local=/lab/", "--local-ttl=0"]
        self._dns = self.start("dns", "dnsmasq", *options, f"--listen-address={DNS_IP}", "--bind-interfaces")
        time.sleep(0.3)
        if self._dns.poll() is not None:
            raise RuntimeError(f"dnsmasq ended with {self._dns.returncode}")

    def stop_dns(self) -> None:
        assert self._dns is not None
        self._dns.kill()
        self._dns.wait()
        self._dns = None

    # -- processes

    def start(self, host: str, *command: str, **options: object) -> subprocess.Popen[bytes]:
        """Starts a process on a host. `ip netns exec` becomes the process, so signals reach it."""
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(
            ["ip", "netns", "exec", self._tag + host, *command],
            env=environment,
            **options,  # type: ignore[call-overload]
        )
        self._processes.append(process)
        return process

    def run(self, host: str, *command: str, limit_s: float = 60.0) -> subprocess.CompletedProcess[str]:
        """Runs a command on a host to its end."""
        return subprocess.run(
            ["ip", "netns", "exec", self._tag + host, *command],
            capture_output=True,
            text=True,
            timeout=limit_s,
            check=False,
        )

    def _tear_down(self) -> None:
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
            for stream in (process.stdin, process.stdout, process.stderr):
                if stream is not None:
                    with contextlib.suppress(OSError):
                        stream.close()
        for name in [*self._hosts, "switch"]:
            _remove(self._tag + name)


def _remove(space: str) -> None:
    """Ends what still runs in a namespace of ours, and the namespace with its cards."""
    found = subprocess.run(["ip", "netns", "pids", space], capture_output=True, text=True, check=False)
    for pid in found.stdout.split():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)
    subprocess.run(["ip", "netns", "del", space], capture_output=True, check=False)
    shutil.rmtree(ETC_NETNS / space, ignore_errors=True)


def _remove_stale() -> None:
    """Removes what a killed run of the tests has left: namespaces named after a process that is gone."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=False).stdout
    for line in listed.splitlines():
        space = line.split()[0]
        pid = space.removeprefix(PREFIX).partition("-")[0]
        if space.startswith(PREFIX) and pid.isdigit() and not Path(f"/proc/{pid}").exists():
            _remove(space)
