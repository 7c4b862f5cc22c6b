"""``evaluate --adapt``: each adaptation against its paper's released code, written again, and what is refused."""

import numpy as np
import pytest
import torch
from arrays import rows_ingested
from command import data_of, fedcache, ok
from failing_command import must_fail, must_fail_store
from homes import made_once
from made_path import extracted, run_of
from refusal import refused
from scipy.special import log_softmax, softmax
from torch.nn.functional import normalize, one_hot

import fedcache as fc
from fedcache import Store
from fedcache.heads.losses import MASKED
from fedcache.models.adapt import ADAPTATIONS, ScaledHead, resolve

C = 5
D = 7


def head_of(seed=0, *, unit=False):
    """A head, and 60 rows that it separates badly."""
    rng = np.random.default_rng(seed)
    W = rng.normal(size=(C, D))
    b = 0.1 * rng.normal(size=C)
    x = W[rng.integers(0, C, 60)] + 1.5 * rng.normal(size=(60, D))
    if unit:
        x /= np.linalg.norm(x, axis=-1, keepdims=True)
        W = 100 * W / np.linalg.norm(W, axis=-1, keepdims=True)
        W *= 0.06
        b *= 0
    return ScaledHead(W, b, np.ones(C, bool)), x


def found(name, head, x, batch, **given):
    batches = (x[start : start + batch] for start in range(0, len(x), batch))
    return np.concatenate(list(ADAPTATIONS[name](head, batches, resolve(name, given))))


def entropies(logits):
    """``softmax_entropy`` of the released codes."""
    return -(logits.softmax(1) * logits.log_softmax(1)).sum(1)


def released_t3a(head, x, batch, most, T=1.0):
    """``T3A.forward`` of github.com/matsuolab/T3A, with the loop over classes of ``select_supports``."""
    W = torch.from_numpy(head.W)
    b = torch.from_numpy(head.b)
    supports = W
    labels = torch.eye(C, dtype=torch.float64)
    ent = entropies((W @ W.T + b) / T)
    assert torch.equal((W @ W.T + b).argmax(1), torch.arange(C)), "W_c is of class c there too"
    predicted = []
    for z in torch.split(torch.from_numpy(x), batch):
        p = z @ W.T + b
        supports = torch.cat([supports, z])
        labels = torch.cat([labels, one_hot(p.argmax(1), C).double()])
        ent = torch.cat([ent, entropies(p / T)])
        y_hat = labels.argmax(1)
        everything = torch.arange(len(ent))
        indices = torch.cat(
            [everything[y_hat == c][torch.sort(ent[y_hat == c])[1]][:most] for c in range(C)]
        )
        supports = supports[indices]
        labels = labels[indices]
        ent = ent[indices]
        weights = normalize(supports, dim=1).T @ labels
        predicted.append((z @ normalize(weights, dim=0)).argmax(1))
    return torch.cat(predicted).numpy()


@pytest.mark.parametrize(("batch", "most"), [(1, 1), (7, 3), (60, 20), (13, None)])
def test_t3a_predicts_as_the_released_code(batch, most):
    head, x = head_of()
    expected = released_t3a(head, x, batch, most)
    assert (found("t3a", head, x, batch, supports=most) == expected).all()
    assert (expected != head.logits(x).argmax(-1)).any(), "the rows adapt the head"


def test_t3a_divides_each_score_by_the_temperature_once():
    head, x = head_of()
    T = 0.2
    scaled = ScaledHead(head.W / T, head.b / T, head.live, T)
    expected = released_t3a(head, x, 7, 2, T)
    assert (found("t3a", scaled, x, 7, supports=2) == expected).all()
    assert (expected != found("t3a", head, x, 7, supports=2)).any(), (
        "the temperature chooses supports"
    )


def test_supports_of_hand_worked_rows():
    """With one support, class 1 replaces its weight by the surer first row, and class 0 keeps its weight."""
    head = ScaledHead(np.eye(2), np.zeros(2), np.ones(2, bool))
    x = np.array([[3.0, 4.2], [0.9, 0.89]])
    # Entropies: 0.541 and 0.693 of the rows, 0.582 of the weights. Class 1 becomes (0.581, 0.814), so the second row
    # has the scores 0.9 and 1.247.
    assert found("t3a", head, x, 1, supports=1).tolist() == [1, 1]
    # With two supports, the classes become (0.925, 0.380) and (0.305, 0.952): the scores are 1.171 and 1.122.
    assert found("t3a", head, x, 1, supports=2).tolist() == [1, 0]
    assert head.logits(x).argmax(-1).tolist() == [1, 0]


def test_a_class_that_is_never_predicted_stays_so():
    head, x = head_of()
    b = head.b.copy()
    b[2] = MASKED
    W = head.W.copy()
    W[2] = 0
    masked = ScaledHead(W, b, np.arange(C) != 2)
    for name in ("t3a", "tent"):
        predicted = found(name, masked, -np.abs(x), 6)
        assert 2 not in predicted
        assert len(np.unique(predicted)) > 1


