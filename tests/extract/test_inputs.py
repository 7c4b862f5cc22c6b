"""Texts and rows in a batch: bad ones, the short last batch, and processes that read before a model."""

from types import SimpleNamespace

import numpy as np
import pytest
import tiny_hf
import torch
from fake_device import SleepingDevice
from refusal import bad_image

from fedcache.extract.backbones import lookup, text_encoder
from fedcache.extract.backbones.backbone import Weights
from fedcache.extract.backbones.own import content_sha256
from fedcache.extract.backbones.own_module import weights_of
from fedcache.extract.batches import ComputeSettings, FeatureJob
from fedcache.extract.image_files import BadImage
from fedcache.extract.inputs import encode_items, read_items, text_of
from fedcache.extract.recipe import Recipe, held_by
from fedcache.extract.workers.batch_workers import InProcess
from fedcache.extract.workers.gpu import GpuFeeder
from fedcache.plugins import note_named
from fedcache.process import Stop


class Texts:
    """Seven texts: the third is missing, and the sixth is no UTF-8."""

    def read(self, row):
        if row == 2:
            raise BadImage("the text is empty")
        return b"\xff" if row == 5 else f"row {'abcdefg'[row]}".encode()


class Numbers:
    """Seven rows of 64 numbers; the last three are bad."""

    def read(self, row):
        if row >= 4:
            raise BadImage("it contains NaN or infinite numbers")
        return np.full(64, row, np.float32)


class Sums:
    """An encoder that keeps what it was given, and says that every second item was cut."""

    def items(self, items):
        self.given = items
        rows = (
            [[len(item)] for item in items]
            if isinstance(items, list)
            else items.sum(1, keepdims=True)
        )
        return torch.tensor(rows, dtype=torch.float32), np.arange(len(items)) % 2 == 1


def test_bad_texts_are_empty_and_bad_rows_zeros_with_their_reasons():
    found, bad = read_items(Texts(), range(4), "texts")
    assert found == ["row a", "row b", "", "row d"]
    assert bad == {2: "the text is empty"}
    rows, bad = read_items(Numbers(), range(2, 6), "rows")
    assert rows.shape == (4, 64)
    assert rows.dtype == np.float32
    assert rows[:, 0].tolist() == [2, 3, 0, 0]
    assert set(bad) == {4, 5}
    assert read_items(Numbers(), [5, 6], "rows")[0].shape == (2, 0)


def test_texts_that_are_none_have_a_reason():
    assert text_of("  ü ".encode()) == "  ü "
    for raw, said in (
        (b" \n", "the text is empty"),
        (b"\xff", "not UTF-8"),
        (b"x" * (1 << 24) + b"y", "the limit is"),
    ):
        bad_image(text_of, raw, said)


def test_a_short_batch_is_filled_up_with_its_last_item_and_copies_are_not_counted():
    encoder = Sums()
    out, cut = encode_items(encoder, ["a", "bb", "ccc"], 6, [1], 1)
    assert encoder.given == ["a", "bb", "ccc", "ccc", "ccc", "ccc"]
    assert out.shape == (3, 1, 1)
    assert cut == 1
    assert np.array_equal(out[:, 0, 0], [1, np.nan, 3], equal_nan=True)
    out, cut = encode_items(encoder, np.array([[1, 2], [3, 4]]), 3, [], 1)
    assert encoder.given.tolist() == [[1, 2], [3, 4], [3, 4]]
    assert out[:, 0, 0].tolist() == [3, 7]
    assert cut == 1
    encoder.given = None
    out, cut = encode_items(encoder, ["", ""], 4, [0, 1], 5)
    assert encoder.given is None
    assert out.shape == (2, 1, 5)
    assert np.isnan(out).all()
    assert cut == 0


def test_what_a_store_holds_is_in_its_recipes():
    text = Recipe("a", "", 12, decoder="utf-8").to_dict()
    image = Recipe("b", "", 12).to_dict()
    assert [held_by(r) for r in ([text], [{"backbone": "ingested"}, text], [image], [{}], [])] == [
        "texts",
        "texts",
        "images",
        "images",
        "images",
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "source"), [("bag", Texts()), ("spectrum", Numbers()), ("qwen", Texts())]
)
def test_processes_that_read_before_a_model_give_what_one_process_gives(
    encoders, tmp_path, monkeypatch, kind, source
):
    if kind == "qwen":
        model = tiny_hf.decoder(tmp_path / kind)
        row = lookup(f"hf:{model}")
        weights = Weights(model, content_sha256(model), "")
    else:
        note_named([f"module:{encoders}:{kind}"])
        row = lookup(f"module:{encoders}:{kind}")
        weights = weights_of(row)
    job = FeatureJob("a", row, weights, row.recipe)
    data = SimpleNamespace(source=source, uid=np.zeros((7, 16), np.uint8), names=[*"abcdefg"])
    settings = ComputeSettings("cpu", "float32", 4, 1)
    alone = InProcess([job], data, settings)
    feeder = GpuFeeder([job], data, settings, 1, Stop(), SleepingDevice)
    try:
        assert feeder.runner.warm().keys() == {"a"}
        expected = [alone.finish(b, ["a"], alone.submit(b, ["a"])) for b in (0, 1)]
        # Texts are tokenised by the process that reads them, not by this one, which feeds the GPU.
        monkeypatch.setattr(text_encoder, "tokens_of", None)
        for batch, one in enumerate(expected):
            two = feeder.finish(batch, ["a"], feeder.submit(batch, ["a"]))
            assert np.array_equal(one.features["a"], two.features["a"], equal_nan=True)
            assert one.bad == two.bad
            assert one.decoded == two.decoded
            assert one.cut == {"a": 0}
    finally:
        feeder.close()
        alone.close()
