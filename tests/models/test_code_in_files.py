"""A file decides nothing about which code runs: models, stores, runs and settings that name Python code of others."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
from command import fedcache, ok
from failing_command import must_fail, must_fail_store
from made_path import extracted, place_of
from pictures import folder
from refusal import store_error

import fedcache as fc
from fedcache import plugins
from fedcache.extract.backbones import own_module
from fedcache.models.saved_model import SavedModel
from fedcache.runs.predict_run import model_file

NAME = "module:stranger:build"
CODE = """
from pathlib import Path

import torch

Path("it_ran").write_text("imported")


class Net(torch.nn.Module):
    size = 16

    def forward(self, x):
        return x.flatten(1)[:, :8]


build = Net
"""


def trained(place):
    extracted(place)
    return place_of("train --method fed3r --scheme iid --clients 3")


@pytest.fixture
def run(once, here, monkeypatch):
    """A run of the user's own; a module of somebody else lies in the working directory."""
    made = once(trained)
    folder(here / "shapes")
    (here / "stranger.py").write_text(CODE)
    forget_all(monkeypatch)
    return made


def forget_all(monkeypatch):
    """As in a process that has just begun."""
    monkeypatch.setattr(plugins, "_named", set())
    monkeypatch.setattr(own_module, "_BUILT", {})
    monkeypatch.setattr(own_module, "_IN_MEMORY", {})
    monkeypatch.delitem(sys.modules, "stranger", raising=False)


def hostile(run, name=NAME, **changed):
    """The model of a run whose recipe names code, sealed as anybody can seal a file."""
    model = SavedModel.load(model_file(run, 0))
    known = fc.Recipe.from_dict(model.facts.recipes[0])
    recipe = replace(known, backbone=name, weights="a" * 64, size=16)
    facts = replace(model.facts, keys=(recipe.key,), recipes=(recipe.to_dict(),), **changed)
    path = Path("hostile.safetensors")
    SavedModel(facts, model.tensors).save(path)
    return path


def nothing_ran():
    return not Path("it_ran").exists() and "stranger" not in sys.modules


@pytest.mark.parametrize(
    "words",
    [
        "predict MODEL shapes/test",
        "evaluate MODEL --dataset folder:shapes",
        "evaluate MODEL --store STORE",
        "export-model MODEL -o out.onnx",
    ],
)
@pytest.mark.parametrize("name", [NAME, "module:os:abort"])
def test_no_command_runs_the_code_that_a_model_file_names(run, own_home, words, name):
    (store,) = (own_home / "stores").glob("*.zarr")
    line = words.replace("MODEL", str(hostile(run, name))).replace("STORE", str(store))
    must_fail_store(name, line)
    assert nothing_ran()


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (f"clip-rn50,{NAME}+glyph-clip", True),
        (f"{NAME}@64", True),
        (f"{NAME}=weights.pt", True),
        (f"clip-rn50={NAME}", False),
        (f"{NAME}.safetensors", False),
        (f"{NAME}/model.safetensors", False),
        (Path(NAME), False),
    ],
)
def test_a_word_names_code_only_where_it_is_the_name(given, named, monkeypatch):
    forget_all(monkeypatch)
    plugins.note_named([given])
    assert plugins.may_be_run(NAME) == named


def test_loading_a_model_in_python_runs_no_code_that_it_names(run):
    store_error(
        lambda: fc.load_model(hostile(run)).predict("shapes"), "fedcache did not import this code"
    )
    assert nothing_ran()
    store_error(lambda: fc.load_model(hostile(run, encoder=0, template="{}", names=("a", "b"))))
    assert nothing_ran()


def test_a_model_file_cannot_choose_which_file_is_opened(run):
    Path("mine.onnx").write_bytes(b"private")
    model = hostile(run, f"onnx:{Path('mine.onnx').absolute()}")
    must_fail_store("recipe contains the path", f"predict {model} shapes/test")


@pytest.fixture
def own_run(run, monkeypatch):
    """A run on features of the module, which its user named when they were extracted."""
    ok(f"extract --dataset folder:shapes --backbones {NAME} --workers 0")
    found = place_of(f"train --method fed3r --scheme iid --clients 3 --backbones {NAME}")
    Path("it_ran").unlink()
    forget_all(monkeypatch)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    ["predict {} shapes/test", "evaluate {} --dataset folder:new", "export-model {} -o out"],
)
def test_code_of_a_run_is_called_when_the_user_names_it_in_the_command(own_run, words):
    folder(Path("new"), train=2, test=3)
    command = words.format(own_run)
    must_fail_store(NAME, command)
    assert nothing_ran()
    must_fail("", f"{command} --backbone module:another:build")
    assert nothing_ran()
    ok(f"{command} --backbone {NAME}")
    assert Path("it_ran").exists()


def test_code_of_a_run_is_called_when_a_program_names_it(own_run):
    model = fc.load_model(own_run)
    store_error(lambda: model.predict("shapes/test"), "fc.backbone")
    assert nothing_ran()
    assert fc.backbone(NAME) == NAME
    assert len(model.predict("shapes/test")) == 12


@pytest.mark.parametrize("words", ["extract", "train --method fed3r --scheme iid --clients 3"])
def test_settings_in_a_file_name_no_code(run, words):
    # A folder from elsewhere may bring a fedcache.toml beside its code.
    section = words.split()[0]
    Path("fedcache.toml").write_text(f'[{section}]\ndataset = "folder:new"\nbackbones = "{NAME}"\n')
    folder(Path("new"), train=2, test=3)
    assert fedcache(words).code == 4
    assert nothing_ran()
    ok(f"{words} --backbones {NAME}")


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fed3r", "coop"])
def test_training_on_a_store_runs_no_code_that_its_recipes_name(own_run, own_home, method):
    (store,) = (own_home / "stores").glob("shapes*.zarr")
    for words in (
        f"train --store {store} --method {method} --scheme iid --fresh",
        f"inspect {store}",
        f"verify {store}",
        f"partition --store {store} --scheme iid",
        "report -o page.html",
        f"runs show {own_run}",
        "backbones list",
        "doctor",
    ):
        fedcache(words)
        assert nothing_ran(), words
