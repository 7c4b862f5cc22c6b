"""Models of finished runs, for ``load_model``, ``evaluate``, ``personalise`` and ``forget`` of the Python API."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from fedcache.calls.keywords import names_checked
from fedcache.config import ExtractConfig, Home, resolve
from fedcache.errors import UsageError
from fedcache.extract.planning.find_images import ImagePlaces
from fedcache.federate.engine.method import Method
from fedcache.models.evaluate import RunEvaluation
from fedcache.models.model import Model
from fedcache.models.saved_model import EvaluateOptions, ModelOptions, PersonaliseOptions
from fedcache.process import Stop
from fedcache.progress import Observer, Silent
from fedcache.report.evaluation import check_request, write_evaluations
from fedcache.report.find_runs import find_one
from fedcache.runs import predict_run
from fedcache.runs.evaluate_run import evaluate_runs
from fedcache.runs.forget import Forgotten, forget_client
from fedcache.runs.predict_run import Personalised, personalise_run
from fedcache.runs.run import Run
from fedcache.store.store import Store


def place_of(source: object) -> Path:
    """The directory of a run, from a ``Run``, a path or the first letters of a digest; or a model file.

    Raises UsageError for any other object.
    """
    if isinstance(source, Run):
        return source.path
    if not isinstance(source, str | Path):
        kind = type(source).__name__
        hint = "Give a Run, its directory or a file."
        if isinstance(source, list | tuple):
            hint = "Evaluate one run at a time: [fc.evaluate(run, store=store) for run in runs]"
        elif isinstance(source, Model):
            hint = 'model.save("m.safetensors") writes a file. Give its path.'
        raise UsageError(f"A model is loaded from a run or a file, but a {kind} was given.", hint)
    # A path with a suffix is a file, even if the file does not exist: the first letters of a digest have no suffix.
    place = Path(source)
    if place.exists() or place.suffix:
        return place
    return find_one(str(source), Home.from_environment().runs)


def load_model(
    source: str | Path | Run,
    client: str | None = None,
    seed: int | Literal["all"] | None = None,
    method: Method | None = None,
    *,
    one_for_all: bool = False,
    client_prior: Literal["none", "classes", "counts", "fitted"] = "none",
) -> Model:
    """The trained model of a finished run: ``fc.load_model("model.safetensors").predict("photos/")``.

    Args:
        source: a ``Run``, the directory of a run, the first letters of its digest, or a model file.
        client: client whose personal model is loaded.
        seed: a seed of the run, ``"all"`` for the ensemble of all seeds; None for the first.
        method: the method of the run, if it is your own.
        one_for_all: whether to load the server's model of a method that also trains personal models.
        client_prior: add the log class prior of ``client`` to the scores, as in ``evaluate``.

    Raises UsageError for an unknown seed or client, StoreError for a run without models, CorruptionError for a damaged
    file.
    """
    return predict_run.load_model(
        place_of(source),
        client,
        seed,
        method,
        one_for_all=one_for_all,
        client_prior=client_prior,
    )


def path_of(store: Store | str | Path | None) -> str | None:
    """A store or file as the value of an option. Raises UsageError for any other object."""
    if store is None:
        return None
    if isinstance(store, Store):
        return store.place
    if not isinstance(store, str | Path):
        raise UsageError(
            f"Expected a store, a path or a name; found {type(store).__name__}.",
            "model.scores(X) takes features in memory.",
        )
    return str(store)


def evaluate(given: Mapping[str, Any]) -> RunEvaluation:
    """The figures of a run's model; ``given`` are the arguments of ``fedcache.evaluate``."""
    if isinstance(given["dataset"], Store):
        raise UsageError(
            "The second argument must be a dataset, but a store was given.",
            "fc.evaluate(run, store=store)",
        )
    # Exactly one argument names the rows to evaluate on.
    rows = {name: path_of(given[name]) for name in ("dataset", "store", "embeddings")}
    named = [name for name, value in rows.items() if value is not None]
    if len(named) != 1:
        names = " and ".join(named) or "none"
        raise UsageError(
            f"Give exactly one of dataset, store or embeddings to evaluate on; found {names}.",
            'For example fc.evaluate(run, "folder:photos")',
        )
    # The third argument, options of a command line, is empty in Python.
    config = resolve(ExtractConfig, given["options"] or {}, {}, "evaluate()")
    config = replace(config, dataset=given["dataset"])
    out = None
    if given["out"] is not None:
        out = Path(given["out"])
    with_images = bool(given["with_images"])
    check_request(out, with_images=with_images)
    options = ModelOptions(
        given["client"],
        given["one_for_all"],
        _seed_text(given["seed"]),
        given["temperature"],
        str(given["client_prior"]),
        config.weights,
    )
    request = EvaluateOptions(
        **rows,
        split=given["split"],
        coverage=given["coverage"],
        adapt=given["adapt"],
        set=given["settings"] or {},
        with_images=with_images,
    )
    home = Home.from_environment()
    place = place_of(given["source"])
    observer = given["observer"] or Silent()
    (evaluation,) = evaluate_runs([place], options, request, config, home, observer, Stop())
    if out is not None:
        images = None
        if with_images:
            images = ImagePlaces(home, config.data)
        write_evaluations(out, [evaluation], images, observer)
    return evaluation


def personalise(given: Mapping[str, Any]) -> Personalised:
    """The model of a new client; ``given`` are the arguments of ``fedcache.personalise``."""
    options = ModelOptions(seed=_seed_text(given["seed"]), weights=given["weights"] or {})
    request = PersonaliseOptions(
        path_of(given["store"]),
        given["name"],
        given["settings"] or {},
        given["rounds"],
        path_of(given["out"]),
    )
    place = place_of(given["source"])
    observer = given["observer"] or Silent()
    device = given["device"] or "auto"
    home = Home.from_environment()
    return personalise_run(place, options, request, device, home, observer, Stop())


@names_checked
def forget(source: str | Path | Run, client: str, *, observer: Observer | None = None) -> Forgotten:
    """Train a run again without one client: ``fc.forget(run, "client-03").run.accuracy.mean``.

    Args:
        source: a ``Run``, the directory of a run, or the first letters of its digest.
        client: name of the client.
        observer: as in ``extract``.

    Raises the FedcacheError of the command, with its exit code and hint.
    """
    home = Home.from_environment()
    return forget_client(place_of(source), client, home, observer or Silent(), Stop())


def _seed_text(seed: int | str | None) -> str | None:
    """A seed as the value of an option."""
    if seed is None:
        return None
    return str(seed)
