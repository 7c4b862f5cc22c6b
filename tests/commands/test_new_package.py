"""``fedcache new``: what it writes works as it stands, from its tests to a grid, and what it cannot write it says."""

import pytest
from arrays import small_store
from command import data_of, fedcache, ok
from failing_command import must_fail
from homes import made_once
from own_package import python

from fedcache import Store, testing
from fedcache.errors import Exit
from fedcache.testing import LawBroken

store = made_once(small_store)


@pytest.mark.slow
def test_a_method_of_a_new_package_trains_grids_and_reports_by_its_name(tmp_path, installed, store):
    installed("method", "half-step")
    deal = f"--store {store} --scheme iid --clients 4 --rounds 3"
    done = data_of(f"train --method half-step {deal}")
    assert done["plugins"][0]["name"] == "half-step"
    grid = data_of(f"grid --method half-step --sweep server_lr=0.25,1 {deal}")
    assert [point["sweep"]["server_lr"] for point in grid["points"]] == ["0.25", "1"]
    whole = data_of(f"train --method half-step --set server_lr=1 {deal}")
    assert whole["accuracy"]["mean"] == data_of(f"train --method fedavg {deal}")["accuracy"]["mean"]
    ok(f"report {done['path']} -o {tmp_path}/page.html")
    assert "half-step" in (tmp_path / "page.html").read_text()
    assert "half-step\tplug-in: half-step 0.1" in fedcache("methods list").out
    # The method is a copy of FedAvg with another server: the text about FedAvg does not describe it.
    assert data_of("methods info half-step")["when"] == ""
    assert data_of("methods info fedavg")["when"]


@pytest.mark.slow
def test_the_laws_hold_for_a_new_method_and_fail_when_it_ignores_the_rows(installed, site, forget):
    tests = installed("method", "half-step") / "tests/test_half_step.py"
    done = python("-m", "pytest", "-q", "-p", "no:cacheprovider", tests, path=site)
    assert done.returncode == 0, done.stdout
    laws = len(testing.method_laws("half-step"))
    assert f"{laws + 2} passed" in done.stdout

    code = site / "half_step/method.py"
    whole = code.read_text()
    # Every client has one vote; its number of rows does not count.
    code.write_text(
        whole.replace(
            "    aggregate=aggregate,",
            '    aggregate=aggregate,\n    pool=lambda _hp: {"": "uniform"},',
        )
    )
    assert code.read_text() != whole
    forget()
    fails(["all_rows_count_the_same[sequential]"])
    # An upload that nobody described.
    code.write_text(whole + MORE)
    forget()
    fails([check.name for check in testing.method_laws("fedavg")])


MORE = """

def more(down, state, data, ctx):
    kept, up = fedavg.METHOD.fit(down, state, data, ctx)
    return kept, {**up, "extra": up["Q.b"]}


METHOD = replace(METHOD, fit=more)
"""


def fails(laws):
    broken = []
    for check in testing.method_laws("half-step"):
        try:
            check()
        except LawBroken:
            broken.append(check.name)
    assert broken == laws


@pytest.mark.slow
def test_a_backbone_of_a_new_package_extracts_and_trains_by_its_name(own_home, installed):
    installed("backbone", "own-lines")
    assert len(testing.check_backbone("own-lines", home=own_home)) == len(testing.BACKBONE_LAWS)
    assert "own-lines" in fedcache("backbones list").err
    words = "--dataset digits --backbones own-lines --limit 400"
    done = data_of(f"extract {words}")
    array = next(iter(Store.open(done["path"]).arrays.values()))
    assert array.recipe["backbone"] == "module:own_lines.encoder:build"
    assert data_of(f"extract {words}")["decoded"] == 0
    words = "train --backbones own-lines --method fed3r --clients 3 --scheme iid --store"
    assert data_of(words, done["path"])["accuracy"]["mean"] > 0.3
    assert data_of("backbones verify own-lines")["width"] == 512


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (("method", "Half_Step"), "fedcache new method half-step"),
        (("method", "a" * 61), f"fedcache new method {'a' * 60}"),
        (("method", "fedavg"), "fedcache new method my-fedavg"),
        (("backbone", "clip-rn50"), "fedcache new backbone my-clip-rn50"),
        (("method", "json"), "fedcache new method my-json"),
    ],
)
def test_a_name_that_cannot_be_one_is_refused(here, words, hint):
    must_fail(hint, "new", *words)
    assert not list(here.iterdir())


def test_a_folder_that_exists_is_left_alone_and_one_that_cannot_be_written_named(tmp_path):
    (tmp_path / "mine").mkdir()
    assert fedcache(f"new method mine --out {tmp_path}/mine").code == Exit.STORE
    (tmp_path / "file").write_text("")
    assert fedcache(f"new method mine --out {tmp_path}/file/mine").code == Exit.ENVIRONMENT
    assert not list((tmp_path / "mine").iterdir())


@pytest.mark.slow
def test_pip_installs_it_where_fedcache_finds_it(tmp_path):
    folder = tmp_path / "half-step"
    target = tmp_path / "target"
    ok("new method half-step --out", folder)
    pip = [
        "-m",
        "pip",
        "install",
        "-q",
        "--no-deps",
        "--no-index",
        "--no-build-isolation",
        "--target",
    ]
    installed = python(*pip, target, folder, path=target)
    assert installed.returncode == 0, installed.stderr
    done = python("-m", "fedcache", "methods", "info", "half-step", path=target)
    assert done.returncode == 0, done.stderr
    assert "half-step 0.1" in done.stdout
