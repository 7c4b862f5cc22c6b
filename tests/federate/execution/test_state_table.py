"""What clients keep in a file: what was written is read, a checkpoint outlives what comes after, no row is wasted."""

import errno
import json
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from draws import examples
from federation import ROUNDS, federation, fitted, gap, server_gap
from hypothesis import example, given
from hypothesis import strategies as st
from refusal import corruption, machine_error, store_error

from fedcache.federate.engine.outcome import Snapshot
from fedcache.federate.engine.run import RunCallbacks, TrainingRun, run_points
from fedcache.federate.engine.simulated_time import TimingRule
from fedcache.federate.execution import memory_estimate, state_table
from fedcache.federate.execution.memory_estimate import ExecutionPlan, Load, states_in_file
from fedcache.federate.execution.state_table import StateTable, check_table
from fedcache.federate.methods import METHODS
from fedcache.heads.linear import Tree

CPU = torch.device("cpu")


def state(number, rows=2):
    """Tensors of many dtypes and shapes that tell who and when."""
    return {
        "W": torch.full((2, 3), float(number)),
        "t": torch.tensor(number),
        "one": torch.full((1, 8), float(number))[:, 3],  # its stride is 8
        "has": torch.tensor([True, number % 2 == 0, False]),
        "half": torch.full((3,), number % 100, dtype=torch.bfloat16),
        "none": torch.empty(0, 4),
        "rows/q": torch.full((rows, 2), number, dtype=torch.float64).mT.contiguous().mT,
    }


def through_json(table):
    """What a checkpoint is given back as."""
    tensors, kinds = table.mark()
    return Snapshot(tensors, json.loads(json.dumps({"table": kinds})))


def equal(a, b):
    return list(a) == list(b) and all(
        a[k].dtype == b[k].dtype and torch.equal(a[k], b[k]) for k in a
    )


def test_a_table_gives_back_what_it_was_given(tmp_path):
    table = StateTable(tmp_path / "states-0.table", 9, CPU)
    table[4], table[0] = state(1), state(2, rows=5)
    table[4] = state(3)
    assert list(table) == [0, 4]
    assert np.int64(4) in table
    assert 5 not in table
    assert equal(table[4], state(3))
    assert equal(table[0], state(2, rows=5))
    with pytest.raises(KeyError):
        table[5]
    del table[4]
    assert list(table) == [0]
    with pytest.raises(KeyError):
        del table[4]
    table.close()


@pytest.mark.slow
@examples(40, 1000)
@example(steps=[(0, 1), "checkpoint", (0, 1), "mark", (0, 1), "mark", (0, 1), "kill"])
@given(
    st.lists(
        st.one_of(
            st.tuples(st.integers(0, 5), st.integers(1, 3)),
            st.sampled_from(["checkpoint", "mark", "kill"]),
        ),
        max_size=40,
    )
)
def test_after_a_kill_a_table_is_what_it_was_at_the_last_checkpoint(tmp_path_factory, steps):
    path = tmp_path_factory.mktemp("table") / "states-0.table"
    table = StateTable(path, 6, CPU)
    saved = None
    now = {}
    then = {}
    for number, step in enumerate(steps):
        if step == "checkpoint":
            saved = through_json(table)
            then = dict(now)
            table.kept()
        elif step == "mark":
            table.mark()  # a checkpoint that does not reach the disk gives no row away
        elif step == "kill":
            table.close()
            if saved is not None:
                check_table(path, saved)
            table = StateTable(path, 6, CPU, saved)
            now = dict(then)
        else:
            client = int(step[0])
            table[client] = now[client] = state(number, int(step[1]))
        assert sorted(now) == list(table)
        assert all(equal(table[c], tree) for c, tree in now.items())
    table.close()


def test_a_file_is_at_most_twice_what_clients_keep(tmp_path):
    path = tmp_path / "states-0.table"
    table = StateTable(path, 50, CPU)
    table[0] = state(0)
    row = path.stat().st_size
    for k in range(20):
        for client in range(50):
            table[client] = state(k)
            table[client] = state(k + 1)  # a row that no checkpoint refers to is written over
        saved = through_json(table)
        table.kept()
    assert path.stat().st_size == 100 * row
    table.close()
    # the rows between those of the checkpoint are found again
    table = StateTable(path, 50, CPU, saved)
    for client in range(50):
        table[client] = state(99)
    assert path.stat().st_size <= 100 * row
    assert all(equal(table[c], state(99)) for c in range(50))
    table.close()


