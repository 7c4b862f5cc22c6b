"""The files that an export writes, each whole or not at all, with the model card in it."""

from __future__ import annotations

import importlib
import importlib.util
import io
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import joblib
import torch
from safetensors.torch import save
from torch import Tensor

from fedcache.errors import MachineError, StoreError, UsageError, unknown
from fedcache.heads.losses import MASKED
from fedcache.models.collect import owned
from fedcache.models.export.linear_head import LinearHead, estimator, linear_head
from fedcache.models.export.program import AnswerGap, ModelProgram, quiet_export
from fedcache.models.predictor import Predictor
from fedcache.store.outputs import write_output

FORMATS = {
    "folder": "",
    "onnx": ".onnx",
    "torch": ".pt2",
    "safetensors": ".safetensors",
    "sklearn": ".joblib",
}
"""Name of a format -> how its file ends."""

PROGRAMS = ("folder", "onnx", "torch")
"""Those that hold the backbones too."""

MOST_ONNX = 2_000_000_000
"""Bytes of weights in one .onnx file; its encoding (protobuf) ends at 2 GiB."""

OPSET = 18

AGREE = 1e-4
"""Largest difference of a graph's scores, as a share of the largest (at least 1), and of its probabilities, beyond what
the rounding of features in another library does (``moved_by_libraries``)."""

FLOAT32 = 1e-6
"""Share of a score by which two libraries may differ that compute with 24 bits."""


@dataclass(frozen=True)
class Parts:
    """What is written."""

    predictor: Predictor
    card: str  # Markdown
    program: ModelProgram | None = None  # of the formats in ``PROGRAMS``

    @property
    def facts(self) -> dict[str, Any]:
        """Plain JSON values that a reader of any format needs."""
        facts = self.predictor.members[0].facts
        program = self.program
        return {
            "method": facts.method,
            "run": facts.run,
            "seed": facts.seed,
            "client": self.predictor.client,
            "dataset": facts.dataset,
            "classes": list(facts.classes),
            "temperature": self.predictor.softmax_temperature,
            "calibrated": self.predictor.calibrated,
            "feat_post": facts.feat_post,
            "widths": list(facts.widths),
            "backbones": list(facts.backbones),
            "recipes": [dict(r) for r in facts.recipes],
            "inputs": [] if program is None else [i.to_dict() for i in program.inputs],
            "outputs": ["scores", "probabilities"],
        }

    @property
    def metadata(self) -> dict[str, str]:
        """The facts as text, and the card."""
        facts = {
            k: v if isinstance(v, str) else json.dumps(v, ensure_ascii=False)
            for k, v in self.facts.items()
        }
        return {**facts, "card": self.card}


def format_of(out: Path, asked: str | None) -> str:
    """The format that is asked for, else that of the ending. Raises UsageError for an ending of none or of another."""
    if asked is not None:
        if asked not in FORMATS:
            raise unknown("--format", asked, FORMATS)
        ending = out.suffix.lower()
        other = next((kind for kind, known in FORMATS.items() if known and known == ending), asked)
        if other != asked and not out.is_dir():
            writes = f"a {FORMATS[asked]} file" if FORMATS[asked] else "a folder"
            raise UsageError(
                f"{out} ends in {ending}, and --format {asked} writes {writes}.",
                f"-o {out.with_suffix(FORMATS[asked])}, or --format {other}",
            )
        return asked
    if out.is_dir() or not out.suffix:
        return "folder"
    for name, ending in FORMATS.items():
        if ending and out.suffix.lower() == ending:
            return name
    raise unknown(
        "file ending", out.suffix, [e for e in FORMATS.values() if e], hint="--format folder -o DIR"
    )


