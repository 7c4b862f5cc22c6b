"""On a GPU: every method under every execution is what it is on the CPU, and the commands do what they say.

Draws are made on the CPU, so that in float64 both devices differ by the order of sums alone. `make test-gpu` runs them.
"""

import json

import numpy as np
import pytest
import torch
from command import data_of, fedcache, ok
from draws import one_of_each
from federation import cases, difference, on_cpu, trial_of_case
from pairs import parametrize, served
from toy_store import content

from fedcache.errors import Exit
from fedcache.federate.methods import METHODS
from fedcache.store.store import Store
from fedcache.testing.method_laws import fitted

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU"),
]


pytest_generate_tests = parametrize


@served(one_of_each(cases()), ["sequential", "batched", "gram"])
def test_a_gpu_computes_what_the_cpu_does(case, execution):
    trial = trial_of_case(case, execution)
    data, clients = trial.with_views()
    data = fitted(trial.method, data)
    here, there = trial.run((data, clients)), trial.run((data.to("cuda"), clients))
    assert all(t.device.type == "cuda" for t in there.server.values())
    # From scratch, BatchNorm over a few pixels makes 1e-2 (seen on an H200) of the order of sums.
    scratch = "batched" not in trial.method.executions and "pixels" in trial.method.needs
    assert difference(here, on_cpu(there)) <= (1000 if scratch else 100) * trial.closeness
    assert here.traffic == there.traffic


@pytest.fixture
def digits():
    """The digits' features, computed on the GPU, and dealt to ten clients."""
    ok("extract --dataset digits --backbones glyph-clip --device cuda")
    ok("partition --scheme dirichlet --clients 10 --alpha 0.3 --name ten")


def features(home):
    (path,) = home.glob("stores/*.zarr")
    store = Store.open(path)
    return np.concatenate([store.Xy("glyph-clip", split=s)[0] for s in ("train", "test")]).astype(
        np.float64
    )


def test_features_of_a_gpu_are_those_of_the_cpu(digits, own_home, tmp_path, monkeypatch):
    there = features(own_home)
    monkeypatch.setenv("FEDCACHE_HOME", str(tmp_path / "cpu"))
    ok("extract --dataset digits --backbones glyph-clip --device cpu")
    here = features(tmp_path / "cpu")
    cosine = (here * there).sum(1) / np.linalg.norm(here, axis=1) / np.linalg.norm(there, axis=1)
    assert cosine.min() > 0.999


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_decoders_streams_and_graphs_give_what_one_process_gives(own_home, tmp_path, dtype):
    words = (
        f"extract --dataset digits --backbones glyph-clip,efficientnet-lite0 --size 32 --batch 128 "
        f"--dtype {dtype}"
    )
    alone = tmp_path / "alone.zarr"
    ok(f"{words} --device cuda --workers 0 --store {alone}")
    for device in ("cuda", "cuda:0"):
        piped = tmp_path / f"{device}.zarr"
        done = ok(f"{words} --device {device} --workers 3 --store {piped}")
        assert "without CUDA graphs" not in done.err
        assert content(piped) == content(alone)


@pytest.mark.parametrize(
    ("share", "command", "said"),
    [
        (
            2e-3,
            "extract --dataset digits --backbones efficientnet-lite0 --batch 1024",
            ("batch of 1024 images", "--batch 512"),
        ),
        (1e-6, "train --method fedavg --partition ten --rounds 2", ("memory",)),
    ],
)
def test_what_a_gpu_cannot_hold_is_said_in_one_sentence(digits, share, command, said):
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(share)
    try:
        done = fedcache(f"{command} --device cuda")
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert done.code == Exit.ENVIRONMENT
    assert "Traceback" not in done.err
    assert all(words in done.err for words in said)


@pytest.mark.parametrize("method", ["fedavg", "fed3r", "fedpcl", "fst-cbdg", "fedcgs", "fedrep"])
def test_a_command_trains_on_a_gpu_what_it_trains_on_the_cpu(digits, own_home, method):
    rounds = "" if METHODS[method].one_shot else "--rounds 3"
    line = f"train --method {method} --partition ten {rounds} --device"
    there, here = data_of(line, "cuda"), data_of(line, "cpu")
    assert (there["device"], here["device"]) == ("cuda", "cpu")
    assert abs(there["accuracy"]["mean"] - here["accuracy"]["mean"]) < 0.02
    assert data_of(line, "cuda")["accuracy"]["mean"] == there["accuracy"]["mean"]


def test_a_grid_and_what_is_made_of_its_models_on_a_gpu(digits, own_home, tmp_path):
    ok("grid --method fedavg --partition ten --rounds 3 --sweep lr=0.001,0.01 --device cuda")
    found = [json.loads(p.read_text()) for p in own_home.glob("runs/*/result.json")]
    assert {r["device"] for r in found} == {"cuda"}
    run = data_of("train --method fedpcl --partition ten --rounds 2 --device cuda")
    assert ok(f"evaluate {run['digest'][:12]} --dataset digits --device cuda").code == 0
    assert ok(f"report -o {tmp_path}/r.html").code == 0


def test_prompts_are_trained_through_the_text_encoder_on_a_gpu(digits):
    words = "--method promptfl --partition ten --rounds 1 --participation 2 --set epochs=1"
    done = data_of(f"train {words} --device cuda")
    assert done["device"] == "cuda"
    assert done["accuracy"]["mean"] > 0.1
