"""Golden figures: does a change of the code change any number that fedcache computes?

    python tools/golden.py compare 77b3a04 HEAD      # or: compare HEAD .   (the working tree)
    python tools/golden.py record -o figures.json    # of the package that this Python imports
    python tools/golden.py table                     # writes tests/golden.json

A case is one call of ``fc.train`` or ``fc.grid`` on a tiny store that is the same everywhere: every method under every
execution that serves it, grids, lies and what withstands them, client stores, clients that differ, and every switch of
every method. Its figures are the numbers of ``result.json`` and ``rounds.jsonl``, and of every tensor that clients
compute: how often, a sha256 of all its values in order, their sum and norm. The bits of results differ between
processors, so ``compare`` records two commits on one machine, with this one file and one thread, and lets nothing
differ. ``tests/golden.json`` holds a few of the figures in float64, where processors agree to far more than the 1e-6
that tests/contract/test_golden.py asks for: it notices a changed number without a second checkout.

What says which code ran (digests of sources, the run's own digest, its files) is no figure and is left out. The digests
of datasets and partitions are compared: stored ones must stay valid. What changes on purpose is left out by
``--ignore``, or changed in the table by ``table``, with the reason in the commit.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatch
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / "tests" / "golden.json"
SEQUENTIAL = "sequential"
BATCHED = "batched"
GRAM = "gram"
AUTO = "auto"
EXECUTIONS = (SEQUENTIAL, BATCHED, GRAM)

Figures = dict[str, Any]
"""Path of a figure -> a number, a word or None."""


# --- The package: all that this file knows of it. A commit that renames something of this adds the new name here, and
# --- leaves the old one, so that the same file records both sides. Everything else goes by ``import fedcache as fc``.


def methods() -> Mapping[str, Any]:
    """Every method by its name; each a frozen dataclass with ``name, hparams, needs, fit``."""
    from fedcache.federate.methods import METHODS

    return METHODS


@contextmanager
def watched(name: str, log: Uploads) -> Iterator[None]:
    """Tell ``log`` of everything that a method's ``fit`` returns.

    ``fit`` is replaced in the very object that is registered: a copy of it would be another method, whose name is
    taken, and which ``fc.grid`` does not accept.
    """
    method = methods()[name]
    fit = method.fit

    def noted(*args: Any) -> Any:
        state, up = fit(*args)
        log.add("state", state)
        log.add("upload", up)
        return state, up

    object.__setattr__(method, "fit", noted)  # frozen
    try:
        yield
    finally:
        object.__setattr__(method, "fit", fit)


def arrays_of(store: Any) -> dict[str, np.ndarray]:
    """All features of a store, by backbone."""
    return {
        str(info.recipe["backbone"]): store.reader(key).all() for key, info in store.arrays.items()
    }


# --- The data: two tiny stores.

CLASSES = 5
DOMAINS = 3
ROWS = 78
TESTS = 30
SIDE = 32  # what glyph-clip reads, so that no image is resized
PARTS = {"clients": 6, "alpha": 0.4, "seed": 5}


@dataclass
class Stage:
    """Stores, partitions and runs in a folder of their own; each store is made when it is first asked for.

    Attributes:
        folder: of everything, empty at first.
    """

    folder: Path

    @contextmanager
    def home(self) -> Iterator[None]:
        """The folder as ``FEDCACHE_HOME``, and one thread: the order of sums depends on their number."""
        before = os.environ.get("FEDCACHE_HOME")
        threads = torch.get_num_threads()
        os.environ["FEDCACHE_HOME"] = str(self.folder / "home")
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(threads)
            if before is None:
                del os.environ["FEDCACHE_HOME"]
            else:
                os.environ["FEDCACHE_HOME"] = before

    @cached_property
    def features(self) -> Any:
        """Rows with two backbones, text features of the first, and one with three views of a row."""
        return feature_store(self.folder / "features.zarr")

    @cached_property
    def pictures(self) -> Any:
        """Images of two domains, with their features by glyph-clip, whose towers are also run live."""
        return picture_store(self.folder)

    @cached_property
    def parts(self) -> Any:
        """Clients of the features, of very different sizes, some without some classes."""
        import fedcache as fc

        return fc.partition(self.features, "dirichlet", **PARTS)

    @cached_property
    def picture_parts(self) -> Any:
        """Clients of the pictures."""
        import fedcache as fc

        return fc.partition(self.pictures, "dirichlet", clients=3, alpha=1, seed=1)

    @cached_property
    def shards(self) -> Path:
        """The clients of the features as stores of their own."""
        import fedcache as fc

        return fc.shard(self.features, self.parts, self.folder / "shards")


@contextmanager
def stage() -> Iterator[Stage]:
    """A stage that goes away again; in memory where that can be had, as runs wait for many small files."""
    memory = Path("/dev/shm")
    place = memory if memory.is_dir() and os.access(memory, os.W_OK) else None
    with tempfile.TemporaryDirectory(
        prefix="golden-", dir=place, ignore_cleanup_errors=True
    ) as folder:
        yield Stage(Path(folder))


def grains(x: np.ndarray) -> np.ndarray:
    """Multiples of 1/64 as float32: no processor's logarithm can make other numbers of them."""
    return (np.round(x * 64.0) / 64.0).astype(np.float32)


