"""``extract --part i/n`` and ``join``: the bytes of one process, whoever computed the parts, and every refusal."""

import os
import shutil
from pathlib import Path

import pytest
from command import data_of, fedcache, ok
from failing_command import must_fail, must_fail_corrupt, must_fail_store
from heard import Heard
from made_path import place_of
from refusal import refused, store_error
from stopped_extraction import in_small_chunks, stop_extraction
from toy_store import content

import fedcache as fc
from fedcache.config import Home
from fedcache.errors import Exit
from fedcache.extract import extract_dataset as extraction
from fedcache.extract.planning.parts import parse_part
from fedcache.progress import Silent
from fedcache.store.join import rows_of_part
from fedcache.store.manifest import StorePart

SMALL = "--backbones random-projection --batch 4 --chunk-rows 8 --workers 0"


def part(images, store, which, *more, options=SMALL):
    return fedcache(
        f"extract --dataset folder:{images} {options} --store {store} --part {which} --json", *more
    )


def parts(images, store, count, options=SMALL):
    """The folders of all parts."""
    made = []
    for number in range(1, count + 1):
        done = part(images, store, f"{number}/{count}", options=options)
        assert done.code in (Exit.OK, Exit.QUARANTINED)
        made.append(Path(done.data["path"]))
    return made


def joined(made, out, *more):
    return fedcache("join", *made, "-o", out, *more, "--json")


def test_the_chunks_of_all_parts_are_all_chunks_once():
    for count in range(1, 12):
        for of in range(1, 15):
            found = [chunk for i in range(1, of + 1) for chunk in StorePart(i, of).chunks(count)]
            assert found == list(range(count))


@pytest.mark.slow
def test_parts_and_a_join_give_the_bytes_of_one_process(images, tmp_path):
    """Two backbones with chunks of different sizes, and images that cannot be read in three of the four parts."""
    for broken in ("test/ant/000.png", "train/10/003.png", "train/zebra/011.png"):
        (images / broken).write_bytes(b"no picture")
    whole = tmp_path / "whole.zarr"
    for backbone, chunk in (("random-projection", 8), ("pixels", 16)):
        options = f"--backbones {backbone} --size 16 --batch 4 --chunk-rows {chunk} --workers 0 --max-bad 3"
        one = fedcache(f"extract --dataset folder:{images} {options} --store {whole} --json")
        assert one.code == Exit.QUARANTINED
        made = parts(images, tmp_path / "x.zarr", 4, options)
    # Of 6 and of 3 chunks.
    held = [[a["chunks"] for a in data_of(f"inspect {place}")["arrays"]] for place in made]
    assert held == [[0, 1], [1, 2], [1, 1], [1, 2]]
    assert [rows_of_part(fc.Store.open(p, part=True))[0] for p in made] == [8, 24, 16, 16]
    assert [p.name for p in made] == [f"x.part-{i}-of-4.zarr" for i in (1, 2, 3, 4)]
    out = tmp_path / "out.zarr"
    done = joined([made[2], made[0], made[3], made[1]], out, "--max-bad", 3)
    assert done.code == Exit.QUARANTINED
    assert content(out) == content(whole)
    assert done.data["ok"] == 45
    # Again, and with parts that are gone: what is there is whole.
    assert joined(made, out, "--max-bad", 3).code == Exit.QUARANTINED
    for place in made:
        shutil.rmtree(place)
    assert content(out) == content(whole)
    ok(f"verify {out}")


