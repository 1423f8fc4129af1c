"""Installs torch from the right index: python install_torch.py SPEC --index auto|default|URL.

On Linux without an NVIDIA GPU, PyPI's torch is a CUDA build of gigabytes, so "auto" takes PyTorch's public CPU index
there. If that can't be reached, pip's default is used, and what it will download is said first.
Run with the interpreter of the virtual environment. Standard library only.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import platform
import shutil
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from pathlib import Path

CPU_INDEX = "https://download.pytorch.org/whl/cpu"
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]


def wants_cpu_index() -> bool:
    return platform.system() == "Linux" and shutil.which("nvidia-smi") is None


def reachable(index: str) -> bool:
    """True if the index answers at all within a few seconds."""
    try:
        with urllib.request.urlopen(index.rstrip("/") + "/torch/", timeout=8):
            return True
    except urllib.error.HTTPError as error:
        return error.code < 500
    except OSError:
        return False


def plan(spec: str) -> list[str]:
    """URLs that pip would fetch for `spec` from its default index. Raises CalledProcessError with pip's own message."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        subprocess.run(
            [*PIP, "install", "-q", "--dry-run", "--ignore-installed", "--report", str(report), spec],
            check=True,
            stdout=subprocess.DEVNULL,
        )
        return [item["download_info"]["url"] for item in json.loads(report.read_text())["install"]]


def remote_bytes(urls: list[str]) -> int:
    total = 0
    for url in urls:
        if url.startswith("file:"):
            continue
        try:
            request = urllib.request.Request(url, method="HEAD")
            with urllib.request.urlopen(request, timeout=15) as answer:
                total += int(answer.headers.get("Content-Length") or 0)
        except (OSError, ValueError):
            continue
    return total


def install(spec: str, index: str) -> None:
    extra: list[str] = []
    if index == "auto":
        index = CPU_INDEX if wants_cpu_index() else "default"
    if index != "default":
        if reachable(index):
            extra = ["--index-url", index]
        else:
            print(f"{index} can't be reached; using pip's default index.", flush=True)
    if not extra:
        urls = plan(spec)
        local = any(url.startswith("file:") and "/torch-" in url for url in urls)
        size = remote_bytes(urls) / 1e6
        where = " (torch itself lies on this machine)" if local else ""
        print(f"torch: {len(urls)} packages, about {size:,.0f} MB to download{where}.", flush=True)
    subprocess.run([*PIP, "install", *extra, spec], check=True)


def pin(spec: str) -> None:
    """Writes the constraint that keeps later installs from replacing this torch."""
    version = importlib.metadata.version("torch")
    stamps = Path(sys.prefix) / ".stamps"
    stamps.mkdir(exist_ok=True)
    (stamps / "constraints.txt").write_text(f"torch=={version}\n")
    print(f"torch {version} is installed ({spec}).", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("spec")
    parser.add_argument("--index", default="auto")
    args = parser.parse_args()
    try:
        install(args.spec, args.index)
    except subprocess.CalledProcessError:
        print("torch could not be installed; pip's message is above.", file=sys.stderr)
        return 2
    pin(args.spec)
    return 0


if __name__ == "__main__":
    sys.exit(main())
