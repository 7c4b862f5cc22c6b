"""Parts of the engine: switches, features, metrics, batches, draws, execution choice."""

import numpy as np
import pytest
import torch
from federation import federation, gap, go, server_gap
from hypothesis import given, settings
from hypothesis import strategies as st
from method_calls import lanes
from prepared_rows import prepared
from refusal import refused, store_error
from setting_lines import set_to
from sklearn.metrics import f1_score
from text_tables import rows_of

from fedcache.errors import FedcacheError
from fedcache.federate.engine import client_data, local_training
from fedcache.federate.engine.client_data import FEAT_POSTS, Data, prepare_features, stack_clients
from fedcache.federate.engine.context import drawn_views
from fedcache.federate.engine.local_training import batch_sizes
from fedcache.federate.engine.outcome import fairness, macro_f1
from fedcache.federate.engine.run import choose
from fedcache.federate.execution.grid_batch import POOLED
from fedcache.federate.execution.memory_estimate import ExecutionPlan, Load, forecast
from fedcache.federate.methods import METHODS
from fedcache.federate.trust.pipeline import UploadPool


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
    ("settings", "named"),
    [
        ("lrr=1", "'lr'"),
        ("momentum=1.5", "from 0 to 1"),
        ("batch=2.5", "an integer"),
        ("opt=sdg", "adam | sgd"),
    ],
)
def test_an_illegal_setting_is_refused(settings, named):
    refused(lambda: METHODS["fedavg"].resolve("paper", set_to(settings)), named)


def test_a_text_start_needs_text_and_a_linear_head():
    data, clients = federation()
    without = Data(data.x, data.y, data.classes)
    store_error(lambda: go("fedavg", "head=linear init=text", without, clients))
    refused(lambda: go("fedavg", "init=text"), "head=mlp")
    start = go("fedavg", "head=linear epochs=0", rounds=1).server
    assert gap(start["W"], data.text) < 1e-15  # auto: a linear head on features with text


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


@pytest.mark.parametrize(
    ("n", "paper_", "plain"), [(1, [], [1]), (65, [32, 33], [32, 32, 1]), (34, [32, 2], [32, 2])]
)
def test_a_batch_of_one_row_joins_the_one_before_where_there_is_batchnorm(n, paper_, plain):
    # Table 7 of FedPCL has BatchNorm; a linear head has none, with and without the switch.
    for words, expected in (({}, paper_), ({"bn": False}, plain), ({"head": "linear"}, plain)):
        assert batch_sizes(n, METHODS["fedavg"].resolve("paper", words)) == expected
    assert batch_sizes(n, METHODS["fedntd"].resolve("paper", {"batch": 32})) == plain


def test_large_clients_are_gathered_step_by_step(monkeypatch):
    settings = set_to("head=linear opt=sgd batch=16")
    at_once = go("fedavg", settings, execution="batched")
    monkeypatch.setattr("fedcache.federate.engine.local_training.GATHER_BYTES", 0)
    assert server_gap(at_once, go("fedavg", settings, execution="batched")) == 0.0


def test_pairs_of_views_differ():
    data, clients = federation(views=4)
    ctx = lanes("fedpcl", {}, lead=(9,), who=[c.name for c in clients])
    rows = stack_clients(data.x, data.y, [c.train for c in clients], 1)
    a, b = drawn_views(rows, ctx, 0, 2)
    real = rows.mask() > 0
    assert (a != b)[real].all()
    assert set(a[real].tolist()) == set(b[real].tolist()) == {1, 2, 3}
    for stored, shown in ((2, (1, 0)), (1, (0, 0))):
        few = stack_clients(data.x[:, :stored], data.y, [clients[0].train], 0)
        assert drawn_views(few, ctx, 0, 2) == shown


