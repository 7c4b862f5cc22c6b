"""Facts of the methods that train by gradient: solo, fedavg, fedprox, fedproto, fedpcl, central."""

import math

import numpy as np
import pytest
import torch
from federation import (
    federation,
    fitted,
    gap,
    go,
    go_all,
    rows_trained,
    run,
    server_gap,
    small,
    start_of,
)
from float64 import doubles, even, eye, normal, ones, zeros
from method_calls import lanes, model_of, single
from methods_tried import tried
from reference_steps import mean_of
from scipy.special import logsumexp
from setting_lines import set_to
from torch.nn.functional import batch_norm, cross_entropy, normalize

from fedcache.federate.engine.context import generator
from fedcache.federate.methods import METHODS, fedpcl, fedproto, fedprox
from fedcache.federate.methods.central import lbfgs
from fedcache.federate.methods.common import model


def test_fedavg_has_the_layers_of_table_7_and_averages_running_statistics():
    # An independent reference: torch's layers and Adam; of 33 rows the last batch of one joins the one before it.
    data, clients = federation(sizes=(20, 33, 7))
    settings = set_to("dim=5 batch=16 lr=0.02 wd=1e-3")
    start = start_of("fedavg", settings, data, clients)
    names = {
        "P.W": "0.weight",
        "P.b": "0.bias",
        "P.gain": "2.weight",
        "P.shift": "2.bias",
        "P.mean": "2.running_mean",
        "P.var": "2.running_var",
        "Q.W": "3.weight",
        "Q.b": "3.bias",
    }
    w = {names[k]: t for k, t in start.items()}
    for r in range(2):
        ends = []
        for c in clients:
            layers = (
                torch.nn.Linear(11, 5),
                torch.nn.ReLU(),
                torch.nn.BatchNorm1d(5),
                torch.nn.Linear(5, 6),
            )
            net = torch.nn.Sequential(*layers).double()
            net.load_state_dict(w, strict=False)
            solver = torch.optim.Adam(net.parameters(), lr=0.02, weight_decay=1e-3)
            order = c.train[generator(0, "batch", r, c.name, 0).permutation(len(c.train))]
            cuts = {20: [16], 33: [16], 7: []}[len(order)]
            for part in np.split(order, cuts):
                rows = torch.from_numpy(part)
                solver.zero_grad()
                cross_entropy(net(data.x[rows, 0]), data.y[rows]).backward()
                solver.step()
            ends.append(net.state_dict())
        w = mean_of([{k: e[k] for k in names.values()} for e in ends], [20, 33, 7])
    out = go_all("fedavg", settings, data, clients, rounds=2)
    # fused Adam corrects its bias in float32
    assert gap(out.server, {k: w[n] for k, n in names.items()}) < 1e-7
    net.load_state_dict(w, strict=False)
    net.eval()
    right = [
        (net(data.x[c.test, 0]).argmax(-1) == data.y[c.test]).double().mean().item()
        for c in clients
    ]
    assert out.client_accuracy.tolist() == right


def test_solo_does_not_know_the_other_clients():  # T-S1
    data, clients = federation()
    together = go_all("solo", "dim=5")
    for i in (1, 5):
        alone = go_all("solo", "dim=5", data, [clients[i]])
        assert gap(alone.states[0], together.states[i]) < 1e-12


@pytest.mark.parametrize(("half", "pull"), [(True, 0.5), (False, 1.0)])
def test_the_proximal_term_is_the_squared_distance(half, pull):
    # T-P3 and D-31: value mu/2 |w - w_g|^2 (or mu |w - w_g|^2).
    ctx = lanes("fedprox", {"head": "linear", "mu": 3.0, "prox_half": half})
    down = {"W": normal(6, 11), "b": zeros(6)}
    p = {"W": down["W"] + 0.1, "b": down["b"] - 0.2}
    batch = {"x": normal(4, 11, seed=1), "y": torch.arange(4), "w": even(4)}
    extra = fedprox.loss(p, batch, down, ctx)[0] - model.ce_loss(p, batch, down, ctx)[0]
    assert float(extra) == pytest.approx(3.0 * pull * (66 * 0.01 + 6 * 0.04))


def test_the_distance_to_prototypes():  # T-O2, T-O3
    bar = normal(4, 256)
    y = torch.tensor([0, 3, 1])
    w = even(3)
    has = torch.tensor([True, True, False, True])
    assert float(fedproto.proto_dist(bar[y], y, w, bar, has, "mse")) == 0.0
    z = normal(3, 256, seed=1)
    sq = fedproto.proto_dist(z, y, w, bar, has, "sq_l2")
    assert float(sq) == pytest.approx(float(((z - bar[y]) ** 2).sum(1).mean()))
    assert float(fedproto.proto_dist(z, y, w, bar, has, "mse")) == pytest.approx(float(sq) / 256)
    absent = fedproto.proto_dist(z, y, w, bar, torch.tensor([True, True, False, False]), "sq_l2")
    assert float(absent) == pytest.approx(float(((z - bar[y]) ** 2).sum(1)[[0, 2]].sum() / 3))
    # The paper's distance pulls, and the released one hardly does (D-73).
    assert METHODS["fedproto"].resolve("paper")["protodist"] == "sq_l2"
    assert METHODS["fedproto"].resolve("official")["protodist"] == "mse"


