"""``fedcache backbones``: what is listed, imported, verified and refused."""

import pytest
from checkpoint_files import resnet18_metadataset, save_metadataset
from command import data_of
from failing_command import must_fail, must_fail_machine
from made_path import place_of

from fedcache.extract.backbones.backbone import ModuleEncoder
from fedcache.store.files import file_sha256

NAME = "resnet18-quickdraw"


@pytest.fixture
def checkpoint(tmp_path):
    return save_metadataset(tmp_path / "model_best.pth.tar", resnet18_metadataset())


def ready():
    return {entry["name"]: entry["ready"] for entry in data_of("backbones list")["backbones"]}


@pytest.mark.slow
def test_an_imported_checkpoint_is_ready_verified_and_described(own_home, checkpoint):
    before = ready()
    assert before["random-projection"]
    assert not before[NAME]
    kept = place_of(f"backbones import {checkpoint} --as {NAME}")
    assert kept.suffix == ".safetensors"
    assert kept.is_relative_to(own_home)
    assert ready() == {
        **before,
        NAME: True,
        **{n: True for n in before if n.startswith(f"{NAME}-")},
    }
    checked = data_of(f"backbones verify {NAME}")
    assert checked["width"] == 512
    assert checked["sha256"] == file_sha256(kept)
    assert data_of(f"backbones pull {NAME}") == {
        "name": NAME,
        "path": str(kept),
        "sha256": checked["sha256"],
    }


@pytest.mark.slow
def test_weights_may_be_named_for_one_command(checkpoint):
    listed = data_of(f"backbones list --weights {NAME}={checkpoint}")["backbones"]
    assert next(e for e in listed if e["name"] == NAME)["ready"]
    assert not ready()[NAME], "nothing was kept"


@pytest.mark.slow
def test_a_text_tower_has_a_width_and_its_text_is_verified():
    told = data_of("backbones info glyph-clip")
    assert told["text_width"] == told["width"]
    assert data_of("backbones verify glyph-clip")["width"] == told["width"]


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ("verify clip-rn50", 6),
        ("pull clip-rn50", 6),
        ("info resnet18-quickdrow", 2),
        (f"import no-such-file.pth --as {NAME}", 6),
    ],
)
def test_what_is_missing_or_misspelt_is_refused(words, code, monkeypatch):
    monkeypatch.setenv("FEDCACHE_OFFLINE", "1")
    must_fail(words.split()[1], f"backbones {words}", code=code)


@pytest.mark.slow
def test_a_model_of_another_width_does_not_verify(checkpoint, monkeypatch):
    real = ModuleEncoder.image
    for change in (lambda x: x[:, 1:], lambda x: x * float("nan")):
        monkeypatch.setattr(
            ModuleEncoder, "image", lambda self, x, change=change: change(real(self, x))
        )
        must_fail_machine(
            "Expected the shape [2, 512]", f"backbones verify {NAME} --weights {NAME}={checkpoint}"
        )
