"""The personal model of a new client of a finished run: its store read as the run read its own, trained, measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedcache.config import Home
from fedcache.errors import StoppedError, StoreError, UsageError, shell_word
from fedcache.extract.device import resolve_device
from fedcache.extract.planning.find_store import need_store
from fedcache.federate.engine.client_data import prepare_features
from fedcache.models.evaluate import Measures, measure, model_labels, rows_of_store
from fedcache.models.model import Model
from fedcache.models.personalise import NewClient, personalise, settled, trains
from fedcache.models.predictor import Predictor, array_keys, encoders_of
from fedcache.models.saved_model import ModelOptions, PersonaliseOptions, SavedModel, check_place
from fedcache.notebooks import percent
from fedcache.process import Stop
from fedcache.progress import Observer
from fedcache.runs.predict_run import check_weights, load_model, open_members, weights_of
from fedcache.store.samples import SPLITS
from fedcache.store.store import Store

LONGEST_NAME = 200
"""Letters of a name that is that of a file too."""


@dataclass(frozen=True, repr=False)
class Personalised:
    """A model of a new client that was written."""

    client: str
    method: str
    path: Path  # of the file
    rows: int  # it was trained on
    rounds: int  # of training; 0 for a method that needs none
    measures: Measures | None  # on the store's test rows; None without labelled ones

    def model(self) -> Model:
        """The model, ready to classify images or features. Raises as ``fedcache.load_model``."""
        return load_model(self.path, None, None, None)

    @property
    def accuracy(self) -> float | None:
        """On the store's test rows, a fraction; None without labelled ones."""
        if self.measures is None:
            return None
        return self.measures.all.accuracy

    def __repr__(self) -> str:
        shown = percent(self.accuracy) or "not measured"
        return f"Personalised({self.client}, {self.method} from {self.rows:,} rows: {shown}, {self.path})"

    def to_dict(self) -> dict[str, Any]:
        """The ``data`` of the envelope."""
        measures = None if self.measures is None else self.measures.to_dict()
        return {**self.__dict__, "path": str(self.path), "measures": measures}


def personalise_run(
    place: Path,
    asked: ModelOptions,
    wanted: PersonaliseOptions,
    device: str,
    home: Home,
    observer: Observer,
    stop: Stop,
) -> Personalised:
    """Make, measure and write the model of a client that was not there.

    Raises UsageError for a file that is there already and several seeds, StoreError for a store without the model's
    features or labelled training rows, StoppedError after a stop; as ``models.personalise`` and ``open_members``.

    Args:
        place: the directory of a run, or a model file.
        asked: seed and weights of the run's model.
        wanted: store, name, settings, rounds and file.
        device: auto, cpu or cuda, which never falls back; auto is the CPU.
        home: where stores and weights are looked for.
        observer: told the rounds.
        stop: honoured before each round.
    """
    store = need_store(home, path=Path(str(wanted.store)))
    name = wanted.name or str(store.dataset.get("shard", {}).get("client", store.path.stem))
    if wanted.out is None and (Path(name).name != name or len(name) > LONGEST_NAME):
        raise UsageError(
            f"--name {name[:40]!r} cannot be the name of a file.",
            "-o FILE.safetensors says where the model goes.",
        )
    path = Path(wanted.out or f"{name}.safetensors")
    check_new(path)
    members = open_members(place, asked, observer)
    check_weights(asked, [members[0].facts.backbones])
    if len(members) > 1:
        raise UsageError("A client's model is made of one seed.", f"--seed {members[0].facts.seed}")
    (model,) = members
    method = model.find_method()
    hp = settled(model, method, wanted.set)
    if name in model.facts.saved:
        observer.note(f"{name} is a client of the run: it gets that client's draws.")
    client = client_of_store(model, store, name, method.reads(hp), home)
    if (left_out := rows_of_unknown_classes(store, model.facts.classes)) is not None:
        observer.warn(left_out)
    where = "cpu" if device == "auto" else resolve_device(device).kind
    encoders = encoders_of(model, home, weights_of(asked))
    encoders = None if encoders is None else encoders.to(where)
    rounds = (
        (model.facts.rounds if wanted.rounds is None else wanted.rounds) if trains(method) else 0
    )

    def each_round() -> None:
        if stop.requested:
            raise StoppedError(
                "Stopped before the model was trained.", "Run the same command again."
            )
        observer.advance(1)

    observer.start(f"training {name}", rounds, "rounds")
    try:
        made = personalise(
            model,
            client,
            settings=wanted.set,
            rounds=rounds,
            encoders=encoders,
            device=where,
            each_round=each_round,
        )
    finally:
        observer.stop()
    try:
        test = rows_of_store(store, "test", model.facts.classes)
    except StoreError as error:
        observer.note(f"The model is not measured: {error.message}")
        figures = None
    else:
        figures = measure(Predictor((made,), name, device=where, encoders=encoders), test)
    made.save(path)
    return Personalised(name, model.facts.method, path, len(client.train), rounds, figures)


