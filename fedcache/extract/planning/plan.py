"""Plans what an extraction contains: weights, recipes, prompt templates, and the bytes of the arrays."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from fedcache.config import ExtractConfig, Home
from fedcache.errors import MachineError, UsageError, all_at_once, shell_word, unknown
from fedcache.extract import backbones as registry
from fedcache.extract.backbones import Backbone, Weights
from fedcache.extract.backbones.backbone import prompts
from fedcache.extract.backbones.own import known_name, trial_images
from fedcache.extract.datasets.dataset import Context
from fedcache.extract.device import known_device, known_dtype, named_gpus
from fedcache.extract.digests import DigestMemory
from fedcache.extract.recipe import IMAGES, RECIPE_KEYS, ROWS, SOUNDS, TEXTS, Recipe
from fedcache.parsing import whole_number
from fedcache.plugins import HUGGING_FACE, PREFIXES, bare_name
from fedcache.progress import Observer
from fedcache.store.manifest import StorePart
from fedcache.store.store import Store


@dataclass(frozen=True)
class PlannedArray:
    """One array of an extraction."""

    backbone: Backbone  # its row of the table
    weights: Weights  # their file and its sha256
    recipe: Recipe  # with views, overrides and the weights' digest filled in


def describe_array(
    item: PlannedArray, shape: Sequence[int], dtype: str, state: str
) -> dict[str, Any]:
    """An array as plain JSON values."""
    recipe = item.recipe
    return {
        "key": recipe.key,
        "backbone": item.backbone.name,
        "recipe": recipe.to_dict(),
        "digest": recipe.digest,
        "shape": list(shape),
        "dtype": dtype,
        "state": state,
    }


def memory_of(home: Home, *, rehash: bool = False) -> DigestMemory:
    """The remembered digests of a home."""
    return DigestMemory(home.digests, rehash=rehash)


def paths_of(named: Mapping[str, str]) -> dict[str, Path]:
    """The files or folders of an option ``NAME=PATH``, such as ``--data``, by name."""
    return {name: Path(path).expanduser() for name, path in named.items()}


def context_of(config: ExtractConfig, home: Home, *, rehash: bool = False) -> Context:
    """How the dataset of a configuration is opened."""
    return Context(
        memory_of(home, rehash=rehash),
        paths_of(config.data),
        home.data,
        config.layout,
        config.follow_links,
        limit=config.limit,
    )


def plan(
    config: ExtractConfig, home: Home, observer: Observer, *, rehash: bool = False
) -> tuple[list[PlannedArray], list[str]]:
    """The arrays of an extraction, with weights and recipes, and the names of the backbones that were skipped.

    Raises UsageError for an unknown backbone or recipe, or another wrong value; MachineError for missing weights.
    """
    if not config.backbones:
        raise UsageError(
            "No backbone was given.",
            "For example --backbones efficientnet-lite0; see `fedcache backbones list`.",
        )
    # Invalid values are refused even if nothing is left to compute, so that nothing would read them. Only their form is
    # checked: any number of rows (1) and any class names (none) would do.
    parse_max_bad(config.max_bad, 1)
    if not named_gpus(config.device):
        known_device(config.device)
    known_dtype(config.dtype)
    for template in config.text:
        prompts((), template)
    memory = memory_of(home, rehash=rehash)
    config, wanted = look_up_backbones(known_config(config, home), home)
    given = paths_of(config.weights)
    for name in given:
        if not name.startswith(PREFIXES):
            registry.lookup(name)
    planned = []
    skipped = []
    missing = []
    # Recipes are checked before any weights are looked for, hence with empty ``Weights``.
    for backbone in wanted:
        backbone.accepts(recipe_of(backbone, Weights(None, "", ""), config))
    for backbone in wanted:
        try:
            weights = registry.locate(
                backbone, given=given, home=home.root, memory=memory, offline=home.offline
            )
        except MachineError as error:
            if config.skip_missing:
                observer.warn(f"Skipped {backbone.name}: {error.message}")
                skipped.append(backbone.name)
            else:
                missing.append(error)
            continue
        is_own_file = backbone.name in given and weights.path is not None
        if is_own_file and backbone.provider in registry.CHECKPOINTS:
            # The user's file may not fit, or hold several models. Loading it here refuses it before a store is created.
            registry.try_weights(backbone, weights, observer)
        recipe = recipe_of(backbone, weights, config)
        planned.append(PlannedArray(backbone, weights, recipe))
    # One message names all missing weights, so that the user can get them together.
    if missing:
        messages = [error.message for error in missing]
        hints = [error.hint for error in missing]
        if planned:
            hints.append("To continue without it: --skip-missing")
        raise MachineError("\n".join(messages), "\n".join(hints))
    if not planned:
        raise MachineError(
            "The weights of all requested backbones are missing.",
            "See `fedcache backbones list` for backbones that are ready.",
        )
    return planned, skipped


ENCODERS = {
    IMAGES: "efficientnet-lite0",
    TEXTS: "hf:FOLDER   (or module:PACKAGE.MODULE:FACTORY, with a module that has reads = 'texts')",
    SOUNDS: "hf:FOLDER   of an audio encoder, such as Wav2Vec2 or Whisper",
    ROWS: "module:PACKAGE.MODULE:FACTORY   (with a module that has reads = 'rows')",
}
"""Kind of a dataset's items -> values of ``--backbones`` that a hint suggests."""


