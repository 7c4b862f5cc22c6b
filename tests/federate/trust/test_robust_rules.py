"""Robust rules by hand, by their published bounds against every attack, and by the symmetries they must have."""

import math
from itertools import product

import pytest
import torch
from draws import FULL
from float64 import doubles, normal
from hypothesis import given
from hypothesis import strategies as st
from refusal import refused
from scipy.optimize import minimize
from text_tables import rows_of

from fedcache.federate.trust.attacks import DEFAULTS, Attack, parse_attack
from fedcache.federate.trust.robust_rules import nnm, parse_rule

LINE = doubles([[0.0], [1.0], [2.0], [3.0], [100.0]])
ALL = (
    "median",
    "trimmed:0.2",
    "geomedian",
    "krum",
    "multikrum",
    "multikrum:2",
    "nnm+mean",
    "nnm+median",
    "nnm+trimmed:0.2",
    "nnm+geomedian",
    "nnm+krum",
)
DRAWS = 200 if FULL else 50


def constant(text, n, f):
    """kappa of Allouah et al. 2023 (table 1, lemma 1): |R - mean of honest|^2 <= kappa * their mean square spread."""
    r = f / (n - 2 * f)
    alone = {
        "median": 4 * (1 + r) ** 2,
        "geomedian": 4 * (1 + r) ** 2,
        "krum": 6 * (1 + r),
        "multikrum": 6 * (1 + r),
        "trimmed": 6 * r * (1 + r),
    }
    *before, last = text.split("+")
    kappa = alone[last.partition(":")[0]]
    return 8 * f / (n - f) * (kappa + 1) if before else kappa


def test_the_rules_on_five_numbers():
    wanted = {
        "median": 2.0,
        "trimmed:0.2": 2.0,  # of 1, 2, 3
        "geomedian": 2.0,  # on a line it is the median
        "krum": 1.0,  # sums of squared distances to the two nearest: 5, 2, 2, 5, ...; the first of equals is taken
        "multikrum:2": 1.5,
        "multikrum": 1.5,  # the four that are thought honest
        "nnm+median": 1.5,  # mixed rows 1.5 four times, then (1 + 2 + 3 + 100) / 4
        "clip:2": (0 + 1 + 2 + 2 + 2) / 5,
    }
    assert {text: float(parse_rule(text)(LINE, 1)) for text in wanted} == pytest.approx(
        wanted, abs=1e-6
    )
    assert float(parse_rule("median")(LINE[:4], 1)) == 1.5


def sum_of_distances(V, point):
    return float((V - torch.as_tensor(point, dtype=V.dtype)).norm(dim=1).sum())


def least_sum(V):
    """By scipy, from several starts: the sum has a bend at every row."""
    starts = [V.mean(0), V.median(0).values + 0.1, *V]
    found = (
        minimize(lambda p: sum_of_distances(V, p), s.numpy(), method="Nelder-Mead").fun
        for s in starts
    )
    return min(found)


