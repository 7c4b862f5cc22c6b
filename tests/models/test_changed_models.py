"""Model files that were changed: damage is exit 5, a claim that no model makes is exit 4, and nothing is a bug (10).

Good models of several kinds of methods are changed fact by fact and sealed again, as anybody can. A command may answer
only what the good model answers.
"""

import copy
import math
import shutil

import numpy as np
import pytest
import torch
from command import ok
from failing_command import must_fail_store
from homes import made_once
from made_path import place_of
from pictures import folder
from refusal import store_error

from fedcache import Recipe, Store
from fedcache.config import Home
from fedcache.errors import FedcacheError, UsageError
from fedcache.federate.methods import find_method
from fedcache.models.saved_model import KIND, ModelOptions, SavedModel
from fedcache.progress import Silent
from fedcache.runs.predict_run import model_file, open_predictor
from fedcache.store.files import read_sealed, write_sealed

METHODS = {
    "one model": "fedavg --rounds 2 --backbones random-projection:16",
    "two backbones": "fed3r --backbones random-projection:16,random-projection:8",
    "standardized": "fedncm --backbones random-projection:16 --set feat_post=standardize",
    "centred": "clip-zs --backbones glyph-clip --set feat_post=center",
    "personal": "fedrep --rounds 2 --backbones random-projection:16",
    "from texts": "fst-cbdg --rounds 1 --backbones glyph-clip",
    "live encoders": "promptfl --rounds 1 --backbones glyph-clip",
    "images": "fedavg-scratch --rounds 1 --backbones pixels",
}
EACH = {"live encoders": 7, "images": 48}
"""Every so many changes are tried of models that take long to score, and every third of the others."""


def resealed(good, path, change):
    """A copy of a model whose facts and tensors were changed, and that is sealed again, as anybody can."""
    held = read_sealed(good, KIND)
    facts = copy.deepcopy(held.content)
    tensors = dict(held.tensors)
    change(facts, tensors)
    write_sealed(path, KIND, facts, tensors)
    return path


@made_once
def models(place):
    images = f"--dataset folder:{folder(place / 'shapes', train=6, test=2)}"
    for backbones in ("random-projection:16,random-projection:8", "glyph-clip", "pixels --size 16"):
        ok(f"extract --workers 0 {images} --backbones {backbones}")
    for name, words in METHODS.items():
        run = place_of(f"train {words} --scheme iid --clients 3 {images}")
        shutil.copy(model_file(run, 0), place / f"{name}.safetensors")
    return place


HUGE = 10**12
WRONG = (
    None,
    -1,
    0,
    1.5,
    HUGE,
    True,
    "load",
    "",
    [],
    {},
    [[[]]],
    {"a": {"b": [1]}},
    [-1],
    ["x", "x"],
)


def changed_facts(facts):
    """The facts with one of them, or a part of one, of another type, size, length, or away."""
    for name, value in facts.items():
        yield f"without {name}", {k: v for k, v in facts.items() if k != name}
        others = {f"={other!r}": other for other in WRONG}
        if isinstance(value, list) and value:
            others |= {" one less": value[:-1], " one more": [*value, value[-1]]}
            others |= {f"[0]={o!r}": [o, *value[1:]] for o in (None, -1, HUGE, "load", [], {})}
        for what, other in others.items():
            yield f"{name}{what}", {**facts, name: other}
        inner = value[0] if name in ("recipes", "computed") and value else value
        for key in inner if isinstance(inner, dict) else ():
            for other in (None, -1, 0, HUGE, "load", [], {}, [0, 0, 0]):
                changed = {**inner, key: other}
                made = changed if inner is value else [changed, *value[1:]]
                yield f"{name}.{key}={other!r}", {**facts, name: made}


def changed_tensors(tensors):
    """The tensors with one of them of another shape or type, away, or under another name."""
    for name, t in tensors.items():
        rest = {k: v for k, v in tensors.items() if k != name}
        yield f"without {name}", rest
        yield f"{name} renamed", {**rest, f"{name}x": t}
        empty = t[:0] if t.dim() else t.new_zeros(0)
        for other in (empty, t.reshape(-1)[:1], t.to(torch.int16), t[None]):
            yield f"{name} of {other.dtype} {tuple(other.shape)}", {**tensors, name: other}
    yield "a tensor more", {**tensors, "clients/x": torch.zeros(1)}
    stack = {"clients/7/own/w": torch.zeros(1, 2), "clients/7/number": torch.tensor([2**40])}
    yield "a stack more", tensors | stack


def scores_of(path, store):
    """Exit code, and the scores of every row of a store by the first client's model or the one for all."""
    try:
        asked = ModelOptions(client=next(iter(SavedModel.load(path).facts.saved), None))
        predictor = open_predictor(path, asked, Home.from_environment(), Silent())
        return 0, np.concatenate([scores for _, scores in predictor.over_store(store)], axis=1)
    except FedcacheError as error:
        return int(error.code), error.message


def shapes_store():
    return Store.open(place_of("inspect"))


