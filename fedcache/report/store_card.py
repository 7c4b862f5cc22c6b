"""The card of a published store: its rows and features, how they were made, and what they may reveal about people."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress

import numpy as np

from fedcache.config import Home
from fedcache.errors import FedcacheError
from fedcache.extract.backbones import lookup_recorded
from fedcache.extract.recipe import IMAGES, Recipe, held_by, reads_of
from fedcache.parsing import Record
from fedcache.store.samples import Samples
from fedcache.store.store import Store
from fedcache.tables.splits import SPLIT_NAMES
from fedcache.tables.words import some_names

SHOWN = 20
"""Maximum number of classes, domains, groups or partitions that are listed."""

READ_IT = """```python
import fedcache as fc

store = fc.Store.open("ADDRESS")  # of this folder: s3://, gs://, az://, https:// or a local path
X, y = store.Xy()
```

It is a Zarr group with consolidated metadata, so zarr and xarray read it too:

```python
import zarr

group = zarr.open_group("ADDRESS", mode="r")
features = group["features/{key}"]  # rows x views x width
```"""


def store_card(store: Store, home: Home, *, anonymous_names: bool) -> str:
    """The card as Markdown, for people who find a published store."""
    name = store.dataset["slug"]
    parts = {
        "Reading it": [READ_IT.replace("{key}", next(iter(store.arrays)))],
        "Rows": _rows(store),
        "Features": _features(store, home),
        "What the names reveal": _names(store, anonymous_names=anonymous_names),
        "Privacy": [
            "Features are personal data where the originals are. Models can reconstruct much of an image or a text "
            "from its features.",
            "The column `uid` holds half of the sha256 of each original file. Anyone who has a file can tell whether "
            "it is among the rows.",
            "Labels, domains and groups of rows are readable by everyone who can read this folder.",
        ],
    }
    lines = [f"# {name}: features of frozen models", "", "Published with `fedcache publish`."]
    lines += section_lines(parts)
    return "\n".join(lines) + "\n"


def section_lines(parts: Mapping[str, Sequence[str]]) -> list[str]:
    """The lines of a card's sections; ``parts`` is title -> sentences."""
    lines = []
    for title, sentences in parts.items():
        lines += ["", f"## {title}", "", *sentences]
    return lines


def rows_of_splits(samples: Samples) -> list[tuple[str, int]]:
    """Each split with its number of readable rows."""
    codes = samples.split[samples.ok == 1]
    return [(split, int((codes == code).sum())) for code, split in enumerate(SPLIT_NAMES)]


def rows_of_classes(samples: Samples) -> list[tuple[str, int]]:
    """Each class with its number of readable rows. Unlabelled rows belong to no class."""
    labels = samples.label[(samples.ok == 1) & (samples.label >= 0)]
    counts = np.bincount(labels, minlength=len(samples.classes)).tolist()
    return list(zip(samples.classes, counts, strict=True))


def _rows(store: Store) -> list[str]:
    """The number of rows, and their splits, classes and domains."""
    samples = store.samples
    holds = held_by(info.recipe for info in store.arrays.values())
    lines = [f"- {store.rows:,} {holds}, {store.rows_ok:,} of them readable"]
    splits = ", ".join(f"{count:,} {split}" for split, count in rows_of_splits(samples))
    lines.append(f"- splits: {splits}")
    classes = [f"{word} ({count:,})" for word, count in rows_of_classes(samples)]
    shown = some_names(classes, SHOWN)
    lines.append(f"- {len(classes):,} classes: {shown}")
    shown = some_names(samples.domains, SHOWN)
    lines.append(f"- {len(samples.domains):,} domains: {shown}")
    for title, named in (("groups", store.groups), ("partitions", store.partitions)):
        if named:
            lines.append(f"- {title}: {some_names(named, SHOWN)}")
    return lines


def _features(store: Store, home: Home) -> list[str]:
    """The shape of each array, and how it was made."""
    recipes = [(key, info.recipe) for key, info in store.arrays.items()]
    lines = []
    described = backbone_lines(recipes, home)
    for (key, info), made in zip(store.arrays.items(), described, strict=True):
        shape = " x ".join(f"{n:,}" for n in info.shape)
        lines.append(f"- `{key}`, {shape} {info.dtype}. {made}")
    return lines


def _names(store: Store, *, anonymous_names: bool) -> list[str]:
    """Sentences on what the words in the store reveal."""
    if anonymous_names:
        lines = ["Names of rows were replaced by numbers (`--anonymous-names`)."]
    else:
        folders = {name.rpartition("/")[0] for name in store.samples.name}
        lines = [
            f"Names of rows are those of the original data: {store.rows:,} names in {len(folders):,} folders. File "
            "names can be names of people. `fedcache publish STORE FOLDER --anonymous-names` replaces them by numbers."
        ]
    if store.groups:
        lines.append(
            f"Groups keep their words: {some_names(store.groups, SHOWN)}. Words of a group, and the client names of "
            "partitions that were made from it, can name people or places."
        )
    return lines


def backbone_lines(recipes: Iterable[tuple[str, Record]], home: Home) -> list[str]:
    """A line for each (array, recipe): the backbone, its input, and the licence of its weights."""
    lines = []
    for key, facts in recipes:
        # Embeddings that fedcache did not compute have no recipe.
        if "size" not in facts:
            name = facts.get("backbone", key)
            lines.append(
                f"Embeddings {name}, not computed by fedcache; licence of the weights: not known."
            )
            continue
        recipe = Recipe.from_dict(facts)
        licence = ""
        # A backbone that is not installed here is not found.
        with suppress(FedcacheError):
            licence = lookup_recorded(recipe, home=home.root).licence
        kind = reads_of(recipe)
        inputs = f"{kind} as they are"
        if recipe.size and kind == IMAGES:
            inputs = f"{recipe.size} px {recipe.resize}, {recipe.interpolation}"
        elif recipe.size:
            inputs = f"{recipe.size} tokens of a text"
        weights = recipe.weights or "not known"
        licence = licence or "not known"
        lines.append(
            f"Backbone {recipe.backbone}, weights {weights}, {inputs}, recipe {recipe.digest[:16]}; licence of "
            f"the weights: {licence}."
        )
    return lines
