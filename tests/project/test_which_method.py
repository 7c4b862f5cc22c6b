"""Every figure of ``docs/which-method.md`` is computed from ``docs/frozen-bench.json``."""

import json
import re

from repository_files import content

from fedcache.progress import byte_size

DATA = json.loads(content("docs/frozen-bench.json"))
STANDINGS = {
    ranking["title"]: {s["treatment"]: s for s in ranking["standings"]}
    for ranking in DATA["rankings"]
}
PAGE = content("docs/which-method.md")
PARTITIONS = ("iid", "dirichlet 0.5", "dirichlet 0.1", "two classes", "domains")
SHOWN = (
    "fed3r",
    "gh-ofl lda",
    "fedcof",
    "fedavg",
    "scaffold linear",
    "fedrep",
    "fedbabu",
    "ditto linear",
    "lg-fedavg",
    "fedpcl",
    "solo",
    "solo linear",
    "central (L-BFGS)",
)


def standing(treatment, partition, texts):
    title = f"partition {partition}"
    if texts:
        title += ": data with class texts"
    return STANDINGS[title][treatment]


def mean(treatment, partition, *, prior=True, texts=False):
    """Accuracy in %, with the client prior if there is one."""
    found = standing(treatment, partition, texts)
    value = found["mean"]
    if not prior:
        value = found["without_prior"]
    return f"{100 * value:.1f}"


def sent(treatment, partition="iid"):
    return byte_size(round(standing(treatment, partition, texts=False)["bytes_up"]))


SENTENCES = [
    (
        "With alpha 0.1 it reaches {} %, and `fedrep`, the best method with a model per client, {} %.",
        [mean("fed3r", "dirichlet 0.1"), mean("fedrep", "dirichlet 0.1")],
    ),
    (
        "With two classes per client, the figures are {} % and {} %, with alpha 0.5 {} % and {} %, and with `iid` rows "
        "{} % and {} %.",
        [
            mean("fed3r", "two classes"),
            mean("fedrep", "two classes"),
            mean("fed3r", "dirichlet 0.5"),
            mean("fedrep", "dirichlet 0.5"),
            mean("fed3r", "iid"),
            mean("fedrep", "iid"),
        ],
    ),
    (
        "A client of `fed3r` sends {} once, and a client of `fedrep` {} in 20 rounds.",
        [sent("fed3r"), sent("fedrep")],
    ),
    (
        "Without the shares, `fed3r` reaches {} % with alpha 0.1 and {} % with two classes per client.",
        [
            mean("fed3r", "dirichlet 0.1", prior=False),
            mean("fed3r", "two classes", prior=False),
        ],
    ),
    (
        "Its accuracy hardly depends on the partition: {} % (`iid`), {} % (alpha 0.5), {} % (alpha 0.1) and {} % (two "
        "classes).",
        [mean("fed3r", partition, prior=False) for partition in PARTITIONS[:4]],
    ),
    (
        "The accuracy of `fedavg` falls from {} % (`iid`) to {} % (alpha 0.1) and {} % (two classes).",
        [
            mean("fedavg", partition, prior=False)
            for partition in ("iid", "dirichlet 0.1", "two classes")
        ],
    ),
    (
        "`fedcof` sends {} and reaches {} % with alpha 0.1 and the shares.",
        [sent("fedcof"), mean("fedcof", "dirichlet 0.1")],
    ),
    (
        "A linear head that each client trains alone (`solo` with `head=linear`) sends nothing, and reaches {} % with "
        "two classes per client, but only {} % with `iid` rows.",
        [mean("solo linear", "two classes"), mean("solo linear", "iid")],
    ),
    (
        "With `iid` rows, `clip-zs` reaches {} %, `clip-zs` with `feat_post=center` {} % and `soft-means` {} %.",
        [
            mean(treatment, "iid", texts=True)
            for treatment in ("clip-zs", "clip-zs centred", "soft-means")
        ],
    ),
    (
        "`fst-cbdg` reaches {} %, and {} % if its first labels are uniform, so its gain does not come from "
        "self-training.",
        [
            mean(treatment, "iid", texts=True)
            for treatment in ("fst-cbdg", "fst-cbdg uniform first labels")
        ],
    ),
    (
        "With `iid` rows, `fed3r-prior` reaches {} % and `fed3r` {} %.",
        [mean("fed3r-prior", "iid", texts=True), mean("fed3r", "iid", texts=True)],
    ),
    (
        "`lg-fedavg` reaches {} %, a projection that each client trains alone (`solo`) {} %, and `fed3r` {} %.",
        [mean("lg-fedavg", "domains"), mean("solo", "domains"), mean("fed3r", "domains")],
    ),
]


def test_every_sentence_with_a_figure_is_computed():
    page = " ".join(PAGE.split())
    computed = [sentence.format(*figures) for sentence, figures in SENTENCES]
    assert [sentence for sentence in computed if sentence not in page] == []
    results = page.partition("## Choose")[2].partition("## Figures")[0]
    for sentence in computed:
        results = results.replace(sentence, "")
    assert re.findall(r"\d+\.\d", results) == [], "a figure that no sentence computes"


def test_the_table_is_computed():
    rows = []
    for treatment in SHOWN:
        cells = []
        for partition in PARTITIONS:
            cell = mean(treatment, partition)
            if standing(treatment, partition, texts=False)["without_prior"] is not None:
                cell += f" ({mean(treatment, partition, prior=False)})"
            cells.append(cell)
        rows.append(f"| {treatment} | {' | '.join(cells)} | {sent(treatment)} |")
    assert "\n".join(rows) in PAGE


def test_the_recommended_method_is_ahead_of_models_per_client_unless_clients_are_domains():
    for partition in PARTITIONS[:4]:
        standings = STANDINGS[f"partition {partition}"]
        personal = [s["mean"] for s in standings.values() if s["family"] == "personal"]
        assert standings["fed3r"]["mean"] > max(personal), partition
