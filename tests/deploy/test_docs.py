"""The documentation against the code: links lead somewhere, commands and flags exist, the reference is current."""

from __future__ import annotations

import configparser
import re
import shlex
import subprocess
import tomllib
from functools import cache
from pathlib import Path

import pytest
import typer

from benchmarks.cpubench.report import MARKS, linked
from tandem.cli.main import build_app
from tandem.cli.reference import page
from tandem.cli.services import SERVICES
from tandem.settings import env_name
from tests.deploy.metric_names import all_jobs, traces

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "deploy").rglob("*.md"))]
IDS = [str(path.relative_to(ROOT)) for path in PAGES]
# Variables that are no settings of a service.
OTHER_VARIABLES = {"TANDEM_CACHE_DIR", "TANDEM_CONFIG", "TANDEM_IMAGE", "TANDEM_COMFYUI_URL", "TANDEM_COMFYUI_KEY"}
# Of `tandem top` and `tandem status`, and of the proofs.
OTHER_VARIABLES |= {"TANDEM_API_KEY", "TANDEM_PROOF_EXAMPLES", "TANDEM_PROOF_URL"}


def anchors(text: str) -> set[str]:
    """GitHub's anchors of the headings."""
    titles = re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", text, flags=re.S), re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("path", PAGES, ids=IDS)
def test_links_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", path.read_text()):
        if target.startswith(("http://", "https://")):
            continue
        name, _, anchor = target.partition("#")
        file = (path.parent / name).resolve() if name else path
        assert file.exists(), f"{target} is not there"
        if anchor:
            assert anchor in anchors(file.read_text()), f"{target}: no such heading"


@pytest.mark.parametrize("path", PAGES, ids=IDS)
def test_files_that_are_named_exist(path: Path) -> None:
    for name in re.findall(r"`((?:deploy|docs|examples|benchmarks|protos)/[\w./-]*)`", path.read_text()):
        assert (ROOT / name).exists(), name


@cache
def command_tree(name: str) -> typer.main.click.Command:
    return typer.main.get_command(build_app(name))


def check_command(words: list[str]) -> str | None:
    """What is wrong with a `tandem …` command line; None if nothing is."""
    known = command_tree(words[0] if words and not words[0].startswith("-") else "")
    seen = ["tandem"]
    while words and hasattr(known, "commands"):
        if words[0].startswith("-"):
            break
        below = known.commands.get(words[0])
        if below is None:
            return None if known.commands and getattr(known, "invoke_without_command", False) else f"no command {words}"
        known, words = below, words[1:]
        seen.append(known.name or "")
    if known.context_settings.get("ignore_unknown_options"):
        return None  # parsed by what it calls
    flags = {option for parameter in known.params for option in [*parameter.opts, *parameter.secondary_opts]}
    for word in words:
        flag = word.partition("=")[0]
        if word.startswith("--") and flag not in flags | {"--help"}:
            return f"{' '.join(seen)} has no flag {flag}"
    return None


def commands_of(text: str) -> list[list[str]]:
    """Every `tandem …` command line of code blocks and code spans."""
    blocks = re.findall(r"```(?:bash|sh|console|)\n(.*?)```", text, re.S)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    lines += re.findall(r"(?<!`)`(tandem [^`\n]+)`(?!`)", re.sub(r"```.*?```", "", text, flags=re.S))
    found = []
    for line in lines:
        match = re.match(r"\s*(?:\$ )?(?:sudo )?(?:\S+/)?tandem (.+)", line)
        if match is None:
            continue
        try:
            words = shlex.split(re.split(r"\s[|&>]|\s{2,}", match[1])[0], comments=True)
        except ValueError:
            continue
        # In tables of names, "tandem top" and the like; what has an ellipsis is no command line.
        if words and "…" not in line:
            found.append(words)
    return found


@pytest.mark.parametrize("path", PAGES, ids=IDS)
def test_commands_and_their_flags_exist(path: Path) -> None:
    assert [problem for words in commands_of(path.read_text()) if (problem := check_command(words))] == []


