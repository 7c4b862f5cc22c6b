"""Whole encoders trained from scratch with labels: FedAvg of them, and every client alone."""

from dataclasses import replace

import pytest
import torch
from federation import fitted, gap, go_tiny, tiny
from setting_lines import set_to

from fedcache.config import Home
from fedcache.federate.methods import METHODS, fedavg_scratch
from fedcache.reproduce.planning import Options, RequirementCheck, entry, plan


def test_one_client_of_fedavg_is_a_client_alone():
    data, clients = tiny()
    keys = {"rounds": 1, "participation": None}
    shared = set_to("epochs=2 batch=4 lr=0.01 wd=1e-4")
    a = go_tiny("fedavg-scratch", shared, data, clients[1:2], **keys)
    b = go_tiny("local-supervised", {**shared, "score": "probe"}, data, clients[1:2], **keys)
    assert gap(a.server, b.states[0]) < 1e-12
    assert b.traffic.up[0] == b.traffic.down[0] == 0


def test_a_step_of_sgd_is_that_of_torch():
    data, clients = tiny()
    client = replace(clients[1], train=clients[1].train[:4])
    settings = set_to("opt=sgd lr=0.1 momentum=0.0 wd=0.0 batch=4 epochs=1")
    keys = {"rounds": 1, "participation": None}
    still = go_tiny("fedavg-scratch", {**settings, "lr": 0.0}, data, [client], **keys).server
    moved = go_tiny("fedavg-scratch", settings, data, [client], **keys).server
    data = fitted(METHODS["fedavg-scratch"], data)
    images = (
        data.x[client.train, 0].double().reshape(4, *data.image, 3).permute(0, 3, 1, 2) / 127.5 - 1
    )
    hp = METHODS["fedavg-scratch"].resolve("paper", {"channels": 1})
    encoder = fedavg_scratch.simclr.encoder_of(hp)
    p = {k: t.clone() for k, t in still.items()}
    for n in fedavg_scratch.trained(hp):
        p[n].requires_grad_()
    h, _ = encoder.trunk(p, images, training=True)
    torch.nn.functional.cross_entropy(h @ p["Q.W"].T + p["Q.b"], data.y[client.train]).backward()
    for n in fedavg_scratch.trained(hp):
        torch.testing.assert_close(
            moved[n], (p[n] - 0.1 * p[n].grad).detach(), rtol=1e-9, atol=1e-12
        )


@pytest.mark.parametrize(
    ("name", "label"), [("fedpcl-table1", "from scratch"), ("flesd-fig2", "supervised")]
)
def test_their_rows_stay_on_images_and_are_ready_on_digits(name, label, own_home):
    looker = RequirementCheck(Home(own_home))
    planned = plan(entry(name), Options(on="digits", backbones=("glyph-clip",)), looker)
    mine = [p for p in planned if label in p.paper.at]
    assert mine
    for p in mine:
        assert p.cell.backbones == ("pixels",)
        assert looker.missing(entry(name), p.cell) == []
    others = [
        p for p in planned if "pre-trained" in p.paper.at[-1] or "SimCLR, probe" in p.paper.at
    ]
    assert {p.cell.backbones for p in others} == {("glyph-clip",)}
