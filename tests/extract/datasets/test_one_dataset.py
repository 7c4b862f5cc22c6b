"""The same images have the same features and uids in whatever form they come."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from make_images import encoded, pixels, write_directory, write_tar
from PIL import Image

import fedcache as fc

PICTURES = np.stack([pixels(i) for i in range(12)])
PNG = [encoded(picture) for picture in PICTURES]
LABELS = [i % 3 for i in range(12)]


def as_arrays(root):
    np.savez(root / "a.npz", images=PICTURES, labels=LABELS)
    return f"arrays:{root / 'a.npz'}"


def as_parquet(root):
    pq.write_table(
        pa.table({"image": [{"bytes": png} for png in PNG], "label": LABELS}), root / "a.parquet"
    )
    return f"hf:{root / 'a.parquet'}"


def as_shards(root):
    files = {f"{i:06d}.png": png for i, png in enumerate(PNG)}
    files |= {
        f"{i:06d}.json": json.dumps({"label": label}).encode() for i, label in enumerate(LABELS)
    }
    return f"webdataset:{write_tar(root / 'a.tar', files)}"


def as_list(root):
    return list(zip(map(Image.fromarray, PICTURES), LABELS, strict=True))


@pytest.mark.parametrize("write", [as_arrays, as_parquet, as_shards, as_list])
def test_equal_images_have_equal_features(tmp_path, monkeypatch, write):
    def extracted(dataset, home):
        monkeypatch.setenv("FEDCACHE_HOME", str(tmp_path / home))  # where nothing can be taken over
        return fc.extract(dataset, ["random-projection", "pixels"], size=16, workers=0, batch=4)

    folder = write_directory(
        tmp_path / "png", {f"{LABELS[i]}/{i:07d}.png": png for i, png in enumerate(PNG)}
    )
    files = extracted(f"folder:{folder}", "one")
    order = [int(name.rpartition("/")[2].removesuffix(".png")) for name in files.samples.name]
    ours = extracted(write(tmp_path), "other")
    for key in ours.arrays:
        features = ours.reader(key).all()
        assert np.array_equal(features[order], files.reader(key).all())
        assert features.any()
    if write in (as_parquet, as_shards):  # of bytes of files; arrays have the uids of their pixels
        assert np.array_equal(ours.samples.uid[order], files.samples.uid)
