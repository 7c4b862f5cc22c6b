"""What a user gets wrong, end to end: the right exit code, the word that is wrong, and nothing left behind."""

import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from command import data_of, environment, fedcache, words_of
from draws import one_of_each
from failing_command import must_fail, must_fail_machine, must_fail_store
from made_path import place_of
from pictures import folder
from refusal import corruption
from stopped_extraction import in_small_chunks, stop_extraction

import fedcache as fc
from fedcache.commands.predict import Answer, predictions_answer
from fedcache.errors import memory_error
from fedcache.models.predictor import Prediction

IID = words_of("--scheme iid --clients 3 --participation all")


@pytest.fixture
def images(tmp_path):
    return folder(tmp_path / "shapes", train=6, test=2)


@pytest.fixture
def store(images):
    return place_of(f"extract --dataset folder:{images} --backbones random-projection --workers 0")


def test_a_recipe_that_one_backbone_refuses_is_found_before_a_store_is_made(images, own_home):
    words = f"extract --dataset folder:{images} --backbones random-projection,glyph-clip --size 64"
    for _ in range(2):  # the second must not find a store or a lock of the first
        must_fail("glyph-clip takes only images of", words)
    must_fail(
        "--chunk-rows 7",
        f"extract --dataset folder:{images} --backbones random-projection --chunk-rows 7",
    )
    assert not list(own_home.glob("stores/*"))


def test_the_version_is_all_that_version_prints():
    done = fedcache("--version")
    assert done.code == 0
    assert done.out == f"{fc.__version__}\n"
    assert done.err == ""


def test_two_names_of_one_key_that_differ_are_refused(tmp_path):
    file = tmp_path / "both.toml"
    file.write_text('[train]\nmethod = "fedavg"\n[partition]\nseed = 1\npartition_seed = 2\n')
    assert fedcache(f"train --config {file} --json").code == 2


def piped(home, after, *words):
    """``fedcache WORDS AFTER`` in bash, with AFTER a pipe or a redirection: its own exit code, stdout, stderr."""
    line = f'"$0" -m fedcache {" ".join(words)} {after}; exit "${{PIPESTATUS[0]}}"'
    done = subprocess.run(
        ["bash", "-c", line, sys.executable],
        capture_output=True,
        text=True,
        env=environment(home),
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


# ``sleep`` closes its stdin at once and lives: the reader is gone before anything is printed.
@pytest.mark.slow
@pytest.mark.parametrize("after", ["| head -1", "| (exec <&-; sleep 1)"])
@pytest.mark.parametrize("words", one_of_each([("datasets", "list"), ("train", "--help")], bool))
def test_a_closed_pipe_ends_quietly(own_home, words, after):
    code, out, err = piped(own_home, after, *words)
    assert code == 0
    assert err == ""
    assert len(out.splitlines()) == ("head" in after)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
@pytest.mark.parametrize("words", [("ls", "--json"), ("--version",)])
def test_a_full_device_is_one_sentence(own_home, words):
    code, _, err = piped(own_home, "> /dev/full", *words)
    assert code == 6
    assert err == "fedcache: The output could not be written to stdout: No space left on device.\n"


def test_what_does_not_fit_in_memory_is_no_bug(store):
    must_fail_machine("TiB", "train --method fedavg --set dim=1000000000000 --rounds 1", *IID)


def test_torch_running_out_of_memory_is_told_from_other_errors():
    with pytest.raises(RuntimeError) as info:
        torch.empty(1 << 58, dtype=torch.uint8)
    assert str(1 << 58) in memory_error(info.value).message
    gpu = memory_error(
        torch.cuda.OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has 1 GiB."
        )
    )
    assert "20.00 GiB" in gpu.message
    assert memory_error(RuntimeError("shape '[3]' is invalid")) is None
    assert memory_error(MemoryError()) is not None


def test_a_store_of_a_stopped_extraction_is_named_with_the_command_to_resume(images, own_home):
    assert fedcache("verify --json").code == 4
    stop_extraction(in_small_chunks(images), 8)
    (entry,) = data_of("ls")["entries"]
    for words in ("verify", "inspect", "train --method fed3r --no-extract"):
        error = must_fail_store(f"{entry['name']} (unfinished)", words)
    command = error["hint"].rpartition("fedcache extract ")[2]
    assert data_of("extract", *shlex.split(command))["arrays"][0]["kept_chunks"] > 0
    assert data_of("verify")["problems"] == []
    own_home.joinpath("last.json").unlink()
    must_fail_store(entry["name"], "verify")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("reproduce info fst-table4 --only a=b --device cpu", "--only, --device"),
        ("train --method fedavg --domain ,", "--domain ','"),
        ("extract --backbones ,", "--backbones ','"),
        ("grid --method fedavg --sweep lr=0.1 --sweep lr=0.01,0.2", "--sweep lr"),
        ("train --client-set wd=1 --client-set wd=2", "--client-set wd"),
        ("ingest x.npz --name ''", "''"),
        ("extract digits --backbones pixels --recipe size=32,size=64", "--recipe size"),
        ("reproduce nope", "'nope'"),
        ("reproduce frozen-bench --out page.json", "page.json"),
        ("reproduce fst-table4 fst-table5", "fst-table4 and fst-table5"),
        ("train --method tip-local --set tau=0.1 --set tau=0.2", "--set tau"),
        ("train --method fedavg,fedprox", "'fedavg,fedprox'"),
        ("train --method fedavg --set lr", "--set 'lr'"),
        ("ingest x.npz --name ../../x", "'../../x'"),
        ("gc --kind everything", "--kind"),
        ("gc --days -1", "--days"),
    ],
)
def test_what_would_be_ignored_or_misread_is_refused(words, said):
    must_fail(said, words)


def test_a_saved_partition_is_looked_for_before_anything_is_extracted(images, own_home):
    named = f"--dataset folder:{images} --backbones random-projection"
    said = "There is no partition 'three', because the dataset"
    must_fail_store(said, f"train --method fedavg --partition three {named}")
    assert not list(own_home.glob("stores/*"))


def test_rows_that_could_not_be_read_are_an_error_where_there_is_no_other():
    lost = Prediction("a.png", (), (), "torn")
    read = Prediction("b.png", ("cat",), (0.5,))
    for rows in ([lost], [lost, replace(lost, name="c.png")]):
        corruption(lambda rows=rows: answer_of(rows), "a.png")
    assert [row["name"] for row in answer_of([lost, read]).data["rows"]] == ["a.png", "b.png"]


def answer_of(rows):
    answer = Answer(True)
    assert list(answer.counting(rows)) == rows
    return predictions_answer(answer, 1, None, calibrated=True)


@pytest.mark.slow
@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&-", "<&- >&- 2>&-"])
@pytest.mark.parametrize("words", [("runs", "list"), ("--help",), ("new", "method", "mine")])
def test_a_closed_stream_is_no_error_and_nothing_is_written_into_a_file(
    own_home, closed, words, here
):
    code, _, err = piped(own_home, closed, *words)
    assert code == 0, err
    assert "Traceback" not in err
    if words[0] == "new":
        assert Path("mine/pyproject.toml").read_text(encoding="utf-8").startswith("[build-system]")
