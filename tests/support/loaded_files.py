"""The texts of this repository, and Python files outside the package, as modules: tools and examples."""

import importlib.util
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def content(name):
    """The text of a file: of its place in the repository, or of a path."""
    return (ROOT / name).read_text(encoding="utf-8")


def load_file(path):
    """The module of a file, executed anew."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # dataclasses look their module up while it is executed
    spec.loader.exec_module(module)
    return module


def tool(name):
    """A program of tools/, executed once for all tests of a process."""
    return sys.modules[name] if name in sys.modules else load_file(ROOT / f"tools/{name}.py")
