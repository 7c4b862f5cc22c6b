"""``fedcache export-model``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fedcache.commands.options import Given, command, configured, pick, worded
from fedcache.commands.output import CommandResult, TerminalObserver
from fedcache.commands.predict import RunName, check_apart, find_model
from fedcache.config import Home
from fedcache.models.saved_model import ONE_SEED, ExportOptions, ModelOptions


@command("export-model", worded(pick(ModelOptions), "seed", meaning=ONE_SEED), pick(ExportOptions))
def export_model(observer: TerminalObserver, given: Given, run: RunName) -> CommandResult:
    """Write the model of a finished run for plain torch, ONNX, torch.export, safetensors or scikit-learn.

    A folder, .onnx and .pt2 hold the frozen backbones too, and read images; .safetensors and .joblib (linear heads
    only) read features. Each carries a model card. ONNX needs the extra export.

    Example: fedcache export-model 3f9c -o model.onnx
    """
    model = configured(ModelOptions, given)
    wanted = configured(ExportOptions, given)
    place = find_model(run, model)
    check_apart(None if wanted.out is None else Path(wanted.out), place, model)
    from fedcache.report.model_card import export_model as write_model

    done = write_model(place, model, wanted, Home.from_environment(), observer)
    data: dict[str, Any] = {
        "path": str(done.path),
        "format": done.kind,
        "bytes": done.bytes,
        **done.said,
    }
    lines = [f"{done.kind}, {done.bytes / 1e6:,.2f} MB: {done.path}"]
    for one in done.said.get("inputs", []):
        if one["kind"] == "images":
            shape = f"uint8 [N, 3, {one['height']}, {one['width']}]"
        else:
            shape = f"[N, {one['width']}]"
        lines.append(
            f"  reads {one['name']} {shape} ({', '.join(one['backbones']) or 'no known backbone'})"
        )
    if "difference" in done.said:
        gap = done.said["difference"]
        moved = done.said["moved_by_libraries"]
        lines.append(
            f"  over drawn rows, scores differ by at most {gap['scores']:.1g} and probabilities by "
            f"{gap['probabilities']:.1g} from this model's"
        )
        if moved["scores"]:
            lines.append(
                f"  features that another library rounds otherwise can move scores by {moved['scores']:.1g} and "
                f"probabilities by {moved['probabilities']:.1g}"
            )
    return CommandResult(data, lines)
