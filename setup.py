"""Build steps that pyproject.toml cannot express: gRPC stubs and the C++ kernels."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from setuptools import Distribution, setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "protos"))


def kernel_builder(folder: Path) -> ModuleType:
    """kernels/cpu/build.py below `folder`, loaded by its path: it builds the library beside itself."""
    path = folder / "kernels" / "cpu" / "build.py"
    spec = importlib.util.spec_from_file_location("tandem_kernel_builder", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class BuildWithStubs(build_py):
    """Generates the stubs next to the sources, so that editable and wheel builds find them alike; a wheel also gets
    the C++ kernels, if a compiler is there (a checkout builds its own: make kernels)."""

    def finalize_options(self) -> None:
        from generate import generate, proto_files

        generate(ROOT)
        # Packages were looked for before the stubs were there.
        stubs = {".".join(path.parent.relative_to(ROOT / "protos").parts) for path in proto_files()}
        packages = set(self.distribution.packages or ()) | stubs | {name.rpartition(".")[0] for name in stubs}
        self.distribution.packages = sorted(packages)
        super().finalize_options()

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            builder = kernel_builder(Path(self.build_lib).resolve())
            try:
                builder.build()
            except builder.BuildError as error:
                print(f"The wheel has no C++ kernels, so it runs on the slower torch path: {error}", file=sys.stderr)


class PlatformDistribution(Distribution):
    """A wheel with a compiled library is for one platform."""

    def has_ext_modules(self) -> bool:
        return kernel_builder(ROOT).compiler() is not None


setup(cmdclass={"build_py": BuildWithStubs}, distclass=PlatformDistribution)
