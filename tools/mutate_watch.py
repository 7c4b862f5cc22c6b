"""Which test executes which line: the plugin that ``tools/mutate.py`` gives to pytest and to processes of tests.

``begin`` is called by a ``sitecustomize.py``, so it also watches Python processes that a test starts; the environment
tells them the test. What a fixture of a module or session runs is kept under the fixture's own name, since every test
that uses it depends on these lines, not only the first. (PYTEST_DONT_REWRITE: it is imported before pytest is.)
"""

from __future__ import annotations

import atexit
import json
import os
from collections.abc import Generator
from pathlib import Path
from typing import Any

DATA = "MUTATE_DATA"
SOURCE = "MUTATE_SOURCE"
TEST = "MUTATE_TEST"
TESTS = "MUTATE_TESTS"
"""Of the environment: files of coverage's data, folder that is watched, the test that runs, file of the tests."""


def begin() -> None:
    """Watch this process to its end."""
    if DATA not in os.environ:
        return
    from coverage import Coverage

    watch = Coverage(
        os.environ[DATA],
        data_suffix=True,
        config_file=False,
        source=[os.environ[SOURCE]],
        context=os.environ.get(TEST),
        messages=False,
    )
    quiet = [
        "no-data-collected",
        "module-not-measured",
        "module-not-imported",
        "couldnt-parse",
        "no-ctracer",
    ]
    watch.set_option("run:disable_warnings", quiet)
    watch.start()

    def end() -> None:
        watch.stop()
        watch.save()

    atexit.register(end)


def switch(name: str) -> None:
    """From here on lines count for ``name``."""
    from coverage import Coverage

    os.environ[TEST] = name
    if (watch := Coverage.current()) is not None:
        watch.switch_context(name)


def fixture_name(definition: Any) -> str:
    """A name of a fixture that no test has."""
    return f"@{definition.baseid}::{definition.argname}"


class Watch:
    """Notes the tests with their seconds, whether they pass, and the shared fixtures they use."""

    def __init__(self) -> None:
        self.tests: dict[str, dict[str, Any]] = {}

    def pytest_collection_finish(self, session: Any) -> None:
        for item in session.items:
            shared = {
                fixture_name(d)
                for definitions in item._fixtureinfo.name2fixturedefs.values()
                for d in definitions
                if d.scope != "function"
            }
            self.tests[item.nodeid] = {
                "seconds": 0.0,
                "passed": True,
                "fixtures": sorted(shared),
                "ran": False,
            }

    def pytest_runtest_logreport(self, report: Any) -> None:
        entry = self.tests[report.nodeid]
        entry["seconds"] += report.duration
        entry["passed"] &= not report.failed
        entry["ran"] |= report.when == "call" and report.passed

    def pytest_sessionfinish(self) -> None:
        Path(os.environ[TESTS]).write_text(json.dumps(self.tests), encoding="utf-8")


def pytest_configure(config: Any) -> None:
    """Register the hooks; pytest, which calls this, is imported already."""
    import pytest

    class Switches:
        @pytest.hookimpl(wrapper=True, tryfirst=True)
        def pytest_runtest_protocol(self, item: Any) -> Generator[None, Any, Any]:
            switch(item.nodeid)
            try:
                return (yield)
            finally:
                switch("")

        @pytest.hookimpl(wrapper=True, tryfirst=True)
        def pytest_fixture_setup(self, fixturedef: Any, request: Any) -> Generator[None, Any, Any]:
            before = os.environ.get(TEST, "")
            if fixturedef.scope != "function":
                switch(fixture_name(fixturedef))
            try:
                return (yield)
            finally:
                switch(before)

    config.pluginmanager.register(Switches())
    config.pluginmanager.register(Watch())
