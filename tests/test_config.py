"""The configuration: values from files and flags, their types and limits, and where things live."""

from __future__ import annotations

import inspect
from pathlib import Path

import numpy as np
import pytest
from command import fedcache
from command_lines import every_command
from failing_command import must_fail
from refusal import refused

import fedcache as fc
from fedcache.config import (
    ADDRESSES,
    ExtractConfig,
    Home,
    PartitionConfig,
    TrainConfig,
    read_file,
    resolve,
)
from fedcache.errors import Exit, UsageError, memory_error
from fedcache.store.lock import write_output


def test_flags_are_laid_over_a_section_and_what_is_empty_was_not_given():
    section = {"rounds": 5, "backbones": "a, b,,c", "set": {"lr": 0.1}, "eval-every": 2}
    section["byzantine"] = 0
    flags = {"rounds": 7, "method": None, "domain": (), "set": {}, "client_backbones": []}
    flags["dp_clip"] = 1
    made = resolve(TrainConfig, section, flags)
    wanted = {"backbones": ("a", "b", "c"), "set": {"lr": 0.1}, "byzantine": 0.0, "dp_clip": 1.0}
    wanted = TrainConfig(rounds=7, eval_every=2, **wanted)
    assert made == wanted
    assert type(made.byzantine) is float
    assert type(made.dp_clip) is float
    assert resolve(TrainConfig, {}, {}) == TrainConfig()
    made = resolve(ExtractConfig, {"recipe": {"max_tokens": 32, "crop_pct": 0.9}}, {})
    assert made.recipe == {"max_tokens": "32", "crop_pct": "0.9"}


@pytest.mark.parametrize(
    ("kind", "section"),
    [
        (TrainConfig, {"rounds": "5"}),
        (TrainConfig, {"rounds": True}),
        (TrainConfig, {"byzantine": "x"}),
        (TrainConfig, {"backbones": [1]}),
        (TrainConfig, {"set": "lr=1"}),
        (ExtractConfig, {"skip_missing": 1}),
        (ExtractConfig, {"recipe": {"seconds": True}}),
        (ExtractConfig, {"recipe": {"output": ["layer:1"]}}),
        (TrainConfig, {"rounds": 0}),
        (PartitionConfig, {"clients": 0}),
        (PartitionConfig, {"options": {"store": "x"}}),
    ],
)
def test_a_value_of_another_type_or_too_small_is_refused(kind, section):
    for given in ((section, {}), ({}, section)):
        refused(lambda given=(kind, *given): resolve(*given, "file"), next(iter(section)))


def test_a_file_is_read_whole_or_refused(here):
    assert read_file(None) == {}
    Path("fedcache.toml").write_text("[train]\nrounds = 3\n")
    Path("other.toml").write_text("[partition]\nclients = 2\n")
    assert read_file(None) == {"train": {"rounds": 3}}
    assert read_file(Path("other.toml")) == {"partition": {"clients": 2}}
    refused(lambda: read_file(Path("gone.toml")), "gone.toml")
    for text, said in (("train = 3\n", "train"), ("[trian]\n", "'train'"), ("rounds 3\n", "TOML")):
        Path("bad.toml").write_text(text)
        refused(lambda: read_file(Path("bad.toml")), said)
    refused(lambda: resolve(TrainConfig, {"round": 3}, {}, "mine.toml"), "'rounds'")


@pytest.mark.parametrize(("word", "offline"), [(None, False), ("0", False), ("yes", True)])
def test_the_home_is_that_of_the_environment(monkeypatch, word, offline):
    monkeypatch.setenv("FEDCACHE_HOME", "~/there")
    if word is not None:
        monkeypatch.setenv("FEDCACHE_OFFLINE", word)
    home = Home.from_environment()
    assert home == Home(Path.home() / "there", offline)
    assert home.store("digits", "0123456789abcdef") == home.root / "stores/digits-01234567.zarr"
    monkeypatch.setenv("FEDCACHE_HOME", "")
    monkeypatch.setenv("XDG_DATA_HOME", "/xdg")
    assert Home.from_environment().root.name == "fedcache"


