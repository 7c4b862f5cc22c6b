"""``doctor``: what it looks at, and how to fix what it finds."""

import sys

import pytest
from command import fedcache

from fedcache.commands import doctor
from fedcache.config import Home
from fedcache.extract.backbones.backbone import library_caches
from fedcache.extract.device import Device


def test_doctor_looks_at_everything_and_says_how_to_fix_it(own_home, monkeypatch):
    monkeypatch.setenv("FEDCACHE_OFFLINE", "1")
    found = {e["name"]: e for e in fedcache("doctor --json").data["entries"]}
    assert {"Python", "torch", "numpy", "machine", "device", "extra plots"} <= set(found)
    assert {e["status"] for e in found.values()} <= {"ok", "warn", "fail"}
    assert all(e["hint"] for e in found.values() if e["status"] != "ok"), found
    assert str(own_home) in found["FEDCACHE_HOME"]["found"]
    assert str(library_caches().torch) in found["torch cache"]["found"]
    assert found["offline"]["found"].startswith("yes")


def test_a_torch_that_cannot_be_imported_is_told_with_how_to_fix_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchvision", None)
    row = doctor.device()
    assert row["status"] == "fail"
    assert "--force-reinstall torch torchvision" in row["hint"]


@pytest.mark.parametrize(
    ("found", "low", "status"),
    [
        ("2.10.0+cpu", "2.10", "ok"),
        ("2.10rc1", "2.9", "ok"),
        ("2.9.1", "2.10", "fail"),
        ("3.1", "3.1.1", "fail"),
    ],
)
def test_a_version_is_compared_by_its_numbers(monkeypatch, found, low, status):
    monkeypatch.setattr(doctor, "installed", lambda _: found)
    assert doctor.package("x", low)["status"] == status


def test_doctor_asks_for_what_an_installation_asks_for(monkeypatch):
    """Else doctor calls an installation good that pip refuses, or passes over an extra."""
    lines = [
        "torch<3,>=2.10",
        "uvicorn[standard]>=0.34",
        "matplotlib>=3.9; extra == 'plots'",
        'h5py>=3.11; python_version > "3" and extra == "h5"',
    ]
    monkeypatch.setattr(doctor, "requires", lambda _: lines)
    monkeypatch.setattr(doctor, "installed", lambda name: None if name == "h5py" else "9.9")
    assert doctor.requirements() == {
        "": {"torch": "2.10", "uvicorn": "0.34"},
        "plots": {"matplotlib": "3.9"},
        "h5": {"h5py": "3.11"},
    }
    plots, h5 = doctor.extras()
    assert plots["status"] == "ok"
    assert h5["status"] == "warn"
    assert h5["hint"] == "pip install 'fedcache[h5]'"


@pytest.mark.parametrize("smi", [True, False])
def test_a_gpu_that_torch_does_not_see_is_told(monkeypatch, smi):
    monkeypatch.setattr(doctor, "resolve_device", lambda _: Device("cpu", "2 cores", "no GPU"))
    monkeypatch.setattr(
        doctor.shutil, "which", lambda _name: "/usr/bin/nvidia-smi" if smi else None
    )
    row = doctor.device()
    assert row["status"] == ("warn" if smi else "ok")
    assert row["found"] == "cpu (2 cores): no GPU"
    assert bool(row["hint"]) is smi


def test_a_full_disk_and_folders_that_cannot_be_written_are_told(own_home, monkeypatch):
    home = Home(own_home)
    monkeypatch.setattr(doctor, "ROOM", 1 << 60)
    assert doctor.home_row(home)["status"] == "fail"
    assert "fedcache gc" in doctor.home_row(home)["hint"]
    monkeypatch.setattr(doctor.os, "access", lambda *_: False)
    assert "not writable" in doctor.home_row(home)["found"]
    assert doctor.torch_cache()["status"] == "warn"