def test_pooling_is_weighted_uniform_summed_or_stacked():
    pool = UploadPool({"": "mean", "u": "uniform", "s": "sum", "k": "stack"}, 3)
    # as they come; stacks are in client order
    for client, value, weight in ((7, 4.0, 3.0), (2, 1.0, 1.0)):
        pool.add(dict.fromkeys("ausk", torch.tensor([value])), weight, client)
    # mean (1 * 1 + 3 * 4) / 4 = 3.25, uniform 2.5, sum 5, stack [1, 4]
    found = {n: t.flatten().tolist() for n, t in pool.done().items()}
    assert found == {"a": [3.25], "u": [2.5], "s": [5.0], "k": [1.0, 4.0]}


def test_pooling_is_in_float64():
    pool = UploadPool({"": "mean"}, 2)
    for value in [1e8, *[1.0] * 1000]:
        pool.add({"a": torch.tensor([value])}, 1.0, 0)
    assert float(pool.done()["a"]) == pytest.approx((1e8 + 1000) / 1001, rel=1e-7)


@pytest.mark.parametrize(("points", "matrices"), [(1, 4), (9, 4 + POOLED + 1)])
def test_the_forecast_counts_the_matrices_of_a_closed_form(points, matrices):
    # a client's D x D sum, their total, and two copies for the solver; a grid also keeps sums and one decomposition
    load = Load(1000, 5, width=64, points=points)
    execution = ExecutionPlan("sequential", 1)
    closed, model = (
        forecast(load, execution, opt="sgd", stacked=False, closed=c).server for c in (True, False)
    )
    assert closed - model == matrices * 64 * 64 * 8


@pytest.mark.parametrize(("opt", "copies"), [("sgd", 4), ("adam", 5)])
def test_the_forecast_counts_what_an_optimiser_keeps_of_each_client_at_once(opt, copies):
    # weights, gradient, a temporary; momentum of sgd, two moments of Adam
    def working(head_bytes, chunk):
        return forecast(
            Load(head_bytes, 9, width=64), ExecutionPlan("batched", chunk), opt=opt, stacked=False
        ).working

    assert working(1000, 7) - working(0, 7) == copies * 7 * 1000


CHOICES = rows_of(
    """
    adam |    41_000 |                        | batched
    adam | 2_200_000 |                        | sequential
    sgd  |   535_000 |                        | batched
    sgd  |    41_000 | few=50                 | gram
    sgd  |    41_000 | few=50 participants=24 | batched
    adam |    41_000 | few=50                 | batched
    sgd  |    41_000 | few=50 views=4         | batched
    sgd  |    41_000 | few=50 points=240      | gram
    """
)
"""An optimiser, bytes of a head, what differs from 100 clients of 600 rows of width 1,024, and the execution.

41,000 bytes are a linear head of 10 classes; three heads of 2,200,000 fill what a chunk may. 600 rows are more than
half of 1,024 features, and products of 50 take less room than their features. With 24 participants, matrices of three
clients in four are for nothing.
"""


@pytest.mark.parametrize(("opt", "head_bytes", "load", "expected"), CHOICES)
def test_an_execution_follows_bytes_and_optimiser(opt, head_bytes, load, expected):
    fedavg = METHODS["fedavg"]
    given = {"participants": 100, "width": 1024, "few": 600, **set_to(load)}
    rows = np.full(100, given.pop("few"))
    size = int(head_bytes)
    plan = choose(fedavg, fedavg.resolve("paper", {"opt": opt}), Load(size, 100, 10, rows, **given))
    assert plan.name == expected
    assert plan.name != "batched" or plan.chunk * size * 4 <= 32 << 20


def test_fairness_by_hand():
    # 40 clients at 1, 2, .. 40 %: worst 10 % = mean of 1..4, 20 % of 1..8, 40 % of 1..16, best 10 % of 37..40.
    f = fairness(np.arange(1, 41)[::-1] / 100)
    got = [f[k] for k in ("mean", "worst10", "worst20", "worst40", "best10")]
    assert got == pytest.approx([0.205, 0.025, 0.045, 0.085, 0.385])
    # T-X1, uniform variance
    assert f["var_pp2"] == f["std_pp"] ** 2 == pytest.approx((40**2 - 1) / 12)
    assert np.isnan(fairness(np.array([0.5, np.nan, 0.7]))["worst10"])
    assert fairness(np.array([0.5, np.nan, 0.7]))["mean"] == pytest.approx(0.6)


