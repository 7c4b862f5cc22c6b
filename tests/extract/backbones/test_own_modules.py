"""The user's own torch modules are backbones: the features are the module's, and another module is another array."""

import importlib
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from command import data_of, ok
from failing_command import must_fail, must_fail_corrupt
from pictures import folder
from PIL import Image
from refusal import corruption, refused
from tolerance import close
from torch import nn

import fedcache as fc
from fedcache import Store
from fedcache.extract.backbones import load, lookup, own_module
from fedcache.extract.backbones.own_module import digest_of_module
from fedcache.plugins import note_named

FILE = """
import torch
from torch import nn
from {helper} import FACTOR


class Net(nn.Module):
    size, mean, std = 16, (0.5, 0.5, 0.5), (0.25, 0.5, 1.0)

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.conv = nn.Conv2d(3, 5, 3, stride=2)

    def forward(self, x):
        return self.conv(x).mean((2, 3)) * FACTOR


def build():
    return Net()


def halved():
    return Net(), lambda image: torch.ones(3, 16, 16) * image.getpixel((0, 0))[0] / 255


def unseeded():
    net = Net()
    torch.seed()
    net.conv.weight.data = torch.randn(5, 3, 3, 3)
    return net


def nothing():
    return 3


def broken():
    raise RuntimeError("no such disk")


def leaves_later():
    class Leaves(nn.Module):
        def forward(self, x):
            raise SystemExit(3)
    return Leaves()


NUMBER = 5
"""


@pytest.fixture
def nets(tmp_path, monkeypatch):
    """A module of the user's and its helper in the working directory; the names are the test's own."""
    place = tmp_path / "code"
    place.mkdir()
    name = f"my_nets_{abs(hash(str(tmp_path)))}"
    (place / f"{name}_helper.py").write_text("FACTOR = 2.0\n")
    (place / f"{name}.py").write_text(FILE.format(helper=f"{name}_helper"))
    monkeypatch.chdir(place)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])
    monkeypatch.setattr(own_module, "_BUILT", {})
    monkeypatch.setattr(own_module, "_IN_MEMORY", {})
    importlib.invalidate_caches()
    yield name
    for one in (name, f"{name}_helper"):
        sys.modules.pop(one, None)


def features(store):
    opened = store if isinstance(store, Store) else Store.open(store)
    (key,) = opened.arrays
    return np.asarray(opened.reader(key).rows(np.arange(opened.rows)), np.float32)[:, 0]


def flat(root):
    """Two images of one colour, of different sizes and classes."""
    for side in (8, 11):
        (root / f"class{side}").mkdir(parents=True)
        Image.new("RGB", (side, side), (51, 102, 204)).save(root / f"class{side}/x.png")


class Small(nn.Module):
    """Two features of an image: the mean of its first two channels after the norm."""

    size = 8

    def __init__(self, factor=1.0):
        super().__init__()
        self.factor = factor
        self.weight = nn.Parameter(torch.tensor([1.0, 2.0]))

    def forward(self, x):
        return x[:, :2].mean((2, 3)) * self.weight * self.factor


def test_a_factorys_features_are_those_of_its_module(nets, tmp_path):
    images = folder(tmp_path / "images", train=3, test=1)
    done = data_of(
        f"extract --dataset folder:{images} --backbones module:{nets}:build --recipe dtype=float32"
    )
    store = Store.open(done["path"])
    (array,) = store.arrays.values()
    assert array.recipe["backbone"] == f"module:{nets}:build"
    assert array.recipe["size"] == 16
    assert array.recipe["mean"] == [0.5, 0.5, 0.5]
    assert array.recipe["std"] == [0.25, 0.5, 1.0]
    assert array.recipe["pooling"] == "output"
    module = importlib.import_module(nets).build().eval()
    # Another way: Pillow's resize and numpy's norm in float64, of every image.
    expected = []
    for name in store.samples.name:
        square = (
            np.asarray(
                Image.open(images / name).resize((16, 16), Image.Resampling.BICUBIC), np.float64
            )
            / 255
        )
        x = torch.tensor((square - 0.5) / [0.25, 0.5, 1.0]).float().permute(2, 0, 1)[None]
        expected.append(module(x)[0].detach().numpy())
    assert len(expected) == 12
    assert close(features(store), np.array(expected), 16 * 16 * 3)


