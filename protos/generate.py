"""Generates the gRPC stubs into the tandem package (tandem/<contract>/v1/*_pb2*.py).

Run by the build (setup.py) and by `make protos`. Needs grpcio-tools.
"""

from __future__ import annotations

import sys
from pathlib import Path

PROTOS = Path(__file__).resolve().parent


def proto_files() -> list[Path]:
    return sorted(PROTOS.glob("tandem/*/v1/*.proto"))


def generate(out: Path) -> None:
    """Writes stubs and type stubs below `out`, the folder that holds the tandem package."""
    import grpc_tools
    from grpc_tools import protoc

    well_known = Path(grpc_tools.__file__).parent / "_proto"
    sources = proto_files()
    args = [
        "protoc",
        f"-I{PROTOS}",
        f"-I{well_known}",
        f"--python_out={out}",
        f"--grpc_python_out={out}",
        f"--pyi_out={out}",
        *(str(path) for path in sources),
    ]
    if protoc.main(args) != 0:
        raise SystemExit("protoc failed; its message is above")
    for path in sources:
        package = out / path.parent.relative_to(PROTOS)
        for folder in (package, package.parent):
            (folder / "__init__.py").touch()


if __name__ == "__main__":
    generate(Path(sys.argv[1]) if len(sys.argv) > 1 else PROTOS.parent)
