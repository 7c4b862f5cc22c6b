"""``fedcache backbones``: what is listed, imported, verified and refused."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
import torch
from checkpoint_files import resnet18_metadataset, save_metadataset
from command import fedcache, ok
from failing_command import must_fail
from pictures import folder
from safetensors.torch import load_file

from fedcache.extract.backbones.encoder import ModuleEncoder
from fedcache.store.files import file_sha256

NAME = "resnet18-quickdraw"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return save_metadataset(tmp_path / "model_best.pth.tar", resnet18_metadataset())


def ready() -> dict[str, bool]:
    return {entry["name"]: entry["ready"] for entry in ok("backbones list").data["backbones"]}


@pytest.mark.slow
def test_an_imported_checkpoint_is_ready_verified_and_described(
    own_home: Path, checkpoint: Path
) -> None:
    before = ready()
    assert before["random-projection"]
    assert not before[NAME]
    kept = Path(ok("backbones import", checkpoint, "--as", NAME).data["path"])
    assert kept.suffix == ".safetensors"
    assert kept.is_relative_to(own_home)
    assert ready() == {
        **before,
        NAME: True,
        **{n: True for n in before if n.startswith(f"{NAME}-")},
    }
    checked = ok("backbones verify", NAME).data
    assert (checked["width"], checked["sha256"]) == (512, file_sha256(kept))
    assert ok("backbones pull", NAME).data == {
        "name": NAME,
        "path": str(kept),
        "sha256": checked["sha256"],
    }


@pytest.mark.slow
def test_weights_may_be_named_for_one_command(checkpoint: Path) -> None:
    given = f"{NAME}={checkpoint}"
    listed = ok("backbones list --weights", given).data["backbones"]
    assert next(e for e in listed if e["name"] == NAME)["ready"]
    assert not ready()[NAME], "nothing was kept"


@pytest.mark.slow
def test_a_text_tower_has_a_width_and_its_text_is_verified() -> None:
    told = ok("backbones info glyph-clip").data
    assert told["text_width"] == told["width"]
    assert ok("backbones verify glyph-clip").data["width"] == told["width"]


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("verify", "clip-rn50"), 6),
        (("pull", "clip-rn50"), 6),
        (("info", "resnet18-quickdrow"), 2),
        (("import", "no-such-file.pth", "--as", NAME), 6),
    ],
)
def test_what_is_missing_or_misspelt_is_refused(
    words: tuple[str, ...], code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDCACHE_OFFLINE", "1")
    must_fail(words[1], "backbones", *words, code=code)


@pytest.mark.slow
def test_a_model_of_another_width_does_not_verify(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = ModuleEncoder.image
    for change in (lambda x: x[:, 1:], lambda x: x * float("nan")):
        monkeypatch.setattr(
            ModuleEncoder, "image", lambda self, x, change=change: change(real(self, x))
        )
        must_fail(
            "expected (2, 512)",
            f"backbones verify {NAME} --weights {NAME}={checkpoint}",
            code=6,
        )


@pytest.mark.slow
def test_a_checkpoint_of_several_models_is_refused_until_a_key_chooses(
    own_home: Path, tmp_path: Path
) -> None:
    state = resnet18_metadataset()
    path = tmp_path / "moco.pt"
    query = {f"module.encoder_q.{name}": tensor for name, tensor in state.items()}
    slow = {f"module.encoder_k.{name}": 0 * tensor for name, tensor in state.items()}
    torch.save({"state_dict": {**query, **slow, "module.queue": torch.ones(3)}, "epoch": 3}, path)
    images = folder(tmp_path / "shapes", train=1, test=1)
    asked = (
        "extract",
        "--dataset",
        f"folder:{images}",
        "-b",
        NAME,
        "--weights",
        f"{NAME}={path}",
        "--workers",
        0,
    )
    for words in (("backbones", "import", path, "--as", NAME), asked):
        refused = fedcache(*words, "--json")
        assert refused.code == 2
        hint = refused.envelope["error"]["hint"]
        assert f"--as {NAME} --key state_dict.module.encoder_q" in hint
    assert not list(own_home.glob("weights/*"))
    assert not list(own_home.glob("stores/*.zarr"))
    chosen = fedcache(*shlex.split(hint.partition("  or  ")[0].partition("fedcache ")[2]))
    assert chosen.code == 0
    kept = load_file(own_home / "weights" / f"{NAME}.safetensors")
    assert kept.keys() == state.keys()
    assert all(torch.equal(kept[name], state[name]) for name in state)


@pytest.mark.slow
def test_tensors_beside_the_weights_are_named_and_left_out(own_home: Path, tmp_path: Path) -> None:
    state = resnet18_metadataset()
    path = tmp_path / "swa.pt"
    torch.save(
        {"n_averaged": torch.tensor(3), **{f"module.{name}": t for name, t in state.items()}}, path
    )
    assert "n_averaged" in fedcache("backbones import", path, "--as", NAME).err
    assert load_file(own_home / "weights" / f"{NAME}.safetensors").keys() == state.keys()
