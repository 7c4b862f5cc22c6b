"""What a module holds tells it apart: objects, bound methods, closures, and classes that no file tells."""

import functools
import importlib
import sys
import threading
import types

import pytest
import torch
from refusal import refused
from torch import nn

from fedcache.extract.backbones.own_digest import digest_of_parts


def digest(module, transform=None):
    return digest_of_parts("m", module, transform)


class Held(nn.Module):
    """A module that holds something."""

    size = 8

    def __init__(self, held):
        super().__init__()
        self.held = held

    def forward(self, x):
        factor = getattr(self.held, "v", 1.0)
        return x.mean((2, 3)) * factor


class Plain:
    def __init__(self, v):
        self.v = v

    def __call__(self, x):
        return x * self.v

    def method(self, x):
        return x * self.v


class Slots:
    __slots__ = ("v",)

    def __init__(self, v):
        self.v = v


class Mixed(Plain):
    """It holds itself."""

    def __init__(self, v):
        super().__init__([v, types.SimpleNamespace(v=v)])
        self.again = self


def apply(x, by):
    return by(x)


def bound(module, v):
    module.forward = types.MethodType(lambda self, x: x.mean((2, 3)) * v, module)  # type: ignore[method-assign]
    return module


def hooked(module, v):
    module.register_forward_hook(lambda part, inputs, output: output * v)
    return module


def untracked(v):
    linear = nn.Linear(1, 1)
    linear.weight.data.fill_(v)
    linear.bias.data.zero_()
    return [linear]


def of_function(v):
    class Local(nn.Module):
        def forward(self, x):
            return x.mean((2, 3)) * v

    return Local()


def of_super(v):
    class Local(Held):
        by = v

        def again(self):
            super().__init__(v)

        def forward(self, x):
            return super().forward(x) * v

    return Local(0)


def of_default(v):
    class Local(nn.Module):
        def forward(self, x, by=v):
            return x.mean((2, 3)) * by

    return Local()


def of_class_value(v):
    class Local(nn.Module):
        by = v

        def forward(self, x):
            return x.mean((2, 3)) * self.by

    return Local()


def of_inner_object(v):
    class Factor:
        def value(self):
            return v

    return Held(Factor())


def hook_object(v):
    class Hook(Plain):
        def __call__(self, *given):
            return given[2] * self.v

    module = Held(0)
    module.register_forward_hook(Hook(v))
    return module


HELD = {
    "an object": lambda v: Held(Plain(v)),
    "one with slots": lambda v: Held(Slots(v)),
    "a namespace": lambda v: Held(types.SimpleNamespace(v=v)),
    "an object that holds itself": lambda v: Held(Mixed(v)),
    "a bound method": lambda v: Held(Plain(v).method),
    "an object in a partial": lambda v: Held(functools.partial(apply, by=Plain(v))),
    "an object in a closure": lambda v: Held((lambda inner: lambda x: inner(x))(Plain(v))),
    "a module in a plain list": lambda v: Held(untracked(v)),
    "a narrow tensor": lambda v: Held(torch.tensor([v], dtype=torch.bfloat16)),
    "its own forward": lambda v: bound(Held(0), v),
    "a hook's closure": lambda v: hooked(Held(0), v),
    "a hook that is an object": hook_object,
    "a closure of a class": of_function,
    "a class that calls its parent": of_super,
    "a default of a class": of_default,
    "a value of a class": of_class_value,
    "a closure of an object's class": of_inner_object,
}


def test_what_a_module_holds_is_in_its_digest():
    for name, held in HELD.items():
        assert digest(held(2.0)) == digest(held(2.0)), name
        assert digest(held(2.0)) != digest(held(3.0)), name
    for transform in (
        Plain,
        lambda v: Plain(v).method,
        lambda v: nn.Threshold(v, 0),
        lambda v: types.SimpleNamespace(transforms=[Plain(v)]),
    ):
        assert digest(nn.Identity(), transform(2.0)) != digest(nn.Identity(), transform(3.0))


def test_methods_of_parts_are_told_by_the_parts():
    class Two(nn.Module):
        def __init__(self, first):
            super().__init__()
            self.a, self.b = nn.ReLU(), nn.ReLU()
            self.used = self.a.forward if first else self.b.forward

    assert digest(Two(True)) == digest(Two(True))
    assert digest(Two(True)) != digest(Two(False))


TYPED = """
import torch
from torch import nn
def helper(x): return x * 2
class Held:
    def value(self): return 2
class Net(nn.Module):
    def forward(self, x): return helper(x.mean((2, 3)))
"""


@pytest.mark.parametrize("name", ["__main__", "cell", None])
def test_code_without_a_file_is_refused_and_a_version_stands_for_it(name):
    names = {} if name is None else {"__name__": name}
    exec(TYPED, names)
    net = names["Net"]()
    for module, transform, what in (
        (net, None, "Net"),
        (Held(names["helper"]), None, "helper"),
        (Held(names["Held"]().value), None, "Held"),
        (nn.Identity(), names["helper"], "helper"),
    ):
        refused(lambda given=(module, transform): digest(*given), what, "version=")
    assert len({digest_of_parts("m", net, None, v) for v in ("1", "2", "1")}) == 2
    other = nn.Linear(1, 1)
    before = digest_of_parts("m", other, None, "1")
    other.weight.data += 1
    assert digest_of_parts("m", other, None, "1") != before


def test_what_cannot_be_told_is_refused():
    for held in (
        threading.Lock(),
        (n for n in (1, 2)),
        types.SimpleNamespace(inner=Plain(threading.Lock())),
    ):
        refused(lambda held=held: digest(Held(held)), "the backbone m contains", "version=")
    endless = []
    endless.append(endless)
    refused(lambda: digest(Held(endless)), "contain each other")


FILED = """
from torch import nn
import torch

class Net(nn.Module):
    size = 8

    def __init__(self):
        super().__init__()
        self.act, self.many = torch.relu, {"a": [1, 2.5, None], "b": (True, "x")}
        self.norm, self.device = nn.LayerNorm, torch.device("cpu")

    def forward(self, x):
        return x.mean((2, 3))

def build():
    torch.manual_seed(0)
    class Inner(Net):
        kept = 3
        def forward(self, x):
            return super().forward(x) * self.kept
    return Inner()
"""


def test_digests_of_modules_that_hold_plain_things_stay_as_they_were(tmp_path, monkeypatch):
    # Computed before objects were told: stores that were extracted then are found again.
    (tmp_path / "filed_nets.py").write_text(FILED)
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    module = importlib.import_module("filed_nets")
    try:
        assert digest(module.build())[:16] == "41bfe6ea07244c7a"
    finally:
        sys.modules.pop("filed_nets")
