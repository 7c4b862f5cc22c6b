"""Every accuracy and size in ``docs/which-method.md`` is computed from ``docs/frozen-bench.json``."""

import json
import re

from loaded_files import content

from fedcache.progress import byte_size

DATA = json.loads(content("docs/frozen-bench.json"))
STANDINGS = {
    ranking["title"]: {s["treatment"]: s for s in ranking["standings"]}
    for ranking in DATA["rankings"]
}
PAGE = content("docs/which-method.md")
PARTITIONS = ("iid", "dirichlet 0.5", "dirichlet 0.1", "two classes", "domains")


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


def with_texts(*treatments):
    return [mean(treatment, "iid", texts=True) for treatment in treatments]


def sent(treatment):
    return byte_size(round(standing(treatment, "iid", texts=False)["bytes_up"]))


PLAIN = len(STANDINGS["partition iid"])
ALL = len(STANDINGS["partition iid: data with class texts"])

SENTENCES = [
    (
        "{} treatments that read features and labels, and {} that also read class texts.",
        [PLAIN, ALL - PLAIN],
    ),
    (
        "With alpha 0.1 it reaches {} %, and `fedrep`, the best method with a model per client, reaches {} %.",
        [mean("fed3r", "dirichlet 0.1"), mean("fedrep", "dirichlet 0.1")],
    ),
    (
        "With `iid` rows, `clip-zs` reaches {} %, `clip-zs` with `feat_post=center` {} % and `soft-means` {} %.",
        with_texts("clip-zs", "clip-zs centred", "soft-means"),
    ),
    (
        "`fst-cbdg` reaches {} %. It reaches {} % even if self-training starts from labels that give all classes the "
        "same probability, so its gain over `clip-zs` does not come from self-training.",
        with_texts("fst-cbdg", "fst-cbdg uniform first labels"),
    ),
    (
        "With `iid` rows, `fed3r-prior` reaches {} %, `fed3r` {} %, `tofa` {} % and `atpfl-feat` {} %.",
        with_texts("fed3r-prior", "fed3r", "tofa", "atpfl-feat"),
    ),
    (
        "closer: {} % with alpha 0.1 and {} % with two classes per client.",
        [mean("ccvr", "dirichlet 0.1", prior=False), mean("ccvr", "two classes", prior=False)],
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
    assert re.findall(r"(?<!alpha )\b\d+\.\d", results) == [], "a figure that no sentence computes"


def test_the_table_is_computed():
    shown = PAGE.partition("## Figures")[2].partition("\n## ")[0]
    rows = re.findall(r"^[|] .*", shown, re.MULTILINE)[1:]
    assert len(rows) > 10
    for row in rows:
        treatment = row.split("|")[1].strip()
        cells = []
        for partition in PARTITIONS:
            cell = mean(treatment, partition)
            if standing(treatment, partition, texts=False)["without_prior"] is not None:
                cell += f" ({mean(treatment, partition, prior=False)})"
            cells.append(cell)
        assert row == f"| {treatment} | {' | '.join(cells)} | {sent(treatment)} |"


def test_the_recommended_method_is_ahead_of_models_per_client_unless_clients_are_domains():
    best = {}
    for partition in PARTITIONS[:4]:
        standings = STANDINGS[f"partition {partition}"]
        personal = {name: s["mean"] for name, s in standings.items() if s["family"] == "personal"}
        assert standings["fed3r"]["mean"] > max(personal.values()), partition
        best[partition] = max(personal, key=personal.get)
    assert best["dirichlet 0.1"] == "fedrep", "the page names it the best of them"
