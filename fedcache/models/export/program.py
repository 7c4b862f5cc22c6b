"""A saved model from images to probabilities as one torch module, and the program that torch.export makes of it.

Normalisation, frozen backbones, the stored dtype, what ``feat_post`` does and the method's own ``predict`` are all in
the module; what is left to a reader of images is the resize that ``ModelInput`` describes.
"""

from __future__ import annotations

import importlib
import importlib.util
import io
import json
import logging
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import joblib
import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save
from sklearn.compose import ColumnTransformer
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import Pipeline, make_pipeline
from sklearn.preprocessing import Binarizer, Normalizer
from torch import Tensor, nn
from torch.export.graph_signature import InputKind
from torch.nn.functional import interpolate, normalize

from fedcache.config import Home
from fedcache.errors import MachineError, StoreError, UsageError, unknown
from fedcache.extract import backbones
from fedcache.extract.backbones.encoder import ModuleEncoder
from fedcache.extract.embed_images import locate_recipe
from fedcache.extract.recipe import Recipe
from fedcache.federate.engine.deployed import DeployedModel
from fedcache.heads.linear import Tree
from fedcache.heads.losses import MASKED
from fedcache.models.predictor import Predictor
from fedcache.models.saved_model import SavedModel, owned
from fedcache.models.sources import has_known_backbones, read_recipes
from fedcache.store.outputs import write_output

WEIGHTS = (InputKind.PARAMETER, InputKind.BUFFER)

BATCH = 8
"""Rows that a program is compared on with the module it was made of."""

LIBRARIES = 1e-5
"""By which share of itself a feature is moved to see what another library makes of a model. Of 1,000 images through
efficientnet-lite0, features of torch and of onnxruntime differ by 3e-6 of their mean, and each of them from float64 by
2e-6."""

DRAWS = 32
"""Times that the features of ``BATCH`` rows are moved."""


@dataclass(frozen=True)
class ModelInput:
    """One input of a program, for a person and for ``predict.py``.

    Images are uint8 [N, 3, height, width], RGB: ``crop`` resizes the short side to round(height / crop_pct) and cuts
    out the centre, ``squash`` resizes both sides, ``none`` takes images of that size. Features are float32 [N, width],
    all backbones side by side, as they come out of the backbones.
    """

    name: str
    kind: str  # images | features
    height: int  # 1 for features
    width: int
    resize: str = "none"  # crop | squash | none
    interpolation: str = "bicubic"  # bicubic | bilinear, Pillow's
    crop_pct: float = 1.0
    backbones: tuple[str, ...] = ()  # that read it

    @property
    def how(self) -> tuple[Any, ...]:
        """What makes two inputs the same."""
        return (self.height, self.width, self.resize, self.interpolation, self.crop_pct)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)

    def example(self, rows: int) -> Tensor:
        """Rows as the input takes them, drawn from a seed: images of noise and of coloured clouds in turns.

        Backbones answer to clouds as strongly as to photographs, and to noise hardly.
        """
        draw = torch.Generator().manual_seed(0)
        if self.kind == "features":
            return torch.randn(rows, self.width, generator=draw)
        x = torch.randint(
            0, 256, (rows, 3, self.height, self.width), generator=draw, dtype=torch.uint8
        )
        clouds = torch.rand(len(x[1::2]), 3, 4, 4, generator=draw)
        if len(clouds):
            clouds = interpolate(clouds, (self.height, self.width), mode="bicubic")
            x[1::2] = (255 * clouds.clamp(0, 1)).to(torch.uint8)
        return x


