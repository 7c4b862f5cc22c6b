"""Extractions of a folder of images in small chunks that are stopped on the way."""

from refusal import stopped

from fedcache.config import ExtractConfig, Home
from fedcache.extract.extract_dataset import extract
from fedcache.process import Stop
from fedcache.progress import Silent


class StopAfter(Silent):
    """Asks to stop once so many images were extracted."""

    def __init__(self, images):
        self.left = images
        self.flag = Stop()

    def start(self, what, total, unit):
        self.what = what

    def advance(self, units):
        if self.what == "extracting":
            self.left -= units
        if self.left <= 0:
            self.flag.ask()


def in_small_chunks(images, **more):
    """The configuration of an extraction in this process, with batches of 4 images and chunks of 8."""
    return ExtractConfig(
        dataset=f"folder:{images}",
        backbones=("random-projection",),
        batch=4,
        chunk_rows=8,
        workers=0,
        **more,
    )


def stop_extraction(config, images, home=None, **more):
    """Extract, and stop after so many images."""
    observer = StopAfter(images)
    where = home or Home.from_environment()
    stopped(lambda: extract(config, where, observer=observer, stop=observer.flag, **more))
