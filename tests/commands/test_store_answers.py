"""What the commands on stores and results answer a person, of small stores whose counts are known."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from arrays import ingested
from command import fedcache, ok

import fedcache as fc
from fedcache.commands.stores import table_of_arrays, text_of
from fedcache.errors import Exit
from fedcache.store.store import Store


@pytest.fixture
def small(own_home: Path) -> Store:
    """20 rows of two classes and two domains, with text features: 12 train, 5 test, 3 validation."""
    rows = np.arange(20)
    splits = np.where(rows < 12, "train", np.where(rows < 17, "test", "validation"))
    return fc.Store.from_arrays(
        {"mine": np.ones((20, 3), np.float32), "other": np.ones((20, 2), np.float16)},
        labels=rows % 2, classes=("cat", "dog"), domains=np.where(rows < 10, "ink", "pen"), splits=splits,
        text={"mine": np.ones((2, 3), np.float32)}, name="small",
    )  # fmt: skip


def test_text_features_are_listed_by_name_with_what_is_current_and_what_else_is_stored() -> None:
    one, other, own = {"templates": ["a {}."]}, {"templates": ["one {}.", "two {}."]}, {"templates": []}
    assert text_of(cast("Store", SimpleNamespace(texts={"b": [one, other], "c": [own, own, own], "a": [one]}))) == [
        'text        a: "a {}." (fedcache extract --text chooses)',
        'text        b: "one {}." + "two {}." (fedcache extract --text chooses); 1 more stored',
        "text        c: from the file of embeddings; 2 more stored",
    ]


def test_inspect_counts_rows_and_names_what_a_store_holds(small: Store) -> None:
    lines = fedcache("inspect", small.path).out.splitlines()
    assert lines[:7] == [
        str(small.path),
        f"dataset     small  {small.dataset['digest']}",
        "images      20 readable of 20; 12 train, 5 test, 3 validation",
        "classes     2: cat, dog",
        "domains     ink, pen",
        "text        mine: from the file of embeddings",
        "partitions  none",
    ]
    told = ok("inspect", small.path).data
    assert (told["images"], told["ok"], told["vanished"], told["bad"], told["unfinished"]) == (20, 20, 0, [], [])
    assert told["splits"] == {"train": 12, "test": 5, "validation": 3}
    assert [(a["backbone"], a["shape"], a["dtype"]) for a in told["arrays"]] == [
        ("mine", [20, 1, 3], "float32"), ("other", [20, 1, 2], "float16"),
    ]  # fmt: skip
    assert (told["text"], told["text_templates"], told["partitions"]) == (["mine"], {"mine": []}, [])


def test_a_store_is_named_as_an_argument_or_by_the_option_of_other_commands(small: Store) -> None:
    for name in ("inspect", "verify", "repair"):
        assert fedcache(name, "--store", small.path).out == fedcache(name, small.path).out
        both = fedcache(name, small.path, "--store", small.path)
        assert both.code == Exit.USAGE
        assert "are both given" in both.err


def test_more_than_twelve_classes_are_not_all_named(own_home: Path) -> None:
    def line(classes: int) -> str:
        rows = np.arange(2 * classes)
        store = fc.Store.from_arrays({"a": np.ones((2 * classes, 2))}, labels=rows % classes, name=f"of-{classes}")
        (found,) = [line for line in fedcache("inspect", store.path).out.splitlines() if line.startswith("classes ")]
        return found

    twelve = ", ".join(map(str, range(12)))
    assert line(12) == f"classes     12: {twelve}"
    assert line(13) == f"classes     13: {twelve} ..."


def test_a_table_of_arrays_says_how_each_was_made() -> None:
    recipe = {
        "size": 32,
        "resize": "squash",
        "interpolation": "bicubic",
        "activation": "relu",
        "weights": "0123456789abcdef",
    }
    array: dict[str, Any] = {"name": "a-1", "shape": [9, 1, 4], "dtype": "float16", "recipe": recipe,
                             "how": {"threads": 2, "device": "cpu"}}  # fmt: skip
    table = table_of_arrays([array, {**array, "recipe": {}, "how": {}}])
    assert table.rows == [
        ("a-1", "9x1x4", "float16", "squash 32, bicubic, relu", "0123456789ab", "device cpu, threads 2"),
        ("a-1", "9x1x4", "float16", "as given", "", ""),
    ]


def test_ls_lists_stores_with_their_sizes_and_damaged_ones_with_why(small: Store, own_home: Path) -> None:
    ok("partition", "--store", small.path, "--scheme", "iid", "--clients", 2, "--name", "mine")
    size = sum(f.stat().st_size for f in small.path.rglob("*") if f.is_file())
    (entry,) = ok("ls").data["entries"]
    assert entry == {
        "name": small.path.name, "path": str(small.path), "dataset": "small", "images": 20, "ok": 20,
        "arrays": sorted(small.arrays), "text": ["mine"], "groups": {}, "partitions": ["mine"], "bytes": size,
    }  # fmt: skip
    assert fedcache("ls").out.splitlines() == [
        "store\trows\tarrays\tpartitions\tsize",
        "\t".join([small.path.name, "20 of 20", ", ".join(sorted(small.arrays)), "mine", f"{size / 1e6:,.1f} MB"]),
    ]
    assert ok("ls", "--dataset", "small").data["entries"] == [entry]
    (own_home / "stores" / "broken.zarr").mkdir()
    told = ok("ls")
    broken, kept = told.data["entries"]
    assert kept == entry
    assert broken.keys() == {"name", "path", "problem"}
    assert told.envelope["warnings"] == [f"broken.zarr: {broken['problem']}"]


def test_an_empty_home_is_answered_with_the_command_that_fills_it(own_home: Path) -> None:
    assert fedcache("ls").err.splitlines() == [
        f"No store under {own_home / 'stores'} yet.",
        "fedcache extract --dataset digits --backbones efficientnet-lite0",
    ]
    nothing = f"No result under {own_home / 'runs'} yet."
    assert fedcache("runs", "list").err.splitlines() == [nothing, "fedcache train fed3r"]
    assert (fedcache("ls").out, fedcache("runs", "list").out) == ("", "")
    assert fedcache("compare").out.splitlines() == [nothing, "fedcache grid --method fedavg,fed3r --seeds 0-4"]
    assert fedcache("gc").out.splitlines() == ["Nothing to delete among leftovers, given-up."]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--privacy", "--runs"), "ls --privacy takes no --runs and no --dataset."),
        (("--privacy", "--dataset", "x"), "ls --privacy takes no --runs and no --dataset."),
    ],
)
def test_lists_that_exclude_each_other_are_refused(words: tuple[str, ...], message: str) -> None:
    done = fedcache("ls", *words, "--json")
    assert (done.code, done.envelope["error"]["message"]) == (Exit.USAGE, message)


def test_results_are_listed_with_their_settings(tmp_path: Path) -> None:
    ingested(tmp_path)
    ok("partition", "--scheme", "iid", "--clients", 3, "--name", "thirds")
    first = ok("train", "--method", "fed3r", "--scheme", "iid", "--clients", 2, "--seeds", "0-2").data
    second = ok("train", "--method", "fed3r", "--partition", "thirds").data
    listed = ok("runs", "list")
    old = ok("ls", "--runs")
    assert (old.data, old.err) == (listed.data, "ls --runs is called  fedcache runs list  now.\n")
    entries = {e["path"]: e for e in listed.data["entries"]}
    assert entries.keys() == {first["path"], second["path"]}
    entry = entries[first["path"]]
    assert first["digest"].startswith(entry.pop("name"))
    assert entry == {
        "path": first["path"], "method": "fed3r", "dataset": "mine", "backbones": ["mine"], "partition": "iid",
        "rounds": 1, "seeds": [0, 1, 2], "accuracy": first["accuracy"]["mean"], "claimed": False,
        "model_bytes": first["model_bytes"], "state": "finished", "tags": [], "differs": "", "hold_out": [],
    }  # fmt: skip
    files = list(Path(first["path"], "models").glob("*.safetensors"))
    assert first["model_bytes"] == sum(file.stat().st_size for file in files)
    assert len(files) == 3
    assert entries[second["path"]]["partition"] == "thirds"
    head, *lines = (line.split("\t") for line in fedcache("runs", "list").out.splitlines())
    shown = {row[0]: dict(zip(head, row, strict=True)) for row in lines}[Path(first["path"]).name]
    assert (shown["partition"], shown["rounds"], shown["seeds"]) == ("iid", "1", "3")
    assert shown["accuracy %"] == f"{100 * first['accuracy']['mean']:.2f}"
    assert shown["model MB"] == f"{first['model_bytes'] / 1e6:.2f}"
    Path(second["path"], "result.json").write_text(json.dumps({"method": "fed3r"}))
    left = ok("ls", "--runs")
    assert len(left.data["entries"]) == 1
    (lost,) = left.data["left_out"]
    assert lost["path"] == second["path"]
    assert len(left.envelope["warnings"]) == 1
    assert lost["hint"] in left.envelope["warnings"][0]


def test_gc_says_how_much_goes_and_the_command_that_deletes_it(own_home: Path) -> None:
    (own_home / "stores").mkdir(parents=True)
    left = own_home / "stores" / f".x.zarr.{2**22 + 1}-a.partial"
    left.write_bytes(bytes(2_345_678))
    told = fedcache("gc").err
    assert "1 thing, 2.3 MB. Delete them:  fedcache gc --delete" in told
    kinds = fedcache("gc", "--kind", "leftovers").err
    assert "1 thing, 2.3 MB. Delete them:  fedcache gc --kind leftovers --delete" in kinds
    assert ok("gc").data == {
        "garbage": [{"path": str(left), "kind": "leftovers", "why": "a killed process was writing it",
                     "bytes": 2_345_678}],
        "bytes": 2_345_678, "deleted": False,
    }  # fmt: skip
    assert "Deleted 1 thing, 2.3 MB." in fedcache("gc", "--delete").out
    assert not left.exists()


def test_what_is_exported_is_counted(small: Store, tmp_path: Path) -> None:
    out, (mine, _) = tmp_path / "x.npz", sorted(small.arrays)
    done = fedcache("export", out, "--store", small.path, "--backbones", "mine")
    assert done.out == f"20 rows of {mine}: {out}\n"
    assert ok("export", out, "--store", small.path, "--backbones", "mine").data == {
        "path": str(out), "rows": 20, "arrays": [mine],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("file", "lines", "following"),
    [
        ({"labels": [0, 1] * 5, "split": ["train"] * 6 + ["test"] * 3 + ["validation"]},
         ["10 rows (6 train, 3 test, 1 validation), 2 classes: {key}"],
         "fedcache train --method fedavg --scheme iid --clients 3 --dataset mine"),
        ({"labels": [0, 1] * 30, "split": ["train"] * 50 + ["test"] * 10},
         ["60 rows (50 train, 10 test), 2 classes: {key}"],
         "fedcache train --method fedavg --scheme iid --clients 5 --dataset mine"),
        ({"labels": [0.0, np.nan] * 5, "split": ["train"] * 3 + ["test"] * 7},
         ["10 rows (3 train, 7 test), 1 classes: {key}"],
         "fedcache train --method fedavg --scheme dirichlet --clients 1 --dataset mine"),
        ({"split": ["train"] * 6 + ["test"] * 4, "text/mine": np.ones((2, 3)), "classes": ["cat", "dog"]},
         ["10 rows (6 train, 4 test), 2 classes: {key}"],
         "fedcache train --method clip-zs --scheme iid --clients 3 --dataset mine"),
        ({"labels": list(range(10))},
         ["10 rows (10 train), 10 classes: {key}",
          "No test rows, so nothing can be trained and scored: add rows of classes that have only one."],
         "fedcache ingest FILE --name mine --replace"),
    ],
)  # fmt: skip
def test_ingest_says_what_it_found_and_what_comes_next(
    tmp_path: Path, file: dict[str, Any], lines: list[str], following: str
) -> None:
    rows = len(file.get("labels", file.get("split", ())))
    np.savez(tmp_path / "e.npz", **{"features/mine": np.ones((rows, 3), np.float32), **file})
    done = ok("ingest", tmp_path / "e.npz", "--name", "mine").data
    assert done["notes"] == [line.format(key=done["arrays"][0]) for line in lines]
    assert done["next"] == following
    again = fedcache("ingest", tmp_path / "e.npz", "--name", "mine")
    assert again.out.splitlines() == [*done["notes"], done["path"], following]
    assert "mine is there already, with the same content: nothing to do." in again.err


@pytest.mark.parametrize(
    ("site", "labels", "dealt"),
    [
        (["a", "b"] * 20, [0, 1] * 20, "--by site"),
        (["a", "b"] * 20, [0.0, 0.0, 1.0, np.nan] * 10, "--by site --option unlabelled=drop"),
        ([str(i) for i in range(40)], [0, 1] * 20, "--scheme iid --clients 5"),  # a value for each row is no client
        (["a"] * 40, [0, 1] * 20, "--scheme iid --clients 5"),
    ],
)
def test_after_a_table_with_sites_the_next_command_trains_on_these(
    tmp_path: Path, site: list[str], labels: list[float], dealt: str
) -> None:
    x = np.random.default_rng(0).normal(size=(40, 3)).astype("f4")
    np.savez(tmp_path / "e.npz", **{"features/mine": x, "labels": labels, "site": site})
    following = ok("ingest", tmp_path / "e.npz", "--name", "mine").data["next"]
    assert following == f"fedcache train --method fedavg {dealt} --dataset mine"
    ok(*following.split()[1:], "--rounds", 1)


@pytest.mark.parametrize(("bad", "more"), [(6, 0), (20, 0), (23, 3)])
def test_inspect_lists_the_rows_that_were_left_out_and_counts_those_it_does_not(
    own_home: Path, tmp_path: Path, bad: int, more: int
) -> None:
    rows = np.ones((60, 2), np.float32)
    rows[:bad, 1] = np.nan
    np.savez(tmp_path / "gaps.npz", features=rows, labels=np.arange(60) % 2)
    ok("ingest", tmp_path / "gaps.npz", "--name", "gaps", "--drop-nan")
    lines = [line.strip() for line in fedcache("inspect", "gaps").out.splitlines()]
    assert [line.split()[1] for line in lines if line.startswith("row ")] == [str(n) for n in range(bad - more)]
    assert [line for line in lines if line.startswith("and ")] == (
        [f"and {more} more, which quarantine.jsonl and --json list"] if more else []
    )
    assert len(ok("inspect", "gaps").data["bad"]) == bad
