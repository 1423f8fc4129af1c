"""docs/configuration.md, made from the settings objects: `python -m tandem.cli.reference > docs/configuration.md`."""

from __future__ import annotations

from typing import Any

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from tandem.cli.flags import is_secret, plain_type
from tandem.cli.services import SERVICES
from tandem.settings import env_name

_HEAD = """# Configuration

Made from the code by `python -m tandem.cli.reference`; a test keeps it so.

A value comes from, strongest first: flag, environment variable `TANDEM_<NAME>`, TOML file (`--config FILE` or
`TANDEM_CONFIG`, one table per service), default. Unknown keys in the file are refused; bad values are refused with
their origin and what is allowed. `tandem config show` prints each value and where it came from.

```toml
[engine]
max-num-seqs = 32

[gateway]
port = 9000
```

`tandem serve` takes its own settings and passes the flags of the services on; an environment variable reaches every
service that has a setting of that name. `TANDEM_CACHE_DIR` moves the cache (see [upgrade.md](upgrade.md)).
"""


def _default(info: FieldInfo) -> str:
    value: Any = info.get_default(call_default_factory=False)
    if value is PydanticUndefined:
        return "required"
    return "" if value in (None, "") else f"`{str(value).lower() if isinstance(value, bool) else value}`"


def _limits(info: FieldInfo) -> str:
    signs = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
    found = [
        f"{signs[name]} {getattr(rule, name):,}" for rule in info.metadata for name in signs if hasattr(rule, name)
    ]
    return ", ".join(found)


def _row(name: str, info: FieldInfo) -> str:
    flag = "--" + name.replace("_", "-")
    if plain_type(info.annotation) is bool:
        flag = f"{flag}`, `--no-{flag[2:]}"
    shown = f"`{env_name(name)}` only" if is_secret(info) else f"`{flag}`"
    text = (info.description or "").replace("|", "\\|")
    return f"| {shown} | {_default(info)} | {_limits(info)} | {text} |"


def page() -> str:
    """The whole page."""
    parts = [_HEAD]
    for service in SERVICES.values():
        fields = service.settings().model_fields
        rows = "\n".join(_row(name, info) for name, info in fields.items())
        command = f"## `tandem {service.name}`\n\n{service.help}\n"
        parts.append(f"{command}\n| flag | default | limits | what |\n|---|---|---|---|\n{rows}\n")
    return "\n".join(parts)


if __name__ == "__main__":
    print(page(), end="")
