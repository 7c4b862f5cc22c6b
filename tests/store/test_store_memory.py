"""What is read into memory, what stays mapped, and that both are the same numbers, verified."""

import errno
import os
from functools import partial

import numpy as np
import psutil
import pytest
from damage import flip_bit
from prepared_rows import prepared
from refusal import corruption, machine_error, refused, store_error
from toy_store import KEYS, ROWS, values, whole

from fedcache.federate.engine.client_data import prepare_features
from fedcache.store import files as limit
from fedcache.store import reader as reading
from fedcache.store.files import memory_limit
from fedcache.store.store import Store


@pytest.mark.parametrize("budget", ["1G", "0"])
@pytest.mark.parametrize("threads", [1, 3])
def test_a_flipped_bit_is_found_by_every_way_of_reading_and_the_first_is_named(
    tmp_path, monkeypatch, budget, threads
):
    monkeypatch.setenv("FEDCACHE_MEMORY", budget)
    monkeypatch.setattr(reading, "threads_for", lambda parts: min(threads, parts))
    path = whole(tmp_path / "s.zarr").path
    for chunk in (3, 1):
        # in the last chunk beyond the end of the rows
        flip_bit(path / f"features/{KEYS[0]}/c/{chunk}/0/0", -5 if chunk == 3 else 2, bit=2)
    ways = (
        lambda r: r.all(),
        lambda r: r.rows(np.array([0, 13, 5])),
        lambda r: list(r.blocks()),
        lambda r: prepare_features([r], "none"),
    )
    for way in ways:
        reader = Store.open(path).reader(KEYS[0])
        for _ in range(2):  # nor does a second attempt give out what the first refused
            corruption(partial(way, reader), "chunk 1 of")
        assert np.array_equal(reader.rows(np.array([0])), values(KEYS[0])[:1])


@pytest.mark.parametrize("post", ["none", "l2", "l2_concat", "sign", "center", "standardize"])
def test_features_beyond_the_budget_are_mapped_and_the_same_to_the_bit(tmp_path, monkeypatch, post):
    store = whole(tmp_path / "s.zarr")
    train = np.array([0, 2, 3, 5, 8, 11])
    expected = prepared([values(k) for k in KEYS], post, train)
    scratch = tmp_path / "scratch"
    for budget in ("1G", "0"):
        monkeypatch.setenv("FEDCACHE_MEMORY", budget)
        x = prepare_features([store.reader(k) for k in KEYS], post, train, scratch=scratch)[0]
        assert x.numpy().tobytes() == expected.tobytes()
        assert scratch.exists() == (budget == "0")
    assert list(scratch.iterdir()) == []  # a file without a name
    arrays = prepare_features([np.array(values(k)) for k in KEYS], post, train)[0]
    assert arrays.numpy().tobytes() == expected.tobytes()


def test_a_full_disk_is_an_error_before_anything_is_mapped(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    monkeypatch.setenv("FEDCACHE_MEMORY", "10")
    no_room = partial(prepare_features, [np.ones((4, 1, 3), np.float16)], "none", scratch=tmp_path)
    machine_error(no_room, "needs 48 bytes")


def test_the_budget_can_be_set(monkeypatch):
    monkeypatch.delenv("FEDCACHE_MEMORY", raising=False)
    assert 0 < memory_limit() < psutil.virtual_memory().available
    for asked, known in (("8G", 8 << 30), ("1.5 m", 3 << 19), ("12", 12), ("2GiB", 2 << 30)):
        monkeypatch.setenv("FEDCACHE_MEMORY", asked)
        assert memory_limit() == known
    monkeypatch.setenv("FEDCACHE_MEMORY", "plenty")
    refused(memory_limit, "plenty")


@pytest.mark.parametrize(
    ("meminfo", "group", "left"),
    [
        ("MemAvailable: 3000 kB\n", ("max", 0), 3000 << 10),  # a group without a limit
        # the group leaves less than the system
        ("MemAvailable: 3000 kB\n", (2_000_000, 500_000), 1_500_000),
        ("MemAvailable: 3000 kB\n", (2_000_000, 2_500_000), 0),
        # without MemAvailable: half of the machine's memory
        (
            "MemTotal: 9000 kB\n",
            None,
            os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2,
        ),
    ],
)
def test_the_budget_is_half_of_what_is_free(tmp_path, monkeypatch, meminfo, group, left):
    monkeypatch.delenv("FEDCACHE_MEMORY", raising=False)
    monkeypatch.setattr(limit, "Path", lambda path: tmp_path / str(path).lstrip("/"))
    system = tmp_path / "proc"
    cgroup = tmp_path / "sys/fs/cgroup"
    system.mkdir()
    (system / "meminfo").write_text(meminfo)
    if group is not None:
        cgroup.mkdir(parents=True)
        (cgroup / "memory.max").write_text(f"{group[0]}\n")
        (cgroup / "memory.stat").write_text(f"anon {group[1]}\nfile 7000\n")
    assert limit.free_memory() == left
    assert memory_limit() == left // 2


def test_rows_of_another_store_are_refused(tmp_path):
    reader = whole(tmp_path / "s.zarr").reader(KEYS[0])
    for rows in ([-1, 3], [ROWS], [0, 99]):
        store_error(lambda rows=rows: reader.rows(np.array(rows)), KEYS[0], ROWS)
