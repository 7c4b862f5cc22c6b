"""Facts of the prompt methods: promptfl, tpfl, atpfl, local-prompt, and the approximations on cached features."""

import math
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from federation import federation, fitted, gap, go, go_all, keeps, server_gap
from reference_steps import Tree, gradient
from refusal import refused
from setting_lines import chosen, set_to
from test_methods_prompt_steps import class_features
from torch.nn.functional import cross_entropy, normalize

from fedcache.federate.engine.client_data import stack_clients
from fedcache.federate.engine.context import ClientRng, Ctx, RunConstants
from fedcache.federate.methods import METHODS, atpfl, promptfl, tpfl
from fedcache.federate.methods.common import prompts
from fedcache.heads.prompt import border, canvas, l_aug, slots, square
from fedcache.testing.towers import SIDES, E, TinyTowers

LIVE = ("promptfl", "tpfl", "atpfl", "local-prompt")
FEW = set_to("n_ctx=2 batch=16 epochs=1")


NAMES = tuple(f"class {c}" for c in range(6))


def context(
    name, settings=None, *, names=NAMES, towers=None, image=SIDES, round_=0, dtype=torch.float64
):
    """A context without leading axes, with tiny towers."""
    hp = METHODS[name].resolve("paper", chosen(settings))
    towers = towers or TinyTowers(11, dtype)
    env = RunConstants(
        6, 11, 1, 3, None, dtype, torch.device("cpu"), names=names, image=image, towers=towers
    )
    return Ctx(
        (), hp, env, ClientRng(0, round_, ("a",), 0, dtype, torch.device("cpu")), (0,), round_
    )


def one_client(name, dtype=torch.float64):
    """One client who has every training row, and the data as the method needs it."""
    data, clients = federation(sizes=(20,), per_client=6, dtype=dtype)
    return fitted(METHODS[name], data), clients


# Prompts of texts.