def check_reads(planned: Sequence[PlannedArray], spec: str, holds: str) -> None:
    """Raise UsageError, with the next command, for a backbone that does not read the kind of items in the dataset."""
    for item in planned:
        if item.backbone.reads != holds:
            raise UsageError(
                f"{item.backbone.name} reads {item.backbone.reads}, but {spec} contains {holds}.",
                f"fedcache extract --dataset {shell_word(spec)} --backbones {ENCODERS[holds]}",
            )


def look_up_backbones(config: ExtractConfig, home: Home) -> tuple[ExtractConfig, list[Backbone]]:
    """The configuration with bare names of backbones (``bare_config``), and the rows (``Backbone``) of all backbones.

    Unknown names are refused before any weights are looked for, so that a typo in the second name does not wait for the
    download of the first. Raises as ``lookup``.
    """
    files = {bare_name(name): Path(path) for name, path in config.weights.items()}

    def rows_of(name: str) -> list[Backbone]:
        bare = bare_name(name)
        # Keep the options of this backbone, and those without a backbone's name, which apply to all. The row depends on
        # them, because the output and the size of a user's model determine the width of its features.
        options = {}
        for key, value in config.recipe.items():
            backbone, _, option = key.rpartition(":")
            if bare_name(backbone) in ("", bare):
                options[option] = value
        requested = options.get("size", config.size)
        size = whole_number(str(requested))
        outputs = [options.get("output", "")]
        # output=A+B makes an array of each output.
        if name.startswith(HUGGING_FACE):
            outputs = outputs[0].split("+")
        output_rows = []
        for output in outputs:
            row = registry.lookup(
                name,
                home=home.root,
                file=files.get(bare),
                output=output or None,
                size=size,
                options=options,
            )
            output_rows.append(row)
        return list(dict.fromkeys(output_rows))

    rows: dict[str, list[Backbone]] = {}
    for new in all_at_once(partial(rows_of, name) for name in config.backbones):
        first = rows.setdefault(new[0].name, new)
        if first != new:
            raise UsageError(
                f"Two files are called {new[0].name}: {first[0].place} and {new[0].place}.",
                "Rename one of them, because a store identifies a backbone by its file name.",
            )
    return bare_config(config), [row for of_name in rows.values() for row in of_name]


