"""Runs on disk: one directory per digest of everything that determines the result, except the seeds.

Each seed is stored on its own: ``seed-N.json`` holds the result of seed N, and ``result.json`` is made from all seeds
in the directory. A command with more seeds trains only the missing ones.

``train --config config.toml`` repeats the run. ``rounds.jsonl`` and ``result.json`` are reproducible files: they
contain no time, host, path or speed. Measured values are in ``measured.json``. A killed run resumes from its
checkpoint, and its files get the same bits as without the interruption.

``result.json`` lists the sha256 of the other reproducible files under ``files``, so a damaged result is never returned.
Checkpoints and finished seeds are sealed for their run and seed. If one of them was changed, the seed is trained again,
with a warning.
"""

from __future__ import annotations

import ast
import base64
import inspect
import io
import json
import re
import sys
import time
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, fields
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import tomli_w
from safetensors import SafetensorError, safe_open

from fedcache.config import PRESETS
from fedcache.errors import (
    CorruptionError,
    Exit,
    FedcacheError,
    MachineError,
    StoppedError,
    UsageError,
    shell_word,
)
from fedcache.extract.digests import remembered_of_package
from fedcache.federate.methods import METHODS, NAMES, find_method
from fedcache.federate.partition.client_table import LazySequence
from fedcache.optional import need_arrow
from fedcache.parsing import Facts, Record, parse_json, parse_toml
from fedcache.plugins import Plugin, find
from fedcache.process import Stop
from fedcache.progress import Observer
from fedcache.store.files import (
    Buffer,
    Sealed,
    canonical_json,
    content_beside_tensors,
    digest_of,
    digest_of_files,
    explain_disk_errors,
    file_sha256,
    make_private,
    read_lines,
    read_sealed,
    read_whole,
    sha256_hex,
    write_atomic,
    write_sealed,
)
from fedcache.store.lock import is_held, wait_for_lock
from fedcache.store.own_code import ROOT, ReachedCode

if TYPE_CHECKING:
    from fedcache.federate.engine.method import Method

# Identity of a run: everything that determines its result, and the digest that names its directory.
#
# A stored result is returned again only if nothing that determines it has changed. This includes the code of
# fedcache. The digest of the code is computed from its syntax trees. So comments, docstrings, formatting and the
# place of a file may change, but a changed expression makes another run.
#
# The functions of a user's own method are in other files. ``store/own_code.py`` computes their digest, so that a
# changed line or a changed number makes another run, as it does for the methods of fedcache.

DETERMINING = (
    "heads/**",
    "federate/engine/**",
    "federate/execution/**",
    "federate/partition/**",
    "federate/trust/**",
    "federate/methods/common/**",
    "runs/features.py",
    "runs/partitions.py",
    "runs/results.py",
    "runs/store_choice.py",
    "store/chunks.py",
    "store/reader.py",
    "store/samples.py",
    "extract/batches.py",
    "extract/images.py",
    "extract/backbones/backbone.py",
    "extract/backbones/clip_towers.py",
    "extract/backbones/word_clip.py",
)
"""Files of the package that determine the results of every method: reading of features, partition, training, evaluation
and decoding of images. The files that a method uses are added to them."""


@dataclass(frozen=True)
class Identity:
    """The parts that determine the result of each seed, without the seed itself."""

    # method, every hyperparameter, rounds, participation, execution, dtype, ... resolved; no seed
    config: Record
    # digests of the recipes, in the order in which features are concatenated, and of the text features
    features: Sequence[str]
    dataset: str  # content digest
    partition: str  # digest of the partition, or of the scheme by which every seed draws its own
    code: str  # ``code_digest``

    @property
    def digest(self) -> str:
        """sha256 over all parts."""
        return digest_of(asdict(self))


@cache
def code_digest(method: str) -> str:
    """sha256 over the code that determines the results of a method.

    The files of other methods are left out, so that a new method does not invalidate every stored result. The name ""
    gives the digest of the code that all methods share.
    """
    return remembered_of_package(["code", method], lambda: digest_of_code(ROOT, method))


def digest_of_code(root: Path, method: str) -> str:
    """``code_digest`` of the package whose folder is ``root``."""
    files = _with_imports(root / "federate" / "methods", method.replace("-", "_"))
    for pattern in DETERMINING:
        files |= set(root.glob(pattern.replace("/**", "/**/*.py")))
    return digest_of_files(files)


def _with_imports(folder: Path, name: str) -> set[Path]:
    """The file of a method, and the method files that it imports directly or through others."""
    package = "fedcache.federate.methods"
    seen = set()
    todo = [name]
    while todo:
        path = folder / f"{todo.pop()}.py"
        if path in seen or not path.exists():
            continue
        seen.add(path)
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if not isinstance(node, ast.ImportFrom):
                continue
            module = node.module or ""
            if not module.startswith(package):
                continue
            relative = module.removeprefix(package).strip(".")
            if relative:
                todo.append(relative)
            else:
                todo += [alias.name for alias in node.names]
    return seen


def code_of(method: Method) -> str:
    """The code digest of a method's runs: ``code_digest`` for a method of fedcache, ``own_digest`` for another."""
    if method.name in NAMES and METHODS.get(method.name) is method:
        return code_digest(method.name)
    return own_digest(method)


