"""Programs that fedcache starts: they end with the command that started them, killed or not."""

import subprocess
import sys
import time

import pytest

from fedcache.federate.engines.flower.processes import _stat, descendants

STARTS = """
import sys, time
from pathlib import Path
from fedcache.federate.engines.flower.processes import start
process = start("sleeper", ["/bin/sh", "-c", "echo begun; exec sleep 280"], Path(sys.argv[1]))
print(process.popen.pid, flush=True)
time.sleep(280)
"""

PARENT = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", sys.argv[1], "--parent-pid", str(os.getpid())])
print(child.pid, flush=True)
time.sleep(280)
"""
CHILD = """
import time
from fedcache.federate.engines.flower.processes import end_with_parent
end_with_parent(0.2)
print("begun", flush=True)
time.sleep(280)
"""


def gone(pid):
    """Whether a process ends; one that its new parent has not asked about yet has ended."""
    last = time.monotonic() + 200
    while time.monotonic() < last:
        fields = _stat(pid)
        if not fields or fields[0] == "Z":
            return True
        time.sleep(0.02)
    return False


@pytest.mark.skipif(sys.platform != "linux", reason="/proc tells of processes")
def test_an_app_of_flower_ends_with_the_process_that_started_it():
    run = subprocess.Popen([sys.executable, "-c", PARENT, CHILD], stdout=subprocess.PIPE, text=True)
    assert run.stdout is not None
    pid = int(run.stdout.readline())
    assert run.stdout.readline() == "begun\n"
    run.kill()
    run.wait()
    assert gone(pid)
    run.stdout.close()


@pytest.mark.skipif(sys.platform != "linux", reason="Linux alone kills a process whose parent ends")
def test_a_program_ends_with_a_command_that_is_killed(tmp_path):
    run = subprocess.Popen(
        [sys.executable, "-c", STARTS, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert run.stdout is not None
    pid = int(run.stdout.readline())
    last = time.monotonic() + 200
    while "begun" not in (tmp_path / "sleeper.log").read_text() and time.monotonic() < last:
        time.sleep(0.02)
    assert "begun" in (tmp_path / "sleeper.log").read_text()
    assert pid in descendants(run.pid)
    run.kill()
    run.communicate()
    assert gone(pid)
