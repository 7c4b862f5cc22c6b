"""Code shared by the backbones that a user brings: it remembers their files, names their outputs and checks features.

The row of such a backbone is made from its file or code, not read from the table. The home remembers it by its bare
name, so that a run, a prediction or a resumed extraction finds the file again. Its identity is its sha256, not its
path.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedcache.errors import CorruptionError, FedcacheError, MachineError, UsageError, shell_word
from fedcache.extract.backbones.backbone import Backbone, FrozenEncoder, hub_snapshots
from fedcache.extract.backbones.hugging_face_folder import model_files
from fedcache.extract.digests import DigestMemory, stat_key
from fedcache.extract.recipe import VERSION, Recipe, slug
from fedcache.optional import reason
from fedcache.plugins import HUGGING_FACE, bare_name
from fedcache.store.files import (
    digest_of,
    file_sha256,
    make_private,
    read_sealed,
    sha256_hex,
    write_sealed,
)

if TYPE_CHECKING:
    from torch import Tensor

OWN_ROW = {"kind": "own backbone"}
"""Seal of the file of a remembered row: its kind."""
CHANCE_CLOSE = 1e-5
"""Largest distance, relative to the norm, between features of the same items from two calls."""
BATCH_CLOSE = 1e-3
"""Largest distance, relative to the norm, between features of an item alone and in a batch."""


@dataclass(frozen=True)
class Choice:
    """Settings of a user's backbone in addition to its name."""

    home: Path | None = None  # where places and facts are remembered
    file: Path | None = None  # the file of ``--weights NAME=FILE``
    output: str | None = None  # of ``--recipe output=NAME``
    size: int | None = None  # of ``--size`` or ``--recipe size=N``
    # of ``--recipe``: pooling, max_tokens and prompt of an encoder of texts
    options: Mapping[str, str] = field(default_factory=dict)
    recorded: Recipe | None = None  # the recipe in a store or a model, which the row must have


def find_place(name: str, prefix: str, choice: Choice, *, folder: bool = False) -> Path:
    """The file (or folder) of a name with a prefix: the one given, the path in the name, or its last known place.

    Raises UsageError for a name that is not valid, MachineError for a missing file.
    """
    text = name.removeprefix(prefix)
    bare = bare_name(name)
    # The prefix of a file is its usual ending, such as onnx.
    kind = "file"
    example = f"{prefix}models/encoder.{prefix.rstrip(':')}"
    is_there = Path.is_file
    if folder:
        kind = "folder"
        example = f"{prefix}models/encoder"
        is_there = Path.is_dir
    has_reserved_sign = any(sign in bare for sign in ",@\n")
    if not text or has_reserved_sign or bare == prefix:
        raise UsageError(
            f"{name!r} is not a valid {kind}: a name must not be empty or contain a comma, @ or a line break.",
            f"For example {example}",
        )
    places = [Path(text).expanduser()]
    if choice.file is not None:
        places = [choice.file.expanduser()]
    elif choice.home is not None:
        # Only a name without a path means the file that was used last.
        remembered = read_row(_row_file(bare, choice.home), OWN_ROW)
        if remembered is not None and name == bare:
            places.append(Path(remembered.place))
        places.append(choice.home / "weights" / slug(bare.removeprefix(prefix)))
    for place in places:
        if is_there(place):
            return place.absolute()
    looked = "; ".join(dict.fromkeys(map(str, places)))
    raise MachineError(
        f"There is no {kind} for {name} (looked at: {looked}; current directory: {Path.cwd()}).",
        f"Give its path, or --weights {shell_word(bare)}={shell_word(kind.upper())}",
    )


def content_sha256(path: Path, sha256_of: Callable[[Path], str] = file_sha256) -> str:
    """sha256 of a file; for a folder, over the names and digests of the files of its model."""
    if not path.is_dir():
        return sha256_of(path)
    digests = {str(file.relative_to(path)): sha256_of(file) for file in model_files(path)}
    return digest_of(digests)


