"""A site's own model, kept on its machine: what it deploys when it is scored, in the form of a run's saved models.

The server never has it. The file is replaced whenever the site is scored, so that it is that of the last round, and
``fedcache predict FILE IMAGES`` classifies with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedcache.federate.engine.evaluate import deployed_model, has_model
from fedcache.federate.engine.run_state import RunState
from fedcache.models.client_stacks import ClientTensors
from fedcache.models.collect import client_tensors, owned
from fedcache.models.saved_model import ModelFacts, SavedModel, computed_as
from fedcache.runs.identity import code_of
from fedcache.store.files import make_private
from fedcache.store.store import Store

FOLDER = "models"


@dataclass(frozen=True)
class SiteModels:
    """Where a site keeps its models, and what they read."""

    state: Path  # of the site's client
    store: Store
    keys: tuple[str, ...]  # arrays it trains on
    feat_post: str
    client: str  # its name

    def path(self, job: str) -> Path:
        """The model of a job: one point and seed of a federation."""
        return self.state / FOLDER / f"{job}.safetensors"

    def keep(self, run: RunState, job: str, seed: int, hp: Mapping[str, Any]) -> None:
        """Save what the site deploys now; nothing where all sites have the server's model."""
        method, number = run.method, int(run.eligible[0])
        if method.protocol(run.hp) == "global" or not has_model(run, number):
            return
        down, arrays = run.down(), [self.store.arrays[key] for key in self.keys]
        model = deployed_model(run, number, down)
        facts = ModelFacts(
            run=job,
            seed=seed,
            dataset=str(self.store.dataset["slug"]),
            method=method.name,
            code=code_of(method),
            hp=dict(hp),
            protocol=method.protocol(run.hp),
            rounds=run.round,
            dtype=str(run.env.dtype).removeprefix("torch."),
            classes=tuple(self.store.samples.classes),
            keys=self.keys,
            recipes=tuple(array.recipe for array in arrays),
            widths=tuple(int(array.shape[2]) for array in arrays),
            views=run.env.views,
            feat_post=self.feat_post,
            clients=run.env.clients,
            saved={self.client: number},
            computed=computed_as([array.how for array in arrays]),
        )
        text = {} if run.env.text is None else {"features/text": run.env.text}
        rows = ClientTensors()
        rows.add(number, owned(client_tensors(model, down)))
        tensors = owned(text | {f"server/{k}": t for k, t in down.items()}) | rows.stacked()
        for folder in (self.state, self.state / FOLDER):
            folder.parent.mkdir(parents=True, exist_ok=True)
            make_private(folder)
        SavedModel(facts, tensors).save(self.path(job))
