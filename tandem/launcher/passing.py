"""Which flag of `tandem serve` goes to which service."""

from __future__ import annotations

from typing import Any

from tandem.cli.flags import Flag, plain_type, settings_flags
from tandem.cli.services import SERVICES
from tandem.launcher.settings import ServeSettings

CHILD_SERVICES = ("gateway", "router", "engine", "draft")
# The launcher sets these itself, so they are no flags of `tandem serve` (serve's own of the same name mean its own).
MANAGED = {
    "gateway": frozenset({"host", "port", "router", "router_admin", "log_level"}),
    # The router's socket can't be shared by several processes; a router of its own can have workers.
    "router": frozenset({"listen", "admin_listen", "engines", "workers", "metrics_port", "log_level"}),
    "engine": frozenset({"listen", "metrics_listen", "model", "draft", "log_level"}),
    "draft": frozenset({"listen", "metrics_listen", "proposers", "model", "threads", "log_level"}),
}


def serve_flags() -> list[Flag]:
    """Serve's own flags, then those of the services that it passes on, each once."""
    flags = settings_flags(ServeSettings)
    known = set(ServeSettings.model_fields)
    for name in CHILD_SERVICES:
        for flag in settings_flags(SERVICES[name].settings(), skip=MANAGED[name] | known):
            flags.append(Flag(flag.name, flag.info, f"Passed on to {name}"))
            known.add(flag.name)
    return flags


def split(flags: dict[str, Any]) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """(serve's own flags, flags per service). A flag that several services know goes to all of them."""
    own = {name: value for name, value in flags.items() if name in ServeSettings.model_fields}
    passed: dict[str, dict[str, Any]] = {}
    for service in CHILD_SERVICES:
        fields = set(SERVICES[service].settings().model_fields) - MANAGED[service] - set(ServeSettings.model_fields)
        passed[service] = {name: value for name, value in flags.items() if name in fields}
        if "log_level" in own:
            passed[service]["log_level"] = own["log_level"]
    return own, passed


def to_arguments(service: str, flags: dict[str, Any]) -> list[str]:
    """Flags as an argument list of `tandem SERVICE`."""
    arguments: list[str] = []
    fields = SERVICES[service].settings().model_fields
    for name, value in flags.items():
        option = "--" + name.replace("_", "-")
        if plain_type(fields[name].annotation) is bool:
            arguments.append(option if value else f"--no-{option[2:]}")
        else:
            # One word, so that an empty or dashed value is never taken for another flag.
            arguments.append(f"{option}={value}")
    return arguments
