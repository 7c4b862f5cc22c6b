"""What clients are dealt: arguments, defaults of the papers, labels, and in what single clients differ."""

from pathlib import Path

import numpy as np
import pytest
from arrays import normals
from command import data_of, fedcache, ok
from heard import Heard
from refusal import refused, store_error
from setting_lines import set_to
from text_tables import rows_of

import fedcache as fc
from fedcache.config import PartitionConfig, TrainConfig
from fedcache.errors import Exit
from fedcache.federate.methods import METHODS
from fedcache.runs.partitions import (
    default_partition,
    load_partition,
    make_partition,
    need_labels,
    partition_seeds,
    pinned_name,
    typed_arguments,
)


def store(labels=(0, 1) * 20, **changes):
    """40 rows of two classes, the first 30 of them for training."""
    split = np.where(np.arange(40) < 30, "train", "test")
    x = normals(0, 40, 5)
    return fc.Store.from_arrays(
        {"a": x}, labels=labels, splits=split, classes=("cat", "dog"), **changes
    )


@pytest.mark.parametrize(
    ("scheme", "given", "typed"),
    [
        ("dirichlet", {"clients": "3", "alpha": "0.5"}, {"clients": 3, "alpha": 0.5}),
        ("dirichlet", {"clients": "x"}, {"clients": "x"}),  # for ``make`` to refuse
        ("dirichlet", {"domain": " ink, pen,,"}, {"domain": ("ink", "pen")}),
        ("lda", {"gate": "Yes"}, {"gate": True}),
    ],
)
def test_words_become_what_the_scheme_declares(scheme, given, typed):
    assert repr(typed_arguments(scheme, given)) == repr(typed)
    refused(lambda: typed_arguments(f"{scheme}t", given), f"Did you mean '{scheme}'")


def test_a_partition_is_saved_under_its_name_unless_that_is_not_wanted():
    place = store()
    refused(lambda: load_partition(place, "thirds"), "thirds", "none")
    make_partition(place, "iid", seed=3, clients="2")
    make_partition(place, "iid", clients=2, name="halves")
    make_partition(place, "iid", clients=3, save=False)
    assert sorted(place.partitions) == ["halves", "iid-m2-s3"]
    refused(lambda: load_partition(place, "thirds"), "thirds", "halves, iid-m2-s3")


def test_rows_without_labels_are_refused_where_labels_are_read():
    partly = store(np.where(np.arange(40) < 15, -1, np.arange(40) % 2), name="partly")
    none = store(np.full(40, -1), name="none")
    fed3r = METHODS["fed3r"]
    need_labels(fed3r, partly, None)  # some rows have labels, and only those may be dealt
    need_labels(fed3r, partly, np.arange(15, 30))
    need_labels(METHODS["clip-zs"], none, None)
    dealt = np.arange(10, 20)
    refused(lambda: need_labels(fed3r, partly, dealt), "5 of the 10", "--scheme dirichlet")
    assert "--scheme" not in refused(lambda: need_labels(fed3r, none, None), "40 of the 40").hint


@pytest.mark.parametrize(
    ("method", "config", "domain", "scheme", "words", "notes"),
    rows_of(
        """
        fedpcl |                      |     | feature-shift |             | 1
        fedpcl |                      | ink | label-shift   | clients=5   | 2
        fed3r  |                      |     | dirichlet     | clients=100 | 2
        fed3r  | scheme=iid clients=7 |     | iid           | clients=7   | 0
        """
    ),
)
def test_a_scheme_and_its_clients_are_those_of_the_paper(
    method, config, domain, scheme, words, notes
):
    heard = Heard()
    place = store(domains=np.where(np.arange(40) % 4 < 2, "ink", "pen"))
    names = tuple(domain.split())
    asked = METHODS[method], place, PartitionConfig(**set_to(config)), names, heard
    wanted = set_to(words) | ({"domain": names} if names else {})
    assert default_partition(*asked) == (scheme, wanted)
    assert len(heard.notes) == int(notes)


def dealt(train, config, **how):
    heard = Heard()
    place = store()
    make_partition(place, "iid", clients=3, seed=9, name="saved")
    asked = METHODS["fed3r"], place, TrainConfig(**train), config, [4, 2]
    found, name = partition_seeds(*asked, **{"repartition": False, **how}, observer=heard)
    return found, name, heard.notes


def test_seeds_share_a_partition_unless_each_draws_its_own():
    shared, name, notes = dealt({}, PartitionConfig("iid", 2, seed=5))
    assert list(shared) == [4, 2]
    assert shared[4].seed == 5
    assert shared[4] is shared[2]
    assert name is None
    assert notes == [f"{shared[4].summary()}."]
    own, _, _ = dealt({}, PartitionConfig("iid", 2, seed=5), repartition=True)
    assert own[4].seed == 4
    assert own[2].seed == 2
    assert own[4].digest != own[2].digest
    saved, name, notes = dealt({"partition": "saved"}, PartitionConfig())
    assert saved[4].seed == 9
    assert saved[4] is saved[2]
    assert name == "saved"
    assert notes == []


def test_only_what_the_paper_chose_is_scaled_down():
    found, _, notes = dealt({}, PartitionConfig())  # 100 clients of 30 rows
    clients = len(found[4].clients)
    assert 0 < clients < 100
    assert notes[2].endswith(f" fedcache uses clients {clients} instead.")
    for asked in (PartitionConfig("dirichlet"), PartitionConfig(None, 100)):
        refused(lambda asked=asked: dealt({}, asked))


def test_a_name_of_other_rows_is_not_given_again_unless_that_is_said():
    held = store()
    first = make_partition(held, "iid", clients=2, name="pp")
    # the same again
    assert make_partition(held, "iid", clients=2, name="pp").digest == first.digest
    refused(lambda: make_partition(held, "iid", clients=3, name="pp"), "'pp'", "--name pp-2")
    assert load_partition(held, "pp").digest == first.digest
    other = make_partition(held, "iid", clients=3, name="pp", replace=True)
    assert load_partition(held, "pp").digest == other.digest
    assert load_partition(held, pinned_name("pp", other.digest)).digest == other.digest
    store_error(lambda: load_partition(held, pinned_name("pp", first.digest)), "was replaced")


@pytest.mark.slow
def test_the_configuration_and_the_report_of_a_run_know_its_partition_by_its_rows(tmp_path):
    held = store()
    make_partition(held, "iid", clients=2, name="pp")
    run = data_of(f"train --store {held.path} --method fedncm --partition pp")
    config = Path(run["path"]) / "config.toml"
    assert data_of(f"train --config {config}")["reused"]
    make_partition(held, "iid", clients=3, name="pp", replace=True)
    assert fedcache(f"train --config {config} --json").code == Exit.STORE
    pinned = pinned_name("pp", run["partition"]["digests"][0])
    former = config.read_text().replace(pinned, "pp")  # as a former release wrote it
    for text in (config.read_text(), former):
        config.write_text(text)
        ok(f"report {run['digest'][:12]} -o {tmp_path}/page.html")
        assert "replaced by a partition with other rows" in (tmp_path / "page.html").read_text()
