"""Tables of the page from runs written by hand: every cell, what it is sorted by, and which is the best."""

from dataclasses import replace
from pathlib import Path

from refusal import refused
from results import result_of

from fedcache.report.drawing import Plot
from fedcache.report.find_runs import (
    StoredRun,
    differing,
    gather,
    label_of,
    labels,
    setting_name,
    setting_names,
)
from fedcache.report.page import Shown, overview_of, section_of, table_of
from fedcache.report.render import _csv


def run(method, mean=0.5, *, name="", **changed):
    traffic = {"exact": {"up_bytes": 6, "down_bytes": 6, "per_client_round": {"up": 1}}}
    made = result_of(method, [mean, mean], traffic=traffic, clients=["c0"])
    return StoredRun(Path(name or f"{method:0<12}"), made | changed, {})


def test_bold_is_what_validation_chose_and_never_the_highest_of_the_test():
    entries = [
        run("b", 0.7, validation={"mean": 0.6, "per_client": []}),
        run("a", 0.75, validation={"mean": 0.5, "per_client": []}),
    ]
    columns, rows = table_of(entries, ["method"], "own", entries[0])
    names = [c.name for c in columns]
    assert names[:4] == ["method", "accuracy %", "95 % interval", "validation %"]
    assert [[(row[i].text, row[i].best) for i in (1, 3)] for row in rows] == [
        [("70.00", True), ("60.00", True)],
        [("75.00", False), ("50.00", False)],
    ]


def section(entries):
    return section_of(12, "t", entries, "no store is here", Shown("none", None, None))


def test_a_section_is_sorted_by_accuracy_and_says_what_it_is_of():
    made = section([run("low", 0.25), run("none", None), run("high")])
    assert made.points == [("high", 0.5), ("low", 0.25), ("none", None)]
    assert [row[0].text for row in made.rows] == ["high", "low", "none"]
    held = [
        run("low", 0.25, validation={"mean": 0.9, "per_client": []}),
        run("high", validation={"mean": 0.6, "per_client": []}),
    ]
    assert [row[0].text for row in section(held).rows] == ["low", "high"]


def test_the_data_of_a_figure_are_lines_of_six_digits():
    made = Plot("i", "", "", ("a", "=b"), [["x", 1.23456789], ["=1+1", None], ["y,z", 3]], "")
    assert _csv(made) == "a,'=b\nx,1.23457\n'=1+1,\n\"y,z\",3\n"


def test_labels_are_the_shortest_that_tell_runs_apart():
    def tried(method, name, **hyperparameters):
        return run(method, name=name, hyperparameters=hyperparameters)

    entries = [
        tried("a", "0" * 12, lr=0.1, mu=1),
        tried("a", "1" * 12, lr=0.2, mu=1),
        tried("a", "2" * 12, lr=0.2, mu=1),
        tried("b", "3" * 12, lr=0.5, flag=True),
    ]
    assert differing(entries) == ["method", "set.lr"], (
        "mu is the same wherever it is, and b has one flag"
    )
    assert labels(entries) == ["a lr=0.1", "a lr=0.2 (11111111)", "a lr=0.2 (22222222)", "b"]
    assert label_of(entries[3], ["set.flag", "backbones"]) == "b flag=true b"
    assert label_of(entries[3], ["method", "set.none"]) == "b"
    # A choice says more than a rate.
    heads = [
        tried("a", "0" * 12, lr=0.1, head="linear"),
        tried("a", "1" * 12, lr=0.2, head="mlp"),
    ]
    assert labels(heads) == ["a head=linear", "a head=mlp"]


def test_equal_names_are_distinguished_by_what_differs(tmp_path):
    def saved(rows, seed, digest):
        part = {**run("a").result["partition"], "name": "mine", "seed": seed, "digests": [digest]}
        return [run("a", partition=part, dataset={"slug": "d", "digest": digest, "ok": rows})]

    names = setting_names([saved(9, 0, "p"), saved(9, 1, "q"), saved(8, 1, "r")])
    assert names == [
        "d, mine (rows=9, seed=0)",
        "d, mine (rows=9, seed=1)",
        "d, mine (rows=8, seed=1)",
    ]
    runs = []
    for device in ("cpu", "cuda"):
        folder = tmp_path / device
        folder.mkdir()
        (folder / "config.toml").write_text(f'[train]\nmethod = "a"\ndevice = "{device}"\n')
        runs.append(run("a", name=folder))
    assert labels(runs) == ["a (device=cpu)", "a (device=cuda)"]


