"""What clients are dealt: arguments, defaults of the papers, labels, and in what single clients differ."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command import fedcache, ok
from heard import Heard

import fedcache as fc
from fedcache.config import PartitionConfig, TrainConfig
from fedcache.errors import Exit, FedcacheError
from fedcache.federate.methods import METHODS
from fedcache.runs.client_differences import client_overrides, named_backbones
from fedcache.runs.partitions import (
    default_partition,
    load_partition,
    make_partition,
    need_labels,
    partition_seeds,
    pinned_name,
    report_notes,
    single_class_warning,
    typed_arguments,
    write_shards,
)


def store(labels: Any = None, domains: Any = None, rows: int = 40, **changes: Any) -> fc.Store:
    """40 rows of two classes, the first 30 of them for training, with two arrays of 3 and 2 features."""
    split = np.where(np.arange(rows) < rows * 3 // 4, "train", "test")
    x = np.random.default_rng(0).normal(size=(rows, 5)).astype(np.float32)
    features = {"a": x[:, :3], "b": x[:, 3:]}
    y = np.arange(rows) % 2 if labels is None else labels
    return fc.Store.from_arrays(features, labels=y, domains=domains, splits=split, classes=("cat", "dog"), **changes)


def refused(message: str, hint: str, call: Any, *args: Any, **options: Any) -> None:
    with pytest.raises(FedcacheError) as caught:
        call(*args, **options)
    assert (caught.value.code, caught.value.message, caught.value.hint) == (Exit.USAGE, message, hint)


@pytest.mark.parametrize(
    ("scheme", "given", "typed"),
    [
        ("dirichlet", {"clients": "3", "alpha": "0.5"}, {"clients": 3, "alpha": 0.5}),
        ("dirichlet", {"clients": "x", "alpha": "y"}, {"clients": "x", "alpha": "y"}),  # for ``make`` to refuse
        ("dirichlet", {"clients": 3, "nothing": "1"}, {"clients": 3, "nothing": "1"}),
        ("dirichlet", {"domain": " ink, pen,,"}, {"domain": ("ink", "pen")}),
    ],
)
def test_words_become_what_the_scheme_declares(scheme: str, given: dict[str, Any], typed: dict[str, Any]) -> None:
    found = typed_arguments(scheme, given)
    assert found == typed
    assert {k: type(v) for k, v in found.items()} == {k: type(v) for k, v in typed.items()}


@pytest.mark.parametrize(
    ("word", "meant"),
    [("true", True), ("Yes", True), ("1", True), ("FALSE", False), ("no", False), ("0", False), ("maybe", "maybe")],
)
def test_words_of_a_switch_are_true_or_false(word: str, meant: Any) -> None:
    from fedcache.federate.partition.partition import SCHEMES

    scheme, name = next((s, a.name) for s, made in SCHEMES.items() for a in made.arguments if a.kind == "bool")
    assert typed_arguments(scheme, {name: word}) == {name: meant}


def test_an_unknown_scheme_is_corrected() -> None:
    with pytest.raises(FedcacheError, match="Did you mean 'dirichlet'"):
        typed_arguments("dirichlett", {})


def test_a_partition_is_saved_under_its_name_unless_that_is_not_wanted() -> None:
    place = store()
    made = make_partition(place, "iid", seed=3, clients="2")
    assert list(place.partitions) == [made.default_name()] == ["iid-m2-s3"]
    assert make_partition(place, "iid", clients=2, name="halves").seed == 0
    make_partition(place, "iid", clients=3, save=False)
    assert sorted(place.partitions) == ["halves", "iid-m2-s3"]
    assert load_partition(place, "halves").digest != made.digest


def test_a_partition_that_is_not_saved_is_named_with_those_that_are(tmp_path: Path) -> None:
    place = store()
    with pytest.raises(FedcacheError) as none:
        load_partition(place, "thirds")
    assert none.value.hint == "Saved partitions: none; make one with `fedcache partition`"
    make_partition(place, "iid", clients=3, name="b")
    saved = make_partition(place, "iid", clients=2, name="a")
    with pytest.raises(FedcacheError) as other:
        load_partition(place, "thirds")
    assert other.value.hint == "Saved partitions: a, b"
    saved.save(tmp_path / "file.json")
    assert load_partition(place, str(tmp_path / "file.json")).digest == saved.digest


def test_notes_of_a_partition_are_told_and_what_is_missing_is_warned_of() -> None:
    from fedcache.federate.partition.rows import FEWER

    heard, made = Heard(), make_partition(store(), "iid", clients=2, save=False)
    object.__setattr__(made, "notes", ("a note", f"3 clients {FEWER} rows"))
    report_notes(made, heard)
    assert (heard.notes, heard.warnings) == (["a note"], [f"3 clients {FEWER} rows"])


LABELS = np.where(np.arange(40) < 15, -1, np.arange(40) % 2)


def test_rows_without_labels_are_refused_where_labels_are_read() -> None:
    partly, none = store(LABELS, name="partly"), store(np.full(40, -1), name="none")
    add = "Add labels to the file, then:  fedcache ingest FILE --name {} --replace"
    leave_out = (
        "A scheme that deals by class leaves them out, for example --scheme dirichlet; --by COLUMN does so with "
        "--option unlabelled=drop.\n"
    )
    fed3r = METHODS["fed3r"]
    need_labels(fed3r, partly, None)  # some rows have labels, and only those may be dealt
    need_labels(fed3r, partly, np.arange(15, 30))
    need_labels(fed3r, store(name="all"), np.arange(30))
    need_labels(METHODS["clip-zs"], none, None)
    message = "fed3r needs labels, and {} rows of {} have none."
    some = message.format("5 of the 10", partly.path.name)
    refused(some, leave_out + add.format("partly"), need_labels, fed3r, partly, np.arange(10, 20))
    every = message.format("40 of the 40", none.path.name)
    refused(every, add.format("none"), need_labels, fed3r, none, None)


def test_one_class_alone_is_warned_of() -> None:
    warned = (
        "There is only one class among the training rows (dog): whatever is trained says that one, and its accuracy "
        "says nothing. The counts:  fedcache inspect"
    )
    fed3r, names = METHODS["fed3r"], ("cat", "dog")
    assert single_class_warning(fed3r, np.array([1, 1, -1], np.int32), names) == warned
    assert single_class_warning(fed3r, np.array([0, 1], np.int32), names) is None
    assert single_class_warning(fed3r, np.array([-1, -1], np.int32), names) is None
    assert single_class_warning(METHODS["clip-zs"], np.array([1, 1], np.int32), names) is None


@pytest.mark.parametrize(
    ("method", "config", "domain", "chosen", "notes"),
    [
        ("fedpcl", {}, (), ("feature-shift", {}),
         ["Partition feature-shift: the setting of fedpcl's paper (--scheme chooses)."]),
        ("fedpcl", {}, ("ink",), ("label-shift", {"clients": 5, "domain": ("ink",)}),
         ["Partition label-shift: fedpcl's paper shifts features, and there is one domain only.",
          "Clients 5: the setting of fedpcl's paper (--clients chooses)."]),
        ("fed3r", {}, (), ("dirichlet", {"clients": 100}),
         ["Partition dirichlet: the setting of fed3r's paper (--scheme chooses).",
          "Clients 100: the setting of fed3r's paper (--clients chooses)."]),
        ("fed3r", {"scheme": "iid", "clients": 7, "options": {"shots": 2}}, (), ("iid", {"shots": 2, "clients": 7}),
         []),
        ("fed3r", {"scheme": "iid", "options": {"clients": 4}}, (), ("iid", {"clients": 4}), []),
    ],
)  # fmt: skip
def test_a_scheme_and_its_clients_are_those_of_the_paper(
    method: str, config: dict[str, Any], domain: tuple[str, ...], chosen: tuple[str, dict[str, Any]], notes: list[str]
) -> None:
    heard, place = Heard(), store(domains=np.where(np.arange(40) % 4 < 2, "ink", "pen"))
    assert default_partition(METHODS[method], place, PartitionConfig(**config), domain, heard) == chosen
    assert heard.notes == notes


def dealt(train: dict[str, Any], config: PartitionConfig, *, repartition: bool = False) -> tuple[Any, Any, list[str]]:
    heard, place = Heard(), store()
    make_partition(place, "iid", clients=3, seed=9, name="saved")
    found, name = partition_seeds(
        METHODS["fed3r"], place, TrainConfig(**train), config, [4, 2], repartition=repartition, observer=heard
    )
    return found, name, heard.notes


def test_seeds_share_a_partition_unless_each_draws_its_own() -> None:
    shared, name, notes = dealt({}, PartitionConfig("iid", 2, seed=5))
    assert list(shared) == [4, 2]
    assert (shared[4].seed, shared[4] is shared[2], name) == (5, True, None)
    assert notes == [f"{shared[4].summary()}."]
    own, _, _ = dealt({}, PartitionConfig("iid", 2, seed=5), repartition=True)
    assert (own[4].seed, own[2].seed) == (4, 2)
    assert own[4].digest != own[2].digest
    saved, name, notes = dealt({"partition": "saved"}, PartitionConfig())
    assert (saved[4].seed, saved[4] is saved[2], name, notes) == (9, True, "saved", [])
    message = "--partition and --scheme are both given."
    hint = "Give one: a saved partition, or a scheme to make one."
    refused(message, hint, dealt, {"partition": "saved"}, PartitionConfig("iid"))


def test_only_what_the_paper_chose_is_scaled_down() -> None:
    found, _, notes = dealt({}, PartitionConfig())  # 100 clients of 30 rows
    clients = len(found[4].clients)
    assert 0 < clients < 100
    assert notes[2].endswith(f" Scaled down: clients {clients}.")
    for asked in (PartitionConfig("dirichlet"), PartitionConfig(None, 100), PartitionConfig(options={"alpha": 0.1})):
        with pytest.raises(FedcacheError):
            dealt({}, asked)


def test_client_stores_lie_where_they_are_asked_for_or_beside_the_store(tmp_path: Path) -> None:
    heard, place = Heard(), store()
    made = make_partition(place, "iid", clients=2, save=False)
    assert write_shards(place, made, tmp_path / "sites", heard) == tmp_path / "sites"
    assert len(list((tmp_path / "sites").glob("*.zarr"))) == 2
    assert heard.notes == [f"Writing 2 client stores to {tmp_path / 'sites'}."]
    beside = place.path.with_name(f"{place.path.stem}-iid-m2-s0")
    assert write_shards(place, made, None, heard) == beside
    assert write_shards(place, made, None, heard, "mine") == place.path.with_name(f"{place.path.stem}-mine")


def test_the_backbones_of_a_run_are_all_that_some_client_has() -> None:
    assert named_backbones(TrainConfig(backbones=("x",), client_backbones=("a",))) == ("x",)
    assert named_backbones(TrainConfig(client_backbones=("a", "b+a", "c"))) == ("a", "b", "c")
    assert named_backbones(TrainConfig()) == ()


def test_clients_take_turns_with_columns_and_values() -> None:
    place = store()
    keys = sorted(place.arrays)
    method = METHODS["fedproto"]
    config = TrainConfig(client_backbones=("a", "b"), client_set={"dim": "4,5,6"})
    found = client_overrides(METHODS["solo"], config, place, keys, [3, 2], 4)
    assert [found[i].columns for i in range(4)] == [((0, 3),), ((3, 5),), ((0, 3),), ((3, 5),)]
    assert [found[i].hp for i in range(4)] == [{"dim": 4}, {"dim": 5}, {"dim": 6}, {"dim": 4}]
    one = client_overrides(METHODS["solo"], TrainConfig(client_backbones=("a", "b+a")), place, keys, [3, 2], 2)
    assert [one[i].columns for i in range(2)] == [((0, 3),), ((3, 5), (0, 3))]
    message = f"--client-backbones names {keys[1]}, which is not among the run's backbones."
    hint = "Leave --backbones out, or name all of them there."
    refused(message, hint, client_overrides, method, TrainConfig(client_backbones=("a", "b")), place, keys[:1], [3], 2)


def test_a_name_of_other_rows_is_not_given_again_unless_that_is_said() -> None:
    held = store()
    first = make_partition(held, "iid", clients=2, name="pp")
    assert make_partition(held, "iid", clients=2, name="pp").digest == first.digest  # the same again
    refused(
        f"{held.path.name} has a partition 'pp' with other rows, which runs may name.",
        "Another name: --name pp-2;  or in its place: --replace",
        make_partition, held, "iid", clients=3, name="pp",
    )  # fmt: skip
    assert load_partition(held, "pp").digest == first.digest
    other = make_partition(held, "iid", clients=3, name="pp", replace=True)
    assert load_partition(held, "pp").digest == other.digest
    assert load_partition(held, pinned_name("pp", other.digest)).digest == other.digest
    with pytest.raises(FedcacheError, match="was made again with other rows: it has digest") as caught:
        load_partition(held, pinned_name("pp", first.digest))
    assert (caught.value.code, caught.value.hint) == (Exit.STORE, "To train on it as it is now: --partition pp")


@pytest.mark.slow
def test_the_configuration_and_the_report_of_a_run_know_its_partition_by_its_rows(tmp_path: Path) -> None:
    held = store()
    ok("partition", "--store", held.path, "--scheme", "iid", "--clients", 2, "--name", "pp")
    run = ok("train", "--store", held.path, "--method", "fedncm", "--partition", "pp").data
    config = Path(run["path"]) / "config.toml"
    assert ok("train", "--config", config).data["reused"]
    assert ok("train", "--store", held.path, "--method", "fedncm", "--partition", "pp").data["reused"]
    words = ("partition", "--store", held.path, "--scheme", "iid", "--clients", 3, "--name", "pp")
    assert fedcache(*words).code == Exit.USAGE
    ok(*words, "--replace")
    again = fedcache("train", "--config", config, "--json")
    assert again.code == Exit.STORE
    assert "was made again with other rows" in again.envelope["error"]["message"]
    page = tmp_path / "page.html"
    ok("report", run["digest"][:12], "-o", page)
    assert "was made again with other rows" in page.read_text()
    pinned = pinned_name("pp", run["partition"]["digests"][0])
    config.write_text(config.read_text().replace(pinned, "pp"))  # as a former release wrote it
    ok("report", run["digest"][:12], "-o", page)
    assert "was made again since, with other rows" in page.read_text()
