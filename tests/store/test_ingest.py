"""Your own embeddings, as a user brings them: a test set, a name, the next command, and stores by name."""

import shlex
import shutil

import numpy as np
import pytest
from arrays import around
from command import data_of, fedcache, ok, words_of
from failing_command import must_fail, must_fail_corrupt, must_fail_store
from federation import small
from files_now import times_of
from made_path import place_of
from toy_store import create

from fedcache import Store
from fedcache.federate.methods import METHODS
from fedcache.store.samples import HELD_OUT

ROWS = 60
FEATURES, LABELS = around(3, 20, 3, width=4)
SPLIT = (np.arange(ROWS) % 6 == 0).astype(np.int64)
TEXT = np.eye(4, dtype=np.float32)[:3]
IID = "--scheme iid --clients 3"


def npz(path, **columns):
    with path.open("wb") as file:
        np.savez(file, allow_pickle=False, **columns)
    return path


@pytest.fixture
def labelled(tmp_path):
    return npz(tmp_path / "labelled.npz", X=FEATURES, labels=LABELS)


def run_line(line, *more):
    """A command as it was printed."""
    program, *words = shlex.split(line)
    assert program == "fedcache"
    return ok(*words, *more)


def test_without_a_split_a_fifth_of_each_class_is_held_out_and_the_printed_command_trains(tmp_path):
    words = np.array([b"cat", b"dog", b"eel"])
    file = npz(tmp_path / "E.NPZ", embeddings=FEATURES.astype(np.float64), labels=words[LABELS])
    said = fedcache(f"ingest {file} --name mine")
    assert said.out.count(HELD_OUT) == 1
    assert run_line(said.out.splitlines()[-1], "--rounds", 2).data["dataset"]["slug"] == "mine"
    store = Store.open(place_of("inspect --dataset mine"))
    s = store.samples
    assert store.dataset["held_out"] == HELD_OUT
    assert s.classes == ("cat", "dog", "eel")
    assert np.bincount(s.label[s.split == 1]).tolist() == [4, 4, 4]


def test_a_method_that_reads_labels_says_how_to_add_them(tmp_path):
    file = npz(tmp_path / "e.npz", X=FEATURES)
    place = ("--store", tmp_path / "own place.zarr")
    made = data_of(f"ingest {file} --name bare", *place)
    some = np.where(np.arange(ROWS) % 2, LABELS, -1)
    with_labels = npz(tmp_path / "with.npz", X=FEATURES, labels=some)
    for words in ((), words_of(IID)):
        must_fail(made["next"], "train --method fedavg", *words, *place)
    labelled = made["next"].replace("FILE", str(with_labels))
    following = run_line(labelled, "--no-label", -1).data["next"]
    assert run_line(following, "--rounds", 2).data["accuracy"]["mean"] is not None
    must_fail("--scheme dirichlet", f"train --method fedavg {IID}", *place)


@pytest.mark.slow
def test_methods_without_labels_train_on_text_features_and_invent_no_score(tmp_path):
    free = [name for name, method in METHODS.items() if not method.needs & {"labels", "pixels"}]
    assert free
    labels = np.where(SPLIT == 1, LABELS, -1)
    tested = npz(tmp_path / "t.npz", X=FEATURES, text=2 * TEXT, y=labels, split=SPLIT)
    ok(f"ingest {tested} --name tested")
    unknown = npz(tmp_path / "u.npz", **{"features/clip": FEATURES, "text/clip": TEXT})
    following = data_of(f"ingest {unknown} --name unknown")["next"]
    assert run_line(following).data["accuracy"]["mean"] is None
    for name in free:
        sizes = [word for k, v in small(name).items() for word in ("--set", f"{k}={v}")]
        line = f"train --method {name} {IID} --rounds 2 --participation all"
        scored = data_of(line, *sizes, "--dataset", "tested")["accuracy"]["mean"]
        # A probe needs labelled training rows.
        assert (scored is not None and scored > 0.5) == ("text" in METHODS[name].needs)
        blind = data_of(line, *sizes, "--dataset", "unknown")["accuracy"]
        assert blind["mean"] is None
        assert blind["client_mean"] is None
        assert blind["per_domain"] == {}
    ok("ingest", npz(tmp_path / "n.npz", X=FEATURES, y=LABELS), "--name", "no-text")
    must_fail_store("text/NAME", "train --method clip-zs --dataset no-text")


