"""A name of a site belongs to a key from run to run: another key that claims it is refused, and nobody else."""

import pytest
from command import data_of, fedcache, ok
from draws import examples
from failing_command import must_fail
from fake_grid import planned, together
from hypothesis import given
from hypothesis import strategies as st
from refusal import corruption, refused, training_error
from small_sites import Heard, left_out, sharded

from fedcache.config import Home
from fedcache.federate.engines.flower.site_names import SiteNames, names_of

OWNER = 100
IMPOSTOR = 900
"""Nodes that serve the same shard."""


def run(grid, place, names, heard=None, **words):
    (made,) = together(planned("fed3r", rounds=1, **words), grid, place, heard, names)
    return made


def table(place):
    place.mkdir(exist_ok=True)
    return SiteNames(place / "names.json")


@pytest.fixture
def names(grid, tmp_path):
    """The names that a server knows after a run of all sites."""
    names = table(tmp_path / "server")
    run(grid, tmp_path / "first", names)
    return names


def copied(grid):
    """The shard of the owner is served by another node, and the owner is not there."""
    grid.sites[IMPOSTOR] = grid.sites.pop(OWNER)


def test_another_key_does_not_get_a_name_in_a_later_run(names, grid, tmp_path):
    heard = Heard()
    name = next(n for n, key in names.known().items() if key == f"key of {OWNER}")
    assert len(names.known()) == 3
    copied(grid)
    made = run(grid, tmp_path / "later", names, heard, start_with=2)
    assert left_out(made) == [name]
    assert name not in made.result["federation"]["sites"]
    assert any(f"fedcache flower names --forget {name}" in line for line in heard.lines)
    assert names.known()[name] == f"key of {OWNER}"
    names.forget([name])
    assert left_out(run(grid, tmp_path / "new-key", names)) == []
    assert names.known()[name] == f"key of {IMPOSTOR}"


def test_a_site_without_an_answer_is_named_by_its_key(names, grid, tmp_path):
    heard = Heard()
    name = next(n for n, key in names.known().items() if key == f"key of {OWNER}")
    grid.meddle[OWNER] = lambda _kind, _number, _packed: "it did not answer within 1 s"
    made = run(grid, tmp_path / "later", names, heard)
    assert set(left_out(made)) == {name}
    first, *_, last = heard.warnings
    assert name in first
    assert "restart" in first
    assert name in last


def test_an_absent_site_is_named_by_the_earlier_runs(names, grid, tmp_path):
    name = next(n for n, key in names.known().items() if key == f"key of {OWNER}")
    del grid.sites[OWNER]
    training_error(lambda: run(grid, tmp_path / "later", names), name)


@pytest.mark.parametrize("late", [False, True])
def test_who_has_a_name_gets_it_whoever_comes_first(late, names, grid, tmp_path):
    heard = Heard()
    grid.sites = {IMPOSTOR: grid.sites[OWNER], **grid.sites}
    grid.hidden = {OWNER: 1} if late else {}
    made = run(grid, tmp_path / "later", names, heard, wait=5.0)
    assert len(made.result["federation"]["sites"]) == 3
    assert not any(IMPOSTOR in nodes for kind, nodes in grid.log if kind != "facts")
    assert any("belongs to another key" in line for line in heard.lines)


def test_a_site_that_is_started_again_has_its_name_by_its_key(names, grid, tmp_path):
    copied(grid)
    grid.keys[IMPOSTOR] = f"key of {OWNER}"
    assert left_out(run(grid, tmp_path / "later", names)) == []


def test_without_keys_names_are_bound_for_one_run_and_that_is_said(grid, tmp_path):
    heard = Heard()
    run(grid, tmp_path / "first", None, heard)
    assert any(
        "Without keys, a site name belongs to the first node" in line for line in heard.lines
    )
    copied(grid)
    assert left_out(run(grid, tmp_path / "later", None)) == []


@pytest.mark.parametrize(
    "damage", [lambda raw: raw.replace(b"key of 100", b"key of 900"), lambda raw: raw[:-9]]
)
def test_a_damaged_table_is_refused(damage, names, grid, tmp_path):
    assert names.path is not None
    names.path.write_bytes(damage(names.path.read_bytes()))
    corruption(
        lambda: run(grid, tmp_path / "later", names),
        "This file records which key owns each site name",
    )


@examples(25, 300)
@given(
    st.lists(
        st.tuples(
            st.booleans(),
            st.dictionaries(st.sampled_from("abcd"), st.sampled_from("xyz"), max_size=3),
        ),
        max_size=8,
    )
)
def test_a_table_keeps_the_first_key_of_each_name(tmp_path_factory, steps):
    names = table(tmp_path_factory.mktemp("server"))
    expected = dict[str, str]()
    for binds, keys in steps:
        if binds:
            names.bind(keys)
            expected = keys | expected
        elif set(keys) <= set(expected):
            names.forget(keys)
            expected = {name: key for name, key in expected.items() if name not in keys}
        else:
            refused(lambda keys=keys: names.forget(keys), "Unknown site")
        assert names.known() == expected


def test_names_are_listed_and_forgotten_at_the_command_line():
    assert data_of("flower names")["names"] == {}
    names = names_of(8000, Home.from_environment())
    assert names.path is not None
    names.path.parent.mkdir(parents=True)
    names.bind({"north": "ab" * 32, "south": "cd" * 32})
    assert data_of("flower names")["names"] == names.known()
    must_fail("'north'", "flower names --forget nort")
    ok("flower names --forget north")
    assert list(names.known()) == ["south"]
    assert data_of("flower names --port 8001")["names"] == {}
    assert "port 8001" in fedcache("flower names --port 8001").err
    assert "to listen" not in fedcache("flower names --help-all").out


def shards(place):
    return sharded(place, 3, rows=90)
