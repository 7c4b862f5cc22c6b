"""The documentation's list of methods: families, what each family is about, and the papers that pages cite."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from fedcache.federate.engine.method import Family, MethodPage
from fedcache.federate.methods import METHODS

PAPERS = Path(__file__).resolve().parents[1] / "docs" / "papers.bib"

ABOUT: Mapping[Family, str] = {
    "One round, closed form": """
        Clients send statistics of their features once. The server computes a classifier from them without training;
        FedPFT trains it on samples instead. All methods except FedPFT add the statistics of the clients, so the
        partition of the rows does not matter.
    """,
    "Many rounds, one model": r"""
        FedAvg and its variants: clients train the model that they receive, and the server averages the results. Most
        variants reduce client drift, which occurs if the data of clients differ. The model is a projection with a
        classifier, or a linear head alone with `--set head=linear`.
    """,
    "A model for each client": """
        Each client ends with a model of its own, and is tested on its own test rows. These methods are good if clients
        differ strongly and stay in the federation. [`fedcache personalise`](../commands/personalise.md) makes a model
        for a new client.
    """,
    "Prototypes and contrast": """
        Clients share a prototype of each class (its mean projected feature) instead of weights. Each client may
        therefore have a different network, and ends with a model of its own.
    """,
    "With class texts": """
        These methods need a backbone with a text encoder. The feature of a class text, such as "a photo of a dog", is
        a classifier before any training.
    """,
    "Prompts": """
        Clients learn the words around the class names, or a frame on the images, through frozen encoders. These
        methods need the text encoder itself. Methods with a visual prompt also need the images and the image encoder,
        and take minutes instead of seconds.
    """,
    "Training the encoder itself": """
        These methods train an encoder: a ResNet on images (`--backbones pixels`), or a small network on cached views.
        They take minutes to hours. Papers use them as baselines.
    """,
    "References": """
        Federated methods are compared with these two: clients that train alone, and one model that is trained on all
        rows in one place.
    """,
}
"""Family -> its introduction, in the order of the documentation."""


def page_of(name: str) -> MethodPage:
    """The text of a method's page.

    Raises LookupError for a method that has none.
    """
    page = METHODS[name].page
    if page is None:
        raise LookupError(f"{name} has no documentation: give its Method a page=MethodPage(...)")
    return page


@cache
def methods_of(family: Family) -> tuple[str, ...]:
    """The names of a family's methods, in alphabetical order."""
    return tuple(name for name in METHODS if page_of(name).family == family)


def line(text: str) -> str:
    """The text without its line breaks."""
    return " ".join(text.split())


@cache
def papers() -> Mapping[str, str]:
    """Key -> BibTeX."""
    text = PAPERS.read_text(encoding="utf-8")
    return {
        m[1]: m[0].strip()
        for m in re.finditer(r"^@\w+\{([^,]+),.*?^\}$", text, re.MULTILINE | re.DOTALL)
    }
