"""From a paper's cell to the one that is run, and every sentence of what departs, worked by hand."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from fedcache.errors import FedcacheError
from fedcache.reproduce.metrics import Measurement
from fedcache.reproduce.planning import Options, PlannedCell, Requirement, match_domains, plan, roles
from fedcache.reproduce.prepare import short_batches
from fedcache.reproduce.registry import Difference, PaperCell, PaperTable, Printed
from fedcache.reproduce.runner import (
    ReproducedCell,
    Reproduction,
    _feat_post,
    _nothing_can_run,
    _participation,
    _same,
    _take_out_shared,
)

CELL = PaperCell(
    {"m": "A"}, method="fedavg", dataset="paper:x", backbones=("vit-tiny", "vit-small"), recipe={"size": "64"},
    scheme="iid", rounds=100, seeds="0-2", metrics=("client_mean",), printed=(Printed(50.0),),
)  # fmt: skip


def table(*cells: PaperCell, **changed: Any) -> PaperTable:
    made = PaperTable("t", "A title", "A paper", "runs", "", ("m",), ("client_mean",), 3, (), (), cells, ())
    return replace(made, **changed)


def looker(*lacking: str) -> Any:
    """A home without the weights of some backbones."""
    return SimpleNamespace(
        home=SimpleNamespace(root=None),
        weights=lambda name: Requirement("weights", name, "", "") if name in lacking else None,
    )


def planned(cell: PaperCell, options: Options, *lacking: str) -> PlannedCell:
    (one,) = plan(table(cell), options, looker(*lacking))
    return one


def test_all_that_a_proxy_changes_is_said_in_order() -> None:
    options = Options(on="digits", backbones=("glyph-clip",), recipe={"size": "32"}, rounds=5, seeds="1", limit=50)
    one = planned(CELL, options)
    assert one.paper is CELL
    assert one.departures == (
        "data: digits instead of paper:x",
        "data: 50 evenly spaced images",
        "backbone: glyph-clip instead of vit-tiny",
        "backbones: none in place of vit-small",
        "images: as glyph-clip takes them, not size 64",
        "images: size 32",
        "rounds: 5 instead of 100",
        "seeds: 1 instead of 0-2",
    )
    assert one.cell == replace(
        CELL, dataset="digits", backbones=("glyph-clip",), recipe={"size": "32"}, rounds=5, seeds="1"
    )
    assert one.refused is None
    assert planned(CELL, Options()) == PlannedCell(CELL, CELL, ())
    assert planned(CELL, Options(rounds=100, seeds="0-2")) == PlannedCell(CELL, CELL, ())


def test_a_recipe_stays_with_the_backbones_that_stay() -> None:
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
        ({"method": "gone"}, 5, ["rounds: 5 instead of 100"]),
        ({"method": "", "rounds": None}, None, []),
    ],
)
def test_rounds_are_those_asked_for_where_a_method_has_any(
    changed: dict[str, Any], rounds: int | None, said: list[str]
) -> None:
    one = planned(replace(CELL, **changed), Options(rounds=5))
    assert one.cell.rounds == rounds
    assert [d for d in one.departures if "rounds" in d] == said


def test_roles_are_filled_in_order_or_by_what_is_here() -> None:
    entry = table(CELL)
    assert roles(entry, Options(), looker("vit-tiny")) == {"vit-tiny": "vit-tiny", "vit-small": "vit-small"}
    assert roles(entry, Options(on="digits"), looker("vit-tiny")) == {"vit-small": "vit-small"}
    assert roles(entry, Options(on="digits"), looker("vit-tiny", "vit-small")) == {"vit-tiny": "glyph-clip"}
    assert roles(table(replace(CELL, backbones=())), Options(on="digits"), looker()) == {}
    two = Options(backbones=("glyph-clip", "cnn2"))
    assert roles(entry, two, looker()) == {"vit-tiny": "glyph-clip", "vit-small": "cnn2"}
    with pytest.raises(FedcacheError, match="3 backbones for 2 roles"):
        roles(entry, Options(backbones=("glyph-clip", "cnn2", "vgg11")), looker())
    with pytest.raises(FedcacheError, match="t uses no backbone that could be replaced"):
        roles(table(replace(CELL, backbones=())), two, looker())
    refused = plan(table(CELL, replace(CELL, labels={"m": "B"}, backbones=("vit-base",))), Options(backbones=("cnn2",)),
                   looker())  # fmt: skip
    assert [p.refused for p in refused] == [None, "no backbone is named in place of its own"]
    with pytest.raises(FedcacheError, match="--recipe vgg11:size names 'vgg11', which takes no role in t"):
        plan(entry, Options(recipe={"vgg11:size": "32"}), looker())


@pytest.mark.parametrize(
    ("options", "proxy"),
    [
        (Options(), False),
        (Options(rounds=1, seeds="1", only={"m": ("A",)}, device="cpu"), False),
        (Options(on="digits"), True),
        (Options(backbones=("cnn2",)), True),
        (Options(recipe={"size": "8"}), True),
        (Options(limit=0), True),
    ],
)
def test_other_images_or_backbones_make_a_proxy(options: Options, proxy: bool) -> None:
    assert options.proxy is proxy


def test_domains_are_told_by_letters_and_digits() -> None:
    found = match_domains(("MNIST-M", "sketch", "mnist m"), ("svhn", "mnistm"))
    assert found == (("mnistm", "svhn"), ["domain: svhn instead of sketch"])


@pytest.mark.parametrize(
    ("settings", "rows", "proxy", "short"),
    [
        ({"batch": 4, "drop_last": True}, 3, True, True),
        ({"batch": 4, "drop_last": True}, 4, True, False),  # one batch is whole
        ({"batch": 4, "drop_last": True}, 3, False, False),  # what a paper leaves out is left out
        ({"batch": 4, "drop_last": False}, 3, True, False),
    ],
)
def test_short_batches_are_kept_where_a_proxys_smallest_client_has_no_other(
    settings: dict[str, Any], rows: int, proxy: bool, short: bool
) -> None:
    partition: Any = SimpleNamespace(clients=[SimpleNamespace(train=range(9)), SimpleNamespace(train=range(rows))])
    found, said = short_batches(replace(CELL, set=settings), partition, proxy=proxy)
    assert found == ({"batch": 4, "drop_last": False} if short else settings)
    why = "short batches: trained on, as the smallest client has 3 rows and a batch 4"
    assert said == ([why] if short else [])


@pytest.mark.parametrize(
    ("asked", "clients", "proxy", "found"),
    [
        ("20", 10, True, ("all", ["participation: all 10 clients instead of 20"])),
        ("20", 20, True, ("20", [])),
        ("20", 10, False, ("20", [])),
        ("10%", 5, True, ("10%", [])),
        (None, 5, True, (None, [])),
    ],
)
def test_no_more_take_part_than_a_proxy_has(asked: str | None, clients: int, proxy: bool, found: object) -> None:
    assert _participation(replace(CELL, participation=asked), clients, proxy) == found


@pytest.mark.parametrize(
    ("preset", "backbones", "done", "said"),
    [
        ("official", ("resnet18-birds",), "l2", ["features: l2 instead of sign"]),
        ("official", ("resnet18-birds",), "sign", []),
        ("official", ("resnet18-birds",), None, []),
        ("official", ("resnet18-birds", "vit-tiny"), "l2", []),
        ("paper", ("resnet18-birds",), "l2", []),
    ],
)
def test_signs_are_missed_of_the_released_codes_networks_alone(
    preset: str, backbones: tuple[str, ...], done: str | None, said: list[str]
) -> None:
    cell = replace(CELL, preset=preset, backbones=backbones)
    assert _feat_post(cell, {"hyperparameters": {"feat_post": done}}) == said


def line(label: str, *departures: str, why: str = "", **measured: float) -> ReproducedCell:
    cell = replace(CELL, labels={"m": label})
    got = {k: Measurement(v, 3.0, 2) for k, v in measured.items()}
    return ReproducedCell(PlannedCell(cell, cell, ()), got, list(departures), why)


def test_departures_of_every_row_that_was_run_are_told_once() -> None:
    lines = [line("A", "x", "y"), line("B", "y", "z", "x"), line("C", "x", why="missing")]
    assert _take_out_shared(lines) == ["x", "y"]
    assert [ln.departures for ln in lines] == [[], ["z"], ["x"]]
    assert _take_out_shared([line("C", "x", why="missing")]) == []


def test_a_difference_is_of_two_rows_that_have_the_number() -> None:
    report = Reproduction(table(CELL), False, None, [line("A", client_mean=5.0), line("B", client_mean=2.0)], [])
    wanted = Difference(("A",), ("B",), "client_mean", Printed(1.0))
    assert report.difference(wanted) == Measurement(3.0, 18**0.5, 2)
    assert report.difference(replace(wanted, minus=("C",))) == Measurement()
    assert report.difference(replace(wanted, of=("C",))) == Measurement()
    assert report.difference(replace(wanted, metric="worst10")) == Measurement()
    compared = report.compared(report.lines[0], 0)
    assert (compared.difference, compared.spread) == (-45.0, "got")


def test_cells_are_the_same_measurement_whatever_they_are_called_and_print() -> None:
    assert _same(CELL, replace(CELL, labels={"m": "Z"}, printed=(None,)))
    assert not _same(CELL, replace(CELL, seeds="0"))


def test_where_nothing_can_run_each_thing_is_named_once_with_its_command() -> None:
    weights = Requirement("weights", "w", "not here", "fedcache backbones import FILE --as w Ready now: x, y")
    method = Requirement("method", "m", "none", "fedcache methods list")
    error = _nothing_can_run(table(CELL), [[weights], [weights, method]], [])
    assert error.message == "No row of t can be run here. Missing: weights w; method m."
    assert error.hint.splitlines() == [
        "fedcache backbones import FILE --as w",
        "fedcache methods list",
        "The same protocol on what is at hand:  fedcache reproduce t --on digits --backbones glyph-clip",
    ]
    without = _nothing_can_run(table(replace(CELL, backbones=())), [[weights]], [])
    assert without.hint.endswith("fedcache reproduce t --on digits")
    assert _nothing_can_run(table(CELL), [[method]], []).hint == "fedcache methods list"
    refused = _nothing_can_run(table(CELL), [[]], [PlannedCell(CELL, CELL, (), "no backbone")])
    assert refused.message.endswith("Missing: no backbone.")
    assert refused.hint == "fedcache reproduce info t"