@pytest.mark.parametrize("path", PAGES, ids=IDS)
def test_variables_exist(path: Path) -> None:
    known = {env_name(field) for service in SERVICES.values() for field in service.settings().model_fields}
    for variable in re.findall(r"\bTANDEM_[A-Z0-9_]*[A-Z0-9]\b", path.read_text()):
        assert variable in known | OTHER_VARIABLES, variable


def test_flags_in_prose_of_the_operators_pages_exist() -> None:
    known = {"--" + field.replace("_", "-") for s in SERVICES.values() for field in s.settings().model_fields}
    known |= {"--cancel", "--ready", "--config", "--profile", "--user"}
    for name in ("operations", "security", "models", "scaling", "upgrade"):
        for flag in re.findall(r"`(--[a-z][a-z0-9-]*)", (ROOT / f"docs/{name}.md").read_text()):
            assert flag in known, f"docs/{name}.md: {flag}"


def test_the_check_finds_mistakes() -> None:
    assert commands_of("`tandem engine --modle x`")
    assert check_command(["engine", "--modle", "x"]) == "tandem engine has no flag --modle"
    assert check_command(["conjure"]) is not None
    assert check_command(["drain", "engine-0", "--cancel"]) is None


def test_the_configuration_reference_is_what_the_settings_say() -> None:
    current = (ROOT / "docs/configuration.md").read_text()
    assert current == page(), "run: python -m tandem.cli.reference > docs/configuration.md"


def test_the_comparison_has_a_place_for_a_run_and_keeps_it() -> None:
    page = (ROOT / "docs/comparison.md").read_text()
    written = linked(page, "# Performance\n\n| server | W1 |\n|---|---|\n| tandem | 1.0 |\n\nW1 reaches 1%.\n")
    assert "[performance.md](performance.md)" in written and "\n| tandem | 1.0 |\n" in written
    assert "No run is recorded" not in written and "W1 reaches" not in written
    again = linked(written, "| server |\n")
    assert again.endswith(page[page.index(MARKS[1]) :]) and "| tandem | 1.0 |" not in again
    with pytest.raises(ValueError, match="no place"):
        linked("# Comparison\n", "| server |\n")


def test_every_service_has_a_page_and_the_readme_leads_to_all_pages() -> None:
    for service in SERVICES:
        if service != "serve":
            assert (ROOT / f"docs/{service}.md").exists(), service
    text = (ROOT / "README.md").read_text() + (ROOT / "docs/comparison.md").read_text()
    for path in (ROOT / "docs").glob("*.md"):
        assert path.name in text, f"no way leads to docs/{path.name}"


def blocks_of(kind: str) -> list[tuple[str, str]]:
    """Page and text of every code block of a kind."""
    return [
        (name, text)
        for path, name in zip(PAGES, IDS, strict=True)
        for found, text in re.findall(r"```(\w*)\n(.*?)```", path.read_text(), re.S)
        if found == kind
    ]


@pytest.mark.parametrize("path", PAGES, ids=IDS)
def test_metrics_that_are_named_are_exported(path: Path) -> None:
    known = {name for series in (*all_jobs().values(), traces()) for name in series}
    # Histograms go by their plain name, too.
    known |= {name.removesuffix("_bucket") for name in known}
    for name, more in re.findall(r"(?<![\w/.])((?:tandem_|vllm:)[a-z0-9_]+)(…?)", path.read_text()):
        assert any(one.startswith(name) for one in known) if more or name[-1] == "_" else name in known, name


def test_code_blocks_are_well_formed() -> None:
    for name, text in blocks_of("bash"):
        done = subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True)
        assert done.returncode == 0, f"{name}: {done.stderr}"
    for name, text in blocks_of("python"):
        compile(text, name, "exec")
    for name, text in blocks_of("toml"):
        for service, table in tomllib.loads(text).items():
            known = {field.replace("_", "-") for field in SERVICES[service].settings().model_fields}
            assert set(table) <= known, f"{name}: [{service}] {set(table) - known}"
    for name, text in blocks_of("ini"):
        parser = configparser.RawConfigParser(strict=False)
        parser.read_string(text)
        assert parser.sections(), name
    kinds = {kind for path in PAGES for kind in re.findall(r"^```(\w+)$", path.read_text(), re.M)}
    assert kinds <= {"bash", "python", "toml", "ini"}, "blocks of a kind that nobody checks"
