"""Which prompt template a text result is of: the one extracted last, said and stored with the result."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from command import fedcache, ok
from pictures import folder

from fedcache.commands import demo
from fedcache.commands.output import TerminalObserver
from fedcache.config import Home
from fedcache.process import Stop
from fedcache.store.store import Store

SMALL = ("--batch", 4, "--chunk-rows", 8, "--workers", 0)
OTHER = "the character {} here"
ZERO = ("train", "--method", "clip-zs", "--scheme", "iid", "--clients", 2, "--backbones", "glyph-clip")


@pytest.fixture
def words(tmp_path: Path) -> tuple[object, ...]:
    """The extract command of three classes with text features."""
    images = folder(tmp_path / "shapes", train=8, test=4)
    return ("extract", "--dataset", f"folder:{images}", "--backbones", "glyph-clip", *SMALL)


@pytest.mark.slow
def test_extracting_a_template_again_makes_it_current_and_computes_nothing(words: tuple[object, ...]) -> None:
    path = Path(ok(*words).data["path"])
    template = Store.open(path).templates("glyph-clip")
    assert template is not None
    before, manifest = ok(*ZERO), (path / "manifest.json").read_bytes()
    assert before.data["text_templates"] == template
    assert f'Text: "{template[0]}" (fedcache extract --text chooses).' in before.err

    other = ok(*words, "--text", OTHER)
    assert other.data["decoded"] == 0
    assert other.data["text"] == [{"backbone": "glyph-clip", "templates": [OTHER], "state": "computed"}]
    changed = ok(*ZERO)
    assert changed.data["text_templates"] == [OTHER]
    assert f'Text: "{OTHER}"' in changed.err
    assert changed.data["digest"] != before.data["digest"]
    assert ok("inspect").data["text_templates"] == {"glyph-clip": [OTHER]}
    shown = fedcache("inspect").out
    assert f'text        glyph-clip: "{OTHER}" (fedcache extract --text chooses); 1 more stored' in shown

    planned = ok(*words, "--dry-run").data["text"]
    assert Store.open(path).templates("glyph-clip") == [OTHER], planned
    files = {f: f.stat().st_mtime_ns for f in (path / "text").rglob("*")}
    again = ok(*words)
    assert again.data["text"] == [{"backbone": "glyph-clip", "templates": template, "state": "made current"}]
    assert {f: f.stat().st_mtime_ns for f in (path / "text").rglob("*")} == files, "nothing was computed"
    back = ok(*ZERO).data
    assert back["reused"]
    assert (back["digest"], back["text_templates"]) == (before.data["digest"], template)
    current = (path / "manifest.json").read_bytes()
    assert current != manifest
    assert ok(*words).data["text"][0]["state"] == "current"
    assert (path / "manifest.json").read_bytes() == current
    assert ok("verify").data["problems"] == []


@pytest.mark.slow
def test_the_answer_says_that_text_was_computed(words: tuple[object, ...]) -> None:
    assert f'Text of glyph-clip: "{OTHER}", computed' in fedcache(*words, "--text", OTHER).out
    plain = fedcache(*words).out
    assert "Text features were computed." in plain
    assert "Nothing was computed" not in plain
    plan = fedcache(*words, "--text", "one {}", "--dry-run").out
    assert "only text features are to compute" in plan
    assert 'Text of glyph-clip: "one {}", to be computed.' in plan
    again = fedcache(*words, "--text", OTHER).out
    assert "Nothing was computed" in again
    assert f'Text of glyph-clip: "{OTHER}", current again, as stored.' in again
    assert "Text of" not in fedcache(*words, "--text", OTHER).out


@pytest.mark.slow
def test_what_train_extracts_on_its_own_leaves_the_chosen_template(words: tuple[object, ...]) -> None:
    ok(*words)
    path = Path(ok(*words, "--text", OTHER).data["path"])
    done = ok("train", "--method", "tpfl", "--dataset", words[2], "--scheme", "iid", "--clients", 2, "--rounds", 1,
              "--set", "epochs=1",
              "--backbones", "glyph-clip,pixels")  # fmt: skip
    assert "Nothing extracted yet" in done.err, "the images were not there"
    assert done.data["text_templates"] == [OTHER]
    assert Store.open(path).templates("glyph-clip") == [OTHER]


@pytest.mark.slow
def test_the_demo_reads_its_own_template(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The demo's own extraction, on 200 digits: all of them take half a minute.
    from fedcache.config import ExtractConfig

    monkeypatch.setattr(demo, "ExtractConfig", lambda **given: ExtractConfig(**{**given, "limit": 200}))
    monkeypatch.setattr(demo, "BACKBONES", ("random-projection", "glyph-clip"))
    monkeypatch.setattr(demo, "SIZE", "16")
    home = Home.from_environment()
    store = Store.open(Path(demo.extract_features(home, TerminalObserver(quiet=True), Stop())))
    template, matrix = store.templates("glyph-clip"), store.text("glyph-clip").copy()
    ok("extract", "--dataset", "digits", "--limit", 200, "--backbones", "glyph-clip", "--text", OTHER)
    assert Store.open(store.path).templates("glyph-clip") == [OTHER]
    assert demo.extract_features(home, TerminalObserver(quiet=True), Stop()) == str(store.path)
    store = Store.open(store.path)
    assert store.templates("glyph-clip") == template
    assert np.array_equal(store.text("glyph-clip"), matrix)
