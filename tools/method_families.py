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
        Clients send statistics once; the server computes a head from them without training, or trains on what it
        draws from them. All but FedPFT add the statistics up, so it does not matter how the rows are dealt to
        clients.
    """,
    "Many rounds, one model": r"""
        Clients train the model that they receive and the server averages what comes back: FedAvg, and what was
        proposed against the drift of clients that are unlike each other. The model is a projection with a
        classifier, or with `--set head=linear` a linear head alone. $w$ is the model, $F_i$ the mean loss of
        client $i$'s $n_i$ rows, $N$ the rows of the round's clients, $\eta$ a rate.
    """,
    "A model for each client": """
        Each client ends with a model of its own, and is scored on test rows like its own. Good where clients
        differ much and stay; a client that was not there is served by [`fedcache
        personalise`](../commands/personalise.md). $P$ is the projection of the features, $Q$ the classifier above
        it.
    """,
    "Prototypes and contrast": """
        Clients share the mean projected feature of each class instead of weights, so that each may have a network
        of its own. Each ends with a model of its own. $z = P(x)$ is the projection of a row.
    """,
    "With class texts": """
        Methods for backbones with a text tower: the feature of a class's text, such as "a photo of a dog", is a
        classifier before anybody has trained. $f$ is the unit feature of an image, $t_c$ that of the text of
        class $c$, $T$ all of them, and $s$ the scale of the logits.
    """,
    "Prompts": """
        Clients learn the words around the class names, or a frame on the image, through frozen towers. They need
        the text tower itself, and those with a visual prompt the images and the image tower: minutes instead of
        seconds. $f(x)$ is the feature of an image, $g$ the text tower.
    """,
    "Training the encoder itself": """
        Baselines and systems that train more than a head: ResNets on images (`--backbones pixels`), or an encoder
        on cached views. They take minutes to hours, and are here because papers compare with them.
    """,
    "References": """
        What a federated method is measured against: nobody talks to anybody, and everybody gives everything.
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
