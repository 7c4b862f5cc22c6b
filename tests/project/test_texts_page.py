"""docs/texts.md: its commands run as they are written, on the data that its example makes, and reach what it says."""

import runpy
import shlex
import shutil
import sys
from pathlib import Path

import pytest
import tiny_hf
import tiny_sounds
from command import fedcache, ok
from repository_files import ROOT, content

NAME = "texts_and_sound"


@pytest.mark.slow
def test_the_example_runs_as_it_is_written(tmp_path, monkeypatch):
    shutil.copy(ROOT / "examples" / f"{NAME}.py", tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])
    monkeypatch.setenv("FEDCACHE_HOME", str(tmp_path / "home"))
    blocks = content("docs/texts.md").split("```sh\n")[1:]
    commands = [
        shlex.split(line) for block in blocks for line in block.partition("```")[0].splitlines()
    ]
    assert [words[0] for words in commands].count("fedcache") == len(commands) - 1
    best = {}
    topics = runpy.run_path(str(ROOT / "examples" / f"{NAME}.py"))["TOPICS"]
    words = sorted({word for topic in topics.values() for word in topic.split()})
    try:
        for command in commands:
            if command[0] == "python":
                runpy.run_path(command[1], run_name="__main__")
                continue
            # whose model is not here: a tiny one in its place
            if any(word.startswith("hf:") for word in command):
                folder = Path(next(word for word in command if word.startswith("hf:"))[3:])
                folder.mkdir(parents=True)
                if folder.name.startswith("wav2vec2"):
                    tiny_sounds.encoder(folder, "wav2vec2")
                    tiny_sounds.tones(tmp_path / "recordings")
                elif folder.name.startswith("qwen2"):
                    tiny_hf.decoder(folder)
                else:
                    tiny_hf.sentence_encoder(folder, words)
            done = ok(*command[1:]) if command[1] != "report" else fedcache(*command[1:])
            assert done.code == 0, done.err
            if command[1] == "grid":
                rows = {p["method"]: p["accuracy"]["mean"] for p in done.data["points"]}
                best[command[command.index("--by") + 1]] = rows
    finally:
        sys.modules.pop(NAME, None)
    # Four topics: chance is 0.25. Of the tones fed3r is right on more than nine of ten.
    assert set(best["site"]) == {"fed3r", "fedavg", "fst-cbdg"}
    assert min(best["site"].values()) > 0.7, best
    assert best["microphone"]["fed3r"] > 0.9, best
    assert (tmp_path / "texts.html").stat().st_size > 10_000