@pytest.mark.slow
def test_interrupted_parts_from_other_paths_and_homes_join_to_the_same_bytes(
    images, tmp_path, monkeypatch
):
    whole = tmp_path / "whole.zarr"
    ok(f"extract --dataset folder:{images} {SMALL} --store {whole}")
    elsewhere = tmp_path / "scratch/pictures of node 2"
    shutil.copytree(images, elsewhere)
    made = []
    for number in (1, 2):
        home = Home(tmp_path / f"home-{number}")
        config = in_small_chunks(images if number == 1 else elsewhere, part=f"{number}/2")
        for _ in range(2):
            stop_extraction(config, 4, home)
        done = extraction.extract(config, home)
        assert done.arrays[0]["kept_chunks"] == 2
        assert done.arrays[0]["chunks"] == 3
        made.append(done.path)
        assert extraction.extract(config, home).decoded == 0
    assert [p.name[:3] for p in made] == ["sha", "pic"]
    monkeypatch.setenv("FEDCACHE_HOME", f"{tmp_path}/home-1")
    place = place_of("join", *made)
    assert place.parent == tmp_path / "home-1/stores"
    assert content(place) == content(whole)
    # The home knows the dataset, whose store is found by its name, and by commands that name none.
    assert data_of("inspect")["path"] == str(place)
    again = data_of(f"extract --dataset folder:{images} {SMALL}")
    assert again["path"] == str(place)
    assert again["decoded"] == 0
    # A task that is submitted again finds that all is there.
    late = data_of(f"extract --dataset folder:{images} {SMALL} --part 2/2")
    assert late["path"] == str(place)
    assert late["part"] is None


@pytest.mark.slow
def test_text_features_are_those_of_the_first_part(tmp_path):
    command = (
        "extract --dataset digits --limit 40 --backbones glyph-clip --batch 4 --chunk-rows 8 --workers 0"
        " --text 'a {}.' --text 'the digit {}.'"
    )
    whole = place_of(f"{command} --store {tmp_path}/whole.zarr")
    made = [place_of(f"{command} --store {tmp_path}/x.zarr --part {i}/3") for i in (1, 2, 3)]
    assert [data_of(f"inspect {p}")["text"] for p in made] == [["glyph-clip"], [], []]
    (damaged,) = made[0].glob("text/glyph-clip/*/c/0/0")
    damaged.unlink()
    error = must_fail_corrupt("text", "join", *made, "-o", tmp_path / "out.zarr")
    assert f"fedcache repair {made[0]}" in error["hint"]
    ok(f"repair {made[0]}")
    assert data_of(f"{command} --store {tmp_path}/x.zarr --part 1/3")["decoded"] == 0
    ok("join", *made, "-o", tmp_path / "out.zarr")
    assert content(tmp_path / "out.zarr") == content(whole)
    # The store is trained on like any other.
    ok(f"train --method clip-zs --clients 2 --store {tmp_path}/out.zarr")


@pytest.mark.slow
def test_a_changed_dataset_is_computed_in_full_by_parts(images, tmp_path):
    ok(f"extract --dataset folder:{images} {SMALL}")
    for image in sorted(images.rglob("*.png"))[-3:]:
        shutil.copy(image, image.with_name(f"new-{image.name}"))
        image.unlink()
    fresh = data_of(
        f"extract --dataset folder:{images} {SMALL} --fresh --store {tmp_path / 'f.zarr'}"
    )
    made = [place_of(f"extract --dataset folder:{images} {SMALL} --part {i}/2") for i in (1, 2)]
    assert content(place_of("join", *made)) == content(Path(fresh["path"]))


@pytest.mark.slow
def test_a_part_is_never_a_store(images, tmp_path):
    (first,) = parts(images, tmp_path / "home/stores/x.zarr", 1)
    quarter = part(images, tmp_path / "y.zarr", "1/4")
    assert "repeats at most 8 images" in quarter.err  # its only chunk
    for line in (
        "train --method fedavg --store",
        "export f.npz --store",
        "partition --scheme iid --store",
    ):
        assert "part 1 of 1" in refusal(fedcache(f"{line} {first} --json"))
    into = fedcache(f"extract --dataset folder:{images} {SMALL} --store {first} --json")
    assert "contains part 1 of 1, not a whole store" in refusal(into)
    (entry,) = data_of("ls")["entries"]
    assert entry["part"] == [1, 1]
    assert len(entry["arrays"]) == 1
    seen = data_of(f"inspect {first}")
    assert seen["part"] == [1, 1]
    assert seen["unfinished"] == []
    ok(f"verify {first}")
    assert fedcache("inspect").code == Exit.STORE  # the last extraction is none
    # Nothing that was extracted is passed over for the dataset of a home without any.
    assert fedcache("train --method fedavg").code == Exit.STORE
    must_fail("", f"extract {SMALL} --part 2/2")
    ok("gc --delete")
    assert joined([first], tmp_path / "out.zarr").code == 0


