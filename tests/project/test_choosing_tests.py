"""Which tests a change runs: the methods of the laws, `make quick`, and the suites of `.ci/run`."""

import subprocess

import methods_tried
import pytest
from loaded_files import ROOT, content, tool

from fedcache.federate.methods import NAMES

QUICK = tool("quick")
SUITES = tool("suites")


@pytest.fixture
def changed(monkeypatch):
    """``changed(*paths)``: git says that these differ from main; methods that are tried because of them."""

    def set_changed(*paths):
        monkeypatch.setenv("FEDCACHE_CHANGED", " ".join(paths))
        methods_tried.changed_methods.cache_clear()
        return methods_tried.changed_methods()

    yield set_changed
    methods_tried.changed_methods.cache_clear()


def test_a_method_is_tried_where_its_file_or_code_that_it_shares_has_changed(changed, monkeypatch):
    monkeypatch.setattr(methods_tried, "FULL", False)
    assert changed() == set()
    assert set(methods_tried.tried(NAMES)) == methods_tried.REPRESENTATIVES
    assert changed("fedcache/federate/methods/fedlc.py", "README.md") == {"fedlc"}
    assert methods_tried.tried([("fedlc", {}), ("fedper", {}), ("fedavg", {})]) == [
        ("fedlc", {}),
        ("fedavg", {}),
    ]
    of_prompts = changed("fedcache/federate/methods/common/prompts.py")
    assert {"promptfl", "tpfl"} <= of_prompts
    assert "fedavg" not in of_prompts
    assert changed("fedcache/federate/methods/fedavg.py") == {
        "fedavg",
        "fedrep",
    }  # which imports it


def test_every_method_is_tried_at_night_and_where_git_cannot_say_what_changed(
    monkeypatch, tmp_path
):
    monkeypatch.setattr(methods_tried, "FULL", True)
    assert methods_tried.tried(NAMES) == [*NAMES]
    monkeypatch.delenv("FEDCACHE_CHANGED", raising=False)
    monkeypatch.setattr(methods_tried, "ROOT", tmp_path)  # a copy without git
    assert methods_tried.changed_files() is None


def test_what_differs_from_main_is_counted_from_where_the_branch_left_it(monkeypatch, tmp_path):
    def git(*words):
        told = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
        return subprocess.run(
            ["git", *told, *words], cwd=tmp_path, check=True, capture_output=True, text=True
        ).stdout

    git("init", "-q", "-b", "main")
    for number in range(methods_tried.COMMITS + 2):
        (tmp_path / f"{number}.txt").write_text("")
        git("add", "-A")
        git("commit", "-q", "-m", str(number))
    monkeypatch.delenv("FEDCACHE_CHANGED", raising=False)
    monkeypatch.setattr(methods_tried, "ROOT", tmp_path)
    assert methods_tried.changed_files() == {
        f"{n}.txt" for n in range(2, methods_tried.COMMITS + 2)
    }
    git("update-ref", "refs/remotes/origin/main", "HEAD~1")
    (tmp_path / "new.txt").write_text("")
    assert methods_tried.changed_files() == {f"{methods_tried.COMMITS + 1}.txt", "new.txt"}
    module = tmp_path / "module.py"
    module.write_text("x = 1\n")
    git("add", "-A")
    git("commit", "-q", "-m", "a module")
    git("update-ref", "refs/remotes/origin/main", "HEAD")
    git("commit", "-q", "--allow-empty", "-m", "after it")
    for source, differs in (("x = 1  # why\n", False), ("x = 2\n", True)):
        module.write_text(source)
        methods_tried.code_differs.cache_clear()
        assert methods_tried.code_differs("module.py") is differs


def test_quick_runs_nothing_where_nothing_differs(monkeypatch, capsys):
    monkeypatch.setattr(QUICK, "changed_since", lambda _commit: frozenset())
    monkeypatch.setattr("sys.argv", ["quick.py"])
    assert QUICK.main() == 0
    assert "Nothing differs from main" in capsys.readouterr().out


def test_quick_runs_the_tests_that_are_named_after_a_module_or_import_it():
    chosen, left_out, methods = QUICK.choose(["fedcache/heads/ridge.py"])
    assert "tests/heads/test_singular_systems.py" in chosen
    assert len(chosen) <= QUICK.FILES + len(QUICK.OF_EVERY_METHOD)
    assert left_out
    assert set(left_out).isdisjoint(chosen)
    assert methods == []
    chosen, _, methods = QUICK.choose(
        ["fedcache/federate/methods/fedlc.py", "tests/test_api.py", "README.md"]
    )
    assert {"tests/test_api.py", *QUICK.OF_EVERY_METHOD} <= set(chosen)
    assert methods == ["fedlc"]
    assert "fedlc" in QUICK.words_of(chosen, methods)[-1]
    assert QUICK.choose(["docs/index.md"]) == ([], [], [])


def test_a_suite_is_skipped_only_where_nothing_it_depends_on_differs():
    targets = {suite.target: suite for suite in SUITES.SUITES}
    browser = targets["browser"]
    assert browser.reason(frozenset({"fedcache/ui/server.py"})) == ""
    assert browser.reason(frozenset({"tests/support/command.py"})) == ""
    assert browser.reason(None) == ""
    assert "tests/browser/" in browser.reason(frozenset({"fedcache/heads/ridge.py"}))
    data = targets["long-data"]
    assert data.reason(frozenset({"fedcache/heads/ridge.py", "tests/runs/test_runs.py"}))
    assert data.reason(frozenset({"fedcache/heads/ridge.py", "fedcache/errors.py"})) == ""
    for change in ("tools/suites.py", "Makefile", ".ci/run", "tests/conftest.py"):
        assert not [suite.target for suite in targets.values() if suite.reason(frozenset({change}))]


def test_every_suite_is_a_target_and_every_path_is_there():
    makefile = content("Makefile")
    for suite in SUITES.SUITES:
        assert f"\n{suite.target}:" in makefile
        assert [path for path in suite.paths if not (ROOT / path).exists()] == [], suite.target
