"""Another seed gives other draws: in every random stream, each looked at alone.

That equal seeds give equal runs is a law of its own, which a stream that ignores the seed keeps too. Two runs that
differ in their seed differ somewhere as soon as one stream does, so the draws are compared stream by stream.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from draws import FULL, one_of_each
from federation import VARIANTS, cases, ids, trial_of_case
from methods_tried import tried

from fedcache.federate.engine import run_state
from fedcache.federate.engine.client_clusters import ClusterRule
from fedcache.federate.engine.context import ClientRng
from fedcache.federate.engine.sampling import UNIFORM, ClientSampler, SamplingRule
from fedcache.federate.engine.simulated_time import TimingRule
from fedcache.federate.methods import fed3r
from fedcache.federate.trust.attacks import parse_attack
from fedcache.federate.trust.privacy import PrivateDraws

DRAWS = ("each", "permutations", "uniform", "normal", "shared", "generator")
"""Everything by which a method draws; the first argument is the name of the stream."""


def watched(draws):
    """A ``ClientRng`` that enters all it draws into ``draws``, by how it draws and the name of the stream."""

    class Watched(ClientRng):
        def __getattribute__(self, name):
            made = super().__getattribute__(name)
            if name not in DRAWS:
                return made

            def draw(purpose, *args, **kwargs):
                drawn = made(purpose, *args, **kwargs)
                values = draws.setdefault((name, purpose), [])
                if name == "generator":
                    values.append(drawn.bit_generator.state["state"]["state"])
                elif name == "uniform":
                    return lambda shape: values.append(found := drawn(shape)) or found
                else:
                    values.append(drawn)
                return drawn

            return draw

    return Watched


def draws_of(case, seed, monkeypatch):
    """All that two rounds of all clients draw, by how it is drawn and the name of the stream."""
    draws = {}
    with monkeypatch.context() as patch:
        patch.setattr(run_state, "ClientRng", watched(draws))
        trial = trial_of_case(case, "sequential")
        trial.run(trial.with_views(), rounds=2, participation=None, seed=seed)
    return draws


def alike(one, other):
    """Whether two lists of draws are the same values."""
    if len(one) != len(other):
        return False
    return all(torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in zip(one, other, strict=True))


def takes_batches(case):
    """Whether a case declares batches of rows and takes steps on them.

    L-BFGS reads all rows at once, and ``tsamp_central`` trains on rows that the server draws.
    """
    hp = trial_of_case(case, "sequential").hp
    return "batch" in hp and (case[0] != "central" or hp["probe"] == "sgd") and hp.get("ablation") != "tsamp_central"


SWITCHES = {"ablation", "init", "noise_on", "probe", "proto_drop_last", "synth", "train_view", "views", "vp_template"}
"""Switches that add or remove a stream; variants of others are tried in the full draw."""
EACH = [case for case in one_of_each(cases(), lambda case: case[0]) if case[0] != "central"]  # L-BFGS draws nothing


@pytest.mark.parametrize("case", tried([*EACH, *(v for v in VARIANTS if FULL or SWITCHES & v[1].keys())]), ids=ids)
def test_every_stream_of_a_method_is_another_with_another_seed(case, monkeypatch):
    one, other = (draws_of(case, seed, monkeypatch) for seed in (3, 1))
    assert one.keys() == other.keys()
    for how, stream in one:
        assert not alike(one[how, stream], other[how, stream]), f"the stream {stream!r} does not depend on the seed"
    if takes_batches(case):
        assert "permutations" in {how for how, _ in one}, "the order of batches is not drawn from the seed"


NAMES = ("e", "a", "d", "b", "c", "j", "i", "h", "g", "f")
M = len(NAMES)
ROWS = np.arange(3.0, 3.0 + M)
ROUNDS = range(8)


def sampler(seed, rule=UNIFORM):
    return ClientSampler(NAMES, np.arange(M), seed, ROWS, rule)


def attacked(seed):
    """What two of four clients send under an attack that draws."""
    V = torch.ones(4, 3, dtype=torch.float64)
    return parse_attack("gaussian:0.5:3")(V, torch.tensor([True, True, False, False]), seed, 0).tolist()


STREAMS = {
    "the clients of a round": lambda seed: [sampler(seed).drawn(r, 4) for r in ROUNDS],
    "the clients of a round, weighted by rows": lambda seed: [
        sampler(seed, SamplingRule("weighted")).drawn(r, 4) for r in ROUNDS
    ],
    "clients that are each drawn by themselves": lambda seed: [
        sampler(seed, SamplingRule("poisson")).drawn(r, 4) for r in ROUNDS
    ],
    "which clients are available": lambda seed: [
        sampler(seed, SamplingRule(available=0.5)).drawn(r, M) for r in ROUNDS
    ],
    "which clients drop out": lambda seed: [sampler(seed, SamplingRule(dropout=0.5)).lost(r, M) for r in ROUNDS],
    "which clients form a cluster": lambda seed: ClusterRule(2, 1).places(NAMES, np.arange(M), seed).rows.tolist(),
    "the clusters of a round": lambda seed: [
        sampler(seed, SamplingRule(clusters=ClusterRule(5, 2))).drawn(r, M) for r in ROUNDS
    ],
    "clients that begin while others train": lambda seed: [sampler(seed).begin(r, 1, 2, [0]) for r in ROUNDS],
    "clients whose personal models are scored": lambda seed: sampler(seed).scored(4),
    "how long clients train": lambda seed: TimingRule().of_clients(NAMES, ROWS, seed)([0, 1, 2], 0),
    "which clients attack": lambda seed: sorted(parse_attack("sign-flip:0.4").attackers(NAMES, seed)),
    "what attackers send": attacked,
    "who takes part in a simulated private round": lambda seed: [*PrivateDraws(None, seed, (), {}, []).uniforms(0, M)],
    "random Fourier features": lambda seed: fed3r._drawn(seed, 3, 4, 1.0)[0].tolist(),
}


@pytest.mark.parametrize("stream", STREAMS)
def test_every_stream_beside_the_methods_is_another_with_another_seed(stream):
    draw = STREAMS[stream]
    assert draw(3) == draw(3)
    assert draw(3) != draw(1)