def feature_store(path: Path) -> Any:
    """See ``Stage.features``. Classes overlap, so that no loss vanishes, and a domain moves them all."""
    import fedcache as fc

    draw = np.random.Generator(np.random.PCG64(7))
    rows = ROWS + TESTS
    label = draw.integers(0, CLASSES, rows)
    label[ROWS:] = np.arange(TESTS) % CLASSES
    domain = draw.integers(0, DOMAINS, rows)

    def some(width: int, views: int = 1) -> np.ndarray:
        centre = draw.standard_normal((CLASSES, width))
        shift = 0.3 * draw.standard_normal((DOMAINS, width))
        near = (0.6 * centre[label] + shift[domain])[:, None]
        return grains(near + draw.standard_normal((rows, views, width)))

    a = some(28)
    b = some(6)
    v = some(12, 3)
    # The text of a class points roughly to where its rows are.
    text = grains(
        np.stack([a[label == c, 0].mean(0) for c in range(CLASSES)])
        + 0.5 * draw.standard_normal((CLASSES, 28))
    )
    return fc.Store.from_arrays(
        {"a": a, "b": b, "v": v},
        labels=label,
        domains=np.array(["ink", "chalk", "wool"])[domain],
        splits=(np.arange(rows) >= ROWS).astype(int),
        classes=[f"class {c}" for c in range(CLASSES)],
        text={"a": text, "v": text[:, :12]},
        name="golden",
        path=path,
    )


def picture_store(folder: Path) -> Any:
    """See ``Stage.pictures``: 3 classes of colour and stripes, in two domains of brightness."""
    from PIL import Image

    import fedcache as fc

    draw = np.random.Generator(np.random.PCG64(11))
    across = np.arange(SIDE)
    for split, count in (("train", 6), ("test", 3)):
        for d, domain in enumerate(("day", "night")):
            for c in range(3):
                place = folder / "images" / split / domain / f"class{c}"
                place.mkdir(parents=True)
                for i in range(count):
                    pixels = np.full((SIDE, SIDE, 3), 150 - 70 * d)
                    pixels[..., c] += 60
                    pixels[:, across % (4 + 2 * c) < 2] //= 2
                    noisy = np.clip(pixels + draw.integers(-20, 21, pixels.shape), 0, 255)
                    Image.fromarray(noisy.astype(np.uint8)).save(place / f"{i:02}.png")
    return fc.extract(
        f"folder:{folder / 'images'}",
        backbones=["glyph-clip", "random-projection:8", "pixels"],
        recipe={"pixels:size": str(SIDE), "pixels:resize": "squash"},
        device="cpu",
        workers=0,
        batch=8,
        chunk_rows=16,
        store=folder / "pictures.zarr",
    )


