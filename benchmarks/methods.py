"""Every method that reads features: the chosen execution against the loop, 20 clients of 50 rows, one thread.

A method whose chosen execution is the loop is that loop; measuring it against itself would measure noise.
"""

from __future__ import annotations

from functools import partial

import torch

from benchmarks import clean
from benchmarks.measure import Row, make_row, pairs, quartiles, settled
from fedcache.federate.methods import METHODS

BAR = 0.95
PAIRS = 9
OUTSIDE = {"image tower", "text tower", "pixels"}
SMALL = {"epochs": 1, "esd_epochs": 1, "probe_epochs": 5, "k_mix": 2}
"""Less work of the same kind, for the methods that have such a switch."""
FITTING = {"sgd": {"lr": 0.05}, "adam": {"lr": 1e-3}}


def variants() -> list[tuple[str, dict[str, object]]]:
    """Every method, with each optimiser it may use."""
    out = []
    for name, method in METHODS.items():
        if OUTSIDE & method.needs:
            continue
        declared = {h.name: h for h in method.hparams}
        small = {k: v for k, v in SMALL.items() if k in declared}
        if "opt" in declared:
            out += [
                (name, {**small, "opt": o, **FITTING[o]})
                for o in declared["opt"].choices
                if o in FITTING
            ]
        else:
            out.append((name, small))
    return out


def rows() -> list[Row]:
    torch.set_num_threads(1)
    made = clean.federation(20, 50, 10, 512, text=True)
    parts = []
    ratios = []
    again = []
    worst = []
    for name, settings in variants():
        words = f"{name} {settings.get('opt', '')}".strip()
        try:
            execution = made.ours(name, settings, "auto", 1).execution
        except Exception as error:  # one method that does not run must not hide the others
            ratios.append(f"{words}: {type(error).__name__}: {error}")
            worst.append(0.0)
            continue
        if execution == "sequential":
            parts.append(words)
            continue
        calls = {
            "sequential": partial(made.ours, name, settings, "sequential", 2),
            "chosen": partial(made.ours, name, settings, "auto", 2),
        }
        seconds = settled(calls, PAIRS, BAR, "sequential", "chosen")
        low, middle, high = quartiles(pairs(seconds, "sequential", "chosen"))
        if len(seconds["chosen"]) > PAIRS:
            again.append(words)
        ratios.append(f"{words} {execution} {middle:.2f} [{low:.2f} {high:.2f}]")
        worst.append(middle)
    detail = (
        f"20 clients x 50 rows, D=512, 2 rounds, 1 thread; {'; '.join(ratios)}; the "
        f"loop is chosen: {', '.join(parts)}"
    )
    if again:
        detail += f"; measured twice: {', '.join(again)}"
    least = min(worst, default=0.0)
    return [
        make_row(
            "every method: chosen execution",
            ">= 0.95 of the loop, median of 9 pairs; the slowest method stands here",
            least,
            quartiles(worst),
            least >= BAR,
            detail=detail,
        )
    ]