def own_digest(method: Method) -> str:
    """sha256 over the code of fedcache, the files of the user's method, and everything bound to its functions.

    For a plug-in, the files are those of its package, wherever it is installed, and its name and version are included.
    Raises UsageError if the method's name is taken, if its source cannot be read or is not the code that runs, or if
    a value without a digest is bound to it.
    """
    if method.name in NAMES:
        raise UsageError(
            f"Your Method has the name {method.name!r}, but fedcache has another method of this name.",
            f"Give your method another name: dataclasses.replace(method, name='my-{method.name}')",
        )
    plugin = find("methods", method.name)
    folders: tuple[Path, ...] = ()
    if plugin is not None:
        folders = _place_of(plugin)
    code = ReachedCode(f"the method {method.name!r}", folders)
    description = code.describe(method)
    # If the user's functions reach no method of fedcache, "" stands for the code that all methods share.
    base = sorted(code_digest(name) for name in code.methods or {""})
    parts = [base, sorted(code.sources.values()), description]
    if plugin is not None and plugin.package:
        parts += [plugin.package, plugin.version]
    return digest_of(parts)


def _place_of(plugin: Plugin) -> tuple[Path, ...]:
    """The folder or single file of a plug-in's package.

    () for a plug-in that was registered in this process, for a package without a file, and for fedcache itself.
    """
    top = ""
    if plugin.entry is not None:
        top = plugin.entry.module.partition(".")[0]
    file = getattr(sys.modules.get(top), "__file__", None)
    if file is None or Path(file).resolve().is_relative_to(ROOT):
        return ()
    place = Path(file).resolve()
    if place.name == "__init__.py":
        return (place.parent,)
    return (place,)


def code_with_plugins(code: str, used: Sequence[Plugin]) -> str:
    """A run's code digest with the package, version and source of every plug-in other than its method."""
    parts: list[Any] = [code]
    for plugin in used:
        if plugin.kind != "methods":
            source = _source_digest(plugin)
            parts.append([plugin.kind, plugin.name, plugin.package, plugin.version, source])
    if len(parts) == 1:
        return code
    return digest_of(parts)


def _source_digest(plugin: Plugin) -> str:
    """sha256 of the source file of a plug-in; "" if it cannot be read."""
    try:
        file = inspect.getsourcefile(plugin.load()) or ""
        return sha256_hex(Path(file).read_bytes())
    except (OSError, TypeError):
        return ""


# Facts about the methods of this package, stored in the home so that reports start without importing torch.
#
# ``compare``, ``report`` and ``runs`` compare a stored run with the preset of its method. The file of a method imports
# torch, which takes seconds. So each fact is read from the method once, and again after a file of the package changed.


def usual_settings(method: str, preset: str) -> Facts:
    """Every hyperparameter of a preset. Raises UsageError for an unknown method or preset."""
    key = ["preset", method, preset]
    return _of_method(method, key, lambda: find_method(method).resolve(preset))


def usual_preset(method: str) -> str:
    """The preset in the result of a run without ``--preset``; "paper" for an unknown method."""

    def read() -> Facts:
        preset = "paper"
        if find_method(method).usual:
            preset = PRESETS[0]
        return {"preset": preset}

    try:
        return str(_of_method(method, ["usual preset", method], read)["preset"])
    except FedcacheError:
        return "paper"


def usual_run(method: str) -> Facts:
    """Rounds and participation of a method's paper. Raises UsageError for an unknown method."""

    def read() -> Facts:
        usual = find_method(method).defaults
        participation: str | float = "all"
        if usual.participation is not None:
            participation = usual.participation
        return {"rounds": usual.rounds, "participation": participation}

    return _of_method(method, ["run", method], read)


def draws_nothing(method: str, settings: Record) -> bool:
    """Whether a method has the same result for every seed if all clients take part; False for an unknown method.

    For such a method, the sum of uploads is that of one client with all rows, and neither a client nor the server
    trains over epochs, whose batches are drawn.
    """

    def read() -> Facts:
        found = find_method(method)
        every = {**found.resolve("paper"), **settings}
        trains = found.gradient or "epochs" in every
        return {"draws nothing": not trains and found.additive(every)}

    key = ["draws nothing", method, repr(sorted(settings.items()))]
    try:
        return bool(_of_method(method, key, read)["draws nothing"])
    except FedcacheError:
        return False


def _of_method(method: str, key: list[str], read: Callable[[], Facts]) -> Facts:
    """A fact about a method. Facts about methods of other packages are not cached, because their files may change."""
    if method in NAMES:
        return remembered_of_package(key, read)
    return read()


MEASURED = "measured.json"
"""File of measured values, such as seconds. It is sealed, and not part of the result."""

WRITTEN = "files.json"
"""File with the digests of ``config.toml`` and of the partition files, so that later changes of them are noticed.

It is sealed, written when the run begins, and not part of the result."""

FILES = "files of a run"
"""Kind of the file ``WRITTEN``, in its seal."""

OWN_FILES = (
    r"(result|measured|files|models|pruned)\.json|config\.toml|rounds\.jsonl|clients\.parquet|test-rows\.npz|partition-.*"
    r"|(seed|checkpoint)-\d+\.(json|safetensors)|tags\.json|(running|writing)\.lock|states-\d+\.(table|lock)"
)
"""Regular expression of the names of a run's files."""

RESULT_LOCK = "writing.lock"
"""Lock that is held while a result is made from the seeds in the directory."""

MODELS = "models"
INDEX = "models.json"
"""The folder of a run's trained models (``run_models``), and the file in it that lists them."""

PRUNED = "pruned.json"
"""File of a run that a search stopped, instead of a result: ``round``, ``rounds``, ``validation``, ``search``."""

EXECUTIONS_OF_0_1 = {"loop": "sequential", "stack": "batched", "dual": "gram"}
"""Execution mode in a result of fedcache 0.1 -> its name now."""

MINUTE = 60.0
PLACES = (
    "dataset",
    "store",
    "partition",
    "clients_from",
    "availability",
    "client_clusters",
    "client_durations",
    "transfer",
)
"""Fields of ``config.toml`` that may be the path of a file or folder. Equal results may have different paths, because a
result has the digest of the content."""


