"""kill -9 of parts of an extraction and of their join: nothing half-written is read, and the end is the same bytes."""

import random
import time

from forked import apart, start
from pictures import folder
from test_kills import done, extraction
from toy_store import content

from fedcache.store.store import Store

PARTS = 3


def kill_when(words, home, place, chunks):
    """Start a command and kill it once ``place`` holds so many chunk files; whether it was killed before its end."""
    run = start(*words, home=home)
    while run.poll() is None:
        if done(place) >= chunks:
            run.kill()
            return True
        time.sleep(0.002)
    return False


def test_killed_parts_and_joins_end_as_the_store_of_one_process(tmp_path, home, cases):
    images = folder(tmp_path / "many", train=96, test=32)
    (images / "train" / "ant" / "007.png").write_bytes(b"no picture")
    words = extraction(f"folder:{images}", "random-projection,pixels", "--size 16 --workers 0")
    whole = tmp_path / "whole.zarr"
    assert apart(*words, "--store", whole, home=home).code == 3
    expected = content(whole)
    draw = random.Random(0)
    killed = 0
    for number in range(cases(1, 8)):
        base = tmp_path / f"{number}.zarr"
        places = []
        for i in range(1, PARTS + 1):
            # Each part on a machine of its own.
            machine = tmp_path / f"home-{number}-{i}"
            command = (*words, "--store", base, "--part", f"{i}/{PARTS}")
            place = tmp_path / f"{number}.part-{i}-of-{PARTS}.zarr"
            for _ in range(2):
                killed += kill_when(command, machine, place, done(place) + draw.randint(1, 10))
            last = apart(*command, home=machine)
            assert last.code in (0, 3), last.err
            assert not list(place.rglob("*.partial"))
            places.append(place)
        out = tmp_path / f"out-{number}.zarr"
        join = ("join", *places, "-o", out)
        for _ in range(2):
            if not kill_when(join, home, out, done(out) + draw.randint(1, 40)):
                break
            killed += 1
            # What a killed join leaves is a store whose finished arrays are whole.
            if out.exists():
                store = Store.open(out)
                for key in store.arrays:
                    assert len(store.reader(key).all()) == 384
        last = apart(*join, home=home)
        assert last.code == 3, last.err
        assert content(out) == expected
        assert not list(out.rglob("*.partial"))
        assert not list((out / "locks").glob("*.json"))
    assert killed >= 5 * cases(1, 8)