def test_the_values_are_worked_by_hand(nets, tmp_path):
    # An image of one colour (51, 102, 204): x = (0.2, 0.4) in channels 0 and 1 without a norm (mean 0, std 1);
    # times weights (1, 2) and factor 3: 0.6 and 2.4.
    flat(tmp_path / "flat")
    name = fc.backbone(Small(3.0), "flat", mean=(0, 0, 0), std=(1, 1, 1))
    assert name == "module:flat"
    store = fc.extract(f"folder:{tmp_path / 'flat'}", [name], recipe={"dtype": "float32"})
    assert close(features(store), np.array([[0.6, 2.4]] * 2), 16 * 16 * 3)


def test_a_transform_makes_the_input(nets, tmp_path):
    flat(tmp_path / "flat")
    seen = []

    def transform(image):
        seen.append((image.mode, image.size))
        return torch.from_numpy(np.asarray(image).astype(np.float32)).permute(2, 0, 1)

    store = fc.extract(
        f"folder:{tmp_path / 'flat'}",
        fc.backbone(Small(), transform=transform),
        recipe={"dtype": "float32"},
    )
    assert features(store) == pytest.approx(np.array([[51.0, 204.0]] * 2))
    assert set(seen) == {("RGB", (8, 8))}
    refused(
        lambda: fc.extract(
            f"folder:{tmp_path / 'flat'}", ["module:Small"], recipe={"norm": "clip"}
        ),
        "takes unnormalised pixels",
    )


@pytest.mark.slow
def test_a_module_is_left_as_it_is_and_trained_further_it_is_another_array(nets, tmp_path):
    images = folder(tmp_path / "images", train=2, test=1)
    module = Small().train()
    first = fc.extract(f"folder:{images}", module)
    assert module.training
    assert module.weight.requires_grad
    assert list(fc.extract(f"folder:{images}", [module]).arrays) == list(first.arrays)
    with torch.no_grad():
        module.weight += 1
    assert len(fc.extract(f"folder:{images}", [module]).arrays) == 2
    assert {
        a.recipe["backbone"] for a in fc.extract(f"folder:{images}", [module]).arrays.values()
    } == {"module:Small"}


@pytest.mark.parametrize(
    ("shape", "expected"),
    [((6, 2), [5.0, 6.0]), ((2, 3, 4), [5.5, 17.5])],  # the means of 0, 2, .. 10 and of 0, 1, .. 11
)
def test_tokens_and_maps_are_averaged_and_the_recipe_says_so(nets, shape, expected):
    class Places(nn.Module):
        size = 8

        def forward(self, x):
            return torch.arange(float(np.prod(shape))).reshape(shape).expand(len(x), *shape)

    row = lookup(fc.backbone(Places(), "places"))
    assert row.width == 2
    assert row.recipe.pooling == "avg(output)"
    encoder = load(row, own_module.weights_of(row), row.recipe)
    assert encoder.image(torch.zeros(1, 8, 8, 3, dtype=torch.uint8)).tolist() == [expected]


CHANGES = {
    "a weight": lambda m: m.weight.data.add_(1e-7),
    "a dtype": lambda m: setattr(m, "weight", nn.Parameter(m.weight.double())),
    "an attribute": lambda m: setattr(m, "factor", 2.0),
    "a buffer that is not saved": lambda m: m.register_buffer("b", torch.ones(1), persistent=False),
    "a part": lambda m: m.add_module("more", nn.Identity()),
    "a hook": lambda m: m.register_forward_hook(hook),
    "a function": lambda m: setattr(m, "act", torch.relu),
}


def hook(module, inputs, output):
    return output * 2


def test_what_changes_features_changes_the_digest():
    def digest(module):
        return digest_of_module(
            "m", own_module.OwnModule(module, None, 8, (0, 0, 0), (1, 1, 1), 2, 2)
        )

    module = Small()
    assert digest(module) == digest(Small())
    assert digest(module.train()) == digest(Small().eval())
    for name, change in CHANGES.items():
        changed = Small()
        change(changed)
        assert digest(changed) != digest(module), name


def test_a_changed_line_or_helper_is_another_array(nets):
    name = f"module:{nets}:build"
    note_named(name)

    def digest():
        for one in (nets, f"{nets}_helper"):
            sys.modules.pop(one, None)
        importlib.invalidate_caches()
        own_module._BUILT.clear()
        return own_module.weights_of(lookup(name)).sha256

    first = digest()
    assert digest() == first
    Path(f"{nets}_helper.py").write_text("FACTOR = 20.0\n")
    assert digest() != first


