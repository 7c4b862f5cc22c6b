"""Statistics of any rows pass the checks of their kind; numbers that no rows can give do not."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from draws import FULL
from federation import federation, fitted, run, scaled, small, tiny
from float64 import doubles
from setting_lines import cases_of, set_to
from text_tables import rows_of

from fedcache.errors import Exit, FedcacheError
from fedcache.federate.engine.method import Statistic, UploadTensor
from fedcache.federate.methods import METHODS
from fedcache.federate.trust.statistic_checks import CHECKS, statistic_problem
from fedcache.heads.ridge import gram

SENDING = cases_of(
    """
    fed3r
    fed3r bias=true
    fed3r class_weight=local
    fed3r class_weight=local bias=true
    fed3r precision=float32
    fed3r precision=float32 bias=true
    fed3r rff_dim=16 rff_sigma=1.0 bias=true
    fed3r omega=1.0
    fed3r-prior
    fedcgs
    gda
    tofa
    afl
    afl gamma=1e-3
    afl gamma=0.0
    gh-ofl head=nb
    gh-ofl head=nb variance=pooled
    gh-ofl head=lda
    gh-ofl head=qda
    fedncm
    fedcof
    fedpft epochs=1
    fedpft epochs=1 cov=diag k_mix=2
    fedpft epochs=1 cov=full k_mix=3
    fedpft epochs=1 cov=full reg_covar=0.1
    ccvr head=linear
    ccvr dim=8 z_norm=l2
    fedproto epochs=1
    fedproto epochs=1 z_norm=l2
    fedpcl epochs=1
    fedpcl epochs=1 z_norm=l2
    fedpcl epochs=1 proto_norm=true
    fedpcl epochs=1 proto_norm=true noise_on=proto s=0.5
    fed-tip-proto
    fed-tip-proto min_rows=3
    """
)
"""Methods that send statistics of rows, with settings that change which."""

LISTED = {name for name, _ in SENDING}
SENDING += [
    (name, {})
    for name, method in METHODS.items()
    if method.one_shot and method.uploads is not None and name not in LISTED
]


def unit(x):
    return x / x.norm(dim=-1, keepdim=True).clamp(min=1e-12)


ROWS = {
    "features": lambda x, _y: x,
    "large means": lambda x, _y: x + 300.0,
    "large means apart": lambda x, y: x + 1e4 * (1.0 + y[:, None, None]),
    "small": lambda x, _y: 1e-6 * x,
    "large": lambda x, _y: 1e4 * x,
    "scales apart": lambda x, _y: x * torch.logspace(-6, 4, x.shape[-1], dtype=x.dtype),
    "duplicates": lambda x, y: x[:6][y],
    "constant": lambda x, _y: torch.ones_like(x),
    "zeros": lambda x, _y: torch.zeros_like(x),
    "one feature": lambda x, _y: x * (torch.arange(x.shape[-1]) == 2),
    "signs": lambda x, _y: (x > 0).to(x.dtype),
    "16 bits": lambda x, _y: x.half().to(x.dtype),
    "unit": lambda x, _y: unit(x),
    "unit in 16 bits": lambda x, _y: unit(x).half().to(x.dtype),
}
"""What clients may hold."""

LONGEST = {"unit": 1.0, "unit in 16 bits": 1.0, "signs": math.sqrt(11)}


def seen_uploads(name, settings, data, clients, *, refused=Exit.FEDERATED, **how):
    """What every client of a run sends, with its rows, and what the method declares."""
    method = METHODS[name]
    ups = []
    declared = []

    def spy(down, state, rows, ctx):
        state, up = method.fit(down, state, rows, ctx)
        ups.append((up, float(rows.n[0])))
        return state, up

    def uploads(server, ctx):
        declared.append(method.uploads(server, ctx))
        return declared[-1]

    hp = method.resolve("paper", scaled(small(name) | settings))
    spied = replace(method, fit=spy, uploads=uploads)
    try:
        run(spied, hp, fitted(method, data), clients, rounds=1, execution="sequential", **how)
    except FedcacheError as error:  # such rows may be no training set for the method
        assert error.code is refused  # noqa: PT017
        assert "refused" not in str(error)  # noqa: PT017
    return ups, next(iter(declared), {})


@pytest.mark.slow
def test_every_method_that_declares_a_statistic_is_tried():
    pair = tiny()
    declaring = {
        name
        for name, method in METHODS.items()
        if method.uploads is not None
        for sent in seen_uploads(name, {}, *pair, refused=Exit.USAGE)[1].values()
        if sent.statistic
    }
    assert LISTED <= declaring <= {name for name, _ in SENDING}


TRAINED = ("fedproto", "fedpcl")
"""Methods whose statistics are of projections, which all rows come to alike."""

FEW = ("features", "large")
"""Rows for what differs little: other settings of a method in the short draw, and methods that are trained."""


@pytest.mark.parametrize(("name", "settings"), SENDING, ids=str)
def test_no_honest_client_is_rejected_for_its_rows(name, settings):
    # Clients of 1 to 64 rows with 3 of 6 classes, so some have one row of a class and none of others.
    which = [own for method, own in SENDING if method == name].index(settings)
    plain, clients = federation(seed=which, dtype=torch.float32)
    another_setting = which > 0 and not FULL
    for rows in FEW if name in TRAINED or another_setting else ROWS:
        data = replace(plain, x=ROWS[rows](plain.x, plain.y), longest_row=LONGEST.get(rows))
        ups, declared = seen_uploads(name, settings, data, clients, dtype=torch.float32)
        if not any(sent.statistic for sent in declared.values()):
            break  # nothing is checked, whatever the rows are
        # whose own system is singular, which the client says
        assert ups or settings.get("gamma") == 0.0
        for up, n in ups:
            # 16 bits do not hold all numbers
            if all(bool(torch.isfinite(t).all()) for t in up.values()):
                assert statistic_problem(declared, up, n, data.longest_row) is None, rows


@pytest.mark.parametrize("seed", range(5 if FULL else 2))
@pytest.mark.parametrize("name", ["fed3r", "fedcgs", "gh-ofl"])
def test_no_honest_client_of_many_rows_is_rejected(name, seed):
    draw = np.random.default_rng(seed)
    sizes = draw.integers(1, 3000, 3)
    data, clients = federation(seed=seed, sizes=sizes, width=33, dtype=torch.float32)
    data = replace(
        data, x=data.x * float(10.0 ** draw.uniform(-4, 4)) + float(draw.uniform(-100, 100))
    )
    for settings in (own for method, own in SENDING if method == name):
        ups, declared = seen_uploads(name, settings, data, clients, dtype=torch.float32)
        assert len(ups) == 3
        for up, n in ups:
            assert statistic_problem(declared, up, n, None) is None


Z = doubles([[3.0, 1.0], [1.0, -2.0], [0.0, 1.0]])
Y = doubles([[1.0, 0.0], [0.0, 1.0], [0.0, 1.0]])
SUMS = Y.T @ Z
COUNT = Y.sum(0)  # of 3 rows, one of class 0
OWN = {
    "gram": gram(Z),
    "class sums": SUMS,
    "sum": Z.sum(0),
    "squares": (Z**2).sum(0),
    "class squares": Y.T @ Z**2,
    "class grams": torch.stack([gram(Z[:1]), gram(Z[1:])]),
    "class means": SUMS / COUNT.unsqueeze(-1),
    "ridge solutions": torch.linalg.solve(Z.T @ Z + torch.eye(2), SUMS.T).T,
    "mixture means": (SUMS / COUNT.unsqueeze(-1)).unsqueeze(1),
    "mixture deviations": doubles([[[0.0]], [[1.2]]]),
    "mixture factors": doubles([[[0.0, 0.0, 0.0]], [[0.5, -1.0, 0.0]]]),
    "mixture weights": torch.ones(2, 1, dtype=torch.float64),
}
"""Statistics of three rows of two features."""


def told(listed, changes=None, *, count=COUNT, rows=3.0, longest=None, ridge=0.0):
    kinds = listed.split(", ")
    up = {kind: (changes or {}).get(kind, OWN[kind]) for kind in kinds}
    declared = {
        k: UploadTensor(tuple(t.shape), t.dtype, statistic=Statistic(k, ridge=ridge))
        for k, t in up.items()
    }
    if count is not None:
        up["count"] = torch.as_tensor(count, dtype=torch.float64)
        declared["count"] = UploadTensor((2,), torch.float64, counts_rows=True)
    return statistic_problem(declared, up, rows, longest)


def instead(cell):
    """Numbers in the place of a kind's own: a list, or a multiple of its own. For other words: settings that differ."""
    given, _, kind = cell.partition(" ")
    if kind not in OWN:
        return {}, set_to(cell)
    value = json.loads(given)
    return {kind: doubles(value) if isinstance(value, list) else value * OWN[kind]}, {}


