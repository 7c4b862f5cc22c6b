"""Facts of the methods that start from class text features: clip-zs and fst-cbdg."""

from dataclasses import replace

import numpy as np
import pytest
import scipy
import torch
from federation import federation, gap, go, go_all, rows_trained, server_gap
from float64 import far, normal, zeros
from method_calls import lanes
from setting_lines import set_to
from torch.nn.functional import normalize

from fedcache.federate.engine.client_data import Data, prepare_features
from fedcache.federate.engine.context import generator
from fedcache.federate.engine.outcome import entropy_bits
from fedcache.federate.methods import METHODS
from fedcache.federate.methods.common.synthesis import stratified
from fedcache.testing.method_laws import TinyClient


def test_zero_shot_is_the_nearest_text_feature_at_every_scale():  # T-Z1
    data, _ = federation()
    expected = (data.x[:, 0] @ data.text.T).argmax(-1)
    for scale in (1e-3, 1.0, 100.0):
        assert torch.equal(go("clip-zs", {"scale": scale}).predict(data.x), expected)


@pytest.mark.parametrize("beta", [0.0, 1.0])
@pytest.mark.parametrize("scale", [1.0, 30.0])
def test_self_training_alone_is_a_fixed_point(beta, scale):  # T-F1: f and q have one scale
    data, _ = federation()
    settings = {
        **set_to("ablation=ist_only wd=0.0 epochs=2 batch=16"),
        "beta": beta,
        "lr": 0.1 / scale**2,
        "logit_scale": scale,
    }
    out = go("fst-cbdg", settings, rounds=4)
    assert gap(out.server["W"], data.text) < 1e-12
    assert float(out.server["b"].abs().max()) < 1e-12
    assert torch.equal(out.predict(data.x), go("clip-zs").predict(data.x))


@pytest.mark.parametrize("reduce", ["mean", "sum"])
@pytest.mark.parametrize("rows", [1, 3])
def test_strata_weigh_classes_as_the_dealt_rows_do(reduce, rows):
    """Over an epoch, class k weighs n_k / sum n in every step of a mean, and n_k in all steps of a sum together."""
    text = normal(4, 5)
    settings = {"sigma": 0.5, "tsamp_reduce": reduce, "synth": "strata", "strata": rows}
    ctx = lanes("fst-cbdg", settings, lead=(3,), who=("a", "b", "c"), classes=4, width=5, text=text)
    labels = [np.repeat([0, 1, 3], [2, 1, 5]), np.array([2]), np.array([], np.int64)]
    drawn = stratified(labels, [2, 1, 1], ctx, 0, 0)
    assert drawn["z"].shape == (3, 4 * rows, 5)
    for i, (k, steps) in enumerate(zip(labels, [2, 1, 1], strict=True)):
        n = np.bincount(k, minlength=4)
        weight = zeros(4).scatter_add(0, drawn["k"][i], drawn["kw"][i]).numpy()
        assert weight == pytest.approx(
            n / max(n.sum(), 1) if reduce == "mean" else n / steps, abs=1e-15
        )


def test_strata_without_noise_are_the_exact_rows_where_a_step_has_them_all():
    settings = set_to("sigma=0.0 batch=200 gamma=0.3")
    exact, strata = (go("fst-cbdg", {**settings, "synth": s}) for s in ("exact", "strata"))
    assert server_gap(exact, strata) < 1e-12
    assert exact.fidelity == "exact"
    assert strata.fidelity == "approx"


READINGS = [
    "",
    "logit_scale=8.0",
    "tsamp_scope=batch sigma=0.4",
    "tsamp_scope=iteration",
    "tsamp_scope=iteration tsamp_reduce=joint lambda=0.7 logit_scale=3.0",
    "tsamp_reduce=joint lambda=0.7",
    "tsamp_reduce=joint lambda=0.7 ablation=tsamp_only",
    "tsamp_reduce=joint ablation=bias_only",
    "tsamp_scope=iteration tsamp_reduce=mean",
    "tsamp_reduce=mean",
]


