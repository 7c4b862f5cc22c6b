"""What released FLESD does where its paper is silent: distillation, encoders, augmentation by data set.

The loop is written out here as its ``global_aggregate.py`` has it, on torch's own optimiser, and compared after epochs.
"""

from dataclasses import replace

import pytest
import torch
from federation import federation, fitted, gap, go_tiny, small, tiny
from float64 import even
from refusal import machine_error, refused
from setting_lines import set_to
from test_methods_flesd import fresh, server
from torch import nn
from torchvision.models import resnet18, resnet50

from fedcache.federate.engine.client_data import ClientData
from fedcache.federate.engine.context import RunConstants
from fedcache.federate.methods import METHODS
from fedcache.federate.methods.common import distillation, simclr
from fedcache.federate.methods.common.live_images import POLICIES, policy_of
from fedcache.heads.augment import Policy
from fedcache.heads.encoder import Encoder
from fedcache.heads.simclr import Ensemble

CPU = torch.device("cpu")


def bytes_of(rows, side):
    g = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (rows, 1, 3 * side * side), generator=g, dtype=torch.uint8)


def one_round(settings, public=8):
    """A round of flesd with so many public rows."""
    data, clients = federation(sizes=(public, 20, 20))
    return go_tiny("flesd", settings, data, clients, rounds=1, participation=None)


# -- the loop of ensemble similarity distillation


def released(w, target, ctx, *, momentum_while_filling):
    """The student after the released loop: queue of keys in train mode, EMA before them, no step while it fills."""
    hp = ctx.hp
    encoder = simclr.encoder_of(ctx.hp)
    student = {n: t.clone() for n, t in w.items()}
    key = {n: t.clone() for n, t in w.items()}
    names = encoder.trained()
    leaves = [student[n].requires_grad_() for n in names]
    adam = torch.optim.Adam(leaves, lr=hp["esd_lr"], weight_decay=hp["wd"])
    size = hp["queue"]
    batch = hp["esd_batch"]
    # noise, which must not be used
    keys = torch.full((size, encoder.proj), torch.nan, dtype=torch.float64)
    places = torch.zeros(size, dtype=torch.long)
    pointer = 0
    rows = len(ctx.public)
    data = ClientData(ctx.public, None, torch.arange(rows), (rows,))
    loader = {**hp, "batch": batch, "drop_last": True, "bn": True}
    for epoch in range(hp["esd_epochs"]):
        for i, (_, b) in enumerate(simclr.pairs(data, replace(ctx, hp=loader))({}, epoch)):
            h, updates = encoder.trunk(student, b["x"], training=True)
            q = encoder.project(student, h)
            student |= {n: t.detach() for n, t in updates.items()}
            filling = i < size // batch
            with torch.no_grad():
                for n in names:
                    if momentum_while_filling or not filling:
                        key[n] = key[n] * hp["zeta"] + student[n] * (1 - hp["zeta"])
                k = encoder.project(key, encoder.trunk(key, b["x2"], training=True)[0])
            keys[pointer : pointer + batch], places[pointer : pointer + batch] = k, b["i"]
            pointer = (pointer + batch) % size
            if filling:
                continue
            labels = target.rows(b["i"])[:, places]
            labels = labels / labels.sum(1, keepdim=True)
            loss = -(torch.log_softmax(q @ keys.T / hp["tau_S"], 1) * labels).sum() / batch
            adam.zero_grad()
            loss.backward()
            adam.step()
    return {n: t.detach() for n, t in student.items()}


@pytest.mark.slow
@pytest.mark.parametrize(("ema", "filling"), [("before", True), ("filled", False)])
def test_official_distillation_is_the_released_loop(ema, filling):
    # 22 rows, batches of 4, two left out; the queue of 8 takes two batches of each epoch and leaves three
    public = bytes_of(22, 6)
    own = set_to("channels=2 esd_epochs=3 queue=8 zeta=0.7 esd_lr=0.01 augment=cifar")
    hp = METHODS["flesd"].resolve("official", {**small("flesd"), **own, "ema": ema})
    ctx = server(hp, public, (6, 6))
    w = fresh(simclr.encoder_of(hp))
    teachers = [
        distillation.unit(fresh(simclr.encoder_of(hp), s), public[:, 0], ctx) for s in (1, 2)
    ]
    target = Ensemble(torch.stack(teachers), None, hp["tau_T"], own=True)
    ours = distillation.distil(w, target, ctx)
    theirs = released(w, target, ctx, momentum_while_filling=filling)
    assert set(ours) == set(theirs) == set(w)
    assert gap(ours, theirs) < 1e-10
    assert gap(ours, released(w, target, ctx, momentum_while_filling=not filling)) > 1e-6
    for key, value in (
        ("key_mode", "eval"),
        ("ema", "after"),
        ("esd_drop_last", False),
        ("queue_warm", True),
    ):
        changed = distillation.distil(w, target, replace(ctx, hp={**hp, key: value}))
        assert gap(changed, theirs) > 1e-6, key


