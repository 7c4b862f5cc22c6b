"""The ServerApp: the app's configuration is the plan, and what happens is told in lines that ``flower run`` reads."""

from __future__ import annotations

import json
from typing import Any

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fedcache.config import Home
from fedcache.errors import FedcacheError
from fedcache.federate.engines.flower.messages import error_words
from fedcache.federate.engines.flower.network import MARK
from fedcache.federate.engines.flower.plan import Plan
from fedcache.federate.engines.flower.processes import end_with_parent
from fedcache.federate.engines.flower.server import federate
from fedcache.federate.engines.flower.site_names import SiteNames
from fedcache.federate.engines.flower.transport import FlowerTransport
from fedcache.progress import Round, Silent

app = ServerApp()


def tell(**words: Any) -> None:
    """One line of the log."""
    print(MARK + json.dumps(words), flush=True)


class Logged(Silent):
    """An observer whose story is the run's log."""

    def note(self, text: str) -> None:
        tell(note=text)

    def warn(self, text: str) -> None:
        tell(warn=text)

    def told(self, round_: Round) -> None:
        """A line per round that is computed now."""
        if round_.stored:
            return
        scored = ""
        if round_.accuracy is not None:
            scored = f", accuracy {100 * round_.accuracy:.2f} % as the sites claim"
        point = "Seed"
        if round_.point:
            point = f"{round_.point}, seed"
        tell(note=f"{point} {round_.seed}, round {round_.round} of {round_.rounds}{scored}.")


class FailedError(Exception):
    """Ends the run as failed. Flower sends the last lines of a log when an app raises, and not when it exits."""


def main(grid: Grid, context: Context) -> None:
    """Run the plan, and say where results are. Raises FailedError; ``flower run`` has the reason from the log."""
    end_with_parent()
    try:
        plan = Plan.from_config(context.run_config)
        home = Home.from_environment()
        names = SiteNames.from_environment()
        runs = federate(plan, FlowerTransport(grid), home, Logged(), names)
    except FedcacheError as error:
        tell(error=error_words(error))
        raise FailedError(error.message) from None
    tell(
        done=[
            {
                "path": str(run.path),
                "reused": run.reused,
                "sweep": swept,
                "result": _short(run.result),
            }
            for (swept, _), run in zip(plan.points, runs, strict=True)
        ]
    )


def _short(result: dict[str, Any]) -> dict[str, Any]:
    """What a line of the log has room for: no figure per client."""
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
    )
    accuracy = {k: result["accuracy"][k] for k in ("mean", "std", "per_seed")}
    if "trust" in result:
        trust = {"trust": result["trust"]}
    else:
        trust = {}
    return {**{k: result[k] for k in kept}, **trust, "accuracy": accuracy}


app.main()(main)
