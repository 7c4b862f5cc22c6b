"""Export of a saved model: one torch module from images to probabilities, its program, and the exported files.

The module holds normalisation, frozen backbones, the stored dtype, the transformation of ``feat_post`` and the method's
own ``predict``. A user of the module only has to resize images as ``ModelInput`` describes.
"""

from __future__ import annotations

import importlib
import importlib.util
import io
import json
import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import joblib
import numpy as np
import torch
from safetensors.torch import save
from sklearn.compose import ColumnTransformer
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import Pipeline, make_pipeline
from sklearn.preprocessing import Binarizer, Normalizer, StandardScaler
from torch import Tensor, nn
from torch.export.graph_signature import InputKind
from torch.nn.functional import interpolate, normalize

from fedcache.config import Home
from fedcache.errors import MachineError, StoreError, UsageError, unknown
from fedcache.extract import backbones
from fedcache.extract.backbones.backbone import ModuleEncoder
from fedcache.extract.embed_images import locate_recipe
from fedcache.extract.recipe import Recipe
from fedcache.federate.engine.client_data import SHARED_SUMS, Scaling
from fedcache.heads.linear import Tree
from fedcache.heads.losses import MASKED
from fedcache.models.client_prior import ModelWithPrior
from fedcache.models.linear_head import LinearHead, linear_head
from fedcache.models.predictor import Predictor, has_known_backbones, read_recipes
from fedcache.models.saved_model import SavedModel, owned
from fedcache.optional import reason
from fedcache.parsing import Facts
from fedcache.store.lock import write_output

WEIGHTS = (InputKind.PARAMETER, InputKind.BUFFER)
"""Kinds of the inputs of an exported graph that are weights."""

BATCH = 8
"""Number of rows on which a program is compared with its module."""

LIBRARIES = 1e-5
"""Relative change of a feature that simulates the rounding of another library. On 1,000 images and efficientnet-lite0,
features of torch and onnxruntime differ by 3e-6 of their mean, and those of either from float64 by 2e-6."""

DRAWS = 32
"""Number of random changes of the features of ``BATCH`` rows."""


@dataclass(frozen=True)
class ModelInput:
    """One input of a program, as ``model.json`` describes it.

    Images are uint8 [N, 3, height, width], RGB: ``crop`` resizes the short side to round(height / crop_pct) and cuts
    out the centre, ``squash`` resizes both sides, ``none`` takes images of that size. Features are float32 [N, width],
    the outputs of all backbones concatenated.
    """

    name: str
    kind: str  # images | features
    height: int  # 1 for features
    width: int
    resize: str = "none"  # crop | squash | none
    interpolation: str = "bicubic"  # bicubic | bilinear, Pillow's
    crop_pct: float = 1.0
    backbones: tuple[str, ...] = ()  # backbones that read it

    @property
    def how(self) -> tuple[Any, ...]:
        """The fields that two recipes must share to read the same input."""
        return (self.height, self.width, self.resize, self.interpolation, self.crop_pct)

    def example(self, rows: int) -> Tensor:
        """Rows of this input, drawn from a fixed seed: even rows are noise, odd rows are coloured clouds.

        Backbones respond to clouds as strongly as to photographs, and hardly to noise.
        """
        draw = torch.Generator().manual_seed(0)
        if self.kind == "features":
            return torch.randn(rows, self.width, generator=draw)
        shape = (rows, 3, self.height, self.width)
        x = torch.randint(0, 256, shape, generator=draw, dtype=torch.uint8)
        # A cloud is 4 x 4 random colours, enlarged.
        colours = torch.rand(len(x[1::2]), 3, 4, 4, generator=draw)
        if len(colours):
            clouds = interpolate(colours, (self.height, self.width), mode="bicubic")
            x[1::2] = (255 * clouds.clamp(0, 1)).to(torch.uint8)
        return x