# --- The cases.

SMALL: dict[str, Any] = {
    "dim": 5,
    "hidden": 6,
    "proj": 4,
    "channels": 2,
    "n_ctx": 2,
    "vp_size": 2,
    "batch": 4,
    "epochs": 2,
    "e_b": 2,
    "lr": 0.02,
    "K": 2,
    "queue": 16,
    "esd_epochs": 1,
    "esd_batch": 8,
    "esd_lr": 0.02,
    "probe_epochs": 1,
    "synthetic": 40,
    "virtual": 20,
    "cal_epochs": 3,
    "probe_batch": 8,
    "lbfgs_steps": 5,
    "max_iter": 30,
    "omega": 0.5,
    "gamma": 0.5,
    "warm_rounds": 1,
    "scale": 5.0,
}
"""Hyperparameters of every method that has them: sizes of a toy, and steps large enough to learn something."""

LIVE = {"text tower", "image tower"}
SWEPT = ("lr", "lam", "scale", "a", "beta", "gamma_shrink", "gamma", "reg_covar")
"""What a grid sweeps: the first of these that the method has as a float."""

SGD = {"opt": "sgd"}
TOGETHER: Mapping[tuple[str, Any], Mapping[str, Any]] = {
    ("init", "text"): {"head": "linear"},
    ("init", "zero"): {"head": "linear"},
    ("anchors", "queue"): {"queue": 4, "esd_batch": 2},
}
"""What a switch is tried with, where it is refused without."""

TRUST = {
    "median": {"aggregate": "median"},
    "krum": {"aggregate": "nnm+krum", "attack": "sign-flip:0.34:5"},
    "trimmed": {"aggregate": "trimmed:0.2", "attack": "alie:0.34"},
    "geomedian": {"aggregate": "geomedian", "attack": "gaussian:0.2:3"},
    "label-flip": {"attack": "label-flip:0.34"},
    "bound": {"max_update_norm": 4.0, "attack": "sign-flip:0.34:40", "on_bad_update": "reject"},
    "nan": {"attack": "nan:0.34", "on_bad_update": "reject"},
    "dp": {"dp_clip": 0.5, "dp_noise": 1.0, "dp_seed": 0},
}
"""What is done with uploads. With ``dp`` results also hold what the noise costs, so it needs dp-accounting."""

SCHEMES: Mapping[str, Mapping[str, Any]] = {
    "iid": {"clients": 5},
    "shards": {"clients": 5, "shards": 2},
    "dirichlet": {"clients": 5, "alpha": 0.5, "test_protocol": "matched"},
    "lda": {"clients": 4, "alpha": 0.5, "min_size": 3},
    "flesd": {"clients": 4, "alpha": 1.0},
    "feature-shift": {"shots": 2},
    "label-shift": {"clients": 3, "shots": 2, "domain": ("ink",), "ratio": 1.5, "alpha": 5.0},
    "feature-label-shift": {"shots": 2, "alpha": 5.0},
    "few-shot": {"clients": 3, "shots": 2, "skew": "iid"},
}


@dataclass(frozen=True)
class Case:
    """One call of the package.

    Attributes:
        name: ``method/what/execution``.
        method: its name; "" for what no method is needed.
        execution: how clients are computed.
        settings: hyperparameters.
        options: further fields of the configuration.
        sweep: hyperparameter -> the values of a grid; {} for a single run.
        seeds: number of them.
        shards: whether clients come from stores of their own.
        scheme: a scheme whose partition is the figure; nothing is trained.
        extraction: whether the features of the pictures are the figure.
    """

    name: str
    method: str = ""
    execution: str = SEQUENTIAL
    settings: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    sweep: Mapping[str, Sequence[float]] = field(default_factory=dict)
    seeds: int = 1
    shards: bool = False
    scheme: str = ""
    extraction: bool = False


