"""What a user gets wrong, end to end: the right exit code, the word that is wrong, and nothing left behind."""

from __future__ import annotations

import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from command import environment, fedcache, ok
from pictures import folder
from PIL import Image

import fedcache as fc
from fedcache.commands.options import pairs
from fedcache.commands.predict import Answer, predictions_answer
from fedcache.config import ExtractConfig, Home
from fedcache.errors import CorruptionError, Exit, UsageError, memory_error
from fedcache.extract.extract_dataset import extract
from fedcache.models.predictions import Prediction
from fedcache.process import Stop
from fedcache.progress import Silent

IID = ("--scheme", "iid", "--clients", 3, "--participation", "all")
GRID = ("grid", "--method", "fedavg", *IID, "--rounds", 1)
FULL = pytest.mark.full


@pytest.fixture
def images(tmp_path: Path) -> Path:
    return folder(tmp_path / "shapes", train=6, test=2)


@pytest.fixture
def store(images: Path) -> Path:
    done = ok("extract", "--dataset", f"folder:{images}", "--backbones", "random-projection", "--workers", 0)
    return Path(done.data["path"])


@pytest.mark.slow
def test_a_point_that_diverges_fails_alone(store: Path) -> None:
    words = ("grid", "--method", "fedavg", "--sweep", "lr=0.1,1e30,0.01", *IID, "--rounds", 2)
    done = fedcache(*words, "--json")
    assert done.code == 7, done.err
    assert done.envelope["status"] == "problem"
    assert [p["sweep"]["lr"] for p in done.data["points"]] == ["0.1", "0.01"]
    (failed,) = done.data["failed"]
    assert (failed["method"], failed["sweep"]) == ("fedavg", {"lr": "1e30"})
    assert "round" in failed["message"]
    assert "learning rate" in failed["hint"]
    assert done.data["best"]["sweep"]["lr"] in ("0.1", "0.01")
    shown = fedcache(*words)
    assert shown.code == 7
    (row,) = [line for line in shown.out.splitlines() if line.split()[:2] == ["fedavg", "1e30"]]
    assert row.split() == ["fedavg", "1e30", "failed"]
    assert f"Failed: fedavg lr=1e30. {failed['message']}" in shown.out
    assert "2 of them were there already" in shown.out
    alone = fedcache("grid", "--method", "fedavg", "--sweep", "lr=1e30", *IID, "--rounds", 2, "--json")
    assert alone.code == 7
    assert alone.envelope["error"]["message"] == failed["message"]
    with pytest.raises(fc.FedcacheError, match="in round") as info:
        fc.grid("fedavg", store, None, lr=[0.1, 1e30], settings={"bn": False}, options={"rounds": 2})
    assert info.value.code == 7


def test_a_point_that_diverges_fails_alone_where_points_are_computed_one_by_one(store: Path) -> None:
    words = ("grid", "--method", "fedavg", "--sweep", "lr=1e30,0.01", *IID, "--rounds", 2, "--aggregate", "trimmed:0.1")
    done = fedcache(*words, "--execution", "batched", "--json")
    assert done.code == 7, done.err
    assert [p["sweep"]["lr"] for p in done.data["points"]] == ["0.01"]
    assert [p["sweep"]["lr"] for p in done.data["failed"]] == ["1e30"]


@pytest.mark.parametrize(
    ("words", "name", "joined"),
    [
        ((*GRID, "--sweep", "lr=0.1", "--sweep", "lr=0.01,0.2"), "--sweep lr", "--sweep lr=0.1,0.01,0.2"),
        (("train", "--client-set", "wd=1", "--client-set", "wd=2"), "--client-set wd", "--client-set wd=1,2"),
    ],
)
def test_a_key_that_is_swept_twice_is_refused(words: tuple[object, ...], name: str, joined: str) -> None:
    done = fedcache(*words, "--json")
    assert done.code == 2
    assert name in done.envelope["error"]["message"]
    assert done.envelope["error"]["hint"].endswith(joined)