def check_place(out: Path, kind: str, force: bool) -> None:
    """Refuse, before anything is computed, to write over what is there, or without what a format needs.

    Raises StoreError for what is there, UsageError for a folder where a file is meant or a file where a folder is,
    MachineError without the packages of ONNX.
    """
    above = next(p for p in out.absolute().parents if p.exists())
    if not above.is_dir():
        raise UsageError(f"{above} is a file, and {out} would lie in it.", "Choose another -o.")
    if out.exists() and out.is_dir() != (kind == "folder"):
        raise UsageError(
            f"{out} is a {'folder' if out.is_dir() else 'file'}, and --format {kind} writes a "
            f"{'folder' if kind == 'folder' else 'file'}.",
            f"For example -o model{FORMATS[kind]}",
        )
    if not force and out.exists() and (kind != "folder" or any(out.iterdir())):
        raise StoreError(
            f"{out} exists and is not empty.", "Choose another -o, or --force to write over it."
        )
    missing = [
        name
        for name in ("onnx", "onnxscript", "onnxruntime")
        if importlib.util.find_spec(name) is None
    ]
    if kind == "onnx" and missing:
        raise MachineError(
            f"ONNX needs {', '.join(missing)}, which are not installed here.",
            "pip install 'fedcache[export]'",
        )


