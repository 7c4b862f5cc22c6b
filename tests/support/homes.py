"""The type of the fixture ``once``, which gives each test a copy of a home that is made one time."""

from collections.abc import Callable
from pathlib import Path

Once = Callable[[Callable[[Path], Path]], Path]