TABLE = rows_of(
    """
    gram                              | -1 gram                | -10
    gram                              | [1.0,2.0,1.0] gram     | eigenvalue -1
    gram                              | count=[0.0,0.0]        | not 0
    gram                              | longest=2.0            | at most 12
    gram                              | ridge=9.0              | -3
    gram, class sums                  | 2.0 class sums         | its trace is 16
    gram, class sums                  | [[1.0,-3.0],[1.0,-1.0]] class sums | eigenvalue
    class sums                        | count=[0.0,3.0]        | class 0
    class sums                        | longest=3.0            | 3.16
    class sums                        | longest=1.0 count=null | 4.58
    class sums, sum                   | [5.0,1.0] sum          | 1.41
    sum                               | longest=1.0            | at most 3
    squares                           | -1 squares             | -10
    squares, class sums | 2.0 class sums | too small for the squares of the sums
    class squares                     | longest=3.0            | 10
    class squares                     | count=[0.0,3.0]        | not 0
    class squares, class sums         | 0.9 class squares      | too small for the squares
    class grams                       | -1 class grams         | -9
    class grams                       | longest=3.0            | its trace is 10
    class grams, class sums           | [[1.0,-1.0],[3.0,1.0]] class sums | class 0
    class means                       | longest=3.0            | 3.16
    mixture deviations, mixture means | -1 mixture deviations  | -1.2
    mixture deviations, mixture means | longest=1.0            | 2.88
    mixture factors, mixture means    | -1 mixture factors     | -0.5
    mixture factors, mixture means    | longest=1.0            | 1.25
    mixture means                     | longest=3.0            | 3.16
    mixture weights                   | -1 mixture weights     | -1
    mixture weights                   | 2.0 mixture weights    | sums to 2
    mixture weights                   | count=[0.0,3.0]        | expected 0
    """
)
"""The matrix does not allow the class sums with an eigenvalue, but its trace and its diagonal do.

Where no rows of class 0 are counted, the count is 0 and 3.
"""
SYSTEM = {"gram": OWN["gram"] + gram(torch.eye(2, dtype=torch.float64))}
LONGEST_OF_Z = math.sqrt(10.0)
WRONG = [
    *((kinds, *instead(change), said) for kinds, change, said in TABLE),
    (
        "gram, class sums",
        {"class sums": doubles([[0.0, 6.0], [0.0, -6.0]])},
        {"count": None},
        "too small for the class sums",
    ),
    (
        "gram, ridge solutions",
        {**SYSTEM, "ridge solutions": 3.0 * OWN["ridge solutions"]},
        {"ridge": 1.0},
        "fits",
    ),
]
"""Kinds in an upload, what takes the place of some of them, what else differs, and a number or word of what is said."""


