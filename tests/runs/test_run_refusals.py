"""What the parts of a run say and do where something is missing, damaged, of a device or of an earlier release."""

import os
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

from refusal import corruption, machine_error, refused, store_error
from sent import sent

from fedcache.errors import UsageError
from fedcache.runs import loop, predict_run
from fedcache.runs.directory import (
    EXECUTIONS_OF_0_1,
    DamagedRunError,
    Identity,
    RunDirectory,
    read_result,
    write_result,
)
from fedcache.runs.garbage import Garbage, remove
from fedcache.runs.loop import save_seed
from fedcache.runs.run import values_of


def test_a_damaged_run_crosses_a_process():
    error = DamagedRunError(Path("runs/a/result.json"), "is gone")
    again = sent(error)
    assert type(again) is DamagedRunError
    assert again.code == error.code
    assert again.message == error.message
    assert again.hint == error.hint


def test_what_killed_writers_left_in_a_run_is_removed_when_it_is_old(tmp_path):
    run = RunDirectory(tmp_path, Identity({"method": "fedavg"}, ["r"], "d", "p", "c"))
    run.begin({"method": "fedavg"}, {})
    old = run.path / ".a.partial"
    new = run.path / ".b.partial"
    old.touch()
    new.touch()
    os.utime(old, (1, 1))
    run.finish({"method": "fedavg"}, [], {}, lambda _: None, {}, {"method": "fedavg"})
    assert not old.exists()
    assert new.exists()


def test_a_result_of_an_earlier_release_names_its_execution_as_now(tmp_path):
    path = tmp_path / "result.json"
    for former, now in EXECUTIONS_OF_0_1.items():
        write_result(path, {"method": "x", "lift": former})
        found = read_result(path)
        assert found["execution"] == now
        assert "lift" not in found


def test_what_cannot_be_deleted_is_named_with_what_is_gone(tmp_path, monkeypatch):
    garbage = [Garbage(tmp_path / name, "leftovers", "", 1) for name in ("a", "b")]
    monkeypatch.setattr(Path, "unlink", mock.Mock(side_effect=[None, PermissionError(13, "no")]))
    machine_error(lambda: remove(garbage), f"{tmp_path / 'b'} ", " 1 of 2")


def test_swept_words_are_numbers_where_all_are():
    for made in ([1, 2, None], [1.0, 0.5], ["1", "b"]):
        assert repr(values_of([value and str(value) for value in made])) == repr(made)


def test_a_model_that_cannot_be_saved_costs_no_run_unless_it_was_asked_for(tmp_path, monkeypatch):
    error = UsageError("predict gives 2 scores for 3 classes.", "Return scores [N, C].")
    monkeypatch.setattr(loop, "collect", mock.Mock(side_effect=error))
    spec = mock.Mock(trust=SimpleNamespace(protects=False))

    def save(clients):
        kept = SimpleNamespace(clients=clients)
        facts = SimpleNamespace(personal=True)
        return save_seed(tmp_path, mock.MagicMock(), spec, facts, mock.MagicMock(), kept)

    for clients in (None, "none"):
        saved, (said,) = save(clients)
        assert not saved
        assert "predict gives 2 scores" in said
    refused(lambda: save("client-1"), "predict gives 2 scores")


def test_models_of_another_result_are_corruption(tmp_path, monkeypatch):
    result = {"digest": "d" * 64, "seeds": [3, 4]}
    found = SimpleNamespace(
        content={"files": {"seed-3.safetensors": {"sha256": "0"}}, "result": "another"}
    )
    monkeypatch.setattr(predict_run, "finished_result", lambda _run: result)
    monkeypatch.setattr(predict_run, "train_again", lambda *_: "fedcache train again")
    monkeypatch.setattr(predict_run, "read_sealed", lambda *_: found)
    load = predict_run.load_seed
    refused(lambda: load(tmp_path, 5), "seed 5")
    assert store_error(lambda: load(tmp_path, 4), "seed 4").hint == "fedcache train again"
    corruption(lambda: load(tmp_path), "are from different trainings")
