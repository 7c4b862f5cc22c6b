"""A random generator whose draws are given."""


class Drawn:
    """In the place of a generator: each draw lies at the next given share of its range."""

    def __init__(self, *shares):
        self.shares = list(shares)

    def uniform(self, low, high):
        return low + self.shares.pop(0) * (high - low)

    def random(self):
        return self.shares.pop(0)