@pytest.mark.parametrize(
    "settings",
    [
        set_to("esd_drop_last=true esd_batch=9 anchors=all"),  # no batch is full
        {"anchors": "queue", "queue": 10},  # more than the 8 public rows
        set_to("anchors=queue queue=6 esd_batch=5"),  # no whole number of batches
        set_to("anchors=queue queue=3 esd_batch=5"),  # less than a batch
        set_to(
            "anchors=queue queue_warm=false queue=6 esd_batch=3 esd_drop_last=true"
        ),  # no step is left
    ],
)
def test_public_rows_that_cannot_serve_are_refused(settings):
    refused(lambda: one_round(settings), "8", "public rows", "--set ")


def test_the_queue_that_a_refusal_suggests_is_accepted():
    def go(queue, **more):
        one_round({"anchors": "queue", "queue": queue, "esd_batch": 9, **more}, public=7)

    refused(lambda: go(3), "--set queue=7")
    go(7)
    # The only batch would fill the queue.
    refused(lambda: go(7, queue_warm=False), "no step is left", "--set queue_warm=true")


def test_a_batch_with_one_row_more_than_the_queue_writes_each_slot_once():
    queue = distillation.Queue(torch.zeros(2, 1), torch.zeros(2, dtype=torch.long))
    for first in (1, 4):
        rows = torch.arange(first, first + 3)
        queue.push(rows.float().unsqueeze(1), rows)
        assert queue.rows.tolist() == queue.keys[:, 0].tolist() == [first + 1, first + 2]


# -- BatchNorm of two views (D-92)


@pytest.mark.slow
@pytest.mark.parametrize(("how", "same"), [("separate", True), ("joint", False)])
def test_each_view_by_itself_is_a_model_called_twice(how, same):
    data = fitted(METHODS["flesd"], tiny()[0])
    hp = METHODS["fedavg-simclr"].resolve(
        "paper", small("fedavg-simclr") | set_to("encoder=conv channels=64 proj=8 simclr=one_way")
    )
    ctx = replace(
        server({**hp, "bn_views": how}, data.x, data.image),
        env=RunConstants(3, 48, 1, 1, None, torch.float64, CPU, image=(8, 8)),
    )
    encoder = simclr.encoder_of(hp)
    p = fresh(encoder)
    net = torchvision_of(encoder, p)
    net.train()
    x, x2 = (
        torch.rand(5, 3, 8, 8, generator=torch.Generator().manual_seed(s), dtype=torch.float64)
        for s in (1, 2)
    )
    value, updates = simclr.loss(p, {"x": x, "x2": x2, "w": even(5)}, {}, ctx)
    z, z2 = (encoder.project(p, net(v)) for v in (x, x2))
    wanted = nn.functional.cross_entropy(z @ z2.T / hp["tau"], torch.arange(5))
    assert (abs((value - wanted).item()) < 1e-10) is same
    assert torch.allclose(updates["t.stem.mean"], net.bn1.running_mean, atol=1e-12) is same


# -- residual encoders, against torchvision's on the same weights


def torchvision_of(encoder, p):
    """torchvision's network of this encoder without its classifier, with the weights of ``p``."""
    net = {"conv": resnet18, "resnet50": resnet50}[encoder.kind](weights=None)
    net.fc = nn.Identity()
    if encoder.stem == "cifar":
        net.conv1, net.maxpool = nn.Conv2d(3, 64, 3, padding=1, bias=False), nn.Identity()
    net.double()
    state = net.state_dict()
    letters = "abc" if encoder.kind == "resnet50" else "ab"
    names = [("t.stem", "conv1", "bn1")]
    for s in range(4):
        for b in range(len(getattr(net, f"layer{s + 1}"))):
            here = f"layer{s + 1}.{b}"
            names += [
                (f"t.{s}.{b}.{x}", f"{here}.conv{i}", f"{here}.bn{i}")
                for i, x in enumerate(letters, 1)
            ]
            if f"{here}.downsample.0.weight" in state:
                names.append((f"t.{s}.{b}.skip", f"{here}.downsample.0", f"{here}.downsample.1"))
    used = {"gain": "weight", "shift": "bias", "mean": "running_mean", "var": "running_var"}
    for ours, conv, bn in names:
        state[f"{conv}.weight"] = p[f"{ours}.W"]
        state |= {f"{bn}.{its}": p[f"{ours}.{mine}"] for mine, its in used.items()}
    assert {n.rsplit(".", 1)[0] for n in p if n.startswith("t.")} == {n for n, _, _ in names}
    net.load_state_dict(state)
    return net


