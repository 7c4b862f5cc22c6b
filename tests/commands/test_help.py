"""The help of commands: ``-h`` shows the options that people use on one page, ``--help-all`` all of them."""

import re

import pytest
from command import fedcache
from command_lines import every_command
from failing_command import must_fail

MAIN = (
    "extract",
    "partition",
    "train",
    "grid",
    "compare",
    "report",
    "predict",
    "evaluate",
    "methods info",
    "runs list",
    "runs show",
    "ingest",
    "flower app",
    "flower up",
)
ESSENTIAL = {
    "flower app": {"--method", "--sites", "--out", "--wait", "--start-with", "--quorum"},
    "flower up": {"--method", "--shards", "--tls", "--wait"},
}
OPTIONS = {}
"""Each command and the long names of its options."""

for words, command in every_command():
    names = {max(p.opts, key=len) for p in command.params if not p.hidden}
    OPTIONS[words] = {name for name in names if name.startswith("--")} - {"--json"}


def shown_options(text):
    return set(re.findall(r"^  (?:-\w, )?(--[\w-]+)", text, re.MULTILINE))


@pytest.mark.parametrize("columns", [80, 120])
@pytest.mark.parametrize("command", MAIN)
def test_the_help_of_a_main_command_is_one_page_with_an_example_first(
    command, columns, monkeypatch
):
    monkeypatch.setenv("COLUMNS", str(columns))
    lines = fedcache(f"{command} -h").out.splitlines()
    assert len(lines) <= 40
    example = next(i for i, line in enumerate(lines) if line.startswith(f"  fedcache {command} "))
    assert example < next(i for i, line in enumerate(lines) if line.startswith("Usage: fedcache "))
    options = shown_options("\n".join(lines))
    assert len(options) <= 16
    assert options >= ESSENTIAL.get(command, set())


@pytest.mark.parametrize("command", OPTIONS)
def test_the_full_help_shows_every_option_and_the_short_one_says_so(command):
    assert shown_options(fedcache(f"{command} --help-all").out) == OPTIONS[command]
    short = fedcache(f"{command} -h").out
    left_out = OPTIONS[command] - shown_options(short)
    assert (f"fedcache {command} --help-all" in short) == bool(left_out)
    assert "--json" in short
    assert must_fail("", f"{command} --jsn-no-such-flag")["hint"]


def test_a_default_is_shown_as_the_value_it_is():
    assert "[default: report.html]" in " ".join(fedcache("report -h").out.split())
    assert "[default: auto]" in fedcache("extract -h").out
