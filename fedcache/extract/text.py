"""Text features: one unit row per class, from one prompt template or an ensemble of several.

The ensemble is CLIP's (Radford et al., arXiv:2103.00020, section 3.1.4): the mean of the templates' unit features,
made unit again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from fedcache.errors import UsageError

if TYPE_CHECKING:
    from fedcache.extract.backbones import FrozenEncoder


def prompts(classes: Sequence[str], template: str) -> list[str]:
    """The template filled in for every class, underscores read as spaces; UsageError for one without ``{}``."""
    if "{}" not in template:
        raise UsageError(
            f"The template {template!r} has no {{}} for the class name.", 'For example --text "a photo of a {}."'
        )
    # Not str.format: a class name or template may hold other braces.
    return [template.replace("{}", name.replace("_", " ").strip()) for name in classes]


def text_features(encoder: FrozenEncoder, classes: Sequence[str], templates: Sequence[str]) -> NDArray[np.float32]:
    """Text features [C, D] float32 of the classes, unit rows, by the text tower of ``encoder``.

    Raises:
        UsageError, without templates, classes or a text tower, for a template without ``{}``, or when the
            templates' features cancel out.
    """
    if not templates or not classes:
        raise UsageError(
            f"Text features need templates and classes; got {len(templates)} and {len(classes)}.",
            'For example --text "a photo of a {}."',
        )
    filled = [prompts(classes, template) for template in templates]
    rows = [encoder.text(lines).to("cpu").numpy().astype(np.float64) for lines in filled]
    total = np.sum([_unit(r) for r in rows], axis=0)
    return _unit(total).astype(np.float32)


def _unit(rows: NDArray[np.float64]) -> NDArray[np.float64]:
    norm = np.linalg.norm(rows, axis=-1, keepdims=True)
    if not np.all(norm > 1e-12):  # also true of NaN
        raise UsageError(
            f"{int((~(norm > 1e-12)).sum())} text features have no direction (their norm is 0 or not finite).",
            "Check the weights of the text tower with `fedcache backbones verify`, or use other templates.",
        )
    unit: NDArray[np.float64] = rows / norm
    return unit
