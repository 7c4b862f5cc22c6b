"""Tables that are written in an odd way: what is refused says what to do, and what it says to do works."""

import io
import json
import re
import shlex
import tarfile
from decimal import Decimal

import numpy as np
import pyarrow as pa
import pytest
from command import fedcache, ok
from command_lines import COMMANDS
from hypothesis import example, given
from hypothesis import strategies as st
from opened import open_dataset
from refusal import refused
from test_doors import (
    DOORS,
    FEATURES,
    IMAGES,
    OF_ARRAYS,
    PNGS,
    ROWS,
    TEXTS,
    TWO,
    column,
    extraction,
    list_of_images,
    of_dataset,
    of_embeddings,
    read_file,
    samples_of,
    through,
    unreadable,
    write_h5,
    write_npz,
)

from fedcache.errors import Exit, FedcacheError, UsageError
from fedcache.extract.digests import DigestMemory
from fedcache.parsing import in_a_list, listed
from fedcache.store.store import Store
from fedcache.tables.roles import ColumnChoice


def options_of(command):
    found = COMMANDS.commands[command]
    loaded = found.load() if hasattr(found, "load") else found
    return {name for option in loaded.params for name in option.opts}


def refusal(door, folder, columns, choice=None):
    with pytest.raises(FedcacheError) as caught:
        through(door, folder, columns, choice or ColumnChoice())
    return str(caught.value)


# Options that hints name


@pytest.mark.parametrize(
    "columns",
    [
        {"split": ["a", "b", "c"]},
        {"is_test": [1, 0, None]},
        {"is_test": [1, 0, 0], "is_train": [1, 1, 0]},
        {"part": ["train", "test", "val"]},
        {"domain": [0.5, 0.25, 1.0]},
        {"label": [0.5, 0.25, 1.0]},
        {"Domain": [1, 2, 3], "DOMAIN": [1, 2, 3]},
    ],
)
def test_every_option_of_a_refusal_is_one_of_the_command_that_reads_the_table(tmp_path, columns):
    table = {"label": TWO, **{name: column(*values) for name, values in columns.items()}}
    for door, (kind, _) in DOORS.items():
        said = refusal(door, tmp_path, table)
        named = set(re.findall(r"--[a-z][a-z-]+", said))
        assert named, said
        assert named <= options_of("extract" if kind else "ingest"), f"{door}: {said}"
        for name, values in columns.items():
            assert 0.25 not in values or f": {name} holds floats that are not whole" in said, door


def test_columns_and_values_are_options_of_ingest_and_extract(tmp_path):
    columns = {
        "y": column(-1, 0, 4),
        "split": column("a", "b"),
        "part": column("train", "test"),
        "hospital": column("x", "x", "y"),
    }
    write_npz(tmp_path / "i.npz", {"X": FEATURES, "images": IMAGES}, columns)
    extract = extraction(f"arrays:{tmp_path / 'i.npz'}")
    assert "--split-key" in fedcache(*extract).err
    options = ("--split-key", "part", "--no-label", "-1", "--domain-key", "hospital")
    assert samples_of(*extract, *options).domains == ("x", "y")
    assert ok("datasets", "info", extract[2], *options).data["domains"] == ["x", "y"]
    ingest = ("ingest", tmp_path / "i.npz", "--name", "mine")
    for words in ((*extract, *options), (*ingest, *options[:4])):
        samples = samples_of(*words)
        assert samples.split.tolist() == TWO
        assert (samples.classes, samples.label[:3].tolist()) == (("0", "4"), [-1, 0, 1])


# Splits in the names of arrays


@pytest.mark.parametrize("write", [write_npz, write_h5])
@pytest.mark.parametrize("name", ["y", "label", "diagnosis"])
def test_labels_without_a_split_in_their_name_stop_every_door(tmp_path, write, name):
    for kind, content, array in OF_ARRAYS:
        path = tmp_path / f"file{kind}.{'h5' if write is write_h5 else 'npz'}"
        arrays = {f"{content}_train": array[:16], f"{content}_test": array[16:]}
        write(path, arrays, {name: TWO})

        splits = f"{name}_train and {name}_test"
        unreadable(kind, path, "may be the labels", splits, "--unlabelled")
        said = ("no split in its name", splits)
        unreadable(kind, path, *said, choice=ColumnChoice(label=name))
        unreadable(kind, path, said[0], choice=ColumnChoice(groups=(name,)))
        assert read_file(kind, path, ColumnChoice(unlabelled=True)).unused == {name}
        write(path, arrays, {f"{name}_train": TWO[:16], f"{name}_test": TWO[16:]})
        assert read_file(kind, path, ColumnChoice(label=name)).classes == ("0", "1")


