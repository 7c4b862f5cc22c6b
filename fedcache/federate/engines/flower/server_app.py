"""ServerApp: it runs the plan in the app's configuration and logs in lines that ``fedcache flower run`` reads."""

from __future__ import annotations

import json
from typing import Any

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fedcache.config import Home
from fedcache.errors import FedcacheError
from fedcache.federate.engines.flower.messages import error_words
from fedcache.federate.engines.flower.plan import Plan
from fedcache.federate.engines.flower.processes import MARK, end_with_parent
from fedcache.federate.engines.flower.server import federate
from fedcache.federate.engines.flower.site_names import SiteNames
from fedcache.federate.engines.flower.transport import FlowerTransport
from fedcache.parsing import Facts
from fedcache.progress import Round, Silent

app = ServerApp()


def log_line(**words: Any) -> None:
    """Print one line of the log."""
    print(MARK + json.dumps(words), flush=True)


class Logged(Silent):
    """Observer that writes the run's log."""

    def note(self, text: str) -> None:
        log_line(note=text)

    def warn(self, text: str) -> None:
        log_line(warn=text)

    def round_done(self, round_: Round) -> None:
        """Log a round, unless it was stored before."""
        if round_.stored:
            return
        words = f"seed {round_.seed}, round {round_.round} of {round_.rounds}"
        if round_.point:
            words = f"{round_.point}, {words}"
        else:
            words = words.capitalize()
        if round_.accuracy is not None:
            scored = round_.diagnostics.get("scored")
            sites = "the sites"
            if scored is not None:
                sites = f"only {scored:.0f} sites"
            words += f", accuracy {100 * round_.accuracy:.2f} % as reported by {sites}"
        log_line(note=f"{words}.")


class FailedError(Exception):
    """Ends the run as failed. Flower sends the last lines of a log only if an app raises, not if it exits."""


def main(grid: Grid, context: Context) -> None:
    """Run the plan and log where the results are. Raises FailedError; the reason is in the log."""
    end_with_parent()
    try:
        plan = Plan.from_config(context.run_config)
        home = Home.from_environment()
        names = SiteNames.from_environment()
        runs = federate(plan, FlowerTransport(grid), home, Logged(), names)
    except FedcacheError as error:
        log_line(error=error_words(error))
        raise FailedError(error.message) from None
    done = []
    for (swept, _), run in zip(plan.points, runs, strict=True):
        result = _short(run.result)
        done.append({"path": str(run.path), "reused": run.reused, "sweep": swept, "result": result})
    log_line(done=done)


def _short(result: Facts) -> Facts:
    """A result without the figures of single clients, short enough for a line of the log."""
    kept = (
        "method",
        "protocol",
        "digest",
        "hyperparameters",
        "seeds",
        "rounds",
        "dataset",
        "backbones",
        "federation",
        "traffic",
        "trust",
    )
    short = {name: result[name] for name in kept if name in result}
    short["accuracy"] = {name: result["accuracy"][name] for name in ("mean", "std", "per_seed")}
    return short


app.main()(main)
