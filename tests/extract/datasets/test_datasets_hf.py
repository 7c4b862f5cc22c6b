"""Hugging Face datasets from files that the tests write: parquet, save_to_disk, and what is said without a network."""

import errno
import json
import shlex
from contextlib import suppress
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from command import fedcache
from damage import flip_bit
from make_images import encoded, pixels
from no_dataset import missing_dataset, no_dataset
from opened import open_dataset, peek
from refusal import bad_image, machine_error, refused
from sent import sent

from fedcache.errors import Exit, FedcacheError
from fedcache.extract.datasets.listing import pull
from fedcache.extract.image_files import BadImage

PNG = [encoded(pixels(i)) for i in range(100)]
NAMES = ["airplane", "bird", "cat"]
FEATURES = {"image": {"_type": "Image"}, "label": {"names": NAMES, "_type": "ClassLabel"}}


def table(rows, *, features=FEATURES, **more):
    """Rows of images and labels, row i of class i mod 3, as ``push_to_hub`` has them."""
    images = pa.array(
        [{"bytes": PNG[i], "path": f"{i}.png"} for i in rows],
        pa.struct([("bytes", pa.binary()), ("path", pa.string())]),
    )
    held = {"image": images, "label": pa.array([i % 3 for i in rows], pa.int64()), **more}
    metadata = {"huggingface": json.dumps({"info": {"features": features}})} if features else None
    return pa.table(held).replace_schema_metadata(metadata)


def write(path, held, rows=7):
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(held, path, row_group_size=rows)
    return path


def save(folder, held, name="data-00000-of-00001.arrow", **state):
    """What ``save_to_disk`` writes."""
    folder.mkdir(parents=True, exist_ok=True)
    with (
        pa.OSFile(f"{folder}/{name}", "wb") as file,
        pa.ipc.new_stream(file, held.schema) as stream,
    ):
        stream.write_table(held, max_chunksize=4)
    (folder / "dataset_info.json").write_text(json.dumps({"features": FEATURES}))
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name}], **state}))
    return folder


def opened(path, tail="", **options):
    return open_dataset(f"hf:{path}{tail}", **options)


def two_splits(root):
    write(root / "data/train-00000-of-00002.parquet", table(range(20)))
    write(root / "data/train-00001-of-00002.parquet", table(range(20, 30)))
    write(root / "data/test-00000-of-00001.parquet", table(range(30, 40)))
    return root


def check(data):
    """30 training and 10 test images of three named classes."""
    assert np.bincount(data.split).tolist() == [30, 10]
    assert data.classes == tuple(NAMES)
    for i in (0, 19, 20, 29, 30, 39, 3):
        row = data.names.index(f"train/{i:07d}" if i < 30 else f"test/{i - 30:07d}")
        assert data.source.read(row) == PNG[i]
        assert data.label[row] == i % 3


def test_shards_of_parquet_are_one_dataset_with_the_splits_of_their_names(tmp_path):
    root = two_splits(tmp_path / "mine")
    data = opened(root)
    check(data)
    check(opened(root / "data"))
    copy = sent(data.source)
    for row in (39, 0, 12):
        assert copy.read(row) == data.source.read(row)
    assert peek(f"hf:{root}") == ("mine", data.digest)