def test_a_damaged_or_missing_file_is_found(tmp_path):
    path = tmp_path / "states-0.table"
    table = StateTable(path, 3, CPU)
    table[0], table[2] = state(1), state(2)
    saved = through_json(table)
    for use in (lambda: check_table(path, saved), lambda: StateTable(path, 3, CPU)):
        store_error(use)
    table.close()
    check_table(path, saved)
    raw = path.read_bytes()
    for damaged in (raw[:-1], raw[:5] + bytes([raw[5] ^ 1]) + raw[6:]):
        path.write_bytes(damaged)
        corruption(lambda: check_table(path, saved), "states-0.table")
    path.unlink()
    corruption(lambda: check_table(path, saved))


def test_a_row_that_is_cut_off_while_a_run_uses_it_is_told(tmp_path):
    table = StateTable(tmp_path / "states-0.table", 3, CPU)
    table[0] = state(1)
    (tmp_path / "states-0.table").write_bytes(b"")
    corruption(lambda: table[0])
    table.close()


def test_a_full_disk_names_the_file_and_what_it_needs(tmp_path, monkeypatch):
    table = StateTable(tmp_path / "states-0.table", 1000, CPU, expected=123_456)

    def full(_fd):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(state_table.os, "fsync", full)
    machine_error(table.mark)
    table.close()


def test_what_clients_keep_is_in_a_file_where_it_is_much():
    plan = ExecutionPlan("batched", 4)
    load = Load(head_bytes=1, clients=10, participants=1 << 10, state_bytes=1 << 18, points=1)
    assert not states_in_file(load, plan)  # 256 MiB
    assert states_in_file(replace(load, points=2), plan)
    assert states_in_file(replace(load, participants=1025), plan)
    assert not states_in_file(replace(load, points=2), ExecutionPlan("gram", 4))


def trained(name, execution, tables, stop=0, saved=None, timing=None):
    """A run, its snapshots, and what clients keep at its end; it breaks off after round ``stop``."""
    data, clients = federation()
    method = METHODS[name]
    snapshots = list[Snapshot]()
    ended = list[dict[int, Tree]]()
    settings = {"opt": "sgd"} if "opt" in {h.name for h in method.hparams} else {}

    class StoppedError(Exception):
        pass

    def on_round(_point, number, _metrics, _traffic, snapshot):
        snapshots.append(snapshot())
        snapshots[-1].on_written()
        if number == stop:
            raise StoppedError

    def on_done(_first, outs):
        ended.extend({c: out.states[c] for c in out.states} for out in outs)

    spec = TrainingRun(
        method,
        fitted(method, data),
        clients,
        ROUNDS,
        5,
        execution=execution,
        eval_every=1,
        timing=timing,
    )
    try:
        outs = run_points(
            spec,
            [method.resolve("paper", settings)],
            states=[saved],
            callbacks=RunCallbacks(on_round=on_round, on_done=on_done),
            tables=tables,
        )
    except StoppedError:
        outs = []
    return outs, snapshots, ended


@pytest.mark.parametrize(
    ("name", "execution", "timing"),
    [
        ("fedrep", "sequential", None),
        ("scaffold", "batched", None),
        ("fst-cbdg", "batched", None),
        ("ditto", "batched", TimingRule(buffer=3)),
    ],
)
def test_a_run_whose_clients_are_in_a_file_has_the_bits_of_one_in_memory(
    name, execution, timing, tmp_path, monkeypatch
):
    go = partial(trained, name, execution, timing=timing)
    (plain,), _, (held,) = go([])
    monkeypatch.setattr(memory_estimate, "STATES", 0)
    tables = [tmp_path / "states-0.table"]
    (filed,), snapshots, (found,) = go(tables)
    assert all(not any(k.startswith("client/") for k in s.tensors) for s in snapshots)
    stopped = go(tables, stop=2)[1][-1]
    check_table(tables[0], stopped)
    (again,), _, (resumed,) = go(tables, saved=stopped)
    for out, states in ((filed, found), (again, resumed)):
        assert sorted(states) == sorted(held)
        assert gap(dict(states), dict(held)) == server_gap(out, plain) == 0.0
        assert [(r.accuracy, r.diagnostics) for r in out.records] == [
            (r.accuracy, r.diagnostics) for r in plain.records
        ]
    monkeypatch.setattr(memory_estimate, "STATES", 1 << 30)  # back into memory
    assert gap(go(tables, saved=stopped)[2][0], dict(held)) == 0.0