@pytest.mark.parametrize("batch", [1, 9, 60])
def test_tent_takes_the_steps_of_adam_on_the_gradient_of_the_entropy(batch):
    """The gradient is worked out: dH/ds_c = -p_c (log p_c + H)."""
    head, x = head_of()
    lr = 0.05
    theta = np.concatenate([np.ones(D), np.zeros(D)])
    first = np.zeros(2 * D)
    second = np.zeros(2 * D)
    r = np.sqrt(np.mean(x[:batch] ** 2))
    expected = []
    for t, start in enumerate(range(0, len(x), batch), 1):
        z = x[start : start + batch]
        s = (z * theta[:D] + r * theta[D:]) @ head.W.T + head.b
        expected.append(s.argmax(-1))
        p = softmax(s, -1)
        log_p = log_softmax(s, -1)
        H = -(p * log_p).sum(-1, keepdims=True)
        to_input = (-p * (log_p + H)) @ head.W / len(z)
        gradient = np.concatenate([(to_input * z).sum(0), r * to_input.sum(0)])
        first = 0.9 * first + 0.1 * gradient
        second = 0.999 * second + 0.001 * gradient**2
        step = (first / (1 - 0.9**t)) / (np.sqrt(second / (1 - 0.999**t)) + 1e-8)
        theta -= lr * step
    assert (found("tent", head, x, batch, lr=lr) == np.concatenate(expected)).all()
    if batch < 60:
        assert (np.concatenate(expected) != head.logits(x).argmax(-1)).any()


def released_tda(head, x, settings):
    """``run_test_tda`` of github.com/kdiAAA/TDA, in float64 instead of float16."""
    W = torch.from_numpy(head.W)
    caches = {"positive": {}, "negative": {}}

    def update(cache, pred, item, capacity):
        if pred not in cache:
            cache[pred] = [item]
            return
        if len(cache[pred]) < capacity:
            cache[pred].append(item)
        elif item[1] < cache[pred][-1][1]:
            cache[pred][-1] = item
        cache[pred].sort(key=lambda one: one[1])

    predicted = []
    for row in torch.from_numpy(x):
        z = row[None]
        logits = z @ W.T
        loss = float(entropies(logits))
        prob = logits.softmax(1)
        pred = int(logits.argmax())
        update(caches["positive"], pred, (z, loss), settings["positive_size"])
        if settings["entropy_low"] < loss / np.log2(C) < settings["entropy_high"]:
            update(caches["negative"], pred, (z, loss, prob), settings["negative_size"])
        for sign, name in ((1, "positive"), (-1, "negative")):
            items = [(c, item) for c, items in caches[name].items() for item in items]
            if not items:
                continue
            keys = torch.cat([item[0] for _, item in items])
            values = one_hot(torch.tensor([c for c, _ in items]), C).double()
            if name == "negative":
                probs = torch.cat([item[2] for _, item in items])
                values = ((probs > settings["mask_low"]) & (probs < settings["mask_high"])).double()
            beta = settings[f"{name}_beta"]
            affinity = (-(beta - beta * (z @ keys.T))).exp()
            logits = logits + sign * settings[f"{name}_alpha"] * (affinity @ values)
        predicted.append(int(logits.argmax()))
    return np.array(predicted)


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"positive_alpha": 0.0, "negative_alpha": 2.0, "entropy_high": 0.6},
        {"positive_size": 1, "negative_size": 1, "negative_alpha": 1.5, "mask_low": 0.2},
    ],
)
def test_tda_predicts_as_the_released_code(given):
    head, x = head_of(unit=True)
    expected = released_tda(head, x, resolve("tda", given))
    assert (found("tda", head, x, 11, **given) == expected).all()
    assert (expected != head.logits(x).argmax(-1)).any(), "the rows adapt the head"


@made_once
def store(place):
    """Rows of four classes near their corners, sorted by class, and runs on them."""
    y = np.arange(4).repeat(30)
    x = np.eye(4, 6)[y] + 0.5 * np.random.default_rng(0).normal(size=(120, 6))
    path = rows_ingested(place, x, y, np.tile([0, 0, 1], 40))
    words = f"--by class --store {path}"
    ok(f"train --method fed3r {words} --seeds 0,1")
    ok(f"train --method fedpcl --rounds 1 {words}")
    ok(f"train --method solo --set head=linear --rounds 1 --save-clients all {words}")
    ok(f"train --method fedavg --rounds 1 {words}")
    return path


def scaled_head(model, width, temperature):
    """The head of a loaded model from its scores of 0 and of the unit vectors."""
    b, *rows = np.asarray(model.scores(np.eye(width + 1, width, -1, dtype=np.float32)), float)
    b = b / temperature
    return ScaledHead((np.array(rows) / temperature - b).T, b, np.ones(len(b), bool))