def test_what_was_asked_of_memory_is_told():
    said = "Unable to allocate 7.45 GiB for an array with shape (1000, 10) and data type f"
    asked = memory_error(MemoryError(said))
    assert asked.code is Exit.ENVIRONMENT
    assert "7.45 GiB" in asked.message
    assert memory_error(RuntimeError("something else")) is None


@pytest.mark.parametrize(
    "words",
    [
        "extract --dataset digits --backbones glyph-clip --store s3://bucket/y.zarr",
        "extract --dataset folder:s3://bucket/x --backbones glyph-clip",
        "extract --dataset webdataset:https://h/x-{000..009}.tar --backbones glyph-clip",
        "extract --config gs://bucket/fedcache.toml",
        "ingest hf://owner/name --name mine",
        "ingest features.npz --name mine --store https://host/mine",
        "export s3://bucket/features.npz",
        "train fed3r --track tensorboard:s3://bucket/x",
        "predict 3f9c --store file:///digits",
        "publish digits ftp://host/digits",
        "publish digits https://host/digits",
        "publish digits s3://",
        "publish digits s3:/bucket/x",
        "inspect http:///digits",
        "shard -p iid --out s3://bucket/shards",
        "runs list --runs abfss://container/x",
    ],
)
def test_an_address_is_no_local_path(words, here):
    before = sorted(here.iterdir())
    must_fail("://", words)
    assert sorted(here.iterdir()) == before


@pytest.mark.slow
@pytest.mark.parametrize(("words", "command"), every_command())
def test_every_option_with_a_text_refuses_addresses_that_it_cannot_use(words, command, here):
    before = sorted(here.iterdir())
    address = "ftp://host/x"
    for chosen in command.params:
        if chosen.name in ADDRESSES or chosen.type_descriptor.annotation not in (str, Path):
            continue
        line = []
        for p in command.params:
            if p is chosen or p.required:
                line += [word for word in p.opts[:1] if word.startswith("-")]
                line.append(address if p is chosen else "1")
        must_fail("ftp://", words, *line)
    assert sorted(here.iterdir()) == before


KEYWORDS = [
    (name, keyword.name)
    for name in fc.__all__
    if hasattr(getattr(fc, name), "__wrapped__")
    for keyword in inspect.signature(getattr(fc, name)).parameters.values()
    if keyword.name not in ADDRESSES and keyword.kind is not keyword.VAR_KEYWORD
]


def test_every_keyword_of_the_python_api_refuses_addresses_that_it_cannot_use():
    assert len(KEYWORDS) > 100
    for name, keyword in KEYWORDS:
        with pytest.raises(UsageError, match="ftp://"):
            getattr(fc, name)(**{keyword: "ftp://host/x"})


def test_methods_of_objects_take_no_address_for_a_local_path(here):
    before = sorted(here.iterdir())
    features = {"mine": np.ones((4, 2), np.float32)}
    for call in (
        lambda: fc.Store.from_arrays(features, labels=[0, 1, 0, 1], path="s3://bucket/x.zarr"),
        lambda: fc.Store.open("ftp://host/x.zarr"),
        lambda: fc.Store.open(Path("s3://bucket/x.zarr")),
        lambda: fc.Store.open(Path("s3://")),
        lambda: write_output(Path("s3://bucket/model.safetensors"), b"x"),
    ):
        refused(call, "://")
    assert sorted(here.iterdir()) == before


def test_an_address_is_no_home_and_no_value_of_a_configuration(here, monkeypatch):
    Path("fedcache.toml").write_text('[train]\nstore = "ftp://host/x"\n', encoding="utf-8")
    assert "store: ftp://host/x is not the address of a store" in fedcache("train fed3r").err
    Path("fedcache.toml").unlink()
    refused(lambda: fc.extract("digits", backbones=["glyph-clip"], store="s3://bucket/x"), "s3://")
    monkeypatch.setenv("FEDCACHE_HOME", "s3://bucket/home")
    must_fail("", "ls")
    assert list(here.iterdir()) == []