def pcl_loss(settings, *, owned=None, seed=0):
    """FedPCL's loss on a fixed batch; returns what it needs for a reference too."""
    m = 3
    C = 4
    P = 5
    B = 6
    g = torch.Generator().manual_seed(seed)
    ctx = lanes("fedpcl", {"dim": P, **settings}, classes=C, clients=m, width=7)
    owned = torch.ones(m, C, dtype=torch.bool) if owned is None else owned
    counts = torch.randint(1, 9, (m, C), generator=g).double() * owned
    sets = normalize(normal(m, C, P, seed=seed), dim=-1) * owned[..., None]
    down = fedpcl.broadcast({"sets": sets, "counts": counts}, ctx)
    p = {"P.W": normal(P, 7, seed=seed + 1), "P.b": zeros(P)}
    p |= {
        "P.gain": 0.5 + torch.rand(P, generator=g, dtype=torch.float64),
        "P.shift": p["P.W"][:, 0],
        "P.mean": zeros(P),
        "P.var": ones(P),
    }
    x = normal(B, 7, seed=seed + 2)
    batch = {"x": x, "y": torch.randint(0, C, (B,), generator=g), "w": even(B)}
    if settings.get("views") == "2":
        batch["x2"] = x + 0.1 * normal(B, 7, seed=seed + 3)
    value = float(fedpcl.loss(p, batch, fedpcl.candidates(down, ctx.hp), ctx)[0])
    return value, p, batch, sets, counts


def reference_pcl(p, batch, sets, counts):
    """Table 7's layers, unit length, and eqs 5-10 in numpy (eq 6 less its 1/|O_j|)."""
    z = torch.relu(batch["x"] @ p["P.W"].T + p["P.b"])
    z = batch_norm(z, None, None, p["P.gain"], p["P.shift"], training=True)
    z = normalize(z, dim=1).numpy()
    n = counts.numpy()[..., None]
    y = batch["y"].numpy()
    available = n[..., 0].sum(0) > 0
    bar = (n * sets.numpy()).sum(0) / np.maximum(n.sum(0), 1.0)
    padded = np.where(n > 0, sets.numpy(), bar)

    def contrast(of):
        s = z @ of.T / 0.07
        others = available & (np.arange(len(available)) != y[:, None])
        return logsumexp(s, 1, b=others) - s[np.arange(len(y)), y]

    terms = contrast(bar) + np.mean([contrast(own) for own in padded], 0)
    return terms[available[y]].sum() / max(available[y].sum(), 1)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_fedpcl_is_equations_5_to_10(seed):
    owned = torch.rand(3, 4, generator=torch.Generator().manual_seed(seed)) < 0.6
    value, p, batch, sets, counts = pcl_loss({}, owned=owned, seed=seed)
    if int(owned.any(0).sum()) < 2:
        assert value == 0.0
    else:
        assert value == pytest.approx(reference_pcl(p, batch, sets, counts))


def test_hot_released_fedpcl_counts_embeddings():  # T-L9: m log(2B - 1), summed over clients
    settings = set_to('tau=1e9 objective=proto_anchor terms=p lp_reduce=sum views="2"')
    assert pcl_loss(settings)[0] == pytest.approx(3 * math.log(11), abs=1e-6)


def test_the_first_round_only_makes_prototypes():  # D-10
    def models(settings):
        states = go("fedpcl", {"dim": 5, **settings}, rounds=1).states
        return [model_of(states[c]) for c in sorted(states)]

    def gaps(a, b):
        return [gap(*pair) for pair in zip(a, b, strict=True)]

    start = models({"epochs": 0})
    assert max(gaps(start, models({}))) == 0.0
    assert min(gaps(start, models({"warmup": "zero_loss", "wd": 0.1}))) > 0.0
    # With BatchNorm its running statistics would move without a step.
    quiet = set_to("warmup=zero_loss wd=0.0 bn=false")
    assert max(gaps(models({**quiet, "epochs": 0}), models(quiet))) == 0.0