def test_a_recipe_that_one_backbone_refuses_is_found_before_a_store_is_made(images: Path, own_home: Path) -> None:
    words = ("extract", "--dataset", f"folder:{images}", "--backbones", "random-projection,glyph-clip", "--size", 64)
    for _ in range(2):  # the second must not find a store or a lock of the first
        done = fedcache(*words, "--json")
        assert done.code == 2
        assert "glyph-clip takes images of" in done.envelope["error"]["message"]
    rows = fedcache("extract", "--dataset", f"folder:{images}", "--backbones", "random-projection", "--chunk-rows", 7)
    assert rows.code == 2
    assert "--chunk-rows 7" in rows.err
    assert not list(own_home.glob("stores/*"))


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (("train", "--method", "fedavg", "--domain", ","), "--domain"),
        (("train", "--method", "fedavg", "--backbones", ","), "--backbones"),
        (("train", "--method", "fedavg", "--client-backbones", " , "), "--client-backbones"),
        (("grid", "--method", ","), "--method"),
        (("partition", "--scheme", "iid", "--domain", ","), "--domain"),
        (("extract", "--backbones", ","), "--backbones"),
        (("extract", "--backbones", "pixels", "--recipe", ","), "--recipe"),
    ],
)
def test_a_list_that_names_nothing_is_refused(words: tuple[str, ...], name: str) -> None:
    done = fedcache(*words, "--json")
    assert done.code == 2
    assert done.envelope["error"]["message"].startswith(f"{name} '")
    assert "names nothing" in done.envelope["error"]["message"]


@pytest.mark.parametrize(
    ("seeds", "limit"),
    [
        ("0-99999999", "more than 10,000 seeds"),
        ("0-9999,10000", "more than 10,000 seeds"),
        ("18446744073709551616", "at most 999,999,999"),
        ("5-1000000000", "at most 999,999,999"),
        ("3-1", "not a list of seeds"),
    ],
)
def test_seeds_out_of_range_are_told_the_limit(store: Path, seeds: str, limit: str) -> None:
    done = fedcache("train", "--method", "fedncm", *IID, "--seeds", seeds, "--json")
    assert done.code == 2
    assert limit in done.envelope["error"]["message"]


def test_seeds_may_be_as_large_as_is_said(store: Path) -> None:
    assert ok("train", "--method", "fedncm", *IID, "--seeds", "999999999").data["seeds"] == [999_999_999]


def test_lifts_are_named_alike_in_help_and_errors() -> None:
    done = fedcache("train", "--method", "fedavg", "--lift", "duel", "--json")
    assert done.code == 2
    assert done.envelope["error"]["hint"] == "Known: auto, batched, gram, sequential"
    shown = " ".join(fedcache("train", "--help").out.replace("│", " ").split())
    assert "auto | sequential | batched | gram: how clients are computed" in shown
    assert "--lift" not in fedcache("train", "--help").out, "the older name is hidden"


def test_the_version_is_all_that_version_prints() -> None:
    done = fedcache("--version")
    assert (done.code, done.out, done.err) == (0, f"{fc.__version__}\n", "")


def test_two_names_of_one_option_that_differ_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "both.toml"
    file.write_text('[train]\nmethod = "fedavg"\nlift = "batched"\nexecution = "gram"\n')
    done = fedcache("train", "--config", file, "--json")
    assert done.code == 2
    assert "gives execution twice" in done.envelope["error"]["message"]
    for call in (
        lambda: fc.train("fedavg", lift="batched", execution="gram"),  # type: ignore[call-arg]
        lambda: fc.grid("fedavg", options={"lift": "batched", "execution": "gram"}),
    ):
        with pytest.raises(fc.FedcacheError, match="lift and execution are one option"):
            call()