@pytest.mark.parametrize(("kinds", "changes", "other", "said"), WRONG)
def test_numbers_that_no_rows_can_give_are_named(kinds, changes, other, said):
    why = told(kinds, changes, **other)
    assert why is not None
    assert said in why
    assert why.startswith(tuple(kinds.split(", ")))


@pytest.mark.parametrize("count", [COUNT, None])
def test_the_same_kinds_of_real_rows_pass(count):
    for kinds in {kinds for kinds, *_ in WRONG} - {"gram, ridge solutions"}:
        assert told(kinds, count=count, longest=LONGEST_OF_Z) is None
    how = {"ridge": 1.0, "count": None, "longest": LONGEST_OF_Z}
    assert told("gram, ridge solutions", SYSTEM, **how) is None


def test_every_kind_has_a_number_that_it_refuses():
    assert {kind for kinds, *_ in WRONG for kind in kinds.split(", ")} == set(CHECKS)


@pytest.mark.parametrize("kind", CHECKS)
def test_numbers_whose_squares_overflow_are_answered(kind):
    kinds = {
        "ridge solutions": ("gram", kind),
        "mixture deviations": ("mixture means", kind),
        "mixture factors": ("mixture means", kind),
    }.get(kind, (kind, "class sums"))
    names = ", ".join(dict.fromkeys(kinds))
    for factor in (1e150, -1e150):
        large = {k: factor * OWN[k] for k in kinds}
        told(names, large, longest=1e200)
        assert told(names, large, longest=LONGEST_OF_Z) is not None
