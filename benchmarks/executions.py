"""FedAvg of a linear head, whole runs: the chosen execution against a clean loop with torch.optim, one thread."""

from __future__ import annotations

from functools import partial

import torch

from benchmarks import clean
from benchmarks.measure import Row, Seconds, at_least, in_turn
from fedcache.heads.linear import times_transposed

SETTINGS = {"head": "linear", "opt": "sgd", "lr": 0.1, "momentum": 0.9, "wd": 1e-4, "batch": 32}
CASES = (
    (10, 100, 50, 10, 6.0),
    (10, 100, 500, 4, 3.0),
    (100, 100, 50, 6, 3.0),
    (10, 1000, 50, 6, 5.0),
)
"""(classes, clients, rows, rounds, target) of 1,024 features. Gram matrices and the evaluation are inside the time."""


def rows() -> list[Row]:
    torch.set_num_threads(1)
    made = [against_a_loop_by_hand()]
    for C, M, n, rounds, bar in CASES:
        f = clean.federation(M, n, C)
        parts = f.cut()
        chosen = f.ours("fedavg", SETTINGS).execution
        calls = {
            "clean loop": partial(clean.fedavg, parts, C, rounds, clean.sgd()),
            "sequential": partial(f.ours, "fedavg", SETTINGS, "sequential", rounds),
            f"chosen execution {chosen}": partial(f.ours, "fedavg", SETTINGS, "auto", rounds),
        }
        name = f"fedavg linear, C={C}, {M} x {n}"
        target = f">= {bar:g} x a clean loop"
        least = floor(f, C, rounds)
        detail = f"{rounds} rounds, 1 thread; products and gathers alone {1e3 * least:.0f} ms"
        made.append(
            at_least(
                name,
                target,
                bar,
                calls,
                "clean loop",
                f"chosen execution {chosen}",
                detail=detail,
                roofline=partial(limit, least=least, bar=bar),
            )
        )
    return made


def against_a_loop_by_hand() -> Row:
    """What a competent engineer would write instead of a loop over clients, which needs clients of one size."""
    C, M, n, rounds, _ = CASES[0]
    f = clean.federation(M, n, C)
    calls = {
        "loop by hand": partial(clean.fedavg_by_hand, f.cut(), C, rounds),
        "fedcache": partial(f.ours, "fedavg", SETTINGS, "auto", rounds),
    }
    name = "fedavg beside a loop vectorised by hand"
    target = ">= 1.5 x the loop by hand"
    detail = f"C={C}, {M} x {n}, {rounds} rounds, 1 thread; gradients written out, all clients in one product"
    return at_least(name, target, 1.5, calls, "loop by hand", "fedcache", detail=detail)


def limit(seconds: Seconds, least: float, bar: float) -> str:
    """Why no execution reaches ``bar``, if products and gathers alone (``least`` seconds) forbid it; else nothing."""
    most = min(seconds["clean loop"]) / least
    if most >= bar:
        return ""
    return f"products and gathers alone allow at most {most:.1f} x, with nothing else"


def floor(f: clean.Federation, classes: int, rounds: int) -> float:
    """Seconds of what no execution leaves out, each part at the fastest of the shapes that were tried.

    With Gram matrices these once, and the scores and the upload of each round; without them the rows of each round
    gathered in batches, and products forth and back.
    """
    M = len(f.clients)
    D = f.data.x.shape[-1]
    parts = torch.stack([x for x, _ in f.cut()])  # [M, n, D]
    n = parts.shape[1]
    flat = parts.view(M * n, D)
    W = torch.randn(classes, D)
    du = torch.randn(classes, M * n)
    own = torch.randn(M, classes, D)
    back = torch.randn(M, classes, 32)
    order = torch.stack([torch.randperm(n) + i * n for i in range(M)])
    steps = [order[:, at : at + 32].reshape(-1) for at in range(0, n, 32)]

    def batches() -> None:
        for rows in steps:
            x = flat.index_select(0, rows).view(M, -1, D)
            torch.bmm(own, x.mT)
            torch.bmm(back[..., : x.shape[1]], x)

    ways = {
        "gram": lambda: torch.bmm(parts, parts.mT),
        "scores": lambda: times_transposed(W, flat),
        "upload": lambda: times_transposed(du, flat.mT),
        "batches": batches,
    }
    best = {name: min(taken) for name, taken in in_turn(ways, 5).items()}
    return min(best["gram"] + rounds * (best["scores"] + best["upload"]), rounds * best["batches"])