def allowed(settings: Mapping[str, Any], method: Any) -> dict[str, Any]:
    """The settings that a method has."""
    declared = {h.name for h in method.hparams}
    return {k: v for k, v in settings.items() if k in declared}


def small(method: Any) -> dict[str, Any]:
    """The toy sizes that a method has."""
    return allowed(SMALL, method)


def of_images(method: Any) -> bool:
    """Whether a method runs on the pictures."""
    return bool(method.needs & {"pixels", *LIVE})


def live(method: Any) -> bool:
    """Whether a method runs an encoder, in float32 also where the run computes in another dtype."""
    return bool(method.needs & LIVE)


def plain_cases(method: Any, seeds: int = 3, dtype: str = "float32") -> Iterator[Case]:
    """A method under every execution: as its paper has it, and by SGD, which alone ``gram`` can serve."""
    opt = next((h for h in method.hparams if h.name == "opt"), None)
    variants = {"paper": {}}
    if opt is not None and opt.default != "sgd" and "sgd" in opt.choices:
        variants["sgd"] = SGD
    for what, settings in variants.items():
        for execution in EXECUTIONS:
            yield Case(
                f"{method.name}/{what}/{execution}",
                method.name,
                execution,
                {**small(method), **settings},
                {"dtype": dtype},
                seeds=1 if what == "sgd" and of_images(method) else seeds,
            )


def more_cases(method: Any) -> Iterator[Case]:
    """What else of a method has figures: the released code's values, grids, the choice of an execution, switches."""
    name = method.name
    base = small(method)
    declared = {h.name: h for h in method.hparams}
    if any(h.official is not None for h in method.hparams):
        official = base | allowed(TOGETHER["anchors", "queue"], method)
        yield Case(
            f"{name}/official/{SEQUENTIAL}", name, settings=official, options={"preset": "official"}
        )
    # earlier commits have no such preset
    if any(getattr(h, "tuned", None) is not None for h in method.hparams):
        yield Case(f"{name}/tuned/{SEQUENTIAL}", name, settings=base, options={"preset": "tuned"})
    yield Case(f"{name}/paper/{AUTO}", name, AUTO, base)
    swept = next((k for k in SWEPT if k in declared and declared[k].kind == "float"), None)
    if swept is not None:
        low = 0.02 if swept == "lr" else 0.5
        settings = base | allowed(SGD, method)
        settings.pop(swept, None)
        seeds = 1 if of_images(method) else 2
        sweep = {swept: (low, low / 2)}
        for execution in EXECUTIONS:
            yield Case(
                f"{name}/grid/{execution}", name, execution, settings, sweep=sweep, seeds=seeds
            )
    if not of_images(method):
        yield Case(f"{name}/shards/{SEQUENTIAL}", name, settings=base, shards=True)
    for key, h in declared.items():
        values = h.choices if h.kind == "choice" else (True, False) if h.kind == "bool" else ()
        for value in values:
            # SGD is among the plain cases.
            if value == h.default or {key: value} == SGD:
                continue
            settings = base | allowed(TOGETHER.get((key, value), {}), method) | {key: value}
            slow = of_images(method) or value in ("conv", "resnet50")
            options = {"rounds": 1} if slow else {}
            for execution in (SEQUENTIAL,) if slow else EXECUTIONS:
                opt = allowed(SGD, method) if execution == GRAM else {}
                yield Case(
                    f"{name}/{key}={value}/{execution}", name, execution, opt | settings, options
                )