@pytest.mark.parametrize(
    ("kind", "stem", "count", "training"),
    [
        ("conv", "cifar", 11_168_832, True),
        ("conv", "imagenet", 11_176_512, False),
        pytest.param("resnet50", "cifar", 23_500_352, False, marks=pytest.mark.slow),
        pytest.param("resnet50", "imagenet", 23_508_032, True, marks=pytest.mark.slow),
    ],
)
def test_a_residual_trunk_is_torchvisions(kind, stem, count, training):
    e = Encoder(kind, stem=stem)
    p = fresh(e)
    assert set(p) == set(e.names())
    assert sum(p[n].numel() for n in e.trained() if n.startswith("t.")) == count
    g = torch.Generator().manual_seed(3)
    for n in e.buffers():  # statistics that differ, so that evaluation reads them
        p[n] = 0.5 + torch.rand(p[n].shape, generator=g, dtype=torch.float64)
    net = torchvision_of(e, p).train(training)
    x = torch.randn(2, 3, 32, 40, generator=g, dtype=torch.float64)
    for n in e.trained():
        p[n].requires_grad_()
    h, updates = e.trunk(p, x, training=training)
    wanted = net(x)
    assert h.shape == (2, e.width)
    assert torch.allclose(h, wanted, atol=1e-9)
    h.square().sum().backward()
    wanted.square().sum().backward()
    assert torch.allclose(p["t.stem.W"].grad, net.conv1.weight.grad, rtol=1e-7, atol=1e-9)
    assert (updates != {}) is training
    if training:
        last = net.layer4[-1]
        mine, bn = ("c", last.bn3) if kind == "resnet50" else ("b", last.bn2)
        block = len(net.layer4) - 1
        assert torch.allclose(updates[f"t.3.{block}.{mine}.mean"], bn.running_mean, atol=1e-10)
        assert torch.allclose(updates[f"t.3.{block}.{mine}.var"], bn.running_var, atol=1e-10)


# -- which policy (D-91)


def test_auto_takes_the_policy_of_the_data_set():
    hp = METHODS["flesd"].resolve("official")
    small_images = Policy("resized", area=0.2, jitter=0.8, hue=0.2, grey=0.2, blur=0.0)
    assert policy_of(hp, (32, 32)) == small_images
    for side in (64, 224):
        assert policy_of(hp, (side, side)) == Policy(
            "resized", area=0.2, jitter=0.8, hue=0.4, grey=0.5, blur=0.5
        )
    supervised = METHODS["local-supervised"].resolve("official")
    assert policy_of(supervised, (32, 32)) == Policy("padded")
    assert policy_of(supervised, (64, 64)) == Policy("resized", area=0.08)
    assert policy_of(METHODS["local-supervised"].resolve(), (32, 32)) == Policy(flip=False)


def test_single_values_change_a_policy():
    settings = set_to(
        "augment=cifar jitter=0.1 hue=0 grey=1 blur=0.25 crop=padded crop_area=0.5 flip=false"
    )
    hp = METHODS["flesd"].resolve("paper", settings)
    wanted = Policy("padded", area=0.5, flip=False, jitter=0.1, hue=0.0, grey=1.0, blur=0.25)
    assert policy_of(hp, (32, 32)) == wanted
    plain = METHODS["flesd"].resolve("paper", {"augment": "plain", "flip": "true"})
    assert policy_of(plain, (32, 32)) == POLICIES["plain"]


# -- precision


def test_amp_on_the_cpu_is_refused():
    machine_error(lambda: one_round("amp=true"))


def test_amp_is_the_same_loss_in_fewer_digits():
    # The switch is for a GPU; autocast mixes on a CPU in the same way, so the arithmetic is checked here.
    hp = METHODS["flesd"].resolve("paper", {**small("flesd"), "channels": 4, "proj": 16})
    env = RunConstants(3, 192, 1, 1, None, torch.float32, CPU, image=(8, 8))
    ctx = replace(server(hp, bytes_of(8, 8), (8, 8)), env=env)
    p = {n: t.float() for n, t in fresh(simclr.encoder_of(hp)).items()}
    x, x2 = (torch.rand(16, 3, 8, 8, generator=torch.Generator().manual_seed(s)) for s in (1, 2))
    batch = {"x": x, "x2": x2, "w": torch.full((16,), 1 / 16)}
    full, _ = simclr.loss(p, batch, {}, ctx)
    mixed, updates = simclr.loss(p, batch, {}, replace(ctx, hp={**hp, "amp": True}))
    assert mixed.dtype == updates["t.stem.mean"].dtype == torch.float32
    assert 0.0 < abs(float(mixed - full)) < 0.05 * float(full)