def test_features_of_another_name_with_a_split_in_it_are_suggested_whole(tmp_path):
    arrays = {"train_images": FEATURES[:16], "val_images": FEATURES[16:]}
    write_npz(tmp_path / "f.npz", arrays, {"train_labels": TWO[:16], "val_labels": TWO[16:]})
    words = ("ingest", tmp_path / "f.npz", "--name", "mine")
    (suggested,) = re.findall(r"--features-key \S+", fedcache(*words).err)
    samples = samples_of(*words, *suggested.split())
    assert (np.bincount(samples.split).tolist(), samples.classes) == ([16, 8], ("0", "1"))


def test_the_column_of_one_split_is_not_taken_for_all_rows(tmp_path):
    arrays = {"train_scans": FEATURES[:16], "val_scans": FEATURES[16:], "y": TWO[:16]}
    write_npz(tmp_path / "f.npz", arrays, {})
    said = ("val_scans would be left out", " scans takes the rows of all splits")
    refused(
        lambda: of_embeddings(tmp_path / "f.npz", ColumnChoice(features=("train_scans",))), *said
    )
    refused(
        lambda: of_dataset(f"rows:{tmp_path / 'f.npz'}?rows=train_scans", ColumnChoice()), *said
    )


def test_a_matrix_of_another_name_is_suggested(tmp_path):
    for name in ("clip vit", "a,b", 'the "best"'):
        write_npz(tmp_path / "f.npz", {name: FEATURES}, {"y": TWO})
        words = ("ingest", tmp_path / "f.npz", "--name", "mine", "--replace")
        (suggested,) = re.findall(r"--features-key .+", fedcache(*words).err)
        assert Store.open(ok(*words, *shlex.split(suggested)).data["path"]).rows == ROWS


@given(
    st.lists(
        st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1).filter(
            lambda word: word.strip()
        )
    )
)
@example(["a,b", '"q"', 'the "best"', "it's"])
def test_a_list_of_words_is_read_as_it_is_written(words):
    assert listed(in_a_list(words)) == [word.strip() for word in words]


# Parts of the samples of a webdataset


KEYS = [f"{row:04d}" for row in range(ROWS)]


def shard(path, keys=KEYS, **parts):
    """Samples whose parts have these endings: words as they are, and what is no word as JSON."""
    with tarfile.open(path, "w") as file:
        for row, key in enumerate(keys):
            held = {"png": PNGS[row]}
            for ending, values in parts.items():
                value = values[row % len(values)]
                held[ending] = (value if isinstance(value, str) else json.dumps(value)).encode()
            for ending, data in held.items():
                info = tarfile.TarInfo(f"{key}.{ending}")
                info.size = len(data)
                file.addfile(info, io.BytesIO(data))
    return path


def of_shard(path, choice=None):
    return of_dataset(f"webdataset:{path}", choice or ColumnChoice())


def test_texts_that_differ_in_every_sample_are_no_labels(tmp_path):
    captions = [f"a photo of {row}" for row in range(ROWS)]
    path = shard(tmp_path / "b.tar", txt=captions, json=[{"breed": "a"}, {"breed": "b"}])
    beside = of_shard(path)
    assert (beside.classes, beside.unused, beside.may_be_labels) == ((), {"txt"}, {"breed": 2})
    said = fedcache(*extraction(f"webdataset:{path}"))
    assert said.code == Exit.USAGE
    assert "--label-key breed" in said.err
    assert of_shard(path, ColumnChoice(label="breed", groups=("txt",))).groups == {"txt": captions}
    # A class may have one sample alone: .cls is the label in any case, and so is .txt where texts repeat.
    assert len(of_shard(shard(tmp_path / "c.tar", cls=KEYS)).classes) == ROWS
    assert of_shard(shard(tmp_path / "d.tar", txt=["a cat", "a dog"])).classes == ("a cat", "a dog")


