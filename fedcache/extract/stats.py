"""What an extraction did, counted while it runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from fedcache.errors import CorruptionError
from fedcache.extract.batches import ComputedBatch
from fedcache.store.quarantine import VANISHED


@dataclass
class ExtractionStats:
    """What an extraction did; the figures of its last line.

    Attributes:
        images: images decoded in this process tree.
        forward_batches: per key, batches computed.
        forward_images: images that went through a model, summed over arrays.
        kept_chunks: per key, chunks found finished.
        bad: reason per quarantined row, all arrays of the run.
        seconds: wall time of the extraction loop.
        decode_seconds: summed over workers.
        forward_seconds: summed over workers and backbones.
        workers: processes that computed.
    """

    images: int = 0
    forward_batches: dict[str, int] = field(default_factory=dict)
    forward_images: int = 0
    kept_chunks: dict[str, int] = field(default_factory=dict)
    bad: dict[int, str] = field(default_factory=dict)
    seconds: float = 0.0
    decode_seconds: float = 0.0
    forward_seconds: float = 0.0
    workers: int = 0

    def add(self, batch: ComputedBatch) -> None:
        """Count a batch that was computed in this process tree."""
        self.images += batch.decoded - sum(why == VANISHED for why in batch.bad.values())
        self.decode_seconds += batch.decode_seconds
        self.bad.update(unreadable(batch.bad))
        for key, seconds in batch.forward_seconds.items():
            self.forward_seconds += seconds
            self.forward_batches[key] = self.forward_batches.get(key, 0) + 1
            self.forward_images += len(batch.features[key]) - len(batch.bad)

    def merge(self, other: ExtractionStats) -> None:
        """Add the counts of a chunk task that another process computed."""
        self.images += other.images
        self.decode_seconds += other.decode_seconds
        self.forward_seconds += other.forward_seconds
        self.forward_images += other.forward_images
        self.bad.update(other.bad)
        for key, count in other.forward_batches.items():
            self.forward_batches[key] = self.forward_batches.get(key, 0) + count

    def check_bad(self, latest: Mapping[int, str], max_bad: int) -> None:
        """Refuse more bad images than there may be; ``latest`` are those found last, by row, if any were.

        Raises:
            CorruptionError, with the last reason.
        """
        if len(self.bad) > max_bad:
            row, reason = sorted((latest or self.bad).items())[-1]
            raise CorruptionError(
                f"{len(self.bad)} images could not be read, more than --max-bad {max_bad}; the last is row {row}: "
                f"{reason}.",
                "Mend the images, or run again with a larger --max-bad: finished chunks are kept.",
            )

    @property
    def rate(self) -> float:
        """Images per second."""
        return self.images / self.seconds if self.seconds else 0.0

    def busy(self, cores: int) -> float:
        """Share of the cores' time that went into decoding and the models."""
        return (self.decode_seconds + self.forward_seconds) / (self.seconds * cores) if self.seconds else 0.0


def unreadable(bad: Mapping[int, str]) -> dict[int, str]:
    """Rows whose image is there and cannot be read; one that has vanished is no defect."""
    return {row: reason for row, reason in bad.items() if reason != VANISHED}
