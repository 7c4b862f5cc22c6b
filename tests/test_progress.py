"""Work that says how far it is becomes stretches that an observer is told of, and is always ended."""

from contextlib import suppress

from pictures import folder

import fedcache as fc
from fedcache.progress import Silent, piece_of_work, progress_of


class Told(Silent):
    """Keeps stretches and how far each went."""

    def __init__(self):
        self.stretches = []
        self.open = 0

    def start(self, what, total, unit):
        assert not self.open, "a stretch begins inside another"
        self.open = 1
        self.stretches.append([what, total, unit, 0])

    def advance(self, units):
        self.stretches[-1][3] += units

    def stop(self):
        assert self.open
        self.open = 0


def test_every_part_is_a_stretch_of_its_own():
    told = Told()
    with progress_of(told, "reading", "images") as progress:
        for total in (2, 3):
            for done in range(1, total + 1):
                progress(done, total)
    assert told.stretches == [["reading", 2, "images", 2], ["reading", 3, "images", 3]]
    assert not told.open


def test_work_that_fails_or_says_nothing_leaves_no_stretch_open():
    told = Told()
    with suppress(ZeroDivisionError), progress_of(told, "reading", "images") as progress:
        progress(1, 9)
        raise ZeroDivisionError
    assert told.stretches == [["reading", 9, "images", 1]]
    assert told.open == 0
    with progress_of(told, "reading", "images"):
        pass
    assert len(told.stretches) == 1


def test_a_piece_of_work_ends_with_its_block():
    told = Told()
    with piece_of_work(told, "training", 2, "rounds"):
        assert told.open == 1
    with suppress(ZeroDivisionError), piece_of_work(told, "training", 2, "rounds"):
        raise ZeroDivisionError
    assert told.open == 0


def test_images_that_are_read_for_their_digests_are_counted_once(tmp_path):
    images = folder(tmp_path / "images", train=6, test=2)
    count = sum(1 for path in images.rglob("*") if path.is_file())
    for expected in (1, 0):  # the second time they are remembered
        told = Told()
        fc.extract(f"folder:{images}", backbones=["random-projection"], size=8, observer=told)
        reading = [s for s in told.stretches if s[0] == "reading"]
        assert reading == [["reading", count, "images", count]] * expected
