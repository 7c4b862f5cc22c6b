"""What is saved of a run predicts what was scored: over the table of all methods, every client, in one file."""

import numpy as np
import pytest
import torch
from federation import VARIANTS, cases, fitted, go_tiny, ids, rows_tested, tiny, wide
from methods_tried import tried
from pairs import parametrize, served

from fedcache.federate.engine.evaluate import predict_rows
from fedcache.federate.methods import METHODS
from fedcache.models.saved_model import ModelFacts, SavedModel, collect

pytest_generate_tests = parametrize


def facts_of(out, data):
    return ModelFacts(
        run="a" * 64,
        seed=out.seed,
        dataset="tiny",
        method=out.method,
        code="",
        hp=out.hp,
        protocol=out.protocol,
        rounds=len(out.records),
        dtype=str(out.dtype).removeprefix("torch."),
        classes=("a", "b", "c"),
        keys=("k",),
        recipes=(),
        widths=data.widths or (data.x.shape[2],),
        views=data.x.shape[1],
        feat_post="none",
        clients=len(out.clients),
        saved={},
        image=data.image,
        names=data.names,
        template=None,
        encoder=None,
    )


def rows_of(model, data, rows):
    """What the model reads of rows of the data, in the run's dtype."""
    x = data.x[rows, 0]
    return x if model.facts.image is not None else x.to(getattr(torch, model.facts.dtype))


def check_saved(case, data, clients, execution, path):
    """Train, save, load, and predict every row that was scored."""
    out = go_tiny(*case, data, clients, execution=execution)
    data = fitted(METHODS[case[0]], data)
    collect(out, facts_of(out, data), data, None, []).save(path)
    model = SavedModel.load(path)

    def predicted(name, rows):
        deployed = model.deployed(name, encoders=data.towers)
        return predict_rows(
            lambda i: deployed.scores(rows_of(model, data, i)), torch.device("cpu"), rows
        )

    e = out.evaluation
    if out.protocol == "global":
        assert np.array_equal(predicted(None, e.rows), e.predictions)
        return
    start = 0
    union = np.unique(rows_tested(clients))
    for client in clients:
        rows = union if out.protocol == "everywhere" else client.test
        if client.name in model.facts.saved and len(rows):
            assert np.array_equal(
                predicted(client.name, rows), e.predictions[start : start + len(rows)]
            )
            start += len(rows)
    assert start == len(e.rows)  # every scored client has a model


@pytest.mark.parametrize("case", tried(cases() + VARIANTS), ids=ids)
def test_a_saved_model_predicts_what_was_scored(case, tmp_path):
    check_saved(case, *tiny(views=4), "auto", tmp_path / "m.safetensors")


@served(tried(cases() + VARIANTS), ["gram"])
def test_a_model_kept_as_coordinates_predicts_what_was_scored(case, execution, tmp_path):
    check_saved(case, *wide(), execution, tmp_path / "m.safetensors")