def test_the_geometric_median_leaves_a_row_at_which_it_begins():
    # The first row is the coordinate-wise median, yet the others pull (3, -1) / 10^.5 + ... = 1.8 where it holds 1.
    V = doubles([[0.0, 0.0], [3.0, -1.0], [3.0, -1.1], [-1.0, 3.0], [-1.1, 3.0]])
    point = parse_rule("geomedian")(V, 1)
    assert point.tolist() == pytest.approx([0.452358, 0.452358], abs=1e-6)
    assert sum_of_distances(V, point) == pytest.approx(least_sum(V), abs=1e-6)
    held = torch.cat([V, V[:1]])  # the same row twice holds 2
    assert parse_rule("geomedian")(held, 1).tolist() == [0.0, 0.0]
    far = torch.cat([V, V[:1] + doubles([[1e9, 0.0], [-1e9, 0.0]])])
    assert parse_rule("geomedian")(far, 2).tolist() == pytest.approx([0.452358, 0.452358], abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("n", [4, 5, 6, 9])
def test_no_point_has_a_smaller_sum_of_distances_than_the_geometric_median(n):
    """Of rows on a grid; many are equal, and equal to the point where the iteration begins."""
    for seed in range(DRAWS // 5):
        V = normal(n, 2, seed=seed).round()
        # 200 steps
        assert sum_of_distances(V, parse_rule("geomedian")(V, 1)) <= least_sum(V) + 0.01


@pytest.mark.parametrize(("f", "chosen"), [(0, 5.0), (1, 2.0), (2, 1.0)])
def test_krum_sums_the_distances_to_the_nearest_of_all_but_the_liars_and_two(f, chosen):
    # squared distances of each row to its nearest others; the least sum is chosen, the sums being
    #   of 4 nearest (f = 0): 79 54 39 38 66 95;  of 3 (f = 1): 30 18 14 22 30 46;  of 2 (f = 2): 5 2 5 13 5 10
    V = doubles([[0.0], [1.0], [2.0], [5.0], [7.0], [8.0]])
    assert float(parse_rule("krum")(V, f)) == chosen


def test_krum_of_three_rows_looks_at_one_other():
    V = doubles([[5.0], [1.0], [0.0]])  # nearest 16, 1, 1; of two others 41, 17, 26
    assert float(parse_rule("krum")(V, 0)) == 1.0
    assert float(parse_rule("krum")(V.flip(0), 0)) == 0.0


@pytest.mark.parametrize("text", ALL)
def test_a_rule_does_not_depend_on_the_unit(text):
    V = normal(9, 4, seed=3)
    V[0] *= 30.0
    # where the iteration for the geometric median begins, so a weight is bounded
    V[1] = V[2:].median(0).values
    rule = parse_rule(text)
    for unit in (1e-9, 1e9):
        assert torch.allclose(rule(V * unit, 2) / unit, rule(V, 2), rtol=1e-6, atol=1e-8)


ATTACKS = [name for name in DEFAULTS if name not in ("nan", "label-flip")]


@pytest.mark.parametrize("text", [t for t in ALL if t != "nnm+mean"])  # which has no bound
def test_no_attack_moves_a_rule_further_than_its_bound(text):
    rule = parse_rule(text)
    for attack, seed in product(ATTACKS, range(40 if FULL else 4)):
        g = torch.Generator().manual_seed(seed)
        for n, f in ((11, 2), (15, 3), (21, 4), (25, 5), (13, 1)):
            centre = 1.0 + 3.0 * torch.randn(1, 6, generator=g, dtype=torch.float64)
            honest = centre + torch.randn(n, 6, generator=g, dtype=torch.float64)
            lying = torch.zeros(n, dtype=torch.bool)
            lying[torch.randperm(n, generator=g)[:f]] = True
            V = Attack(attack, f / n, DEFAULTS[attack])(honest, lying, seed, 0)
            good = V[~lying]
            spread = float(((good - good.mean(0)) ** 2).sum(1).mean())
            error = float(((rule(V, f) - good.mean(0)) ** 2).sum())
            assert error <= constant(text, n, f) * spread + 1e-9, attack


def centrality(point, V, f):
    """Sum of squared distances from a row to its m - f - 2 nearest neighbours: krum takes the row with the least."""
    near = ((V - point) ** 2).sum(1).sort().values
    assert near[0] < 1e-9, "the point is no row"
    return float(near[1 : len(V) - f - 1].sum())


@pytest.mark.slow
@given(st.integers(0, 10_000), st.sampled_from(ALL), st.integers(7, 12), st.floats(-50.0, 50.0))
def test_rules_do_not_see_order_and_move_with_the_rows(seed, text, n, shift):
    g = torch.Generator().manual_seed(seed)
    V = torch.randn(n, 4, generator=g, dtype=torch.float64)
    f = n // 5
    rule = parse_rule(text)
    made = rule(V, f)
    permuted = rule(V[torch.randperm(n, generator=g)], f)
    shifted = rule(V + shift, f) - shift
    if text == "nnm+krum":
        # Mixed rows may be equally central; then the order of the clients decides between them.
        mixed = nnm(V, f)
        expected = pytest.approx(centrality(made, mixed, f), abs=1e-6)
        assert centrality(permuted, mixed, f) == expected
        assert centrality(shifted, mixed, f) == expected
        return
    assert torch.allclose(permuted, made, atol=1e-7)
    assert torch.allclose(shifted, made, atol=1e-6)


@pytest.mark.parametrize(
    "text", ["trimmed:0", "multikrum", "nnm+mean", "clip:1e9", "nnm+trimmed:0.0"]
)
def test_without_liars_to_expect_they_are_the_mean(text):
    V = normal(9, 5)
    assert torch.allclose(parse_rule(text)(V, 0), V.mean(0), atol=1e-12)


@pytest.mark.parametrize(
    ("text", "message"),
    rows_of(
        """
        medain      | 'median'
        trimmed     | trimmed
        trimmed:0.5 | 0.5
        median:3    | median
                    | --aggregate
        """
    ),
)
def test_words_that_are_no_rule(text, message):
    refused(lambda: parse_rule(text), message)


@pytest.mark.parametrize(
    ("text", "m", "f", "needed"), [("krum", 4, 1, 5), ("median", 2, 1, 3), ("nnm+mean", 2, 1, 3)]
)
def test_too_few_clients_for_a_rule_say_how_many_it_takes(text, m, f, needed):
    refused(lambda: parse_rule(text).check(m, f), f"at least {needed} clients")
    parse_rule(text).check(needed, f)


def test_the_number_that_trimmed_leaves_out_is_not_rounded_down_by_a_share_in_binary():
    assert [parse_rule("trimmed:0.29").left_out(m) for m in (99, 100, 101)] == [
        28,
        29,
        29,
    ]  # 0.29 x 100 < 29 in floats


def test_attacks_by_hand():
    V = doubles([[1.0, 0.0], [3.0, 0.0], [5.0, 6.0]])
    lying = torch.tensor([False, False, True])

    def lied(text):
        out = parse_attack(text)(V, lying, 0, 0)
        assert torch.equal(out[:2], V[:2])
        return out[2].tolist()

    assert lied("sign-flip:0.4:10") == [-50.0, -60.0]
    assert lied("ipm:0.4:0.5") == [-1.0, 0.0]
    assert lied("mimic:0.4") == [1.0, 0.0]
    assert all(math.isnan(x) for x in lied("nan:0.4"))
    # ALIE: m = 3, one liar: s = 3 // 2 + 1 - 1 = 1 of 2 honest clients, so the quantile (2 - 1) / 2 and z = 0
    assert lied("alie:0.4") == [2.0, 0.0]
    assert Attack.deviations(50, 24) == pytest.approx(1.426, abs=1e-3)  # the quantile (26 - 2) / 26
    assert Attack.deviations(9, 2) == pytest.approx(0.1800, abs=1e-4)  # the quantile (7 - 3) / 7
    # nobody is honest: the quantile 1, less 1e-6
    assert Attack.deviations(3, 3) == pytest.approx(4.7534, abs=1e-4)
    assert Attack.deviations(2, 0) == Attack.deviations(2, 1) == pytest.approx(-4.7534, abs=1e-4)
    assert lied("gaussian:0.4:1") == lied("gaussian:0.4:1") != V[2].tolist()
    assert torch.equal(parse_attack("label-flip:0.4")(V, lying, 0, 0), V)


@pytest.mark.parametrize(
    "text", ["sign-flop", "sign-flip:1", "sign-flip:0.2:nan", "mimic:0.2:3", "ipm:0:1:2"]
)
def test_words_that_are_no_attack(text):
    refused(lambda: parse_attack(text))
