"""What `tandem serve` will start: pure, from settings to child specifications."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandem.cli.services import SERVICES
from tandem.launcher import passing
from tandem.launcher.settings import ServeSettings
from tandem.machine import numa_nodes
from tandem.rpc import check_address
from tandem.settings import env_name, load_settings


@dataclass(frozen=True)
class ChildSpec:
    """One child: `arguments` follow `tandem`, `address` is what its readiness is asked of."""

    name: str
    service: str
    arguments: tuple[str, ...]
    address: str


@dataclass(frozen=True)
class Plan:
    """Everything that will run, in the order of a request's way."""

    children: tuple[ChildSpec, ...]
    environment: dict[str, str]
    url: str
    router: str
    router_admin: str
    threads: int


@dataclass(frozen=True)
class ModelPlace:
    """A resolved model: what engines load and what it is called."""

    path: Path
    name: str


def child_environment(env: dict[str, str]) -> dict[str, str]:
    """The environment for children: without the variables whose names mean something else to the launcher."""
    hidden = {env_name(name) for name in ServeSettings.model_fields if name != "log_level"}
    return {name: value for name, value in env.items() if name not in hidden}


def proposer_flags(draft: str) -> dict[str, Any]:
    """Flags of the draft service for a value of --draft other than none: proposers by name, else a draft model."""
    if draft == "auto":
        return {}
    from draft_service.settings import PROPOSERS

    if all(name.strip() in PROPOSERS for name in draft.split(",")):
        return {"proposers": draft}
    return {"proposers": "model", "model": draft}


def _engine_flags(
    passed: dict[str, Any], env: dict[str, str], config: Path | None, model: ModelPlace, threads: int, drafts: bool
) -> tuple[dict[str, Any], int]:
    """What the launcher adds to an engine's flags, where the user has not set it in any way; and its threads."""
    cls = SERVICES["engine"].settings()
    loaded, origins = load_settings(cls, flags={**passed, "model": str(model.path)}, env=env, config=config)
    added: dict[str, Any] = {"model": str(model.path)}
    wanted: list[tuple[str, Any]] = [("served_model_name", model.name), ("threads", threads)]
    if numa_nodes(threads):
        wanted.append(("numa_node", -1))
    if not drafts:
        # --draft none means no speculation of any kind, unless a head is named.
        wanted.append(("head", "none"))
    for name, value in wanted:
        if origins.get(name) == "default":
            added[name] = value
    return added, threads if "threads" in added else int(getattr(loaded, "threads", threads))


def make_plan(
    settings: ServeSettings,
    passed: dict[str, dict[str, Any]],
    model: ModelPlace,
    run_dir: Path,
    config: Path | None,
    env: dict[str, str],
    cores: int,
) -> Plan:
    """Builds the plan. Raises SettingsError if a service would refuse its settings, ValueError for a long run_dir."""
    env = child_environment(env)
    tail = [f"--config={config}"] if config else []

    def address(name: str) -> str:
        return check_address(f"unix:{run_dir / name}.sock")

    def child(name: str, service: str, flags: dict[str, Any], where: str) -> ChildSpec:
        load_settings(SERVICES[service].settings(), flags=flags, env=env, config=config)
        return ChildSpec(name, service, (service, *passing.to_arguments(service, flags), *tail), where)

    def metrics(offset: int) -> str:
        return f"127.0.0.1:{settings.metrics_port + offset}" if settings.metrics_port else ""

    share, drafting = max(1, cores // settings.engines), settings.draft != "none"
    added, threads = _engine_flags(passed["engine"], env, config, model, share, drafting)
    # Engines that start together would all find the same node the emptiest.
    nodes = list(numa_nodes(threads)) if "numa_node" in added else []
    engines, drafts = [], []
    for index in range(settings.engines):
        draft_address = ""
        if settings.draft != "none":
            draft_address = address(f"draft-{index}")
            flags = {**passed["draft"], **proposer_flags(settings.draft), "listen": draft_address}
            flags["metrics_listen"] = metrics(1 + settings.engines + index)
            drafts.append(child(f"draft-{index}", "draft", flags, draft_address))
        listen = address(f"engine-{index}")
        flags = {**passed["engine"], **added, "listen": listen, "draft": draft_address}
        flags["metrics_listen"] = metrics(1 + index)
        if nodes:
            flags["numa_node"] = nodes[index % len(nodes)]
        engines.append(child(f"engine-{index}", "engine", flags, listen))
    router, admin = address("router"), address("router-admin")
    router_flags = {"listen": router, "admin_listen": admin, "engines": ",".join(spec.address for spec in engines)}
    router_flags["metrics_port"] = str(settings.metrics_port)
    gateway_flags = {"host": settings.host, "port": settings.port, "router": router, "router_admin": admin}
    shown = f"[{settings.host}]" if ":" in settings.host else settings.host
    local = "127.0.0.1" if settings.host == "0.0.0.0" else "[::1]" if settings.host == "::" else shown
    gateway = load_settings(SERVICES["gateway"].settings(), flags=passed["gateway"], env=env, config=config)[0]
    scheme = "https" if getattr(gateway, "tls_cert", "") else "http"
    url = f"{scheme}://{local}:{settings.port}"
    children = (
        child("gateway", "gateway", {**passed["gateway"], **gateway_flags}, url),
        child("router", "router", {**passed["router"], **router_flags}, router),
        *engines,
        *drafts,
    )
    return Plan(children, env, url, router, admin, threads)
