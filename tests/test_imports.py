"""The import rules between folders, and what light processes must not load."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SERVICES = {"gateway", "router", "engine_service", "draft_service"}
PROJECT = SERVICES | {"tandem", "kernels", "benchmarks", "tests"}
# What each folder may import of the project, besides itself. "tandem" here means tandem without tandem.lm and cli.
ALLOWED = {
    "tandem": set(),
    "tandem.lm": {"tandem", "kernels"},
    "kernels": set(),
    "engine_service": {"tandem", "tandem.lm", "kernels"},
    "draft_service": {"tandem", "tandem.lm", "kernels"},
    "router": {"tandem"},
    "gateway": {"tandem"},
}
# Of the services only the command line knows, lazily; the launcher is part of it and asks a draft's settings.
LAZY = {"tandem.cli": SERVICES | {"kernels", "tandem.launcher"}, "tandem.launcher": SERVICES | {"tandem.cli"}}


def sources(folder: str) -> list[Path]:
    return sorted(path for path in (ROOT / folder).rglob("*.py") if not path.name.endswith(("_pb2.py", "_pb2_grpc.py")))


def area(module: str) -> str:
    """Folder of the rules that a module belongs to."""
    for name in ("tandem.lm", "tandem.cli", "tandem.launcher"):
        if module == name or module.startswith(name + "."):
            return name
    return module.partition(".")[0]


def imports(path: Path) -> Iterator[tuple[str, int, bool]]:
    """(module, line, at module level) of each import of the project's own code."""
    tree = ast.parse(path.read_text(), str(path))
    top = set(ast.walk(tree)) - {
        inner
        for node in ast.walk(tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) or _type_checking(node)
        for inner in ast.walk(node)
        if inner is not node
    }
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        for name in names:
            if name.partition(".")[0] in PROJECT:
                yield name, node.lineno, node in top  # type: ignore[attr-defined]


def _type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def broken(folder: str) -> list[str]:
    found = []
    for path in sources(folder):
        here = area(".".join(path.relative_to(ROOT).with_suffix("").parts))
        for module, line, at_top in imports(path):
            there = area(module)
            if there == here or there in ALLOWED.get(here, set()):
                continue
            if here in LAZY:
                if there == "tandem" or (there in ("tandem.cli", "tandem.launcher")):
                    continue
                if there in LAZY[here] and not at_top:
                    continue
            found.append(f"{path.relative_to(ROOT)}:{line} imports {module}")
    return found


@pytest.mark.parametrize("folder", ["tandem", "kernels", *sorted(SERVICES)])
def test_folders_import_only_what_they_may(folder: str) -> None:
    assert broken(folder) == []


def test_the_rule_sees_a_forbidden_import(tmp_path: Path) -> None:
    bad = tmp_path / "bad.py"
    bad.write_text("from engine_service import scheduler\n\ndef f():\n    import gateway.main\n")
    assert [(name, at_top) for name, _, at_top in imports(bad)] == [
        ("engine_service", True),
        ("engine_service.scheduler", True),
        ("gateway.main", False),
    ]


def loaded_by(code: str) -> set[str]:
    """Top-level modules in sys.modules after running `code` in a fresh interpreter."""
    return {name.partition(".")[0] for name in loaded_modules(code)}


def loaded_modules(code: str) -> set[str]:
    """All of them."""
    program = f"{code}\nimport sys\nprint(*sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, timeout=110)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


@pytest.mark.parametrize(
    "code",
    [
        "import gateway.main, gateway.settings",
        "import router.main, router.settings",
        "import draft_service.main",
        # A draft without a model: everything that the default proposers need.
        "from draft_service.settings import DraftSettings\n"
        "from draft_service.build import build_proposer\nbuild_proposer(DraftSettings()).close()",
        "import tandem.launcher.main, tandem.launcher.report, tandem.models.store",
        "from tandem.cli.main import build_app\nbuild_app('serve')\nbuild_app('engine')",
    ],
    ids=["gateway", "router", "draft", "draft-default", "launcher", "cli"],
)
def test_light_processes_load_neither_torch_nor_transformers(code: str) -> None:
    heavy = loaded_by(code) & {"torch", "transformers"}
    assert heavy == set()


@pytest.mark.parametrize(
    "code",
    [
        "from gateway.app import build_app\nfrom gateway.settings import GatewaySettings\n"
        "app = build_app(GatewaySettings())\ntracer = app.state.gateway.tracer",
        "from router.server import RouterServer\nfrom router.settings import RouterSettings\nimport asyncio\n"
        "async def make():\n    return RouterServer(RouterSettings()).tracer\ntracer = asyncio.run(make())",
        "from engine_service.main import Process\nfrom engine_service.settings import EngineSettings\nimport asyncio\n"
        "import engine_service.engine, engine_service.service\n"
        "async def make():\n    return Process(EngineSettings()).tracer\ntracer = asyncio.run(make())",
        "import draft_service.main, draft_service.service\nfrom draft_service.settings import DraftSettings\n"
        "from tandem.tracing import open_tracer\ntracer = open_tracer(DraftSettings(), 'draft')",
    ],
    ids=["gateway", "router", "engine", "draft"],
)
def test_without_an_endpoint_nothing_of_tracing_is_loaded(code: str) -> None:
    """Newer releases of FastAPI import OpenTelemetry's API by themselves; the SDK and the exporters nobody does."""
    found = loaded_modules(f"{code}\nassert type(tracer).__module__ == 'tandem.tracing' and not tracer.on")
    assert {name for name in found if name.startswith(("opentelemetry.sdk", "opentelemetry.exporter"))} == set()
    assert {"tandem.tracing.otlp", "tandem.tracing.queue", "draft_service.tracing"} & found == set()
    if "gateway" not in code:
        assert {name for name in found if name.startswith("opentelemetry")} == set()


def test_the_check_of_tracing_sees_what_an_endpoint_loads() -> None:
    code = (
        "from tandem.tracing import open_tracer\nfrom router.settings import RouterSettings\n"
        "open_tracer(RouterSettings(otlp_endpoint='http://127.0.0.1:9'), 'router').close()"
    )
    assert {"opentelemetry.sdk.trace", "tandem.tracing.otlp"} <= loaded_modules(code)


def test_the_command_line_starts_without_grpc() -> None:
    """`tandem --help` is for people: nothing slow is loaded for it."""
    assert loaded_by("from tandem.cli.main import build_app\nbuild_app(None)") & {"grpc", "torch", "httpx"} == set()


def test_transformers_does_not_take_our_kernels_for_the_package_of_that_name() -> None:
    code = "from transformers.utils import is_kernels_available\nassert not is_kernels_available()"
    assert "transformers" in loaded_by(code)