class DamagedRunError(CorruptionError):
    """A stored result that was changed after it was written, or a file that it lists."""

    def __init__(self, path: Path, why: str = "was changed after fedcache wrote it") -> None:
        super().__init__(
            f"{path} {why}.",
            f"Run the same command again with --fresh, or remove {path.parent}.",
        )
        self._args = (path, why)

    def __reduce__(self) -> tuple[type[FedcacheError], tuple[Any, ...]]:
        # Without this method, pickling the error for another process would turn it into a plain FedcacheError.
        return DamagedRunError, self._args


def ends_one_run(error: FedcacheError) -> bool:
    """Whether an error ends only one run of a grid: its stored result is damaged, or its training failed."""
    return isinstance(error, DamagedRunError) or error.code is Exit.FEDERATED


class RunDirectory:
    """The directory ``runs/<digest>/`` of a run."""

    def __init__(self, root: Path, identity: Identity) -> None:
        self.identity = identity
        self.path = root / identity.digest[:16]
        self._note = ""  # the comment at the top of config.toml

    def stored(self) -> Facts | None:
        """The result of all seeds that have ended, or None.

        Raises DamagedRunError if the result, its config, rounds, partitions or models were changed.
        """
        path = self.path / "result.json"
        if not path.exists():
            return None
        result = read_result(path)
        if result.get("digest") != self.identity.digest:
            raise DamagedRunError(path, "belongs to another run")
        check_files(self.path, result)
        check_models(self.path, result)
        return result

    def begin(
        self, config: Record, partitions: Mapping[str, Sequence[Buffer]], note: str = ""
    ) -> None:
        """Make the directory, and write the partitions made for the run, and its config with a note at the top.

        ``partitions`` has the name of each partition file and its bytes, in parts. If a result is stored already, seeds
        are added to it, and its config stays until the new result is written.
        """
        make_private(self.path.parent)
        make_private(self.path)
        for name, parts in partitions.items():
            write_atomic(self.path / name, *parts)
        self._note = ""
        if note:
            self._note = f"# {note}\n"
        if not (self.path / "result.json").exists():
            text = self._config_text(config)
            # All partition files: earlier commands may have written some for other seeds.
            self._write_config(text, self.path.glob("partition-*.partition"))

    def _config_text(self, config: Record) -> bytes:
        return (self._note + tomli_w.dumps({"train": dict(config)})).encode()

    def _write_config(self, text: bytes, files: Iterable[Path]) -> dict[str, str]:
        """Write ``config.toml``, and the file ``WRITTEN`` with its digest and those of partition files.

        Returns:
            the digests of the partition files alone, by name.
        """
        partitions = {file.name: file_sha256(file) for file in files}
        write_atomic(self.path / "config.toml", text)
        digests = {"config.toml": sha256_hex(text), **partitions}
        write_sealed(self.path / WRITTEN, {"kind": FILES}, digests)
        return partitions

    @contextmanager
    def writing_result(self) -> Iterator[None]:
        """Hold a lock while the block makes a result from the seeds in the directory.

        If two processes add seeds to one run at once, each writes its seeds first, so the later result has the seeds of
        both. If files cannot be locked, the block runs without a lock.
        """
        with ExitStack() as held:
            with suppress(MachineError):
                # No message and no stop while waiting: the other process writes its result in an instant.
                lock = wait_for_lock(self.path / RESULT_LOCK, _do_nothing, _do_nothing)
                held.enter_context(lock)
            yield

    def restart(self, seeds: Sequence[int]) -> None:
        """Delete checkpoints and client states of seeds, so that no seed resumes, and the mark of ``mark_pruned``."""
        for seed in seeds:
            self.forget(seed)
        (self.path / PRUNED).unlink(missing_ok=True)

    def checkpoint(self, seed: int, warn: Callable[[str], None]) -> tuple[Facts, Facts] | None:
        """Tensors and meta of a seed's last checkpoint, or None; ``warn`` receives why a damaged one is deleted."""
        found = self._read(self._checkpoint(seed), "checkpoint", seed, warn)
        if found is None:
            return None
        return (found.tensors, json.loads(found.content))

    def save_checkpoint(self, seed: int, tensors: Record, state: Record) -> None:
        """Replace a seed's checkpoint, completely or not at all."""
        # The state is stored as a string, because its figures may be NaN, which the JSON of sealed files rejects.
        content = json.dumps(dict(state))
        path = self._checkpoint(seed)
        size = sum(tensor.nbytes for tensor in tensors.values())
        with explain_disk_errors(path, size):
            write_sealed(path, self._header("checkpoint", seed), content, tensors)

    def seed_result(self, seed: int, warn: Callable[[str], None]) -> Facts | None:
        """The result of a finished seed, or None; ``warn`` receives why a damaged one is deleted."""
        found = self._read(self._seed(seed), "finished seed", seed, warn)
        if found is None:
            return None
        return dict(found.content)

    def seeds(self) -> list[int]:
        """Numbers of the seeds that have ended, in increasing order."""
        files = self.path.glob("seed-*.json")
        return sorted(int(file.stem.removeprefix("seed-")) for file in files)

    def save_seed(self, seed: int, result: Record) -> None:
        """Write the result of a finished seed, and delete its checkpoint."""
        write_sealed(self._seed(seed), self._header("finished seed", seed), dict(result))
        self.forget(seed)

    def forget(self, seed: int) -> None:
        """Delete a seed's checkpoint and the states of its clients."""
        states = self.states(seed)
        for path in (self._checkpoint(seed), states, states.with_suffix(".lock")):
            path.unlink(missing_ok=True)

    def states(self, seed: int) -> Path:
        """The file for the states of a seed's clients between rounds, if they are too large for its checkpoint."""
        return self.path / f"states-{seed}.table"

    def _read(self, path: Path, kind: str, seed: int, warn: Callable[[str], None]) -> Sealed | None:
        """A sealed file of a seed, or None; a damaged one is deleted, and ``warn`` receives the reason."""
        try:
            return read_sealed(path, self._header(kind, seed))
        except CorruptionError as error:
            warn(f"{error.message} Seed {seed} is trained again from the start.")
            path.unlink(missing_ok=True)
            return None

    def _header(self, kind: str, seed: int) -> Facts:
        """The header of a sealed file of a seed."""
        return {"kind": kind, "run": self.identity.digest, "seed": seed}

    def finish(
        self,
        result: Record,
        rounds: Sequence[Record],
        measured: Record,
        before: Callable[[Record], None],
        files: Mapping[str, bytes],
        config: Record,
    ) -> Facts:
        """Write rounds and measurements, and the result last. Then delete files that only a resume needs.

        ``files`` are further reproducible files, by name. ``before`` is called with the complete result just before it
        is written. ``config`` replaces that of ``begin``, because the result may have more seeds.

        Returns:
            the result with ``files``: the digests of the other files, from ``begin`` and from this call.
        """
        lines = b"".join(canonical_json(record) + b"\n" for record in rounds)
        # ``listed``: every file of this call that the result lists. ``without_config``: the same without the config,
        # which ``_write_config`` writes.
        without_config = {"rounds.jsonl": lines, **files}
        text = self._config_text(config)
        listed = {**without_config, "config.toml": text}
        path = self.path / "result.json"
        if any(_holds_other_bytes(self.path / name, raw) for name, raw in listed.items()):
            # The run gets more seeds, or a private run is trained again. The old result no longer fits the files. If
            # the process is killed from here on, the run has no result, and the next command makes it from the seeds.
            path.unlink(missing_ok=True)
        seeds = result.get("seeds", ())
        files_of_seeds = map(self.partition_file, seeds)
        partitions = self._write_config(text, filter(Path.is_file, files_of_seeds))
        for name, raw in without_config.items():
            write_atomic(self.path / name, raw)
        write_sealed(self.path / MEASURED, _measured_header(self.identity.digest), dict(measured))
        digests = {name: file_digest(name, raw) for name, raw in listed.items()}
        complete = {**result, "files": {**partitions, **digests}}
        before(complete)
        write_result(path, complete)
        # Now nothing is left to resume.
        self.restart(seeds)
        # Delete the partial files of killed writers. A file of the last minute may belong to a process that trains the
        # same run now.
        for part in (*self.path.glob(".*.partial"), *self.path.glob(f"{MODELS}/.*.partial")):
            with suppress(OSError):
                if part.stat().st_mtime < time.time() - MINUTE:
                    part.unlink()
        return complete

    def partition_file(self, seed: int) -> Path:
        """The file of the partition that was made for a seed."""
        return self.path / f"partition-{seed}.partition"

    def _checkpoint(self, seed: int) -> Path:
        return self.path / f"checkpoint-{seed}.safetensors"

    def _seed(self, seed: int) -> Path:
        return self.path / f"seed-{seed}.json"


