"""kill -9, signals and several writers of an extraction: what is left is whole, and the end is the same."""

import contextlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from shlex import split

import pytest
from command import environment
from draws import one_of_each
from files_now import files_now
from forked import Kills, apart, start
from pictures import folder
from toy_store import content

from fedcache.store.verify import verify

CHUNKS = 2 * 48


def extraction(dataset, backbones, options):
    """An extraction in small chunks."""
    more = split(f"{options} --batch 4 --chunk-rows 8 --json")
    return ("extract", "--dataset", dataset, "--backbones", backbones, *more)


@pytest.fixture
def words(tmp_path):
    """An extraction of 384 images in 48 chunks for each of two backbones."""
    images = folder(tmp_path / "many", train=96, test=32)
    return extraction(f"folder:{images}", "random-projection,pixels", "--size 16 --workers 2")


def done(store):
    """Chunks that journals or the manifest's folders hold."""
    found = [f for f in files_now(store / "features") if f.name != "zarr.json"]
    return sum(1 for f in found if not f.name.endswith(".partial"))


def whole_store(words, folder, home, code=0):
    """The files of a store that is extracted without an interruption."""
    whole = folder / "whole.zarr"
    assert apart(*words, "--store", whole, home=home).code == code
    return content(whole)


def resumed(words, part, home, code=0):
    """The files of a store after the command that resumes it."""
    last = apart(*words, "--store", part, home=home)
    assert last.code == code, last.err
    return content(part)


def kill_and_resume(words, home, folder, times, code=0):
    """Kill an extraction at drawn places, three times for each of ``times`` stores; what it ends as is a whole one.

    ``code`` is what a command ends with that nobody kills.
    """
    expected = whole_store(words, folder, home, code)
    draw, killed = random.Random(0), 0
    for number in range(times):
        part = folder / f"part-{number}.zarr"
        for _ in range(3):
            run = start(*words, "--store", part, home=home)
            while run.poll() is None and done(part) < draw.randint(4, 30):
                time.sleep(0.01)
            if run.poll() is not None:
                break
            run.kill()
            killed += 1
        assert resumed(words, part, home, code) == expected
    assert killed


def test_killed_extractions_resume_to_the_same_bytes(tmp_path, words, home, cases):
    whole = tmp_path / "whole.zarr"
    kills = Kills((*words, "--store", whole), home, seed=0, latest=1.0)
    expected = content(whole)
    wanted = cases(3, 200)
    number = 0
    while kills.number < wanted:
        part = tmp_path / f"part-{number}.zarr"
        number += 1
        before = 0
        for _ in kills.of((*words, "--store", part), times=6):
            assert done(part) >= before  # what was there stays
            before = done(part)
        assert resumed(words, part, home) == expected
        assert not list(part.rglob("*.partial"))
        assert not list((part / "locks").glob("*.json"))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_leave_exit_130_and_the_command_that_goes_on(tmp_path, words, home, cases, number):
    expected = whole_store(words, tmp_path, home)
    draw = random.Random(1)
    for i in range(cases(1, 10)):
        part = tmp_path / f"part-{i}.zarr"
        run = start(*words, "--store", part, home=home)
        share = draw.uniform(0.05, 0.7)
        while run.poll() is None and done(part) < share * CHUNKS:
            time.sleep(0.002)
        os.kill(run.pid, number)
        out, err = run.communicate(timeout=60)
        assert run.returncode == 130, err + out
        assert "same command" in err
        assert resumed(words, part, home) == expected


def in_session(number):
    """Command lines of the processes of a session that still run."""
    found = []
    for place in Path("/proc").iterdir():
        if place.name.isdigit():
            with contextlib.suppress(OSError):
                state, *numbers = (place / "stat").read_text().rsplit(")", 1)[1].split()
                if int(numbers[2]) == number and state != "Z":
                    found.append((place / "cmdline").read_text().replace("\0", " "))
    return found


