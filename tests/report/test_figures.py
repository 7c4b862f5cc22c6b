"""Figures of the report from hand-made runs: what they draw, say and leave out."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.decomposition import PCA

from fedcache.federate.engine.outcome import entropy_bits
from fedcache.federate.engine.result_diagnostics import linear_cka
from fedcache.report.drawing import draw
from fedcache.report.figures import data
from fedcache.report.figures.data import agreement, label_entropy
from fedcache.report.figures.runs import last_numbers, own_numbers, spread
from fedcache.report.find_runs import StoredRun
from fedcache.report.run_origin import RunStore, columns_of
from fedcache.runs.partitions import make_partition
from fedcache.store.store import Store

ROWS, C = 60, 3


def stored(folder: Path, records: list[dict[str, Any]], **result: Any) -> StoredRun:
    folder.mkdir()
    (folder / "rounds.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    return StoredRun(folder, {"method": "fst-cbdg", "accuracy": {"per_round": []}, **result}, {})


def test_numbers_of_a_method_are_drawn_over_rounds_as_means_over_seeds(tmp_path: Path) -> None:
    def record(seed: int, number: int, **noted: float | None) -> dict[str, Any]:
        return {"seed": seed, "round": number, "diagnostics": noted}

    one = stored(tmp_path / "a", [record(0, 1, entropy_bits=2.0, kept=1.0), record(0, 2, entropy_bits=1.0, kept=None),
                                  record(1, 1, entropy_bits=4.0), record(1, 2, entropy_bits=2.0)])  # fmt: skip
    two = stored(tmp_path / "b", [record(0, 1, agreement_share=0.5), record(0, 2, agreement_share=0.75)])
    entropy, share = own_numbers("n", [("first", one), ("second", two)])
    assert (entropy.title, share.title) == ("Entropy of pseudo-labels", "agreement share")
    assert entropy.columns == ("run", "seed", "round", "entropy_bits")
    assert entropy.rows == [["first", 0, 1, 2.0], ["first", 0, 2, 1.0], ["first", 1, 1, 4.0], ["first", 1, 2, 2.0]]
    assert "(bits)" in entropy.says
    assert re.findall(r"first: ([\d.]+) in round (\d)", entropy.svg) == [("3", "1"), ("1.5", "2")]
    assert re.findall(r"second: ([\d.]+) in round (\d)", share.svg) == [("0.5", "1"), ("0.75", "2")]
    assert own_numbers("n", [("first", stored(tmp_path / "c", [record(0, 1, kept=1.0)]))]) == [], "one round, no curve"


def test_only_so_many_curves_are_drawn_and_said(tmp_path: Path) -> None:
    runs = [
        (
            f"run-{i}",
            stored(tmp_path / str(i), [{"seed": 0, "round": r, "diagnostics": {"loss": i + r}} for r in (1, 2)]),
        )
        for i in range(9)
    ]
    (drawn,) = own_numbers("n", runs)
    count = len(set(re.findall(r"(run-\d): ", drawn.svg)))
    assert f"The first {count} of 9 runs." in drawn.says
    assert len({row[0] for row in drawn.rows}) == 9, "the data hold all"


def test_numbers_at_the_end_alone_are_a_sentence(tmp_path: Path) -> None:
    noted = {"owners_min": 2.0, "entropy_bits": 1.25, "lost": None}
    ended = stored(tmp_path / "a", [], diagnostics=noted)
    curved = stored(tmp_path / "b", [], diagnostics=noted, accuracy={"per_round": [0.1, 0.2]})
    empty = stored(tmp_path / "c", [], diagnostics={"lost": None})
    assert last_numbers([("x", ended), ("y", curved), ("z", empty)]) == [
        "x, at the end: owners min 2, entropy of pseudo-labels 1.25."
    ]


def test_clients_are_dots_with_their_mean_and_the_worst_tenth(tmp_path: Path) -> None:
    accuracies = [0.5, None, *(0.1 * i for i in range(1, 10))]
    entry = StoredRun(
        tmp_path,
        {"clients": [f"c{i}" for i in range(11)], "accuracy": {"per_client": accuracies}, "fairness": {"worst10": 0.1}},
        {},
    )
    drawn = spread("k", [("fed3r", entry)])
    assert drawn is not None
    assert [row[2] for row in drawn.rows] == accuracies
    assert "fed3r: mean of clients 50.00 %" in drawn.svg
    assert "fed3r: worst tenth 10.00 %" in drawn.svg
    assert "fed3r: c2 10.00 %" in drawn.svg
    assert "fed3r: c1 " not in drawn.svg, "it has no test rows"


@pytest.fixture
def source(tmp_path: Path) -> RunStore:
    draw = np.random.default_rng(0)
    y = np.arange(ROWS) % C
    text = np.eye(C, 4, dtype=np.float32)
    near = (text[y] + 0.05 * draw.standard_normal((ROWS, 4))).astype(np.float32)
    copy, noise = 2 * near, draw.standard_normal((ROWS, 4)).astype(np.float32)
    store = Store.from_arrays(
        {"near": near, "same": copy, "noise": noise}, labels=y, text={"near": text}, path=tmp_path / "s.zarr"
    )
    partition = make_partition(store, "iid", clients=3)
    keys = list(store.arrays)
    fused = sorted(keys, key=lambda key: ["near", "same", "noise"].index(str(store.arrays[key].recipe["backbone"])))
    return RunStore(store, columns_of(store), partition, fused[:1], fused)


def test_what_each_backbone_brings_is_its_agreement_with_all_of_them(source: RunStore) -> None:
    drawn = agreement("f", source)
    assert drawn is not None
    value = {(row[0], row[1]): float(row[2]) for row in drawn.rows}  # type: ignore[arg-type]
    names = [client.name for client in source.partition.clients]
    assert set(value) == {(b, c) for b in ("near", "same", "noise") for c in names}
    for client in names:
        assert value["near", client] == pytest.approx(value["same", client], abs=1e-3), (
            "a multiple is the same geometry"
        )
        assert value["noise", client] < value["near", client] <= 1.0
        assert f"near, {client}: {value['near', client]:.3f}" in drawn.svg
    assert (
        agreement("f", RunStore(source.store, source.columns, source.partition, source.keys, source.fused[:1])) is None
    )


def test_entropy_of_zero_shot_labels_is_in_bits_of_both_scales(source: RunStore) -> None:
    drawn = label_entropy("e", source)
    assert drawn is not None
    soft = [float(v) for scale, v in drawn.rows if str(scale).startswith("scale 1 (")]  # type: ignore[arg-type]
    sharp = [float(v) for scale, v in drawn.rows if str(scale).startswith("scale 100 ")]  # type: ignore[arg-type]
    assert len(soft) == len(sharp) == len(drawn.rows) / 2 > 0
    assert max(sharp) < 0.01 < min(soft), "scale 100 is sure of what lies beside its text"
    assert max(soft) <= np.log2(C)
    assert f"{np.log2(C):.2f} is no knowledge" in drawn.says
    counted = re.findall(r"scale 100 \(CLIP's own\): (\d+) rows from 0\.00", drawn.svg.replace("&#x27;", "'"))
    assert counted == [str(len(sharp))]
    without = [key for key in source.fused if key not in source.keys]
    assert label_entropy("e", RunStore(source.store, source.columns, source.partition, without, without)) is None


def test_a_client_of_two_rows_has_no_agreement(source: RunStore) -> None:
    dealt = make_partition(source.store, "iid", clients=2, save=False)
    first, second = dealt.clients
    few = dataclasses.replace(first, train=first.train[:2])
    drawn = agreement("f", dataclasses.replace(source, partition=dataclasses.replace(dealt, clients=(few, second))))
    assert drawn is not None
    assert {row[1] for row in drawn.rows} == {second.name}


@pytest.mark.parametrize("shape", [(40, 6), (5, 9), (7, 1), (4, 3)])
def test_figures_compute_without_torch_and_scikit_learn_what_these_compute(shape: tuple[int, int]) -> None:
    rng = np.random.default_rng(sum(shape))
    x, y = rng.normal(size=shape), rng.normal(size=(shape[0], 4))
    x[0] = 0.0  # a row without a direction
    axes = min(2, shape[1])
    flat = data._project(x.astype(np.float32), "pca")
    assert flat.shape == (shape[0], 2)
    unit = torch.nn.functional.normalize(torch.from_numpy(x), dim=1).numpy()
    assert np.abs(data._unit_rows(x) - unit).max() < 1e-15
    assert flat[:, :axes] == pytest.approx(PCA(axes, svd_solver="full").fit_transform(unit), abs=1e-5)
    assert not flat[:, axes:].any()
    assert data._linear_cka(x, y) == pytest.approx(linear_cka(torch.from_numpy(x), torch.from_numpy(y)))
    assert np.isnan(data._linear_cka(np.ones(shape), y))
    text = rng.normal(size=(3, shape[1]))
    for scale in (1.0, 100.0, 1e4):
        bits = entropy_bits(torch.softmax(torch.from_numpy(scale * (x @ text.T)), -1)).numpy()
        assert data._entropy_bits(x, text, scale) == pytest.approx(bits, abs=1e-9)


def test_places_in_a_drawing_have_two_decimals_and_shares_of_ink_all_of_theirs() -> None:
    def fill(axes: Any, _marks: Any) -> None:
        axes.plot([0, 1 / 3, 1], [0, 2 / 7, 1], alpha=0.123456)

    drawing = draw("i", fill)
    paths = re.findall(r' d="([^"]*)"', drawing)
    assert any(re.search(r"\d\.\d\d\b", path) for path in paths)
    assert not any(re.search(r"\d\.\d{3}", path) for path in paths)
    assert "0.123456" in drawing
