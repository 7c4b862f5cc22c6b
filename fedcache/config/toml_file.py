"""``fedcache.toml`` merged with flags into the dataclasses of ``sections``, and written back.

Precedence: flag, then ``fedcache.toml`` of the working directory (or ``--config FILE``), then the default. An unknown
section or key is an error, because a misspelt hyperparameter that is silently ignored costs a day.
"""

from __future__ import annotations

import tomllib
import types
import typing
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

from fedcache.config.sections import SECTIONS, OptionInfo
from fedcache.errors import UsageError, unknown

FILE_NAME = "fedcache.toml"
C = TypeVar("C")


def read_file(path: Path | None) -> dict[str, dict[str, Any]]:
    """The sections of a configuration file; {} when ``path`` is None and the working directory has none.

    Raises:
        UsageError, when the file is missing, is not TOML, or has an unknown section.
    """
    if path is None:
        path = Path(FILE_NAME)
        if not path.exists():
            return {}
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"Cannot read {path}: {error.strerror}.", "Check --config FILE.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is not valid TOML: {error}.", "Mend that line and run again.") from error
    for name, section in data.items():
        if name not in SECTIONS:
            raise unknown(f"section in {path}", name, SECTIONS)
        if not isinstance(section, dict):
            raise UsageError(f"{path}: {name} must be a table.", f"Write [{name}] on a line of its own.")
    return data


def resolve(kind: type[C], section: Mapping[str, Any], flags: Mapping[str, Any], where: str = FILE_NAME) -> C:
    """A configuration from a file's section and the flags; a flag that is None or empty was not given.

    Raises:
        UsageError, for an unknown key or a value of the wrong type.
    """
    hints, known = typing.get_type_hints(kind), field_names(kind)
    values: dict[str, Any] = {}
    for name, value in section.items():
        key = known.get(name.replace("-", "_"))
        if key is None:
            raise unknown(f"key in {where}", name, hints)
        values[key] = _typed(name, value, hints[key], where)
    for name, value in flags.items():
        if value is None or value == () or value == [] or value == {}:
            continue
        values[known[name]] = _typed(name, value, hints[known[name]], "the command line")
    return kind(**values)


def field_names(kind: type) -> dict[str, str]:
    """What a field may be called in ``fedcache.toml`` and in Python -> its name; other names of its option count."""
    found: dict[str, str] = {}
    for item in fields(kind):
        found |= {name.removeprefix("--").replace("-", "_"): item.name for name in item.metadata["option"].names}
        found[item.name] = item.name
    return found


def _typed(name: str, value: Any, hint: Any, where: str) -> Any:
    """``value`` as the field's type, or a usage error naming both."""
    choices = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    for choice in choices:
        origin = typing.get_origin(choice) or choice
        if origin is tuple:
            if isinstance(value, str):
                return tuple(part.strip() for part in value.split(",") if part.strip())
            if isinstance(value, list | tuple) and all(isinstance(v, str) for v in value):
                return tuple(value)
        elif origin is Mapping and isinstance(value, Mapping):
            return dict(value)
        elif origin in (bool, int) and type(value) is origin:  # a bool is no int here
            return value
        elif origin is float and isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
        elif origin is str and isinstance(value, str | int | float) and not isinstance(value, bool):
            return str(value)
        elif value is None and choice is types.NoneType:
            return None
    wanted = " or ".join(getattr(c, "__name__", str(c)) for c in choices if c is not types.NoneType)
    raise UsageError(
        f"{name} in {where} is {value!r}; expected {wanted}.", "See `fedcache config` for every key and its value."
    )


def to_table(config: Any) -> dict[str, Any]:
    """A configuration as a TOML table: None and empty values are left out."""
    table: dict[str, Any] = {}
    for item in fields(config):
        value = getattr(config, item.name)
        if value is None or value in ((), {}):
            continue
        table[item.name] = (
            list(value) if isinstance(value, tuple) else dict(value) if isinstance(value, Mapping) else value
        )
    return table


def to_toml(section: str, config: Any) -> list[str]:
    """A configuration as lines of TOML: what has no value is commented out, with its meaning."""
    import tomli_w

    values = to_table(config)
    plain = {k: v for k, v in values.items() if not isinstance(v, dict)}
    lines = tomli_w.dumps({section: plain}).rstrip().splitlines() or [f"[{section}]"]
    tables: list[str] = []
    hints = typing.get_type_hints(type(config))
    for item in fields(config):
        if item.name in values:
            if item.name not in plain:
                tables += ["", *tomli_w.dumps({section: {item.name: values[item.name]}}).rstrip().splitlines()]
            continue
        info: OptionInfo = item.metadata["option"]
        meaning = f"{info.meaning} Default: {info.default}." if info.default else info.meaning
        if typing.get_origin(hints[item.name]) is Mapping:
            tables += ["", f"# [{section}.{item.name}]  # {meaning}"]
        else:
            shape = {int | None: "NUMBER", str | None: '"TEXT"'}.get(hints[item.name], '["TEXT", "TEXT"]')
            lines.append(f"# {item.name} = {shape}  # {meaning}")
    return [*lines, *tables]