def test_no_part_of_a_sample_is_dropped_without_a_word(tmp_path):
    both = of_shard(
        shard(tmp_path / "a.tar", cls=["0", "1"], json=[{"cls": "a", "site": "x"}, {"cls": "b"}])
    )
    assert (both.classes, list(both.groups), both.unused) == (
        ("0", "1"),
        ["site"],
        {"cls of .json"},
    )
    bare = of_shard(shard(tmp_path / "b.tar", json=[3, 4]))
    assert (bare.classes, bare.may_be_labels) == ((), {"json": 2})
    assert of_shard(tmp_path / "b.tar", ColumnChoice(label="json")).classes == ("3", "4")
    assert of_shard(shard(tmp_path / "c.tar", json=[[3, 4], None])).unused == {"json"}
    path = shard(tmp_path / "d.tar", cls=["0", "1"], txt=["a", "b"])
    said = open_dataset(f"webdataset:{path}", memory=DigestMemory(tmp_path / "digests")).reading
    assert f"not used: {ROWS} .txt" in said


@pytest.mark.parametrize(
    "words", [("train", "test"), ("Training", "t10k"), ("data/train", "data/test")]
)
def test_folders_of_all_samples_that_are_named_like_splits_are_the_splits(tmp_path, words):
    split = [0] * 16 + [1] * 8
    keys = [f"{words[split[row]]}/{key}" for row, key in enumerate(KEYS)]
    path = shard(tmp_path / "s.tar", keys, cls=["0", "1"])
    data = open_dataset(f"webdataset:{path}", memory=DigestMemory(tmp_path / "digests"))
    assert sorted(data.names) == sorted(f"s/{key}" for key in keys)
    for row, name in enumerate(data.names):
        number = int(name[-4:])
        assert (data.split[row], data.label[row], data.source.read(row)) == (
            split[number],
            number % 2,
            PNGS[number],
        )
    # One sample without a split in its folders leaves all without.
    assert of_shard(shard(tmp_path / "t.tar", [*keys[:-1], KEYS[-1]])).splits is None


# Numbers and words in JSON


def readings_of_json(folder, label):
    """What every door that reads JSON understands of these labels, which are those of ``site`` too."""
    list_of_images(folder, {})
    rows = [
        {"path": f"{row:04d}.png", "text": TEXTS[row], "label": value, "site": value}
        for row, value in enumerate(label)
    ]
    with_features = [{"embedding": FEATURES[i].tolist(), **row} for i, row in enumerate(rows)]
    (folder / "e.jsonl").write_text("\n".join(map(json.dumps, with_features)))
    (folder / "e.json").write_text(json.dumps(with_features))
    yield through("webdataset", folder, {"label": label, "site": label})
    yield read_file("", folder / "e.json")
    for kind in ("", "folder", "texts"):
        yield read_file(kind, folder / "e.jsonl")


def test_words_and_numbers_in_one_column_of_json_are_words(tmp_path):
    for read in readings_of_json(tmp_path, column(1, "1", "x", 2.5, None, True)):
        assert (read.classes, read.labels[:6]) == (("1", "2.5", "True", "x"), [0, 0, 3, 1, -1, 2])


def test_large_floats_of_json_are_no_integers(tmp_path):
    refused(lambda: list(readings_of_json(tmp_path, column(1e20, 1.5e20))), "2^53")


@pytest.mark.parametrize(
    "ids", [[2**63, 2**64 - 1], [2**63 - 1, 2**63 + 1], [10**20 + 1, 10**20, 5], [-(10**19), 7]]
)
def test_integers_of_any_size_are_the_classes_that_they_are(tmp_path, ids):
    label = column(*ids)
    decimals = pa.array(map(Decimal, label), pa.decimal128(38, 0))
    for read in (
        *readings_of_json(tmp_path, label),
        through("ingest parquet", tmp_path, {"label": decimals, "site": decimals}),
        through("ingest csv", tmp_path, {"label": label, "site": label}),
    ):
        assert read.classes == tuple(map(str, sorted(ids)))
        assert [read.classes[code] for code in read.labels] == [str(value) for value in label]
        assert read.groups["site"] == [str(value) for value in label]


# Names that a shell or a spec reads otherwise


ODD_NAMES = [
    "my diag",
    "it's",
    "a;b",
    "$HOME",
    "a|b",
    "#c",
    '"q"',
    "a,b",
    "R&D",
    "what?",
    "?label=x",
    "100%",
    "-x",
]


