"""An object whose pickle runs code when it is opened."""

import os


class Trap:
    """Makes a folder at ``path`` when a pickle of it is opened."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)
