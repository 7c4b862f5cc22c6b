"""From a paper's cell to the one that is run, and every sentence of what departs, worked by hand."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from heard import Heard
from refusal import refused

from fedcache.config import ExtractConfig, Home
from fedcache.errors import CorruptionError, FedcacheError, MachineError, StoppedError, UsageError
from fedcache.extract.backbones import lookup
from fedcache.federate.partition.partition import Columns, make
from fedcache.process import Stop
from fedcache.reproduce import cell_kinds, planning, prepare, registry, runner
from fedcache.reproduce.cell_kinds import MEASURES
from fedcache.reproduce.metrics import Measurement
from fedcache.reproduce.planning import Options, PlannedCell, Requirement, plan, roles
from fedcache.reproduce.prepare import partition_cell, short_batches, with_known_domains
from fedcache.reproduce.registry import Difference, PaperCell, PaperTable, Printed
from fedcache.reproduce.runner import ReproducedCell, Reproduction, _take_out_shared, reproduce

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
        weights=lambda name: Requirement("weights", name, "", "") if name in lacking else None,
    )


def planned(cell, options, *lacking):
    (one,) = plan(table(cell), options, looker(*lacking))
    return one


def test_all_that_a_proxy_changes_is_said_in_order():
    options = Options(
        on="digits", backbones=("glyph-clip",), recipe={"size": "32"}, rounds=5, seeds="1", limit=50
    )
    assert options.proxy
    one = planned(CELL, options)
    kinds = " ".join(said.partition(":")[0] for said in one.departures)
    assert kinds == "data data backbone backbones images images rounds seeds"
    assert one.departures[2] == "backbone: glyph-clip instead of vit-tiny"
    changed = {
        "dataset": "digits",
        "backbones": ("glyph-clip",),
        "recipe": {"size": "32"},
        "rounds": 5,
        "seeds": "1",
    }
    assert one == PlannedCell(CELL, replace(CELL, **changed), one.departures)
    assert planned(CELL, Options(rounds=100, seeds="0-2")) == PlannedCell(CELL, CELL, ())


def test_a_recipe_stays_with_the_backbones_that_stay():
    one = planned(CELL, Options(on="digits", recipe={"vit-tiny:views": "2"}), "vit-small")
    assert one.cell.backbones == ("vit-tiny",)
    assert one.cell.recipe == {"vit-tiny:size": "64", "vit-tiny:views": "2"}
    assert "backbones: none in place of vit-small" in one.departures
    assert "images: vit-tiny:views 2" in one.departures


@pytest.mark.parametrize(
    ("changed", "rounds", "said"),
    [
        ({"method": "fed3r"}, None, []),  # a closed form has no rounds to choose
        ({"rounds": None}, 5, ["rounds: 5 instead of 100"]),  # fedavg's own
        ({"method": "gone", "rounds": None}, 5, ["rounds: 5 instead of the method's own"]),
    ],
)
def test_rounds_are_those_asked_for_where_a_method_has_any(changed, rounds, said):
    one = planned(replace(CELL, **changed), Options(rounds=5))
    assert one.cell.rounds == rounds
    assert [d for d in one.departures if "rounds" in d] == said


def test_roles_are_filled_in_order_or_by_what_is_here():
    entry = table(CELL)
    assert roles(entry, Options(), looker("vit-tiny")) == {
        "vit-tiny": "vit-tiny",
        "vit-small": "vit-small",
    }
    assert roles(entry, Options(on="digits"), looker("vit-tiny")) == {"vit-small": "vit-small"}
    assert roles(entry, Options(on="digits"), looker("vit-tiny", "vit-small")) == {
        "vit-tiny": "glyph-clip"
    }
    assert roles(table(replace(CELL, backbones=())), Options(on="digits"), looker()) == {}
    two = Options(backbones=("glyph-clip", "cnn2"))
    assert roles(entry, two, looker()) == {"vit-tiny": "glyph-clip", "vit-small": "cnn2"}
    refused(
        lambda: roles(entry, Options(backbones=("glyph-clip", "cnn2", "vgg11")), looker()),
        "3 backbones",
    )
    each = plan(
        table(CELL, replace(CELL, labels={"m": "B"}, backbones=("vit-base",))),
        Options(backbones=("cnn2",)),
        looker(),
    )
    assert [p.refused is None for p in each] == [True, False]
    refused(lambda: plan(entry, Options(recipe={"vgg11:size": "32"}), looker()), "'vgg11'")


@pytest.mark.parametrize(
    ("settings", "rows", "proxy", "short"),
    [
        ({"batch": 4, "drop_last": True}, 3, True, True),
        ({"batch": 4, "drop_last": True}, 4, True, False),  # one batch is whole
        ({"batch": 4, "drop_last": True}, 3, False, False),  # what a paper leaves out is left out
    ],
)
def test_short_batches_are_kept_where_a_proxys_smallest_client_has_no_other(
    settings, rows, proxy, short
):
    partition = SimpleNamespace(
        clients=[SimpleNamespace(train=range(9)), SimpleNamespace(train=range(rows))]
    )
    found, said = short_batches(replace(CELL, set=settings), partition, proxy=proxy)
    assert found == ({"batch": 4, "drop_last": False} if short else settings)
    assert len(said) == int(short)


def line(label, *departures, why="", **measured):
    cell = replace(CELL, labels={"m": label})
    got = {k: Measurement(v, 3.0, 2) for k, v in measured.items()}
    return ReproducedCell(PlannedCell(cell, cell, ()), got, list(departures), why)


def test_departures_of_every_row_that_was_run_are_told_once():
    lines = [line("A", "x", "y"), line("B", "y", "z", "x"), line("C", "x", why="missing")]
    assert _take_out_shared(lines) == ["x", "y"]
    assert [ln.departures for ln in lines] == [[], ["z"], ["x"]]
    assert _take_out_shared([line("C", "x", why="missing")]) == []


def test_a_difference_is_of_two_rows_that_have_the_number():
    report = Reproduction(
        table(CELL), False, None, [line("A", client_mean=5.0), line("B", client_mean=2.0)], []
    )
    wanted = Difference(("A",), ("B",), "client_mean", Printed(1.0))
    assert report.difference(wanted) == Measurement(3.0, 18**0.5, 2)
    assert report.difference(replace(wanted, minus=("C",))) == Measurement()
    compared = report.compared(report.lines[0], 0)
    assert (compared.difference, compared.spread) == (-45.0, "got")


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
    entry = formulas(
        monkeypatch, {"A": 2.0, "B": UsageError("B does not fit.", "Try C."), "C": 0.5}
    )
    told = Heard()
    report = reproduce(entry, Home(own_home), observer=told)
    assert [ln.why_not for ln in report.lines] == ["", "B does not fit.", ""]
    assert [ln.measured for ln in report.lines] == [
        {"bound_x": Measurement(2.0, None, 1)},
        {},
        {"bound_x": Measurement(0.5, None, 1)},
    ]
    assert [ln.departures for ln in report.lines] == [["said of A"], [], ["said of C"]]


def test_where_every_row_fails_the_first_error_is_that_of_the_call(own_home, monkeypatch):
    first, second = UsageError("A does not fit.", "Try B."), UsageError("B does not fit.", "Try A.")
    refused(
        lambda: reproduce(formulas(monkeypatch, {"A": first, "B": second}), Home(own_home)),
        "A does not fit",
    )
    damage = CorruptionError("B is damaged.", "Verify it.")
    told = Heard()
    refused(
        lambda: reproduce(
            formulas(monkeypatch, {"A": 1.0, "B": damage, "C": 2.0}), Home(own_home), observer=told
        ),
        "B is damaged",
        code=5,
    )
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


def test_a_cell_is_dealt_by_its_scheme_its_arguments_and_the_seed():
    cell = replace(CELL, args={"clients": 3})
    for seed in (0, 5):
        dealt = partition_cell(cell, COLUMNS, seed, proxy=False)
        assert dealt.partition.digest == make("iid", COLUMNS, seed=seed, clients=3).digest
        assert (dealt.args, dealt.departures) == ({"clients": 3}, ())
    assert partition_cell(cell, COLUMNS, 0, proxy=False).partition.digest != dealt.partition.digest


def test_a_proxy_deals_to_fewer_clients_and_says_how_many_domains_there_are():
    many = replace(CELL, args={"clients": 500})
    refused(lambda: partition_cell(many, COLUMNS, 0, proxy=False), "500 clients")
    dealt = partition_cell(many, COLUMNS, 0, proxy=True)
    assert len(dealt.partition.clients) == dealt.args["clients"] == 18, (
        "of 24 rows 18 are for training"
    )
    assert dealt.departures == ("partition: clients 18 instead of 500",)
    shifted = replace(CELL, scheme="feature-shift", args={"shots": 1, "tests": 1}, dataset="digits")
    said = partition_cell(shifted, COLUMNS, 0, proxy=True).departures
    assert said == ("clients: 2, the domains of digits",)
    one = replace(CELL, args={"clients": 2}, domain=("MNIST_M",))
    clients = partition_cell(one, COLUMNS, 0, proxy=False).partition.clients
    of_the_domain = [row for row in range(12, ROWS) if row % 4 != 3]
    assert sorted(int(r) for c in clients for r in c.train) == of_the_domain


def test_the_domains_of_a_paper_must_be_there_unless_it_is_a_proxy():
    cell = replace(CELL, domain=("mnist-m", "sketch"), dataset="digits")
    refused(
        lambda: with_known_domains(cell, COLUMNS, proxy=False),
        "sketch",
        "fedcache datasets info digits",
    )
    found, said = with_known_domains(cell, COLUMNS, proxy=True)
    assert (found.domain, said) == (("MNIST_M", "ink"), ["domain: ink instead of sketch"])


def dealt_rows(monkeypatch):
    """A workbench on whose rows two clients are dealt: ink with 8 and 0 rows of its classes, MNIST_M with 1 and 9."""
    rows = [
        SimpleNamespace(client="ink", counts=(8, 0), classes=1, train=8),
        SimpleNamespace(client="MNIST_M", counts=(1, 9), classes=2, train=10),
    ]
    partition = SimpleNamespace(describe=lambda _: rows)
    made = SimpleNamespace(partition=partition, departures=("partition: said",))
    monkeypatch.setattr(cell_kinds, "partition_cell", lambda *_, **__: made)
    return SimpleNamespace(columns=lambda _: COLUMNS, options=Options(on="digits"))


def test_the_sizes_of_a_partition_by_hand(monkeypatch):
    workbench = dealt_rows(monkeypatch)
    every = ("clients_of", "classes_of", "per_class", "sizes", "total")
    found, said = cell_kinds.partition(replace(CELL, metrics=every), workbench)
    assert [found[name] for name in every] == [2.0, 1.0, "1 to 9", "8, 10", 18.0]
    assert said == ["partition: said"]
    own = replace(CELL, metrics=every, options={"domain_of": "Ink"}, domain=("sketch",))
    found, said = cell_kinds.partition(own, workbench)
    assert [found[name] for name in every] == [1.0, 1.0, 8.0, "8", 8.0]
    assert said == ["domain: ink instead of sketch", "partition: said"]
    none = replace(CELL, metrics=every, options={"domain_of": "oil"})
    found, _ = cell_kinds.partition(none, workbench)
    assert [found[name] for name in every] == [0.0, None, None, "", 0.0]


def test_features_are_extracted_once_for_cells_that_read_the_same(monkeypatch, own_home):
    asked = []
    held = {"t-1": "vit-tiny", "s-1": "vit-small", "s-2": "vit-small", "p-1": "pixels"}
    keys = {"vit-tiny": "t-1", "vit-small": "s-2", "pixels": "p-1"}

    def extract(config, home, **_):
        asked.append(config)
        arrays = {key: SimpleNamespace(recipe={"backbone": name}) for key, name in held.items()}
        made = [{"key": keys[backbone]} for backbone in config.backbones]
        return SimpleNamespace(store=SimpleNamespace(arrays=arrays), path=Path("s"), arrays=made)

    monkeypatch.setattr(prepare, "extract", extract)
    monkeypatch.setattr(prepare, "columns_of", lambda _: COLUMNS)
    options = Options(limit=7, weights={"w": "f"}, data={"d": "p"}, device="cpu")
    bench = prepare.Workbench(
        Home(own_home), options, Heard(), Stop(), Path("pictures"), Path("runs")
    )
    cell = replace(
        CELL,
        backbones=("vit-tiny", "vit-small", "pixels"),
        recipe={"views": "2", "size": "8"},
        views=3,
    )
    found = bench.features(cell)
    assert (
        bench.features(replace(cell, recipe={"size": "8", "views": "2"}, labels={"m": "B"}))
        is found
    )
    # two arrays are of vit-small, so its own is called by its key; images beside an encoder are found by training
    assert (found.keys, found.names) == (("t-1", "s-2", "p-1"), ("vit-tiny", "s-2"))
    (config,) = asked
    assert config == ExtractConfig(
        dataset="paper:x",
        backbones=cell.backbones,
        views=3,
        limit=7,
        weights={"w": "f"},
        data={"d": "p"},
        device="cpu",
        recipe={"views": "2", "size": "8", **prepare.pixels_recipe(cell, Home(own_home))},
    )


def test_runs_of_all_cells_are_asked_of_a_cluster_once(monkeypatch):
    requests = {
        "a": (["x", "y"], []),
        "b": (["y", "z"], []),
        "c": MachineError("No weights.", "Pull."),
    }
    asked = []

    def requests_of(name, _bench):
        if isinstance(requests[name], Exception):
            raise requests[name]
        return requests[name]

    monkeypatch.setattr(runner, "_requests_of", requests_of)
    bench = SimpleNamespace(home=1, runs=2, observer=3, halt=4, made={"w"})
    engine = SimpleNamespace(run_configurations=lambda *given: asked.append(given) or {"x", "z"})
    cells = ["a", "b", "c"]
    runner._train_on_cluster(cells, bench, engine)
    assert asked == [(["x", "y", "z"], 1, 2, 3, 4)]
    assert bench.made == {"w", "x", "z"}
    runner._train_on_cluster(cells[2:], bench, engine)
    assert len(asked) == 1, "of no cell nothing is asked"
    requests["c"] = StoppedError("Stopped.", "Again.")
    with pytest.raises(StoppedError):
        runner._train_on_cluster(cells, bench, engine)


def test_the_word_proxy_means_the_stand_ins_of_the_roles_that_have_one():
    birds, planes = "resnet18-birds-maxpool", "resnet18-aircraft-maxpool"
    entry = table(replace(CELL, backbones=(birds, "vit-tiny", planes)))
    options = Options(on="digits", backbones=("proxy",))
    expected = {birds: "mobilenetv2-birds", planes: "mobilenetv2-insects"}
    assert roles(entry, options, looker()) == expected
    refused(
        lambda: roles(table(CELL), options, looker()),
        "uses none of the backbones that have stand-ins",
    )
    whole = registry.entry("fedpcl-table5")
    assert roles(whole, options, looker()) == planning.STAND_INS
    assert len({lookup(name).width for name in planning.STAND_INS.values()}) == 1