def _do_nothing() -> None:
    """Callback of ``wait_for_lock``, for waiting without a message and without an end on request."""


def _holds_other_bytes(path: Path, raw: bytes) -> bool:
    """Whether a file exists and its bytes are not ``raw``."""
    try:
        return read_whole(path) != raw
    except OSError:
        return False


def file_digest(name: str, raw: bytes) -> str:
    """The digest of a file in the ``files`` of a result: sha256 of its bytes.

    For ``config.toml`` it is the digest of the fields without ``PLACES``, so that a result has the same bits wherever
    its store is. A ``config.toml`` that cannot be read as fields has the sha256 of its bytes.
    """
    if name != "config.toml":
        return sha256_hex(raw)
    try:
        table = config_table(raw.decode())
        return digest_of({key: value for key, value in table.items() if key not in PLACES})
    except (ValueError, KeyError, AttributeError, TypeError):
        return sha256_hex(raw)


@lru_cache(maxsize=1024)
def config_table(text: str) -> Record:
    """The ``[train]`` table of the text of a ``config.toml``; callers must not change it, because it is cached.

    Raises ValueError, KeyError or TypeError for another text.
    """
    table: Record = parse_toml(text)["train"]
    return table


def train_table(run: Path) -> Facts:
    """The ``[train]`` table that made the run in a directory; {} if it cannot be read."""
    try:
        return dict(config_table(read_whole(run / "config.toml").decode()))
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def is_of_run(name: str) -> bool:
    """Whether a file of that name in a run's directory was written by fedcache."""
    return re.fullmatch(OWN_FILES, name) is not None


def mark_pruned(run: Path, facts: Record) -> None:
    """Mark the directory of a run that a search stopped; training the run to its end removes the mark."""
    write_sealed(run / PRUNED, _pruned_header(run), dict(facts))


def read_pruned(run: Path) -> Facts | None:
    """The mark of ``mark_pruned``; None for a run that no search stopped. Raises CorruptionError for a damaged file."""
    found = read_sealed(run / PRUNED, _pruned_header(run))
    if found is None:
        return None
    return dict(found.content)


def _pruned_header(run: Path) -> dict[str, str]:
    """The header of ``PRUNED``, for its seal."""
    return {"kind": "mark of a pruned run", "run": name_of_run(run)}