def test_macro_f1_is_scikit_learns():
    g = np.random.default_rng(0)
    y = g.integers(0, 5, 200)
    p = g.integers(0, 5, 200)
    assert macro_f1(p, y, 5) == pytest.approx(f1_score(y, p, average="macro"))
    few = np.array([0, 0, 3, 3, 3])  # class 4 is predicted and never there; 1 and 2 are neither
    other = np.array([0, 4, 3, 3, 4])
    assert macro_f1(other, few, 7) == pytest.approx(
        f1_score(few, other, average="macro", labels=np.unique(few))
    )
    assert macro_f1(other, few, 7) == pytest.approx((2 / 3 + 4 / 5) / 2)
    assert np.isnan(macro_f1(np.empty(0, np.int64), np.empty(0, np.int64), 7))


def test_features_are_prepared_as_asked():
    g = np.random.default_rng(0)
    a = g.standard_normal((6, 2, 3)).astype(np.float16)
    b = 5 + g.standard_normal((6, 2, 4)).astype(np.float32)
    a[4] = np.nan  # a quarantined image
    train = np.array([0, 1, 3])
    b[[2, 4, 5]] = 1e6  # rows that standardising never looks at
    for post in FEAT_POSTS:
        found = prepare_features([a, b], post, train)[0].numpy()
        assert np.array_equal(found, prepared([a, b], post, train), equal_nan=True), post
    first = prepare_features([a, b[:, :1]], "none", views=1)[0].numpy()
    assert np.array_equal(first, prepared([a, b], "none", train)[:, :1], equal_nan=True)
    constant, _ = prepare_features([np.full((6, 1, 2), 3.0)], "standardize", train)
    assert not constant.any()


@pytest.mark.parametrize(
    ("views", "post"), [([1], "l3"), ([1, 2], "none"), ([1], "center"), ([1], "standardize")]
)
def test_features_that_cannot_be_prepared(views, post):
    arrays = [np.zeros((2, count, 3)) for count in views]
    with pytest.raises(FedcacheError):
        prepare_features(arrays, post)


@pytest.mark.parametrize("opt", ["sgd", "adam"])
def test_a_private_kernel_of_torch_that_is_not_the_step_written_out_is_not_used(opt, monkeypatch):
    settings = f"opt={opt} lr=0.05"
    assert local_training.fused_kernels_work()
    fused = go("fedavg", settings, execution="sequential").server
    local_training.fused_kernels_work.cache_clear()
    if opt == "adam":
        monkeypatch.delattr(torch, "_fused_adam_")  # renamed
    else:
        monkeypatch.setattr(torch, "_fused_sgd_", lambda *_args, **_kwargs: None)
    try:
        assert not local_training.fused_kernels_work()
        assert gap(fused, go("fedavg", settings, execution="sequential").server) < 1e-6
    finally:
        local_training.fused_kernels_work.cache_clear()


def test_features_beyond_the_memory_budget_are_in_a_file_of_the_scratch_folder(
    tmp_path, monkeypatch
):
    opened = []
    temporary = client_data.tempfile.TemporaryFile
    monkeypatch.setattr(
        client_data.tempfile, "TemporaryFile", lambda **how: opened.append(how) or temporary(**how)
    )
    monkeypatch.setattr(client_data, "memory_limit", lambda: 4 * 3 * 5)
    for width in (5, 6):
        client_data._allocate((3, width), tmp_path)[:] = 2.0
    assert opened == [{"dir": tmp_path}]
    assert list(tmp_path.iterdir()) == [], "it has no name"