@pytest.mark.slow
def test_images_of_several_sizes_are_refused_without_leaving_a_store(tmp_path: Path) -> None:
    images = folder(tmp_path / "shapes", train=6, test=2)
    first = next(images.rglob("*.png"))
    Image.open(first).resize((9, 9)).save(first)
    words = ("extract", "--dataset", f"folder:{images}", "--backbones", "pixels", "--workers", 0)
    done = fedcache(*words, "--json")
    assert done.code == 2
    assert "Images differ in size" in done.envelope["error"]["message"]
    assert ok("ls").data["entries"] == []
    assert ok(*words, "--recipe", "pixels:size=8").data["arrays"]
    made = ok("partition", "--scheme", "iid", "--clients", 2).data["name"]
    assert "--method fedavg-scratch" in fedcache("partition", "--scheme", "iid", "--clients", 2).out
    shards = fedcache("shard", "--partition", made, "--out", tmp_path / "sites").out
    assert "these hold none" in shards
    assert "fedcache extract --dataset" in shards


def test_a_report_of_runs_of_which_none_can_be_shown_is_an_error(store: Path, tmp_path: Path) -> None:
    path = Path(ok("train", "--method", "fed3r", *IID).data["path"])
    (path / "rounds.jsonl").write_text("{}")
    page = tmp_path / "page.html"
    done = fedcache("report", path.name, "-o", page, "--json")
    assert done.code == 5
    assert "rounds.jsonl is not what was written." in done.envelope["error"]["message"]
    assert not page.exists()
    (path / "result.json").unlink()
    assert fedcache("report", path.name, "-o", page, "--json").code == 4
    assert fedcache("report", "-o", page, "--json").code == 4
    assert not page.exists()


def piped(home: Path, after: str, *words: str) -> tuple[int, str, str]:
    """``fedcache WORDS AFTER`` in bash, with AFTER a pipe or a redirection: its own exit code, stdout, stderr."""
    line = f'"$0" -m fedcache {" ".join(words)} {after}; exit "${{PIPESTATUS[0]}}"'
    done = subprocess.run(
        ["bash", "-c", line, sys.executable], capture_output=True, text=True, env=environment(home), check=False
    )
    return done.returncode, done.stdout, done.stderr


# ``sleep`` closes its stdin at once and lives: the reader is gone before anything is printed.
@pytest.mark.slow
@pytest.mark.parametrize("after", ["| head -1", "| (exec <&-; sleep 1)"])
@pytest.mark.parametrize(
    "words", [("datasets", "list"), *(pytest.param(w, marks=FULL) for w in (("ls", "--json"), ("train", "--help")))]
)
def test_a_closed_pipe_ends_quietly(own_home: Path, words: tuple[str, ...], after: str) -> None:
    code, out, err = piped(own_home, after, *words)
    assert (code, err) == (0, "")
    assert len(out.splitlines()) == ("head" in after)


@pytest.mark.slow
def test_a_closed_pipe_hides_no_error(own_home: Path) -> None:
    code, _, err = piped(own_home, "| (exec <&-; sleep 1)", "inspect", "nowhere.zarr", "--json")
    assert code == 4
    assert "nowhere.zarr" in err
    assert "Traceback" not in err


@pytest.mark.slow
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
@pytest.mark.parametrize(
    "words", [("ls", "--json"), ("--version",), *(pytest.param(w, marks=FULL) for w in (("ls",), ("train", "--help")))]
)
def test_a_full_device_is_one_sentence(own_home: Path, words: tuple[str, ...]) -> None:
    code, _, err = piped(own_home, "> /dev/full", *words)
    assert code == 6
    assert err == "fedcache: The answer could not be written to stdout: No space left on device.\n"


def test_what_does_not_fit_in_memory_is_no_bug(store: Path) -> None:
    done = fedcache("train", "--method", "fedavg", "--set", "dim=1000000000000", *IID, "--rounds", 1, "--json")
    assert done.code == 6, done.err
    assert "TiB, an array of shape (1000000000000, " in done.envelope["error"]["message"]
    assert "smaller dim" in done.envelope["error"]["hint"]
    assert "Traceback" not in done.err