def name_of_run(folder: Path) -> str:
    """The first 16 digits of a run's digest. They are the name of its directory, unless it was renamed."""
    if re.fullmatch("[0-9a-f]{16}", folder.name):
        return folder.name
    try:
        return str(read_result(folder / "result.json")["digest"])[:16]
    except (DamagedRunError, KeyError):
        return folder.name


def write_result(path: Path, result: Record) -> None:
    """Write a result as canonical JSON that ends with its own digest."""
    write_atomic(path, canonical_json({**result, "sha256": digest_of(result)}))


def read_result(path: Path) -> Facts:
    """The inverse of ``write_result``. Raises DamagedRunError if the content does not have the digest in it."""
    try:
        found = parse_json(read_whole(path))
        claimed = found.pop("sha256")
        if digest_of(found) != claimed:
            raise ValueError("digest")
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise DamagedRunError(path) from error
    result: Facts = found
    if "lift" in result:  # the name of ``execution`` in results of 0.1
        word = result.pop("lift")
        result["execution"] = EXECUTIONS_OF_0_1.get(word, word)
    return result


def run_folder(place: Path) -> Path:
    """The directory of a run; ``place`` is this directory or one of its model files."""
    if place.is_dir():
        return place
    return place.parent.parent


def result_of(place: Path, run: str) -> Facts | None:
    """The result of the run with digest ``run``; None if ``place`` is not its directory or one of its model files."""
    path = run_folder(place) / "result.json"
    found = None
    if path.is_file():
        found = read_result(path)
    if found is not None and found["digest"] == run:
        return found
    return None


def measured_of(folder: Path, result: Record) -> Facts | None:
    """Measured values of a run; None if the file is missing or damaged, because a result does not need it."""
    try:
        found = read_sealed(folder / MEASURED, _measured_header(str(result.get("digest"))))
    except CorruptionError:
        return None
    if found is None:
        return None
    return dict(found.content)


def _measured_header(run: str) -> Facts:
    """The header of ``MEASURED``, for its seal; ``run`` is a digest."""
    return {"kind": "measurements", "run": run}


def check_config(path: Path | None) -> None:
    """Raise CorruptionError if a ``config.toml`` in a run's directory, or a partition next to it, was changed.

    The user may change the configuration of an unfinished run. If that of a finished run was changed, another run would
    be trained under its name. A file in any other folder is not checked.
    """
    if path is None or path.name != "config.toml":
        return
    folder = path.resolve().parent
    finished = (folder / "result.json").exists()
    # The digests of the files as they were written: those in ``WRITTEN``, else those in the result, else none.
    try:
        found = read_sealed(folder / WRITTEN, {"kind": FILES})
    except CorruptionError:  # the digests in the result are used instead
        found = None
    digests = {}
    if found is not None:
        digests = found.content
    elif finished:
        with suppress(DamagedRunError):  # reported when the run is opened
            digests = read_result(folder / "result.json").get("files", {})
    # Of an unfinished run, only the partitions are checked.
    names = [name for name in digests if name.startswith("partition-")]
    if finished:
        names.insert(0, "config.toml")
    for name in names:
        try:
            raw = read_whole(folder / name)
        except OSError:
            raw = b""
        # ``WRITTEN`` has digests of bytes; a result has those of ``file_digest``.
        if found is not None:
            digest = sha256_hex(raw)
        else:
            digest = file_digest(name, raw)
        # A file without a digest to compare with is accepted.
        if digest != digests.get(name, digest):
            raise CorruptionError(
                f"{folder / name} is missing or was changed.",
                "Leave out --config, and give the settings of the run as options. To train with other "
                "settings, copy config.toml to another folder, edit the copy and give it with --config.",
            )


def config_changed(folder: Path) -> bool:
    """Whether the ``config.toml`` of an unfinished run was changed since the run began."""
    try:
        found = read_sealed(folder / WRITTEN, {"kind": FILES})
    except CorruptionError:
        return False  # the damaged list is reported by the command that resumes the run
    if found is None:
        return False
    digest = sha256_hex(read_whole(folder / "config.toml"))
    return bool(found.content.get("config.toml") != digest)


def check_place(folder: Path, result: Record) -> None:
    """Raise DamagedRunError if the name of a directory is the digest of a run, but its result is of another run.

    A renamed directory, whose name is no digest, may hold any result.
    """
    is_digest = re.fullmatch("[0-9a-f]{16}", folder.name) is not None
    if is_digest and not str(result.get("digest")).startswith(folder.name):
        raise DamagedRunError(folder / "result.json", "belongs to another run")


def check_files(folder: Path, result: Record) -> None:
    """Raise DamagedRunError if a result is of another run, or a file that it lists is missing or was changed."""
    check_place(folder, result)
    for name, digest in result.get("files", {}).items():
        try:
            intact = file_digest(name, read_whole(folder / name)) == digest
        except OSError:
            raise DamagedRunError(folder / name, "is missing or unreadable") from None
        if not intact:
            raise DamagedRunError(folder / name)


def check_models(folder: Path, result: Record) -> None:
    """Raise DamagedRunError if a file of a run's models is missing or was changed.

    A run whose models were all removed is not damaged.
    """
    index = folder / MODELS / INDEX
    try:
        listed = read_sealed(index, header_of_models(str(result["digest"])))
    except CorruptionError as error:
        raise DamagedRunError(index) from error
    files = {}
    if listed is not None:
        files = listed.content["files"]
    for name, written in files.items():
        file = index.with_name(name)
        # The file may disappear while it is read.
        with suppress(FileNotFoundError):
            if file.is_file() and file_sha256(file) == written["sha256"]:
                continue
        # Missing or changed. If the list is gone too, another process removes the models now: no damage.
        if index.is_file():
            raise DamagedRunError(file, "is missing or was changed after fedcache wrote it")