@pytest.mark.parametrize("name", ["t3a", "tent"])
@pytest.mark.parametrize("order", ["stored", "shuffled"])
def test_the_figures_are_those_of_the_head_on_the_rows_in_this_order(store, name, order, tmp_path):
    X, y = Store.open(store).Xy(split="test")
    model = fc.load_model(run_of("fed3r"))
    head = scaled_head(model, 6, 0.3)
    taken = np.arange(len(X))
    if order == "shuffled":
        taken = np.random.default_rng(0).permutation(len(X))
    more = {}
    if name == "tent":
        more["lr"] = 0.3
    expected = found(name, head, model.embed(X)[taken], 6, **more) == y[taken]
    done = fc.evaluate(
        run_of("fed3r"),
        store=store,
        split="test",
        adapt=name,
        settings={"batch": 6, "order": order, **more},
        temperature=0.3,
        out=tmp_path / "e.csv",
    )
    told = done.adaptation
    assert told.adapted.right == expected.sum()
    assert told.plain == done.measures.all
    assert told.sorted_by_class == (order == "stored")
    assert told.to_dict()["fidelity"] == {"t3a": "exact", "tent": "approx"}[name]
    assert f"adaptation {name},40,{expected.sum()}" in (tmp_path / "e.csv").read_text()


def test_the_answer_names_order_batch_and_approximation(store):
    out = fedcache(f"evaluate {run_of('fed3r')} --store {store} --split test --adapt tent").out
    out = " ".join(out.split())
    assert "Test-time adaptation tent (an approximation of its paper): the accuracy is" in out
    assert "over 40 rows in stored order (sorted by class), 200 at a time." in out


def test_a_personal_model_and_a_file_of_embeddings(store, tmp_path):
    """Rows of a file give the figures of the same rows of the store."""
    X, y = Store.open(store).Xy(split="test")
    np.savez(tmp_path / "rows.npz", features=X, labels=y)
    words = f"evaluate {run_of('solo')} --client 1 --adapt t3a"
    (of_store,) = data_of(f"{words} --store {store} --split test")["runs"]
    (of_file,) = data_of(f"{words} --embeddings {tmp_path / 'rows.npz'}")["runs"]
    assert of_store["adaptation"] == of_file["adaptation"]
    assert of_store["adaptation"]["adapted"]["rows"] == 40


@pytest.mark.parametrize(
    ("method", "more", "said"),
    [
        ("fed3r", "t3a --client-prior counts", "cannot be combined"),
        ("fed3r", "t3a --coverage 0.8", "cannot be combined"),
        ("fed3r", "t3a --seed all", "a single seed, but this run has several seeds"),
        ("fed3r", "tda", "bias or rows of different lengths"),
        ("fed3r", "shot", "Known: t3a, tda, tent"),
        ("fed3r", "t3a --set lr=1", "setting of t3a"),
        ("fed3r", "t3a --set batch=0", "expected an integer of at least 1"),
        ("solo", "t3a", "models of all clients"),
        ("fedpcl", "t3a --client 1", "similarity to prototypes"),
        ("fedavg", "tent", "not linear in the features"),
    ],
)
def test_what_cannot_adapt_is_refused_by_name(store, method, more, said):
    must_fail(said, f"evaluate {run_of(method)} --store {store} --adapt {more}")


def test_settings_without_an_adaptation_are_refused(store):
    must_fail("which is not given", f"evaluate {run_of('fed3r')} --store {store} --set batch=2")
    refused(lambda: fc.evaluate(run_of("fed3r"), store=store, adapt="shot"), "shot")


def test_a_split_without_rows_has_its_usual_message(store):
    words = f"evaluate {run_of('fed3r')} --store {store} --split validation --adapt t3a"
    must_fail_store("validation", words)


GLYPHS = "--backbones glyph-clip --scheme iid --clients 2 --rounds 1"


@made_once
def texts(place):
    """A store of images with class texts, and models that start from these texts."""
    path = extracted(place, "glyph-clip", train=8, test=8, classes=5)
    for more in ("clip-zs --preset official", "gda --rounds 1"):
        ok(f"train --method {more} --store {path} {GLYPHS}")
    return path


def test_class_texts_adapt_with_caches(texts, tmp_path):
    """The figures of a zero-shot model; rows that are not unit vectors, and other heads are refused."""
    model = fc.load_model(run_of("clip-zs"))
    X, y = Store.open(texts).Xy(split="test")
    head = scaled_head(model, X.shape[1], 30.0)
    unit = X / np.linalg.norm(X, axis=-1, keepdims=True)
    expected = released_tda(head, unit.astype(float), resolve("tda", {"positive_alpha": 9.0})) == y
    words = (
        f"evaluate {run_of('clip-zs')} --store {texts} --split test --temperature 30 --adapt tda"
    )
    (told,) = data_of(f"{words} --set positive_alpha=9")["runs"]
    assert told["adaptation"]["adapted"]["right"] == expected.sum()
    assert told["adaptation"]["adapted"]["right"] != told["measures"]["right"]
    must_fail("cosines with class texts", words.replace(str(run_of("clip-zs")), str(run_of("gda"))))