def is_another_model(what):
    """A legal value of a hyperparameter, or other words, may make another model, which is nobody's mistake."""
    return what.startswith(("hp.", "names[0]='load'", "classes[0]="))


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_a_changed_model_answers_what_it_did_or_is_refused(models, tmp_path, name):
    store = shapes_store()
    good = models / f"{name}.safetensors"
    path = tmp_path / "m.safetensors"
    code, wanted = scores_of(good, store)
    assert code == 0, wanted
    held = read_sealed(good, KIND)
    facts = held.content
    tensors = held.tensors
    changes = [(what, made, tensors) for what, made in changed_facts(facts)]
    changes += [(what, facts, made) for what, made in changed_tensors(tensors)]
    changes = changes[:: EACH.get(name, 3)]
    wrong = []
    refusals = 0
    for what, content, parts in changes:
        write_sealed(path, KIND, content, parts)
        try:
            code, found = scores_of(path, store)
        except Exception as error:  # what the test is for
            wrong.append(f"{what}: {type(error).__name__}: {error}")
            continue
        refusals += code in (4, 5)
        same = code == 0 and (
            is_another_model(what) or np.array_equal(found, wanted, equal_nan=True)
        )
        if code not in (4, 5) and not same:
            wrong.append(f"{what}: exit {code}, {str(found)[:80]}")
    assert not wrong, "\n".join(wrong)
    assert refusals > len(changes) / 2


@pytest.mark.slow
def test_a_byte_of_a_model_file_that_changes_is_never_an_answer(models, tmp_path):
    whole = (models / "personal.safetensors").read_bytes()
    path = tmp_path / "m.safetensors"
    store = shapes_store()
    for place in range(0, len(whole), max(1, len(whole) // 60)):
        damaged = bytearray(whole)
        damaged[place] ^= 4
        for content in (bytes(damaged), whole[:place]):
            path.write_bytes(content)
            assert scores_of(path, store)[0] in (4, 5)


def of_number(number):
    return lambda _facts, tensors: tensors.update(
        {k: torch.full_like(t, number) for k, t in tensors.items() if k.startswith("server/")}
    )


@pytest.mark.parametrize(
    "change",
    [
        of_number(math.nan),
        of_number(math.inf),
        lambda facts, _: facts.update(format=-2),
        lambda facts, _: facts.update(zoom=2),
        lambda facts, _: facts["recipes"][0].update(zoom=2),
    ],
    ids=["nan", "inf", "format", "fact", "recipe"],
)
def test_what_no_model_has_is_the_fault_of_the_file_and_no_reason_to_upgrade(
    models, tmp_path, change
):
    path = resealed(models / "one model.safetensors", tmp_path / "m.safetensors", change)
    said = "Get the file again from its author"
    must_fail_store(said, f"predict {path} --store {shapes_store().path}")


@pytest.mark.parametrize("classes", [[], ["x", "x"]])
def test_classes_are_counted_as_they_are(models, tmp_path, classes):
    path = tmp_path / "m.safetensors"
    resealed(models / "one model.safetensors", path, lambda facts, _: facts.update(classes=classes))
    said = f"it has {len(classes)} classes with only {len(set(classes))} different names"
    store_error(lambda: SavedModel.load(path), said)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("decoder", "../../etc"),
        ("pooling", "module:os:abort"),
        ("crop_pct", 1e-3),
        ("views", 65),
        ("backbone", "random-projection:0"),
    ],
)
def test_a_recipe_that_no_command_makes_is_refused(models, tmp_path, field, value):
    def change(facts, _tensors):
        changed = {**facts["recipes"][0], field: value}
        triples = {name: tuple(changed[name]) for name in ("mean", "std")}
        # The key of the array is made of the recipe, so whoever changes the one changes the other.
        facts |= {"recipes": [changed], "keys": [Recipe(**changed | triples).key]}

    path = resealed(models / "one model.safetensors", tmp_path / "changed.safetensors", change)
    head = tmp_path / "head.safetensors"
    for words in (f"predict {path} {models}/shapes/test/zebra", f"export-model {path} -o {head}"):
        must_fail_store("recipe", words)
    assert not head.exists()


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_hyperparameters_of_a_model_are_those_that_a_user_may_set(models, tmp_path, name):
    good = models / f"{name}.safetensors"
    path = tmp_path / "changed.safetensors"
    facts = SavedModel.load(good).facts
    client = next(iter(facts.saved), None)
    for h in find_method(facts.method).hparams:
        below = None if h.low is None else h.low - 1
        above = None if h.high is None else h.high + 1
        for value in (below, above, "no word"):
            if value is None or h.name not in facts.hp:
                continue
            with pytest.raises(UsageError):
                h.parse(value)

            def change(content, _tensors, name=h.name, value=value):
                content["hp"][name] = value

            resealed(good, path, change)
            store_error(lambda: SavedModel.load(path).deployed(client))


def test_settings_of_every_client_are_checked_and_not_only_of_the_first(models, tmp_path):
    def change(facts, _tensors):
        of_second = list(facts["saved"].values())[1]
        facts["overrides"] = {str(of_second): {"columns": [], "hp": {"lr": -1.0}}}

    path = resealed(models / "personal.safetensors", tmp_path / "changed.safetensors", change)
    model = SavedModel.load(path)
    first, second = list(model.facts.saved)[:2]
    model.deployed(first)
    store_error(lambda: model.deployed(second), "lr")