@pytest.mark.parametrize(
    ("backbone", "number"),
    one_of_each(
        [
            ("pixels", signal.SIGTERM),
            ("efficientnet-lite0", signal.SIGINT),
            ("pixels", signal.SIGINT),
            ("efficientnet-lite0", signal.SIGTERM),
        ]
    ),
)
def test_two_signals_to_the_group_end_an_extraction_within_five_seconds(
    tmp_path, home, cases, backbone, number
):
    """At any moment, workers that are starting included; long names make what they are sent larger than a pipe."""
    images = folder(tmp_path / "many", train=96, test=32, domains=("d" * 200,))
    words = extraction(f"folder:{images}", backbone, "--size 32 --workers 2")
    began = time.monotonic()
    expected = whole_store(words, tmp_path, home)
    seconds = time.monotonic() - began
    draw, part = random.Random(3), tmp_path / "part-0.zarr"
    for i in range(cases(1, 30)):
        run = start(*words, "--store", part, home=home)
        time.sleep(draw.uniform(0.1, 1.0) * seconds)
        # two signals that a process sees at once are one
        for pause in (draw.uniform(0.2, 1.0), 0.0):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(run.pid, number)
            time.sleep(pause)
        second = time.monotonic()
        run.wait(5)
        while in_session(run.pid) and time.monotonic() - second < 5:
            time.sleep(0.05)
        assert in_session(run.pid) == []
        if i % 3 == 2 or run.returncode == 0:
            assert resumed(words, part, home) == expected
            part = tmp_path / f"part-{i + 1}.zarr"
    assert resumed(words, part, home) == expected


SMALL_DISK = """
mount -t tmpfs -o size=80m none "$DISK"
"$@" --store "$DISK/s.zarr" >"$OUT/first.out" 2>"$OUT/first.err" &
chunks() { find "$DISK" -path '*/c/*' -type f 2>/dev/null | wc -l; }
until [ "$(chunks)" -ge 20 ] || ! kill -0 $! 2>/dev/null; do sleep 0.005; done
for megabytes in 64 32 16 8 4 2 1; do  # at once, and the rest byte by byte
    fallocate -l ${megabytes}m "$DISK/ballast-$megabytes" 2>/dev/null
done
cat /dev/zero >"$DISK/ballast" 2>/dev/null
wait $!; echo $? >"$OUT/first.rc"
chunks >"$OUT/kept"
"$@" --store "$DISK/s.zarr" >"$OUT/full.out" 2>"$OUT/full.err"; echo $? >"$OUT/full.rc"
rm "$DISK"/ballast*
"$@" --store "$DISK/s.zarr" >"$OUT/again.out" 2>"$OUT/again.err"; echo $? >"$OUT/again.rc"
cp -r "$DISK/s.zarr" "$OUT/s.zarr"
"""


def test_a_disk_that_fills_up_is_exit_6_and_what_was_written_stays(tmp_path, words, home):
    """A real small disk: a tmpfs in a mount namespace of its own, filled when 20 chunks are there."""
    own_mounts = ("unshare", "--map-root-user", "--mount")
    if (
        shutil.which("unshare") is None
        or subprocess.run([*own_mounts, "true"], check=False).returncode
    ):
        pytest.skip("this system lets no one mount a disk of their own")
    disk, out = tmp_path / "disk", tmp_path / "out"
    disk.mkdir()
    out.mkdir()
    expected = whole_store(words, tmp_path, home)
    command = (sys.executable, "-m", "fedcache", *map(str, words))
    env = {**environment(home), "DISK": str(disk), "OUT": str(out)}
    line = [*own_mounts, "sh", "-c", SMALL_DISK, "sh", *command]
    subprocess.run(line, env=env, timeout=280, check=True)
    codes = [(out / f"{name}.rc").read_text().strip() for name in ("first", "full", "again")]
    assert codes == ["6", "6", "0"], [file.read_text() for file in out.glob("*.err")]
    said = json.loads((out / "first.out").read_text())["error"]["message"]
    assert re.search(r"needs [\d,]+ bytes and ([\d,]+ bytes are|none is) free", said), said
    assert int((out / "kept").read_text()) >= 20
    kept = json.loads((out / "again.out").read_text())["data"]["arrays"]
    assert sum(a["kept_chunks"] for a in kept) >= 20
    assert content(out / "s.zarr") == expected


def test_four_writers_of_one_store_lose_nothing(tmp_path, words, home, cases):
    expected = whole_store(words, tmp_path, home)
    for i in range(cases(1, 10)):
        part = tmp_path / f"part-{i}.zarr"
        runs = [start(*words, "--store", part, home=home) for _ in range(4)]
        ends = [(run.communicate(timeout=280)[1], run.returncode) for run in runs]
        assert {code for _, code in ends} <= {0, 4}, ends  # done, or told who writes
        assert any(code == 0 for _, code in ends)
        assert resumed(words, part, home) == expected
        assert verify(part).ok