def check_new(path: Path) -> None:
    """Refuse a file that is there already, is no .safetensors, or whose folder is missing. Raises UsageError."""
    check_place(path)
    if path.exists():
        raise UsageError(f"{path} is there already.", "-o another.safetensors, or remove it.")


def rows_of_unknown_classes(store: Store, classes: Sequence[str]) -> str | None:
    """What is said of labelled rows whose class a model does not know; None where there are none."""
    s = store.samples
    label = np.asarray(s.label, np.int64)
    unknown = (label >= 0) & (s.ok == 1) & (model_labels(label, s.classes, classes) < 0)
    if not unknown.any():
        return None
    names = [s.classes[c] for c in np.unique(label[unknown])]
    few = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
    labelled = int(((label >= 0) & (s.ok == 1)).sum())
    return (
        f"{int(unknown.sum()):,} of {labelled:,} labelled rows of {store.path.name} are of classes that the model does "
        f"not know ({few}): they are left out."
    )


def client_of_store(
    model: SavedModel, store: Store, name: str, reads: Sequence[str] | frozenset[str], home: Home
) -> NewClient:
    """A store as a client of the model's run.

    Raises StoreError for a store without the model's arrays, views that the method reads, or training rows of classes
    that the model knows.

    Args:
        model: of the run.
        store: the client's rows.
        name: of the client.
        reads: what clients of the method read.
        home: where what does not fit into memory is put.
    """
    facts = model.facts
    s = store.samples
    readers = [store.reader(key) for key in array_keys(model, store)]
    views = min(facts.views, *(r.shape[1] for r in readers))
    if "views" in reads and views < facts.views:
        raise StoreError(
            f"{store.path.name} holds {views} view of each image, and {facts.method} was trained on {facts.views}.",
            f"fedcache extract --views {shell_word(facts.views)} --backbones {shell_word(','.join(facts.backbones))}",
        )
    if facts.image is not None:
        whole = readers[-1].all()[:, 0]
        if whole.shape[1:3] != facts.image:
            raise StoreError(
                f"The model reads images of {facts.image[0]} x {facts.image[1]}, {store.path.name} holds "
                f"{whole.shape[1]} x {whole.shape[2]}.",
                f"fedcache extract --backbones pixels --size {shell_word(facts.image[0])}",
            )
        x = torch.from_numpy(np.ascontiguousarray(whole)).view(len(whole), 1, -1)
    else:
        scratch = home.root / "scratch"
        x, _ = prepare_features(
            readers, facts.feat_post, scaling=model.scaling, views=views, scratch=scratch
        )
        x = x.to(getattr(torch, facts.dtype))
    label = model_labels(np.asarray(s.label, np.int64), s.classes, facts.classes)
    train = (s.split == SPLITS.index("train")) & (s.ok == 1)
    if "labels" in reads:
        train &= label >= 0
    if not train.any():
        raise StoreError(
            f"{store.path.name} has no training rows of classes that the model knows.",
            f"Its classes are {', '.join(facts.classes[:5])}{', ...' if len(facts.classes) > 5 else ''}.",
        )
    return NewClient(name, x, torch.from_numpy(label), np.flatnonzero(train))
