"""Prompt templates: which are asked for, which are current, and how they are named."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from fedcache.config import ExtractConfig
from fedcache.extract.planning.plan import PlannedArray, missing_text, templates_of
from fedcache.progress import Observer
from fedcache.store.store import Store


def wanted_text(
    store: Store | None, planned: Sequence[PlannedArray], template: str | None, config: ExtractConfig, *, keep: bool
) -> dict[str, tuple[str, ...]]:
    """Templates per array key whose text features are to be the current ones.

    Args:
        store: of the features; None when there is none yet.
        planned: backbones; those without a text tower are left out.
        template: the dataset's.
        config: with the templates asked for.
        keep: leave out a backbone that has text features, when no template was asked for.
    """
    found = {}
    for item in planned:
        name, weights = item.backbone.name, item.recipe.weights
        kept = keep and not config.text and store is not None and store.has_text(name, weights=weights)
        if item.backbone.text_width is not None and not kept:
            found[item.recipe.key] = templates_of(item.backbone, template, config)
    return found


def make_current(
    store: Store, planned: Sequence[PlannedArray], wanted: Mapping[str, Sequence[str]], computed: Collection[str]
) -> list[dict[str, Any]]:
    """Make the wanted text features, all of them stored, the current ones, and say what that changed."""
    said = []
    for item in planned:
        if item.recipe.key not in wanted:
            continue
        name, templates = item.backbone.name, list(wanted[item.recipe.key])
        changed = store.use_text(name, templates, weights=item.recipe.weights)
        state = "computed" if item.recipe.key in computed else "made current" if changed else "current"
        said.append({"backbone": name, "templates": templates, "state": state})
    return said


def planned_text(
    store: Store | None, planned: Sequence[PlannedArray], template: str | None, config: ExtractConfig
) -> list[dict[str, Any]]:
    """What ``make_current`` would find to do."""
    lacking = missing_text(store, planned, template, config)
    return [
        {
            "backbone": p.backbone.name,
            "templates": list(templates_of(p.backbone, template, config)),
            "state": "to compute" if p.recipe.key in lacking else "complete",
        }
        for p in planned
        if p.backbone.text_width is not None
    ]


def say_templates(templates: Sequence[str], observer: Observer) -> None:
    """Which template made the text a run uses: nobody may have to guess it."""
    if templates:
        observer.note(f"Text: {quoted(templates)} (fedcache extract --text chooses).")


def quoted(templates: Sequence[str]) -> str:
    """Templates as they are written in a sentence."""
    return " + ".join(f'"{t}"' for t in templates)