@pytest.mark.slow
def test_workers_build_it_and_give_the_same_bytes(nets, tmp_path):
    images = folder(tmp_path / "images", train=6, test=2)
    words = f"extract --dataset folder:{images} --batch 4 --backbones module:{nets}"
    here = tmp_path / "here.zarr"
    there = tmp_path / "there.zarr"
    ok(f"{words}:build --workers 0 --store {here}")
    assert data_of(f"{words}:build --workers 1 --store {there}")["workers"] == 1
    assert np.array_equal(features(here), features(there))
    must_fail_corrupt("torch.manual_seed(0)", f"{words}:unseeded --workers 1")


def test_one_in_memory_runs_here_for_every_number_of_workers(nets, tmp_path):
    images = folder(tmp_path / "images", train=6, test=2)
    assert fc.extract(f"folder:{images}", Small(), workers=2, batch=4).rows == 24
    row = lookup("module:Small")
    weights = own_module.weights_of(row)
    own_module._IN_MEMORY["module:Small"].module.weight.data.add_(1)
    corruption(lambda: load(row, weights, row.recipe), "changed during the command")


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("no_such_package.at_all:f", "ModuleNotFoundError"),
        ("{nets}:NUMBER", "int"),
        ("{nets}:nothing", "nn.Module"),
        ("{nets}:broken", "RuntimeError: no such disk"),
        ("{nets}:leaves_later", "SystemExit: 3"),
        ("leaving:build", "SystemExit: 3"),
        ("mine", "fc.backbone(module, name='mine')"),
    ],
)
def test_what_is_no_module_is_a_sentence(nets, spec, said):
    Path("leaving.py").write_text("import sys\nsys.exit(3)\n")
    must_fail(said, f"extract --dataset digits --backbones module:{spec.format(nets=nets)}")


def test_a_module_of_images_has_no_output_to_choose(nets):
    words = f"extract --dataset digits --backbones module:{nets}:build --recipe output=x"
    must_fail("Unknown recipe key 'output'", words)


class Shaped(nn.Module):
    def __init__(self, out, **said):
        super().__init__()
        self.out = out
        vars(self).update(said)

    def forward(self, x):
        return self.out(x)


@pytest.mark.parametrize(
    ("module", "said"),
    [
        (Shaped(lambda x: {"a": x}), "dict"),
        (Shaped(lambda x: x.mean()), "[]"),
        (Shaped(lambda x: x.mean((2, 3)) * float("nan")), "finite"),
        (Shaped(lambda x: x.mean((2, 3)), size="big"), "'big'"),
        (Shaped(lambda x: x.mean((2, 3)), mean=(1, 2)), "mean"),
        (Shaped(lambda x: x.mean((2, 3)) - 0.01 * x.mean((0, 2, 3))), "batch"),
        (3, "int"),
    ],
)
def test_modules_that_give_no_features_are_refused(nets, module, said):
    refused(lambda: fc.extract("digits", module), said)


class OfTexts(Shaped):
    reads = "texts"

    def forward(self, texts):
        return self.out(torch.tensor([[float(len(text)), 1.0] for text in texts]))


def test_modules_of_texts_that_give_no_features_are_refused(nets):
    refused(lambda: fc.backbone(OfTexts(lambda x: x[:, :0])), "gives empty rows")
    refused(lambda: fc.backbone(OfTexts(torch.fft.fft)), "complex")
    assert fc.backbone(OfTexts(lambda x: x)) == "module:OfTexts"
    refused(lambda: fc.backbone(OfTexts(lambda x: x), size=32), "size applies only to images")
    refused(lambda: fc.extract("digits", [Small(), Small(2.0)]), "module:Small")
    refused(lambda: fc.backbone(Small(), "a,b"))


@pytest.mark.filterwarnings(
    "ignore:.*torch.jit.*:FutureWarning", "ignore:.*torch.jit.*:DeprecationWarning"
)
def test_torchscript_is_refused_also_as_a_part(nets):
    for made in (
        torch.jit.script(nn.Flatten()),
        torch.jit.trace(Small(), torch.zeros(2, 3, 8, 8)),
        nn.Sequential(torch.jit.script(nn.Flatten()), nn.Identity()),
    ):
        refused(lambda made=made: fc.backbone(made, "scripted", size=8), "TorchScript", "onnx:FILE")


class Picky(nn.Module):
    size = 8

    def forward(self, x):
        if len(x) == 4 and x.max() > 0:  # the speed is measured with black images
            raise RuntimeError("no batch of four")
        return x.mean((2, 3))


def test_a_module_that_fails_on_a_batch_is_named_with_its_rows(tmp_path):
    flat(tmp_path)
    data = f"folder:{tmp_path}"
    refused(
        lambda: fc.extract(data, [Picky()], batch=4, workers=0),
        "module:Picky fails on the batch that begins with row 0",
        "no batch of four",
    )