def known_config(config: ExtractConfig, home: Home) -> ExtractConfig:
    """The configuration, with each folder of a model under the name by which this home knows it (``known_name``)."""
    changed: dict[str, str] = {}
    for name in config.backbones:
        if name.startswith(HUGGING_FACE) and name not in config.weights:
            new = known_name(name, home.root)
            if new != name:
                changed |= {name: new, bare_name(name): new}
    return _renamed(config, lambda name: changed.get(name, name))


def bare_config(config: ExtractConfig) -> ExtractConfig:
    """The configuration with backbones, recipes and weights under the names that stores know."""
    config = _renamed(config, bare_name)
    return replace(config, weights={bare_name(n): path for n, path in config.weights.items()})


def _renamed(config: ExtractConfig, new: Callable[[str], str]) -> ExtractConfig:
    """The configuration with new names of backbones, also in the keys of ``--recipe``, and without repeated names."""
    recipe = {}
    for key, value in config.recipe.items():
        # The name and the colon are empty for an option of all backbones.
        name, colon, option = key.rpartition(":")
        recipe[f"{new(name)}{colon}{option}"] = value
    backbones = tuple(dict.fromkeys(map(new, config.backbones)))
    return replace(config, backbones=backbones, recipe=recipe)


def parse_max_bad(text: str, rows: int) -> int:
    """The most rows that may be bad, from a number or from ``1%`` of the rows, which is at least 1 unless it is 0%.

    Raises UsageError for any other text.
    """
    with suppress(ValueError):
        if text.endswith("%"):
            percent = float(text[:-1])
            if percent == 0:
                return 0
            if 0 < percent <= 100:
                return max(1, math.floor(rows * percent / 100))
        elif int(text) >= 0:
            return int(text)
    raise UsageError(
        f"--max-bad {text} is neither a share nor a count.",
        "For example --max-bad 1% or --max-bad 10",
    )


def recipe_of(backbone: Backbone, weights: Weights, config: ExtractConfig) -> Recipe:
    """The native recipe with the views and the overrides requested.

    ``--recipe key=value`` applies to every backbone, ``--recipe NAME:key=value`` to one.
    """
    changes = {}
    if config.size is not None:
        changes["size"] = str(config.size)
    if config.views != 1:
        changes["views"] = str(config.views)
    for key, value in config.recipe.items():
        name, _, option = key.rpartition(":")
        if not name or name == backbone.name:
            changes[option] = value
        elif name not in config.backbones:
            raise UsageError(
                f"--recipe {key}={value} is for the backbone {name!r}, but --backbones does not contain it.",
                f"Backbones of this run: {', '.join(config.backbones)}",
            )
    # Pixels are always stored as uint8, so the option does not apply to them.
    if backbone.recipe.dtype == "uint8":
        changes.pop("dtype", None)
    in_row = backbone.row_options
    if backbone.provider == "own_module":  # a module has one output
        in_row = ()
    for option in in_row:
        changes.pop(option, None)
    known = (*in_row, "dtype")
    # ``override`` refuses other options too, but its error lists only keys for images.
    wrong = [option for option in changes if option not in (*known, *RECIPE_KEYS)]
    if wrong and backbone.reads != IMAGES:
        raise unknown("recipe key", wrong[0], known)
    recipe = replace(backbone.recipe, weights=weights.sha256).override(changes)
    if config.augment is None:
        return recipe
    return recipe.with_policy(config.augment)


def wanted_text(
    store: Store,
    planned: Sequence[PlannedArray],
    classes: Sequence[str],
    template: str | None,
    config: ExtractConfig,
    part: StorePart | None,
    *,
    keep: bool,
) -> dict[str, tuple[str, ...]]:
    """Array key -> the templates whose text features become the current ones, for backbones with a text tower.

    The templates are those requested, else the dataset's ``template``, else the backbone's own. With ``keep``, a
    backbone that has text features is left out when no template was requested. Without classes there is no text.
    Text features depend on no row, so the first part of a dataset computes all of them, and other parts none.
    """
    found: dict[str, tuple[str, ...]] = {}
    if not classes or (part is not None and part.number > 1):
        return found
    keep = keep and not config.text
    for item in planned:
        backbone = item.backbone
        if backbone.text_width is None:
            continue
        if keep and store.has_text(backbone.name, weights=item.recipe.weights):
            continue
        default = template or backbone.template or "a photo of a {}."
        found[item.recipe.key] = config.text or (default,)
    return found


