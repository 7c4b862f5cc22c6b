"""``fedcache export-model``: exports trained models for other programs."""

from __future__ import annotations

from fedcache.commands.options import Given, command, configured, pick, worded
from fedcache.commands.output import CommandResult, TerminalObserver
from fedcache.commands.predict import RunName, check_apart, find_model
from fedcache.config import Home
from fedcache.models.saved_model import ONE_SEED, ExportOptions, ModelOptions


@command("export-model", worded(pick(ModelOptions), "seed", meaning=ONE_SEED), pick(ExportOptions))
def export_model(observer: TerminalObserver, given: Given, run: RunName) -> CommandResult:
    """Export a trained model for plain torch, ONNX, torch.export, safetensors or scikit-learn.

    An exported folder, .onnx or .pt2 file includes the frozen backbones and reads images. A .safetensors or .joblib
    file (.joblib: linear heads only) reads features. Each export includes a model card. ONNX needs the extra export.

    Example: fedcache export-model 3f9c -o model.onnx
    """
    model = configured(ModelOptions, given)
    request = configured(ExportOptions, given)
    place = find_model(run, given["runs"], observer)
    check_apart(given["out"], place, model)
    from fedcache.report.model_card import export_model as write_model

    done = write_model(place, model, request, Home.from_environment(), observer)
    data = {
        "path": str(done.path),
        "format": done.kind,
        "bytes": done.bytes,
        **done.written,
    }
    megabytes = done.bytes / 1e6
    lines = [f"{done.kind}, {megabytes:,.2f} MB: {done.path}"]
    for entry in done.written.get("inputs", []):
        shape = f"[N, {entry['width']}]"
        if entry["kind"] == "images":
            height = entry["height"]
            shape = f"uint8 [N, 3, {height}, {entry['width']}]"
        backbones = ", ".join(entry["backbones"]) or "no known backbone"
        lines.append(f"  reads {entry['name']} {shape} ({backbones})")
    if "difference" in done.written:
        # The largest differences between the exported program and the trained model, measured on random rows.
        template = "{scores:.1g} and probabilities by {probabilities:.1g}"
        gap = template.format(**done.written["difference"])
        lines.append(f"  on random rows, scores differ from this model's by at most {gap}")
        moved = done.written["moved_by_libraries"]
        if moved["scores"]:
            gap = template.format(**moved)
            lines.append(f"  rounding differences of another library can change scores by {gap}")
    return CommandResult(data, lines)
