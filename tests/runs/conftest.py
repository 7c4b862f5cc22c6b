"""Homes that several files here begin with: each is made once per worker, and a test works on a copy of it."""

from homes import made_once
from made_path import place_of
from pictures import folder
from private_starts import ingested


def extracted(place):
    """A store of 36 training and 12 test images of three classes, with features of one backbone."""
    images = folder(place / "shapes")
    return place_of(f"extract --dataset folder:{images} --backbones random-projection --workers 0")


shapes = made_once(extracted)


rows = made_once(ingested)
"""A store of 200 rows of five classes that can be told apart, every fourth a test row."""
