"""What the command line and the documentation say of methods."""

import json

import pytest
from command import data_of, fedcache

from fedcache.federate.methods import METHODS
from fedcache.report import methods
from fedcache.report.methods import PATH, Sizes, sources_digest, stored_counts
from fedcache.report.methods.facts import every_method, traffic_of


# D = 512 (and 1536), C = 10: exact up, with 4 x 256 of BatchNorm in every projection that travels; paper up
@pytest.mark.parametrize(
    ("name", "width", "exact", "paper"),
    [
        ("solo", 512, 0, 0),
        ("fedavg", 512, 134_922, 133_632),
        ("fedavg", 1536, 397_066, 395_776),
        ("fedrep", 512, 132_352, 131_072),
        ("fedpcl", 1536, 2_570, 2_560),
        ("fst-cbdg", 1024, 10_250, 10_250),
        ("clip-zs", 512, 0, 0),
        ("fedncm", 512, 5_130, 5_120),
        ("fed3r", 512, 136_458, 136_448),
    ],
)
def test_the_parameters_of_the_tables_come_out_of_the_counter(name, width, exact, paper):
    sends = traffic_of(METHODS[name], Sizes(width, width, 10))
    assert sends["up"] == exact
    assert sends["paper_up"] == paper


def test_what_is_received_is_counted_after_the_first_round():
    """FedPCL's first round brings nothing; then the mean and all five clients' prototypes, 256 x 10 each."""
    sends = traffic_of(METHODS["fedpcl"], Sizes(512, 512, 10))
    assert sends["first_down"] == 0
    assert sends["down"] == 6 * 2_560
    assert sends["clients"] == 5
    text = traffic_of(METHODS["fst-cbdg"], Sizes(512, 1024, 10))
    assert text["first_down"] == 10_250 + 10_240
    assert text["down"] == 10_250
    assert text["clients"] == 0
    assert data_of("methods info fedpcl")["traffic"]["down"] == sends["down"]


@pytest.mark.slow
def test_the_catalogue_foretells_what_counting_finds(monkeypatch):
    assert json.loads(PATH.read_bytes())["sources"] == sources_digest(), (
        "old; run: python tools/make_docs.py"
    )
    sizes = Sizes(20, 12, 5)
    stored = stored_counts(sizes)
    assert stored is not None
    counted = every_method(sizes)
    assert methods.method_entries(stored, sizes) == methods.method_entries(counted, sizes)
    monkeypatch.setattr(methods, "sources_digest", lambda: "of methods that were edited")
    assert stored_counts(sizes) is None


@pytest.mark.parametrize("name", ["fedavg", "fedpcl", "flesd"])
def test_info_shows_the_objective_every_switch_and_both_sides(name):
    data = data_of(f"methods info {name}")
    assert len(data["objective"]) > 80
    assert [h["name"] for h in data["hyperparameters"]] == [h.name for h in METHODS[name].hparams]
    assert all(side["d"].startswith("D-") for side in data["disagreements"])
    assert "--set key=value" in fedcache(f"methods info {name}").out


def test_shapes_for_no_store_are_said_to_be_an_example():
    done = fedcache("methods info fed3r")
    lines = (done.out + done.err).splitlines()
    title = next(line for line in lines if "what leaves a client" in line)
    assert "512 features, 10 classes" in title
    assert "example" in title
