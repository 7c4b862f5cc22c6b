"""Zero-shot beside a method that starts from class texts: the accuracy of clip-zs on the rows that it is scored on."""

from dataclasses import replace

import numpy as np
import pytest
from federation import federation, fitted, go_all, go_tiny, rows_tested, small, tiny
from methods_tried import tried
from setting_lines import cases_of

from fedcache.federate.methods import METHODS

FROM_TEXT = dict(
    cases_of(
        """
        fst-cbdg
        fedavg head=linear
        fedprox head=linear
        fedntd
        scaffold head=linear
        ditto head=linear
        pfedme head=linear
        perfedavg head=linear
        solo head=linear
        central probe=sgd
        fed3r-prior
        tip-local
        fed-tip-proto
        tpfl-feat
        atpfl-feat
        gda
        fedclip
        lp-plus-plus
        """
    )
)
LIVE = ("promptfl", "tpfl", "atpfl", "local-prompt", "fedtpg", "tofa")


@pytest.mark.parametrize("name", tried(FROM_TEXT))
def test_it_is_clip_zs_on_the_same_rows(name):
    data, clients = tiny()
    out = go_tiny(name, FROM_TEXT[name], data, clients)
    right = (data.x[:, 0] @ data.text.T).argmax(-1) == data.y
    if out.protocol == "personalised":
        want = np.mean([right[c.test].double().mean() for c in clients])
    else:
        want = right[np.unique(rows_tested(clients))].double().mean()
    assert out.zero_shot == pytest.approx(float(want))
    assert 0.0 < out.zero_shot < 1.0


@pytest.mark.parametrize("name", LIVE)
def test_prompts_stand_beside_the_template_as_it_is(name):
    data, clients = federation(sizes=(12, 20))
    data = fitted(METHODS[name], data)
    settings = {k: 1 if k == "epochs" else v for k, v in small(name).items()}
    out = go_all(name, settings, data, clients, rounds=1)
    text = data.towers.text.encode(*data.towers.text.embed([f"it is {n}!" for n in data.names]))
    rows = np.unique(rows_tested(clients))
    x = data.x[rows, 0]
    if METHODS[name].needs >= {"image tower"}:
        x = data.towers.image.encode(data.towers.image.normalise(x.view(-1, *data.image, 3)))
    want = ((x.double() @ text.double().T).argmax(-1) == data.y[rows]).double().mean()
    assert out.zero_shot == pytest.approx(float(want))


@pytest.mark.parametrize(
    ("name", "settings"),
    cases_of(
        """
    clip-zs
    fedavg
    fedavg head=linear init=zero
    fed3r
    """
    ),
)
def test_what_does_not_start_from_texts_has_none(name, settings):
    assert go_tiny(name, settings).zero_shot is None


def test_without_text_features_there_is_none():
    data, clients = tiny()
    assert go_tiny("fedavg", "head=linear", replace(data, text=None), clients).zero_shot is None


def test_of_clients_that_were_drawn_for_scoring_only_those_count():
    data, clients = tiny()
    out = go_tiny("solo", "head=linear", data, clients, eval_clients=2)
    scored = np.flatnonzero(~np.isnan(out.client_accuracy))
    right = (data.x[:, 0] @ data.text.T).argmax(-1) == data.y
    assert len(scored) == 2
    assert out.zero_shot == pytest.approx(
        np.mean([float(right[clients[i].test].double().mean()) for i in scored])
    )
