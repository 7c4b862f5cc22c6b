"""Get weights: downloaded into the library's own cache, or imported from a checkpoint file."""

from __future__ import annotations

from pathlib import Path

from fedcache.errors import MachineError
from fedcache.extract.backbones.backbone import Backbone, Weights
from fedcache.extract.backbones.checkpoints import read_state
from fedcache.extract.backbones.loading import load
from fedcache.extract.backbones.table import lookup
from fedcache.extract.backbones.weights import (
    Caches,
    library_caches,
    locate,
    missing_weights,
    other_ways,
    published_download,
    ready,
    takes_no_weights,
)
from fedcache.extract.digests import DigestMemory
from fedcache.extract.recipe import slug
from fedcache.store.files import make_private, write_atomic


def pull(backbone: Backbone, *, home: Path, memory: DigestMemory, caches: Caches | None = None) -> Weights:
    """Download weights into the library's own cache, and locate them there.

    Print ``Weights.download`` before: it says how much and from where.

    Raises:
        MachineError, when nothing publishes them, the network refuses, or the bytes are not those
            published.
    """
    caches = caches or library_caches()
    download = published_download(backbone)
    if download is None:
        raise missing_weights(backbone, home, caches, True, ready(given={}, home=home, caches=caches))
    try:
        if backbone.hub is not None:
            _pull_from_hub(backbone.hub, backbone.files, caches.huggingface)
        else:
            _pull_torchvision(backbone, caches.torch / "checkpoints")
    except Exception as error:  # each network library has its own family of errors, and all mean the same here
        reason = str(error).strip().splitlines()
        raise MachineError(
            f"The weights of {backbone.name} could not be fetched from {download.source}:"
            f" {type(error).__name__}: {reason[0] if reason else 'no reason given'}",
            other_ways(backbone, home),
        ) from error
    return locate(backbone, given={}, home=home, memory=memory, offline=True, caches=caches)


def import_weights(source: Path, name: str, home: Path) -> Path:
    """Check a checkpoint by loading it, and keep it as ``<home>/weights/<name>.safetensors``.

    Raises:
        MachineError, when the file is refused or does not fit the backbone; UsageError, for a backbone
            without weights.
    """
    from safetensors.torch import save

    backbone = lookup(name, home=home)
    if not backbone.has_weights and not backbone.seeded:
        raise takes_no_weights(name)
    checked = Weights(source, "", str(source))
    load(backbone, checked, backbone.recipe, device="cpu", dtype="float32")
    tensors = {key: value.detach().clone().contiguous() for key, value in read_state(source, hub=backbone.hub).items()}
    target = make_private(home / "weights") / f"{slug(name)}.safetensors"
    write_atomic(target, save(tensors))
    return target


def _pull_from_hub(repository: str, names: tuple[str, ...], cache: Path) -> None:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    for last, name in ((name == names[-1], name) for name in names):
        try:
            # No revision is pinned: which one came is part of the array's identity, by its digest.
            hf_hub_download(repository, name, cache_dir=cache)  # nosec B615
            return
        except EntryNotFoundError as error:
            # "Local" means that the network failed, which the second name would not mend.
            if last or isinstance(error, LocalEntryNotFoundError):
                raise


def _pull_torchvision(backbone: Backbone, folder: Path) -> None:
    import torch
    from torchvision.models import get_model_weights

    folder.mkdir(parents=True, exist_ok=True)
    url = get_model_weights(backbone.architecture)["IMAGENET1K_V1"].url
    name = backbone.files[0]
    torch.hub.download_url_to_file(url, str(folder / name), hash_prefix=dict(backbone.sha256)[name])