def header_of_models(digest: str) -> Facts:
    """The header of the list of a run's models, for its seal."""
    return {"kind": "models of a run", "run": digest}


def command_again(folder: Path, *options: str) -> str:
    """The command that resumes or repeats the run of a directory, with more options; in words for a run over sites."""
    # A run over sites has client stores and no partition, because their rows are at the sites. The folder of its app is
    # not known here.
    if train_table(folder).get("clients_from") and not any(folder.glob("partition-*.partition")):
        return "repeat the `fedcache flower run` or `flower up` that began it, with the same sites"
    return " ".join([f"fedcache train --config {shell_word(folder / 'config.toml')}", *options])


def command_saving(folder: Path, clients: str) -> str:
    """The command that trains the run of a directory again and saves the models of clients: all, or their names."""
    return command_again(folder, "--fresh", f"--save-clients {shell_word(clients)}")


def has_model(run: Path) -> bool:
    """Whether a run's directory has a list of models; nothing is read."""
    return (run / MODELS / INDEX).is_file()


def _files_of_models(path: Path) -> Iterator[Path]:
    """The files of a run's models. Only regular files are listed, because opening a pipe may wait."""
    return (file for file in (path / MODELS).glob("*.safetensors") if file.is_file())


def bytes_of_models(path: Path) -> int | None:
    """Bytes of a run's trained models on disk; None for a run without models."""
    files = list(_files_of_models(path))
    if files:
        return sum(file.stat().st_size for file in files)
    return None


def reads_embeddings(path: Path) -> bool:
    """Whether the models of a run read ingested embeddings, for which no preprocessing recipe is known."""
    file = next(_files_of_models(path), None)
    if file is None:
        return False
    try:
        # A recipe of images has a size.
        recipes = content_beside_tensors(file)["recipes"]
        return any("size" not in recipe for recipe in recipes)
    except (SafetensorError, ValueError, KeyError, TypeError):
        return False  # a damaged model is reported when it is read


def has_client_models(path: Path) -> bool:
    """Whether a finished run has models of single clients. Only the names of the tensors in its files are read."""
    for file in _files_of_models(path):
        with safe_open(file, framework="np") as tensors:
            if any(name.startswith("clients/") for name in tensors.keys()):  # noqa: SIM118  (no mapping)
                return True
    return False


def rounds_of(path: Path) -> list[Facts]:
    """The rounds of a finished run."""
    return list(read_lines(path / "rounds.jsonl"))


# Locks of runs that are being trained. The operating system releases such a lock when its process ends. Only one
# process trains a run at a time. Two processes would replace each other's files while others read them, and both would
# draw noise for the same rounds of a private run, which cannot be repeated.

LOCK = "running.lock"
"""Lock file in the directory of a run.

If several ordinary runs are trained together, only the file of the first one is locked. In the directories of the
others, the file contains the path of the first directory."""


@contextmanager
def owning(
    folders: Sequence[Path], observer: Observer, stop: Stop, *, private: bool = False
) -> Iterator[None]:
    """Own the directories of runs while the block runs. They are created if they do not exist.

    If another process or thread trains one of these runs, wait until it has ended. Only the first of ordinary runs that
    are trained together is locked, because a grid of thousands of runs would need thousands of open files. Private runs
    are all locked. Ordinary runs are trained even if files cannot be locked.

    Raises StoppedError if a stop is requested while waiting, MachineError if private runs cannot be locked.
    """

    def give_up_if_stopped() -> None:
        if stop.requested:
            raise StoppedError(
                "Stopped on request while waiting for another training of the same run.",
                "Run the same command again: it returns the stored result, or resumes the training.",
            )

    locked = folders[:1]
    why = ""
    if private:
        # The same order in every process, so that two grids with common private runs never wait for each other.
        locked = sorted(folders)
        why = ", because training a private run twice at once spends privacy twice"
    with ExitStack() as held:
        for folder in folders:
            make_private(folder.parent)
            make_private(folder)
        for folder in locked:
            message = (
                f"{folder.name} is being trained by another process or thread. Waiting until that training "
                f"ends{why}."
            )
            # The lock file stays when the block ends, because waiting processes have it open.
            lock = wait_for_lock(folder / LOCK, partial(observer.note, message), give_up_if_stopped)
            try:
                held.enter_context(lock)
            except MachineError:
                if private:
                    raise
        # In the directories that are not locked, a file contains the path of the first one, until the block ends.
        pointers = [folder / LOCK for folder in folders if folder not in locked]
        held.callback(_remove_locks, pointers)
        for file in pointers:
            with suppress(OSError):
                write_atomic(file, str(folders[0].resolve()).encode())
        yield


def is_running(folder: Path) -> bool:
    """Whether a process trains the run of a directory now."""
    lock = folder / LOCK
    try:
        first = read_whole(lock).decode()
    except (OSError, UnicodeDecodeError):
        return False
    # A file that can be locked is empty. Otherwise it contains the path of the directory that is locked.
    held = lock
    if first:
        held = Path(first) / LOCK
    return held.exists() and is_held(held)


def _remove_locks(locks: Sequence[Path]) -> None:
    """Remove files of the name ``LOCK`` that contain the path of another directory."""
    for lock in locks:
        with suppress(OSError):
            lock.unlink(missing_ok=True)


# Tags: words that a user gives to runs. They are in ``tags.json`` next to a result, and not part of any digest.

TAGS = "tags.json"
TAG = r"\w[\w.+-]{0,63}"
OF_TAG = "tag:"
"""Beginning of a word that names all runs with a tag: ``tag:baseline``."""


