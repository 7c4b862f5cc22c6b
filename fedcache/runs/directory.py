"""Runs on disk: one directory per digest of everything that determines the result.

``config.toml`` re-runs it, ``rounds.jsonl`` and ``result.json`` are promises (no time, host, path or rate), what was
measured lies apart in ``measured.json``. A run that was killed goes on from its checkpoint; the bits are the same.

``result.json`` lists the sha256 of the other promises under ``files``, so that a result is only ever returned whole.
"""

from __future__ import annotations

import hashlib
import json
import time
import tomllib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import tomli_w

from fedcache.config import execution_name
from fedcache.errors import CorruptionError, FedcacheError
from fedcache.runs.identity import Identity
from fedcache.store.files import canonical_json, digest_of, make_private, read_lines, sha256_hex, write_atomic

FORMAT = 1
MINUTE = 60.0
PLACES = ("dataset", "store", "partition", "clients_from")
"""Words of ``config.toml`` that say where things lie. They may differ between equal results; what lies there is in the
result by its own digest."""


class DamagedRunError(CorruptionError):
    """A stored result that is not what was written, or whose promised files are not."""

    def __init__(self, path: Path, why: str = "is not what was written") -> None:
        super().__init__(f"{path} {why}.", f"The same command with --fresh runs it again; or remove {path.parent}.")
        self._args = (path, why)

    def __reduce__(self) -> tuple[type[FedcacheError], tuple[Any, ...]]:
        return DamagedRunError, self._args


