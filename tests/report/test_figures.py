"""Figures of the report from hand-made runs: what they draw, say and leave out."""

import json
import re

import numpy as np
import pytest
import torch
from sklearn.decomposition import PCA

from fedcache.federate.engine.outcome import entropy_bits
from fedcache.report import figure_data
from fedcache.report.figure_runs import own_numbers
from fedcache.report.find_runs import StoredRun


def stored(folder, records, **result):
    folder.mkdir()
    (folder / "rounds.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    return StoredRun(folder, {"method": "fst-cbdg", "accuracy": {"per_round": []}, **result}, {})


def test_numbers_of_a_method_are_drawn_over_rounds_as_means_over_seeds(tmp_path):
    def noted(name, numbers):
        records = [
            {"seed": seed, "round": round_, "diagnostics": {name: value, "kept": None}}
            for seed, round_, value in numbers
        ]
        return stored(tmp_path / name, records)

    bits = [(0, 1, 2.0), (0, 2, 1.0), (1, 1, 4.0), (1, 2, 2.0)]
    one = noted("entropy_bits", bits)
    two = noted("agreement_share", [(0, 1, 0.5), (0, 2, 0.75)])
    entropy, _ = own_numbers("n", [("first", one), ("second", two)])
    assert entropy.rows == [["first", *numbers] for numbers in bits]
    assert re.findall(r"first: ([\d.]+) in round (\d)", entropy.svg) == [("3", "1"), ("1.5", "2")]


@pytest.mark.parametrize("shape", [(40, 6), (5, 9), (7, 1)])
def test_figures_compute_without_torch_and_scikit_learn_what_these_compute(shape):
    rng = np.random.default_rng(sum(shape))
    x = rng.normal(size=shape)
    y = rng.normal(size=(shape[0], 4))
    x[0] = 0.0  # a row without a direction
    axes = min(2, shape[1])
    flat = figure_data._project(x.astype(np.float32), "pca")
    unit = torch.nn.functional.normalize(torch.from_numpy(x), dim=1).numpy()
    assert np.abs(figure_data._unit_rows(x) - unit).max() < 1e-15
    assert flat[:, :axes] == pytest.approx(
        PCA(axes, svd_solver="full").fit_transform(unit), abs=1e-5
    )
    assert not flat[:, axes:].any()
    assert np.isnan(figure_data.linear_cka(np.ones(shape), y))
    text = rng.normal(size=(3, shape[1]))
    for scale in (1.0, 100.0, 1e4):
        bits = entropy_bits(torch.softmax(torch.from_numpy(scale * (x @ text.T)), -1)).numpy()
        assert figure_data._entropy_bits(x, text, scale) == pytest.approx(bits, abs=1e-9)
