"""A saved model from images to probabilities as one torch module, and the program that torch.export makes of it.

Normalisation, frozen backbones, the stored dtype, what ``feat_post`` does and the method's own ``predict`` are all in
the module; what is left to a reader of images is the resize that ``ModelInput`` describes.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.export.graph_signature import InputKind
from torch.nn.functional import interpolate, normalize

from fedcache.config import Home
from fedcache.errors import UsageError
from fedcache.extract import backbones
from fedcache.extract.backbones.encoder import ModuleEncoder
from fedcache.extract.embed_images import locate_recipe
from fedcache.extract.recipe import Recipe
from fedcache.heads.linear import Tree
from fedcache.heads.losses import MASKED
from fedcache.models.predictor import Predictor
from fedcache.models.saved_model import SavedModel
from fedcache.models.sources import has_known_backbones, read_recipes

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
        self.client, self.temperature = predictor.client, predictor.softmax_temperature
        self.encoders, self.reads = tuple(encoders), tuple(reads)
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
        ids = (
            self.made.ctx.ids
        )  # of the client whose model it is; of nobody where it is the one for all
        own = facts.overrides.get(ids[0] if ids else -1)
        if own is not None and own.columns:
            x = torch.cat([x[:, a:b] for a, b in own.columns], -1)
        return x.to(getattr(torch, facts.dtype))

    def post(self, parts: Sequence[Tensor]) -> Tensor:
        """``federate.engine.feature_post`` on tensors: [N, d] of each backbone -> [N, D] float32."""
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
            if (
                type(encoder) is not ModuleEncoder
            ):  # another library computes it, or a function makes its inputs
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
    recipe = read_recipes(model)[-1] if has_known_backbones(model) else None
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
