"""``fedcache train``."""

from __future__ import annotations

from pathlib import Path

from fedcache.allocator import keep_freed_memory
from fedcache.commands.options import (
    ConfigFile,
    Given,
    Json,
    check_methods,
    partition_config,
    pick,
    train_config,
    with_options,
)
from fedcache.commands.output import CommandResult, TerminalObserver, run_command, stop_on_signals
from fedcache.commands.run_output import plan_answer, result_lines
from fedcache.config import Home, PartitionConfig, TrainConfig, read_file
from fedcache.config.sections import RunOptions, SchemeArguments
from fedcache.errors import UsageError
from fedcache.extract.stop import Stop
from fedcache.runs.trackers import tracking


@with_options(pick(TrainConfig), pick(PartitionConfig), pick(SchemeArguments), pick(RunOptions))
def train(given: Given, config: ConfigFile = None, json: Json = False) -> None:
    """Train a federated method on cached features.

    What is left out takes the setting of the method's paper; each choice is printed. The same run again returns the
    stored result, a killed one goes on.

    Example: fedcache train --method fed3r --scheme dirichlet --clients 100 --alpha 0.1
    """

    def call(observer: TerminalObserver) -> CommandResult:
        file = read_file(config)
        resolved, partition = train_config(file, given), partition_config(file, given)
        check_methods([resolved.method] if resolved.method else [])
        home = Home.from_environment()
        if given["dry_run"]:
            from fedcache.grids import grid as grids

            if resolved.method is None:
                raise UsageError("No method was named.", "For example fedcache train --method fed3r")
            request = grids.request_grid([resolved.method], {}, resolved, home, partition=partition)
            return plan_answer(grids.grid_plan(request, observer))
        from fedcache.runs.loop import train as run

        stop, runs = Stop(), given["runs"] and Path(given["runs"])
        keep_freed_memory()
        with stop_on_signals(stop.ask, observer), tracking(given["track"], home, runs, observer) as hooks:
            done = run(
                resolved,
                home,
                partition=partition,
                runs=runs,
                repartition=given["repartition"],
                extract=not given["no_extract"],
                fresh=given["fresh"],
                observer=observer,
                hooks=hooks,
                stop=stop,
            )
        return CommandResult(done.to_dict(), result_lines(done.result, done.measured, str(done.path)))

    run_command("train", json, call)