def check_tag(tag: str) -> str:
    """The tag itself. Raises UsageError if it is not a plain word."""
    if not re.fullmatch(TAG, tag):
        raise UsageError(
            f"{tag!r} is not a valid tag: a tag is one word of at most 64 letters, digits and . _ + -.",
            "fedcache runs tag baseline RUN",
        )
    return tag


def tags_of(run: Path) -> tuple[str, ...]:
    """The tags of the run in a directory, sorted. Raises CorruptionError if the file was changed."""
    path = run / TAGS
    try:
        found = read_sealed(path, _tags_header(run))
    except CorruptionError as error:
        plain = _plain_words(path)
        if plain:
            # The tags are readable, only their seal is missing. The hint removes the file and adds each tag again.
            run_word = shell_word(run.name)
            commands = [f"rm {shell_word(path)}"]
            commands += [f"fedcache runs tag {shell_word(tag)} {run_word}" for tag in plain]
            raise CorruptionError(
                f"{path} cannot be used, because it has no seal (the checksum that fedcache adds). An earlier release "
                "of fedcache or an editor wrote the file.",
                " && ".join(commands),
            ) from error
        raise CorruptionError(
            error.message,
            f"The run's tags are lost. Remove the file and add the tags again:  rm {shell_word(path)}",
        ) from error
    if found is None:
        return ()
    return tuple(sorted(set(found.content)))


def write_tags(run: Path, tags: Iterable[str]) -> None:
    """Replace the tags of the run in a directory."""
    distinct = sorted(set(tags))
    if distinct:
        write_sealed(run / TAGS, _tags_header(run), distinct)
    else:
        (run / TAGS).unlink(missing_ok=True)


def _tags_header(run: Path) -> dict[str, str]:
    """The header of ``TAGS``, for its seal."""
    return {"kind": "tags of a run", "run": name_of_run(run)}


def _plain_words(path: Path) -> list[str]:
    """The words of a plain JSON list of tags; [] for any other file."""
    try:
        found = parse_json(read_whole(path))
    except (OSError, ValueError):
        return []
    if not isinstance(found, list):
        return []
    if not all(isinstance(tag, str) and re.fullmatch(TAG, tag) for tag in found):
        return []
    return found


# Files of a result: values of single clients (many are in a parquet file, few in ``result.json``), and test rows.
#
# A result has the digests of these files, so a damaged or changed file is never read.

CLIENTS_IN_RESULT = 1_000
"""Maximum number of clients for which ``result.json`` has a value per client; other results have a parquet file."""

CLIENTS_FILE = "clients.parquet"


def check_recordable(clients: int) -> None:
    """Raise MachineError before training if the result of many clients could not be written, for lack of pyarrow."""
    if clients > CLIENTS_IN_RESULT:
        need_arrow(
            f"The result of {clients:,} clients (a parquet file above {CLIENTS_IN_RESULT:,})"
        )


@dataclass(frozen=True, eq=False)
class ClientColumns:
    """One entry per client, in client order."""

    names: Sequence[str]
    # float64 [M], means over seeds; NaN for a client that was not scored in every seed
    accuracy: np.ndarray
    classes_owned: np.ndarray  # float64 [M], classes among the training rows, means over seeds
    # float64 [seeds, M], accuracy; [0, M] for a small result, which has only means
    per_seed: np.ndarray
    # float64 [M], like ``accuracy`` on validation rows; None without such rows
    validation: np.ndarray | None = None

    @property
    def scored(self) -> np.ndarray:
        """Accuracies of the scored clients, float64."""
        known: np.ndarray = self.accuracy[~np.isnan(self.accuracy)]
        return known

    def accuracy_of(self, name: str) -> float | None:
        """Accuracy of one client; None for an unknown name and for a client that was not scored."""
        place = next((i for i, known in enumerate(self.names) if known == name), None)
        if place is None or np.isnan(self.accuracy[place]):
            return None
        return float(self.accuracy[place])

    def to_parquet(self, seeds: Sequence[int]) -> bytes:
        """The content of ``CLIENTS_FILE``: client, accuracy, classes_owned, and the accuracy of every seed."""
        import pyarrow as pa
        from pyarrow import parquet

        def nan_as_null(values: np.ndarray) -> Any:
            return pa.array(values, pa.float64(), mask=np.isnan(values))

        columns = {
            "client": pa.array(list(self.names), pa.string()),
            "accuracy": nan_as_null(self.accuracy),
            "classes_owned": pa.array(self.classes_owned, pa.float64()),
        }
        for seed, values in zip(seeds, self.per_seed, strict=True):
            columns[f"accuracy_seed_{seed}"] = nan_as_null(values)
        if self.validation is not None:
            columns["validation"] = nan_as_null(self.validation)
        buffer = io.BytesIO()
        parquet.write_table(pa.table(columns), buffer, compression="zstd")
        return buffer.getvalue()


class _ColumnOfNames(LazySequence[str]):
    """A column of strings of a pyarrow table. Strings are made on request, because a table may have a million rows."""

    def __init__(self, column: Any) -> None:
        self._column = column

    def __len__(self) -> int:
        return len(self._column)

    def at(self, i: int) -> str:
        """The string of one row."""
        return str(self._column[i].as_py())

    def __iter__(self) -> Iterator[str]:
        return iter(self._column.to_pylist())

    def __eq__(self, other: object) -> bool:
        """Whether another column has the same strings in the same order."""
        if isinstance(other, _ColumnOfNames):
            return bool(self._column.equals(other._column))
        return NotImplemented

    __hash__ = None  # type: ignore[assignment]


