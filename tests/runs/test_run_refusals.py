"""What the parts of a run say and do where something is missing, damaged, of a device or of an earlier release."""

from __future__ import annotations

import ast
import base64
import math
import os
import pickle
import random
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from heard import Heard
from toy_store import create

from fedcache.config import FORMER, ExtractConfig, Home, PartitionConfig, TrainConfig
from fedcache.errors import CorruptionError, FedcacheError, MachineError, StoreError, UsageError
from fedcache.extract.planning.find_store import UnfinishedArray
from fedcache.federate.engine.client_data import Data
from fedcache.federate.methods import METHODS
from fedcache.progress import Round, Silent
from fedcache.runs import run_models, store_choice
from fedcache.runs.client_columns import client_columns
from fedcache.runs.directory import DamagedRunError, RunDirectory, read_result, write_result
from fedcache.runs.features import read_store
from fedcache.runs.garbage import Garbage, _old_runs, remove
from fedcache.runs.identity import Identity
from fedcache.runs.open_run import named_method
from fedcache.runs.partitions import default_partition
from fedcache.runs.personalise_run import client_of_store
from fedcache.runs.results import _unpacked
from fedcache.runs.run import values_of
from fedcache.runs.trackers import seeds
from fedcache.runs.trackers.tensorboard import EventFile, TensorBoard
from fedcache.runs.training_device import on_device
from fedcache.store.own_code import ReachedCode, _imported_names


def refused(kind: type[FedcacheError], message: str, call: Callable[[], Any]) -> FedcacheError:
    with pytest.raises(kind) as caught:
        call()
    assert caught.value.message.startswith(message), caught.value.message
    assert caught.value.hint
    return caught.value


def test_what_a_method_holds_is_described_so_that_other_values_differ() -> None:
    code = ReachedCode("the method 'mine'")
    x = np.array([[1.0, 2.0]], np.float32)
    said = code.describe(torch.from_numpy(x))
    assert said == code.describe(x) == code.describe(np.asfortranarray(x))
    assert said[:2] == ["float32", [1, 2]]
    others = [code.describe(t) for t in (torch.ones(1, 2), torch.from_numpy(x.T), torch.from_numpy(x).double())]
    assert len({str(d) for d in (said, *others)}) == 4
    assert code.describe(math) == ".math"
    assert (code.describe(len), code.describe(int)) == ("builtins.len", "builtins.int")
    assert code.sources == {}
    code.describe([METHODS["fedavg"].predict])
    code.describe(type(METHODS["fedavg"]))
    assert code.methods <= set(METHODS)
    assert code.describe({"b", "a"}) == ["set", "'a'", "'b'"]
    refused(
        UsageError, "The method 'mine' holds an object of type object, whose digest", lambda: code.describe(object())
    )
    bound = (Odd().method, [1].count, random.Random(0).random)
    refused(UsageError, "The method 'mine' holds an object of type Odd, whose digest", lambda: code.describe(bound[0]))
    assert code.describe(bound[1]) != code.describe([2].count)
    refused(
        UsageError, "The method 'mine' holds an object of type Random, whose digest", lambda: code.describe(bound[2])
    )
    narrow = [code.describe(torch.tensor([v], dtype=torch.bfloat16)) for v in (1.0, 2.0)]
    assert narrow[0] != narrow[1]


class Odd:
    """An object with a method."""

    def method(self) -> None:
        """Nothing."""


def test_imports_that_lead_out_of_a_package_name_nothing() -> None:
    tree = ast.parse("import a.b, c\nfrom ...x import y\nfrom .p import q\nfrom r import s as t")
    assert list(_imported_names(tree, "one")) == ["a.b", "c", "one.p", "one.p.q", "r", "r.s"]
    assert list(_imported_names(ast.parse("from ..x import y"), "one.two")) == ["one.x", "one.x.y"]


def test_a_damaged_run_crosses_a_process() -> None:
    error = DamagedRunError(Path("runs/a/result.json"), "is gone")
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is DamagedRunError
    assert (again.code, again.message, again.hint) == (error.code, error.message, error.hint)
    assert again.message == "runs/a/result.json is gone."


