"""Build steps that pyproject.toml cannot express: gRPC stubs and the C++ kernels."""

from __future__ import annotations

import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "protos"))


class BuildWithStubs(build_py):
    """Generates the stubs next to the sources, so that editable and wheel builds find them alike."""

    def run(self) -> None:
        from generate import generate

        generate(ROOT)
        super().run()


setup(cmdclass={"build_py": BuildWithStubs})
