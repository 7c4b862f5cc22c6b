"""Configuration: where things live, and ``fedcache.toml`` merged with flags into frozen dataclasses.

Precedence: flag, then ``fedcache.toml`` of the working directory (or ``--config FILE``), then the default. An unknown
section or key is an error, because a misspelt hyperparameter that is silently ignored costs a day.
"""

from __future__ import annotations

import os
import tomllib
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

from fedcache.errors import Exit, FedcacheError, unknown

FILE_NAME = "fedcache.toml"


@dataclass(frozen=True)
class Home:
    """``$FEDCACHE_HOME``: stores and results, which are data and not a cache that may vanish."""

    root: Path
    offline: bool = False

    @classmethod
    def from_environment(cls) -> Home:
        """``FEDCACHE_HOME``, else the XDG data directory; ``FEDCACHE_OFFLINE`` forbids downloads."""
        offline = os.environ.get("FEDCACHE_OFFLINE", "") not in ("", "0")
        root = os.environ.get("FEDCACHE_HOME")
        if root:
            return cls(Path(root).expanduser(), offline)
        from platformdirs import user_data_path

        return cls(user_data_path("fedcache"), offline)

    @property
    def stores(self) -> Path:
        """Feature stores."""
        return self.root / "stores"

    def store(self, slug: str, digest: str) -> Path:
        """``stores/<slug>-<8 hex of the content digest>.zarr``."""
        return self.stores / f"{slug}-{digest[:8]}.zarr"

    @property
    def runs(self) -> Path:
        """Results."""
        return self.root / "runs"

    @property
    def data(self) -> Path:
        """Datasets found by name."""
        return self.root / "data"

    @property
    def digests(self) -> Path:
        """Remembered digests of files."""
        return self.root / "digests"

    @property
    def last(self) -> Path:
        """Which store was extracted last."""
        return self.root / "last.json"


@dataclass(frozen=True)
class ExtractConfig:
    """``[extract]`` of fedcache.toml: every field is the long option of the same name."""

    dataset: str | None = None
    backbones: tuple[str, ...] = ()
    views: int = 1
    text: tuple[str, ...] = ()
    recipe: Mapping[str, str] = field(default_factory=dict)
    size: int | None = None
    limit: int | None = None
    layout: str | None = None
    device: str = "auto"
    dtype: str = "auto"
    batch: int | None = None
    workers: int | None = None
    threads: int = 1
    chunk_rows: int | None = None
    max_bad: str = "1%"
    weights: Mapping[str, str] = field(default_factory=dict)
    data: Mapping[str, str] = field(default_factory=dict)
    skip_missing: bool = False


@dataclass(frozen=True)
class PartitionConfig:
    """``[partition]`` of fedcache.toml. ``options`` are the arguments of the scheme (``alpha``, ``shards``, ...)."""

    scheme: str | None = None
    clients: int | None = None
    seed: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class TrainConfig:
    """``[train]`` of fedcache.toml, and the ``config.toml`` every run writes to re-run itself."""

    method: str | None = None
    preset: str = "paper"
    dataset: str | None = None
    store: str | None = None
    backbones: tuple[str, ...] = ()
    domain: tuple[str, ...] = ()
    partition: str | None = None
    clients_from: str | None = None
    rounds: int | None = None
    participation: str | None = None
    seeds: str = "0"
    eval_every: int = 0
    lift: str = "auto"
    device: str = "auto"
    dtype: str = "float32"
    set: Mapping[str, Any] = field(default_factory=dict)
    client_backbones: tuple[str, ...] = ()
    client_set: Mapping[str, Any] = field(default_factory=dict)
    aggregate: str = "mean"
    attack: str | None = None
    on_bad_update: str = "fail"
    byzantine: float = 0.2
    max_update_norm: float | None = None
    dp_clip: float | None = None
    dp_noise: float | None = None
    dp_delta: float | None = None


SECTIONS: dict[str, type] = {"extract": ExtractConfig, "partition": PartitionConfig, "train": TrainConfig}
C = TypeVar("C")


def read_file(path: Path | None) -> dict[str, dict[str, Any]]:
    """The sections of a configuration file; {} when ``path`` is None and the working directory has none.

    Raises:
        FedcacheError: USAGE, when the file is missing, is not TOML, or has an unknown section.
    """
    if path is None:
        path = Path(FILE_NAME)
        if not path.exists():
            return {}
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise FedcacheError(Exit.USAGE, f"Cannot read {path}: {error.strerror}.", "Check --config FILE.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise FedcacheError(
            Exit.USAGE, f"{path} is not valid TOML: {error}.", "Mend that line and run again."
        ) from error
    for name, section in data.items():
        if name not in SECTIONS:
            raise unknown(f"section in {path}", name, SECTIONS)
        if not isinstance(section, dict):
            raise FedcacheError(Exit.USAGE, f"{path}: {name} must be a table.", f"Write [{name}] on a line of its own.")
    return data


def resolve(kind: type[C], section: Mapping[str, Any], flags: Mapping[str, Any], where: str = FILE_NAME) -> C:
    """A configuration from a file's section and the flags; a flag that is None or empty was not given.

    Raises:
        FedcacheError: USAGE, for an unknown key or a value of the wrong type.
    """
    hints = typing.get_type_hints(kind)
    values: dict[str, Any] = {}
    for name, value in section.items():
        key = name.replace("-", "_")
        if key not in hints:
            raise unknown(f"key in {where}", name, hints)
        values[key] = _typed(name, value, hints[key], where)
    for name, value in flags.items():
        if value is None or value == () or value == [] or value == {}:
            continue
        values[name] = _typed(name, value, hints[name], "the command line")
    return kind(**values)


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
    raise FedcacheError(
        Exit.USAGE,
        f"{name} in {where} is {value!r}; expected {wanted}.",
        "See `fedcache config` for every key and its value.",
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


def to_toml(section: str, config: Any, meanings: Mapping[str, str]) -> list[str]:
    """A configuration as lines of TOML: what has no value is commented out, with its meaning.

    Args:
        section: its table.
        config: of that section.
        meanings: per long option of the command line.
    """
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
        option = "--option" if item.name == "options" else f"--{item.name.replace('_', '-')}"
        if typing.get_origin(hints[item.name]) is Mapping:
            tables += ["", f"# [{section}.{item.name}]  # {meanings[option]}"]
        else:
            shape = {int | None: "NUMBER", str | None: '"TEXT"'}.get(hints[item.name], '["TEXT", "TEXT"]')
            lines.append(f"# {item.name} = {shape}  # {meanings[option]}")
    return [*lines, *tables]
