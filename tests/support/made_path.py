"""A command line that makes something, where that lies, and the results of the home."""

import json
from pathlib import Path

from command import data_of
from pictures import folder

from fedcache.config import Home


def place_of(*words):
    """``fedcache WORDS --json``, which must succeed: the path in its answer."""
    return Path(data_of(*words)["path"])


def extracted(place, backbones="random-projection", **counts):
    """A store of images with features of these backbones, after which options of ``extract`` may follow.

    By default it has 36 training and 12 test images of three classes.
    """
    images = folder(place / "shapes", **counts)
    return place_of(f"extract --dataset folder:{images} --workers 0 --backbones {backbones}")


def run_of(method):
    """The run of a method that was trained in the home."""
    return Home.from_environment().runs / results()[method]["digest"][:16]


def results():
    """The stored result of each method that was trained in the home."""
    found = [json.loads(p.read_text()) for p in Home.from_environment().runs.glob("*/result.json")]
    return {result["method"]: result for result in found}