def test_no_column_of_accuracies_repeats_an_earlier_one():
    one = run("a", 0.7, fairness={"worst10": 0.7})
    columns, _ = table_of([one, run("b", 0.5)], ["method"], "own", one)
    names = [c.name for c in columns]
    assert "worst 10 %" not in names, "all clients have the same accuracy"
    assert "pooled %" not in names
    assert "macro F1 %" in names, "another quantity, even with equal values"


def test_several_settings_are_one_table_with_the_best_run_of_each():
    def setting(number, *entries):
        return replace(section(list(entries)), ident=f"s{number}", title=f"t{number}")

    held = {"mean": 0.9, "per_client": []}
    sections = [
        setting(0, run("a", 0.7), run("b", 0.6)),
        setting(1, run("a", 0.5, validation=held), run("b", 0.8, validation={**held, "mean": 0.1})),
        setting(2, run("b", 0.8)),
    ]
    made = overview_of(sections)
    assert made.title == "Best in 3 settings (sure in 0): a in 2, b in 1"
    assert [(row[0].text, row[1].text, row[2].text) for row in made.rows] == [
        ("t0", "a", "70.00"),
        ("t1", "a", "50.00"),  # by validation, though b is higher on the test rows
        ("t2", "b", "80.00"),
    ]
    bold = [
        [c.name for c, cell in zip(made.columns, row, strict=True) if cell.best]
        for row in made.rows
    ]
    assert bold == [["best run", "a %"], ["best run", "a %"], ["best run", "b %"]]
    assert overview_of(sections[:1]) is None


def test_settings_that_are_called_alike_are_distinguished_by_their_digests():
    def dealt(digest, *more, name="mine", scheme="iid"):
        part = {
            "scheme": scheme,
            "name": name,
            "args": {"clients": 3},
            "seed": 0,
            "digests": [digest, *more],
        }
        return run("a", partition=part)

    assert setting_name(dealt("p", name="")) == "digits, iid-m3-s0"
    assert (
        setting_name(dealt("p", "q", name="", scheme="gone"))
        == "digits, gone, redrawn for every seed"
    )
    groups = [[dealt("p" * 20)], [dealt("q" * 20)], [dealt("r" * 20, name="other")]]
    one, two = (f"digits, mine (dataset dddddddd, partition {letter * 8})" for letter in "pq")
    assert setting_names(groups) == [one, two, "digits, other"]
    assert dealt("p", "p").setting == (
        "d" * 64,
        "p",
        False,
    )  # measured here, and not claimed by sites
    assert dealt("p", "q").setting == dealt("q", "r", "p").setting, (
        "each seed has its own, by the same scheme"
    )
    assert dealt("p", "q").setting != dealt("p", "q", scheme="shards").setting


def test_a_run_is_named_by_its_folder_its_first_letters_or_its_own_files(tmp_path):
    for name in ("abc1", "abd2"):
        (tmp_path / name).mkdir()
        (tmp_path / f"{name}/config.toml").touch()
    (tmp_path / "abc1/notes.txt").touch()

    def found(*asked):
        return [left.path.name for left in gather(list(asked), tmp_path).left_out]

    assert (
        found("abc") == found(tmp_path / "abc1") == found(tmp_path / "abc1/config.toml") == ["abc1"]
    )
    assert sorted(found(tmp_path)) == sorted(found()) == ["abc1", "abd2"]
    assert found("abc", "abc1") == ["abc1"], "once, however often it is named"
    for wrong in ("x", "ab", tmp_path / "abc1/notes.txt", tmp_path / "abc1/result.json"):
        refused(lambda wrong=wrong: gather([wrong], tmp_path))
