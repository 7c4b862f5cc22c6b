"""``fedcache personalise``: makes the personal model of a new client."""

from __future__ import annotations

from fedcache.commands.options import Given, command, configured, pick, worded
from fedcache.commands.output import CommandResult, TerminalObserver
from fedcache.commands.predict import RunName, find_model
from fedcache.config import ExtractConfig, Home
from fedcache.errors import UsageError, shell_word
from fedcache.models.saved_model import ONE_SEED, ModelOptions, PersonaliseOptions
from fedcache.process import stopped_by_signals
from fedcache.progress import percent

MODEL = worded(pick(ModelOptions, "seed", "weights", "runs"), "seed", meaning=ONE_SEED)


@command("personalise", pick(PersonaliseOptions), MODEL, pick(ExtractConfig, "device"))
def personalise(observer: TerminalObserver, given: Given, run: RunName) -> CommandResult:
    """Make the personal model of a new client that took no part in training.

    The new client receives the last message of the run's server. It trains its personal part of the model on its
    training rows, as the clients of the run did, and sends nothing. fedcache evaluates the model on the test rows of
    the store and writes it to a file.

    Example: fedcache personalise 3f9c --store newcomer.zarr -o newcomer.safetensors
    """
    model = configured(ModelOptions, given)
    request = configured(PersonaliseOptions, given)
    if request.store is None:
        raise UsageError(
            "Missing option --store, which names the rows of the new client.",
            "--store newcomer.zarr",
        )
    # The run is looked up before torch is imported, so that a wrong name is refused at once.
    place = find_model(run, given["runs"], observer)
    from fedcache.runs.predict_run import personalise_run

    device = given.get("device") or "auto"
    home = Home.from_environment()
    with stopped_by_signals(observer.note) as stop:
        personal = personalise_run(place, model, request, device, home, observer, stop)
    trained = ""
    if personal.rounds:
        trained = f" in {personal.rounds} rounds"
    rows = f"{personal.rows:,} rows{trained}"
    lines = [f"{personal.client}: a model of {personal.method} from {rows}"]
    if personal.measures is not None:
        measured = personal.measures.all
        interval = ""
        if measured.interval is not None:
            bounds = " to ".join(percent(v) for v in measured.interval)
            interval = f" ({bounds})"
        accuracy = percent(measured.accuracy)
        lines.append(f"accuracy {accuracy} %{interval} on {measured.rows:,} test rows of the store")
    lines += [
        str(personal.path),
        f"Next:  fedcache predict {shell_word(personal.path)} photo.jpg",
    ]
    return CommandResult(personal.to_dict(), lines)