def test_the_dataset_of_parts_that_are_not_joined_yet_leads_to_the_join(images):
    ok(f"extract --dataset folder:{images} {SMALL} --part 1/2")
    for named in ("--store {name}", "--dataset {name}", f"--dataset folder:{images}", ""):
        line = "train --method fedavg --no-extract " + named.format(name=images.name)
        said = must_fail_store("part 1 of 2", line)
        assert f"fedcache join {Home.from_environment().stores}/{images.name}-" in said["hint"]


def test_a_folder_of_another_kind_is_refused_before_anything_is_computed(images, tmp_path):
    whole = tmp_path / "x.part-1-of-2.zarr"
    store = place_of(f"extract --dataset folder:{images} {SMALL}")
    shutil.copytree(store, whole)
    shutil.rmtree(store)
    done = part(images, tmp_path / "x.zarr", "1/2")
    assert "contains a whole store, not part 1 of 2" in refusal(done)
    assert part(images, whole, "1/2").code == Exit.USAGE
    assert part(images, tmp_path / "y.zarr", "1/2", "--partition", "iid").code == Exit.USAGE


def refusal(done, code=Exit.STORE):
    assert done.code == code
    message = done.error["message"]
    assert "\n" not in message
    return message


@pytest.mark.slow
def test_parts_that_do_not_belong_together_are_refused_by_name(images, tmp_path):
    out = tmp_path / "out.zarr"
    one, two = parts(images, tmp_path / "x.zarr", 2)
    assert refusal(joined([two], out)) == "1 of 2 parts are missing: 1."
    copy = shutil.copytree(two, tmp_path / "copy.zarr")
    message = refusal(joined([one, two, copy], out))
    assert message == f"Part 2 of 2 is given 2 times: {two} and {copy}."
    assert f"{tmp_path}/no.zarr" in refusal(joined([one, tmp_path / "no.zarr"], out))
    for name, which, options, said in (
        ("y", "1/3", "", f"y.part-1-of-3.zarr is part 1 of 3, but {one} is part 1 of 2."),
        ("more", "2/2", "--backbones pixels", "pixels"),
        ("sized", "2/2", "--size 16", f"with another recipe than {one}: size is 16 instead of"),
    ):
        other = part(images, tmp_path / f"{name}.zarr", which, options=f"{SMALL} {options}")
        assert said in refusal(joined([one, other.data["path"]], out))
    (images / "train/ant/000.png").unlink()
    other = part(images, tmp_path / "data.zarr", "2/2").data["path"]
    assert "belongs to another dataset (shapes, 47 rows" in refusal(joined([one, other], out))
    store = place_of(f"extract --dataset folder:{images} {SMALL}")
    assert "is a whole store" in refusal(joined([one, store], out))
    assert not out.exists()
    # A copy in the place of a part, the part computed elsewhere, is that part.
    assert joined([one, copy], out).code == 0
    assert "contains shapes" in refusal(joined([one, copy], store))


@pytest.mark.slow
def test_a_damaged_part_is_named_and_its_command_makes_only_that_again(images, tmp_path):
    whole = place_of(f"extract --dataset folder:{images} {SMALL}")
    out = tmp_path / "out.zarr"
    made = parts(images, tmp_path / "x.zarr", 2)
    (chunk,) = made[1].glob("features/*/c/4/0/0")
    chunk.write_bytes(chunk.read_bytes()[:-1] + b"?")
    assert f"{made[1]} (part 2 of 2) is damaged" in refusal(joined(made, out), Exit.CORRUPT)
    damaged = fedcache("verify", made[1])
    assert damaged.code == Exit.CORRUPT
    assert "extract command of part 2 of 2" in damaged.out + damaged.err
    assert fc.Store.open(out).arrays == {}
    again = part(images, tmp_path / "x.zarr", "2/2")
    assert again.data["decoded"] == 8
    assert again.data["arrays"][0]["kept_chunks"] == 2
    assert joined(made, out).code == 0
    assert content(out) == content(whole)
    # A store that has all chunks already says nothing about the parts.
    (chunk,) = made[0].glob("features/*/c/1/0/0")
    chunk.unlink()
    message = refusal(joined(made, out), Exit.CORRUPT)
    assert f"{made[0]} (part 1 of 2) is damaged: chunk 1" in message
    other = parts(images, tmp_path / "y.zarr", 2, SMALL.replace("--batch 4", "--batch 8"))
    assert "other settings or versions than the parts: batch" in refusal(joined(other, out), 4)
    (made[0] / "manifest.json").write_bytes(b"{}")
    assert joined(made, tmp_path / "more.zarr").code == Exit.CORRUPT


