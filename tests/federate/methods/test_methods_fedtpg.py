"""fedtpg: a network that makes context vectors of class names, against torch's own layers."""

from dataclasses import replace

import pytest
import torch
from federation import federation, fitted, gap, go, go_all, server_gap, start_of
from refusal import refused
from setting_lines import set_to
from test_methods_prompt import context, one_client
from torch import nn
from torch.nn.functional import cross_entropy

from fedcache.federate.methods import METHODS, fedtpg
from fedcache.federate.methods.common import prompts
from fedcache.testing.towers import E

FEW = {"n_ctx": 2, "batch": 16}


def network(settings=None):
    """(context of the run, first parameters, texts of six names)."""
    ctx = context("fedtpg", settings)
    return ctx, fedtpg.init(ctx), fedtpg.texts_of_names(ctx)


def block(p, name, width):
    """torch's layers with the parameters of one block: (norm of queries, of keys, attention, feed-forward)."""

    def loaded(layer, part, weight, bias):
        layer.double().load_state_dict(
            {"weight": p[f"{name}.{part}.{weight}"], "bias": p[f"{name}.{part}.{bias}"]}
        )
        return layer

    queries = loaded(nn.LayerNorm(E), "query", "gain", "shift")
    wide = loaded(nn.LayerNorm(E), "wide", "gain", "shift")
    first = loaded(nn.Linear(E, 8 * E), "A", "W", "b")
    last = loaded(nn.Linear(4 * E, E), "B", "W", "b")
    keys = None
    weights = {f"{k.lower()}_proj_weight": p[f"{name}.{k}.W"] for k in "QKV"}
    if f"{name}.key.gain" in p:
        keys = loaded(nn.LayerNorm(width), "key", "gain", "shift")
    else:  # of equal widths, in one matrix
        weights = {"in_proj_weight": torch.cat(list(weights.values()))}
    attention = nn.MultiheadAttention(E, 4, kdim=width, vdim=width).double()
    attention.load_state_dict(
        {
            **weights,
            "in_proj_bias": torch.cat([p[f"{name}.{k}.b"] for k in "QKV"]),
            "out_proj.weight": p[f"{name}.O.W"],
            "out_proj.bias": p[f"{name}.O.b"],
        }
    )

    def feed_forward(x):
        a, g = first(wide(x)).chunk(2, -1)
        return last(a * nn.functional.gelu(g))

    return queries, keys, attention, feed_forward


@pytest.mark.parametrize("depth", [0, 2])
def test_the_network_is_torchs_layers(depth):
    ctx, p, texts = network({"depth": depth})
    g = torch.Generator().manual_seed(1)
    p = {k: t + 0.3 * torch.randn(t.shape, generator=g, dtype=t.dtype) for k, t in p.items()}
    queries, keys, attention, feed_forward = block(p, "cross", 11)
    x = attention(queries(p["queries"]), keys(texts), keys(texts))[
        0
    ]  # nothing is added to the first attention
    v = x + feed_forward(x)
    for i in range(depth):
        queries, _, attention, feed_forward = block(p, f"self{i}", E)
        rows = queries(v)
        x = v + attention(rows, rows, rows)[0]
        v = x + feed_forward(x)
    assert gap(fedtpg.context(p, texts, ctx), v.detach()) < 1e-12


def test_the_first_numbers_are_drawn_as_torch_draws_them():
    _, p, _ = network({"depth": 1})
    assert p["queries"].shape == (4, E)
    assert 0.005 < float(p["queries"].std()) < 0.04
    # One matrix [3 E, E] of equal widths: sqrt(6 / 4 E); else sqrt(6 / (E + D)).
    for name, bound in (
        ("self0.Q", 6 / (4 * E)),
        ("self0.K", 6 / (4 * E)),
        ("cross.Q", 6 / (2 * E)),
        ("cross.V", 6 / (E + 11)),
        ("cross.O", 1 / E),
        ("cross.A", 1 / E),
        ("cross.B", 1 / (4 * E)),
    ):
        assert 0.8 * bound**0.5 < float(p[f"{name}.W"].abs().max()) <= bound**0.5
    assert all(not p[f"cross.{k}.b"].any() for k in "QKVO")


def test_the_trained_network_is_torchs_sgd_on_the_clients_own_names():
    data, clients = federation(sizes=(40,))
    data = fitted(METHODS["fedtpg"], data)
    settings = set_to("n_ctx=2 batch=64 lr=0.05 sched_unit=none")
    out = go_all("fedtpg", settings, data, clients, rounds=3)
    start = start_of("fedtpg", settings, data, clients)
    p = {k: t.clone().requires_grad_() for k, t in start.items()}
    solver = torch.optim.SGD(list(p.values()), lr=0.05, momentum=0.9, weight_decay=1e-5)
    x = data.x[clients[0].train, 0]
    y = data.y[clients[0].train]
    own = y.unique()
    assert len(own) == 3
    ctx = context("fedtpg", settings, towers=data.towers, names=tuple(data.names[i] for i in own))
    names = prompts.class_names(ctx, 2)
    for _ in range(3):  # one batch each; the client keeps its momentum
        T = prompts.text_features(fedtpg.context(p, fedtpg.texts_of_names(ctx), ctx), names, ctx)
        solver.zero_grad()
        cross_entropy(100 * x @ T.T, torch.searchsorted(own, y)).backward()
        solver.step()
    assert gap(out.server, {k: t.detach() for k, t in p.items()}) < 1e-9
    assert gap(out.server, start) > 1e-3
    everybody = go_all("fedtpg", {**settings, "names": "all"}, data, clients, rounds=3)
    assert server_gap(everybody, out) > 1e-3


def test_a_network_of_constants_is_promptfls_prompt():
    data, _ = one_client("fedtpg")
    ctx = context("fedtpg", FEW, towers=data.towers, names=data.names)
    p = fedtpg.init(ctx)
    v = torch.linspace(-1, 1, E, dtype=torch.float64)
    p |= {k: torch.zeros_like(p[k]) for k in ("cross.B.W", "cross.B.b", "cross.O.W")} | {
        "cross.O.b": v
    }
    learnt = METHODS["promptfl"].deploy(
        {"ctx": v.expand(2, E)}, {}, None, replace(ctx, hp={**ctx.hp, "csc": False})
    )
    assert gap(fedtpg.deploy(p, {}, None, ctx)["T"], learnt["T"]) < 1e-12


def test_at_clips_width_it_has_the_released_number_of_parameters():
    # 512 numbers: queries, three norms, four maps of 512 x 512 with bias, 512 -> 4,096 and 2,048 -> 512.
    p = fedtpg.init_block(lambda shape: torch.zeros(shape), 512, 512, "cross")
    want = 3 * 1024 + 4 * (512 * 512 + 512) + (4096 * 512 + 4096) + (512 * 2048 + 512)
    assert sum(t.numel() for t in p.values()) == want == 4_204_032


def test_heads_that_do_not_divide_a_token_are_refused():
    refused(lambda: go("fedtpg", "heads=3", *federation()), "heads=3", "heads=4")