@pytest.mark.parametrize("name", ODD_NAMES)
def test_a_suggested_column_of_any_name_can_be_pasted(tmp_path, name):
    folder = tmp_path / "my tables"
    folder.mkdir()
    file = folder / f"i{name}.npz"
    write_npz(file, {"images": IMAGES, "X": FEATURES}, {name: column("a", "b")})
    hint = fedcache(*extraction(f"arrays:{file}")).err.split("column of labels: ")[1]
    options, _, rest = hint.partition(", in a spec ")
    (whole,) = shlex.split(rest.partition("; or say that there are none")[0])
    assert samples_of(*extraction(whole)).classes == ("a", "b")
    assert ok("datasets", "info", f"arrays:{file}", *shlex.split(options)).data["classes"] == [
        "a",
        "b",
    ]
    words = ("ingest", file, "--name", "mine")
    suggested, _, _ = fedcache(*words).err.split("column of labels: ")[1].partition("; or say")
    assert samples_of(*words, *shlex.split(suggested)).classes == (
        "a",
        "b",
    )


@pytest.mark.parametrize("name", ODD_NAMES[:-1])  # no group is called -x
def test_a_suggested_group_of_any_name_can_be_pasted(tmp_path, name):
    write_npz(tmp_path / "e.npz", {"X": FEATURES}, {"label": TWO, name: TEXTS})
    words = ("ingest", tmp_path / "e.npz", "--name", "mine")
    suggested, _, _ = fedcache(*words).err.split("; ", 1)[1].partition(" keeps it")
    assert suggested.startswith("--group-key ")
    assert ok(*words, *shlex.split(suggested), "--replace").data["groups"]


def test_the_columns_of_a_spec_stay_when_labels_are_suggested(tmp_path):
    write_npz(tmp_path / "i.npz", {"a": IMAGES, "b": IMAGES[::-1]}, {"diagnosis": column("a", "b")})
    spec = f"arrays:{tmp_path / 'i.npz'}?images=b"
    assert f"{spec}&label=diagnosis" in fedcache(*extraction(spec)).err


def test_each_of_several_datasets_names_its_own_labels(tmp_path):
    write_npz(tmp_path / "a.npz", {"images": IMAGES}, {"diagnosis": column("a", "b")})
    write_npz(tmp_path / "b.npz", {"images": IMAGES[::-1]}, {"my grade": column("a", "b")})
    said = fedcache(*extraction(f"one=arrays:{tmp_path / 'a.npz'},two=arrays:{tmp_path / 'b.npz'}"))
    assert said.code == Exit.USAGE
    assert "two/my grade has 2 values" in said.err
    (suggested,) = re.findall(r"--dataset (.+)", said.err)
    store = Store.open(ok(*extraction(*shlex.split(suggested))).data["path"])
    assert (store.samples.classes, store.samples.domains) == (("a", "b"), ("one", "two"))


# Equal tables are refused in equal words


def test_a_list_for_each_row_gets_the_hint_of_one_hot_labels(tmp_path):
    one_hot = np.eye(3, dtype=int)[column(0, 1, 2)].tolist()
    for door in (
        "ingest npz",
        "arrays npz",
        "arrays h5",
        "ingest parquet",
        "hf",
        "texts parquet",
        "webdataset",
    ):
        assert "labels.argmax(1)" in refusal(door, tmp_path, {"label": one_hot}), door


def test_a_number_alone_is_one_value_through_every_door_of_arrays(tmp_path):
    for ending, write in (("npz", write_npz), ("h5", write_h5)):
        for kind, content, array in OF_ARRAYS:
            path = tmp_path / f"{kind}e.{ending}"
            write(path, {content: array, "n": np.array(7)}, {"label": TWO})
            assert read_file(kind, path).unused == {"n"}


@pytest.mark.parametrize("name", ["class_to_idx", "config", "data"])
def test_a_dict_beside_the_rows_of_an_npz_is_not_used_and_the_rows_are(tmp_path, name):
    path = tmp_path / "e.npz"
    for kind, content, array in OF_ARRAYS:
        write_npz(path, {name: np.array({"a": 0}), content: array}, {"label": TWO})
        read = read_file(kind, path)
        assert (read.labels, read.unused) == (TWO, {name}), kind
        write_npz(path, {name: np.array({"x": array, "y": TWO})}, {})
        unreadable(kind, path, "is a pickle", "allow_pickle=True")


def test_a_list_of_columns_with_a_line_break_outside_of_quotes_is_refused():
    with pytest.raises(UsageError):
        listed("site\nward")
    assert listed('"site\nward",clinic') == ["site\nward", "clinic"]