@pytest.mark.slow
def test_too_many_unreadable_images_of_all_parts_together_are_refused(images, tmp_path):
    for name in ("test/ant/000.png", "train/zebra/011.png"):
        (images / name).write_bytes(b"no picture")
    made = parts(images, tmp_path / "x.zarr", 2, f"{SMALL} --max-bad 1")
    few = joined(made, tmp_path / "out.zarr", "--max-bad", 1)
    assert "2 rows of all parts could not be read" in refusal(few, Exit.CORRUPT)
    assert not (tmp_path / "out.zarr").exists()
    assert joined(made, tmp_path / "out.zarr", "--max-bad", "5%").code == Exit.QUARANTINED


@pytest.mark.slow
def test_the_python_api_joins_stores_and_paths(images, tmp_path):
    words = {"batch": 4, "chunk_rows": 8, "workers": 0}
    made = [
        fc.extract(f"folder:{images}", "random-projection", part=f"{i}/2", **words) for i in (1, 2)
    ]
    assert made[0].arrays == {}
    assert fc.join([made[0], made[1].path], store=tmp_path / "out.zarr").rows_ok == 48
    store_error(lambda: fc.join([made[0]]), "1 of 2 parts are missing: 2")
    refused(lambda: fc.join([]), "No part was given")


def variables(monkeypatch, **values):
    for name in list(os.environ):
        if name.startswith("SLURM_ARRAY") or name in ("RANK", "WORLD_SIZE"):
            monkeypatch.delenv(name)
    for name, value in values.items():
        monkeypatch.setenv(name, str(value))


def array(number, first, last, count, step=1):
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
def test_auto_reads_the_variables_of_a_job_and_says_which(given, expected, monkeypatch):
    variables(monkeypatch, **given)
    heard = Heard()
    assert parse_part("auto", heard) == expected
    (note,) = heard.notes
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
def test_auto_is_refused_where_the_variables_say_no_part(given, monkeypatch):
    variables(monkeypatch, **given)
    refused(lambda: parse_part("auto", Silent()), "--part auto")


@pytest.mark.parametrize("text", ["0/4", "5/4", "1/0", "1", "a/b", "-1/4", "1/4/2", "", "1.5/4"])
def test_what_is_no_part_is_refused(text):
    refused(lambda: parse_part(text, Silent()), "expected i/n")


def test_variables_of_a_job_mean_nothing_without_the_option(images, monkeypatch):
    variables(monkeypatch, RANK=1, WORLD_SIZE=2, **array(2, 1, 2, 2))
    done = data_of(f"extract --dataset folder:{images} {SMALL}")
    assert done["part"] is None
    assert done["decoded"] == 48


def test_a_part_without_chunks_says_so_and_is_joined(images, tmp_path):
    made = parts(images, tmp_path / "x.zarr", 7)
    line = f"extract --dataset folder:{images} {SMALL} --store {tmp_path}/x.zarr --part 1/7"
    assert "part 1 of 7 holds no images" in fedcache(line).out
    assert joined(made, tmp_path / "out.zarr").code == 0


def test_a_dry_run_of_a_part_names_its_folder(images, tmp_path):
    # The numbers of the part: 12 of 48 images in chunks of 4, of 64 numbers of 2 bytes.
    done = part(images, tmp_path / "x.zarr", "2/4", "--dry-run", "--chunk-rows", 4)
    assert done.data["images"] == 12
    assert done.data["arrays"][0]["bytes"] == 12 * 64 * 2
    assert done.data["path"].endswith("x.part-2-of-4.zarr")
    assert not Path(done.data["path"]).exists()
    # Chunks of 8 cannot be divided evenly: 1, 2, 1 and 2 of 6.
    sizes = [
        part(images, tmp_path / "x.zarr", f"{i}/4", "--dry-run").data["images"] for i in range(1, 5)
    ]
    assert sizes == [8, 16, 8, 16]