def test_save_to_disk_and_parquet_are_one_dataset(tmp_path):
    root = two_splits(tmp_path / "mine")
    save(tmp_path / "saved/train", table(range(30)))
    save(tmp_path / "saved/test", table(range(30, 40)))
    (tmp_path / "saved/dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    data = opened(tmp_path / "saved")
    check(data)
    assert data.digest == opened(root).digest
    assert sent(data.source).read(5) == data.source.read(5)


@pytest.mark.parametrize("rows", [3, 40, 1000])
def test_rows_are_those_of_the_file_in_any_order_and_row_groups_of_any_size(tmp_path, rows):
    data = opened(write(tmp_path / "a.parquet", table(range(100)), rows))
    order = np.random.default_rng(rows).permutation(100)
    assert all(data.source.read(int(row)) == PNG[row] for row in [*order, *range(100)])


def test_arrow_files_left_by_a_map_are_not_rows_and_picked_rows_are_refused(tmp_path):
    folder = save(tmp_path / "saved", table(range(30)))
    with (
        pa.OSFile(f"{folder}/other.arrow", "wb") as file,
        pa.ipc.new_file(file, table(range(3)).schema) as out,
    ):
        out.write_table(table(range(3)))
    assert len(opened(folder)) == 30
    assert len(opened(folder / "other.arrow")) == 3
    save(folder, table(range(30)), _indices_data_files=[{"filename": "indices.arrow"}])
    no_dataset(f"hf:{folder}", "flatten_indices")


def test_the_names_of_class_labels_are_those_of_groups_too(tmp_path):
    features = {**FEATURES, "coarse": {"_type": "ClassLabel", "names": ["thing", "animal"]}}
    path = write(
        tmp_path / "a.parquet",
        table(range(20), features=features, coarse=[i % 2 for i in range(20)]),
    )
    assert opened(path).groups["coarse"].words == ("animal", "thing")
    assert opened(path, "?label=coarse").classes == ("thing", "animal")


def test_columns_of_plain_bytes_without_metadata_are_read(tmp_path):
    plain = pa.table(
        {"jpg": pa.array(PNG[:20], pa.large_binary()), "y": ["dog", None, "cat", "dog"] * 5}
    )
    assert opened(write(tmp_path / "a.parquet", plain)).source.read(11) == PNG[11]
    path = write(tmp_path / "b.parquet", plain.append_column("thumb", pa.array(PNG[:20])))
    no_dataset(f"hf:{path}", "--images-key")
    assert opened(path, "?images=thumb").source.read(3) == PNG[3]
    no_dataset(f"hf:{path}?images=y", "'y'")


def test_several_classes_and_configurations_are_refused_by_name(tmp_path):
    for name in ("fine_grained", "coarse_grained"):
        for split in ("train", "test"):
            write(tmp_path / f"two/{name}/{split}/0000.parquet", table(range(9)))
    no_dataset(f"hf:{tmp_path / 'two'}", "2 configurations: coarse_grained, fine_grained")
    assert len(opened(tmp_path / "two/fine_grained")) == 18
    both = {n: {"_type": "ClassLabel", "names": NAMES} for n in ("kind", "sort")}
    held = table(range(9), features=both, sort=[0] * 9)
    several = held.rename_columns(["image", *both]).replace_schema_metadata(held.schema.metadata)
    place = write(tmp_path / "b.parquet", several)
    no_dataset(f"hf:{place}", "kind, sort", "--label-key")


def test_files_of_no_known_split_are_left_out_and_named(tmp_path):
    root = two_splits(tmp_path / "mine")
    write(root / "data/unsupervised-00000.parquet", table(range(9)))
    data = opened(root)
    check(data)
    assert (
        "left out, because their split is unknown: data/unsupervised-00000.parquet" in data.reading
    )


def test_rows_without_bytes_and_damaged_pages_are_bad_images(tmp_path):
    lost = [{"bytes": None if i == 3 else PNG[i], "path": "/etc/passwd"} for i in range(20)]
    data = opened(
        write(tmp_path / "a.parquet", table(range(20)).set_column(0, "image", pa.array(lost)))
    )
    assert "1 cannot be read and will be skipped and listed" in data.reading
    bad_image(data.source.read, 3, "a path alone is not enough")
    path = tmp_path / "b.parquet"
    pq.write_table(
        table(range(20)), path, row_group_size=5, compression="none", write_page_checksum=True
    )
    flip_bit(path, path.read_bytes().index(PNG[7]) + 30)
    data = opened(path)
    assert {7} <= {row for row in range(20) if not readable(data, row)} <= {5, 6, 7, 8, 9}


def test_an_error_of_the_system_is_no_damaged_image(tmp_path, monkeypatch):
    path = write(tmp_path / "a.parquet", table(range(20)))
    source = sent(opened(path).source)  # has read nothing
    with monkeypatch.context() as patch:

        def too_many(*_, **__):
            raise OSError(errno.EMFILE, "Too many open files")

        patch.setattr(pq.ParquetFile, "iter_batches", too_many)
        machine_error(lambda: source.read(7), "Too many open files")
    assert source.read(7) == PNG[7]


def readable(data, row):
    try:
        return data.source.read(row) == PNG[row]
    except BadImage:
        return False


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
def test_cut_and_foreign_files_end_with_one_sentence(tmp_path, name):
    place = tmp_path / name
    if name == "a.arrow":
        save(tmp_path, table(range(20)), name)
        (tmp_path / "state.json").unlink()
    else:
        write(place, table(range(20)))
    raw = place.read_bytes()
    rng = np.random.default_rng(0)
    for bad in (raw[: len(raw) // 2], b"", b"PAR1" + bytes(40) + b"PAR1", b"ARROW1" + bytes(60)):
        place.write_bytes(bad)
        with pytest.raises(FedcacheError) as caught:
            opened(place)
        assert caught.value.code in (Exit.USAGE, Exit.CORRUPT)
    # a flipped byte anywhere: refused, bad images, or other bytes, and never a traceback
    for _ in range(40):
        at = int(rng.integers(len(raw)))
        place.write_bytes(raw[:at] + bytes([raw[at] ^ 0xFF]) + raw[at + 1 :])
        with suppress(FedcacheError):
            opened(place)


def test_offsets_that_lead_out_of_the_file_are_refused(tmp_path):
    images = pa.array(PNG[:4])
    offsets = np.frombuffer(images.buffers()[1], np.int32)[:5].copy()
    offsets[2] = offsets[1] - 1  # between two good ones: only looking at every offset finds it
    led = [None, pa.py_buffer(offsets.tobytes()), images.buffers()[2]]
    wrong = pa.Array.from_buffers(pa.binary(), 4, led)
    for name, column in (("whole", images), ("led", wrong)):
        save(tmp_path / name, pa.table({"image": column, "label": [0, 1, 2, 0]}))
    assert len(opened(tmp_path / "whole")) == 4
    refused(lambda: opened(tmp_path / "led"), "slot 2")


def test_what_is_not_there_says_what_brings_it(tmp_path):
    spec = "hf:ylecun/mnist"
    missing_dataset(spec, f"pull {spec}", data=tmp_path)
    (tmp_path / "a.csv").write_text("x")
    for place in (tmp_path / "no", tmp_path, tmp_path / "a.csv"):
        no_dataset(f"hf:{place}", place)
    root = two_splits(tmp_path / "data/ylecun/mnist")
    check(open_dataset(spec, data=tmp_path / "data"))
    check(open_dataset("hf:digits", roots={"digits": root}))


def test_nothing_is_fetched_unless_pull_is_asked_and_no_network_is_said(
    tmp_path, monkeypatch, no_network
):
    done = fedcache("extract --dataset hf:ylecun/mnist --backbones pixels")
    assert done.code == Exit.ENVIRONMENT
    assert no_network == []
    pull_it = ("datasets", "pull", "hf:ylecun/mnist")
    assert shlex.join(["fedcache", *pull_it]) in done.err
    done = fedcache(*pull_it)
    assert done.code == Exit.ENVIRONMENT
    assert "huggingface.co" in done.err
    assert no_network
    no_network.clear()
    monkeypatch.setenv("FEDCACHE_OFFLINE", "1")
    assert "FEDCACHE_OFFLINE" in fedcache(*pull_it).err
    assert not no_network
    refused(lambda: pull("hf:../x", data=tmp_path), "not the name of a dataset")


def test_a_repository_without_parquet_files_is_not_blamed_on_the_network(tmp_path, monkeypatch):
    import huggingface_hub

    def dataset_info(api, name, revision, files_metadata):
        if revision == "main":
            return SimpleNamespace(sha="abc", siblings=[SimpleNamespace(rfilename="data.csv")])
        answer = SimpleNamespace(headers={}, request=None)
        raise huggingface_hub.errors.RevisionNotFoundError("404", response=answer)

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", dataset_info)
    machine_error(lambda: pull("hf:me/mine", data=tmp_path), "no parquet files")


def test_pull_takes_the_parquet_files_that_the_library_finds(tmp_path, monkeypatch):
    import huggingface_hub

    asked = []

    def dataset_info(api, name, revision, files_metadata):
        file = SimpleNamespace(rfilename="default/train/0.parquet", size=3_000_000)
        return SimpleNamespace(sha="abc", siblings=[] if revision == "main" else [file])

    def snapshot(name, **how):
        asked.append((name, how["revision"], how["allow_patterns"]))
        two_splits(how["local_dir"])

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", dataset_info)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    said = []
    assert pull("hf:me/mine", data=tmp_path, say=said.append) == tmp_path / "me/mine"
    assert asked == [("me/mine", "abc", ["*.parquet"])]
    assert "3.0 MB" in said[0]
    check(open_dataset("hf:me/mine", data=tmp_path))
