"""An observer that stops a run."""

from heard import Heard

from fedcache.process import Stop


class StopsAfter(Heard):
    """Asks for a stop after so many rounds; 0 never asks."""

    def __init__(self, rounds=0):
        super().__init__()
        self.flag = Stop()
        self.left = rounds

    def advance(self, units):
        self.left -= units
        if self.left == 0:
            self.flag.ask()