def other_cases() -> Iterator[Case]:
    """Trust, clients that differ, partitions and extraction."""
    for name in ("fedavg", "fedproto", "fed3r", "scaffold"):
        for what, options in TRUST.items():
            if what == "dp" and not dp_installed():
                continue
            everyone = {**options, "participation": "all"}
            if what == "bound" and name == "fed3r":
                everyone["max_update_norm"] = 60.0  # sums over rows, where others send weights
            for execution in (SEQUENTIAL, BATCHED) if name == "fedavg" else (SEQUENTIAL,):
                base = small(methods()[name])
                yield Case(f"{name}/{what}/{execution}", name, execution, base, everyone)
    for name in ("solo", "fedproto", "fedpcl"):
        turns = {"client_backbones": ["a", "b", "a+b"]}
        yield Case(
            f"{name}/client-backbones/{SEQUENTIAL}",
            name,
            settings=small(methods()[name]),
            options=turns,
        )
    for name, key in (("solo", "dim"), ("min-local", "proj")):
        turns = {"client_set": {key: "3,5"}}
        yield Case(
            f"{name}/client-set/{SEQUENTIAL}", name, settings=small(methods()[name]), options=turns
        )
    for scheme in SCHEMES:
        yield Case(f"partition/{scheme}/numpy", scheme=scheme)
    yield Case("extract/pictures/cpu", extraction=True)


def all_cases() -> list[Case]:
    """What ``compare`` compares."""
    found = [c for m in methods().values() for c in (*plain_cases(m), *more_cases(m))]
    found += other_cases()
    assert len({c.name for c in found}) == len(found), "two cases of one name"
    return found


def table_cases(method: Any) -> list[Case]:
    """What tests/golden.json holds of a method: float64, in which other processors round far below 1e-6."""
    return list(plain_cases(method, seeds=1 if of_images(method) else 3, dtype="float64"))


def dp_installed() -> bool:
    """Whether the extra ``dp`` is there."""
    try:
        importlib.metadata.version("dp-accounting")
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


# --- The figures of a case.


class Uploads:
    """Every tensor that ``fit`` returned, as a digest and two sums for each name.

    Under ``batched`` and ``gram`` a tensor has axes for clients and points, and is hashed as it is: two commits are
    compared under one execution.
    """

    def __init__(self) -> None:
        self._digest: dict[str, Any] = {}
        self._facts: dict[str, list[float]] = {}

    def add(self, what: str, tree: Mapping[str, torch.Tensor]) -> None:
        """Note the tensors of one call."""
        for name, t in tree.items():
            if t.is_meta:  # asked for its shape alone
                continue
            values = t.detach().cpu().contiguous()
            key = f"{what}.{name}"
            digest = self._digest.setdefault(key, hashlib.sha256())
            digest.update(
                f"{values.dtype}{tuple(values.shape)}".encode() + values.numpy().tobytes()
            )
            flat = values.double().nan_to_num(0.0, 0.0, 0.0)
            calls, total, squares = self._facts.get(key, (0, 0.0, 0.0))
            self._facts[key] = [
                calls + 1,
                total + float(flat.sum()),
                squares + float(flat.square().sum()),
            ]

    def figures(self) -> Figures:
        """``upload.NAME.calls``, ``.sha256``, ``.sum`` and ``.norm``."""
        found = {}
        for key, (calls, total, squares) in sorted(self._facts.items()):
            found |= {
                f"{key}.calls": calls,
                f"{key}.sha256": self._digest[key].hexdigest(),
                f"{key}.sum": total,
                f"{key}.norm": math.sqrt(squares),
            }
        return found


NO_FIGURES = {"code", "digest", "files", "sha256", "threads", "lift", "execution"}
"""Keys of ``result.json`` that say which code ran, or are compared under another name."""