def facts_of(
    path: Path,
    words: tuple[str | None, ...],
    choice: Choice,
    read: Callable[[], Any],
) -> Any:
    """The result of ``read`` for a file or folder, a JSON value, remembered in the home until the content changes."""
    if choice.home is None:
        return read()
    memory = DigestMemory(choice.home / "digests")
    state = stat_key(path)
    if path.is_dir():
        # The time of a folder does not change when a file in it changes.
        state = [content_sha256(path)]
    key = ["own backbone, tried alone", VERSION, *words, *state]
    facts = memory.recall(key)
    if facts is None:
        facts = read()
        memory.remember(key, facts)
    return facts


def remember(row: Backbone, home: Path) -> None:
    """Write a row, with the path of its file, into the home."""
    path = _row_file(row.name, home)
    if read_row(path, OWN_ROW) != row:
        write_row(row, path, OWN_ROW)


def remembered_rows(home: Path) -> list[Backbone]:
    """All remembered rows, sorted by name."""
    rows = []
    for path in sorted((home / "recipes").glob("own-*.json")):
        row = read_row(path, OWN_ROW)
        if row is not None:
            rows.append(row)
    return sorted(rows, key=lambda row: row.name)


def _row_file(name: str, home: Path) -> Path:
    """The file in which a home remembers the row of a user's backbone."""
    return home / "recipes" / f"own-{slug(name)[:80]}-{digest_of(name)[:8]}.json"


def write_row(row: Backbone, path: Path, identity: Mapping[str, str]) -> None:
    """Write a row into a file of the home; ``identity`` is for the seal of the file."""
    make_private(path.parent)
    write_sealed(path, identity, {**asdict(row), "recipe": row.recipe.to_dict()})


def read_row(path: Path, identity: Mapping[str, str]) -> Backbone | None:
    """The inverse of ``write_row``; None for a missing or damaged file."""
    try:
        found = read_sealed(path, identity)
        if found is None:
            return None
        data = dict(found.content)
        data["recipe"] = Recipe.from_dict(data["recipe"])
        data["files"] = tuple(data["files"])
        data["sha256"] = tuple((file, digest) for file, digest in data["sha256"])
        return Backbone(**data)
    except (ValueError, KeyError, TypeError, FedcacheError):
        return None


def known_name(name: str, home: Path) -> str:
    """The name under which a home remembers the folder of ``hf:PATH``, so that a folder has one name; else ``name``.

    A folder that is remembered under ``name`` keeps this name. A remembered name that now means another folder, in the
    working directory or in the Hugging Face cache, is not used.
    """
    path = Path(name.removeprefix(HUGGING_FACE)).expanduser()
    if not name.startswith(HUGGING_FACE) or not path.is_dir():
        return name
    place = path.resolve()
    remembered_names = [
        row.name
        for row in remembered_rows(home)
        if row.place and Path(row.place).resolve() == place
    ]
    if bare_name(name) in remembered_names:
        return name
    for remembered in remembered_names:
        relative = Path(remembered.removeprefix(HUGGING_FACE))
        # The folders that the name means now. ORG/NAME may be a repository in the Hugging Face cache.
        folders = []
        if len(relative.parts) == 2:
            folders = [folder.resolve() for folder in hub_snapshots(str(relative))]
        if relative.is_dir():
            folders.append(relative.resolve())
        if all(folder == place for folder in folders):
            return remembered
    return name


def pooling_of(output: str, rank: int) -> str:
    """The recipe's word for an output: its name, or ``avg(NAME)`` if its ``rank`` is not 2, so that it is averaged."""
    if rank == 2:
        return output
    return f"avg({output})"


def output_of(recipe: Recipe) -> str:
    """The name of an output in a recipe, the inverse of ``pooling_of``."""
    word = recipe.pooling
    if word.startswith("avg(") and word.endswith(")"):
        return word.removeprefix("avg(").removesuffix(")")
    return word


