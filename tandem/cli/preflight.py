"""Checks a machine before and after set-up. Standard library only: it runs with the system's Python, before installing.

    python3 -I tandem/cli/preflight.py --port 8000 --venv .venv      before anything is installed
    python3 -I tandem/cli/preflight.py --installed --port 8000       a later start: no network

Each failure is one line: what was found, what is needed, the command that mends it. Exit 2 if anything failed.
"""

from __future__ import annotations

import argparse
import configparser
import os
import platform
import shutil
import socket
import ssl
import subprocess
import sys
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass
from pathlib import Path

GIB = 1024**3
# The environment with torch's CPU build takes about 1.6 GiB; the model and its caches 0.3 GiB.
DISK_INSTALL_BYTES = 3 * GIB
DISK_RUN_BYTES = GIB // 2
MEMORY_BYTES = int(1.5 * GIB)
PYTHONS = ((3, 11), (3, 14))
PLATFORMS = {("Linux", "x86_64"), ("Linux", "aarch64"), ("Darwin", "arm64")}


@dataclass(frozen=True)
class Check:
    """One finding. `mend` is a command for the user and is empty if all is well."""

    name: str
    ok: bool
    found: str
    needed: str = ""
    mend: str = ""

    def line(self) -> str:
        if self.ok:
            return f"{self.name}: {self.found}"
        return f"{self.name}: found {self.found}; needed {self.needed}; mend: {self.mend}"


def check_platform() -> Check:
    here = (platform.system(), platform.machine())
    return Check(
        "platform",
        here in PLATFORMS,
        f"{here[0]} {here[1]}",
        "Linux x86_64 or aarch64, or macOS arm64 (on the torch path)",
        "run Tandem on one of these, or in its container there",
    )


def check_python() -> Check:
    low, high = PYTHONS
    ok = low <= sys.version_info[:2] <= high
    return Check(
        "python",
        ok,
        platform.python_version() + f" at {sys.executable}",
        "3.11 to 3.14",
        "sudo apt-get install python3.11 python3.11-venv, then make PYTHON=python3.11 …",
    )


def check_venv() -> Check:
    """The modules that make a virtual environment: Debian packs them apart."""
    missing = []
    for module in ("venv", "ensurepip"):
        try:
            __import__(module)
        except ImportError:
            missing.append(module)
    package = f"python{sys.version_info[0]}.{sys.version_info[1]}-venv"
    return Check(
        "venv",
        not missing,
        "no module " + " and ".join(missing) if missing else "modules venv and ensurepip",
        "the modules venv and ensurepip",
        f"sudo apt-get install {package}",
    )


def check_disk(path: Path, need: int) -> Check:
    while not path.exists():
        path = path.parent
    free = shutil.disk_usage(path).free
    return Check(
        "disk",
        free >= need,
        f"{free / GIB:.1f} GiB free at {path}",
        f"{need / GIB:.1f} GiB",
        f"free some space, or put the checkout on another disk (df -h {path})",
    )


