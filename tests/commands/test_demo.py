"""The demo on embeddings in the place of its images: the same calls, the same table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command import fedcache, ok

import fedcache as fc
from fedcache.commands import demo
from fedcache.config import PartitionConfig
from fedcache.errors import Exit
from fedcache.runs.run import Run


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> fc.Store:
    """A store whose two arrays stand for the demo's backbones; it is partitioned in two ways as there."""
    rng, label = np.random.default_rng(0), np.arange(60) % 3
    x = rng.normal(size=(60, 4)) + 3 * np.eye(3, 4)[label]
    store = fc.Store.from_arrays({"plain": x, "worded": x}, labels=label, text={"worded": np.eye(3, 4)}, name="small")
    monkeypatch.setattr(demo, "BACKBONES", ("plain", "worded"))
    monkeypatch.setattr(demo, "extract_features", lambda *_: str(store.path))
    parts = ("dirichlet", PartitionConfig("dirichlet", 2, options={"alpha": 1.0}))
    monkeypatch.setattr(demo, "PARTITIONS", (("feature-shift", PartitionConfig("iid", 3)), parts))
    return store


def test_every_number_of_the_demo_is_a_stored_run(
    small: fc.Store, own_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages: list[Any] = []
    monkeypatch.setattr(demo, "write_report", lambda *given, **options: pages.append((given, options)))
    words = ("demo", "--methods", "fedavg, clip-zs", "--rounds", 2)
    done = ok(*words)
    data, page = done.data, own_home / "demo.html"
    assert (data["store"], data["report"]) == (str(small.path), str(page))
    ((made, out, root), options), *_ = pages
    assert [run.result["digest"] for run in made] == [d for r in data["methods"] for d in r["digests"].values()]
    assert (out, root, options["title"]) == (page, own_home / "runs", "fedcache demo: the offline digits")
    fedavg, zero_shot = data["methods"]
    assert [(r["name"], r["backbone"]) for r in data["methods"]] == [("fedavg", "plain"), ("clip-zs", "worded")]
    runs = {r["name"][:16]: r for r in ok("ls", "--runs").data["entries"]}
    for row in data["methods"]:
        for label, scheme in (("feature-shift", "iid"), ("dirichlet", "dirichlet")):
            run = runs[row["digests"][label][:16]]
            assert run["partition"].startswith(scheme)
            assert (run["method"], run["rounds"]) == (row["name"], 2 if row["name"] == "fedavg" else 1)
    assert fedavg["sends"] > zero_shot["sends"] == 0
    assert 0 < fedavg["seconds"] < data["seconds"]
    commands = [line for line in done.err.splitlines() if line.startswith("$ ")]
    assert commands == [
        "$ fedcache partition --scheme iid --clients 3",
        "$ fedcache partition --scheme dirichlet --clients 2 --alpha 1.0",
        *(f"$ fedcache train --method {name} --backbones {backbone} --partition {part} --rounds 2 --eval-every 1"
          for name, backbone in (("fedavg", "plain"), ("clip-zs", "worded"))
          for part in ("iid-m3-s0", "dirichlet-a1-m2-s0")),
        f"$ fedcache report -o {page}",
    ]  # fmt: skip
    told = fedcache(*words).out.splitlines()
    assert told[0].startswith("2 methods on two partitions in ")
    assert told[0].endswith(f" s. Each number is a stored run in {own_home / 'runs'}.")
    assert told[1:3] == [f"With curves, clients, costs and features: {page}", "More methods: fedcache methods list"]


@pytest.mark.usefixtures("small")
def test_a_misspelt_method_of_the_demo_is_refused_before_anything_runs(own_home: Path) -> None:
    done = fedcache("demo", "--methods", "fedavg,fedporx", "--json")
    assert done.code == Exit.USAGE
    assert "Did you mean 'fedprox'" in done.envelope["error"]["message"]
    assert not (own_home / "runs").exists()


def test_a_row_is_taken_from_the_runs_of_both_partitions() -> None:
    def run(mean: float, up: float, seconds: dict[str, float], digest: str) -> Run:
        result: dict[str, Any] = {
            "backbones": ["a"], "digest": digest, "protocol": "personalised",
            "accuracy": {"client_mean": mean, "mean": mean, "per_seed": [mean]},
            "traffic": {"exact": {"per_client_round": {"up": up}}},
        }  # fmt: skip
        return Run(Path(), result, {"seconds": seconds} if seconds else {})

    first, second = run(0.5, 1234.0, {"train": 1.5, "load": 9.0}, "d0"), run(0.75, 99.0, {}, "d1")
    row = demo.table_row("fedavg", {"feature-shift": first, "dirichlet": second}, "client-mean")
    assert row == {
        "name": "fedavg", "backbone": "a", "protocol": "personalised",
        "zero_shot": {"feature-shift": None, "dirichlet": None},
        "accuracy": {"feature-shift": 0.5, "dirichlet": 0.75}, "sends": 1234.0,
        "seconds": 1.5, "digests": {"feature-shift": "d0", "dirichlet": "d1"},
    }  # fmt: skip
    table: Any = demo.demo_table([row], "client-mean")
    zero = ("zero-shot feature-shift %", "zero-shot dirichlet %")
    assert table.columns == (
        "method", "backbone", "feature-shift %", "dirichlet %", *zero, "sends per round", "seconds",
    )  # fmt: skip
    assert "client-mean: unweighted mean over clients" in table.title
    assert table.right == table.columns[2:]
    assert table.rows == [("fedavg", "a", "50.00", "75.00", "", "", "1,234", "1.50")]


def test_central_is_the_highest_of_one_model_for_all_or_a_sentence_names_what_is_above() -> None:
    def row(name: str, shift: float, dirichlet: float, protocol: str = "global", backbone: str = "a") -> dict[str, Any]:
        accuracy = {"feature-shift": shift, "dirichlet": dirichlet}
        return {"name": name, "backbone": backbone, "protocol": protocol, "accuracy": accuracy}

    central, solo, text = (
        row("central", 0.7, 0.8),
        row("solo", 0.9, 0.9, "personalised"),
        row("gda", 0.9, 0.9, "global", "b"),
    )
    assert demo.central_lines([central, row("fedavg", 0.6, 0.8), solo, text]) == []
    (said,) = demo.central_lines([central, row("fedcgs", 0.6, 0.81), solo])
    assert said.startswith("Above central on dirichlet: fedcgs. ")
    assert demo.central_lines([solo]) == []
