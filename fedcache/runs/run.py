"""A finished run, as Python and notebooks have it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedcache.notebooks import html_facts
from fedcache.runs.display import facts_of, frame_of, spread
from fedcache.runs.figures import Figures, TrafficFigures


@dataclass
class Run:
    """A finished run.

    Attributes:
        path: its directory.
        result: what ``result.json`` holds.
        measured: what ``measured.json`` holds; of the run that made the result.
        reused: whether the result was there already.
    """

    path: Path
    result: dict[str, Any]
    measured: dict[str, Any]
    reused: bool = False

    @property
    def accuracy(self) -> Figures:
        """mean, std (over seeds, ddof 1), per_seed, per_client: fractions."""
        return Figures("accuracy", self.result["accuracy"])

    @property
    def traffic(self) -> TrafficFigures:
        """Scalars and bytes up and down, exact and as the paper counts; ``bytes_up`` and ``bytes_down`` are exact."""
        return TrafficFigures("traffic", self.result["traffic"])

    @property
    def fairness(self) -> Figures:
        """How accuracy is spread over clients; a tail of too few clients is None."""
        return Figures("fairness", self.result["fairness"])

    @property
    def trust(self) -> Figures:
        """Rule, attack, liars, rejected uploads and privacy; {} for an ordinary run."""
        return Figures("trust", self.result.get("trust", {}))

    def to_dict(self) -> dict[str, Any]:
        """The ``data`` of the envelope."""
        return {
            **self.result,
            "seconds": self.measured.get("seconds", {}),
            "path": str(self.path),
            "reused": self.reused,
        }

    def frame(self, what: str = "rounds") -> Any:
        """pandas columns: ``rounds``, one row per seed and round, or ``clients``, one per client.

        Raises:
            UsageError for another word; MachineError without pandas.
        """
        return frame_of(self.path, self.result, what)

    def __repr__(self) -> str:
        return f"Run({self._title()}: {spread(self.result['accuracy'])}, {self.path})"

    def _repr_html_(self) -> str:
        return html_facts(f"Run: {self._title()}", facts_of(self.result, self.measured, self.path))

    def _title(self) -> str:
        r = self.result
        return f"{r['method']} on {r['dataset']['slug']}, {' + '.join(r['backbones'])}"