def test_vectors_stand_before_around_or_after_the_name():
    # START=0, a name of 3 tokens at 1..3, END at 4, padding 5..9; three vectors are numbers 10, 11, 12.
    want = {
        "end": [0, 10, 11, 12, 1, 2, 3, 4, 5, 6],
        "middle": [0, 10, 1, 2, 3, 11, 12, 4, 5, 6],
        "front": [0, 1, 2, 3, 10, 11, 12, 4, 5, 6],
    }
    for position, row in want.items():
        index, end = slots(torch.tensor([4, 2]), 3, 10, position)
        assert index[0].tolist() == row
        assert end.tolist() == [7, 5]
        assert sorted(index[1].tolist())[-3:] == [10, 11, 12]  # a shorter name beside it
        assert index[1, 5] == 2
    assert slots(torch.tensor([2]), 3, 10, "middle")[0].tolist() == [
        [0, 10, 1, 11, 12, 2, 3, 4, 5, 6]
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_words_of_a_template_and_no_step_are_zero_shot(dtype):  # T-T1
    data, clients = one_client("promptfl", dtype)
    text = data.towers.text.encode(*data.towers.text.embed([f"it is {n}!" for n in data.names]))
    zero = go("clip-zs", {}, replace(data, text=text), clients, dtype=dtype)
    out = go("promptfl", "ctx_init=words epochs=0", data, clients, dtype=dtype)
    assert out.server["ctx"].shape == (6, E)  # "it is " has six letters
    assert torch.equal(out.predict(data.x), zero.predict(data.x))
    ctx = context("promptfl", "ctx_init=words", dtype=dtype, towers=data.towers, names=data.names)
    assert gap(promptfl.deploy({"ctx": out.server["ctx"]}, {}, None, ctx)["T"], text) < 1e-6


@pytest.mark.parametrize(
    "settings", [{}, {"csc": True, "ctx_pos": "middle"}, {"ctx_init": "words", "ctx_pos": "front"}]
)
def test_tpfl_without_a_visual_prompt_is_promptfl_on_live_features_bit_for_bit(settings):  # T-T2
    pixels, clients = one_client("tpfl", torch.float32)
    tower = pixels.towers.image
    live = tower.encode(tower.normalise(pixels.x.view(-1, *SIDES, 3)))
    features = replace(pixels, x=live[:, None], image=None)
    shared = {**FEW, **settings, "lr": 0.01, "epochs": 2}
    a = go("tpfl", {**shared, "vp_size": 0}, pixels, clients, dtype=torch.float32)
    b = go("promptfl", shared, features, clients, dtype=torch.float32)
    assert server_gap(a, b) == 0.0
    assert np.array_equal(a.evaluation.predictions, b.evaluation.predictions)
    still = go("tpfl", {**shared, "vp_size": 0, "lr": 0.0}, pixels, clients, dtype=torch.float32)
    assert server_gap(a, still) > 1e-3


def test_a_prompt_that_does_not_fit_names_the_class_and_the_numbers():
    ctx = context("promptfl", "n_ctx=16", names=("a", "cargo aircraft", "b", "c", "d", "e"))
    refused(lambda: prompts.check(ctx.hp, ctx), "cargo aircraft", "n_ctx=7")  # 1 + 7 + 15 + 1 = 24
    fits = {**ctx.hp, "n_ctx": 7}
    prompts.check(fits, replace(ctx, hp=fits))


def test_words_that_are_none_are_refused():
    towers = TinyTowers(11)
    towers.template = "{} it is"
    ctx = context("promptfl", "ctx_init=words", towers=towers)
    refused(lambda: prompts.check(ctx.hp, ctx), "ctx_init=words")


def test_the_rate_follows_a_cosine_over_rounds():
    def rate(t, **settings):
        return prompts.scheduled(context("promptfl", {"lr": 0.1, **settings}, round_=t)).hp["lr"]

    # Of the paper's twenty rounds: the first, a quarter, half, all, and beyond.
    wanted = [0.1, 0.1 * (1 + math.sqrt(0.5)) / 2, 0.05, 0.0, 0.0]
    assert [rate(t) for t in (0, 5, 10, 20, 30)] == pytest.approx(wanted)
    assert rate(1, sched_rounds=2) == pytest.approx(0.05)
    assert rate(7, sched_unit="none") == 0.1
    warm = [1e-5, 0.1 * (1 + math.cos(math.pi / 20)) / 2]
    assert [rate(t, warm_rounds=1) for t in (0, 1)] == pytest.approx(warm)


@pytest.mark.parametrize("name", [*LIVE, "tpfl-feat", "atpfl-feat"])
def test_the_schedule_reaches_the_optimiser(name):
    data, clients = federation(sizes=(9, 20))
    moved = []
    for rounds in (1, 2):
        settings = set_to("opt=sgd sched_rounds=1 lr=0.05 epochs=2")
        out = go_all(name, settings, data, clients, rounds=rounds)
        moved.append(
            out.server or {k: t for k, t in out.states[1].items() if not k.startswith("opt/")}
        )
    assert gap(*moved) < 1e-12  # a rate of zero in the second round


# Prompts on images.


def test_the_sizes_of_visual_prompts():  # T-V5
    assert len(border(224, 224, 30)) == 69_840
    assert len(square(224, 224, 30)) == 2_700
    for h, w, p in ((7, 5, 1), (7, 5, 2), (8, 8, 4), (6, 9, 0)):
        assert len(border(h, w, p)) == 6 * p * (h + w - 2 * p)
    assert [t.tolist() for t in square(4, 5, 2, 1, 3).view(3, 4)] == [
        [8, 9, 13, 14],
        [28, 29, 33, 34],
        [48, 49, 53, 54],
    ]
    assert border(3, 4, 1).view(3, 10)[0].tolist() == [0, 1, 2, 3, 4, 7, 8, 9, 10, 11]


def test_a_size_left_out_is_the_papers_in_proportion():
    for side, size in ((224, 30), (32, 4), (8, 1), (336, 45)):
        ctx = context("tpfl", image=(side, side))
        assert len(tpfl.init(ctx)["v"]) == 6 * size * (2 * side - 2 * size)


def test_a_random_patch_moves_and_its_draws_are_seeded():
    data, clients = one_client("tpfl")
    seen = []
    settings = set_to("n_ctx=2 epochs=1 vp_template=random_patch vp_size=2 batch=5 vp_init=randn")
    original = prompts.paint

    def spy(p, ctx, at=(0, 0)):
        seen.append(tuple(at))
        return original(p, ctx, at)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prompts, "paint", spy)
        go("tpfl", settings, data, clients, rounds=9)
        first, seen[:] = list(seen), []
        go("tpfl", settings, data, clients, rounds=9)
    assert seen == first
    assert set(first) == {(top, left) for top in range(3) for left in range(2)}  # 2 x 2 in 4 x 3


def test_a_visual_prompt_larger_than_the_image_is_refused():
    for template, size, most in (("padding", 2, 1), ("fixed_patch", 4, 3), ("random_patch", 4, 3)):
        ctx = context("tpfl", {**FEW, "vp_template": template, "vp_size": size})
        refused(partial(prompts.check, ctx.hp, ctx), template, f"vp_size={most} ")
        fits = context("tpfl", {**FEW, "vp_template": template, "vp_size": most})
        prompts.check(fits.hp, fits)


