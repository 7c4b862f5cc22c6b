"""What the columns of a file of embeddings mean: groups, labels, splits and names as tables really have them."""

import datetime

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from arrays import normals
from command import data_of, fedcache
from files_now import times_of
from hypothesis import given
from hypothesis import strategies as st
from made_path import place_of
from refusal import refused
from test_store_exchange import Bomb

from fedcache import Store
from fedcache.tables.embeddings import open_embeddings
from fedcache.tables.groups import Group
from fedcache.tables.roles import ColumnChoice
from fedcache.tables.words import Words

N = 12
X = normals(0, N, 3)


def of_npz(tmp_path, choice=None, **columns):
    """Columns through a file of npz; objects are written as the pickle that numpy makes of them."""
    np.savez(tmp_path / "e.npz", allow_pickle=True, **{"features": X, **columns})
    return open_embeddings(tmp_path / "e.npz", choice)


# Groups


def test_every_other_column_of_the_rows_is_a_group_and_the_rest_is_named(tmp_path):
    day = datetime.date(2024, 2, 1)
    kept = {
        "ward": (["north", None, " north "], ["north", None, "north"]),
        "smoker": ([True, None, False], ["True", None, "False"]),
        "visits": ([1.0, float("nan"), 10.0], ["1", None, "10"]),
        "seen": ([day, None, day + datetime.timedelta(days=1)], ["2024-02-01", None, "2024-02-02"]),
        "taken": ([datetime.datetime(2024, 2, 1, 7, 30)] * 3, ["2024-02-01T07:30:00"] * 3),
        # Beyond 2^53 a float would make one patient of two.
        "patient": ([2**60, None, 2**60 + 1], [str(2**60), None, str(2**60 + 1)]),
    }
    not_used = {
        "age": [61.5] * N,
        "thumbnail": [b"\xff\xd8\x00"] * N,
        "boxes": [[1, 2]] * N,
        "note": ["x" * 5000] * N,
        "nothing": pa.nulls(N),
        "class": ["a"] * N,
    }
    columns = {name: values * 4 for name, (values, _) in kept.items()}
    hospital = [*range(6, 12), *range(6, 12)]
    table = pa.table(
        {"features": X.tolist(), "label": [0, 1] * 6, "hospital": hospital, **columns, **not_used}
    )
    pq.write_table(table, tmp_path / "t.parquet", row_group_size=5)
    found = open_embeddings(tmp_path / "t.parquet")
    # Numbers are in the order of numbers: 6, 7, .. 11; not 10, 11, 6.
    assert found.groups["hospital"].words == tuple(map(str, range(6, 12)))
    for name, (_, words) in kept.items():
        assert found.groups[name].values() == words * 4
    assert found.groups.keys() == {"hospital", *kept}
    assert found.unused.keys() == not_used.keys()


@given(
    st.lists(
        st.sampled_from(["a", "b", " a", "", "10", "9", "nan", "é"]) | st.none(),
        min_size=1,
        max_size=9,
    )
)
def test_a_group_says_of_each_row_what_its_word_was(words):
    group = Group.of(words)
    assert group.values() == [w.strip() if w else None for w in words]
    known = [w for w in group.words if w]
    assert known == sorted(known, key=int if all(w in ("10", "9") for w in known) else str)
    assert group.equals(Group.of_words(Words.of(words)))


def test_groups_of_arrays_are_in_the_store_and_its_frame(tmp_path):
    groups = {"hospital": ["b", "a", None] * 4, "name": np.arange(N)}
    store = Store.from_arrays({"a": X}, groups=groups, path=tmp_path / "s.zarr")
    assert store.groups == ["hospital", "name"]
    frame = store.frame()
    assert frame["hospital"].fillna("none").tolist() == ["b", "a", "none"] * 4
    assert frame["group/name"].tolist() == list(map(str, range(N)))
    for wrong in ({"age": X[:, 0]}, {"ward": [1, 2]}, {"split": [1] * N}, [1, 2]):
        refused(
            lambda wrong=wrong: Store.from_arrays({"a": X}, groups=wrong, path=tmp_path / "t.zarr")
        )