def test_what_killed_writers_left_in_a_run_is_removed_when_it_is_old(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path, Identity({"method": "fedavg"}, ["r"], "d", ["p"], "c"))
    run.begin({"method": "fedavg"}, {})
    (run.path / "models").mkdir()
    old, new, model = run.path / ".a.partial", run.path / ".b.partial", run.path / "models" / ".c.partial"
    for path in (old, new, model):
        path.touch()
        if path != new:
            os.utime(path, (time.time() - 90, time.time() - 90))
    run.finish({"method": "fedavg"}, [], {})
    assert [p.exists() for p in (old, new, model)] == [False, True, False]


def test_a_result_of_an_earlier_release_names_its_execution_as_now(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    for former, now in (("gram", "gram"), *FORMER.items()):
        write_result(path, {"method": "x", "lift": former})
        found = read_result(path)
        assert (found["execution"], "lift" in found) == (now, False)


def test_rounds_that_wait_for_a_file_are_written_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With one file open at a time the second seed waits; what is not measured is no scalar."""
    told: dict[tuple[Path, int], list[Any]] = {}

    class Writer:
        def __init__(self, round_: Round) -> None:
            self.said = told.setdefault((round_.path, round_.seed), [])

        def add_text(self, _name: str, _text: str) -> None:
            pass

        def add_scalar(self, name: str, value: float, step: int, walltime: float | None) -> None:
            self.said.append((name, value, step))

        def close(self) -> None:
            self.said.append("closed")

    monkeypatch.setattr(seeds, "OPEN", 1)
    monkeypatch.setattr(TensorBoard, "begin", lambda _self, round_: EventFile(Writer(round_), round_))
    board = TensorBoard(tmp_path)
    common: dict[str, Any] = {"path": tmp_path, "method": "m", "seeds": 2, "rounds": 3, "settings": {}, "up_bytes": 1,
                              "down_bytes": 2, "sent_bytes": 3, "received_bytes": 4}  # fmt: skip
    for seed in (0, 1):
        board(
            Round(seed=seed, seed_number=seed + 1, round=1, accuracy=None, diagnostics={"a": None, "b": 0.5}, **common)
        )
    sent = [("bytes/up", 3, 1), ("bytes/down", 4, 1), ("diagnostics/b", 0.5, 1)]
    assert told == {(tmp_path, 0): sent}
    board.close()
    assert told == {(tmp_path, 0): [*sent, "closed"], (tmp_path, 1): [*sent, "closed"]}
    assert (board._open, board._waiting) == ({}, {})


def test_what_cannot_be_deleted_is_named_with_what_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    garbage = [Garbage(tmp_path / name, "leftovers", "", 1) for name in ("a", "b")]
    real = Path.unlink

    def unlink(path: Path, missing_ok: bool = False) -> None:
        if path.name == "b":
            raise PermissionError(13, "Permission denied")
        real(path, missing_ok)

    for one in garbage:
        one.path.touch()
    monkeypatch.setattr(Path, "unlink", unlink)
    said = f"{tmp_path / 'b'} cannot be deleted: Permission denied. 1 of 2 are gone."
    refused(MachineError, said, lambda: remove(garbage))
    assert not (tmp_path / "a").exists()


def test_runs_that_cannot_be_read_are_not_old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedcache.runs.garbage.code_digest", lambda method: f"{method} now")
    home = Home(tmp_path)
    for name, result in (
        ("no-method", {"code": "c"}),
        ("somebody", {"method": "mine", "code": "c"}),
        ("old", {"method": "fedavg", "code": "c"}),
        ("new", {"method": "fedavg", "code": "fedavg now"}),
        ("none", None),
    ):
        (home.runs / name).mkdir(parents=True)
        if result is not None:
            write_result(home.runs / name / "result.json", result)
    assert [(path.name, why) for path, why in _old_runs(home)] == [
        ("old", "a result of fedavg by other code: the same command computes it again")
    ]


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["1", "2", None], [1, 2, None]),
        (["1", "0.5"], [1.0, 0.5]),
        (["1", "b"], ["1", "b"]),
        ([None, "x"], [None, "x"]),
    ],
)
def test_swept_words_are_numbers_where_all_are(words: list[Any], found: list[Any]) -> None:
    made = values_of(words)
    assert made == found
    assert [type(v) for v in made] == [type(v) for v in found]


def test_an_array_whose_weights_are_others_now_is_not_completed(monkeypatch: pytest.MonkeyPatch) -> None:
    store: Any = SimpleNamespace(path=Path("s.zarr"), dataset={"slug": "s", "digest": "a"}, arrays={})
    order = ExtractConfig(dataset="digits", backbones=("pixels",))
    array = UnfinishedArray("pixels-0", 2, 5, "pixels@8", order)
    monkeypatch.setattr(
        store_choice, "plan", lambda *_: ([SimpleNamespace(recipe=SimpleNamespace(key="pixels-1"))], [])
    )
    monkeypatch.setattr(UnfinishedArray, "command", lambda *_: "fedcache extract --dataset it")
    state = "pixels-0 in s.zarr is unfinished: 2 of 5 chunks are missing"

    def complete(extract: bool) -> None:
        store_choice.complete_array(array, store, Home(Path("h")), extract=extract, observer=Silent(), stop=None)

    error = refused(
        StoreError, f"{state}, and pixels gives pixels-1 now: its weights are others.", lambda: complete(True)
    )
    assert error.hint.endswith("fedcache extract --dataset it --weights pixels=FILE")
    assert refused(StoreError, f"{state}.", lambda: complete(False)).hint == "fedcache extract --dataset it"


def test_a_store_without_features_is_told_with_the_command_that_makes_some(tmp_path: Path) -> None:
    store = create(tmp_path / "s.zarr")
    said = f"{store.path} holds no features that fedavg could train on yet."
    refused(
        StoreError, said,
        lambda: store_choice.find_or_extract(
            METHODS["fedavg"], TrainConfig(store=str(store.path)), Home(tmp_path), extract=True, observer=Silent()
        ),
    )  # fmt: skip


def test_columns_of_earlier_releases_are_lists() -> None:
    assert np.array_equal(_unpacked([1.0, None], np.float64), [1.0, np.nan], equal_nan=True)
    packed = base64.b64encode(np.array([3, -4], "<i8").tobytes()).decode()
    found = _unpacked(packed, np.int64)
    assert (found.dtype, found.tolist()) == (np.int64, [3, -4])


def test_a_file_of_clients_that_is_gone_is_damage(tmp_path: Path) -> None:
    result = {"files": {"clients.parquet": "a"}}
    refused(
        DamagedRunError,
        f"{tmp_path / 'clients.parquet'} is missing or unreadable.",
        lambda: client_columns(result, tmp_path),
    )
    (tmp_path / "clients.parquet").write_bytes(b"other")
    refused(
        DamagedRunError,
        f"{tmp_path / 'clients.parquet'} is not what was written.",
        lambda: client_columns(result, tmp_path),
    )


def test_images_are_no_features(tmp_path: Path) -> None:
    store: Any = SimpleNamespace(reader=lambda key: SimpleNamespace(shape=(9, 1, 8, 8, 3)))
    call = lambda: read_store(METHODS["fedavg"], {}, store, ["pixels-0"], "none", np.arange(3), Silent())  # noqa: E731
    refused(UsageError, "pixels-0 holds images, and fedavg needs features.", call)


def test_an_unknown_scheme_is_corrected() -> None:
    store: Any = None  # is not looked at where a scheme is named
    call = lambda: default_partition(METHODS["fedavg"], store, PartitionConfig(scheme="dirichlt"), [], Heard())  # noqa: E731
    refused(UsageError, "Unknown partition scheme 'dirichlt'. Did you mean 'dirichlet'?", call)


def test_a_run_names_a_method() -> None:
    error = refused(UsageError, "No method was named.", lambda: named_method(TrainConfig()))
    assert error.hint == f"--method {' | '.join(METHODS)}"
    assert named_method(TrainConfig(method="fedavg")) is METHODS["fedavg"]


def test_all_tensors_go_to_the_device_that_trains() -> None:
    class Inputs(SimpleNamespace):
        def with_data(self, data: Data) -> Any:
            return Inputs(data=data)

    x, y = torch.zeros(3, 1, 4), torch.zeros(3, dtype=torch.int64)
    sent: list[str] = []
    towers: Any = SimpleNamespace(to=lambda device: sent.append(device) or "sent")
    full: Any = Inputs(data=Data(x, y, 2, torch.zeros(2, 4), domain=y, towers=towers))
    assert on_device(full, "cpu") is full
    moved = on_device(full, "meta").data
    assert {t.device.type for t in (moved.x, moved.y, moved.text, moved.domain)} == {"meta"}
    assert (moved.towers, sent, moved.classes) == ("sent", ["meta"], 2)
    bare: Any = Inputs(data=Data(x, y, 2))
    assert (on_device(bare, "meta").data.text, on_device(bare, "meta").data.domain) == (None, None)
    assert on_device(bare, "meta").data.towers is None


def test_images_of_another_size_are_not_those_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedcache.runs.personalise_run.array_keys", lambda *_: ["k"])
    monkeypatch.setattr("fedcache.runs.personalise_run.model_labels", lambda label, *_: label)
    images = np.arange(2 * 4 * 3 * 3, dtype=np.uint8).reshape(2, 1, 4, 3, 3)
    reader = SimpleNamespace(shape=images.shape, all=lambda: images)
    samples = SimpleNamespace(label=np.zeros(2), classes=("a",), split=np.array([1, 0]), ok=np.ones(2))
    store: Any = SimpleNamespace(path=Path("s.zarr"), reader=lambda _key: reader, samples=samples)

    def client(height: int) -> Any:
        facts = SimpleNamespace(views=1, image=(height, 3), method="m", backbones=("pixels",), classes=("a",))
        model: Any = SimpleNamespace(facts=facts, scaling=None)
        return client_of_store(model, store, "me", ["labels"], Home(Path("h")))

    error = refused(StoreError, "The model reads images of 5 x 3, s.zarr holds 4 x 3.", lambda: client(5))
    assert error.hint == "fedcache extract --backbones pixels --size 5"
    made = client(4)
    assert made.train.tolist() == [1]
    assert torch.equal(made.x, torch.from_numpy(images).view(2, 1, 36))


def test_a_model_that_cannot_be_saved_costs_no_run_unless_it_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nothing(*_: Any) -> None:
        raise UsageError("predict gives 2 scores for 3 classes.", "Return scores [N, C].")

    out: Any = SimpleNamespace(seed=0)
    spec: Any = SimpleNamespace(trust=SimpleNamespace(protects=False))
    inputs: Any = SimpleNamespace(data=None, features=SimpleNamespace(scaling=None))
    monkeypatch.setattr(run_models, "facts_of", lambda *_: SimpleNamespace(personal=True))
    monkeypatch.setattr(run_models, "collect", nothing)

    def save(clients: str | None) -> Any:
        kept: Any = SimpleNamespace(clients=clients)
        identity: Any = None
        return run_models.save_seed(tmp_path, inputs, spec, identity, out, kept)

    for clients in (None, "all", "none"):
        said = "No model is saved: predict gives 2 scores for 3 classes. Return scores [N, C]."
        assert save(clients) == (False, [said])
    refused(UsageError, "predict gives 2 scores", lambda: save("client-1"))
    monkeypatch.setattr(run_models, "collect", lambda *_: None)
    assert save("client-1") == (False, [])
    assert not list(tmp_path.iterdir())


def test_models_of_another_result_are_corruption(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = {"digest": "d" * 64, "seeds": [3, 4]}
    found = SimpleNamespace(content={"files": {"seed-3.safetensors": {"sha256": "0"}}, "result": "another"})
    monkeypatch.setattr(run_models, "_result", lambda _run: result)
    monkeypatch.setattr(run_models, "train_again", lambda *_: "fedcache train again")
    monkeypatch.setattr(run_models, "read_sealed", lambda *_: found)
    load = run_models.load_seed
    refused(UsageError, "The run has no seed 5.", lambda: load(tmp_path, 5))
    assert (
        refused(StoreError, "The run has no model of seed 4.", lambda: load(tmp_path, 4)).hint == "fedcache train again"
    )
    said = f"{tmp_path / 'models'} holds the models of another result than {tmp_path / 'result.json'}."
    refused(CorruptionError, said, lambda: load(tmp_path))
