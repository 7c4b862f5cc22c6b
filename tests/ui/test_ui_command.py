"""``fedcache ui``: the real command is started, asked and ended; what is missing is a sentence."""

import signal
import sys
import urllib.error
import urllib.request

import pytest
from command import python
from failing_command import must_fail, must_fail_machine
from ui_client import served

from fedcache.ui.server import open_in_browser, open_socket


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_command_serves_until_it_is_told_to_end(tmp_path, number):
    with served(tmp_path / "home") as (address, process):
        assert address.startswith("http://127.0.0.1:")
        with urllib.request.urlopen(address, timeout=200) as answer:
            assert f"{tmp_path}/home".encode() in answer.read()
        events = urllib.request.urlopen(f"{address}events", timeout=200)
        assert events.readline().startswith(b"data: ")
        with pytest.raises(urllib.error.HTTPError, match="403"):
            urllib.request.urlopen(address.rsplit("/", 2)[0] + "/", timeout=200)
        process.send_signal(number)
        out, err = process.communicate(timeout=200)
    assert process.returncode == 0, err
    assert out.strip() == "Ended."
    assert "ERROR" not in err, "a window that is open is no reason to complain of"
    assert events.read().strip() == b""
    assert not (tmp_path / "home").exists()


def test_wrong_words_are_refused_with_the_next_command(tmp_path):
    must_fail("no directory", f"ui --home {tmp_path}/none")
    must_fail("", "ui --port 99999")
    with open_socket(0) as taken:
        taken.listen(1)
        must_fail_machine("--port 0", f"ui --no-open --port {taken.getsockname()[1]}")


def test_the_browser_is_led_to_the_address_by_a_file_that_others_cannot_read(tmp_path, monkeypatch):
    opened = []
    monkeypatch.setattr("webbrowser.open", lambda url: bool(opened.append(url)) or True)
    assert open_in_browser("http://127.0.0.1:1/secret/", tmp_path)
    (url,) = opened
    assert "secret" not in url
    page = tmp_path / "open.html"
    assert url == page.as_uri()
    assert "url=http://127.0.0.1:1/secret/" in page.read_text()
    assert page.stat().st_mode & 0o077 == 0


@pytest.mark.slow
def test_the_overview_of_a_home_needs_no_torch_and_other_commands_nothing_of_the_page(tmp_path):
    overview = f"""
import sys
sys.path[:0] = {sys.path!r}
from pathlib import Path
from ui_client import Client
client = Client(Path({str(tmp_path)!r}))
client.read()
assert client.ask('/').code == 200
assert 'torch' not in sys.modules and 'matplotlib' not in sys.modules
"""
    others = """
import sys
import fedcache, fedcache.cli, fedcache.grids.record
assert not [m for m in sys.modules if m.startswith(('fedcache.ui', 'starlette', 'uvicorn'))]
"""
    for code in (overview, others):
        python(code)


def test_without_the_extra_the_command_that_installs_it_is_named(monkeypatch):
    monkeypatch.setattr("fedcache.commands.ui.find_spec", lambda _name: None)
    must_fail_machine("pip install 'fedcache[ui]'", "ui")
