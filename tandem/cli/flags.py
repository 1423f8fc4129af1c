"""Command-line flags made from the fields of settings objects: one source for help, types, environment and files."""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Optional

import typer
from pydantic import SecretBytes, SecretStr
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from tandem.settings import Settings, env_name

_METAVARS: dict[type, str] = {int: "INTEGER", float: "NUMBER", str: "TEXT", Path: "PATH"}


@dataclass(frozen=True)
class Flag:
    """One flag of a command. `panel` groups it in the help."""

    name: str
    info: FieldInfo
    panel: str | None = None


def plain_type(annotation: Any) -> Any:
    """The type below Optional and Annotated."""
    origin = typing.get_origin(annotation)
    if origin is Annotated:
        return plain_type(typing.get_args(annotation)[0])
    if origin in (typing.Union, types.UnionType):
        inner = [arg for arg in typing.get_args(annotation) if arg is not type(None)]
        return plain_type(inner[0]) if inner else annotation
    return annotation


def is_secret(info: FieldInfo) -> bool:
    """Secrets come by file or environment, never by argument."""
    return plain_type(info.annotation) in (SecretStr, SecretBytes)


def _metavar(annotation: Any) -> str:
    plain = plain_type(annotation)
    if typing.get_origin(plain) is Literal:
        return "|".join(str(arg) for arg in typing.get_args(plain))
    if typing.get_origin(plain) in (list, tuple, set, frozenset):
        return "A,B,…"
    return _METAVARS.get(plain, "TEXT")


def help_text(name: str, info: FieldInfo) -> str:
    """The field's description with its default and environment variable."""
    default = info.get_default(call_default_factory=False) if info.default_factory is None else "automatic"
    shown = "required" if default is PydanticUndefined else "none" if default in (None, "") else str(default)
    # Square brackets are markup to rich, so none are used.
    return f"{info.description or name} (default: {shown}; env: {env_name(name)})"


def settings_flags(cls: type[Settings], panel: str | None = None, skip: Iterable[str] = ()) -> list[Flag]:
    """Flags for all fields of `cls` but secrets and those in `skip`."""
    left_out = set(skip)
    return [
        Flag(name, info, panel)
        for name, info in cls.model_fields.items()
        if name not in left_out and not is_secret(info)
    ]


def _parameter(flag: Flag) -> inspect.Parameter:
    option = "--" + flag.name.replace("_", "-")
    kind: type
    metavar: str | None
    if plain_type(flag.info.annotation) is bool:
        declared, kind, metavar = f"{option}/--no-{option[2:]}", bool, None
    else:
        # Settings parse the text, so that a flag and a variable obey the same rules and give the same message.
        declared, kind, metavar = option, str, _metavar(flag.info.annotation)
    annotation = Annotated[
        Optional[kind],  # type: ignore[valid-type]  # noqa: UP045
        typer.Option(
            declared,
            metavar=metavar,
            help=help_text(flag.name, flag.info),
            rich_help_panel=flag.panel,
            show_default=False,
        ),
    ]
    return inspect.Parameter(flag.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def command(
    flags: Iterable[Flag], body: Callable[[dict[str, Any], Path | None], None], doc: str, context: bool = False
) -> Callable[..., None]:
    """A function that typer can register: takes these flags and --config, calls body(given flags, config path).

    With `context` the body is skipped when a subcommand was named.
    """

    def run(**values: Any) -> None:
        ctx = values.pop("ctx", None)
        if ctx is not None and ctx.invoked_subcommand is not None:
            return
        config = values.pop("config", None)
        body({name: value for name, value in values.items() if value is not None}, config)

    config_option = Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--config", help="TOML file, one table per service (env: TANDEM_CONFIG)", show_default=False),
    ]
    parameters = [_parameter(flag) for flag in flags]
    parameters.append(
        inspect.Parameter("config", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=config_option)
    )
    if context:
        parameters.insert(0, inspect.Parameter("ctx", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context))
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    run.__doc__ = doc
    return run
