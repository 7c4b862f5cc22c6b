"""What may be asked of the model of a run, as options of ``predict``, ``evaluate`` and ``export-model``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fedcache.config import DATASET
from fedcache.option_info import option

MODEL, ROWS, RESULT = "Model", "Rows", "Result"
"""Panels of the help."""

BATCH_OF_THE_RUN = "that of the run's features"
"""The batch in which images are computed unless ``--batch`` says one, in words."""

ONE_SEED = "A seed of the run."
"""What ``--seed`` is to the commands that make one model of one."""


@dataclass(frozen=True)
class ModelOptions:
    """Which model of a run."""

    client: str | None = option(
        None,
        "Whose model, of a method that trains one for each client.",
        MODEL,
        said="the one for all",
    )
    one_for_all: bool = option(
        False,
        "The server's model, where a method trains personal ones beside it.",
        MODEL,
        names=("--global",),
    )
    seed: str | None = option(
        None, "A seed of the run, or all: their mean probability.", MODEL, said="the run's first"
    )
    temperature: float | None = option(
        None,
        "Scores are divided by it before the softmax.",
        MODEL,
        said="that fitted in training, or 1",
    )
    weights: Mapping[str, str] = option(
        {}, "NAME=FILE, a backbone's local weights; repeatable.", MODEL, said="looked for by name"
    )
    backbone: tuple[str, ...] = option(
        (), "A module: backbone that the model reads and whose code you trust.", MODEL, said="none"
    )
    runs: str | None = option(
        None,
        "Directory of the runs, instead of the one under FEDCACHE_HOME.",
        MODEL,
        path=True,
        said="$FEDCACHE_HOME/runs",
    )

    def __post_init__(self) -> None:
        # Python code may say client=0: a name as any other, which is found or refused with those that are there.
        if self.client is not None:
            object.__setattr__(self, "client", str(self.client))


@dataclass(frozen=True)
class PredictOptions:
    """Which rows, and where what is said of them goes."""

    store: str | None = option(
        None,
        "Rows of a store, by directory or a name of `fedcache ls`.",
        ROWS,
        path=True,
        said="none",
    )
    split: str = option(
        "all", "Which rows of --store.", ROWS, choices=("all", "train", "test", "validation")
    )
    embeddings: str | None = option(
        None,
        "Features in place of images: .npz, .npy, .h5, .parquet or .safetensors.",
        ROWS,
        path=True,
        said="none",
    )
    top: int = option(1, "Classes to name for each row.", RESULT, minimum=1)
    out: str | None = option(
        None,
        "Write all rows here: FILE.csv, .jsonl or .parquet.",
        RESULT,
        short="-o",
        path=True,
        said="nowhere",
    )


@dataclass(frozen=True)
class EvaluateOptions:
    """On which labelled rows models are evaluated, and where the figures go."""

    dataset: str | None = option(None, DATASET, ROWS, short="-d", said="none")
    store: str | None = option(
        None,
        "Rows of a store, by directory or a name of `fedcache ls`.",
        ROWS,
        path=True,
        said="none",
    )
    embeddings: str | None = option(
        None,
        "Features with labels: .npz, .h5, .parquet or .safetensors.",
        ROWS,
        path=True,
        said="none",
    )
    split: str = option(
        "all", "Which of these rows.", ROWS, choices=("all", "train", "test", "validation")
    )
    with_images: bool = option(
        False, "In FILE.html also the images of the most confident mistakes.", RESULT
    )
    out: str | None = option(
        None,
        "Write everything here: FILE.html, .csv or .json.",
        RESULT,
        short="-o",
        path=True,
        said="nowhere",
    )


@dataclass(frozen=True)
class PersonaliseOptions:
    """Whose model is made, of which rows, and where it goes."""

    store: str | None = option(
        None,
        "The new client's rows: a store, by directory or a name of `fedcache ls`.",
        ROWS,
        path=True,
        said="none; name one",
    )
    name: str | None = option(
        None, "Of the new client.", MODEL, said="that of the shard, or of the store"
    )
    set: Mapping[str, str] = option(
        {},
        "key=value of the method, in place of the run's. Repeatable.",
        MODEL,
        once=True,
        said="the run's",
    )
    rounds: int | None = option(
        None,
        "Of local training, each of the run's number of epochs.",
        MODEL,
        minimum=0,
        said="the run's",
    )
    out: str | None = option(
        None,
        "The model file, .safetensors; one that is there is kept.",
        RESULT,
        short="-o",
        path=True,
        said="NAME.safetensors",
    )


@dataclass(frozen=True)
class ExportOptions:
    """Where an exported model goes, and how it is written."""

    out: str | None = option(
        None,
        "A folder, or a file ending in .onnx, .pt2, .safetensors or .joblib.",
        RESULT,
        short="-o",
        path=True,
        said="none; say one",
    )
    kind: str | None = option(
        None,
        "What is written.",
        RESULT,
        names=("--format",),
        said="that of the ending of -o",
        choices=("folder", "onnx", "torch", "safetensors", "sklearn"),
    )
    force: bool = option(False, "Write over what is there; other files of a folder stay.", RESULT)
