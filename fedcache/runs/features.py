"""Which arrays of a store a run trains on, and what they become in memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from fedcache.config import Home
from fedcache.errors import Exit, FedcacheError
from fedcache.extract.planning.find_store import more_features
from fedcache.progress import Observer
from fedcache.runs import encoders
from fedcache.store.selection import meant, names_of
from fedcache.store.store import Store

if TYPE_CHECKING:
    from fedcache.federate.engine.client_data import Data
    from fedcache.federate.engine.hyperparameters import Hp
    from fedcache.federate.engine.method import Method

TEXT_ORDER = ("clip-rn50", "clip-vit-b-16", "clip-vit-b-32", "glyph-clip")


def chosen_arrays(store: Store, names: Sequence[str], *, pixels: bool = False) -> list[str]:
    """Array keys for ``--backbones``: the names given, or every array of features, in stored order.

    A name with several variants in the store is ambiguous; ``name@size`` or the array's own key chooses one.

    Raises:
        FedcacheError: STORE when the store lacks one; USAGE when a name means several.
    """
    info = {k: a for k, a in store.arrays.items() if pixels or a.dtype != "uint8"}
    if not info:
        raise FedcacheError(
            Exit.STORE,
            f"{store.path.name} holds no features yet.",
            more_features(store, "efficientnet-lite0"),
        )
    if not names:
        by_name: dict[str, list[str]] = {}
        for key in info:
            by_name.setdefault(str(info[key].recipe.get("backbone", key)), []).append(key)
        return [chosen_arrays(store, [name])[0] for name in by_name]
    chosen = []
    for name in names:
        labels = {k: names_of(k, a)[1:] for k, a in info.items()}
        found = meant(info, name)
        if not found:
            have = ", ".join(both[1] for both in labels.values())
            raise FedcacheError(
                Exit.STORE,
                f"{store.path.name} has no features of {name!r}; it has {have}.",
                more_features(store, name.partition("@")[0]),
            )
        if len(found) > 1:
            options = ", ".join(labels[k][1] if len({labels[f][1] for f in found}) == len(found) else k for k in found)
            raise FedcacheError(
                Exit.USAGE, f"{name!r} means {len(found)} arrays of the store.", f"Choose with --backbones: {options}"
            )
        chosen.append(found[0])
    return list(dict.fromkeys(chosen))


def arrays_for(method: Method, hp: Hp, store: Store, names: Sequence[str], observer: Observer) -> list[str]:
    """The arrays a method trains on: text methods take exactly one backbone with text, others concatenate.

    Raises:
        FedcacheError: STORE for what the store lacks, with the command that makes it; USAGE for more than one.
    """
    if "pixels" in method.reads(hp) and not encoders.wants_towers(method):
        return [image_array(method, store, names)]
    names = encoders.without_images(method, names)
    if "text" not in method.needs and not encoders.wants_towers(method):
        keys = chosen_arrays(store, names)
        if not names:
            observer.note(f"Backbones: all of the store, {' + '.join(keys)} (--backbones chooses).")
        return keys
    with_text = [k for k in chosen_arrays(store, names) if store.has_text(str(store.arrays[k].recipe.get("backbone")))]
    if not with_text:
        raise FedcacheError(
            Exit.STORE,
            f"{method.name} needs text features, and {' + '.join(names) or store.path.name} has none.",
            more_features(store, "glyph-clip", "text/NAME"),
        )
    if names and len(with_text) > 1:
        raise FedcacheError(
            Exit.USAGE,
            f"{method.name} takes exactly one backbone with text, got {len(with_text)}.",
            f"--backbones {names[0]}",
        )
    backbone = {str(store.arrays[k].recipe["backbone"]): k for k in with_text}
    first = next((backbone[n] for n in TEXT_ORDER if n in backbone), None)
    if first is None and len(with_text) > 1:
        raise FedcacheError(
            Exit.USAGE,
            f"Several backbones have text features: {', '.join(backbone)}.",
            f"--backbones {next(iter(backbone))}",
        )
    key = first or with_text[0]
    if not names:
        observer.note(f"Backbone: {key}, for {method.name} takes one with text features (--backbones chooses).")
    return [key]


def image_array(method: Method, store: Store, names: Sequence[str]) -> str:
    """The one array of images a method trains an encoder on: that of ``--backbones``, or the store's only one."""
    images = [k for k, a in store.arrays.items() if a.dtype == "uint8"]
    if not images:
        raise FedcacheError(
            Exit.STORE,
            f"{method.name} trains on images, and {store.path.name} has none.",
            more_features(store, "pixels", recipe={"size": "32"}),
        )
    chosen = chosen_arrays(store, names or ("pixels",), pixels=True)
    if len(chosen) > 1 or chosen[0] not in images:
        raise FedcacheError(
            Exit.USAGE,
            f"{method.name} trains on one array of images, got {', '.join(chosen)}.",
            f"--backbones {images[0]}",
        )
    return chosen[0]