def write(out: Path, kind: str, parts: Parts) -> dict[str, Any]:
    """Write one format, and say what there is to say of it in plain JSON values. Raises as the writers below."""
    writers: Mapping[str, Callable[[Path, Parts], dict[str, Any]]] = {
        "folder": write_folder,
        "onnx": write_onnx,
        "torch": write_torch,
        "safetensors": write_head,
        "sklearn": write_sklearn,
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    return writers[kind](out, parts)


def write_folder(out: Path, parts: Parts) -> dict[str, Any]:
    """``model.pt2``, ``head.safetensors``, ``model.json``, ``predict.py`` and ``README.md``; other files stay."""
    assert parts.program is not None
    out.mkdir(parents=True, exist_ok=True)
    reads = parts.program.inputs[0].kind
    script = (Path(__file__).parent / f"predict_{reads}.py").read_text(encoding="utf-8")
    needs, given = {
        "images": ("torch, numpy and pillow", "photo.jpg"),
        "features": ("torch and numpy", "features.npy"),
    }[reads]
    readme = (
        f"# {parts.facts['method']} of {parts.facts['dataset']}\n\nNeeds {needs}: `python predict.py {given}` prints "
        f"name, class and probability. This is predict.py:\n\n```python\n{script}```\n\n`model.pt2` is the whole model "
        "as a program of torch.export, `head.safetensors` its trained part, `model.json` what they read.\n\n"
        f"{parts.card}"
    )
    write_torch(out / "model.pt2", parts)
    write_head(out / "head.safetensors", parts)
    write_output(
        out / "model.json", (json.dumps(parts.facts, indent=1, ensure_ascii=False) + "\n").encode()
    )
    write_output(out / "predict.py", script.encode())
    write_output(out / "README.md", readme.encode())
    return said_of(parts, parts.program.difference)


def write_torch(out: Path, parts: Parts) -> dict[str, Any]:
    """A program for ``torch.export.load``, with ``model.json`` and ``README.md`` as its extra files."""
    assert parts.program is not None
    held = io.BytesIO()
    extra = {"model.json": json.dumps(parts.facts, ensure_ascii=False), "README.md": parts.card}
    with quiet_export():
        torch.export.save(parts.program.exported, held, extra_files=extra)
    write_output(out, held.getbuffer())
    return said_of(parts, parts.program.difference)


def write_onnx(out: Path, parts: Parts) -> dict[str, Any]:
    """One graph from pixels to probabilities, compared with torch in onnxruntime before it is written.

    Raises UsageError for weights beyond what one file may hold and for a ``predict`` that ONNX has no operators for,
    MachineError for a graph that gives other numbers.
    """
    program = parts.program
    assert program is not None
    if program.bytes > MOST_ONNX:
        raise UsageError(
            f"The weights take {program.bytes / 1e9:.1f} GB, and an .onnx file holds 2.",
            "Use --format torch -o m.pt2",
        )
    method = parts.facts["method"]
    try:
        with quiet_export():
            made: Any = torch.onnx.export(
                program.exported,
                dynamo=True,
                opset_version=OPSET,
                verbose=False,
                input_names=[i.name for i in program.inputs],
                output_names=["scores", "probabilities"],
            )
        made.model.metadata_props.update(parts.metadata)
        raw = made.model_proto.SerializeToString()
        gap, most = onnx_difference(raw, program)
    except MemoryError:
        raise
    except Exception as error:  # torch.onnx and onnxruntime say in many classes what they cannot do
        raise UsageError(
            f"predict of {method} cannot be made an ONNX graph: "
            f"{str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__}",
            "fedcache export-model RUN -o model.pt2   writes it for torch.",
        ) from error
    if not (gap.scores <= most.scores and gap.probabilities <= most.probabilities):  # True for NaN
        raise MachineError(
            f"In onnxruntime scores of {method} differ by {gap.scores:.1g} and probabilities by {gap.probabilities:.1g}"
            f" from torch's, expected at most {most.scores:.1g} and {most.probabilities:.1g}; nothing is written.",
            "fedcache export-model RUN -o model.pt2",
        )
    write_output(out, raw)
    return said_of(parts, gap)


def said_of(parts: Parts, difference: AnswerGap) -> dict[str, Any]:
    """What there is to say of a program, in plain JSON values."""
    assert parts.program is not None
    return {
        "inputs": parts.facts["inputs"],
        "difference": asdict(difference),
        "moved_by_libraries": asdict(parts.program.libraries),
    }


def onnx_difference(
    raw: bytes, program: ModelProgram, rows: int = 8
) -> tuple[AnswerGap, AnswerGap]:
    """(largest differences between onnxruntime and torch over drawn rows, what they may be)."""
    onnxruntime: Any = importlib.import_module("onnxruntime")
    session = onnxruntime.InferenceSession(raw, providers=["CPUExecutionProvider"])
    given = [i.example(rows) for i in program.inputs]
    named = {i.name: x.numpy() for i, x in zip(program.inputs, given, strict=True)}
    found = [torch.from_numpy(t) for t in session.run(["scores", "probabilities"], named)]
    with torch.no_grad():
        wanted = program.module(*given)
    live = wanted[0][wanted[0] > MASKED / 2]  # without classes that are never predicted
    size = float(live.abs().max().clamp(min=1.0))
    libraries = program.libraries
    most = AnswerGap(
        AGREE * size + libraries.scores, AGREE + FLOAT32 * size + libraries.probabilities
    )
    return AnswerGap.of(found, wanted), most


def write_head(out: Path, parts: Parts) -> dict[str, Any]:
    """The trained tensors alone: ``server/..``, ``own/..``, ``features/..``, and ``linear/..`` of a linear head."""
    predictor = parts.predictor
    made = predictor.deployed[0]
    tensors: dict[str, Tensor] = {f"server/{k}": t for k, t in made.down.items()}
    tensors |= {f"own/{k}": t for k, t in made.personal.items()}
    tensors |= {f"features/{k}": t for k, t in predictor.members[0].tree("features/").items()}
    head: LinearHead | None
    try:
        head = linear_head(predictor)
    except UsageError:
        head = None
    if head is not None:
        tensors["linear/weight"] = torch.from_numpy(head.coef).float()
        tensors["linear/bias"] = torch.from_numpy(head.intercept).float()
    whole = owned(tensors)
    write_output(out, save(whole, parts.metadata))
    return {"tensors": {k: list(t.shape) for k, t in whole.items()}, "linear": head is not None}


def write_sklearn(out: Path, parts: Parts) -> dict[str, Any]:
    """A scikit-learn classifier of features, for ``joblib.load``. Raises UsageError for a head that is not linear."""
    head = linear_head(parts.predictor)
    made = estimator(parts.predictor, head)
    made.fedcache_ = parts.metadata
    held = io.BytesIO()
    joblib.dump(made, held)
    write_output(out, held.getbuffer())
    return {"features": sum(parts.predictor.members[0].facts.widths), "centred": head.centred}


def size_of(out: Path) -> int:
    """Bytes of a file, or of all files of a folder."""
    return sum(
        os.path.getsize(f)  # noqa: PTH202
        for f in ([out] if out.is_file() else [f for f in out.rglob("*") if f.is_file()])
    )
