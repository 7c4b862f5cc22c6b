"""A run that is started several times at once has one training, and its models are never replaced under a reader."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from heard import Heard
from private_starts import home
from refusal import stopped

from fedcache.config import Home, TrainConfig
from fedcache.process import Stop
from fedcache.runs.loop import train

pytestmark = pytest.mark.usefixtures("rows")
CONFIG = TrainConfig(method="fedavg", rounds=2, seeds="0,1")


class Waiting(Heard):
    """Sets ``begun`` when it is told that another training of the run is waited for."""

    def __init__(self):
        super().__init__()
        self.begun = threading.Event()

    def note(self, text):
        super().note(text)
        if "Waiting until that training ends" in text:
            self.begun.set()


class Pause:
    """A hook that holds a training in its first round until ``go`` is set."""

    def __init__(self):
        self.reached = threading.Event()
        self.go = threading.Event()

    def __call__(self, _told):
        self.reached.set()
        assert self.go.wait(60)


def test_the_second_training_of_a_run_waits_and_returns_the_result_of_the_first():
    pause = Pause()
    heard = Waiting()
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(train, CONFIG, Home(home()), hooks=[pause])
        assert pause.reached.wait(60)
        second = pool.submit(train, CONFIG, Home(home()), observer=heard)
        waited = heard.begun.wait(20)
        pause.go.set()
    assert waited, "the second trained the same run beside the first"
    assert first.result().reused is False
    assert second.result().reused is True
    assert first.result().result == second.result().result


def test_a_training_that_waits_can_be_stopped():
    pause = Pause()
    stop = Stop()
    stop.ask()
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(train, CONFIG, Home(home()), hooks=[pause])
        assert pause.reached.wait(60)
        stopped(
            lambda: train(CONFIG, Home(home()), stop=stop), "while waiting for another training"
        )
        pause.go.set()
        assert not first.result().reused