def test_torch_running_out_of_memory_is_told_from_other_errors() -> None:
    with pytest.raises(RuntimeError) as info:
        torch.empty(1 << 58, dtype=torch.uint8)
    told = memory_error(info.value)
    assert told is not None
    assert told.code == 6
    assert str(1 << 58) in told.message
    gpu = memory_error(torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has 1 GiB."))
    assert gpu is not None
    assert "20.00 GiB" in gpu.message
    assert memory_error(RuntimeError("shape '[3]' is invalid")) is None
    assert memory_error(MemoryError()) is not None


class Impatient(Silent):
    """Asks to stop after the first images whose features are there."""

    def __init__(self) -> None:
        self.flag, self.what = Stop(), ""

    def start(self, what: str, total: int, unit: str) -> None:
        self.what = what

    def advance(self, units: int) -> None:
        if self.what == "extracting":
            self.flag.ask()


def test_a_store_of_a_stopped_extraction_is_named_with_the_command_to_go_on(images: Path, own_home: Path) -> None:
    nothing = fedcache("verify", "--json")
    assert nothing.code == 4
    assert "There is no store under" in nothing.envelope["error"]["message"]
    config = ExtractConfig(
        dataset=f"folder:{images}", backbones=("random-projection",), batch=4, chunk_rows=4, workers=0
    )
    observer = Impatient()
    with pytest.raises(fc.FedcacheError) as caught:
        extract(config, Home(own_home), observer=observer, stop=observer.flag)
    assert caught.value.code == 130
    (entry,) = ok("ls").data["entries"]
    for words in (("verify",), ("inspect",), ("train", "--method", "fed3r", "--no-extract")):
        done = fedcache(*words, "--json")
        assert done.code == 4
        error = done.envelope["error"]
        assert error["message"].startswith("No finished extraction is remembered.")
        assert f"{entry['name']} (unfinished)" in error["message"]
        assert f"fedcache inspect {entry['name']}" in error["hint"]
    command = error["hint"].partition("To go on:  fedcache ")[2]
    assert ok(*shlex.split(command)).data["arrays"][0]["kept_chunks"] > 0
    assert ok("verify").data["problems"] == []
    own_home.joinpath("last.json").unlink()
    lost = fedcache("verify", "--json")
    assert lost.code == 4
    assert lost.envelope["error"]["message"].endswith(f": {entry['name']}.")
    assert "To go on" not in lost.envelope["error"]["hint"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("reproduce", "list", "--rounds", 3), "list takes no --rounds"),
        (("reproduce", "list", "-o", "t.md"), "list takes no --out"),
        (("reproduce", "info", "fst-table4", "--only", "a=b", "--device", "cpu"), "info takes no --only, --device"),
        (("train", "--method", "tip-local", "--set", "tau=0.1", "--set", "tau=0.2"), "--set tau is given twice"),
        (("ingest", "x.npz", "--name", "../../x"), "'../../x' is not usable"),
        (("ingest", "x.npz", "--name", ".x"), "'.x' is not usable"),
        (("train", "--method", "fedavg,fedprox"), "'fedavg,fedprox' is not one method"),
        (("grid", "--method", "fedavg", "--sweep", "lift=batched,gram"), "execution is the same for all points"),
        (("reproduce", "nope"), "Unknown table or figure 'nope'."),
        (("reproduce", "list", "fst-table4"), "list takes no name, got 'fst-table4'."),
        (("reproduce", "fst-table4", "fst-table5"), "Two names: fst-table4 and fst-table5."),
        (("reproduce", "fst-table4", "-o", "no/t.md"), "The directory no does not exist."),
        (("partition",), "No scheme was named."),
        (("train",), "No method was named."),
        (("train", "--method", "fedavg", "--set", "lr"), "--set 'lr' is not key=value."),
        (("train", "--method", "fedavg", "--set", "=0.1"), "--set '=0.1' is not key=value."),
        (("train", "--method", "fedavg", "--set", "lr= "), "--set 'lr= ' is not key=value."),
    ],
)
def test_what_would_be_ignored_or_misread_is_refused(words: tuple[object, ...], said: str) -> None:
    done = fedcache(*words, "--json")
    assert done.code == 2, done.err
    assert said in done.envelope["error"]["message"]