def test_the_same_rows_with_other_groups_keep_their_features(tmp_path):
    def ingest(**columns):
        groups = {name: np.arange(N) % count for name, count in columns.items()}
        np.savez(tmp_path / "e.npz", features=X, labels=np.arange(N) % 2, **groups)
        return fedcache(f"ingest {tmp_path}/e.npz --name mine").err

    ingest(ward=2, site=6)
    path = place_of("inspect mine")

    before = times_of(path / "features")
    assert "new groups day" in ingest(ward=3, day=6)
    assert times_of(path / "features") == before
    assert data_of("inspect mine")["groups"] == {"day": 6, "site": 6, "ward": 3}
    assert data_of("verify mine")["ok"]
    assert "Nothing to do" in ingest(ward=3, day=6)


def test_rows_without_a_domain_are_in_the_domain_all(tmp_path):
    for domain, names in ((["a", ""], ("a", "all")), ([1, np.nan], ("1", "all"))):
        found = of_npz(tmp_path, domain=np.array(domain * 6))
        assert found.domain_names == names
        assert found.domains[:2].tolist() == [0, 1]


def test_columns_are_named_by_the_user_where_their_names_say_nothing(tmp_path):
    odd = {
        "clip_vit": X + 1,
        "other": X,
        "diagnosis": np.arange(N) % 3,
        "fold": ["train", "test"] * 6,
        "scan": [f"s{i:02}" for i in range(N)],
        "site": ["x", "y"] * 6,
    }
    file = tmp_path / "odd.npz"
    np.savez(file, **odd)
    keys = "--features-key clip_vit --label-key diagnosis --split-key fold --name-key scan"
    made = data_of(f"ingest {file} --name odd {keys} --domain-key site")
    store = Store.open(made["path"])
    s = store.samples
    assert s.label.tolist() == [0, 1, 2] * 4
    assert s.split.tolist() == [0, 1] * 6
    assert s.domains == ("x", "y")
    assert s.name[3] == "s03"
    assert made["not_used"].keys() == {"other"}
    (info,) = store.arrays.values()
    assert info.recipe["backbone"] == "clip_vit"
    assert np.array_equal(store.reader(*store.arrays).all()[:, 0], X + 1)
    both = ("clip_vit", "other")
    assert tuple(open_embeddings(file, ColumnChoice(features=both)).features) == both
    refused(lambda: open_embeddings(file), "clip_vit")
    wrong = ColumnChoice(features=both[:1], label="diagnose")
    refused(lambda: open_embeddings(file, wrong), "'diagnosis'")


@pytest.mark.parametrize("features", ["Feature", "embedding", "emb", "vector", "X"])
def test_usual_names_are_found_without_being_told(tmp_path, features):
    labels = np.arange(N) % 4
    np.savez(tmp_path / "u.npz", **{features: X, "target": labels, "ward": labels})
    found = open_embeddings(tmp_path / "u.npz")
    assert list(found.features) == ["u"]
    assert list(found.groups) == ["ward"]
    assert found.labels.tolist() == labels.tolist()


def test_rows_are_named_by_what_is_different_in_each(tmp_path):
    files = np.array([f"{i}.png" for i in range(N)])
    found = of_npz(tmp_path, id=np.arange(N) % 4, filename=files)
    assert found.names == tuple(files)
    assert list(found.groups) == ["id"]
    # Filled up with zeros, numbers are in the order of the rows, and the file can be read block by block.
    assert of_npz(tmp_path, sample_id=np.arange(N)).names == tuple(f"{i:02}" for i in range(N))
    assert of_npz(tmp_path, id=X[:, 0]).names[0] == "00"


def test_columns_that_sort_nothing_are_not_read_and_a_pickle_is_never_run(tmp_path):
    trap = np.array([Bomb()] * N, object)
    not_used = {
        "images": np.zeros((N, 4, 4), np.uint8),
        "mask": np.zeros((N, 4)),
        "few": np.arange(3),
        "version": np.array(2),
        "odd": trap,
        "nested": np.array([["a", "b"], *[None] * (N - 1)], object),
    }
    when = np.array(["2024-01-01T10:00:00.5"] * N, "M8[ms]")
    found = of_npz(tmp_path, site=np.arange(N) % 4, when=when, **not_used)
    assert list(found.groups) == ["site", "when"]
    assert found.groups["when"].values()[0] == "2024-01-01T10:00:00.500000"
    assert found.unused.keys() == not_used.keys()
    assert "builtins.exec" in found.unused["odd"]
    refused(lambda: of_npz(tmp_path, label=trap), "label")