@pytest.mark.parametrize("settings", READINGS)
def test_one_client_is_algorithm_1(settings):
    # An independent reference of one round of one client: eqs 2-8 in numpy, with the engine's draws.
    data, clients = federation(sizes=(40,))
    reading = set_to(settings)
    how = {"batch": 16, "lr": 0.1, "gamma": 0.2, **reading}
    out = go_all("fst-cbdg", how, data, clients, rounds=1)
    s = reading.get("logit_scale", 1.0)
    lam = reading.get("lambda", 1.0)
    sigma = reading.get("sigma", 11**-0.5)
    scope = reading.get("tsamp_scope", "client")
    reduce = reading.get("tsamp_reduce", "sum")
    x = data.x[clients[0].train, 0].numpy()
    T = data.text.numpy()
    W = T.copy()
    b = np.zeros(6)
    vW = np.zeros_like(T)
    vb = np.zeros(6)

    def f(rows):
        return scipy.special.softmax(s * (rows @ W.T + b), axis=1)

    def lacking(labels):  # eq 7: the class of every synthetic row
        m = np.bincount(labels.argmax(1), minlength=6)
        return np.repeat(np.arange(6), np.round(1.2 * m.max()).astype(int) - m)

    q = f(x)  # W = T, b = 0: eq 2
    deal = lacking(q)
    generator(0, "deal", 0, "client-0", 0).shuffle(deal)
    order = generator(0, "batch", 0, "client-0", 0).permutation(40)
    ctx = lanes("fst-cbdg", {}, text=data.text, who=("client-0",))
    draws = type(ctx.rng)(0, 0, ("client-0",), 0, torch.float64, torch.device("cpu"))
    for t in range(3):
        i = order[16 * t : 16 * t + 16]
        p = f(x[i])
        q[i] = 0.9 * q[i] + 0.1 * p
        part = {
            "client": deal[t * len(deal) // 3 : (t + 1) * len(deal) // 3],
            "batch": lacking(q[i]),
            "iteration": lacking(q),
        }[scope]
        z = T[part] + draws.normal("synth", [len(part)], 11, 0, t).numpy() * sigma
        B = len(i)
        R = len(part)
        real, fake = {
            "mean": (1 / B, lam / R),
            "sum": (1 / B, lam),
            "joint": (1 / (B + lam * R), lam / (B + lam * R)),
        }[reduce]
        real = 0.0 if reading.get("ablation") == "tsamp_only" else real
        du = s * real * (p - q[i])
        dz = s * fake * (f(z) - np.eye(6)[part])
        gW = du.T @ x[i] + dz.T @ z + 1e-5 * W
        gW = 0 * gW if reading.get("ablation") == "bias_only" else gW
        gb = du.sum(0) + dz.sum(0) + 1e-5 * b
        vW = 0.9 * vW + gW
        vb = 0.9 * vb + gb
        W = W - 0.1 * vW
        b = b - 0.1 * vb
    assert far(out.server["W"], W) < 1e-11
    assert far(out.server["b"], b) < 1e-11
    assert far(out.states[0]["rows/q"], q) < 1e-11


def leaning(seed):
    """Eight clients whose features all lean to one side, so that zero-shot predicts some classes too often."""
    g = torch.Generator().manual_seed(seed)
    y = torch.arange(1200) % 10
    text = torch.randn(10, 64, generator=g, dtype=torch.float64)
    text = normalize(text - text.mean(0), dim=-1)
    lean = torch.randn(64, generator=g, dtype=torch.float64)
    noise = torch.randn(1200, 64, generator=g, dtype=torch.float64)
    x = normalize(text[y] + lean + noise / 2, dim=-1)
    data = Data(x=x.unsqueeze(1), y=y, classes=10, text=text, widths=(64,), domain=y * 0)
    test = np.arange(800, 1200)
    rows = np.array_split(np.arange(800), 8)
    return data, [TinyClient(f"client-{i}", train, test) for i, train in enumerate(rows)]


def test_centred_zero_shot_adds_a_bias_to_each_class():
    """``feat_post=center`` needs one sum of each client, and a common lean of all images does no harm any more."""
    data, clients = leaning(0)
    train = rows_trained(clients)
    x = normalize(data.x[:, 0].double(), dim=-1)
    sums = sum(x[c.train].sum(0) for c in clients)
    bias = -(sums / len(train)) @ data.text.T
    expected = (x @ data.text.T + bias).argmax(-1)
    rows = prepare_features([data.x.float().numpy()], "center", train)[0]
    out = go_all("clip-zs", "feat_post=center", replace(data, x=rows.double()), clients)
    assert torch.equal(out.predict(rows.double()), expected)
    plain = go_all("clip-zs", None, data, clients).records[-1].accuracy
    assert out.records[-1].accuracy > plain + 0.1


@pytest.mark.parametrize("ridge", [0.0, 0.5])
def test_soft_means_are_cosines_of_whitened_rows_and_class_means(ridge):
    data, clients = leaning(1)
    out = go_all("soft-means", {"scale": 5.0, "ridge": ridge}, data, clients)
    x = data.x[rows_trained(clients), 0].numpy()
    q = scipy.special.softmax(5.0 * x @ data.text.numpy().T, axis=1)
    apart = x - x.mean(0)
    sigma = apart.T @ apart / len(x)
    whiten = np.linalg.cholesky(sigma + ridge * np.trace(sigma) / 64 * np.eye(64))
    mean = np.linalg.solve(whiten, (q.T @ apart / q.sum(0)[:, None]).T).T
    rows = np.linalg.solve(whiten, apart.T).T
    scores = data.x[rows_trained(clients), 0] @ out.server["W"].mT + out.server["b"]
    cosines = 1 - scipy.spatial.distance.cdist(rows, mean, "cosine")
    assert far(scores, np.linalg.norm(rows, axis=1, keepdims=True) * cosines) < 1e-9


def test_soft_means_without_own_means_cannot_tell_domains_from_classes():
    data, clients = leaning(0)
    shift = 2 * normalize(normal(8, 64), dim=-1)
    x = data.x.clone()
    for client, moved in zip(clients, shift, strict=True):
        # Each client also has test rows of its domain.
        x[client.train] += moved
    moved = replace(data, x=x)
    clients = [TinyClient(c.name, c.train[:80], c.train[80:]) for c in clients]
    found = [go_all("soft-means", {"own_mean": own}, moved, clients) for own in (False, True)]
    assert found[1].accuracy > found[0].accuracy + 0.1
    one = go_all("soft-means", {"own_mean": True}, data, clients[:1])
    rows = normalize(data.x - data.x[clients[0].train].mean(0), dim=-1)
    same = go_all("soft-means", None, replace(data, x=rows), clients[:1])
    assert gap(one.server["W"], same.server["W"]) < 1e-12


def test_soft_means_gain_where_unlabelled_rows_show_the_classes():
    for seed in range(3):
        data, clients = leaning(seed)
        soft = go_all("soft-means", None, data, clients)
        assert soft.traffic.totals()["up"] > 0
        centred = go_all("clip-zs", "feat_post=center", data, clients).records[-1].accuracy
        assert soft.records[-1].accuracy > centred


def test_the_default_takes_one_mean_and_the_paper_its_sum():
    """D-51, D-84: with the printed sum, hundreds of synthetic rows outweigh the images, which can undo zero-shot."""
    method = METHODS["fst-cbdg"]
    assert method.usual == ("tsamp_reduce",)
    assert method.resolve()["tsamp_reduce"] == "joint"
    assert method.resolve("paper")["tsamp_reduce"] == "sum"
    gains = {"joint": [], "sum": []}
    for seed in range(3):
        data, clients = leaning(seed)
        zero_shot = go_all("clip-zs", None, data, clients).records[-1].accuracy
        for reduce, found in gains.items():
            out = go_all("fst-cbdg", {"tsamp_reduce": reduce}, data, clients, rounds=10)
            found.append(out.records[-1].accuracy - zero_shot)
    assert min(gains["joint"]) > 0.02
    assert min(gains["sum"]) < -0.02


def test_the_server_only_ablation_hears_nothing_from_clients():
    data, clients = federation()
    out = go("fst-cbdg", "ablation=tsamp_central lr=0.1")
    assert out.traffic.totals()["up"] == 0
    assert gap(out.server["W"], data.text) > 1e-6
    other = go_all("fst-cbdg", "ablation=tsamp_central lr=0.1", data, clients[:3])
    assert server_gap(out, other) == 0.0


def test_the_bias_alone_is_trained_and_sent():
    data, clients = leaning(0)
    out = go_all("fst-cbdg", "ablation=bias_only", data, clients, rounds=2)
    assert out.traffic.totals()["up"] == 2 * len(clients) * 10
    assert torch.equal(out.server["W"], data.text)
    assert float(out.server["b"].abs().min()) > 0


def test_self_training_is_watched():
    data, clients = federation()
    seen = go_all("fst-cbdg", "ablation=ist_only wd=0.0", eval_every=3).records[-1].diagnostics
    # a fixed point: the soft labels stay those of eq 2
    q = torch.softmax(data.x[:, 0] @ data.text.T, -1)
    rows = rows_trained(clients)
    assert seen["pseudo_accuracy"] == pytest.approx(
        float((q.argmax(-1) == data.y)[rows].double().mean())
    )
    assert seen["entropy_bits"] == pytest.approx(float(entropy_bits(q[rows]).mean()))
    assert seen["drift"] < 1e-12
