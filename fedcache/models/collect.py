"""What a run trained as one ``SavedModel``: the server's tensors, and the model of each client that is to be saved."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedcache.errors import UsageError, unknown
from fedcache.federate.engine.client_data import Data
from fedcache.federate.engine.deployed import DeployedModel, no_training_rows
from fedcache.federate.engine.feature_post import Scaling
from fedcache.federate.engine.outcome import TrainingOutput
from fedcache.federate.methods import METHODS, NAMES
from fedcache.heads.linear import Tree
from fedcache.models.client_stacks import ClientTensors
from fedcache.models.saved_model import ModelFacts, SavedModel

MOST_BYTES = 256 << 20
"""Personal models of one seed that are saved without being asked for; ``--save-clients`` saves any."""


@dataclass(frozen=True)
class Collected:
    """A model, and what there is to say about it."""

    model: SavedModel
    notes: tuple[str, ...]  # sentences


def collect(
    out: TrainingOutput,
    facts: ModelFacts,
    data: Data,
    scaling: Scaling | None,
    clients: str | None = None,
) -> Collected | None:
    """The models of a seed; None where the one model for all is not there.

    Raises UsageError for a client in ``clients`` that the run has not.

    Args:
        out: of the seed.
        facts: of the run; ``saved`` is filled in here.
        data: what was trained on, for its text features.
        scaling: the numbers of ``feat_post=standardize``.
        clients: ``--save-clients``: all, none, or names, comma-separated; None for all up to ``MOST_BYTES``.
    """
    tensors: dict[str, Tensor] = {}
    if data.text is not None:
        tensors["features/text"] = data.text
    if scaling is not None:
        tensors |= {
            "features/mean": torch.from_numpy(scaling.mean),
            "features/scale": torch.from_numpy(scaling.scale),
        }
    notes: list[str] = []
    if not facts.personal:
        one = out.deployed(None)
        if one is None:
            return None
        check_saved(one, data)
        tensors |= {f"server/{name}": t for name, t in one.down.items()}
        return Collected(SavedModel(facts, owned(tensors)), ())
    saved: dict[str, int] = {}
    rows = ClientTensors()
    shared, left_out = out.broadcast(), 0
    tensors = owned(tensors | {f"server/{name}": t for name, t in shared.items()})
    for number in chosen_clients(out.clients, clients):
        own = out.deployed(number)
        if own is None:
            continue
        if not saved:
            check_saved(own, data)
        one_client = client_tensors(own, shared)
        size = sum(t.numel() * t.element_size() for t in one_client.values())
        if clients is None and not saved and size * len(out.clients) > MOST_BYTES:
            left_out = size * len(out.clients)
            break
        saved[out.clients[number]] = number
        rows.add(number, owned(one_client))
    if left_out:
        notes.append(
            f"Models of {len(out.clients):,} clients would take {left_out / 1e6:,.0f} MB and are not saved: "
            "--fresh --save-clients all, or the names of some, saves them."
        )
    return Collected(
        SavedModel(replace(facts, saved=saved), tensors | rows.stacked()), tuple(notes)
    )


def client_tensors(model: DeployedModel, shared: Tree) -> Tree:
    """What a client's model has in the place of what all share (``down/NAME``), and beside it (``own/NAME``)."""
    own = {f"down/{k}": t for k, t in model.down.items() if t is not shared.get(k)}
    return own | {f"own/{k}": t for k, t in model.personal.items()}


def chosen_clients(names: Sequence[str], asked: str | None) -> list[int]:
    """The numbers of the clients that ``--save-clients`` names.

    Raises UsageError for a name that no client has.
    """
    if asked in (None, "all"):
        return list(range(len(names)))
    if asked == "none":
        return []
    numbers = {name: i for i, name in enumerate(names)}
    wanted = [part.strip() for part in str(asked).split(",") if part.strip()]
    for name in wanted:
        if name not in numbers:
            raise unknown(
                "client", name, list(numbers), hint="--save-clients all | none | NAME,NAME"
            )
    return sorted({numbers[name] for name in wanted})


def check_saved(model: DeployedModel, data: Data) -> None:
    """Refuse a user's own method whose ``predict`` reads what a file does not hold; UsageError says what to do."""
    if model.method.name in NAMES and METHODS[model.method.name] is model.method:
        return  # a test holds it for every method of the package
    x = data.x[:1, 0, : model.ctx.env.width]
    x = x.to(model.ctx.env.dtype) if x.is_floating_point() else x
    apart = replace(model, data=no_training_rows(model.method.name))
    with torch.no_grad():
        scores = apart.scores(x)
    if scores.shape[-1] != data.classes:
        raise UsageError(
            f"predict of {model.method.name} gives {scores.shape[-1]} scores for {data.classes} classes.",
            "Return scores [N, C].",
        )


def owned(tree: Tree) -> Tree:
    """Copies on the CPU that share no memory with one another, as a file wants them."""
    return {name: t.detach().to("cpu", copy=True).contiguous() for name, t in tree.items()}
