"""Parts of the engine: switches, features, metrics, batches, draws, execution choice."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from federation import federation, gap, go
from hypothesis import given, settings
from hypothesis import strategies as st
from method_calls import lanes

from fedcache.errors import Exit, FedcacheError
from fedcache.federate.engine import feature_post, optimiser
from fedcache.federate.engine.client_data import Data, stack_clients
from fedcache.federate.engine.context import ClientRng, dot, over
from fedcache.federate.engine.feature_post import prepare
from fedcache.federate.engine.local_training import batch_sizes, fold_batches, minibatches
from fedcache.federate.engine.outcome import fairness, macro_f1
from fedcache.federate.engine.views import drawn_views
from fedcache.federate.execution.choose import choose
from fedcache.federate.execution.grid_batch import POOLED
from fedcache.federate.execution.memory_estimate import ExecutionPlan, Load, forecast
from fedcache.federate.methods import METHODS, find_method
from fedcache.federate.trust.pipeline import UploadPool


def draws(*clients, axes=1, seed=0):
    return ClientRng(seed, 0, clients, axes, torch.float64, torch.device("cpu"))


@pytest.mark.parametrize("preset", ["paper", "official"])
def test_presets_are_legal_and_written_as_they_are_read(preset):
    for name, method in METHODS.items():
        hp = method.resolve(preset)
        assert method.resolve(preset, hp) == hp, name
        words = {h.name: h.show(hp[h.name]) for h in method.hparams}
        assert method.resolve("paper", words) == hp, name
        assert len(hp) == len(method.hparams), name
        assert all(h.help and h.legal() for h in method.hparams), name


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lrr": "1"}, "Did you mean 'lr'"),
        ({"lr": "fast"}, "expected a number of at least 0"),
        ({"lr": "-1"}, "expected a number of at least 0"),
        ({"lr": "nan"}, "'lr' is 'nan'"),
        ({"momentum": 1.5}, "from 0 to 1"),
        ({"batch": "2.5"}, "an integer of at least 1"),
        ({"batch": True}, "an integer"),
        ({"opt": "sdg"}, "adam | sgd"),
        ({"drop_last": "maybe"}, "true | false"),
    ],
)
def test_an_illegal_setting_is_refused(settings, message):
    with pytest.raises(FedcacheError) as info:
        METHODS["fedavg"].resolve("paper", settings)
    assert message in info.value.message
    assert info.value.code == Exit.USAGE
    assert info.value.hint


def test_words_become_typed_values():
    hp = METHODS["fedavg"].resolve("paper", {"lr": "1e-2", "batch": "64", "drop_last": "yes", "opt": "sgd"})
    assert (hp["lr"], hp["batch"], hp["drop_last"], hp["opt"]) == (0.01, 64, True, "sgd")
    assert METHODS["fst-cbdg"].resolve("paper", {"sigma": "auto"})["sigma"] is None
    assert METHODS["fst-cbdg"].resolve("paper", {"sigma": "0.1"})["sigma"] == 0.1


def test_unknown_names_are_guessed():
    with pytest.raises(FedcacheError, match="Did you mean 'fedavg'"):
        find_method("fedavgg")
    with pytest.raises(FedcacheError, match="Did you mean 'official'"):
        METHODS["solo"].resolve("oficial")
    assert find_method("fedpcl") is METHODS["fedpcl"]


def test_the_papers_settings():
    hp = METHODS["fst-cbdg"].resolve()
    wanted = {
        "beta": 0.9,
        "gamma": 0.0,
        "lambda": 1.0,
        "lr": 0.01,
        "momentum": 0.9,
        "wd": 1e-5,
        "batch": 50,
        "epochs": 1,
    }
    assert {k: hp[k] for k in wanted} == wanted
    assert (hp["agg"], hp["opt"], hp["feat_post"], hp["sigma"]) == ("uniform", "sgd", "l2", None)
    hp = METHODS["fedpcl"].resolve()
    wanted = {"lr": 1e-3, "wd": 1e-4, "batch": 32, "epochs": 1, "dim": 256, "tau": 0.07, "opt": "adam"}
    assert {k: hp[k] for k in wanted} == wanted
    official = METHODS["fedpcl"].resolve("official")
    assert (official["objective"], official["terms"], official["lp_reduce"]) == ("proto_anchor", "p", "sum")
    assert (official["views"], official["warmup"], official["infer_score"]) == ("2", "zero_loss", "mse")
    assert METHODS["fedavg"].resolve("official")["agg"] == "uniform"


def test_a_text_start_needs_text_and_a_linear_head():
    data, clients = federation()
    without = Data(data.x, data.y, data.classes)
    with pytest.raises(FedcacheError, match="have none") as info:
        go("fedavg", {"head": "linear", "init": "text"}, without, clients)
    assert info.value.code == Exit.STORE
    with pytest.raises(FedcacheError, match="head=mlp"):
        go("fedavg", {"init": "text"}, data, clients)
    start = go("fedavg", {"head": "linear", "epochs": 0}, data, clients, rounds=1).server
    assert gap(start["W"], data.text) < 1e-15  # auto: a linear head on features with text
    assert gap(go("fedavg", {"head": "linear", "epochs": 0}, without, clients, rounds=1).server["W"], data.text) > 0.01


def test_augmented_views_must_be_stored():
    with pytest.raises(FedcacheError, match="hold 1 view"):
        go("fst-cbdg", {"train_view": "aug"})
    data, clients = federation(views=3)
    assert go("fst-cbdg", {"train_view": "aug"}, data, clients).fidelity == "cached_views"
    assert go("fst-cbdg", {}, data, clients).fidelity == "exact"


def test_data_that_does_not_fit_is_refused():
    with pytest.raises(FedcacheError, match=r"text has shape \(3, 5\), expected \(3, 4\)"):
        Data(torch.zeros(2, 1, 4), torch.zeros(2, dtype=torch.int64), 3, torch.zeros(3, 5))


@given(st.integers(0, 200), st.integers(1, 40), st.booleans(), st.booleans())
@settings(max_examples=60)
def test_batches_hold_every_row_once(n, batch, drop, bn):
    sizes = batch_sizes(n, {"batch": batch, "drop_last": drop, "bn": bn})
    left_out = n % batch if drop else n if bn and n == 1 else 0
    if not (bn and batch == 1):
        assert sum(sizes) == n - left_out
    assert all(s == batch for s in sizes[:-1])
    if bn and batch > 1:
        assert 1 not in sizes


@pytest.mark.parametrize(("n", "paper_", "plain", "linear"), [
    (1, [], [1], [1]), (32, [32], [32], [32]), (33, [33], [32, 1], [32, 1]), (65, [32, 33], [32, 32, 1], [32, 32, 1]),
    (34, [32, 2], [32, 2], [32, 2]),
])  # fmt: skip
def test_a_batch_of_one_row_joins_the_one_before_where_there_is_batchnorm(n, paper_, plain, linear):
    # Table 7 of FedPCL has BatchNorm; a linear head has none, whatever the switch says.
    for words, expected in (({}, paper_), ({"bn": False}, plain), ({"head": "linear"}, linear)):
        assert batch_sizes(n, METHODS["fedavg"].resolve("paper", words)) == expected
    assert batch_sizes(n, METHODS["fedntd"].resolve("paper", {"batch": 32})) == linear


def test_minibatches_cover_every_lane_and_rest_in_order():
    data, clients = federation()
    group = sorted(clients, key=lambda c: -len(c.train))
    ctx = lanes("fedavg", {"batch": 16, "bn": False}, lead=(9,), who=[c.name for c in group])
    rows = stack_clients(data.x, data.y, [c.train for c in group], 1)
    seen = [[] for _ in group]
    alive = []
    for k, batch in minibatches(rows, ctx, 0):
        alive.append(k)
        assert torch.allclose(batch["w"].sum(-1), torch.ones(k, dtype=torch.float64))
        for i in range(k):
            real = batch["w"][i] > 0
            at = batch["i"][i][real]
            assert torch.equal(batch["x"][i][real], data.x[group[i].train, 0][at])
            assert torch.equal(batch["y"][i][real], data.y[group[i].train][at])
            seen[i] += at.tolist()
    assert alive == sorted(alive, reverse=True)
    assert [sorted(s) for s in seen] == [list(range(len(c.train))) for c in group]


@pytest.mark.parametrize(("dtype", "size"), [(torch.float64, 8), (torch.float32, 4), (torch.uint8, 1)])
def test_rows_may_be_gathered_at_once_up_to_the_budget(dtype, size):
    data = stack_clients(torch.zeros(9, 2, 5, dtype=dtype), torch.zeros(9, dtype=torch.int64), [np.arange(9)], 0)
    assert data.fits(6, 6 * 5 * size)  # one view of 6 rows of 5 features
    assert not data.fits(6, 6 * 5 * size - 1)


def test_large_clients_are_gathered_step_by_step(monkeypatch):
    settings = {"head": "linear", "opt": "sgd", "batch": 16}
    for execution in ("sequential", "batched"):
        at_once = go("fedavg", settings, execution=execution)
        monkeypatch.setattr("fedcache.federate.engine.local_training.GATHER_BYTES", 0)
        assert gap(at_once.server, go("fedavg", settings, execution=execution).server) == 0.0
        monkeypatch.undo()


def test_lanes_that_are_done_do_not_move():
    ctx = lanes("fedavg", {}, lead=(3,), who=("a", "b", "c"))
    carry = {"count": torch.zeros(3), "replaced": torch.zeros(3, 2)}

    def step(p, _batch, now):
        p["count"] += 1  # in place
        return {"replaced": p["replaced"] + now.lead[0]}

    done = fold_batches(carry, iter([(3, {}), (3, {}), (2, {}), (1, {})]), step, ctx)
    assert done["count"].tolist() == [4, 3, 2]
    assert done["replaced"][:, 0].tolist() == [3 + 3 + 2 + 1, 3 + 3 + 2, 3 + 3]


def test_pairs_of_views_differ():
    data, clients = federation(views=4)
    ctx = lanes("fedpcl", {}, lead=(9,), who=[c.name for c in clients])
    rows = stack_clients(data.x, data.y, [c.train for c in clients], 1)
    a, b = drawn_views(rows, ctx, 0, 2)
    real = rows.mask() > 0
    assert (a != b)[real].all()
    assert set(a[real].tolist()) == set(b[real].tolist()) == {1, 2, 3}
    assert drawn_views(stack_clients(data.x[:, :2], data.y, [clients[0].train], 0), ctx, 0, 2) == (1, 0)
    assert drawn_views(stack_clients(data.x[:, :1], data.y, [clients[0].train], 0), ctx, 0, 2) == (0, 0)


def test_pooling_is_weighted_uniform_summed_or_stacked():
    pool = UploadPool({"": "mean", "u": "uniform", "s": "sum", "k": "stack"}, 3)
    for client, value, weight in ((7, 4.0, 3.0), (2, 1.0, 1.0)):  # as they come; stacks are in client order
        pool.add({n: torch.tensor([value]) for n in ("a", "u", "s", "k")}, weight, client)
    # mean (1 * 1 + 3 * 4) / 4 = 3.25, uniform 2.5, sum 5, stack [1, 4]
    assert {n: t.flatten().tolist() for n, t in pool.done().items()} == {
        "a": [3.25],
        "u": [2.5],
        "s": [5.0],
        "k": [1.0, 4.0],
    }


def test_pooling_is_in_float64():
    pool = UploadPool({"": "mean"}, 2)
    for value in [1e8, *[1.0] * 1000]:
        pool.add({"a": torch.tensor([value])}, 1.0, 0)
    assert float(pool.done()["a"]) == pytest.approx((1e8 + 1000) / 1001, rel=1e-7)


@pytest.mark.parametrize("width", [3, 16, 25])
def test_a_draw_does_not_know_its_neighbours(width):
    together = draws("a", "b", "c").normal("synth", [5, 2, 40], width, 0, 7)
    for i, (name, n) in enumerate((("a", 5), ("b", 2), ("c", 40))):
        alone = draws(name, axes=0).normal("synth", [n], width, 0, 7)
        assert torch.equal(together[i, :n], alone)
        assert float(together[i, n:].abs().sum()) == 0.0
        assert torch.equal(draws(name, axes=0).normal("synth", [n + 9], width, 0, 7)[:n], alone)  # a prefix
    assert not torch.equal(together[0, :2], together[1, :2])


def test_streams_differ_by_purpose_round_client_and_key():
    def one(seed=0, purpose="batch", client="a", key=(0,)):
        return draws(client, axes=0, seed=seed).each(purpose, lambda g, _: g.permutation(50), *key).tolist()

    assert one() == one()
    assert all(one() != other for other in (one(seed=1), one(purpose="x"), one(client="b"), one(key=(1,))))


def test_shared_weights_are_shared_and_independent_ones_are_not():
    shared = draws("a", "b").uniform("init", independent=False)((2, 3))
    assert shared.shape == (1, 2, 3)
    own = draws("a", "b").uniform("init", independent=True)((2, 3))
    assert own.shape == (2, 2, 3)
    assert not torch.equal(own[0], own[1])
    assert torch.equal(draws("b", axes=0).uniform("init", independent=True)((2, 3)), own[1])
    assert float(own.abs().max()) <= 1.0


def test_numbers_are_shaped_by_their_lanes():
    h = torch.tensor([[2.0], [3.0]])
    assert over(h, torch.zeros(2, 3, 4, 5)).shape == (2, 1, 1, 1)
    assert over(0.5, torch.zeros(3)) == 0.5
    ctx = lanes("fedavg", {}, lead=(2, 3), who=("a", "b", "c"))
    a = torch.arange(24.0).view(2, 3, 4)
    assert torch.equal(dot(a, a, ctx), (a * a).sum(-1))


@pytest.mark.parametrize(("points", "matrices"), [(1, 4), (2, 4 + POOLED + 1), (9, 4 + POOLED + 1)])
def test_the_forecast_counts_the_matrices_of_a_closed_form(points, matrices):
    # a client's D x D sum, their total, and two copies for the solver; a grid also keeps sums and one decomposition
    load, execution = Load(1000, 5, width=64, points=points), ExecutionPlan("sequential", 1)
    closed, model = (forecast(load, execution, opt="sgd", stacked=False, closed=c).server for c in (True, False))
    assert closed - model == matrices * 64 * 64 * 8


@pytest.mark.parametrize(("opt", "copies"), [("sgd", 4), ("adam", 5)])
def test_the_forecast_counts_what_an_optimiser_keeps_of_each_client_at_once(opt, copies):
    # weights, gradient, a temporary; momentum of sgd, two moments of Adam
    def working(head_bytes, chunk):
        return forecast(Load(head_bytes, 9, width=64), ExecutionPlan("batched", chunk), opt=opt, stacked=False).working

    assert working(1000, 3) - working(0, 3) == copies * 3 * 1000
    assert working(1000, 7) - working(0, 7) == copies * 7 * 1000


def test_the_lift_follows_bytes_and_optimiser():
    fedavg, fed3r = METHODS["fedavg"], METHODS["fed3r"]
    sgd, adam = fedavg.resolve("paper", {"opt": "sgd"}), fedavg.resolve()

    def pick(method, hp, head_bytes, clients, *args, rows=(600,) * 100, **load):
        everybody = {"participants": len(rows), **load}
        return choose(method, hp, Load(head_bytes, clients, 10, np.array(rows), width=1024, **everybody), *args)

    assert pick(fedavg, adam, 41_000, 100).name == "batched"  # a linear head, C = 10
    assert pick(fedavg, adam, 535_000, 100).name == "batched"  # P and Q with Adam
    assert pick(fedavg, adam, 2_200_000, 100).name == "sequential"  # three of them fill what a chunk may
    projection = pick(fedavg, sgd, 535_000, 100)  # 600 rows are more than half of 1,024 features
    assert projection.name == "batched"
    assert projection.chunk == 8
    assert pick(fedavg, adam, 41_000, 100).chunk * 41_000 * 4 <= 8 << 20
    assert pick(fedavg, adam, 1_600_000, 100).chunk * 1_600_000 * 4 <= 32 << 20
    assert pick(fed3r, fed3r.resolve(), 41_000, 100).name == "sequential"
    assert pick(fedavg, sgd, 41_000, 1).name == "sequential"
    assert pick(fedavg, adam, 535_000, 100, "batched", 7).chunk == 7
    assert pick(fedavg, adam, 535_000, 5, "batched", 7).chunk == 5
    few = pick(fedavg, sgd, 41_000, 100, rows=(50,) * 100)
    assert few.name == "gram"
    rare = pick(fedavg, sgd, 41_000, 100, rows=(50,) * 100, participants=24)
    assert rare.name == "batched"  # the matrices of three clients in four would be for nothing
    assert pick(fedavg, sgd, 41_000, 100, rows=(50,) * 100, participants=25).name == "gram"
    assert pick(fedavg, adam, 41_000, 100, rows=(50,) * 100).name == "batched"
    assert pick(fedavg, sgd, 41_000, 100, rows=(50,) * 100, views=4).name == "batched"
    assert (
        pick(fedavg, sgd, 41_000, 100, rows=(50,) * 40 + (600,) * 60).name == "batched"
    )  # most rows are with the large
    many = pick(fedavg, sgd, 41_000, 100, rows=(50,) * 100, points=240)
    assert (many.name, many.points) == ("gram", 240)
    large = pick(fedavg, adam, 535_000, 100, points=48)  # eight clients at once, and one point after another
    assert (large.name, large.chunk, large.points) == ("batched", 8, 1)
    assert pick(fedavg, adam, 41_000, 100, points=48).points == 48
    assert pick(fedavg, adam, 2_200_000, 100, points=48).name == "sequential"
    with pytest.raises(FedcacheError, match="chunk is 0"):
        pick(fedavg, sgd, 1, 1, "batched", 0)


def test_fairness_by_hand():
    # 40 clients at 1, 2, .. 40 %: worst 10 % = mean of 1..4, 20 % of 1..8, 40 % of 1..16, best 10 % of 37..40.
    f = fairness(np.arange(1, 41)[::-1] / 100)
    got = [f[k] for k in ("mean", "worst10", "worst20", "worst40", "best10")]
    assert got == pytest.approx([0.205, 0.025, 0.045, 0.085, 0.385])
    assert f["var_pp2"] == f["std_pp"] ** 2 == pytest.approx((40**2 - 1) / 12)  # T-X1, uniform variance
    assert np.isnan(fairness(np.array([0.5, np.nan, 0.7]))["worst10"])
    assert fairness(np.array([0.5, np.nan, 0.7]))["mean"] == pytest.approx(0.6)


def test_macro_f1_is_scikit_learns():
    from sklearn.metrics import f1_score

    g = np.random.default_rng(0)
    y, p = g.integers(0, 5, 200), g.integers(0, 5, 200)
    assert macro_f1(p, y, 5) == pytest.approx(f1_score(y, p, average="macro"))
    few = np.array([0, 0, 3, 3, 3])  # class 4 is predicted and never there; 1 and 2 are neither
    other = np.array([0, 4, 3, 3, 4])
    assert macro_f1(other, few, 7) == pytest.approx(f1_score(few, other, average="macro", labels=np.unique(few)))
    assert macro_f1(other, few, 7) == pytest.approx((2 / 3 + 4 / 5) / 2)
    assert macro_f1(np.array([0, 4, 3, 3, 4, 1]), np.array([*few, -1]), 7) == macro_f1(other, few, 7)
    assert np.isnan(macro_f1(np.empty(0, np.int64), np.empty(0, np.int64), 7))


def test_features_are_prepared_as_asked():
    g = np.random.default_rng(0)
    a, b = g.standard_normal((6, 2, 3)).astype(np.float16), 5 + g.standard_normal((6, 2, 4)).astype(np.float32)
    a[4] = np.nan  # a quarantined image
    plain = prepare([a, b], "none").numpy()
    assert plain.dtype == np.float32
    assert np.array_equal(plain[..., :3], a.astype(np.float32), equal_nan=True)
    assert np.array_equal(plain[..., 3:], b)
    first = prepare([a, b[:, :1]], "none", views=1).numpy()
    assert np.array_equal(first, plain[:, :1], equal_nan=True)
    ok = [0, 1, 2, 3, 5]
    l2 = prepare([a, b], "l2").numpy()[ok]
    assert np.allclose(np.linalg.norm(l2[..., :3], axis=-1), 1)
    assert np.allclose(np.linalg.norm(l2[..., 3:], axis=-1), 1)
    assert np.allclose(np.linalg.norm(prepare([a, b], "l2_concat").numpy()[ok], axis=-1), 1)
    sign = prepare([a, b], "sign").numpy()
    assert np.array_equal(sign[ok], (plain[ok] > 0).astype(np.float32))
    assert np.isnan(sign[4, :, :3]).all()
    train = np.array([0, 1, 3])
    scaled = prepare([a, b], "standardize", train).numpy()
    assert np.allclose(scaled[train, 0].mean(0), 0, atol=1e-5)
    assert np.allclose(scaled[train, 0].std(0), 1, atol=1e-5)


def test_standardising_never_looks_at_other_rows():
    g = np.random.default_rng(0)
    a = g.standard_normal((6, 1, 3)).astype(np.float32)
    train, other = np.array([0, 1, 3]), a.copy()
    other[[2, 4, 5]] = 1e6
    both = [prepare([x], "standardize", train).numpy()[train] for x in (a, other)]
    assert np.array_equal(*both)
    a[:, 0, 1] = 3.0
    assert np.array_equal(prepare([a], "standardize", train).numpy()[:, 0, 1], np.zeros(6))


@pytest.mark.parametrize(
    ("arrays", "post", "message"),
    [
        ([np.zeros((2, 1, 3))], "l3", "Did you mean"),
        ([np.zeros((2, 1, 3)), np.zeros((2, 2, 3))], "none", "different rows or views"),
        ([np.zeros((2, 1, 3))], "standardize", "needs training rows"),
    ],
)
def test_features_that_cannot_be_prepared(arrays, post, message):
    with pytest.raises(FedcacheError, match=message):
        prepare(arrays, post)


KERNELS = {
    "renamed": lambda patch, name: patch.delattr(torch, name),
    "with other arguments": lambda patch, name: patch.setattr(torch, name, lambda _params: None),
    "another step": lambda patch, name: patch.setattr(torch, name, lambda *_args, **_kwargs: None),
}


@pytest.mark.parametrize("change", KERNELS)
@pytest.mark.parametrize("opt", ["sgd", "adam"])
def test_a_private_kernel_of_torch_that_is_not_the_step_written_out_is_not_used(change, opt):
    assert optimiser.fused_kernels_work()
    fused = go("fedavg", {"opt": opt, "lr": 0.05}, execution="sequential")
    try:
        with pytest.MonkeyPatch.context() as patch:
            optimiser.fused_kernels_work.cache_clear()
            KERNELS[change](patch, f"_fused_{opt}_")
            assert not optimiser.fused_kernels_work()
            assert gap(fused.server, go("fedavg", {"opt": opt, "lr": 0.05}, execution="sequential").server) < 1e-6
    finally:
        optimiser.fused_kernels_work.cache_clear()


def test_features_beyond_the_memory_budget_are_in_a_file_of_the_scratch_folder(tmp_path, monkeypatch):
    opened, temporary = [], feature_post.tempfile.TemporaryFile
    monkeypatch.setattr(feature_post.tempfile, "TemporaryFile", lambda **how: opened.append(how) or temporary(**how))
    monkeypatch.setattr(feature_post, "memory_limit", lambda: 4 * 3 * 5)
    assert not isinstance(feature_post._room((3, 5), tmp_path).base, np.memmap)
    assert opened == []
    beyond = feature_post._room((3, 6), tmp_path)
    assert opened == [{"dir": tmp_path}]
    beyond[:] = 2.0
    assert float(beyond.sum()) == 36.0
    assert list(tmp_path.iterdir()) == [], "it has no name"
    assert feature_post._room((3, 6), None).shape == (3, 6)
    assert len(opened) == 1
