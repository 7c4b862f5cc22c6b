"""From a paper's cell to the one that is run, and every sentence of what departs, worked by hand."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from heard import Heard
from refusal import corruption, refused, stopped

from fedcache.config import Home
from fedcache.errors import CorruptionError, FedcacheError, MachineError, StoppedError, UsageError
from fedcache.extract.backbones import lookup
from fedcache.federate.partition.partition import Columns, make
from fedcache.process import Stop
from fedcache.reproduce import planning, runner
from fedcache.reproduce.planning import (
    Options,
    PaperCell,
    PaperTable,
    PlannedCell,
    Printed,
    Requirement,
    plan,
    roles,
)
from fedcache.reproduce.runner import (
    MEASURES,
    partition_cell,
    reproduce,
    short_batches,
    with_known_domains,
)

CELL = PaperCell(
    {"m": "A"},
    method="fedavg",
    dataset="paper:x",
    backbones=("vit-tiny", "vit-small"),
    recipe={"size": "64"},
    scheme="iid",
    rounds=100,
    seeds="0-2",
    metrics=("client_mean",),
    printed=(Printed(50.0),),
)


def table(*cells, **changed):
    made = PaperTable(
        "t", "A title", "A paper", "runs", "", ("m",), ("client_mean",), 3, (), (), cells, ()
    )
    return replace(made, **changed)


def looker(*lacking):
    """A home without the weights of some backbones."""
    return SimpleNamespace(
        home=SimpleNamespace(root=None),
        missing_weights=lambda name: (
            Requirement("weights", name, "", "") if name in lacking else None
        ),
    )


def planned(cell, options, *lacking):
    (one,) = plan(table(cell), options, looker(*lacking))
    return one


def test_all_that_a_proxy_changes_is_said_in_order():
    changed = {"backbones": ("glyph-clip",), "recipe": {"size": "32"}, "rounds": 5, "seeds": "1"}
    options = Options(on="digits", limit=50, **changed)
    assert options.proxy
    one = planned(CELL, options)
    kinds = " ".join(said.split()[0] for said in one.departures)
    assert kinds == "data data backbone no images images rounds seeds"
    assert one.cell == replace(CELL, dataset="digits", **changed)
    assert planned(CELL, Options(rounds=100, seeds="0-2")) == PlannedCell(CELL, CELL, ())
    # A recipe stays with the backbones that stay.
    one = planned(CELL, Options(on="digits", recipe={"vit-tiny:views": "2"}), "vit-small")
    assert one.cell.backbones == ("vit-tiny",)
    assert one.cell.recipe == {"vit-tiny:size": "64", "vit-tiny:views": "2"}
    assert "no backbone instead of `vit-small`" in one.departures
    # A closed form has no rounds to choose, and a method has rounds of its own.
    assert planned(replace(CELL, method="fed3r"), Options(rounds=5)).cell.rounds is None
    own = planned(replace(CELL, rounds=None), Options(rounds=5))
    assert own.cell.rounds == 5
    assert "rounds 5 instead of 100" in own.departures
    assert planned(replace(CELL, rounds=None), Options(rounds=100)).departures == ()


def test_roles_are_filled_in_order_or_by_what_is_here():
    entry = table(CELL)
    digits = Options(on="digits")
    two = Options(backbones=("glyph-clip", "cnn2"))
    small = {"vit-small": "vit-small"}
    for options, lacking, filled in (
        (Options(), ("vit-tiny",), {"vit-tiny": "vit-tiny", **small}),
        (digits, ("vit-tiny",), small),
        (digits, CELL.backbones, {"vit-tiny": "glyph-clip"}),
        (two, (), {"vit-tiny": "glyph-clip", "vit-small": "cnn2"}),
    ):
        assert roles(entry, options, looker(*lacking)) == filled
    assert roles(table(replace(CELL, backbones=())), digits, looker()) == {}
    three = replace(two, backbones=(*two.backbones, "vgg11"))
    refused(lambda: roles(entry, three, looker()), "3 backbones")
    other = replace(CELL, labels={"m": "B"}, backbones=("vit-base",))
    each = plan(table(CELL, other), Options(backbones=("cnn2",)), looker())
    assert [p.refused is None for p in each] == [True, False]
    refused(lambda: plan(entry, Options(recipe={"vgg11:size": "32"}), looker()), "'vgg11'")


def test_values_of_several_labels_are_known_if_the_table_has_them():
    cells = [replace(CELL, labels={"m": m, "d": d}) for m, d in ("Ax", "Ay", "Bz")]
    entry = table(*cells, labels=("m", "d"))

    def found(**only):
        return [cell.at for cell in planning.chosen(entry, only)]

    assert found(m=("A",), d=("x", "z")) == [("A", "x")]
    refused(lambda: found(m=("A",), d=("z",)), "No row of t", "fedcache reproduce info t")
    refused(lambda: found(m=("A",), d=("w",)), "Unknown d of t 'w'", "Known: x, y, z")


@pytest.mark.parametrize(
    ("rows", "proxy", "short"),
    [
        (3, True, True),
        (4, True, False),  # one batch is whole
        (3, False, False),  # what a paper leaves out is left out
    ],
)
def test_short_batches_are_kept_where_a_proxys_smallest_client_has_no_other(rows, proxy, short):
    settings = {"batch": 4, "drop_last": True}
    clients = [SimpleNamespace(train=range(count)) for count in (9, rows)]
    partition = SimpleNamespace(clients=clients)
    found, said = short_batches(replace(CELL, set=settings), partition, proxy=proxy)
    assert found == {**settings, "drop_last": not short}
    assert len(said) == short + proxy  # a substitute says its steps


def formulas(monkeypatch, values):
    """A table of numbers that are not run: of each row its value, or the error that it ends with."""

    def measured(cell, _bench):
        value = values[cell.at[0]]
        if isinstance(value, FedcacheError):
            raise value
        return {"bound_x": value}, [f"said of {cell.at[0]}"]

    monkeypatch.setitem(MEASURES, "formula", measured)
    cells = [
        PaperCell(
            {"m": label}, metrics=("bound_x",), printed=(Printed(1.0),), options={"at": label}
        )
        for label in values
    ]
    return table(*cells, kind="formula", metrics=("bound_x",))


def test_rows_that_fail_are_told_and_the_others_are_measured(own_home, monkeypatch):
    wrong = UsageError("B does not fit.", "Try C.")
    entry = formulas(monkeypatch, {"A": 2.0, "B": wrong, "C": 0.5})
    report = reproduce(entry, Home(own_home), observer=Heard())
    assert [ln.why_not for ln in report.lines] == ["", "B does not fit.", ""]
    measured = [ln.measured for ln in report.lines]
    assert measured[1] == {}
    assert measured[0]["bound_x"].mean == 2.0
    assert measured[2]["bound_x"].mean == 0.5
    assert [ln.departures for ln in report.lines] == [["said of A"], [], ["said of C"]]
    entry = formulas(monkeypatch, {"A": UsageError("A does not fit.", "Try B."), "B": wrong})
    refused(lambda: reproduce(entry, Home(own_home)), "A does not fit")
    damage = CorruptionError("B is damaged.", "Verify it.")
    told = Heard()
    entry = formulas(monkeypatch, {"A": 1.0, "B": damage, "C": 2.0})
    corruption(lambda: reproduce(entry, Home(own_home), observer=told), "B is damaged")
    assert len(told.notes) == 1, "damage ends all"


ROWS = 24
COLUMNS = Columns(
    np.arange(ROWS) % 3,
    np.arange(ROWS) // 12,
    (np.arange(ROWS) % 4 == 3).astype(np.uint8),
    np.ones(ROWS, np.uint8),
    np.arange(ROWS * 16, dtype=np.uint8).reshape(ROWS, 16),
    ("x", "y", "z"),
    ("ink", "MNIST_M"),
    "d" * 64,
)


def test_a_proxy_deals_to_fewer_clients_and_says_how_many_domains_there_are():
    def dealt(clients, seed=0, proxy=False, **changed):
        cell = replace(CELL, args={"clients": clients}, **changed)
        return partition_cell(cell, COLUMNS, seed, proxy=proxy)

    for seed in (0, 5):
        assert dealt(3, seed).partition.digest == make("iid", COLUMNS, seed=seed, clients=3).digest
    refused(lambda: dealt(500), "500 clients")
    fewer = dealt(500, proxy=True)
    # of 24 rows 18 are for training
    assert len(fewer.partition.clients) == fewer.args["clients"] == 18
    assert fewer.departures == ("clients 18 instead of 500 in the partition",)
    shifted = replace(CELL, scheme="feature-shift", args={"shots": 1, "tests": 1}, dataset="digits")
    said = partition_cell(shifted, COLUMNS, 0, proxy=True).departures
    assert said == ("2 clients, the domains of `digits`",)
    of_the_domain = [row for row in range(12, ROWS) if row % 4 != 3]
    clients = dealt(2, domain=("MNIST_M",)).partition.clients
    assert sorted(int(r) for c in clients for r in c.train) == of_the_domain


def test_the_domains_of_a_paper_must_be_there_unless_it_is_a_proxy():
    cell = replace(CELL, domain=("mnist-m", "sketch"), dataset="digits")
    refused(
        lambda: with_known_domains(cell, COLUMNS, proxy=False),
        "sketch",
        "fedcache datasets info digits",
    )
    found, said = with_known_domains(cell, COLUMNS, proxy=True)
    assert found.domain == ("MNIST_M", "ink")
    assert said == ["domain `ink` instead of `sketch`"]


@pytest.mark.parametrize(
    ("changed", "measured", "said"),
    [
        ({}, [2.0, 1.0, "1 to 9", "8, 10", 18.0], []),
        (
            {"options": {"domain_of": "Ink"}, "domain": ("sketch",)},
            [1.0, 1.0, 8.0, "8", 8.0],
            ["domain `ink` instead of `sketch`"],
        ),
        ({"options": {"domain_of": "oil"}}, [0.0, None, None, "", 0.0], []),
    ],
)
def test_the_sizes_of_a_partition_by_hand(monkeypatch, changed, measured, said):
    """Of two clients: ink with 8 and 0 rows of its classes, MNIST_M with 1 and 9."""
    rows = [
        SimpleNamespace(client="ink", counts=(8, 0), classes=1, train=8),
        SimpleNamespace(client="MNIST_M", counts=(1, 9), classes=2, train=10),
    ]
    partition = SimpleNamespace(describe=lambda _: rows)
    made = SimpleNamespace(partition=partition, departures=("partition: said",))
    monkeypatch.setattr(runner, "partition_cell", lambda *_, **__: made)
    bench = SimpleNamespace(columns=lambda _: COLUMNS, options=Options(on="digits"))
    every = ("clients_of", "classes_of", "per_class", "sizes", "total")
    found, departures = runner.partition(replace(CELL, metrics=every, **changed), bench)
    assert [found[name] for name in every] == measured
    assert departures == [*said, "partition: said"]


def test_features_are_extracted_once_for_cells_that_read_the_same(monkeypatch, own_home):
    asked = []
    keys = {"vit-tiny": "t-1", "vit-small": "s-2", "pixels": "p-1"}
    held = {"s-1": "vit-small", **{key: name for name, key in keys.items()}}

    def extract(config, home, **_):
        asked.append(config)
        arrays = {key: SimpleNamespace(recipe={"backbone": name}) for key, name in held.items()}
        made = [{"key": keys[backbone]} for backbone in config.backbones]
        return SimpleNamespace(store=SimpleNamespace(arrays=arrays), path=Path("s"), arrays=made)

    monkeypatch.setattr(runner, "extract", extract)
    monkeypatch.setattr(runner, "columns_of", lambda _: COLUMNS)
    given = {"limit": 7, "weights": {"w": "f"}, "data": {"d": "p"}, "device": "cpu"}
    bench = runner.Workbench(
        Home(own_home), Options(**given), Heard(), Stop(), Path("pictures"), Path("runs")
    )
    read = {"backbones": tuple(keys), "views": 3}
    cell = replace(CELL, recipe={"views": "2", "size": "8"}, **read)
    found = bench.features(cell)
    same = replace(cell, recipe={"size": "8", "views": "2"}, labels={"m": "B"})
    assert bench.features(same) is found
    # two arrays are of vit-small, so its own is called by its key; images beside an encoder are found by training
    assert found.keys == ("t-1", "s-2", "p-1")
    assert found.names == ("vit-tiny", "s-2")
    (config,) = asked
    assert config.recipe.items() >= cell.recipe.items()
    assert {name: getattr(config, name) for name in given} == given


def test_runs_of_all_cells_are_asked_of_a_cluster_once(monkeypatch):
    requests = {"a": ["x", "y"], "b": ["y", "z"], "c": MachineError("No weights.", "Pull.")}
    asked = []

    def requests_of(name, _bench):
        if isinstance(requests[name], Exception):
            raise requests[name]
        return requests[name], []

    def run_configurations(*given):
        asked.append(given)
        return {"x", "z"}

    monkeypatch.setattr(runner, "_requests_of", requests_of)
    bench = SimpleNamespace(home=1, runs=2, observer=3, halt=4, made={"w"})
    engine = SimpleNamespace(run_configurations=run_configurations)
    runner._train_on_cluster(requests, bench, engine)
    runner._train_on_cluster("c", bench, engine)  # of no cell nothing is asked
    assert asked == [(["x", "y", "z"], 1, 2, 3, 4)]
    assert bench.made == {"w", "x", "z"}
    requests["c"] = StoppedError("Stopped.", "Again.")
    stopped(lambda: runner._train_on_cluster(requests, bench, engine))


def test_the_word_proxy_means_the_stand_ins_of_the_roles_that_have_one():
    birds = "resnet18-birds-maxpool"
    planes = "resnet18-aircraft-maxpool"
    entry = table(replace(CELL, backbones=(birds, "vit-tiny", planes)))
    options = Options(on="digits", backbones=("proxy",))
    expected = {birds: "mobilenetv2-birds", planes: "mobilenetv2-insects"}
    assert roles(entry, options, looker()) == expected
    refused(
        lambda: roles(table(CELL), options, looker()),
        "uses none of these backbones",
    )
    assert roles(planning.entry("fedpcl-table5"), options, looker()) == planning.STAND_INS
    assert len({lookup(name).width for name in planning.STAND_INS.values()}) == 1
