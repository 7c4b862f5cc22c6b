"""Images that a program holds: every kind of image gives the pixels of its PNG file, and nothing is guessed."""

import io
from pathlib import Path

import numpy as np
import pytest
import torch
from failing_command import must_fail
from make_images import encoded, pixels, random_bytes
from PIL import Image
from refusal import refused
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data import Dataset as TorchDataset

import fedcache as fc
from fedcache.extract.datasets import in_memory
from fedcache.extract.datasets.dataset import Context
from fedcache.extract.digests import DigestMemory

RGB = random_bytes(0, 12, 6, 8, 3)
LABELS = [i % 3 for i in range(12)]
FORMS = {
    "pillow": Image.fromarray,
    "array": lambda a: a,
    "channels first": lambda a: a.transpose(2, 0, 1),
    "uint8 tensor": lambda a: torch.from_numpy(a.transpose(2, 0, 1).copy()),
    "float tensor": lambda a: torch.from_numpy(a.transpose(2, 0, 1).copy()).float() / 255,
}


def loaded(items):
    return in_memory.load(items, Context(DigestMemory(Path("unused"))))


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_an_image_has_the_pixels_and_digest_of_the_array(form):
    data = loaded([(FORMS[form](image), label) for image, label in zip(RGB, LABELS, strict=True)])
    assert all(np.array_equal(data.source.read(row), RGB[row]) for row in range(12))
    assert data.digest == loaded(list(zip(RGB, LABELS, strict=True))).digest
    assert data.label.tolist() == LABELS
    assert data.classes == ("0", "1", "2")


def test_labels_may_be_words_tensors_or_none():
    data = loaded([(RGB[0], "dog"), (RGB[1], None), (RGB[2], "cat")])
    assert data.classes == ("cat", "dog")
    assert data.label.tolist() == [1, -1, 0]
    data = loaded(TensorDataset(torch.from_numpy(RGB), torch.tensor(LABELS)))
    assert data.label.tolist() == LABELS
    assert loaded([(RGB[0], 1.0), (RGB[1], None)]).label.tolist() == [0, -1]
    assert loaded(list(RGB)).classes == ()
    refused(lambda: loaded([(RGB[0], [1, 2])]), "item 0")


def test_dictionaries_have_columns_and_splits():
    items = [
        {"img": RGB[i], "fine_label": LABELS[i], "writer": i // 6, "box": [1]} for i in range(12)
    ]
    data = loaded({"train": items[:8], "test": items[8:]})
    assert data.names[0] == "test/0000000"
    assert data.split.tolist() == [1] * 4 + [0] * 8
    assert data.groups["writer"].codes.tolist() == [1] * 4 + [0] * 6 + [1] * 2
    assert list(data.groups) == ["writer"]
    refused(lambda: loaded({"left": items}), "'left'", "train")
    refused(lambda: loaded([{"text": "a", "label": 1}]), "keys text, label")


class Held(TorchDataset):
    """A dataset as people write it, with class names."""

    classes = ("plane", "car", "bird")

    def __init__(self, shift=False):
        self.shift, self.reads = shift, 0

    def __len__(self):
        return 12

    def __getitem__(self, row):
        self.reads += 1
        image = RGB[row] + np.uint8(self.reads if self.shift else 0)
        return Image.fromarray(image), LABELS[row]


def test_a_torch_dataset_has_its_class_names_and_random_pixels_are_refused():
    assert loaded(Held()).classes == Held.classes
    refused(lambda: loaded(Held(shift=True)), "views=2")


@pytest.mark.parametrize(
    ("items", "words"),
    [
        ([(torch.from_numpy(RGB[0]).float(), 0)], ["[0, 1]", "Normalize"]),
        ([(RGB[0] / 255, 0)], ["float64", "row 0"]),
        ([("photo.png", 0)], ["Image 0", "str"]),
        ([], ["no images"]),
        ({}, ["got an empty dictionary"]),
        ({"train": [(RGB[0], 0)], "photos": []}, ["got 'photos'."]),
        (7, ["int"]),
        (iter([(RGB[0], 0)]), ["rows"]),
        (DataLoader(TensorDataset(torch.from_numpy(RGB))), ["DataLoader", ".dataset"]),
    ],
)
def test_what_is_no_image_is_refused_by_row(items, words):
    refused(lambda: loaded(items), *words)


def test_what_a_dataset_raises_is_told_with_the_row():
    class Broken(Held):
        def __getitem__(self, row):
            raise (
                KeyError("lost")
                if row == 5
                else IndexError("never")
                if row > 11
                else ValueError("early")
            )

    refused(lambda: loaded(Broken()), "Item 0", "ValueError: early")


def test_a_pillow_image_that_cannot_be_read_is_quarantined():
    cut = Image.open(io.BytesIO(encoded(pixels(0, 64, 64))[:2000]))
    data = loaded([(RGB[0], 0), (cut, 1)])
    assert len({uid.tobytes() for uid in data.uid}) == 2


def test_a_list_is_extracted_once_and_resumed_by_content():
    items = [(Image.fromarray(image), label) for image, label in zip(RGB, LABELS, strict=True)]
    how = {"size": 16, "batch": 4}
    store = fc.extract(items, "random-projection", **how)
    before = (store.path / "history.jsonl").read_bytes()
    again = fc.extract(
        [(np.asarray(image), label) for image, label in items], "random-projection", **how
    )
    assert again.path == store.path
    assert (store.path / "history.jsonl").read_bytes() == before  # nothing was computed
    must_fail("were passed from Python", "extract --backbones pixels --size 8")
    assert len(fc.extract(items, "random-projection", **how, limit=5).samples.name) == 5


def test_options_of_files_and_workers_that_cannot_have_the_images_are_refused():
    items = [(RGB[0], 0), (RGB[1], 1)]
    refused(lambda: fc.extract(items, "pixels", size=8, label_key="y"), "label_key")
    refused(lambda: fc.extract(items, "pixels", size=8, layout="class"), "layout")

    class Local(Held):
        """No pickle finds it."""

    refused(lambda: fc.extract(Local(), "pixels", size=8, workers=2), "2 workers", "workers=0")
    Local.__module__ = "__main__"
    assert "in the main program" in str(in_memory.can_travel(Local()))
    assert in_memory.can_travel(items) is None
