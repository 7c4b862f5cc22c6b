"""What ``fedcache doctor`` asks of torch, in a process of its own: a broken import must not end the other checks.

Run as a script it imports torch, says what devices torch sees, then imports what must fit torch, each answer as a line
of JSON on stdout. One process asks everything, as importing torch costs seconds.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from typing import Any

from fedcache.commands.doctor_home import Row, check
from fedcache.errors import FedcacheError
from fedcache.extract.device import resolve_device

SEE_TORCH = "See the line on torch above."


def start() -> subprocess.Popen[str]:
    """The process, at work while the caller looks at other things."""
    words = [sys.executable, "-W", "ignore", "-m", __name__]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen[str]) -> list[Row]:
    """The lines on torch and torchvision, on the device, and on CUDA."""
    out, err = process.communicate(timeout=300)
    answers: dict[str, Any] = {}
    for line in out.splitlines():
        if line.startswith("{"):
            answers |= json.loads(line)
    last = (err.strip().splitlines() or ["no message"])[-1]
    if "devices" not in answers:
        return [pair_row(None, err), check("device", "fail", last, SEE_TORCH), check("CUDA", "fail", last, SEE_TORCH)]
    return [pair_row(answers.get("versions"), err), device_row(answers["devices"]), cuda_row(answers["devices"])]


def pair_row(versions: str | None, err: str) -> Row:
    """Whether torch, torchvision and timm import together.

    A CPU-only torch beside the registry's torchvision fails with "operator torchvision::nms does not exist", because
    torchvision's binary was built against another torch.

    Args:
        versions: of torch and torchvision; None when an import failed.
        err: what the process wrote to stderr.
    """
    if versions is not None:
        return check("torch + torchvision", "ok", versions)
    last = (err.strip().splitlines() or ["no message"])[-1]
    if "nms" in err or "torchvision" in err:
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
    status, why = ("warn", "an NVIDIA GPU may be there, but") if shutil.which("nvidia-smi") else ("ok", "no GPU:")
    return check("CUDA", status, f"{why} torch (CUDA {built}) finds none", "nvidia-smi" if status == "warn" else "")


def devices_of(torch: Any) -> dict[str, Any]:
    """What torch says of CUDA and what ``--device auto`` takes, or the error that says it."""
    try:
        usable = torch.cuda.is_available()
        gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if usable else []
        found = resolve_device("auto")
    except (RuntimeError, FedcacheError) as error:
        return {"error": str(error)}
    auto = [found.kind, found.name, found.why]
    return {"built": torch.version.cuda, "usable": usable, "gpus": gpus, "auto": auto}


def main() -> None:
    """Print the answers; leave with a traceback where an import fails."""
    import torch

    print(json.dumps({"devices": devices_of(torch)}), flush=True)
    import open_clip  # noqa: F401
    import timm  # noqa: F401
    import torchvision

    print(json.dumps({"versions": f"{torch.__version__} {torchvision.__version__}"}), flush=True)


if __name__ == "__main__":
    main()
