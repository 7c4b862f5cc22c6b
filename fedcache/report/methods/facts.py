"""What there is to say of a method: its objective, its switches and their sides of each disagreement, what travels."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from fedcache.config import Home
from fedcache.extract import backbones
from fedcache.extract.backbones.clip_towers import load_towers
from fedcache.extract.planning.plan import memory_of
from fedcache.federate.engine.client_data import Data, FrozenEncoders
from fedcache.federate.engine.method import Method
from fedcache.federate.engine.run_state import RunState
from fedcache.federate.execution.executor import Sequential
from fedcache.federate.execution.grid_batch import GridBatch
from fedcache.federate.execution.load import ExecutionPlan
from fedcache.federate.methods import METHODS, module_of
from fedcache.federate.partition.partition import Client
from fedcache.report.methods.sizes import Sizes
from fedcache.runs.spec import with_schedule_rounds
from fedcache.runs.store_choice import wants_encoders

CLIENTS = 3
MOST_CLIENTS = 10
PER_CLASS = 2
IDLE = ("epochs", "personal_epochs", "esd_epochs", "e_h", "e_b", "K", "probe_epochs")
"""Numbers of passes over the rows: what travels does not depend on them."""


def traffic_of(method: Method, sizes: Sizes) -> dict[str, Any]:
    """What one client that owns every class sends and receives in a round, counted on rounds of no training.

    Returns:
        ``up``, ``down`` (scalars), ``up_bytes``, ``down_bytes``, ``paper_up``, ``paper_down`` of a round after the
        first; ``first_down`` of the first, which brings text features and no one's uploads; ``clients``, the number
        that the counts depend on, or 0.
    """

    hp = method.resolve()
    depends = not method.one_shot and "stack" in method.pool(hp).values()  # everyone's uploads come back
    count = min(method.defaults.clients, MOST_CLIENTS) if depends else CLIENTS
    data = _rows(method, sizes, count)
    per = PER_CLASS * sizes.classes
    rows = np.arange(count * per)
    clients = [Client(f"c{i}", rows[i * per : (i + 1) * per], rows[:0]) for i in range(count)]
    idle = {h.name: max(0, int(h.low or 0)) for h in method.hparams if h.name in IDLE}
    small = {"anchors": "all"} if "anchors" in hp else {}
    rounds = 1 if method.one_shot else 2
    job = RunState(method, with_schedule_rounds({**hp, **idle, **small}, rounds), data, clients, 0, torch.float32)
    job.start()
    executor = Sequential(GridBatch([job], ExecutionPlan(Sequential.name, 1)))
    for _ in range(rounds):
        executor.train_round()
    first, done = job.traffic.rounds[0], job.traffic.rounds[-1]
    served = max(1, done.clients)
    keys = ("up", "down", "up_bytes", "down_bytes", "paper_up", "paper_down")
    sends = {key: getattr(done, key) // served for key in keys}
    return {**sends, "first_down": first.down // served, "clients": count if depends else 0}


def _rows(method: Method, sizes: Sizes, clients: int) -> Data:
    """Rows of every class for every client: noise, as traffic does not depend on it."""

    need = method.reads(method.resolve())
    towers = _towers() if wants_encoders(method) else None
    width = towers.width if towers is not None else sizes.text_width if "text" in need else sizes.width
    count = clients * PER_CLASS * sizes.classes
    y = torch.arange(sizes.classes).repeat(clients * PER_CLASS)
    g = torch.Generator().manual_seed(0)
    side = 32
    if "pixels" in need:
        x = torch.randint(0, 256, (count, 1, side * side * 3), dtype=torch.uint8, generator=g)
    else:
        x = torch.nn.functional.normalize(torch.randn(count, 1, width, generator=g), dim=-1)
    text = torch.nn.functional.normalize(torch.randn(sizes.classes, width, generator=g), dim=-1)
    return replace(
        Data(x, y, sizes.classes, text if "text" in need else None, (width,)),
        names=tuple(f"class {i}" for i in range(sizes.classes)),
        image=(side, side) if "pixels" in need else None,
        towers=None if towers is None else towers.towers,
    )


@dataclass(frozen=True)
class _Tower:
    towers: FrozenEncoders
    width: int


def _towers() -> _Tower:
    """glyph-clip's towers, which ship with the package."""
    row = backbones.lookup("glyph-clip")
    home = Home.from_environment()
    weights = backbones.locate(row, given={}, home=home.root, memory=memory_of(home), offline=True)
    return _Tower(load_towers(row, weights, row.recipe, row.template or "{}"), row.width)


def facts_in_list(method: Method) -> dict[str, Any]:
    """What a list of methods says of one, besides what it sends."""
    return {
        "name": method.name,
        "summary": method.summary,
        "paper": method.paper,
        "needs": sorted(method.needs),
        "fidelity": fidelities(method),
        "one_shot": method.one_shot,
    }


def every_method(sizes: Sizes) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """(facts, traffic) of every method, counted now: seconds, where the catalogue takes none."""
    return [(facts_in_list(m), traffic_of(m, sizes)) for m in METHODS.values()]


def objective(name: str) -> str:
    """The equations of a method and where papers and code part: the docstring of its file."""
    return (sys.modules[module_of(name)].__doc__ or "").strip()


def disagreements(method: Method) -> list[dict[str, str]]:
    """Each switch that decides a numbered disagreement, with the value on either side."""
    return [
        {
            "d": ", ".join(re.findall(r"D-\d\d", h.help)),
            "switch": h.name,
            "paper": h.show(),
            "official": h.show(h.official) if h.official is not None else h.show(),
        }
        for h in method.hparams
        if re.search(r"D-\d\d", h.help)
    ]


def fidelities(method: Method) -> str:
    """What a result may call itself: with one stored view, and with four where that differs."""
    hp = method.resolve()
    one, four = method.fidelity(hp, 1), method.fidelity(hp, 4)
    return one if one == four else f"{one}; {four} with views"