def test_the_same_file_again_is_there_already_and_another_is_refused(labelled, tmp_path):
    first = place_of(f"ingest {labelled} --name mine")

    before = times_of(first)
    for file in (labelled, shutil.copy(labelled, tmp_path / "copy.npz")):
        assert data_of(f"ingest {file} --name mine")["path"] == str(first)
    other = npz(tmp_path / "other.npz", X=FEATURES[:30], y=LABELS[:30])
    error = must_fail("partitions:  ", f"ingest {other} --name mine")
    assert times_of(first) == before
    assert run_line(error["hint"].split("partitions:  ")[1]).data["images"] == 30
    assert [e["images"] for e in data_of("ls")["entries"]] == [30]
    assert not first.exists()


def test_a_store_of_one_s_own_is_replaced_in_place_and_one_of_images_never(labelled, tmp_path):
    place = tmp_path / "mine.zarr"
    ok(f"ingest {labelled} --name mine --store {place}")
    other = npz(tmp_path / "other.npz", X=FEATURES[:30], y=LABELS[:30])
    must_fail("--store", f"ingest {other} --name mine --store {place}")
    assert data_of(f"ingest {other} --name mine --store {place} --replace")["images"] == 30
    assert data_of(f"verify {place}")["ok"]
    assert not list(tmp_path.glob(".*"))
    images = create(tmp_path / "images.zarr").path
    must_fail_store("", f"ingest {other} --name mine --store {images} --replace")
    assert Store.open(images).dataset["slug"] == "toy"


def test_a_store_that_lost_its_manifest_is_damage_and_other_places_are_not(labelled, tmp_path):
    made = place_of(f"ingest {labelled} --name mine")
    (made / "manifest.json").unlink()
    for command in ("inspect", "verify", "repair"):
        must_fail_corrupt(f"mv {made} {made}.damaged", f"{command} {made}")
    for line in (f"train --method fedavg --store {made}", f"ingest {labelled} --name mine"):
        must_fail_corrupt("", line)
    assert "manifest.json" in data_of("ls")["entries"][0]["problem"]
    shutil.rmtree(made / "samples")
    # The zarr.json of the store still says what it was.
    for place, code in ((made, 5), (tmp_path, 4), (labelled, 4)):
        must_fail("", f"inspect {place}", code=code)


def test_names_that_ls_prints_are_stores_and_datasets_of_every_command(labelled, here):
    made = place_of(f"ingest {labelled} --name mine")
    # the one last used
    ok("ingest", npz(here / "o.npz", X=-FEATURES, y=LABELS), "--name", "other")
    for on in (f"--store {made.stem}", "--dataset ingested:mine"):
        assert data_of(f"export out.npz {on}")["rows"] == ROWS
        parts = data_of(f"partition {IID} {on}")
        assert parts["store"] == str(made)
        run = f"--method fed3r --partition {parts['name']} {on}"
        assert data_of(f"train {run}")["dataset"]["slug"] == "mine"
    assert data_of(f"grid {run} --sweep rounds=1")["points"][0]["dataset"]["slug"] == "mine"
    assert len(data_of(f"shard --partition {parts['name']} --out sites {on}")["stores"]) == 3
    for words in (made.name, made.stem, "--dataset mine"):
        for command in ("inspect", "verify", "repair"):
            assert data_of(f"{command} {words}")["path"] == str(made)


def test_an_interrupted_ingest_goes_on(labelled):
    chunk = next(place_of(f"ingest {labelled} --name mine").glob("features/*/c/0/0/0"))
    chunk.write_bytes(chunk.read_bytes()[:-1])
    ok("repair mine")
    assert data_of("inspect mine")["arrays"] == []
    assert "there already" not in fedcache(f"ingest {labelled} --name mine --json").err
    assert data_of("verify mine")["ok"]
    assert len(data_of("inspect mine")["arrays"]) == 1
