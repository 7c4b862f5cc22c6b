"""The cache of Tip-Adapter: on each client (tip-local), and of all clients' class means (fed-tip-proto)."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from federation import federation, gap, go_all
from float64 import doubles, eye
from method_calls import lanes, rows_of_one

from fedcache.federate.methods import fed_tip_proto, tip_local

DATA, CLIENTS = federation()


def test_hand_worked_logits():
    # I = (1, 0); T = (1, 0), (0, 1); cache (1, 0) of class 0 and (0, 1) twice of class 1; s = 10, a = 2, b = 3.
    # class 0: 10 * 1 + 2 exp(-3 * 0) = 12;  class 1: 10 * 0 + 2 (exp(-3) + exp(-3)) = 4 exp(-3)
    T = eye(2)
    ctx = lanes("tip-local", "scale=10.0 a=2.0 b=3.0", classes=2, width=2, text=T)
    cache = T[[0, 1, 1]]
    # the length of I is free
    logits = tip_local.cached_logits(5.0 * T[:1], cache, cache, ctx)
    assert torch.allclose(logits, doubles([[12.0, 4.0 * np.exp(-3.0)]]))


def test_each_client_has_its_own_cache(monkeypatch):
    monkeypatch.setattr(tip_local, "KEYS", 7)  # a long cache is read in parts
    out = go_all("tip-local", "a=20.0 b=2.0")
    assert out.protocol == "personalised"
    x = DATA.x[:, 0]
    for client, mine in zip(CLIENTS, np.split(out.evaluation.predictions, 9), strict=True):
        closeness = torch.exp(-2.0 * (1.0 - x[client.test] @ x[client.train].T))
        u = 100.0 * x[client.test] @ DATA.text.T + 20.0 * closeness @ eye(6)[DATA.y[client.train]]
        assert np.array_equal(mine, u.argmax(1).numpy())


def means(client, least):
    rows = DATA.x[client.train, 0].numpy()
    y = DATA.y[client.train].numpy()
    made = {c: rows[y == c].mean(0) for c in range(6) if (y == c).sum() >= least}
    return {c: m / np.linalg.norm(m) for c, m in made.items()}


@pytest.mark.parametrize("least", [2, 4])
def test_the_shared_cache_holds_unit_class_means(least):
    out = go_all("fed-tip-proto", {"min_rows": least, "a": 30.0, "b": 2.0})
    want = [(m, c) for client in CLIENTS for c, m in means(client, least).items()]
    keys = torch.from_numpy(np.array([m for m, _ in want]))
    label = torch.tensor([c for _, c in want])
    assert gap(out.server["sets"], keys) < 1e-12
    assert torch.equal(out.server["label"], label)
    x = DATA.x[:, 0]
    u = 100.0 * x @ DATA.text.T + 30.0 * torch.exp(-2.0 * (1.0 - x @ keys.T)) @ eye(6)[label]
    assert torch.equal(out.predict(DATA.x), u.argmax(1))


def test_only_keys_that_exist_travel():
    out = go_all("fed-tip-proto")
    owned = [len(means(client, 2)) for client in CLIENTS]
    assert owned[4] == 0  # it has one row
    assert out.traffic.up.tolist() == [11 * k for k in owned]
    assert out.traffic.down.tolist() == [11 * sum(owned) + 66] * 9


def test_a_federation_of_single_rows_is_zero_shot():
    lonely = [replace(c, train=c.train[:1]) for c in CLIENTS]
    out = go_all("fed-tip-proto", {}, DATA, lonely)
    assert out.server["sets"].shape == (0, 11)
    assert torch.equal(out.predict(DATA.x), go_all("clip-zs", {}, DATA, lonely).predict(DATA.x))


def test_keys_are_averaged_from_unit_rows():
    # Rows of length 1 and 9 weigh the same: (1, 0) and (0, 9) have the unit mean (1, 1) / sqrt 2.
    rows = rows_of_one(doubles([[1.0, 0.0], [0.0, 9.0]]), [0, 0])
    _, up = fed_tip_proto.fit({}, {}, rows, lanes("fed-tip-proto", {}, classes=1, width=2))
    assert torch.allclose(up["key"], doubles([[0.5**0.5, 0.5**0.5]]))