def flat(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves of plain JSON values, with their places."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from flat(inner, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list | tuple):
        if not value:
            yield path, "[]"
        for i, inner in enumerate(value):
            yield from flat(inner, f"{path}.{i}")
    else:
        yield path, value


def figures_of_run(run: Any) -> Figures:
    """The numbers of a stored result and of its rounds."""
    result = {k: v for k, v in run.result.items() if k not in NO_FIGURES}
    lines = (run.path / "rounds.jsonl").read_text().splitlines()
    return {
        **dict(flat(result)),
        **dict(flat([json.loads(line) for line in lines], "rounds_jsonl")),
        "execution": run.result["execution"],
    }


def figures_of(case: Case, stage: Stage) -> Figures:
    """Compute a case. A refusal is a figure too, and so is an error; why (``_why``) is kept and not compared."""
    import fedcache as fc

    try:
        with stage.home():
            if case.extraction:
                return features_of(stage.pictures)
            if case.scheme:
                return rows_of(
                    fc.partition(stage.features, case.scheme, seed=1, **SCHEMES[case.scheme])
                )
            return trained(case, stage)
    except fc.FedcacheError as error:
        # Settings that cannot be, or features that the store does not have.
        kind = "refused" if int(error.code) in (2, 4) else "error"
        return {kind: int(error.code), "_why": str(error)}
    except Exception as error:
        return {"error": type(error).__name__, "_why": str(error)}


def trained(case: Case, stage: Stage) -> Figures:
    """The figures of a run or of all points of a grid."""
    import fedcache as fc

    method = methods()[case.method]
    log = Uploads()
    options = {
        "rounds": 2,
        "participation": "0.6",
        "eval_every": 1,
        "device": "cpu",
        "execution": case.execution,
    }
    reads = {f"{k}={v}" for k, v in case.settings.items()}
    if of_images(method) or reads & {"encoder=conv", "encoder=resnet50"}:
        store = stage.pictures
        parts = stage.picture_parts
        options["backbones"] = ["glyph-clip"] if live(method) else ["pixels"]
    else:
        store = stage.features
        parts = stage.parts
        if "client_backbones" not in case.options:
            asks = method.needs | reads
            drawn = {"views", "train_view=aug", "proto_view=aug", "views=2", "views=twice"}
            many = drawn & asks
            worded = {"text", "init=text"} & asks
            options["backbones"] = ["v"] if many else ["a"] if worded else ["a", "b"]
    options |= case.options
    common = {"seeds": range(case.seeds), "settings": case.settings, "fresh": True}
    with watched(case.method, log):
        if case.sweep:
            # "none" because a model's calibration may train a second time.
            grid = fc.grid(
                case.method,
                store,
                parts,
                options=options,
                save_models="none",
                **common,
                **case.sweep,
            )
            found = {
                f"point-{i}.{k}": v
                for i, p in enumerate(grid.points)
                for k, v in figures_of_run(p.run).items()
            }
        else:
            inputs = (store, parts)
            if case.shards:
                inputs = ()
                options["clients_from"] = str(stage.shards)
            run = fc.train(case.method, *inputs, save_model=False, **common, **options)
            found = figures_of_run(run)
    return found | log.figures()


def rows_of(parts: Any) -> Figures:
    """Who holds what."""
    held = {c.name: [c.train.tolist(), c.test.tolist()] for c in parts.clients}
    return {
        "clients": len(parts.clients),
        "sizes": " ".join(f"{len(c.train)}+{len(c.test)}" for c in parts.clients),
        "rows": hashlib.sha256(json.dumps([held, parts.test.tolist()]).encode()).hexdigest(),
        "dropped": parts.dropped,
        "digest": parts.digest,
    }


def features_of(store: Any) -> Figures:
    """The values of an extraction; the digests say what images and recipes they are of."""
    found = {"dataset": store.dataset["digest"]}
    for name, values in arrays_of(store).items():
        found[f"{name}.shape"] = f"{values.dtype}{values.shape}"
        found[f"{name}.sha256"] = hashlib.sha256(np.ascontiguousarray(values).tobytes()).hexdigest()
    found["glyph-clip.text.sha256"] = hashlib.sha256(store.text("glyph-clip").tobytes()).hexdigest()
    return found


# --- Recording and comparing.


def record(cases: Sequence[Case], stage: Stage) -> dict[str, Figures]:
    """The figures of cases, by name."""
    return {case.name: figures_of(case, stage) for case in cases}


def differences(
    a: Mapping[str, Figures], b: Mapping[str, Figures], ignore: Sequence[str] = ()
) -> list[tuple[str, str, Any, Any]]:
    """(case, figure, both values) wherever the two are not equal to the bit; ``ignore`` are patterns of figures."""
    absent = "(absent)"
    found = []
    for case in dict.fromkeys([*a, *b]):
        if case not in a or case not in b:
            found.append(
                (case, "the case", *("recorded" if case in side else absent for side in (a, b)))
            )
            continue
        for name in dict.fromkeys([*a[case], *b[case]]):
            left = a[case].get(name, absent)
            right = b[case].get(name, absent)
            # repr tells -0.0 from 0.0 and writes every bit of a float.
            if (
                repr(left) != repr(right)
                and not name.startswith("_")
                and not any(fnmatch(name, pattern) for pattern in ignore)
            ):
                found.append((case, name, left, right))
    return found


def recorded(rev: str, only: Sequence[str], tool: str) -> dict[str, Figures]:
    """Record a commit, or ``.``, in a process of its own that imports the package from a checkout of it.

    ``tool`` is the text of this file, which both sides run, also if somebody edits the file meanwhile.
    """
    with tempfile.TemporaryDirectory(prefix="golden-") as folder:
        place = ROOT
        out = Path(folder) / "figures.json"
        copy = Path(folder) / "golden.py"
        copy.write_text(tool)
        if rev != ".":
            place = Path(folder) / "checkout"
            place.mkdir()
            archive = subprocess.run(
                ["git", "-C", ROOT, "archive", rev, "fedcache"], check=True, capture_output=True
            )
            subprocess.run(["tar", "-x", "-C", place], input=archive.stdout, check=True)
        env = {k: v for k, v in os.environ.items() if not k.startswith("FEDCACHE_")}
        env |= {
            "PYTHONPATH": str(place),
            "OMP_NUM_THREADS": "1",
            "MKL_NUM_THREADS": "1",
            "PYTHONHASHSEED": "0",
            "FEDCACHE_OFFLINE": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        chosen = [word for pattern in only for word in ("--only", pattern)]
        words = [sys.executable, copy, "record", "-o", out, "--package", place, *chosen]
        subprocess.run(words, check=True, env=env, cwd=folder)
        return json.loads(out.read_text())


# --- The table of the tests.

CLOSE = 1e-6
LOOSE = 2e-3
"""Methods on glyph-clip: its towers compute in float32, and its features are stored in float16, where processors
differ in the last bit."""


def kept(case: Case, figures: Figures) -> Figures:
    """Of a case's figures those that the table holds, to 10 digits."""
    if "refused" in figures or "error" in figures:
        return {k: v for k, v in figures.items() if not k.startswith("_")}
    tensors = sorted(k.removesuffix(".norm") for k in figures if k.endswith(".norm"))
    rounded = {
        name: [float(f"{figures[f'{name}.{k}']:.10g}") for k in ("sum", "norm")] for name in tensors
    }
    per_client = [v for k, v in figures.items() if k.startswith("accuracy.per_client.")]
    return {
        "accuracy": round(figures["accuracy.mean"], 10),
        "per_client": [None if v is None else round(v, 10) for v in per_client],
        "bytes": [figures["traffic.exact.up_bytes"], figures["traffic.exact.down_bytes"]],
        "tensors": rounded,
    }


def off(name: str, want: Figures, got: Figures, *, loose: bool) -> list[str]:
    """Where the kept figures of a case are not those of the table, in words.

    Counts are equal. In float64 an accuracy is one too: rounding moves a score by 1e-12 of itself, and no two scores of
    the tiny store are that close without being equal by symmetry. A sum may cancel to nothing, so it is held to what
    it is a sum of, the norm.
    """
    if set(want) != set(got) or "tensors" not in want:
        if want == got:
            return []
        return [f"{name}: {want} became {got}"]
    wrong = []
    close = LOOSE if loose else CLOSE
    for key in ("bytes", *(() if loose else ("accuracy", "per_client"))):
        if not near(want[key], got[key]):
            wrong.append(f"{name}: {key} {want[key]} became {got[key]}")
    if set(want["tensors"]) != set(got["tensors"]):
        wrong.append(f"{name}: tensors {sorted(want['tensors'])} became {sorted(got['tensors'])}")
    for tensor in want["tensors"].keys() & got["tensors"].keys():
        (total, norm), (new_total, new_norm) = want["tensors"][tensor], got["tensors"][tensor]
        room = close * max(norm, 1e-3)
        if not (abs(norm - new_norm) <= room and abs(total - new_total) <= 4 * room):
            wrong.append(
                f"{name}: {tensor} [sum, norm] {[total, norm]} became {[new_total, new_norm]}"
            )
    return wrong


def near(a: Any, b: Any) -> bool:
    """Equal, up to the digits that the table keeps."""
    if isinstance(a, list):
        return len(a) == len(b) and all(map(near, a, b))
    if a is None or b is None:
        return a == b
    return abs(a - b) <= 1e-9


def table_of(name: str, stage: Stage, ending: str = "") -> dict[str, Figures]:
    """The part of the table that a method has: what is made now of its cases whose names end so."""
    cases = [case for case in table_cases(methods()[name]) if case.name.endswith(ending)]
    figures = record(cases, stage)
    return {case.name: kept(case, figures[case.name]) for case in cases}


def write_in_table(name: str, cases: Mapping[str, Figures]) -> None:
    """Replace the cases of a method in the table, and drop those of methods that are gone."""
    table = {**json.loads(TABLE.read_text()), **cases}
    lines = [
        f"{json.dumps(case)}: {json.dumps(table[case])}"
        for method in methods()
        for case in table
        if case.partition("/")[0] == method and (method != name or case in cases)
    ]
    TABLE.write_text("{\n" + ",\n".join(lines) + "\n}\n")


# --- The command line.


def main() -> int:
    """Run a command; 1 when figures differ."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser(
        "record", help="write the figures of the package that is imported"
    )
    recording.add_argument("-o", "--out", type=Path, required=True)
    recording.add_argument(
        "--package", type=Path, help="fail unless fedcache is imported from this folder"
    )
    comparing = commands.add_parser(
        "compare", help="record two commits ('.' is the working tree) and compare every bit"
    )
    comparing.add_argument("revs", nargs=2, metavar="REV")
    comparing.add_argument(
        "--ignore", action="append", default=[], metavar="PATTERN", help="figures, as '*state.*'"
    )
    for command in (recording, comparing):
        command.add_argument(
            "--only", action="append", default=[], metavar="PATTERN", help="cases, as 'fedavg/*'"
        )
    commands.add_parser(
        "table", help=f"write {TABLE.relative_to(ROOT)} from the package that is imported"
    )
    args = parser.parse_args()
    if args.command == "compare":
        return compare(args)
    if args.command == "table":
        with stage() as place:
            for name in methods():
                write_in_table(name, table_of(name, place))
        print(f"{TABLE}: {TABLE.stat().st_size:,} bytes")
        return 0
    import fedcache

    if args.package is not None and not Path(fedcache.__file__).is_relative_to(args.package):
        raise SystemExit(f"fedcache is imported from {fedcache.__file__}, not from {args.package}.")
    cases = [c for c in all_cases() if not args.only or any(fnmatch(c.name, p) for p in args.only)]
    with stage() as place:
        figures = record(cases, place)
    args.out.write_text(json.dumps(figures))
    return 0


def compare(args: argparse.Namespace) -> int:
    """Print every difference of two commits, and what was compared."""
    tool = Path(__file__).read_text()
    a, b = (recorded(rev, args.only, tool) for rev in args.revs)
    found = differences(a, b, args.ignore)
    for case, name, left, right in found:
        print(f"{case}  {name}  {left!r} -> {right!r}")
    refused = sum("refused" in figures for figures in a.values())
    failed = sum("error" in figures for figures in a.values())
    numbers = sum(map(len, a.values()))
    print(
        f"{len(found)} differences between {args.revs[0]} and {args.revs[1]}: {numbers:,} figures of {len(a)} cases, "
        f"{refused} of them refused and {failed} failed in {args.revs[0]}"
    )
    if found or not a:
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
