"""Print the tables of docs/trust.md about sites that lie: fourteen methods, one of six sites, six lies.

    OMP_NUM_THREADS=1 python tools/lying_sites.py

The sites hold scikit-learn's digits (8 x 8 pixels as features, 80 % of the rows for training), assigned at random.
Every message is packed and unpacked as Flower does it. Methods that train run 3 rounds. The class texts of gda are the
class means of the first hundred rows.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests/support"), str(ROOT / "tests/federate/engines")]

TRAINED = ("fedavg", "fednova", "feddyn", "scaffold", "fedadam")
METHODS = (
    "fed3r",
    "fedcgs",
    "afl",
    "gda",
    "fedpft",
    "fedcof",
    "gh-ofl",
    "fedncm",
    "fedproto",
    *TRAINED,
)

AS_THE_METHOD = {
    "fedpft": {"epochs": 50},
    "fedproto": {"epochs": 5, "dim": 256},
    **{name: {"epochs": 5} for name in TRAINED},
}
"""Settings that are smaller in the tests than here."""

SECTIONS: tuple[tuple[str, dict[str, Any], tuple[str, ...]], ...] = (
    ("`--set feat_post=none`", {}, METHODS),
    ("`--set feat_post=l2`, unit features", {"set": {"feat_post": "l2"}}, METHODS),
    ("`--set feat_post=none --max-row-norm 80`", {"max_row_norm": 80.0}, ("fedcof", "fedncm")),
    (
        "`--set feat_post=none --aggregate trimmed:0.2`",
        {"aggregate": "trimmed:0.2"},
        ("fed3r", "fedcgs", "gda", "gh-ofl", "fedncm", "fedproto", "fedavg", "fednova", "scaffold"),
    ),
)
"""Options, and the methods that are measured with them."""


def sites(place: Path) -> Path:
    """Six stores of digits."""
    from sklearn.datasets import load_digits
    from small_sites import cut
    from test_lying_sites import SITES

    from fedcache.store.store import Store

    found = load_digits()
    x = found.data.astype(np.float32)
    y = found.target
    text = np.stack([x[:100][y[:100] == c].mean(0) for c in range(10)])
    text /= np.linalg.norm(text, axis=1, keepdims=True)
    store = Store.from_arrays(
        {"pixels8": x},
        labels=y,
        classes=list("0123456789"),
        text={"pixels8": text},
        path=place / "all.zarr",
    )
    cut(store, place, SITES, "iid")
    return place / "sites"


def main() -> None:
    """Measure and print."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["FEDCACHE_HOME"] = str(Path(folder) / "home")
        from small_sites import mean_accuracy
        from test_lying_sites import HUGE, LIES, run_of

        shards = sites(Path(folder))
        made = 0
        lies = {name: LIES[name] for name in LIES if name != "swapped moments"} | {
            "x -1e15": HUGE["x -1e15"]
        }
        for title, options, methods in SECTIONS:
            print(f"\n{title}\n\n| method | honest | {' | '.join(lies)} |")
            print("|---" * (2 + len(lies)) + "|")
            for method in methods:
                cells = []
                for lie in (None, *lies):
                    made += 1
                    words = {
                        **options,
                        "set": {**AS_THE_METHOD.get(method, {}), **options.get("set", {})},
                    }
                    run, _ = run_of(
                        method, shards, Path(folder) / str(made), lie and lies[lie], **words
                    )
                    rejected = "*" if run.result["federation"]["missed"] else ""
                    cells.append(f"{mean_accuracy(run):.3f}{rejected}".removeprefix("0"))
                print(f"| {method} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