def test_a_saved_partition_is_looked_for_before_anything_is_extracted(images: Path, own_home: Path) -> None:
    refused = fedcache("train", "--method", "fedavg", "--dataset", f"folder:{images}", "--partition", "three")
    assert refused.code == 4
    assert "There is no partition 'three': nothing of" in refused.err
    assert "extracting" not in refused.err
    assert not list(own_home.glob("stores/*"))


@pytest.mark.parametrize(("name", "hint"), [("--sweep", "lr=0.1,0.01"), ("--set", "lr=0.1"), ("--recipe", "key=value")])
def test_the_example_of_a_pair_is_one_of_its_option(name: str, hint: str) -> None:
    with pytest.raises(UsageError) as caught:
        pairs(["x"], name)
    assert (caught.value.message, caught.value.hint) == (f"{name} 'x' is not key=value.", f"For example {name} {hint}")
    assert pairs(["a=1", " a = 2=3 "], name) == {"a": "2=3"}


def test_rows_that_could_not_be_read_are_an_error_where_there_is_no_other() -> None:
    lost, read = Prediction("a.png", (), (), "torn"), Prediction("b.png", ("cat",), (0.5,))
    for rows, said in (
        ([lost], "a.png could not be read: torn."),
        ([lost, replace(lost, name="c.png")], "None of 2 rows could be read; the first: a.png: torn."),
    ):
        with pytest.raises(CorruptionError) as caught:
            predictions_answer(told_of(rows), 1, None, calibrated=True)
        assert caught.value.message == said
    found = predictions_answer(told_of([lost, read]), 1, None, calibrated=True)
    assert [row["name"] for row in found.data["rows"]] == ["a.png", "b.png"]


def told_of(rows: list[Prediction], *, keep_all: bool = True) -> Answer:
    answer = Answer(keep_all)
    assert list(answer.told(rows)) == rows
    return answer


def test_rows_beyond_those_that_are_shown_are_counted_and_kept_only_for_json() -> None:
    rows = [Prediction(f"{i}.png", ("cat",), (0.5,)) for i in range(50)]
    rows[30] = replace(rows[30], classes=(), probabilities=(), reason="torn")
    for keep_all, kept in ((False, 20), (True, 50)):
        found = predictions_answer(told_of(rows, keep_all=keep_all), 1, Path("out.csv"), calibrated=True)
        assert list(found.lines) == ["49 classified, 1 could not be read", "30 more in out.csv"]
        assert len(found.data["rows"]) == kept


def test_weights_are_fetched_where_they_are_published(monkeypatch: pytest.MonkeyPatch) -> None:
    from fedcache.commands import backbones
    from fedcache.extract.backbones import Weights

    missing, pulled = Weights(None, "", "not here", "timm/model.bin"), []
    monkeypatch.setattr(backbones, "locate", lambda *_, **__: missing)

    def pull(backbone: Any, **_: Any) -> Weights:
        pulled.append(backbone.name)
        return Weights(Path("w.bin"), "ab" * 32, "fetched")

    monkeypatch.setattr(backbones, "pull", pull)
    done = ok("backbones", "pull", "clip-rn50")
    assert pulled == ["clip-rn50"]
    assert done.data == {"name": "clip-rn50", "path": "w.bin", "sha256": "ab" * 32}
    assert "Downloading timm/model.bin" in done.err


@pytest.mark.slow
@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&-", "<&- >&- 2>&-"])
@pytest.mark.parametrize("words", [("runs", "list"), ("methods", "list"), ("--help",), ("new", "method", "mine")])
def test_a_closed_stream_is_no_error_and_nothing_is_written_into_a_file(
    own_home: Path, closed: str, words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, _, err = piped(own_home, closed, *words)
    assert code == 0, err
    assert "Traceback" not in err
    if words[0] == "new":
        assert Path("mine/pyproject.toml").read_text(encoding="utf-8").startswith("[build-system]")


@pytest.mark.slow
def test_an_error_with_stderr_closed_keeps_its_exit_code(own_home: Path) -> None:
    assert piped(own_home, "2>&-", "report", "nothing-of-that-name")[0] == Exit.USAGE