@dataclass(frozen=True)
class AnswerGap:
    """Largest differences of two answers to the same rows."""

    scores: float
    probabilities: float

    @staticmethod
    def of(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> AnswerGap:
        """Of (scores, probabilities), each [N, C]; a class that neither ever predicts differs by 0."""
        gaps = []
        for a, b in zip(found, wanted, strict=True):
            never = (a < MASKED / 2) & (b < MASKED / 2)
            gaps.append(float((a - b).abs().masked_fill(never, 0.0).max()))
        return AnswerGap(*gaps)


class ImageModel(nn.Module):
    """Scores and probabilities, each [N, C] float32, of one or several inputs (``ModelInput``).

    Args:
        predictor: one member, ready to score.
        encoders: of the recipes, in the order in which their features are joined; () for a model that reads features,
            or images without a frozen backbone.
        reads: which of the inputs each encoder reads.
    """

    def __init__(
        self, predictor: Predictor, encoders: Sequence[ModuleEncoder], reads: Sequence[int]
    ) -> None:
        super().__init__()
        (self.saved,), (self.made,) = predictor.members, predictor.deployed
        self.client = predictor.client
        self.temperature = predictor.softmax_temperature
        self.encoders = tuple(encoders)
        self.reads = tuple(reads)
        live = () if predictor.encoders is None else (getattr(predictor.encoders, "encoder", None),)
        held = [e.module for e in (*encoders, *live) if isinstance(e, ModuleEncoder)]
        self.backbones = nn.ModuleList(held)  # so that their weights are the program's own
        self._names = [self._hold("server", self.made.down), self._hold("own", self.made.personal)]
        self._scaling = self._hold("features", self.saved.tree("features/"))

    def _hold(self, group: str, tree: Tree) -> dict[str, str]:
        """Make buffers of tensors: name in the tree -> name of the buffer."""
        names = {name: f"{group}__{name.replace('.', '__').replace('/', '__')}" for name in tree}
        for name, buffer in names.items():
            self.register_buffer(buffer, tree[name])
        return names

    def features(self, *inputs: Tensor) -> Tensor:
        """What the method reads: [N, D] in its dtype, or uint8 [N, H W 3]."""
        if self.saved.facts.image is not None:
            return inputs[0].permute(0, 2, 3, 1).flatten(1)
        return self.read(self.embed(*inputs))

    def embed(self, *inputs: Tensor) -> list[Tensor]:
        """Features of each backbone, float32 [N, d], before they are rounded to what a store keeps."""
        if not self.encoders:
            return list(torch.split(inputs[0], list(self.saved.facts.widths), -1))
        return [
            encoder.features(encoder.normalise(inputs[which].permute(0, 2, 3, 1)))
            for encoder, which in zip(self.encoders, self.reads, strict=True)
        ]

    def read(self, parts: Sequence[Tensor]) -> Tensor:
        """[N, d] of each backbone -> [N, D] in the method's dtype, as ``SavedModel.read`` does of a store."""
        facts = self.saved.facts
        if self.encoders:
            parts = [
                part.half().float() if recipe.dtype == "float16" else part
                for part, recipe in zip(parts, self.saved.recipes, strict=True)
            ]
        x = self.post(parts)
        # of the client whose model it is; of nobody where it is the one for all
        ids = self.made.ctx.ids
        own = facts.overrides.get(ids[0] if ids else -1)
        if own is not None and own.columns:
            x = torch.cat([x[:, a:b] for a, b in own.columns], -1)
        return x.to(getattr(torch, facts.dtype))

    def post(self, parts: Sequence[Tensor]) -> Tensor:
        """``client_data.prepare`` on tensors: [N, d] of each backbone -> [N, D] float32."""
        how = self.saved.facts.feat_post
        if how == "l2":
            parts = [normalize(p, dim=-1, eps=1e-12) for p in parts]
        x = torch.cat(list(parts), -1)
        if how == "l2_concat":
            x = normalize(x, dim=-1, eps=1e-12)
        elif how == "sign":
            x = (x > 0).float()
        elif how == "standardize":
            mean, scale = (getattr(self, self._scaling[name]) for name in ("mean", "scale"))
            x = ((x - mean) / scale).float()
        return x

    def forward(self, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Scores, and their softmax after division by the temperature."""
        return self.predict(self.features(*inputs))

    def predict(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Scores and probabilities of what the method reads."""
        down, own = (
            {name: getattr(self, buffer) for name, buffer in names.items()} for names in self._names
        )
        scores = replace(self.made, down=down, personal=own).scores(x)
        return scores.float(), (scores / self.temperature).softmax(-1).float()


@dataclass(frozen=True)
class ModelProgram:
    """An exported program, and what it reads."""

    module: ImageModel
    exported: torch.export.ExportedProgram
    inputs: tuple[ModelInput, ...]
    difference: AnswerGap  # of drawn rows, from the module
    libraries: AnswerGap  # what features moved as another library moves them change

    @property
    def bytes(self) -> int:
        """That weights and constants take."""
        held = [*self.exported.state_dict.values(), *self.exported.constants.values()]
        return sum(t.numel() * t.element_size() for t in held if isinstance(t, Tensor))


def make_program(
    predictor: Predictor, home: Home, given: Any = None, *, features: bool = False
) -> ModelProgram:
    """The whole model as a program that takes any number of rows.

    Raises UsageError for several seeds or a ``predict`` that torch.export cannot follow, MachineError for weights that
    are not here.

    Args:
        predictor: of one member, on the CPU.
        home: where weights are looked for.
        given: weights files by backbone.
        features: read features in place of images, whatever the backbones are.
    """
    model = predictor.members[0]
    encoders: list[ModuleEncoder] = []
    reads: tuple[int, ...] = ()
    if model.facts.image is not None:
        inputs = _images_as_they_are(model)
    elif features or not has_known_backbones(model):
        inputs = (
            ModelInput(
                "features", "features", 1, model.facts.width, backbones=model.facts.backbones
            ),
        )
    else:
        planned = [locate_recipe(recipe, home, given) for recipe in read_recipes(model)]
        for item in planned:
            encoder = backbones.load(item.backbone, item.weights, item.recipe)
            # another library computes it, or a function makes its inputs
            if type(encoder) is not ModuleEncoder:
                raise UsageError(
                    f"{item.backbone.name} cannot be part of an exported program: it is no torch module that takes "
                    "pixels.",
                    "fedcache predict answers with it; -o head.safetensors exports the head, which reads its features.",
                )
            encoders.append(encoder)
        inputs, reads = image_inputs([item.recipe for item in planned])
    module = ImageModel(predictor, encoders, reads).eval()
    exported = export(module, inputs)
    rows = [i.example(BATCH) for i in inputs]
    with torch.no_grad():
        gap = AnswerGap.of(exported.module()(*rows), module(*rows))
    return ModelProgram(module, exported, inputs, gap, moved_by_libraries(module, inputs))


def moved_by_libraries(module: ImageModel, inputs: Sequence[ModelInput]) -> AnswerGap:
    """What becomes of scores and probabilities when features differ as those of two libraries do.

    A store keeps features as float16 by default, and the model reads them so. Two libraries, or one with batches of
    two sizes, sum the same products in two orders; where the sums lie on both sides of the middle between two float16
    numbers (of 1,280 features of an image some 7 do), they are rounded apart by up to 1e-3 of the feature. No program
    can tell on which side another one's sum lay. So the features of ``BATCH`` drawn rows are moved ``DRAWS`` times,
    each by up to ``LIBRARIES`` of itself, before they are rounded. Without a backbone in the program nothing moves.
    """
    if not module.encoders:
        return AnswerGap(0.0, 0.0)
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        parts = module.embed(*(i.example(BATCH) for i in inputs))
        wanted = [t.repeat(DRAWS, 1) for t in module.predict(module.read(parts))]
        tiled = [part.repeat(DRAWS, 1) for part in parts]
        moved = [t * (1 + LIBRARIES * (2 * torch.rand(t.shape, generator=draw) - 1)) for t in tiled]
        return AnswerGap.of(module.predict(module.read(moved)), wanted)


def image_inputs(recipes: Sequence[Recipe]) -> tuple[tuple[ModelInput, ...], tuple[int, ...]]:
    """One input per way of resizing, and which of them each recipe reads."""
    found: list[ModelInput] = []
    reads = []
    for r in recipes:
        one = ModelInput(
            "", "images", r.size, r.size, r.resize, r.interpolation, r.crop_pct, (r.backbone,)
        )
        same = [n for n, other in enumerate(found) if other.how == one.how]
        if same:
            found[same[0]] = replace(
                found[same[0]], backbones=(*found[same[0]].backbones, r.backbone)
            )
        else:
            found.append(one)
        reads.append(same[0] if same else len(found) - 1)
    named = (
        replace(i, name=f"images_{n + 1}" if len(found) > 1 else "images")
        for n, i in enumerate(found)
    )
    return tuple(named), tuple(reads)


def _images_as_they_are(model: SavedModel) -> tuple[ModelInput, ...]:
    """The input of a method that trains on images: of the size of the data, or brought to the size of its recipe."""
    H, W = model.facts.image or (0, 0)
    recipe = None
    if has_known_backbones(model):
        recipe = read_recipes(model)[-1]
    if recipe is None or not recipe.size:
        return (ModelInput("images", "images", H, W, backbones=model.facts.backbones),)
    how = (recipe.resize, recipe.interpolation, recipe.crop_pct)
    return (ModelInput("images", "images", H, W, *how, model.facts.backbones),)


def export(module: ImageModel, inputs: Sequence[ModelInput]) -> torch.export.ExportedProgram:
    """The module as a program for any number of rows.

    Raises UsageError, naming the method, for one whose ``predict`` depends on numbers as no program can.
    """
    rows = torch.export.Dim("N")
    try:
        with torch.no_grad(), quiet_export():
            made = torch.export.export(
                module,
                tuple(i.example(2) for i in inputs),
                dynamic_shapes={"inputs": tuple({0: rows} for _ in inputs)},
                strict=False,
            )
            return without_unused(made)
    except Exception as error:  # torch.export says in many classes that it cannot follow
        raise UsageError(
            f"predict of {module.saved.facts.method} cannot be made a program: "
            f"{str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__}",
            "fedcache export-model RUN -o head.safetensors   writes its tensors.",
        ) from error


def without_unused(made: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """The program without weights that nothing reads, as those of a text tower; in place."""
    signature = made.graph_signature
    idle = {
        node.name: node for node in made.graph.nodes if node.op == "placeholder" and not node.users
    }
    gone = [
        s
        for s in signature.input_specs
        if s.kind in WEIGHTS and getattr(s.arg, "name", None) in idle
    ]
    for spec in gone:
        made.state_dict.pop(str(spec.target), None)
        made.constants.pop(str(spec.target), None)
        made.graph.erase_node(idle[str(getattr(spec.arg, "name", None))])
    signature.input_specs[:] = [spec for spec in signature.input_specs if spec not in gone]
    made.graph_module.recompile()
    return made


@contextmanager
def quiet_export() -> Iterator[None]:
    """Without what torch and onnxscript warn of and log about their own insides."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


# The files that an export writes, each whole or not at all, with the model card in it.


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
            writes = "a folder"
            if FORMATS[asked]:
                writes = f"a {FORMATS[asked]} file"
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


LINEAR_TO = 1e-6
"""Largest difference of scores, relative to the largest, of a head that is called linear."""

LENGTHS = (0.01, 1.0, 30.0)
"""Of the drawn rows, in standard deviations: a bend near zero or far out is met by one of them."""

UNIT_VECTORS = 1024
"""Unit vectors that are scored at a time."""


@dataclass(frozen=True)
class LinearHead:
    """Scores are x @ coef.T + intercept, of features after ``feat_post``."""

    coef: NDArray[np.float64]  # [C, D]
    intercept: NDArray[np.float64]  # [C]
    centred: bool  # scores minus their mean over classes, where only these are linear


def linear_head(predictor: Predictor) -> LinearHead:
    """The head of a model that is linear in features.

    Raises UsageError, naming the method, for any other one.
    """
    (model,), (saved,) = predictor.deployed, predictor.members
    name = saved.facts.method
    if saved.facts.image is not None:
        raise UsageError(
            f"{name} reads images, so its model is not linear in features.",
            "fedcache export-model RUN -o model.onnx",
        )
    exact = _in_double(model)
    for centred in (False, True):
        found = _fitted(exact, centred)
        if found is not None:
            return found
    raise UsageError(
        f"The scores of {name} are not linear in the features, so no coefficients give them.",
        "fedcache export-model RUN -o DIR, model.onnx, model.pt2 or head.safetensors   takes every method.",
    )


def _in_double(model: DeployedModel) -> DeployedModel:
    """The same tensors, computed with in float64, where a bend is not hidden by rounding."""
    env = replace(model.ctx.env, dtype=torch.float64, text=_double(model.ctx.env.text))
    down, own = (
        {k: t.double() if t.is_floating_point() else t for k, t in tree.items()}
        for tree in (model.down, model.personal)
    )
    return replace(model, down=down, personal=own, ctx=replace(model.ctx, env=env))


def _double(t: Tensor | None) -> Tensor | None:
    if t is None:
        return None
    return t.double()


def _fitted(model: DeployedModel, centred: bool) -> LinearHead | None:
    """The linear function through the values of a model; None where another row disagrees."""
    D = model.ctx.env.width

    def scores(x: Tensor) -> Tensor:
        with torch.no_grad():
            s = model.scores(x)
        # A class that is never predicted has one very low score; the mean is of the others.
        if centred:
            return torch.where(live, s - s[:, live].mean(-1, keepdim=True), s)
        return s

    with torch.no_grad():
        live = model.scores(torch.zeros(1, D, dtype=torch.float64))[0] > MASKED / 2
    b = scores(torch.zeros(1, D, dtype=torch.float64))[0]
    eye = torch.eye(D, dtype=torch.float64)
    W = (
        torch.cat(
            [scores(eye[start : start + UNIT_VECTORS]) for start in range(0, D, UNIT_VECTORS)]
        )
        - b
    )
    drawn = torch.randn(64, D, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for length in LENGTHS:
        x = drawn * length
        wanted = scores(x)
        gap = (x @ W + b - wanted).abs()
        size = wanted[:, live].abs().max()
        if not bool((gap <= LINEAR_TO * (1e-3 + size)).all()):  # False for NaN
            return None
    return LinearHead(W.T.numpy().copy(), b.numpy().copy(), centred)


def estimator(predictor: Predictor, head: LinearHead) -> Any:
    """A scikit-learn classifier of raw features [N, D], all backbones side by side: names in ``classes_`` (sorted).

    A ``LogisticRegression`` with the head's coefficients, after the steps of ``feat_post`` where these are not linear.
    Its probabilities are those of ``predict``. Raises UsageError for a model of one class.
    """
    saved = predictor.members[0]
    facts = saved.facts
    if len(facts.classes) < 2:
        raise UsageError(
            "The model has one class, and a LogisticRegression needs two.",
            "Use -o head.safetensors",
        )
    order = np.argsort(np.array(facts.classes), kind="stable")
    coef = head.coef[order] / predictor.softmax_temperature
    intercept = head.intercept[order] / predictor.softmax_temperature
    own = facts.overrides.get(facts.saved.get(predictor.client or "", -1))
    if own is not None and own.columns:
        whole = np.zeros((len(coef), facts.width))
        whole[:, np.concatenate([np.arange(a, b) for a, b in own.columns])] = coef
        coef = whole
    if facts.feat_post == "standardize":
        mean, scale = (
            saved.tensors[f"features/{name}"].double().numpy() for name in ("mean", "scale")
        )
        coef = coef / scale
        intercept = intercept - coef @ mean
    if len(order) == 2:  # what scikit-learn keeps of two classes
        coef = coef[1:] - coef[:1]
        intercept = intercept[1:] - intercept[:1]
    last = LogisticRegression()
    last.coef_ = coef
    last.intercept_ = intercept
    last.classes_ = np.array(facts.classes)[order]
    last.n_features_in_ = facts.width
    last.n_iter_ = np.array([0])
    return _after(facts.feat_post, facts.widths, last)


def _after(feat_post: str, widths: tuple[int, ...], last: LogisticRegression) -> Any:
    """The classifier behind the steps of ``feat_post``; ``standardize`` is in its coefficients."""
    if feat_post in ("none", "standardize"):
        return last
    if feat_post == "sign":
        return _ready(make_pipeline(Binarizer(threshold=0.0), last))
    if feat_post == "l2_concat" or len(widths) == 1:
        return _ready(make_pipeline(Normalizer(), last))
    starts = np.cumsum([0, *widths])
    blocks = [
        (f"block_{k}", Normalizer(), slice(int(a), int(a) + w))
        for k, (a, w) in enumerate(zip(starts, widths, strict=False))
    ]
    return _ready(make_pipeline(ColumnTransformer(blocks), last))


def _ready(made: Pipeline) -> Pipeline:
    """A pipeline whose steps need no fit."""
    for _, step in made.steps[:-1]:
        step.fit(np.zeros((1, made.steps[-1][1].n_features_in_)))
    return made