def test_stale_sets_are_kept():
    saved = []
    out = go(
        "fedpcl",
        "dim=5",
        on_round=lambda _r, _m, _t, snap: saved.append(snap().tensors["server/sets"]),
    )
    for record, old, new in zip(out.records[1:], saved[:-1], saved[1:], strict=True):
        absent = [c for c in range(9) if c not in record.clients]
        assert torch.equal(old[absent], new[absent])
        assert not torch.equal(old[list(record.clients)], new[list(record.clients)])


@pytest.mark.parametrize("official", tried(METHODS))
def test_every_method_runs_as_its_released_code(official):
    data, clients = federation(sizes=(40, 64, 33), dtype=torch.float32)
    method = METHODS[official]
    sizes = small(official)
    if "queue" in {h.name for h in method.hparams}:
        sizes["queue"] = 8
    out = run(method, method.resolve("official", sizes), fitted(method, data), clients, rounds=3)
    first = int("public" in method.needs and out.protocol != "global")
    assert np.isfinite(out.client_accuracy[first:]).all()


@pytest.mark.parametrize("settings", [{}, {"probe": "sgd", "epochs": 2}], ids=["lbfgs", "sgd"])
def test_central_does_not_know_the_partition(settings):
    data, clients = federation()
    a = go("central", settings)
    assert server_gap(a, go("central", settings, data, single(clients))) == 0.0
    assert a.traffic.totals()["up"] == a.traffic.totals()["down"] == 0
    assert len(a.client_accuracy) == 9


def test_the_lbfgs_probe_is_scikit_learns():
    from sklearn.linear_model import LogisticRegression

    data, clients = federation()
    rows = rows_trained(clients)
    x = data.x[rows, 0]
    y = data.y[rows]
    l2 = 1e-2
    W, b = lbfgs(x, y, data.classes, l2, 500)
    # scikit-learn minimises C sum CE + |W|^2/2, so C = 1 / (l2 N).
    other = LogisticRegression(C=1 / (l2 * len(rows)), tol=1e-10, max_iter=5000).fit(
        x.numpy(), y.numpy()
    )
    assert np.abs(W.numpy() - other.coef_).max() < 1e-5
    shift = b.numpy() - other.intercept_  # softmax does not see a common shift of the biases
    assert np.abs(shift - shift.mean()).max() < 1e-5


@pytest.mark.parametrize(("kind", "variance"), [("gaussian", 1.0), ("laplace", 2.0)])
def test_noise_has_the_mean_and_power_it_says(kind, variance):  # T-X3
    ctx = lanes("fedpcl", {"noise": kind, "p": 0.2, "s": 0.3})
    x = torch.full((400, 500), 2.0, dtype=torch.float64)
    noisy = fedpcl.perturb(x, fedpcl.draw([400], 500, ctx), ctx)
    assert float(noisy.mean()) == pytest.approx(0.8 * 2.0, rel=0.03)
    assert float(noisy.var()) == pytest.approx(variance * 0.3**2, rel=0.03)


@pytest.mark.parametrize("noise_on", ["proto", "features"])
def test_no_noise_is_no_change(noise_on):  # T-X2
    plain = go("fedpcl", "dim=5").server
    assert (
        gap(go("fedpcl", {"noise_on": noise_on, "p": 0.0, "s": 0.0, "dim": 5}).server, plain)
        < 1e-12
    )
    assert gap(go("fedpcl", {"noise_on": noise_on, "dim": 5}).server, plain) > 0.0


def test_prototype_noise_is_on_what_leaves():  # D-20
    for local_infer in (False, True):
        out = go_all(
            "fedpcl", {"noise_on": "proto", "noise_local_infer": local_infer, "dim": 5}, rounds=1
        )
        same = [
            torch.equal(out.server["sets"][c], out.states[c]["proto"])
            for c in out.records[0].clients
        ]
        assert all(same) if local_infer else not any(same)


@pytest.mark.parametrize("rule", ["local", "local_padded", "global"])
def test_which_prototypes_classify(rule):  # D-12
    ctx = lanes(
        "fedpcl", {"dim": 2, "infer_proto": rule, "z_norm": "none", "bn": False}, classes=3, width=2
    )
    e = eye(2)
    down = {"bar": torch.stack([-e[0], -e[0], e[0]]), "has": torch.tensor([True, True, True])}
    state = {"P.W": e, "P.b": zeros(2), "proto": torch.stack([e[1], 0.5 * e[0], 0 * e[0]])}
    x = 4 * e[:1]  # z = (4, 0): own scores 0 and 2; global scores -4, -4 and 4
    for count, expected in (
        ([1.0, 2.0, 0.0], {"local": 1, "local_padded": 2, "global": 2}),
        ([0.0, 0.0, 0.0], {}),
    ):
        state["count"] = doubles(count)
        # a client that has no prototypes yet uses the global ones
        assert int(fedpcl.predict(down, state, None, x, ctx).argmax(-1)) == expected.get(rule, 2)
