"""What figures draw, mark by mark: places, words and sizes worked by hand from runs of a few numbers."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
from matplotlib.figure import Figure
from results import point, stored

from fedcache.federate.partition.client_table import Client, ClientTable
from fedcache.report import figure_data, figure_runs


class Drawn:
    """The axes of a figure, and the words behind its marks in the order told."""

    def __init__(self):
        self.told = []
        self.axes = None

    def take(self, _ident, _title, _says, _columns, rows, fill, **_more):
        """In the place of ``Plot``."""
        self.axes = Figure(layout="constrained").add_subplot()
        fill(self.axes, self.mark)
        return SimpleNamespace(rows=rows)

    def mark(self, _artist, words=(), _runs=""):
        if words:
            self.told.append(list(words))

    def lines(self):
        return [
            [(float(x), pytest.approx(float(y))) for x, y in line.get_xydata()]
            for line in self.axes.lines
        ]

    def ticks(self):
        return [t.get_text() for t in self.axes.get_xticklabels()], [
            t.get_text() for t in self.axes.get_yticklabels()
        ]


@pytest.fixture
def drawn(monkeypatch):
    made = Drawn()
    for module in (figure_runs, figure_data):
        monkeypatch.setattr(module, "Plot", made.take)
    return made


def test_curves_are_means_over_the_rounds_that_all_seeds_have(drawn):
    one = stored(
        records=[(0, 1, 0.2), (0, 2, 0.4), (0, 3, 0.9), (1, 1, 0.4), (1, 2, 0.8), (1, 3, None)]
    )
    two = stored(records=[(0, 1, 0.5), (0, 2, 0.25)])
    short = stored(records=[(0, 1, 0.5)])
    made = figure_runs.curves("c", [("one", one), ("two", two), ("short", short)])
    assert drawn.lines() == [[(1, 30), (2, 60)], [(1, 50), (2, 25)]]
    assert drawn.told[0] == ["one: round 1, 30.00 %", "one: round 2, 60.00 %"]
    (band,) = drawn.axes.collections  # of two seeds; one has no range
    assert {tuple(map(float, at)) for at in band.get_paths()[0].vertices} == {
        (1, 20),
        (1, 40),
        (2, 40),
        (2, 80),
    }
    assert made.rows[3:6] == [["one", 1, 1, 0.4], ["one", 1, 2, 0.8], ["two", 0, 1, 0.5]]
    assert len(made.rows) == 8
    assert figure_runs.curves("c", [("short", short)]) is None


def test_the_front_of_accuracy_against_bytes_by_hand(drawn):
    def sent(up, down, mean, seeds=1, **more):
        return stored(
            traffic={"exact": {"up_bytes": up, "down_bytes": down}},
            accuracy={"mean": mean, "per_seed": [mean]},
            seeds=list(range(seeds)),
            **more,
        )

    # Bytes of one seed: a 100, b 200, c 400,000, d none, e 110, f 100. In order of cost the best so far are a 50 %,
    # e 52 %, c 90 %; f costs as much as a and is worse. d, which sends nothing, and central are lines and no points.
    made = figure_runs.against_bytes(
        "p",
        [
            ("a", sent(150, 50, 0.5, 2)),
            ("b", sent(100, 100, 0.4)),
            ("c", sent(300_000, 100_000, 0.9)),
            ("d", sent(0, 0, 0.3)),
            ("central", sent(0, 0, 0.95, protocol="global")),
            ("e", sent(60, 50, 0.52)),
            ("f", sent(50, 50, 0.45)),
            ("unscored", sent(1, 1, None)),
        ],
    )
    assert made.rows == [
        ["a", 100, 0.5, "front"],
        ["b", 200, 0.4, ""],
        ["c", 400_000, 0.9, "front"],
        ["d", 0, 0.3, ""],
        ["central", 0, 0.95, "reference"],
        ["e", 110, 0.52, "front"],
        ["f", 100, 0.45, ""],
    ]
    staircase, *_ = drawn.lines()
    assert staircase == [(100, 50), (110, 52), (400_000, 90)]


def test_one_swept_value_is_a_line_with_a_ring_at_the_best(drawn):
    (made,) = figure_runs.sweeps(
        "g", [point(0.5, lr=0.1), point(0.9, lr=0.02), point(None, lr=3.0), point(0.7, lr=1.0)]
    )
    assert drawn.lines() == [[(0, 90), (1, 50), (2, 70)], [(0, 90)]]
    assert made.rows == [["0.1", 0.5], ["0.02", 0.9], ["1", 0.7]]
    assert figure_runs.sweeps("g", [point(0.5, lr=1.0), point(None, lr=2.0)]) == []


def test_two_swept_values_are_a_grid_and_the_rest_is_at_its_best(drawn):
    found = {
        (0.1, 8, 1): 0.3,
        (0.1, 8, 2): 0.5,
        (0.1, 4, 1): 0.2,
        (0.01, 4, 1): 0.6,
        (0.001, 8, 1): 0.4,
    }
    (made,) = figure_runs.sweeps(
        "g", [point(a, lr=lr, batch=b, mu=mu) for (lr, b, mu), a in found.items()]
    )
    assert drawn.ticks() == (["0.001", "0.01", "0.1"], ["4", "8"])
    assert made.rows[1] == ["0.1", "8", "2", 0.5]


def features_of(x, label, parts, **more):
    """A store of one array ``k`` of backbone ``near`` with these rows; clients hold train and test rows."""
    columns = SimpleNamespace(classes=("ink", "chalk", "oil"), label=np.array(label))
    clients = [
        Client(f"c{i}", np.array(train), np.array(test)) for i, (train, test) in enumerate(parts)
    ]
    table = ClientTable.of(clients, np.empty(0, np.int64))
    store = SimpleNamespace(
        readable=lambda: np.ones(len(x)),
        arrays={
            key: SimpleNamespace(recipe=recipe, chunk_rows=2, shape=(len(x), 1, 2), dtype="float32")
            for key, recipe in {"k": {"backbone": "near"}, "l": {}}.items()
        },
        path=None,
        manifest=None,
    )
    return SimpleNamespace(
        columns=columns,
        store=store,
        keys=["l", "k"],
        fused=["k", "l"],
        partition=SimpleNamespace(clients=clients, table=table),
        features=lambda key, rows: (x if key == "k" else more["other"])[rows].astype(np.float32),
    )


LOST = [math.nan, math.nan]
PLANE = np.array([[3.0, 0], [5, 0], [0, 2], LOST, [0, 9], [2, 0], [0, 7], [8, 0], LOST, [1, 1]])


def test_prototypes_are_means_over_all_rows_and_over_those_of_each_client():
    place = features_of(
        PLANE, [0, 0, 1, 0, 2, 0, 1, -1, 0, 0], [([0, 1, 2, 3], []), ([5, 6, 7], []), ([4], [])]
    )
    found, names, count = figure_data._prototypes(place, "k")
    # ink: 3, 5 and 2 in x; chalk: 2 and 7 in y; row 3 cannot be read and row 7 has no label
    assert names == [
        "ink",
        "chalk",
        "oil",
        "c0: ink",
        "c0: chalk",
        "c1: ink",
        "c1: chalk",
        "c2: oil",
    ]
    assert count == 3
    assert found == pytest.approx(
        np.array(
            [[10 / 3, 0], [0, 4.5], [0, 9], [4, 0], [0, 2], [2, 0], [0, 7], [0, 9]], np.float32
        )
    )
    many = features_of(PLANE, [0] * 10, [([0], [])] * 13)
    assert len(figure_data._prototypes(many, "k")[1]) == 1 + 12, "of the first twelve clients"


def test_the_entropy_of_zero_shot_labels_by_hand(drawn, monkeypatch):
    # Along the text of ink a row has the scores 1 and 0: at scale 1 p = e / (e + 1), whose entropy is 0.840 bits; at
    # scale 100 it is 0. Between the two texts it is 1 bit of 1 at both scales.
    x = np.array([[5.0, 0], [2, 2], [0, 3], LOST])
    texts = {"near": np.array([[2.0, 0], [0, 1]])}
    monkeypatch.setattr(
        figure_data, "text_of_array", lambda manifest, key: "entry" if key == "k" else None
    )
    monkeypatch.setattr(figure_data, "read_text", lambda path, backbone, entry: texts[backbone])
    made = figure_data.label_entropy("e", features_of(x, [0, 0, 1, 0], [([], [0, 1, 2, 3])]))
    p = math.e / (math.e + 1)
    own = -(p * math.log2(p) + (1 - p) * math.log2(1 - p))
    assert [row[0] for row in made.rows] == ["scale 1 (FST-CBDG)"] * 3 + [
        "scale 100 (CLIP's own)"
    ] * 3
    assert [row[1] for row in made.rows] == pytest.approx([own, 1.0, own, 0.0, 1.0, 0.0], abs=1e-6)
    heights = [round(bar.get_height()) for bar in drawn.axes.patches]
    # 24 bars of 1 / 24 bits a scale: .840 is in the 21st, 1 in the last, 0 in the first
    assert heights == [0] * 20 + [2, 0, 0, 1] + [2] + [0] * 22 + [1]
    assert figure_data.label_entropy("e", features_of(x, [0] * 4, [([], [3])])) is None


def test_the_agreement_of_backbones_is_the_cka_of_unit_rows(drawn):
    # Of unit rows k is told apart along one line, l is the same for every row: alone k is all there is, and l nothing.
    rows = [0, 2, 5, 6]
    other = np.ones((10, 2))
    place = features_of(
        PLANE, [0] * 10, [(rows, []), ([0, 2, 3], []), ([0, 2, 6, 3, 1], [])], other=other
    )
    value = {(row[0], row[1]): float(row[2]) for row in figure_data.agreement("a", place).rows}
    assert value == pytest.approx({("near", "c0"): 1.0, ("near", "c2"): 1.0}, abs=1e-6)
    assert drawn.ticks() == (["c0", "c1", "c2"], ["near", "l"])


def test_mistakes_of_many_classes_are_the_fifteen_most_frequent(drawn):
    table = np.diag(np.full(31, 9))
    table[3, 7], table[7, 3], table[0, 30] = 1, 3, 1
    figure_runs.confusion("c", "run", stored(confusion=table.tolist()))
    assert drawn.told == [
        ["7 taken for 3: 3 rows, 25.0 %"],
        ["0 taken for 30: 1 row, 10.0 %"],
        ["3 taken for 7: 1 row, 10.0 %"],
    ]
    small = figure_runs.confusion(
        "c", "run", stored(confusion=[[3, 1], [0, 4]], class_names=["a", "b"])
    )
    assert small.rows == [["a", "a", 3], ["a", "b", 1], ["b", "b", 4]]
    table[1, :30] = 5
    figure_runs.confusion("c", "run", stored(confusion=table.tolist()))
    assert len(drawn.axes.patches) == 15
