"""Download folders of timm, torchvision, open_clip and Hugging Face, found without importing them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Caches:
    """Where the libraries keep downloads: huggingface_hub (of timm and open_clip) and torch (of torchvision)."""

    huggingface: Path
    torch: Path


def library_caches(environ: Mapping[str, str] = os.environ) -> Caches:
    """The caches, by the libraries' own rules (``HF_HOME``, ``TORCH_HOME``, ...), without importing them."""
    cache = Path(environ.get("XDG_CACHE_HOME") or "~/.cache")
    hf_home = Path(environ.get("HF_HOME") or cache / "huggingface")
    hub = environ.get("HF_HUB_CACHE") or environ.get("HUGGINGFACE_HUB_CACHE") or hf_home / "hub"
    torch = Path(environ.get("TORCH_HOME") or cache / "torch") / "hub"
    return Caches(Path(hub).expanduser(), torch.expanduser())


def hub_folder(repository: str) -> Path:
    """The folder of a Hugging Face repository in the cache."""
    return library_caches().huggingface / f"models--{repository.replace('/', '--')}"


def hub_snapshots(repository: str) -> Iterator[Path]:
    """Folders of its files: that of the branch ``main``, else of every revision that was fetched."""
    folder = hub_folder(repository)
    snapshots = folder / "snapshots"
    try:
        revisions = [(folder / "refs" / "main").read_text().strip()]
    except OSError:  # fetched by commit: no branch is recorded
        if snapshots.is_dir():
            revisions = sorted(p.name for p in snapshots.iterdir())
        else:
            revisions = []
    yield from (snapshots / revision for revision in revisions)