# The pull of ATPFL.


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"mu_aug": 4.0, "gamma_aug": 0.1},
        {"mu_aug": 4.0, "vp_size": 0},
        set_to("vp_template=fixed_patch vp_size=1 vp_init=randn"),
    ],
)
def test_a_step_of_atpfl_is_a_step_of_eq_5(settings):
    data, clients = one_client("atpfl")
    settings = (
        set_to("n_ctx=2 batch=64 opt=sgd momentum=0.0 lr=1e-3 sched_unit=none epochs=1") | settings
    )
    ctx = context("atpfl", settings, towers=data.towers, names=data.names)
    g = np.random.default_rng(3)
    down = {
        k: t + 0.1 * torch.from_numpy(g.standard_normal(t.shape)) for k, t in tpfl.init(ctx).items()
    }
    prev = {k: t + 0.3 * torch.from_numpy(g.standard_normal(t.shape)) for k, t in down.items()}
    rows = stack_clients(data.x, data.y, [clients[0].train], 0)
    state, up = atpfl.fit(down, {f"prev/{k}": t for k, t in prev.items()}, rows, ctx)
    x = data.x[clients[0].train, 0]
    y = data.y[clients[0].train]
    places = square(*SIDES, 1) if "vp_template" in settings else border(*SIDES, 1)

    def features(p):
        pixels = data.towers.image.normalise(x.view(-1, *SIDES, 3))
        if "v" in p:
            pixels = pixels + canvas(p["v"], places, *SIDES)
        return data.towers.image.encode(pixels), class_features(data, p["ctx"])

    (z_g, t_g), (z_p, t_p) = features(down), features(prev)
    mu = float(ctx.number("mu_aug"))
    G = settings.get("gamma_aug", 0.01)  # eq 2 has 1/100, and eq 4 the same Gamma

    def pull(a, b, c):
        near = torch.exp((a * b).sum(-1) / G)
        return -torch.log(near / (near + torch.exp((a * c).sum(-1) / G))).mean()

    def objective(p):
        z, t = features(p)
        return cross_entropy(100 * z @ t.T, y) + mu * (pull(t, t_g, t_p) + pull(z, z_g, z_p))

    assert gap(up, Tree(down) - 1e-3 * gradient(objective, down)) < 1e-12
    # z_prev of its next participation
    assert gap(state, {f"prev/{k}": t for k, t in up.items()}) == 0.0


# Who sends what, and who is scored on what.


@pytest.mark.parametrize("name", ["promptfl", "tpfl"])
def test_results_say_how_far_prompts_moved(name):
    data, clients = federation(sizes=(12, 20))
    settings = {**FEW, "lr": 0.02, "sched_unit": "none"}
    begun = go_all(name, {**settings, "epochs": 0}, data, clients, rounds=2)
    out = go_all(name, settings, data, clients, rounds=2)
    # Averages of equal prompts are those prompts up to the rounding of their weights.
    assert max(begun.records[-1].diagnostics.values()) < 1e-15
    moved = {k: float((out.server[k] - begun.server[k]).norm()) for k in out.server}
    said = {"ctx": "context_moved", "v": "visual_moved"}
    assert out.records[-1].diagnostics == pytest.approx({said[k]: far for k, far in moved.items()})


def test_local_prompts_are_each_clients_own_and_scored_everywhere():
    data, clients = federation()
    settings = {**FEW, "lr": 0.05, "sched_unit": "none"}
    out = go_all("local-prompt", settings)
    alone = go(
        "local-prompt",
        settings,
        data,
        [clients[3], replace(clients[5], train=clients[5].train[:1])],
    )
    assert gap(out.states[3], alone.states[0]) == 0.0  # the others change nothing
    assert out.protocol == "everywhere"
    assert len(out.evaluation.predictions) == 9 * 54
    assert out.accuracy == pytest.approx(out.client_accuracy.mean())
    solo = go_all("tpfl", settings, data, [clients[3]])
    assert gap({k: out.states[3][k] for k in ("ctx", "v")}, solo.server) < 1e-12


# The approximations on cached features.


def test_without_a_step_the_approximation_is_zero_shot():
    data, _ = federation()
    zero = go("clip-zs")
    for name in ("tpfl-feat", "atpfl-feat"):
        assert torch.equal(go(name, "epochs=0").predict(data.x), zero.predict(data.x))


@pytest.mark.parametrize("csc", [False, True])
def test_a_step_of_the_approximation_by_torch(csc):
    data, clients = federation(sizes=(20, 12), per_client=6)
    settings = {
        **set_to("batch=64 opt=sgd momentum=0.0 lr=0.01 mu_aug=3.0 gamma_aug=0.2 a=0.7 scale=20.0"),
        **set_to("epochs=1 sched_unit=none"),
        "csc": csc,
    }
    saved = []
    go_all("atpfl-feat", settings, data, clients, rounds=2, on_round=keeps(saved))
    first, second = (after.tensors for after in saved)
    down, prev = (
        {k: first[f"{who}/{k}"] for k in ("u", "rho")} for who in ("server", "client/1/prev")
    )
    x = data.x[clients[1].train, 0]
    y = data.y[clients[1].train]

    def features(q):
        return normalize(x + q["u"], dim=-1), normalize(data.text + 0.7 * q["rho"], dim=-1)

    leaf = {k: t.clone().requires_grad_() for k, t in down.items()}
    (z, t), (z_g, t_g), (z_p, t_p) = features(leaf), features(down), features(prev)
    pull = l_aug(z, z_g, z_p, 0.2).mean() + l_aug(t, t_g, t_p, 0.2).mean()
    value = cross_entropy(20.0 * z @ t.T, y) + 3.0 * pull
    assert abs(float(pull.detach()) / 2 - math.log(2.0)) > 1e-6
    grads = torch.autograd.grad(value, list(leaf.values()))
    for (k, d), g in zip(down.items(), grads, strict=True):
        assert gap(second[f"client/1/prev/{k}"], d - 0.01 * g) < 1e-12