class RunDirectory:
    """``runs/<digest>/``."""

    def __init__(self, root: Path, identity: Identity) -> None:
        self.identity = identity
        self.path = root / identity.digest[:16]
        self._files: dict[str, str] = {}

    def stored(self) -> dict[str, Any] | None:
        """The finished result, or None.

        Raises DamagedRunError, when it, its config, its rounds or its partitions are not what was written.
        """
        path = self.path / "result.json"
        if not path.exists():
            return None
        result = read_result(path)
        check_files(self.path, result)
        return result

    def measured(self) -> dict[str, Any] | None:
        """See ``measured_of``."""
        return measured_of(self.path)

    def begin(self, config: Mapping[str, Any], partitions: Mapping[str, Mapping[str, Any]]) -> None:
        """Make the directory, the config that re-runs it, and the partitions made for it."""
        make_private(self.path.parent)
        make_private(self.path)
        files = {"config.toml": tomli_w.dumps({"train": dict(config)}).encode()}
        files |= {f"{name}.json": canonical_json(payload) for name, payload in partitions.items()}
        for name, raw in files.items():
            write_atomic(self.path / name, raw)
        self._files = {name: file_digest(name, raw) for name, raw in files.items()}

    def restart(self) -> None:
        """Forget checkpoints and finished seeds, so that every seed begins again."""
        for left in (*self.path.glob("seed-*.json"), *self.path.glob("checkpoint-*.safetensors")):
            left.unlink(missing_ok=True)

    def checkpoint(self, seed: int) -> tuple[dict[str, Any], dict[str, Any]] | None:
        """Tensors and meta of a seed's last checkpoint, or None; a damaged one is dropped, the seed begins again."""
        path = self._checkpoint(seed)
        if not path.exists():
            return None
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(path, framework="pt") as file:
                meta = json.loads(file.metadata()["meta"])
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (no mapping)
        except (SafetensorError, ValueError, KeyError, TypeError, OSError):
            path.unlink(missing_ok=True)
            return None
        if meta.get("digest") != _tensors_digest(tensors):
            path.unlink(missing_ok=True)
            return None
        return tensors, meta["state"]

    def save_checkpoint(self, seed: int, tensors: Mapping[str, Any], state: Mapping[str, Any]) -> None:
        """Replace a seed's checkpoint, whole or not at all."""
        from safetensors.torch import save

        plain = {name: t.contiguous() for name, t in tensors.items()}
        meta = json.dumps({"state": dict(state), "digest": _tensors_digest(plain)})
        write_atomic(self._checkpoint(seed), save(plain, {"meta": meta}))

    def seed_result(self, seed: int) -> dict[str, Any] | None:
        """A finished seed of an unfinished run, or None."""
        path = self._seed(seed)
        try:
            return read_result(path) if path.exists() else None
        except DamagedRunError:
            if path.exists():
                raise
            return None  # another process has just finished the same run

    def save_seed(self, seed: int, result: Mapping[str, Any]) -> None:
        """Keep a finished seed, and drop its checkpoint."""
        write_result(self._seed(seed), result)
        self._checkpoint(seed).unlink(missing_ok=True)

    def finish(
        self, result: Mapping[str, Any], rounds: Sequence[Mapping[str, Any]], measured: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Write rounds, measurements and last of all the result; then drop what only a resume needs.

        Returns:
            the result with ``files``: the digest of every other promise, of ``begin`` and of this call.
        """
        lines = b"".join(canonical_json(r) + b"\n" for r in rounds)
        write_atomic(self.path / "rounds.jsonl", lines)
        write_atomic(self.path / "measured.json", json.dumps(measured, indent=1).encode())
        whole = {**result, "files": {**self._files, "rounds.jsonl": file_digest("rounds.jsonl", lines)}}
        write_result(self.path / "result.json", whole)
        self.restart()
        for left in self.path.glob(".*.partial"):  # of writers that were killed
            with suppress(OSError):  # and not of another process that makes the same run at this moment
                if left.stat().st_mtime < time.time() - MINUTE:
                    left.unlink()
        return whole

    def _checkpoint(self, seed: int) -> Path:
        return self.path / f"checkpoint-{seed}.safetensors"

    def _seed(self, seed: int) -> Path:
        return self.path / f"seed-{seed}.json"


def file_digest(name: str, raw: bytes) -> str:
    """sha256 of a promised file's bytes; of ``config.toml`` that of what it says, without ``PLACES``.

    So one result has the same bits wherever its store lies. What is no config has the digest of its bytes.
    """
    if name != "config.toml":
        return sha256_hex(raw)
    try:
        table = tomllib.loads(raw.decode())["train"]
        return digest_of({key: value for key, value in table.items() if key not in PLACES})
    except (ValueError, KeyError, AttributeError, TypeError):
        return sha256_hex(raw)


def _tensors_digest(tensors: Mapping[str, Any]) -> str:
    import torch

    digest = hashlib.sha256()
    for name in sorted(tensors):
        t = tensors[name].contiguous()
        digest.update(f"{name}:{t.dtype}:{tuple(t.shape)}".encode())
        digest.update(t.flatten().view(torch.uint8).numpy().tobytes() if t.numel() else b"")
    return digest.hexdigest()


def write_result(path: Path, result: Mapping[str, Any]) -> None:
    """Canonical JSON that ends with its own digest."""
    write_atomic(path, canonical_json({**result, "sha256": digest_of(result)}))


def read_result(path: Path) -> dict[str, Any]:
    """The inverse of ``write_result``. Raises DamagedRunError, when the content does not have the digest it claims."""
    try:
        found = json.loads(path.read_bytes())
        claimed = found.pop("sha256")
        if digest_of(found) != claimed:
            raise ValueError("digest")
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise DamagedRunError(path) from error
    result: dict[str, Any] = found
    if "lift" in result:  # the name of an earlier release
        result["execution"] = execution_name(result.pop("lift"))
    return result


def measured_of(folder: Path) -> dict[str, Any] | None:
    """What was measured when a run was made; None when that file, which is no promise, is missing or damaged."""
    try:
        found = json.loads((folder / "measured.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) and isinstance(found.get("seconds"), dict) else None


def check_files(folder: Path, result: Mapping[str, Any]) -> None:
    """Compare every file that a result promises.

    Raises DamagedRunError, for one that is missing, or is not what was written.
    """
    for name, digest in result.get("files", {}).items():
        try:
            whole = file_digest(name, (folder / name).read_bytes()) == digest
        except OSError:
            raise DamagedRunError(folder / name, "is missing or unreadable") from None
        if not whole:
            raise DamagedRunError(folder / name)


def rounds_of(path: Path) -> list[dict[str, Any]]:
    """The rounds of a finished run."""
    return list(read_lines(path / "rounds.jsonl"))