@dataclass(frozen=True)
class AnswerGap:
    """Largest differences between the outputs of two models for the same rows."""

    scores: float
    probabilities: float

    @staticmethod
    def of(found: Sequence[Tensor], expected: Sequence[Tensor]) -> AnswerGap:
        """Differences of two pairs (scores, probabilities), each [N, C]; 0 for a class that neither model predicts."""
        gaps = []
        for a, b in zip(found, expected, strict=True):
            never = (a < MASKED / 2) & (b < MASKED / 2)
            gaps.append(float((a - b).abs().masked_fill(never, 0.0).max()))
        return AnswerGap(*gaps)


class ImageModel(nn.Module):
    """Scores and probabilities, each [N, C] float32, of one or several inputs (``ModelInput``).

    Args:
        predictor: with one member, ready to score.
        encoders: of the recipes, in the order in which their features are concatenated; () for a model that reads
            features, or images without a frozen backbone.
        reads: index of the input that each encoder reads.
    """

    def __init__(
        self, predictor: Predictor, encoders: Sequence[ModuleEncoder], reads: Sequence[int]
    ) -> None:
        super().__init__()
        self.saved = predictor.members[0]
        self.model = predictor.deployed[0]
        self.temperature = predictor.softmax_temperature
        self.encoders = tuple(encoders)
        self.reads = tuple(reads)
        # Submodules and buffers, so that torch.export finds all weights.
        live = getattr(predictor.encoders, "encoder", None)  # of a method with live encoders
        modules = [e.module for e in (*encoders, live) if isinstance(e, ModuleEncoder)]
        self.backbones = nn.ModuleList(modules)
        self._names = [
            self._hold("server", self.model.down),
            self._hold("own", self.model.personal),
        ]
        self._scaling = self._hold("features", self.saved.tree("features/"))

    def _hold(self, group: str, tree: Tree) -> dict[str, str]:
        """Register tensors as buffers. Returns for each name in the tree the name of its buffer."""
        names = {}
        for name, t in tree.items():
            plain = name.replace(".", "__").replace("/", "__")
            names[name] = f"{group}__{plain}"
            self.register_buffer(names[name], t)
        return names

    def features(self, *inputs: Tensor) -> Tensor:
        """Input of the method: [N, D] in its dtype, or uint8 [N, H W 3]."""
        if self.saved.facts.image is not None:
            return inputs[0].permute(0, 2, 3, 1).flatten(1)
        return self.read(self.embed(*inputs))

    def embed(self, *inputs: Tensor) -> list[Tensor]:
        """Features of each backbone, float32 [N, d], before they are rounded to the dtype of a store."""
        if not self.encoders:
            return list(torch.split(inputs[0], list(self.saved.facts.widths), -1))
        parts = []
        for encoder, index in zip(self.encoders, self.reads, strict=True):
            images = inputs[index].permute(0, 2, 3, 1)
            parts.append(encoder.features(encoder.normalise(images)))
        return parts

    def read(self, parts: Sequence[Tensor]) -> Tensor:
        """[N, d] of each backbone -> [N, D] in the method's dtype, as ``SavedModel.read`` for a store."""
        if self.encoders:
            parts = list(parts)
            for place, recipe in enumerate(self.saved.recipes):
                if recipe.dtype == "float16":
                    parts[place] = parts[place].half().float()
        # ``ids`` is empty for a global model.
        x = self.saved.own_columns(self._post(parts), *self.model.ctx.ids)
        return x.to(getattr(torch, self.saved.facts.dtype))

    def _post(self, parts: Sequence[Tensor]) -> Tensor:
        """``client_data.prepare_features`` on tensors: [N, d] of each backbone -> [N, D] float32."""
        how = self.saved.facts.feat_post
        if how in ("l2", "center"):
            parts = [_unit(p) for p in parts]
        x = torch.cat(list(parts), -1)
        if how == "l2_concat":
            x = _unit(x)
        elif how == "sign":
            x = (x > 0).float()
        elif how in SHARED_SUMS:
            mean = getattr(self, self._scaling["mean"])
            scale = getattr(self, self._scaling["scale"])
            x = ((x - mean) / scale).float()
        if how == "center":
            centred = x.split_with_sizes(self.saved.facts.widths, -1)
            x = torch.cat([_unit(p) for p in centred], -1)
        return x

    def forward(self, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Scores, and their softmax after division by the temperature."""
        return self.predict(self.features(*inputs))

    def predict(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Scores and probabilities for the method's input."""
        of_down, of_own = self._names
        down = {name: getattr(self, buffer) for name, buffer in of_down.items()}
        own = {name: getattr(self, buffer) for name, buffer in of_own.items()}
        scores = replace(self.model, down=down, personal=own).scores(x)
        return scores.float(), (scores / self.temperature).softmax(-1).float()


def _unit(x: Tensor) -> Tensor:
    return normalize(x, dim=-1, eps=1e-12)


@dataclass(frozen=True)
class ModelProgram:
    """An exported program and its inputs."""

    module: ImageModel
    exported: torch.export.ExportedProgram
    inputs: tuple[ModelInput, ...]
    difference: AnswerGap  # from the module, on drawn rows
    libraries: AnswerGap  # effect of the rounding of another library (``moved_by_libraries``)

    @property
    def bytes(self) -> int:
        """Size of weights and constants."""
        values = [*self.exported.state_dict.values(), *self.exported.constants.values()]
        return sum(t.nbytes for t in values if isinstance(t, Tensor))


def make_program(predictor: Predictor, home: Home, given: Any = None) -> ModelProgram:
    """The whole model as a program that takes any number of rows.

    Raises UsageError for several seeds or a ``predict`` that torch.export cannot follow, MachineError for missing
    weights.

    Args:
        predictor: with one member, on the CPU.
        home: fedcache home, in which weights are searched.
        given: weights files by backbone.
    """
    model = predictor.members[0]
    encoders = []
    reads: tuple[int, ...] = ()
    if model.facts.image is not None:
        inputs = _images_of_data(model)
    elif not has_known_backbones(model):
        facts = model.facts
        features = ModelInput("features", "features", 1, facts.width, backbones=facts.backbones)
        inputs = (features,)
    else:
        planned = [locate_recipe(recipe, home, given) for recipe in read_recipes(model)]
        for item in planned:
            encoder = backbones.load(item.backbone, item.weights, item.recipe)
            # Other encoders run another library, or a Python function that computes the inputs.
            if type(encoder) is not ModuleEncoder:
                raise UsageError(
                    f"{item.backbone.name} cannot be part of an exported program, because it is not a "
                    "torch module that takes pixels.",
                    "Use fedcache predict, or export only the head, which reads features: -o "
                    "head.safetensors",
                )
            encoders.append(encoder)
        inputs, reads = image_inputs([item.recipe for item in planned])
    module = ImageModel(predictor, encoders, reads).eval()
    exported = export(module, inputs)
    rows = [i.example(BATCH) for i in inputs]
    with torch.no_grad():
        gap = AnswerGap.of(exported.module()(*rows), module(*rows))
    libraries = moved_by_libraries(module, inputs)
    return ModelProgram(module, exported, inputs, gap, libraries)


def moved_by_libraries(module: ImageModel, inputs: Sequence[ModelInput]) -> AnswerGap:
    """The change of scores and probabilities that the rounding of another library can cause.

    A store keeps features as float16 by default, and the model reads them in this form. Two libraries, or two batch
    sizes of one library, sum the same products in different orders. If the two sums are on different sides of the
    middle between two float16 numbers (about 7 of the 1,280 features of an image), the rounded features differ by up
    to 1e-3 of their value. This cannot be avoided, so it is measured: the features of ``BATCH`` drawn rows are
    perturbed ``DRAWS`` times, each by up to ``LIBRARIES`` of its value, before they are rounded. The change is 0 for a
    program without backbones.
    """
    if not module.encoders:
        return AnswerGap(0.0, 0.0)
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        parts = module.embed(*(i.example(BATCH) for i in inputs))
        expected = [t.repeat(DRAWS, 1) for t in module.predict(module.read(parts))]
        moved = []
        for part in parts:
            tiled = part.repeat(DRAWS, 1)
            noise = 2 * torch.rand(tiled.shape, generator=draw) - 1
            moved.append(tiled * (1 + LIBRARIES * noise))
        return AnswerGap.of(module.predict(module.read(moved)), expected)


def image_inputs(recipes: Sequence[Recipe]) -> tuple[tuple[ModelInput, ...], tuple[int, ...]]:
    """One input for each way of resizing, and the index of the input that each recipe reads."""
    by_key: dict[tuple[Any, ...], ModelInput] = {}
    keys = []
    for r in recipes:
        one = ModelInput(
            "images",
            "images",
            r.size,
            r.size,
            resize=r.resize,
            interpolation=r.interpolation,
            crop_pct=r.crop_pct,
        )
        shared = by_key.get(one.how, one)
        by_key[one.how] = replace(shared, backbones=(*shared.backbones, r.backbone))
        keys.append(one.how)
    inputs = tuple(by_key.values())
    if len(inputs) > 1:
        inputs = tuple(replace(one, name=f"images_{n}") for n, one in enumerate(inputs, 1))
    positions = list(by_key)
    return inputs, tuple(positions.index(key) for key in keys)


def _images_of_data(model: SavedModel) -> tuple[ModelInput, ...]:
    """The input of a method that trains on images: the images of its data, resized by its recipe if it has one."""
    H, W = model.facts.image or (0, 0)
    recipe = None
    if has_known_backbones(model):
        recipe = read_recipes(model)[-1]
    given = ModelInput("images", "images", H, W, backbones=model.facts.backbones)
    # A recipe of size 0 does not resize.
    if recipe is not None and recipe.size:
        given = replace(
            given,
            resize=recipe.resize,
            interpolation=recipe.interpolation,
            crop_pct=recipe.crop_pct,
        )
    return (given,)


def export(module: ImageModel, inputs: Sequence[ModelInput]) -> torch.export.ExportedProgram:
    """The module as a program for any number of rows.

    Raises UsageError, naming the method, for a ``predict`` that branches on numbers, which a program cannot do.
    """
    rows = torch.export.Dim("N")
    shapes = {"inputs": tuple({0: rows} for _ in inputs)}
    try:
        with torch.no_grad(), quiet_export():
            examples = tuple(i.example(2) for i in inputs)
            program = torch.export.export(module, examples, dynamic_shapes=shapes, strict=False)
            return without_unused(program)
    except Exception as error:  # torch.export raises errors of many classes
        method = module.saved.facts.method
        raise UsageError(
            f"predict of {method} cannot be converted to a torch program: {reason(error)}",
            "fedcache export-model RUN -o head.safetensors   writes the tensors of the model.",
        ) from error


def without_unused(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """The program without unused weights, such as those of a text tower; changed in place."""
    signature = program.graph_signature
    placeholders = [node for node in program.graph.nodes if node.op == "placeholder"]
    unread = {node.name: node for node in placeholders if not node.users}
    kept = []
    # A weight is an input of the graph: it is unused if its placeholder has no users.
    for spec in signature.input_specs:
        node = unread.get(getattr(spec.arg, "name", ""))
        if spec.kind not in WEIGHTS or node is None:
            kept.append(spec)
            continue
        program.state_dict.pop(str(spec.target), None)
        program.constants.pop(str(spec.target), None)
        program.graph.erase_node(node)
    signature.input_specs[:] = kept
    program.graph_module.recompile()
    return program


@contextmanager
def quiet_export() -> Iterator[None]:
    """Silence warnings and log lines that torch and onnxscript write about their own internals."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


# The files of an export. Each is written atomically and holds the model card.


FORMATS = {
    "folder": "",
    "onnx": ".onnx",
    "torch": ".pt2",
    "safetensors": ".safetensors",
    "sklearn": ".joblib",
}
"""Name of a format -> ending of its files."""

PROGRAMS = ("folder", "onnx", "torch")
"""Formats that include the backbones."""

MOST_ONNX = 2_000_000_000
"""Limit in bytes for the weights in one .onnx file; its encoding (protobuf) ends at 2 GiB."""

OPSET = 18
"""Version of the ONNX operators of a graph."""

AGREE = 1e-4
"""Tolerance for a graph's scores, relative to the largest score (at least 1), and for its probabilities. The effect of
rounding features in another library is added to the tolerance (``moved_by_libraries``)."""

FLOAT32 = 1e-6
"""Relative difference of scores between two libraries that compute in float32."""


@dataclass(frozen=True)
class Parts:
    """The content of an export."""

    predictor: Predictor
    card: str  # Markdown
    program: ModelProgram | None = None  # None for a format that is not in ``PROGRAMS``

    @property
    def facts(self) -> Facts:
        """Plain JSON values that a reader of any format needs."""
        facts = self.predictor.members[0].facts
        inputs: tuple[ModelInput, ...] = ()
        if self.program is not None:
            inputs = self.program.inputs
        return {
            "method": facts.method,
            "run": facts.run,
            "seed": facts.seed,
            "client": self.predictor.client,
            "client_prior": self.predictor.prior_words,
            "dataset": facts.dataset,
            "classes": list(facts.classes),
            "temperature": self.predictor.softmax_temperature,
            "calibrated": self.predictor.calibrated,
            "feat_post": facts.feat_post,
            "widths": list(facts.widths),
            "backbones": list(facts.backbones),
            "recipes": [dict(r) for r in facts.recipes],
            "inputs": [asdict(i) for i in inputs],
            "outputs": ["scores", "probabilities"],
        }

    @property
    def metadata(self) -> dict[str, str]:
        """The facts and the card, each as text."""
        texts = {"card": self.card}
        for name, value in self.facts.items():
            texts[name] = value
            if not isinstance(value, str):
                texts[name] = json.dumps(value, ensure_ascii=False)
        return texts


def format_of(out: Path, requested: str | None) -> str:
    """The requested format, or the format of the file ending.

    Raises UsageError for an unknown ending, and for the ending of another format than the requested one.
    """
    ending = out.suffix.lower()
    endings = {suffix: name for name, suffix in FORMATS.items() if suffix}
    if requested is None:
        if out.is_dir() or not ending:
            return "folder"
        if ending not in endings:
            raise unknown("file ending", out.suffix, list(endings), hint="--format folder -o DIR")
        return endings[ending]
    if requested not in FORMATS:
        raise unknown("--format", requested, FORMATS)
    # An ending that belongs to no format is accepted with any format.
    other = endings.get(ending, requested)
    if other != requested and not out.is_dir():
        path = out.with_suffix(FORMATS[requested])
        raise UsageError(
            f"{out} has the ending of --format {other}, but --format {requested} is given.",
            f"-o {path}, or --format {other}",
        )
    return requested


def check_place(out: Path, kind: str, force: bool) -> None:
    """Refuse an export that would overwrite files, and a format whose packages are missing, before it is computed.

    Raises StoreError for files that would be overwritten, UsageError for a folder in place of a file or a file in place
    of a folder, MachineError without the packages of ONNX.
    """
    # The nearest existing path above the export. Folders below it are made when the export is written.
    above = next(p for p in out.absolute().parents if p.exists())
    if not above.is_dir():
        raise UsageError(
            f"{above} is a file, so {out} cannot be written inside it.", "Choose another -o."
        )
    if out.exists():
        if out.is_dir() != (kind == "folder"):
            raise UsageError(
                f"--format {kind} cannot replace {out}, because one is a file and the other a folder.",
                f"For example -o model{FORMATS[kind]}",
            )
        if not force and (kind != "folder" or any(out.iterdir())):
            raise StoreError(
                f"{out} exists and is not empty.",
                "Choose another -o, or overwrite it with --force.",
            )
    missing = [
        name
        for name in ("onnx", "onnxscript", "onnxruntime")
        if importlib.util.find_spec(name) is None
    ]
    if kind == "onnx" and missing:
        listed = ", ".join(missing)
        raise MachineError(
            f"ONNX needs packages that are not installed here: {listed}.",
            "pip install 'fedcache[export]'",
        )


def write(out: Path, kind: str, parts: Parts) -> Facts:
    """Write one format. Returns facts about the file as plain JSON values; raises as the writers below."""
    writers = {
        "folder": write_folder,
        "onnx": write_onnx,
        "torch": write_torch,
        "safetensors": write_head,
        "sklearn": write_sklearn,
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    return writers[kind](out, parts)


def write_folder(out: Path, parts: Parts) -> Facts:
    """Write ``model.pt2``, ``head.safetensors``, ``model.json``, ``predict.py`` and ``README.md``; other files stay."""
    assert parts.program is not None
    out.mkdir(parents=True, exist_ok=True)
    reads = parts.program.inputs[0].kind
    script = (Path(__file__).parent / f"predict_{reads}.py").read_text(encoding="utf-8")
    needs = "torch, numpy and pillow"
    example = "photo.jpg"
    if reads == "features":
        needs = "torch and numpy"
        example = "features.npy"
    title = "# {method} of {dataset}".format_map(parts.facts)
    readme = (
        f"{title}\n\nNeeds {needs}: `python predict.py {example}` prints name, class and probability. This is "
        f"predict.py:\n\n```python\n{script}```\n\n`model.pt2` is the whole model as a program of torch.export, "
        f"`head.safetensors` its trained part; `model.json` describes their inputs.\n\n{parts.card}"
    )
    facts = json.dumps(parts.facts, indent=1, ensure_ascii=False) + "\n"
    written = write_torch(out / "model.pt2", parts)
    write_head(out / "head.safetensors", parts)
    write_output(out / "model.json", facts.encode())
    write_output(out / "predict.py", script.encode())
    write_output(out / "README.md", readme.encode())
    return written


def write_torch(out: Path, parts: Parts) -> Facts:
    """Write a program for ``torch.export.load``, with ``model.json`` and ``README.md`` as its extra files."""
    assert parts.program is not None
    buffer = io.BytesIO()
    extra = {"model.json": json.dumps(parts.facts, ensure_ascii=False), "README.md": parts.card}
    with quiet_export():
        torch.export.save(parts.program.exported, buffer, extra_files=extra)
    write_output(out, buffer.getbuffer())
    return _facts_of_program(parts, parts.program.difference)


def write_onnx(out: Path, parts: Parts) -> Facts:
    """Write one graph from pixels to probabilities, after comparing its outputs in onnxruntime with those of torch.

    Raises UsageError for weights of more than ``MOST_ONNX`` bytes and for a ``predict`` that needs operators that ONNX
    does not have, MachineError for a graph with other outputs.
    """
    program = parts.program
    assert program is not None
    if program.bytes > MOST_ONNX:
        raise UsageError(
            f"The weights take {program.bytes / 1e9:.1f} GB, but an .onnx file can hold only 2 GB.",
            "Use --format torch -o m.pt2",
        )
    method = parts.facts["method"]
    try:
        with quiet_export():
            graph = torch.onnx.export(
                program.exported,
                dynamo=True,
                opset_version=OPSET,
                verbose=False,
                input_names=[i.name for i in program.inputs],
                output_names=["scores", "probabilities"],
            )
        graph.model.metadata_props.update(parts.metadata)
        raw = graph.model_proto.SerializeToString()
        gap, accepted = onnx_difference(raw, program)
    except MemoryError:
        raise
    except Exception as error:  # torch.onnx and onnxruntime raise errors of many classes
        raise UsageError(
            f"predict of {method} cannot be converted to an ONNX graph: {reason(error)}",
            "fedcache export-model RUN -o model.pt2   writes a program for torch.",
        ) from error
    # NaN must be an error too, so the check is whether the gaps are small.
    agrees = gap.scores <= accepted.scores and gap.probabilities <= accepted.probabilities
    if not agrees:
        found = f"scores of {method} differ by {gap.scores:.1g} and probabilities by {gap.probabilities:.1g}"
        expected = f"{accepted.scores:.1g} and {accepted.probabilities:.1g}"
        raise MachineError(
            f"The exported model gives other results in onnxruntime than in torch: {found}, expected at most "
            f"{expected}. Nothing is written.",
            "fedcache export-model RUN -o model.pt2   writes a program for torch.",
        )
    write_output(out, raw)
    return _facts_of_program(parts, gap)


def _facts_of_program(parts: Parts, difference: AnswerGap) -> Facts:
    """Facts about a written program as plain JSON values."""
    assert parts.program is not None
    return {
        "inputs": parts.facts["inputs"],
        "difference": asdict(difference),
        "moved_by_libraries": asdict(parts.program.libraries),
    }


def onnx_difference(raw: bytes, program: ModelProgram) -> tuple[AnswerGap, AnswerGap]:
    """The largest differences between onnxruntime and torch over drawn rows, and the accepted differences."""
    onnxruntime = importlib.import_module("onnxruntime")
    session = onnxruntime.InferenceSession(raw, providers=["CPUExecutionProvider"])
    rows = {i.name: i.example(BATCH) for i in program.inputs}
    arrays = {name: x.numpy() for name, x in rows.items()}
    outputs = session.run(["scores", "probabilities"], arrays)
    found = [torch.from_numpy(t) for t in outputs]
    with torch.no_grad():
        expected = program.module(*rows.values())
    scores = expected[0]
    # The largest score, without classes that are never predicted.
    size = float(scores[scores > MASKED / 2].abs().max().clamp(min=1.0))
    libraries = program.libraries
    most_scores = AGREE * size + libraries.scores
    most_probabilities = AGREE + FLOAT32 * size + libraries.probabilities
    return AnswerGap.of(found, expected), AnswerGap(most_scores, most_probabilities)


def write_head(out: Path, parts: Parts) -> Facts:
    """Write only the trained tensors: ``server/..``, ``own/..``, ``features/..``, and ``linear/..`` of a linear head.

    ``prior/offset`` is the number that a client prior adds to each class score; ``linear/bias`` includes it.
    """
    predictor = parts.predictor
    model = predictor.deployed[0]
    trees = {
        "server": model.down,
        "own": model.personal,
        "features": predictor.members[0].tree("features/"),
    }
    tensors: Tree = {}
    for group, tree in trees.items():
        tensors |= {f"{group}/{name}": t for name, t in tree.items()}
    if isinstance(model, ModelWithPrior):
        tensors["prior/offset"] = model.offset
    head: LinearHead | None
    try:
        head = linear_head(predictor)
    except UsageError:
        head = None
    if head is not None:
        tensors["linear/weight"] = torch.from_numpy(head.coef).float()
        tensors["linear/bias"] = torch.from_numpy(head.intercept).float()
    copies = owned(tensors)
    write_output(out, save(copies, parts.metadata))
    shapes = {name: list(t.shape) for name, t in copies.items()}
    return {"tensors": shapes, "linear": head is not None}


def write_sklearn(out: Path, parts: Parts) -> Facts:
    """Write a scikit-learn classifier of features, for ``joblib.load``. Raises UsageError for a nonlinear head."""
    head = linear_head(parts.predictor)
    classifier = estimator(parts.predictor, head)
    classifier.fedcache_ = parts.metadata
    buffer = io.BytesIO()
    joblib.dump(classifier, buffer)
    write_output(out, buffer.getbuffer())
    return {"features": sum(parts.predictor.members[0].facts.widths), "centred": head.centred}


def estimator(predictor: Predictor, head: LinearHead) -> Any:
    """A scikit-learn classifier of raw features [N, D], all backbones concatenated; ``classes_`` has sorted names.

    It is a ``LogisticRegression`` with the head's coefficients; the steps of ``feat_post`` that are not linear come
    before it. Its probabilities are those of ``fedcache predict``. Raises UsageError for a model of one class.
    """
    saved = predictor.members[0]
    facts = saved.facts
    if len(facts.classes) < 2:
        raise UsageError(
            "The model has one class, but a LogisticRegression needs two.",
            "Use -o head.safetensors",
        )
    order = np.argsort(np.array(facts.classes), kind="stable")
    coef = head.coef[order] / predictor.softmax_temperature
    intercept = head.intercept[order] / predictor.softmax_temperature
    overrides = saved.overrides(facts.saved.get(predictor.client or ""))
    if overrides.columns:
        # Columns that the client does not read have the coefficient 0.
        read = np.concatenate([np.arange(start, stop) for start, stop in overrides.columns])
        all_columns = np.zeros((len(coef), facts.width))
        all_columns[:, read] = coef
        coef = all_columns
    if facts.feat_post == "standardize" and saved.scaling is not None:
        coef = coef / saved.scaling.scale
        intercept = intercept - coef @ saved.scaling.mean
    if len(order) == 2:  # scikit-learn keeps one row for two classes
        coef = coef[1:] - coef[:1]
        intercept = intercept[1:] - intercept[:1]
    linear = LogisticRegression()
    linear.coef_ = coef
    linear.intercept_ = intercept
    linear.classes_ = np.array(facts.classes)[order]
    linear.n_features_in_ = facts.width
    linear.n_iter_ = np.array([0])
    return _with_feature_steps(facts.feat_post, facts.widths, saved.scaling, linear)


def _with_feature_steps(
    feat_post: str, widths: tuple[int, ...], scaling: Scaling | None, linear: LogisticRegression
) -> Any:
    """The classifier with the steps of ``feat_post`` before it; ``standardize`` is part of its coefficients."""
    if feat_post in ("none", "standardize"):
        return linear
    if feat_post == "sign":
        return _ready(make_pipeline(Binarizer(threshold=0.0), linear))
    if feat_post == "l2_concat":
        widths = (sum(widths),)
    if feat_post != "center" or scaling is None:
        return _ready(make_pipeline(_to_unit(widths), linear))
    centre = StandardScaler(with_std=False)
    pipeline = _ready(make_pipeline(_to_unit(widths), centre, _to_unit(widths), linear))
    # Replaces the mean of the zeros to which ``_ready`` fitted the step.
    centre.mean_ = scaling.mean
    return pipeline


def _to_unit(widths: tuple[int, ...]) -> Any:
    """The step that brings each backbone's columns to unit length."""
    if len(widths) == 1:
        return Normalizer()
    blocks = []
    start = 0
    for k, width in enumerate(widths):
        blocks.append((f"block_{k}", Normalizer(), slice(start, start + width)))
        start += width
    return ColumnTransformer(blocks)


def _ready(pipeline: Pipeline) -> Pipeline:
    """The pipeline with all steps fitted to a row of zeros, so that scikit-learn accepts it as fitted."""
    _, last = pipeline.steps[-1]
    for _, step in pipeline.steps[:-1]:
        step.fit(np.zeros((1, last.n_features_in_)))
    return pipeline
