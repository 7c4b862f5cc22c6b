"""A saved partition whose file is damaged: the command that makes it again, and whether what was made is that one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress

from fedcache.errors import CorruptionError, FedcacheError, UsageError, shell_word
from fedcache.federate.partition.json_file import check_words, words_of
from fedcache.federate.partition.partition import SCHEMES, Partition
from fedcache.store.array_file import mapped, read_content
from fedcache.store.files import sha256_hex
from fedcache.store.sidecars import partition_file, partition_parts
from fedcache.store.store import Store


@contextmanager
def with_its_command(store: Store, name: str) -> Iterator[None]:
    """Errors of a damaged partition name the command that makes it again, as far as its words can still be read."""
    try:
        yield
    except CorruptionError as error:
        error.hint = f"To make it again:  {command_of(store, name)}"
        raise


def command_of(store: Store, name: str) -> str:
    """The command that makes a saved partition; its words are sealed apart from its rows, so that these may be damaged.

    Where they cannot be read, or where a file or a shard said the rows, the scheme is left to the user.
    """
    made = "fedcache partition --scheme SCHEME"
    with suppress(FedcacheError, OSError, ValueError):
        raw = mapped(store.path / partition_file(store.path, store.manifest, name))
        words = words_of(check_words(read_content(raw), name))
        if words["scheme"] in SCHEMES:
            made = SCHEMES[words["scheme"]].command(words["args"])
            made += f" --partition-seed {words['seed']}" if words["seed"] else ""
    command = f"{made} --name {shell_word(name)}"
    if "SCHEME" in made:
        return f"{command} --replace"
    return command


def check_same(store: Store, made: Partition, name: str) -> None:
    """Let a partition take the place of the damaged one that it is, and of no other. Raises UsageError."""
    relative, parts = partition_parts(name, made.to_file())
    if store.manifest.files.get(relative) != sha256_hex(*parts):
        raise UsageError(
            f"The partition {name!r} of {store.path.name} is damaged, and this is another one.",
            f"To make it again:  {command_of(store, name)};  in its place: --replace",
        )
