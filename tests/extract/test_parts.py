"""``extract --part i/n`` and ``join``: the bytes of one process, whoever computed the parts, and every refusal."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from command import Done, fedcache, ok
from filelock import FileLock
from pictures import folder
from toy_store import content

import fedcache as fc
from fedcache.config import ExtractConfig, Home
from fedcache.errors import Exit, FedcacheError
from fedcache.extract import extract_dataset as extraction
from fedcache.extract.planning.parts import parse_part
from fedcache.process import Stop
from fedcache.progress import Silent
from fedcache.store.join import rows_of_part
from fedcache.store.manifest import StorePart
from fedcache.store.store import Store, finished_arrays
from fedcache.store.writer import ArrayWriter

SMALL = "--backbones random-projection --batch 4 --chunk-rows 8 --workers 0"


@pytest.fixture
def images(tmp_path: Path) -> Path:
    return folder(tmp_path / "shapes")


def part(images: Path, store: Path, which: str, *more: object, options: str = SMALL) -> Done:
    return fedcache(
        f"extract --dataset folder:{images} {options} --store {store} --part {which} --json", *more
    )


def parts(images: Path, store: Path, count: int, options: str = SMALL) -> list[Path]:
    """The folders of all parts."""
    made = []
    for number in range(1, count + 1):
        done = part(images, store, f"{number}/{count}", options=options)
        assert done.code in (Exit.OK, Exit.QUARANTINED), done.err + done.out
        made.append(Path(done.data["path"]))
    return made


def joined(made: list[Path], out: Path, *more: object) -> Done:
    return fedcache("join", *made, "-o", out, *more, "--json")


def test_the_chunks_of_all_parts_are_all_chunks_once() -> None:
    for count in range(1, 12):
        for of in range(1, 15):
            found = [chunk for i in range(1, of + 1) for chunk in StorePart(i, of).chunks(count)]
            assert found == list(range(count))


@pytest.mark.slow
def test_parts_and_a_join_give_the_bytes_of_one_process(images: Path, tmp_path: Path) -> None:
    """Two backbones with chunks of different sizes, and images that cannot be read in three of the four parts."""
    for broken in ("test/ant/000.png", "train/10/003.png", "train/zebra/011.png"):
        (images / broken).write_bytes(b"no picture")
    whole = tmp_path / "whole.zarr"
    for backbone, chunk in (("random-projection", 8), ("pixels", 16)):
        options = f"--backbones {backbone} --size 16 --batch 4 --chunk-rows {chunk} --workers 0 --max-bad 3"
        one = fedcache(f"extract --dataset folder:{images} {options} --store {whole} --json")
        assert one.code == Exit.QUARANTINED, one.err
        made = parts(images, tmp_path / "x.zarr", 4, options)
    # Of 6 and of 3 chunks.
    held = [[a["chunks"] for a in ok("inspect", place).data["arrays"]] for place in made]
    assert held == [[0, 1], [1, 2], [1, 1], [1, 2]]
    assert [rows_of_part(Store.open(p, part=True))[0] for p in made] == [8, 24, 16, 16]
    assert [p.name for p in made] == [f"x.part-{i}-of-4.zarr" for i in (1, 2, 3, 4)]
    out = tmp_path / "out.zarr"
    done = joined([made[2], made[0], made[3], made[1]], out, "--max-bad", 3)
    assert done.code == Exit.QUARANTINED, done.err + done.out
    assert content(out) == content(whole)
    assert done.data["ok"] == 45
    # Again, and with parts that are gone: what is there is whole.
    assert joined(made, out, "--max-bad", 3).code == Exit.QUARANTINED
    for place in made:
        shutil.rmtree(place)
    assert content(out) == content(whole)
    assert fedcache("verify", out).code == 0


@pytest.mark.slow
def test_parts_of_small_chunks_and_more_parts_than_chunks(images: Path, tmp_path: Path) -> None:
    whole = ok(f"extract --dataset folder:{images} {SMALL}").data["path"]
    made = parts(images, tmp_path / "x.zarr", 7)  # of 6 chunks
    assert [ok("inspect", p).data["arrays"][0]["chunks"] for p in made] == [0, 1, 1, 1, 1, 1, 1]
    done = joined(made, tmp_path / "out.zarr")
    assert done.code == 0, done.err + done.out
    assert content(tmp_path / "out.zarr") == content(Path(whole))


class StopAfter(Silent):
    """Asks to stop once so many images were extracted."""

    def __init__(self, images: int) -> None:
        self.left = images
        self.flag = Stop()
        self.what = ""

    def start(self, what: str, total: int, unit: str) -> None:
        self.what = what

    def advance(self, units: int) -> None:
        if self.what == "extracting":
            self.left -= units
        if self.left <= 0:
            self.flag.ask()


@pytest.mark.slow
def test_interrupted_parts_from_other_paths_and_homes_join_to_the_same_bytes(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = tmp_path / "whole.zarr"
    ok(f"extract --dataset folder:{images} {SMALL} --store {whole}")
    elsewhere = tmp_path / "scratch" / "pictures of node 2"
    shutil.copytree(images, elsewhere)
    made = []
    for number in (1, 2):
        home = Home(tmp_path / f"home-{number}")
        config = ExtractConfig(
            dataset=f"folder:{images if number == 1 else elsewhere}",
            backbones=("random-projection",),
            batch=4,
            chunk_rows=8,
            workers=0,
            part=f"{number}/2",
        )
        for _ in range(2):
            observer = StopAfter(4)
            with pytest.raises(FedcacheError) as caught:
                extraction.extract(config, home, observer=observer, stop=observer.flag)
            assert caught.value.code is Exit.INTERRUPTED
            (begun,) = home.stores.glob("*.zarr")
            refused = joined([*made, begun], tmp_path / "early.zarr")
            assert refused.code == Exit.STORE
            assert not (tmp_path / "early.zarr").exists()
        done = extraction.extract(config, home)
        assert (done.arrays[0]["kept_chunks"], done.arrays[0]["chunks"]) == (2, 3)
        made.append(done.path)
        assert extraction.extract(config, home).decoded == 0
    assert [p.name[:3] for p in made] == ["sha", "pic"]
    monkeypatch.setenv("FEDCACHE_HOME", str(tmp_path / "home-1"))
    done = fedcache("join", *made, "--json")
    assert done.code == 0, done.err + done.out
    place = Path(done.data["path"])
    assert place.parent == tmp_path / "home-1" / "stores"
    assert content(place) == content(whole)
    # The home knows the dataset, whose store is found by its name, and by commands that name none.
    assert ok("inspect").data["path"] == str(place)
    again = ok(f"extract --dataset folder:{images} {SMALL}")
    assert (again.data["path"], again.data["decoded"]) == (str(place), 0)
    # A task that is submitted again finds that all is there.
    late = ok(f"extract --dataset folder:{images} {SMALL} --part 2/2")
    assert (late.data["path"], late.data["part"]) == (str(place), None)


@pytest.mark.slow
def test_text_features_are_those_of_the_first_part(tmp_path: Path) -> None:
    command = (
        "extract --dataset digits --limit 40 --backbones glyph-clip --batch 4 --chunk-rows 8 --workers 0"
        " --text 'a {}.' --text 'the digit {}.'"
    )
    whole = Path(ok(command, "--store", tmp_path / "whole.zarr").data["path"])
    made = [
        Path(ok(command, "--store", tmp_path / "x.zarr", "--part", f"{i}/3").data["path"])
        for i in (1, 2, 3)
    ]
    assert [ok("inspect", p).data["text"] for p in made] == [["glyph-clip"], [], []]
    ok("join", *made, "-o", tmp_path / "out.zarr")
    assert content(tmp_path / "out.zarr") == content(whole)
    # The store is trained on like any other.
    ok("train --method clip-zs --clients 2", "--store", tmp_path / "out.zarr")


@pytest.mark.slow
def test_a_changed_dataset_is_computed_in_full_by_parts(images: Path, tmp_path: Path) -> None:
    ok(f"extract --dataset folder:{images} {SMALL}")
    for image in sorted(images.rglob("*.png"))[-3:]:
        shutil.copy(image, image.with_name(f"new-{image.name}"))
        image.unlink()
    fresh = ok(f"extract --dataset folder:{images} {SMALL} --fresh --store {tmp_path / 'f.zarr'}")
    made = [
        Path(ok(f"extract --dataset folder:{images} {SMALL} --part {i}/2").data["path"])
        for i in (1, 2)
    ]
    done = ok("join", *made)
    assert content(Path(done.data["path"])) == content(Path(fresh.data["path"]))


@pytest.mark.slow
def test_a_part_is_never_a_store(images: Path, tmp_path: Path) -> None:
    (first,) = parts(images, tmp_path / "home" / "stores" / "x.zarr", 1)
    for line in (
        "train --method fedavg --store",
        "export f.npz --store",
        "partition --scheme iid --store",
    ):
        refused = fedcache(line, first, "--json")
        assert refused.code == Exit.STORE, line
        assert "part 1 of 1" in refused.envelope["error"]["message"]
        assert "fedcache join" in refused.envelope["error"]["hint"]
    into = fedcache(f"extract --dataset folder:{images} {SMALL} --store {first} --json")
    assert into.code == Exit.STORE
    assert "holds part 1 of 1, not a whole store" in into.envelope["error"]["message"]
    (entry,) = ok("ls").data["entries"]
    assert (entry["part"], len(entry["arrays"])) == ([1, 1], 1)
    assert "part 1 of 1" in fedcache("ls").out
    seen = ok("inspect", first).data
    assert (seen["part"], seen["unfinished"]) == ([1, 1], [])
    assert "fedcache join" in fedcache("inspect", first).out
    assert fedcache("verify", first).code == 0
    assert fedcache("inspect").code == Exit.STORE  # the last extraction is none
    assert "(part 1 of 1)" in fedcache("inspect").err
    # Nothing that was extracted is passed over for the dataset of a home without any.
    assert fedcache("train --method fedavg").code == Exit.STORE
    assert fedcache(f"extract {SMALL} --part 2/2").code == Exit.USAGE
    ok("gc", "--delete")
    assert joined([first], tmp_path / "out.zarr").code == 0


def test_a_folder_of_another_kind_is_refused_before_anything_is_computed(
    images: Path, tmp_path: Path
) -> None:
    whole = tmp_path / "x.part-1-of-2.zarr"
    store = Path(ok(f"extract --dataset folder:{images} {SMALL}").data["path"])
    shutil.copytree(store, whole)
    shutil.rmtree(store)
    done = part(images, tmp_path / "x.zarr", "1/2")
    assert done.code == Exit.STORE
    assert "holds a whole store, not part 1 of 2" in done.envelope["error"]["message"]
    named = part(images, whole, "1/2")
    assert named.code == Exit.USAGE
    cut = part(images, tmp_path / "y.zarr", "1/2", "--partition", "iid")
    assert cut.code == Exit.USAGE


def refusal(done: Done) -> str:
    assert done.code == Exit.STORE, done.err + done.out
    message: str = done.envelope["error"]["message"]
    assert "\n" not in message
    return message


@pytest.mark.slow
def test_parts_that_do_not_belong_together_are_refused_by_name(
    images: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out.zarr"
    one, two = parts(images, tmp_path / "x.zarr", 2)
    assert refusal(joined([two], out)) == "1 of 2 parts are missing: 1."
    copy = shutil.copytree(two, tmp_path / "copy.zarr")
    message = refusal(joined([one, two, copy], out))
    assert message == f"Part 2 of 2 is given 2 times: {two} and {copy}."
    assert str(tmp_path / "no.zarr") in refusal(joined([one, tmp_path / "no.zarr"], out))
    (third, *_) = parts(images, tmp_path / "y.zarr", 3)
    message = refusal(joined([one, two, third], out))
    assert message == f"{third} is part 1 of 3, and {one} is part 1 of 2."
    options = SMALL.replace("random-projection", "random-projection,pixels --size 16")
    more = part(images, tmp_path / "more.zarr", "2/2", options=options)
    message = refusal(joined([one, Path(more.data["path"])], out))
    assert "has pixels-" in message or "random-projection by another recipe" in message
    sized = part(images, tmp_path / "sized.zarr", "2/2", "--size", 16)
    message = refusal(joined([one, Path(sized.data["path"])], out))
    assert f"has random-projection by another recipe than {one}: size 16 and not" in message
    threads = part(images, tmp_path / "how.zarr", "2/2", "--threads", 2)
    message = refusal(joined([one, Path(threads.data["path"])], out))
    assert message.endswith(f"in another way than {one}: threads is 2 and not 1.")
    (images / "train" / "ant" / "000.png").unlink()
    other = part(images, tmp_path / "data.zarr", "2/2")
    message = refusal(joined([one, Path(other.data["path"])], out))
    assert "is of another dataset (shapes, 47 rows" in message
    store = Path(ok(f"extract --dataset folder:{images} {SMALL}").data["path"])
    assert "is a whole store" in refusal(joined([one, store], out))
    assert not out.exists()
    # A copy in the place of a part, the part computed elsewhere, is that part.
    assert joined([one, copy], out).code == 0
    assert "holds shapes" in refusal(joined([one, copy], store))


@pytest.mark.slow
def test_a_damaged_part_is_named_and_its_command_makes_only_that_again(
    images: Path, tmp_path: Path
) -> None:
    whole = Path(ok(f"extract --dataset folder:{images} {SMALL}").data["path"])
    out = tmp_path / "out.zarr"
    made = parts(images, tmp_path / "x.zarr", 2)
    (chunk,) = made[1].glob("features/*/c/4/0/0")
    chunk.write_bytes(chunk.read_bytes()[:-1] + b"?")
    refused = joined(made, out)
    assert refused.code == Exit.CORRUPT
    assert f"{made[1]} (part 2 of 2) is damaged" in refused.envelope["error"]["message"]
    assert Store.open(out).arrays == {}
    again = part(images, tmp_path / "x.zarr", "2/2")
    assert (again.data["decoded"], again.data["arrays"][0]["kept_chunks"]) == (8, 2)
    (gone,) = made[1].glob("features/*/c/5/0/0")
    kept = gone.read_bytes()
    gone.unlink()
    assert joined(made, out).code == Exit.CORRUPT
    gone.write_bytes(kept)
    assert joined(made, out).code == 0
    assert content(out) == content(whole)
    (made[0] / "manifest.json").write_bytes(b"{}")
    assert joined(made, tmp_path / "more.zarr").code == Exit.CORRUPT


@pytest.mark.slow
def test_an_interrupted_join_goes_on(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = Path(ok(f"extract --dataset folder:{images} {SMALL}").data["path"])
    made = parts(images, tmp_path / "x.zarr", 2)
    out = tmp_path / "out.zarr"
    adopt = ArrayWriter.adopt
    taken: list[int] = []

    def until_the_third(self: ArrayWriter, chunk: int, *rest: Any) -> None:
        if len(taken) == 2:
            raise KeyboardInterrupt
        taken.append(chunk)
        adopt(self, chunk, *rest)

    monkeypatch.setattr(ArrayWriter, "adopt", until_the_third)
    assert joined(made, out).code == Exit.INTERRUPTED
    assert Store.open(out).arrays == {}
    assert fedcache("train --method fedavg --no-extract --store", out).code == Exit.STORE
    monkeypatch.setattr(
        ArrayWriter, "adopt", lambda s, c, *rest: taken.append(c) or adopt(s, c, *rest)
    )
    assert joined(made, out).code == 0
    assert sorted(taken) == [0, 1, 2, 3, 4, 5]  # none twice
    assert content(out) == content(whole)


@pytest.mark.slow
def test_too_many_unreadable_images_of_all_parts_together_are_refused(
    images: Path, tmp_path: Path
) -> None:
    for name in ("test/ant/000.png", "train/zebra/011.png"):
        (images / name).write_bytes(b"no picture")
    made = parts(images, tmp_path / "x.zarr", 2, f"{SMALL} --max-bad 1")
    refused = joined(made, tmp_path / "out.zarr", "--max-bad", 1)
    assert refused.code == Exit.CORRUPT
    assert "2 rows of all parts could not be read" in refused.envelope["error"]["message"]
    assert not (tmp_path / "out.zarr").exists()
    assert joined(made, tmp_path / "out.zarr", "--max-bad", "5%").code == Exit.QUARANTINED


@pytest.mark.slow
def test_the_python_api_joins_stores_and_paths(images: Path, tmp_path: Path) -> None:
    words: dict[str, Any] = {"batch": 4, "chunk_rows": 8, "workers": 0}
    whole = fc.extract(f"folder:{images}", "random-projection", store=tmp_path / "w.zarr", **words)
    made = [
        fc.extract(f"folder:{images}", "random-projection", part=f"{i}/2", **words) for i in (1, 2)
    ]
    assert made[0].arrays == {}
    store = fc.join([made[0], made[1].path], store=tmp_path / "out.zarr")
    assert content(store.path) == content(whole.path)
    with pytest.raises(FedcacheError, match="1 of 2 parts are missing: 2"):
        fc.join([made[0]])
    with pytest.raises(FedcacheError, match="No part was named"):
        fc.join([])


def variables(monkeypatch: pytest.MonkeyPatch, **values: object) -> None:
    for name in list(os.environ):
        if name.startswith("SLURM_ARRAY") or name in ("RANK", "WORLD_SIZE"):
            monkeypatch.delenv(name)
    for name, value in values.items():
        monkeypatch.setenv(name, str(value))


def array(
    number: object, first: object, last: object, count: object, step: object = 1
) -> dict[str, object]:
    named = {"ID": number, "MIN": first, "MAX": last, "COUNT": count, "STEP": step}
    return {f"SLURM_ARRAY_TASK_{name}": value for name, value in named.items()}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (array(0, 0, 3, 4), StorePart(1, 4)),
        (array(4, 1, 4, 4), StorePart(4, 4)),
        (array(5, 1, 9, 3, 4), StorePart(2, 3)),
        ({"RANK": 0, "WORLD_SIZE": 1}, StorePart(1, 1)),
        ({"RANK": 7, "WORLD_SIZE": 8, "LOCAL_RANK": 3}, StorePart(8, 8)),
    ],
)
def test_auto_reads_the_variables_of_a_job_and_says_which(
    given: dict[str, object], expected: StorePart, monkeypatch: pytest.MonkeyPatch
) -> None:
    variables(monkeypatch, **given)
    notes: list[str] = []

    class Listener(Silent):
        def note(self, text: str) -> None:
            notes.append(text)

    assert parse_part("auto", Listener()) == expected
    (note,) = notes
    assert next(iter(given)) in note
    assert f"part {expected.number} of {expected.of}" in note


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"RANK": 0},
        {"RANK": 4, "WORLD_SIZE": 4},
        {"RANK": "x", "WORLD_SIZE": 4},
        {**array(0, 0, 3, 4), "RANK": 0, "WORLD_SIZE": 2},
        array(3, 3, 3, 1),  # one task of an array that was submitted again
        array(3, 1, 7, 3),  # --array=1,3,7
        array(2, 1, 9, 3, 4),
        array(9, 1, 4, 4),
        {"SLURM_ARRAY_TASK_ID": 1},
    ],
)
def test_auto_is_refused_where_the_variables_say_no_part(
    given: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    variables(monkeypatch, **given)
    with pytest.raises(FedcacheError, match="--part auto") as refused:
        parse_part("auto", Silent())
    assert refused.value.code is Exit.USAGE


@pytest.mark.parametrize("text", ["0/4", "5/4", "1/0", "1", "a/b", "-1/4", "1/4/2", "", "1.5/4"])
def test_what_is_no_part_is_refused(text: str) -> None:
    with pytest.raises(FedcacheError, match="expected i/n"):
        parse_part(text, Silent())


def test_variables_of_a_job_mean_nothing_without_the_option(
    images: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    variables(monkeypatch, RANK=1, WORLD_SIZE=2, **array(2, 1, 2, 2))
    done = ok(f"extract --dataset folder:{images} {SMALL}")
    assert (done.data["part"], done.data["decoded"]) == (None, 48)


@pytest.mark.slow
def test_a_second_process_is_told_of_parts(images: Path, tmp_path: Path) -> None:
    done = ok(f"extract --dataset folder:{images} {SMALL} --part 1/2")
    place = Path(done.data["path"])
    (key,) = finished_arrays(Store.open(place, part=True))
    again = f"extract --dataset folder:{images} {SMALL} --part 1/2 --fresh --json"
    with FileLock(place / "locks" / f"{key}.lock"):
        refused = fedcache(again)
    assert refused.code == Exit.STORE
    assert "fedcache extract --part 1/2" in refused.envelope["error"]["hint"]
    assert ok(again).data["decoded"] == 24


def test_a_dry_run_of_a_part_names_its_folder(images: Path, tmp_path: Path) -> None:
    done = part(images, tmp_path / "x.zarr", "2/4", "--dry-run")
    assert done.code == 0, done.err
    assert done.data["path"].endswith("x.part-2-of-4.zarr")
    assert not Path(done.data["path"]).exists()