def unchanged_bytes(path: Path, sha256: str) -> bytes:
    """The bytes of a file. Raises CorruptionError unless they have this sha256 ("" for any)."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise MachineError(
            f"{path} cannot be read ({error.strerror}).", "Check the path and its permissions."
        ) from error
    if sha256:
        found = sha256_hex(raw)
        if found != sha256:
            raise CorruptionError(
                f"{path} changed while the command was running (sha256 now {found[:12]}, before {sha256[:12]}).",
                "Run the same command again. The features of the changed file are stored as a separate feature set.",
            )
    return raw


def checked_encoder(
    encoder: FrozenEncoder, backbone: Backbone, recipe: Recipe, dtype: str = "float32"
) -> FrozenEncoder:
    """The encoder, after a check that it gives two finite rows of the backbone's width for images of the recipe's size.

    Raises UsageError otherwise. The check runs while the encoder is loaded, before the first batch of an extraction.
    """
    shape = shape_of(encoder, backbone.name, recipe.size, alone=dtype == "float32")
    if shape != (2, backbone.width):
        raise UsageError(
            f"{backbone.name} gives features of shape {list(shape)} for two images of {recipe.size} px, expected [2, "
            f"{backbone.width}].",
            f"Leave out the size: the model accepts only images of {backbone.recipe.size} px.",
        )
    return encoder


def shape_of(
    encoder: FrozenEncoder, name: str, size: int, *, alone: bool = True
) -> tuple[int, ...]:
    """Shape of the features that an encoder gives for two images of ``size`` px.

    Raises UsageError if the encoder fails, or if its features are not finite, differ the second time or, with
    ``alone``, differ for an image alone. ``alone`` is False for a narrow compute dtype, because its rounding alone
    makes features differ by as much.
    """
    images = trial_images(size)
    try:
        features = encoder.image(images)
        again = encoder.image(images)
        singly = []
        if alone:
            singly = [encoder.image(images[:1]), encoder.image(images[1:])]
    except FedcacheError:
        raise
    except (Exception, SystemExit) as error:
        # The user's code or file may raise any error, which becomes a message.
        raise UsageError(
            f"{name} fails on two images of {size} px: {reason(error)}",
            "Fix the model, or use another size: --size N",
        ) from error
    check_features(
        name,
        f"two images of {size} px",
        features,
        again,
        singly,
        "Check the weights of the model. If its inputs need another range, use --recipe norm=unit, half, "
        "imagenet, clip or bytes.",
    )
    return tuple(features.shape)


def check_features(
    name: str,
    items: str,
    features: Tensor,
    again: Tensor,
    singly: Sequence[Tensor],
    hint: str,
) -> None:
    """Raise UsageError unless features are finite, and depend on their own item alone.

    Args:
        name: of the backbone.
        items: the two items in words.
        features: of both items, [2, D].
        again: of both items, computed a second time.
        singly: of the first item alone, and of the second if it was computed alone, [1, D] each.
        hint: of the error for features that are not finite.
    """
    if features.shape[1] == 0:
        raise UsageError(
            f"{name} gives empty rows instead of features.",
            "Return at least one number per item.",
        )
    if not bool(features.isfinite().all()):
        raise UsageError(f"{name} gives NaN or infinite numbers for {items}.", hint)
    # The second time may differ by rounding, as on a GPU.
    if features.shape != again.shape or _distance(features, again) > CHANCE_CLOSE:
        raise UsageError(
            f"{name} gives different features if it reads the same items twice.",
            "Use no random numbers in its forward method (such as dropout with training=True), or a fixed seed.",
        )
    for row, alone in zip(features, singly, strict=False):
        distance = _distance(row[None], alone)
        if distance > BATCH_CLOSE:
            raise UsageError(
                f"The features that {name} gives an item depend on the other items of its batch. The difference is "
                f"{distance:.1g} of the features' norm.",
                "Remove all operations over the batch axis, such as a mean, BatchNorm without running statistics, or "
                "padding.",
            )


def _distance(features: Tensor, others: Tensor) -> float:
    """Distance of features as a share of their norm."""
    norm = features.norm().clamp(min=1e-12)
    return float((features - others).norm() / norm)


def trial_images(size: int) -> Tensor:
    """Two images, uint8 [2, size, size, 3]; the second is darker, so an influence on each other's features is seen."""
    import torch

    numbers = torch.arange(2 * size * size * 3).remainder(251)
    images = numbers.to(torch.uint8).reshape(2, size, size, 3)
    images[1] //= 4
    return images