def memory_limit() -> int | None:
    """Bytes that this process may use: the least of free memory and the cgroup's limit. None if it can't be told."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        values = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if ":" in line}
        available: int | None = values.get("MemAvailable")
    except (OSError, ValueError, IndexError):
        available = _mac_memory()
    for name in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            limit = int(Path(name).read_text())
        except (OSError, ValueError):
            continue
        available = min(available, limit) if available is not None else limit
    return available


def _mac_memory() -> int | None:
    try:
        return int(subprocess.run(["sysctl", "-n", "hw.memsize"], capture_output=True, text=True).stdout)
    except (OSError, ValueError):
        return None


def check_memory(need: int = MEMORY_BYTES) -> Check:
    available = memory_limit()
    if available is None:
        return Check("memory", True, "unknown on this system")
    return Check(
        "memory",
        available >= need,
        f"{available / GIB:.1f} GiB available",
        f"{need / GIB:.1f} GiB",
        "close other programs, or raise the container's memory limit",
    )


def check_port(port: int, host: str = "127.0.0.1") -> Check:
    """True if `port` can be bound on `host` now."""
    if not 1 <= port <= 65535:
        return Check("port", False, str(port), "a port from 1 to 65535", "make serve PORT=8001")
    free, reason = bindable(host, port)
    other = next((p for p in range(port + 1, min(port + 100, 65536)) if bindable(host, p)[0]), port + 1)
    return Check(
        "port",
        free,
        f"{host}:{port} is free" if free else f"{host}:{port} taken ({reason})",
        "a free port",
        f"make serve PORT={other}  (or end what listens there: ss -ltnp 'sport = :{port}')",
    )


def bindable(host: str, port: int) -> tuple[bool, str]:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        # As servers do: a port in TIME_WAIT is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            return False, (error.strerror or str(error)).lower()
    return True, ""


def index_url() -> str | None:
    """The package index that pip is set up to use; None if it is told to use none, or if none can be found out."""
    if os.environ.get("PIP_NO_INDEX"):
        return None
    if os.environ.get("PIP_INDEX_URL"):
        return os.environ["PIP_INDEX_URL"]
    home = Path.home()
    dirs = os.environ.get("XDG_CONFIG_DIRS", "/etc/xdg").split(":")
    # Strongest first, as pip reads them.
    names = [Path(os.environ["PIP_CONFIG_FILE"])] if os.environ.get("PIP_CONFIG_FILE") else []
    names += [home / ".config/pip/pip.conf", home / ".pip/pip.conf", home / "Library/Application Support/pip/pip.conf"]
    names += [Path("/etc/pip.conf"), *(Path(folder) / "pip/pip.conf" for folder in dirs)]
    for name in names:
        parser = configparser.RawConfigParser()
        try:
            parser.read(name)
        except configparser.Error:
            continue
        for section in ("install", "global"):
            if parser.has_option(section, "index-url"):
                return parser.get(section, "index-url")
    return _pip_default_index()


def _pip_default_index() -> str | None:
    """What pip asks when nothing is set, by its own word; None where this Python has no pip to tell."""
    try:
        from pip._internal.models.index import PyPI
    except ImportError:
        return None
    return str(PyPI.simple_url)


def check_index() -> Check:
    """The package index answers."""
    url = index_url()
    if url is None or url.startswith("file:"):
        return Check("index", True, url or "none to ask (PIP_NO_INDEX, or no pip yet)")
    # An address may carry credentials: they are not shown.
    shown = urllib.parse.urlsplit(url)._replace(netloc=urllib.parse.urlsplit(url).netloc.rpartition("@")[2]).geturl()
    mend = f"check the network and proxy settings: curl -I {shown}  (another index: export PIP_INDEX_URL=…)"
    try:
        context = ssl.create_default_context(cafile=os.environ.get("PIP_CERT") or None)
        with urllib.request.urlopen(url.rstrip("/") + "/wheel/", timeout=20, context=context):
            return Check("index", True, f"{shown} answers")
    except urllib.error.HTTPError as error:
        found = f"{shown} answers HTTP {error.code}"
    except (OSError, ValueError) as error:
        found = f"{shown} does not answer ({getattr(error, 'reason', error)})"
    return Check("index", False, found, "a package index that answers", mend)


def run_checks(port: int | None, installed: bool, venv: Path, host: str = "127.0.0.1") -> list[Check]:
    """All checks that apply, in the order in which a user would mend them."""
    checks = [check_platform(), check_python()]
    if not installed:
        checks += [check_venv(), check_disk(venv, DISK_INSTALL_BYTES)]
    else:
        checks.append(check_disk(Path.home(), DISK_RUN_BYTES))
    checks.append(check_memory())
    if port is not None:
        checks.append(check_port(port, host))
    if not installed and all(check.ok for check in checks):
        checks.append(check_index())
    return checks


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Checks this machine before Tandem is set up.")
    parser.add_argument("--port", type=int, default=None, help="port that must be free")
    parser.add_argument("--host", default="127.0.0.1", help="address that the port is bound on")
    parser.add_argument("--venv", type=Path, default=Path(".venv"), help="where the environment will be")
    parser.add_argument("--installed", action="store_true", help="set-up is done: skip disk, venv and index")
    parser.add_argument("--verbose", action="store_true", help="also print what is well")
    args = parser.parse_args(argv)
    checks = run_checks(args.port, args.installed, args.venv, args.host)
    for check in checks:
        if not check.ok:
            print(check.line(), file=sys.stderr)
        elif args.verbose:
            print(check.line())
    return 0 if all(check.ok for check in checks) else 2


if __name__ == "__main__":
    sys.exit(main())
