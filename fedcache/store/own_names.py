"""Names of backbones that a user brings: a prefix, and a file, a folder or a place in the user's own code.

In a store and in a recipe such a backbone has its bare name, without folders: two sites that keep one model in
different places have one recipe, and a store says nothing of places. A name that an installed package gives to a
factory stands for ``module:`` and the place of that factory.

A ``module:`` name is Python code that is imported and called, so data must never choose one. It counts only if the
user wrote it in the command or passed it to a function in this process, or if an installed package declares it as a
backbone. Names in models, stores, runs and ``fedcache.toml`` count for nothing.
"""

from __future__ import annotations

import re
from pathlib import PurePath
from typing import Any

from fedcache.plugins import find, plugins

MODULE = "module:"
ONNX = "onnx:"
TFLITE = "tflite:"
HUGGING_FACE = "hf:"
PREFIXES = (MODULE, ONNX, TFLITE, HUGGING_FACE)

_CODE_NAME = re.compile(rf"{MODULE}[\w.]+:[\w.]+")
_named: set[str] = set()
"""The ``module:`` names that the user wrote or passed in this process."""


def note_named(given: Any) -> None:
    """Note the ``module:`` backbones that the user named in a command, or passed to a function of the Python API.

    ``given`` is a word or a list of words, each with names of backbones: ``a,b+c``, ``a@SIZE``, ``a=PATH``. Anything
    else names nothing. Never pass what was read from a file, nor a path: strangers choose the names of their files.
    """
    if isinstance(given, str):
        names = [re.split("[@=]", name)[0].strip() for name in re.split("[,+]", given)]
        _named.update(name for name in names if _CODE_NAME.fullmatch(name))
    elif isinstance(given, list | tuple):
        for one in given:
            note_named(one)


def may_be_run(name: str) -> bool:
    """Whether the user named this ``module:`` backbone in this process, or installed a package that declares it."""
    if name in _named:
        return True
    return any(name == f"{MODULE}{plugin.place}" for plugin in plugins("backbones").values())


def bare_name(name: str) -> str:
    """A backbone's name as stores spell it: of a path its last part, of ``hf:`` also a repository's two parts.

    A folder named by two parts is called as a repository of that name would be, with or without a slash at the end.

    >>> [bare_name(n) for n in ("onnx:models/enc.onnx", "hf:/srv/dinov2/", "hf:facebook/dinov2-base/", "clip-rn50")]
    ['onnx:enc.onnx', 'hf:dinov2', 'hf:facebook/dinov2-base', 'clip-rn50']
    """
    prefix, colon, rest = name.partition(":")
    if not colon:
        alias, at, size = name.partition("@")
        plugin = find("backbones", alias)
        if plugin is None:
            return name
        return f"{MODULE}{plugin.place}{at}{size}"
    if prefix + colon not in PREFIXES or prefix + colon == MODULE:
        return name
    if prefix + colon == HUGGING_FACE and not rest.startswith((".", "/", "~")):
        org, _, model = rest.rstrip("/").partition("/")
        if org and model and "/" not in model:
            return f"{HUGGING_FACE}{org}/{model}"
    return f"{prefix}:{PurePath(rest.replace(chr(92), '/')).name}"