def client_columns(result: Record, folder: Path) -> ClientColumns:
    """The columns of a stored result in the directory ``folder``.

    Raises DamagedRunError for a file that is missing or was changed.
    """
    validation = None
    files = result.get("files", {})
    if CLIENTS_FILE not in files:
        accuracy = np.array(result["accuracy"]["per_client"], np.float64)  # None becomes NaN
        owned = np.array(result["classes_owned"]["per_client"], np.float64)
        per_seed = np.empty((0, len(accuracy)))
        stored = result.get("validation")
        if stored is not None:
            validation = np.array(stored["per_client"], np.float64)
        return ClientColumns(result["clients"], accuracy, owned, per_seed, validation)
    path = folder / CLIENTS_FILE
    raw = _unchanged(path, files[CLIENTS_FILE])
    need_arrow(str(path))
    from pyarrow import parquet

    table = parquet.read_table(io.BytesIO(raw))

    def numbers(name: str) -> np.ndarray:
        column = table[name].to_numpy(zero_copy_only=False)
        values: np.ndarray = column.astype(np.float64, copy=False)
        return values

    of_seeds = [numbers(name) for name in table.column_names if name.startswith("accuracy_seed_")]
    if "validation" in table.column_names:
        validation = numbers("validation")
    return ClientColumns(
        _ColumnOfNames(table["client"]),
        numbers("accuracy"),
        numbers("classes_owned"),
        np.stack(of_seeds),
        validation,
    )


def _unchanged(path: Path, digest: str) -> bytes:
    """The content of a result file. Raises DamagedRunError if it is missing or does not have the digest."""
    try:
        raw = path.read_bytes()
    except OSError:
        raise DamagedRunError(path, "is missing or unreadable") from None
    if file_digest(path.name, raw) != digest:
        raise DamagedRunError(path)
    return raw


# The file of test rows: how often every test row was classified correctly. It is sealed and next to a result.


ROWS_FILE = "test-rows.npz"


@dataclass(frozen=True, eq=False)
class TestRows:
    """Outcomes of one seed for every scored test row; R rows.

    Attributes:
        rows: int64 [R], ascending: numbers of the rows in the store.
        right: int64 [R]: number of clients whose model was right.
        scored: int64 [R]: number of clients whose model was scored on the row.
        share: float64 [R]: part of the row in the mean over clients, sum_i right_i / (n_i M) over the M scored clients
            with n_i scored rows. The sum over rows is that mean.
        weight: float64 [R]: the part if all models were right. The sum over rows is 1.
    """

    rows: np.ndarray
    right: np.ndarray
    scored: np.ndarray
    share: np.ndarray
    weight: np.ndarray

    __test__ = False  # not a class of tests

    def to_dict(self) -> dict[str, str]:
        """Plain JSON values."""
        return {
            name: base64.b64encode(values.tobytes()).decode() for name, values in vars(self).items()
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, str]) -> TestRows:
        """The inverse of ``to_dict``, on a machine of the same byte order."""
        arrays = {}
        for field in fields(cls):
            kind: Any = np.int64
            if field.name in ("share", "weight"):
                kind = np.float64
            arrays[field.name] = np.frombuffer(base64.b64decode(data[field.name]), kind)
        return cls(**arrays)


def rows_file(seeds: Mapping[int, TestRows | None]) -> bytes | None:
    """The content of ``ROWS_FILE``; None unless every seed has rows. Equal rows give equal bytes."""
    arrays = {}
    for seed, rows in seeds.items():
        if rows is None:
            return None
        for name, values in vars(rows).items():
            arrays[f"{name}_{seed}"] = values
    buffer = io.BytesIO()
    np.savez_compressed(buffer, allow_pickle=False, **arrays)
    return buffer.getvalue()


def test_rows(result: Record, folder: Path) -> dict[int, TestRows] | None:
    """Test rows of a stored result, by seed; None for a result without them, such as one of an earlier release.

    Raises DamagedRunError for a file that is missing or was changed.
    """
    digest = result.get("files", {}).get(ROWS_FILE)
    if digest is None:
        return None
    path = folder / ROWS_FILE
    raw = _unchanged(path, digest)
    seeds: Sequence[int] = result["seeds"]
    names = [field.name for field in fields(TestRows)]
    by_seed = {}
    try:
        with zipfile.ZipFile(io.BytesIO(raw)) as archive:
            for seed in seeds:
                arrays = {name: _array(archive.read(f"{name}_{seed}.npy")) for name in names}
                by_seed[seed] = TestRows(**arrays)
    except (KeyError, ValueError, zipfile.BadZipFile) as error:
        raise DamagedRunError(path) from error
    return by_seed


def _array(raw: bytes) -> np.ndarray:
    """The array of an .npy file's bytes. For a few rows this is three times as fast as ``np.load``."""
    # Parts of version 1.0 of the format: magic, version, length of the header, header, values.
    start = 10 + int.from_bytes(raw[8:10], "little")
    shape, kind = _header(raw[:start])
    return np.frombuffer(raw, kind, offset=start).reshape(shape)


@lru_cache(maxsize=64)
def _header(raw: bytes) -> tuple[tuple[int, ...], np.dtype[Any]]:
    file = io.BytesIO(raw)
    if np.lib.format.read_magic(file) != (1, 0):
        raise ValueError("not of version 1.0")
    shape, _, kind = np.lib.format.read_array_header_1_0(file)
    return shape, kind


def is_private(result: Record) -> bool:
    """Whether a result promises differential privacy: with noise, and not as a simulation."""
    cost = result.get("trust", {}).get("privacy") or {}
    return bool(cost.get("noise")) and not cost.get("simulation")


def has_secret_times(result: Record) -> bool:
    """Whether a result is private and its epsilon assumes that participants of rounds stay secret."""
    cost = result.get("trust", {}).get("privacy") or {}
    return is_private(result) and cost.get("participants") == "secret"
