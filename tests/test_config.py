"""The configuration: values from files and flags, their types and limits, and where things live."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from command import fedcache

import fedcache as fc
from fedcache.config import (
    ExtractConfig,
    Home,
    PartitionConfig,
    TrainConfig,
    execution_name,
    field_names,
    read_file,
    resolve,
    to_table,
)
from fedcache.errors import Exit, FedcacheError, UsageError, closest, memory_error, unknown


def refused(message: str, hint: str, call: Any, *args: Any) -> None:
    with pytest.raises(FedcacheError) as caught:
        call(*args)
    assert (caught.value.code, caught.value.message, caught.value.hint) == (Exit.USAGE, message, hint)


def test_flags_are_laid_over_a_section_and_what_is_empty_was_not_given() -> None:
    section = {"rounds": 5, "backbones": "a, b,,c", "set": {"lr": 0.1}, "eval-every": 2, "byzantine": 0}
    flags = {"rounds": 7, "method": None, "domain": (), "set": {}, "client_backbones": [], "dp_clip": 1}
    made = resolve(TrainConfig, section, flags)
    wanted = TrainConfig(rounds=7, backbones=("a", "b", "c"), set={"lr": 0.1}, eval_every=2, byzantine=0.0, dp_clip=1.0)
    assert made == wanted
    assert (type(made.byzantine), type(made.dp_clip)) == (float, float)
    assert resolve(TrainConfig, {}, {}) == TrainConfig()


def test_former_names_mean_what_they_meant() -> None:
    assert resolve(TrainConfig, {"lift": "stack"}, {}).execution == "batched"
    assert resolve(TrainConfig, {"lift": "dual", "execution": "dual"}, {}).execution == "gram"
    assert field_names(TrainConfig)["lift"] == field_names(TrainConfig)["execution"] == "execution"
    assert [execution_name(word) for word in ("loop", "stack", "dual", "gram")] == [
        "sequential", "batched", "gram", "gram",
    ]  # fmt: skip
    twice = {"execution": "gram", "lift": "stack"}
    message = "fedcache.toml gives execution twice, by two of its names."
    refused(message, "Leave lift out.", resolve, TrainConfig, twice, {})


EVERY_KEY = "See `fedcache config` for every key and its value."


@pytest.mark.parametrize(
    ("kind", "section", "message", "hint"),
    [
        (TrainConfig, {"rounds": "5"}, "rounds in file is '5'; expected int.", EVERY_KEY),
        (TrainConfig, {"rounds": True}, "rounds in file is True; expected int.", EVERY_KEY),
        (TrainConfig, {"rounds": 1.5}, "rounds in file is 1.5; expected int.", EVERY_KEY),
        (TrainConfig, {"byzantine": "x"}, "byzantine in file is 'x'; expected float.", EVERY_KEY),
        (TrainConfig, {"byzantine": False}, "byzantine in file is False; expected float.", EVERY_KEY),
        (TrainConfig, {"backbones": [1]}, "backbones in file is [1]; expected tuple.", EVERY_KEY),
        (TrainConfig, {"method": ["a"]}, "method in file is ['a']; expected str.", EVERY_KEY),
        (TrainConfig, {"set": "lr=1"}, "set in file is 'lr=1'; expected Mapping.", EVERY_KEY),
        (ExtractConfig, {"skip_missing": 1}, "skip_missing in file is 1; expected bool.", EVERY_KEY),
        (TrainConfig, {"rounds": 0}, "rounds is 0, expected at least 1.", "For example rounds=1"),
        (TrainConfig, {"eval_every": -1}, "eval_every is -1, expected at least 0.", "For example eval_every=0"),
        (PartitionConfig, {"clients": 0}, "clients is 0, expected at least 1.", "For example clients=1"),
    ],
)
def test_a_value_of_another_type_or_too_small_is_refused(
    kind: type, section: dict[str, Any], message: str, hint: str
) -> None:
    refused(message, hint, resolve, kind, section, {}, "file")
    refused(message.replace("in file", "in the command line"), hint, resolve, kind, {}, section, "file")


@pytest.mark.parametrize(
    ("kind", "section", "made"),
    [
        (TrainConfig, {"seeds": 3}, {"seeds": "3"}),  # texts take numbers as they are written
        (TrainConfig, {"participation": 0.5}, {"participation": "0.5"}),
        (TrainConfig, {"backbones": ["a", "b"]}, {"backbones": ("a", "b")}),
        (ExtractConfig, {"skip_missing": True}, {"skip_missing": True}),
        (ExtractConfig, {"views": 1}, {"views": 1}),
    ],
)
def test_values_take_the_type_of_their_field(kind: type, section: dict[str, Any], made: dict[str, Any]) -> None:
    assert resolve(kind, section, {}) == kind(**made)


def test_an_unknown_key_is_corrected() -> None:
    with pytest.raises(FedcacheError) as caught:
        resolve(TrainConfig, {"round": 3}, {}, "mine.toml")
    assert caught.value.message == "Unknown key in mine.toml 'round'. Did you mean 'rounds'?"


def test_a_file_is_read_whole_or_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert read_file(None) == {}
    Path("fedcache.toml").write_text("[train]\nrounds = 3\n")
    Path("other.toml").write_text("[partition]\nclients = 2\n")
    assert read_file(None) == {"train": {"rounds": 3}}
    assert read_file(Path("other.toml")) == {"partition": {"clients": 2}}
    refused("Cannot read gone.toml: No such file or directory.", "Check --config FILE.", read_file, Path("gone.toml"))
    Path("bad.toml").write_text("train = 3\n")
    refused("bad.toml: train must be a table.", "Write [train] on a line of its own.", read_file, Path("bad.toml"))
    Path("bad.toml").write_text("[trian]\n")
    with pytest.raises(FedcacheError, match=r"^Unknown section in bad.toml 'trian'. Did you mean 'train'\?"):
        read_file(Path("bad.toml"))
    Path("bad.toml").write_text("rounds 3\n")
    with pytest.raises(FedcacheError, match=r"^bad.toml is not valid TOML: .*\.\nMend that line and run again\."):
        read_file(Path("bad.toml"))


def test_a_table_holds_what_was_set() -> None:
    made = to_table(TrainConfig(method="fedavg", backbones=("a", "b"), set={"lr": 0.1}, rounds=3))
    assert made["backbones"] == ["a", "b"]
    assert made["set"] == {"lr": 0.1}
    assert (made["method"], made["rounds"], made["eval_every"]) == ("fedavg", 3, 0)
    assert not {"store", "domain", "client_set", "attack"} & made.keys()
    assert resolve(TrainConfig, made, {}) == TrainConfig(
        method="fedavg", backbones=("a", "b"), set={"lr": 0.1}, rounds=3
    )


@pytest.mark.parametrize(("word", "offline"), [(None, False), ("", False), ("0", False), ("1", True), ("yes", True)])
def test_the_home_is_that_of_the_environment(monkeypatch: pytest.MonkeyPatch, word: str | None, offline: bool) -> None:
    monkeypatch.setenv("FEDCACHE_HOME", "~/there")
    if word is not None:
        monkeypatch.setenv("FEDCACHE_OFFLINE", word)
    home = Home.from_environment()
    assert home == Home(Path.home() / "there", offline)
    assert home.store("digits", "0123456789abcdef") == home.root / "stores" / "digits-01234567.zarr"
    names = {"stores": home.stores, "runs": home.runs, "data": home.data, "digests": home.digests}
    assert names == {name: home.root / name for name in names}
    assert home.last == home.root / "last.json"
    monkeypatch.setenv("FEDCACHE_HOME", "")
    monkeypatch.setenv("XDG_DATA_HOME", "/xdg")
    assert Home.from_environment().root.name == "fedcache"


def test_the_nearest_name_is_guessed() -> None:
    assert closest("FEDPC", ["fedavg", "FedPCL", "solo"]) == "FedPCL"
    assert closest("zzz", ["fedavg"]) is None
    assert str(unknown("method", "zzz", ["b", "a"])) == "Unknown method 'zzz'.\nKnown: a, b"
    assert str(unknown("method", "zzz", [])) == "Unknown method 'zzz'.\nKnown: (none)"
    assert str(unknown("method", "bb", ["b", "a"], hint="h")) == "Unknown method 'bb'. Did you mean 'b'?\nh"


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (MemoryError("Unable to allocate 7.45 GiB for an array with shape (1000, 10) and data type float64"),
         "There is not enough memory for 7.45 GiB, an array of shape (1000, 10)."),
        (RuntimeError("CUDA out of memory. Tried to allocate 20 MiB."), "There is not enough memory for 20 MiB."),
        (MemoryError(), "There is not enough memory."),
        (RuntimeError("something else"), None),
        (ValueError("out of memory"), None),
    ],
)  # fmt: skip
def test_what_was_asked_of_memory_is_told(error: Exception, message: str | None) -> None:
    found = memory_error(error)
    assert (None if found is None else (found.code, found.message)) == (
        None if message is None else (Exit.ENVIRONMENT, message)
    )


def test_a_file_that_nobody_named_is_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    said: list[str] = []
    assert read_file(None, said.append) == {}
    assert not said
    (tmp_path / "fedcache.toml").write_text("[train]\nrounds = 3\n")
    read_file(None, said.append)
    assert said == [f"Settings of {tmp_path / 'fedcache.toml'} are in force where no option says otherwise."]
    read_file(tmp_path / "fedcache.toml", said.append)
    assert len(said) == 1


REMOTE = [
    ["extract", "--dataset", "digits", "--backbones", "glyph-clip", "--store", "s3://bucket/y.zarr"],
    ["extract", "--dataset", "folder:s3://bucket/x", "--backbones", "glyph-clip"],
    ["extract", "--dataset", "webdataset:https://host/x-000.tar", "--backbones", "glyph-clip"],
    ["extract", "--dataset", "digits", "--backbones", "glyph-clip", "--weights", "glyph-clip=s3://bucket/w.pt"],
    ["extract", "--config", "gs://bucket/fedcache.toml"],
    ["ingest", "hf://owner/name", "--name", "mine"],
    ["train", "fed3r", "--store", "s3://bucket/x"],
    ["train", "fed3r", "--track", "tensorboard:s3://bucket/x"],
    ["train", "fed3r", "--clients-from", "s3://bucket/sites"],
    ["partition", "--from", "s3://bucket/clients.csv"],
    ["export", "-o", "s3://bucket/x.npz"],
    ["predict", "model.safetensors", "s3://bucket/x.png"],
    ["report", "-o", "gs://bucket/r.html"],
    ["runs", "list", "--runs", "abfss://container/x"],
    ["verify", "s3://bucket/x.zarr"],
]


@pytest.mark.parametrize("words", REMOTE, ids=" ".join)
def test_an_address_is_no_local_path(words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.iterdir())
    answer = fedcache(*words)
    assert answer.code == 2
    assert "://" in answer.err
    assert sorted(tmp_path.iterdir()) == before


def test_an_address_is_no_home_and_no_value_of_a_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("fedcache.toml").write_text('[train]\nstore = "s3://bucket/x"\n', encoding="utf-8")
    assert "store: s3://" in fedcache("train", "fed3r").err
    Path("fedcache.toml").unlink()
    with pytest.raises(UsageError, match="s3://"):
        fc.extract("digits", backbones=["glyph-clip"], store="s3://bucket/x")
    with pytest.raises(UsageError, match="s3://"):
        fc.train("fed3r", "s3://bucket/x")
    monkeypatch.setenv("FEDCACHE_HOME", "s3://bucket/home")
    assert fedcache("ls").code == 2
    assert fedcache("doctor").code == 2
    assert list(tmp_path.iterdir()) == []