def feat_post_for(
    hp: Hp, asked: bool, preset: str, store: Store, keys: Sequence[str], observer: Observer | None = None
) -> str:
    """``feat_post`` of a run: the method's value, unless what is known of the backbones says better, which is said.

    Nobody asked and the method does nothing: CLIP features go to the sphere (l2) when every backbone has a text tower,
    and the released FedPCL's ResNets give signs (D-01) under the official preset.
    """
    chosen = str(hp.get("feat_post") or "none")
    if asked or chosen != "none":
        return chosen
    names = [str(store.arrays[k].recipe.get("backbone")) for k in keys]
    if preset == "official" and all(n.startswith("resnet18-") for n in names):
        chosen = "sign"
    elif all(store.has_text(n) for n in names):
        chosen = "l2"
    if chosen != "none" and observer is not None:
        other = " (--set feat_post=none leaves features as they are)" if "feat_post" in hp else ""
        observer.note(f"feat_post {chosen}: what is usual for features of {' + '.join(names)}{other}.")
    return chosen


def load_features(
    method: Method,
    hp: Hp,
    store: Store,
    keys: Sequence[str],
    feat_post: str,
    train: np.ndarray,
    observer: Observer,
) -> tuple[Data, list[str], list[str]]:
    """Read the arrays, apply ``feat_post``, and take the text features of a backbone that has some.

    Backbones with different numbers of views are read as far as all have them.

    Returns:
        data, the digests of what it was made from, and the templates of the text features among it.
    """
    import torch

    from fedcache.federate.engine.client_data import Data, prepare
    from fedcache.store.files import sha256_hex

    arrays = [store.reader(key) for key in keys]
    for key, array in zip(keys, arrays, strict=True):
        if len(array.shape) != 3:
            raise FedcacheError(
                Exit.USAGE, f"{key} holds images, and {method.name} needs features.", "Choose other --backbones."
            )
    views = [array.shape[1] for array in arrays]
    if len(set(views)) > 1:
        observer.note(f"Views: {min(views)} of each backbone, as all of them have ({', '.join(map(str, views))}).")
    x = prepare(arrays, feat_post, train, views=min(views), scratch=Home.from_environment().root / "scratch")
    samples = store.samples
    digests = [str(store.arrays[key].digest) for key in keys]
    text, templates = text_of(method, hp, store, keys)
    if text is not None:
        digests.append(sha256_hex(text.tobytes()))
    return (
        Data(
            x=x,
            y=torch.from_numpy(samples.label.astype(np.int64)),
            classes=len(samples.classes),
            text=None if text is None else torch.from_numpy(text),
            widths=tuple(a.shape[2] for a in arrays),
            domain=torch.from_numpy(samples.domain.astype(np.int64)),
        ),
        digests,
        templates,
    )


def text_of(method: Method, hp: Hp, store: Store, keys: Sequence[str]) -> tuple[NDArray[np.float32] | None, list[str]]:
    """The current text features of a run's only backbone, float32 [C, D], where the method reads some, and the
    templates they were made from.
    """
    backbone = str(store.arrays[keys[0]].recipe.get("backbone"))
    how = "text" if hp.get("init") == "auto" and hp.get("head") == "linear" else hp.get("init")
    if len(keys) > 1 or not store.has_text(backbone) or not ("text" in method.needs or how == "text"):
        return None, []
    return np.array(store.text(backbone), np.float32), store.templates(backbone) or []