def missing_text(
    store: Store, planned: Sequence[PlannedArray], wanted: Mapping[str, Sequence[str]]
) -> dict[str, Sequence[str]]:
    """Those of the ``wanted`` text features (templates per array key) that the store lacks."""
    items = {item.recipe.key: item for item in planned}
    missing = {}
    for key, templates in wanted.items():
        item = items[key]
        if not store.has_text(item.backbone.name, templates, weights=item.recipe.weights):
            missing[key] = templates
    return missing


def make_current(
    store: Store,
    planned: Sequence[PlannedArray],
    wanted: Mapping[str, Sequence[str]],
    computed: Collection[str],
) -> list[dict[str, Any]]:
    """Make the wanted text features, which are stored already, the current ones.

    ``computed`` has the array keys whose text features this run computed. Returns {backbone, templates, state} of each;
    the state is ``computed``, ``made current`` or ``current``.
    """
    rows = []
    for item in planned:
        key = item.recipe.key
        if key not in wanted:
            continue
        name = item.backbone.name
        templates = list(wanted[key])
        changed = store.use_text(name, templates, weights=item.recipe.weights)
        state = "current"
        if key in computed:
            state = "computed"
        elif changed:
            state = "made current"
        rows.append({"backbone": name, "templates": templates, "state": state})
    return rows


def say_templates(templates: Sequence[str], observer: Observer) -> None:
    """Report the templates of the text features that a run uses."""
    if templates:
        observer.note(
            f"Text template: {quoted(templates)} (change with fedcache extract --text TEMPLATE)."
        )


def quoted(templates: Sequence[str]) -> str:
    """Templates as they are written in a sentence."""
    return " + ".join(f'"{t}"' for t in templates)


def array_bytes(data_rows: int, item: PlannedArray) -> int:
    """Bytes of an array, without the padding of its last chunk; pixels of native size are taken as 224 x 224."""
    recipe = item.recipe
    if recipe.dtype == "uint8":
        side = recipe.size or 224
        return int(data_rows * recipe.views * side * side * 3)
    row_bytes = item.backbone.width * np.dtype(recipe.dtype).itemsize
    return data_rows * recipe.views * row_bytes


def check_backbone(name: str, given: dict[str, Path], home: Home) -> dict[str, object]:
    """Load a backbone and run it on two images; returns {name, width, sha256, origin}.

    Raises MachineError unless the features are finite and have the width of the backbone.
    """
    backbone = registry.lookup(name, home=home.root)
    weights = registry.locate(
        backbone, given=given, home=home.root, memory=memory_of(home), offline=home.offline
    )
    if weights.download is not None:
        raise MachineError(
            f"The weights of {name} are not available yet.",
            f"fedcache backbones pull {shell_word(name)}",
        )
    recipe = replace(backbone.recipe, weights=weights.sha256)
    encoder = registry.load(backbone, weights, recipe)
    # Encoders of texts, rows and sounds were checked when they were loaded; pixels have no width.
    if backbone.reads == IMAGES and recipe.dtype != "uint8":
        features = encoder.image(trial_images(recipe.size))
        unusable = int((~features.isfinite()).sum())
        if features.shape != (2, backbone.width) or unusable:
            raise MachineError(
                f"For two images, {name} gives features of shape {list(features.shape)} with {unusable} NaN or "
                f"infinite numbers. Expected the shape [2, {backbone.width}] and only finite numbers.",
                "The weights file is damaged or belongs to another model; import it again.",
            )
    return {
        "name": name,
        "width": backbone.width,
        "sha256": weights.sha256,
        "origin": weights.origin,
    }
