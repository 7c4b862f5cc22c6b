"""What holds for every test: nothing leaves the machine, and nothing touches the user's own folders."""

import errno
import gc
import shutil
import socket
from pathlib import Path

import hypothesis
import pytest
from command_lines import faults, hints_of_the_package
from draws import FULL

from fedcache.config import Home
from fedcache.store.catalog import recall_last, remember_last

# The short draw repeats its examples as long as the test and the constants in the package's source stay the same:
# Hypothesis also draws the constants that it finds there, so a changed constant changes the examples of every test.
# What must always be tried is an @example. The full draw has new examples each night. No example has a time limit, as
# another process may hold the processor.
hypothesis.settings.register_profile("short", derandomize=True, database=None, deadline=None)
hypothesis.settings.register_profile("full", derandomize=False, print_blob=True, deadline=None)
hypothesis.settings.load_profile("full" if FULL else "short")


gc.disable()  # until all tests are imported, as nothing of them is garbage

SUITES = {"browser": 600, "durability": 3600, "engines": 900}
"""Folder of tests that is a suite of its own, and its mark -> seconds that one of its tests may take by default."""


def pytest_addoption(parser):
    """``--update-golden``, which tests/contract/test_golden.py reads."""
    parser.addoption(
        "--update-golden",
        action="store_true",
        help="write the golden figures of the selected methods (one process)",
    )


def pytest_collection_modifyitems(config, items):
    """Mark the suites, leave tests of the full draw out of the short one, and report how many examples tests draw."""
    if not FULL and (
        later := [item for item in items if item.get_closest_marker("full") is not None]
    ):
        config.hook.pytest_deselected(items=later)
        items[:] = [item for item in items if item not in later]
    if FULL:
        # Some of the kills take half an hour, so they begin first and the other workers take the rest.
        items.sort(key=lambda item: not item.nodeid.startswith("tests/durability/"))
    # What all tests import stays to the end: the collector of garbage need not look at it each time.
    gc.freeze()
    gc.enable()
    for item in items:
        suite = item.nodeid.split("/", 2)[1]
        if suite in SUITES:
            item.add_marker(suite)
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(SUITES[suite]))
        if (mark := item.get_closest_marker("cases")) is not None:
            item.user_properties.append(("cases", mark.args[0]))


LOOPBACK = ("localhost", "127.0.0.1", "::1")


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    """Refuse hosts other than loopback as an unplugged machine does, and fail the test that tried.

    Yields:
        the hosts tried so far; a test of what happens without a network clears it.
    """
    tried = []

    def guarded(name):
        real = getattr(socket.socket, name)

        def connect(self, address):
            if self.family != getattr(socket, "AF_UNIX", None) and address[0] not in LOOPBACK:
                tried.append(str(address))
                raise OSError(errno.ENETUNREACH, "Network is unreachable (refused by the tests)")
            return real(self, address)

        monkeypatch.setattr(socket.socket, name, connect)

    guarded("connect")
    guarded("connect_ex")
    resolve = socket.getaddrinfo

    def getaddrinfo(host, *args, **kwargs):
        if host is not None and host not in LOOPBACK:
            tried.append(str(host))
            raise socket.gaierror(socket.EAI_AGAIN, "Name resolution is refused by the tests")
        return resolve(host, *args, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    yield tried
    assert not tried, f"tried to reach {tried}"


@pytest.fixture(autouse=True)
def hints_can_be_typed():
    """Fail the test that came across an error of the package whose hint has a command line that cannot be run."""
    with hints_of_the_package() as seen:
        yield
    wrong = [fault for hint in sorted(seen) for fault in faults(hint)]
    assert not wrong, "\n".join(wrong)


@pytest.fixture(autouse=True)
def own_home(tmp_path, monkeypatch):
    """A home and library caches of the test's own."""
    home = tmp_path / "home"
    monkeypatch.setenv("FEDCACHE_HOME", str(home))
    monkeypatch.setenv("HF_HOME", f"{tmp_path}/huggingface")
    monkeypatch.setenv("TORCH_HOME", f"{tmp_path}/torch")
    for name in ("FEDCACHE_OFFLINE", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    return home


@pytest.fixture
def here(tmp_path, monkeypatch):
    """The test's own folder, which is the current one."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def once(own_home, tmp_path_factory, monkeypatch):
    """``once(make)``: this test's home is a copy of the one that ``make(folder)`` left when it was first called.

    ``make`` runs once in a session (of each pytest-xdist worker), with a home of its own below ``folder``; images that
    it puts there are shared by all tests, which must not change them. A path that it returns is that of the copy.
    """

    def copy(make):
        place = tmp_path_factory.getbasetemp() / f"once/{make.__module__}-{make.__qualname__}"
        home = place / "home"
        if place not in MADE:
            shutil.rmtree(place, ignore_errors=True)
            place.mkdir(parents=True)
            with monkeypatch.context() as patch:
                patch.setenv("FEDCACHE_HOME", str(home))
                MADE[place] = make(place)
        if home.exists():
            shutil.copytree(home, own_home, dirs_exist_ok=True)
        # The store that was extracted last is remembered by its path.
        if (last := recall_last(Home(own_home))) is not None:
            noted = Path(str(last[0]).replace(str(home), str(own_home)))
            remember_last(Home(own_home), noted, last[1].replace(str(home), str(own_home)))
        made = MADE[place]
        return own_home / made.relative_to(home) if made.is_relative_to(home) else made

    return copy


MADE = {}
"""What ``once`` made, by its folder."""
