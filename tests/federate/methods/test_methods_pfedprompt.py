"""pfedprompt: PromptFL's prompt, and an attention over the client's own rows when it predicts."""

import numpy as np
import pytest
import torch
from federation import federation, fitted, gap, go_all
from float64 import eye
from method_calls import lanes
from setting_lines import set_to
from test_methods_prompt import context
from torch.nn.functional import normalize

from fedcache.federate.methods import METHODS, pfedprompt, promptfl, tip_local

FEW = set_to("n_ctx=2 batch=16 epochs=1 lr=0.01")


def test_hand_worked_logits():
    # x = e1; rows e1 of class 0 and e2 twice of class 1; T = e1, e2; s = 10, a = 4, b = log 2:
    # weights 2, 1, 1 of 4: the labels have 1/2 each. The rows: e1/2 + e2/2, so z = (1 + 2, 2) made unit.
    T = eye(2)
    own = {"keys": T[[0, 1, 1]], "label": torch.tensor([0, 1, 1])}
    for values, want in (
        ("labels", torch.tensor([[12.0, 2.0]])),
        ("features", 10 * normalize(torch.tensor([[3.0, 2.0]]), dim=-1)),
    ):
        hp = {"scale": 10.0, "a": 4.0, "b": float(np.log(2.0)), "values": values}
        ctx = lanes("pfedprompt", hp, classes=2, width=2)
        u = pfedprompt.predict({"T": T}, own, None, T[:1], ctx)
        assert gap(u, want.double()) < (1e-6 if values == "features" else 1e-12)


@pytest.mark.parametrize("values", ["labels", "features"])
def test_each_client_attends_to_its_own_rows(values, monkeypatch):
    monkeypatch.setattr(tip_local, "KEYS", 7)  # many rows are read in parts
    data, clients = federation()
    data = fitted(METHODS["pfedprompt"], data)
    settings = {**FEW, "a": 3.0 if values == "features" else 40.0, "b": 12.0, "values": values}
    out = go_all("pfedprompt", settings, data, clients)
    assert out.protocol == "personalised"
    ctx = context("promptfl", FEW, towers=data.towers, names=data.names)
    T = promptfl.deploy(out.server, {}, None, ctx)["T"]
    x = data.x[:, 0]
    for client, mine in zip(clients, np.split(out.evaluation.predictions, 9), strict=True):
        F = x[client.train]
        weight = (12.0 * x[client.test] @ F.T).softmax(-1)
        if values == "labels":
            u = 100.0 * x[client.test] @ T.T + 40.0 * weight @ eye(6)[data.y[client.train]]
        else:
            u = normalize(x[client.test] + 3.0 * weight @ F, dim=-1) @ T.T
        assert np.array_equal(mine, u.argmax(1).numpy())
