"""fedclip: the attention adapter and its loss, against torch's own layers and losses."""

import numpy as np
import torch
from federation import federation, gap, go_all, start_of
from float64 import doubles
from setting_lines import set_to
from torch import nn

from fedcache.federate.methods import METHODS, fedclip

DATA, CLIENTS = federation()
STEP = set_to("opt=sgd lr=0.3 momentum=0.0 epochs=1 batch=100 scale=10.0")


NAMES = {"A.W": "0.weight", "A.b": "0.bias", "B.W": "2.weight", "B.b": "2.bias"}
"""Name of a weight -> where torch has it."""


def gate_of(p):
    """The released gate of these weights."""
    layers = nn.Sequential(nn.Linear(11, 11), nn.Tanh(), nn.Linear(11, 11), nn.Softmax(dim=1))
    layers.double().load_state_dict({place: p[name] for name, place in NAMES.items()})
    return layers


def released_loss(layers, x, y, text, scale):
    """The released steps on one batch: attention times feature, unit length, pairs both ways."""
    image = torch.mul(layers(x), x)
    image = image / image.norm(dim=1, keepdim=True)
    texts = text[y] / text[y].norm(dim=1, keepdim=True)
    per_image = scale * image @ texts.t()
    truth = torch.arange(len(x))
    return (
        nn.functional.cross_entropy(per_image, truth)
        + nn.functional.cross_entropy(per_image.t(), truth)
    ) / 2


def test_three_rounds_of_the_released_optimiser():
    settings = {**METHODS["fedclip"].resolve("official"), "lr": 0.01, "batch": 100, "scale": 10.0}
    group = [CLIENTS[1], CLIENTS[3], CLIENTS[2]]
    out = go_all("fedclip", settings, DATA, group, rounds=3)
    want = start_of("fedclip", settings, DATA, group)
    for _ in range(3):
        total = dict.fromkeys(NAMES, 0.0)
        for client in group:
            layers = gate_of(want)
            solver = torch.optim.Adam(
                layers.parameters(), lr=0.01, betas=(0.9, 0.98), eps=1e-6, weight_decay=0.2
            )
            released_loss(
                layers, DATA.x[client.train, 0], DATA.y[client.train], DATA.text, 10.0
            ).backward()
            solver.step()
            for name, place in NAMES.items():
                total[name] += layers.state_dict()[place] / len(group)
        want = total
    assert gap(out.server, want) < 1e-7  # fused Adam corrects its bias in float32


def test_predictions_are_cosines_of_gated_features():
    out = go_all("fedclip", STEP, rounds=2)
    with torch.no_grad():
        z = gate_of(out.server)(DATA.x[:, 0]) * DATA.x[:, 0]
    u = 10.0 * nn.functional.normalize(z, dim=1) @ DATA.text.T
    assert gap(out.deployed(None).scores(DATA.x[:, 0]), u) < 1e-12
    assert out.trainable == 2 * 11 * 12


def test_the_loss_of_one_pair_is_zero_and_of_two_is_hand_worked():
    assert float(fedclip.pair_contrast(doubles([[3.0]]), doubles([1.0]))) == 0.0
    # Logits 2 and 0 on and off the diagonal: both ways log(1 + e^-2). A third, padded row changes nothing.
    u = doubles([[2.0, 0.0, 9.0], [0.0, 2.0, 9.0], [9.0, 9.0, 9.0]])
    w = doubles([0.5, 0.5, 0.0])
    assert abs(float(fedclip.pair_contrast(u, w)) - np.log1p(np.exp(-2.0))) < 1e-14


def test_classes_in_place_of_pairs():
    client = CLIENTS[1]
    out = go_all("fedclip", {**STEP, "objective": "ce"}, DATA, [client], rounds=1)
    layers = gate_of(start_of("fedclip", STEP, DATA, [client]))
    x = DATA.x[client.train, 0]
    z = nn.functional.normalize(layers(x) * x, dim=1)
    nn.functional.cross_entropy(10.0 * z @ DATA.text.T, DATA.y[client.train]).backward()
    assert gap(out.server["B.W"], layers[2].weight.detach() - 0.3 * layers[2].weight.grad) < 1e-12
