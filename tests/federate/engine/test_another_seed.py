"""Another seed gives other draws: in every random stream, each looked at alone.

That equal seeds give equal runs is a law of its own, which a stream that ignores the seed keeps too. Two runs that
differ in their seed differ somewhere as soon as one stream does, so the draws are compared stream by stream.
"""

import pytest
import torch
from draws import FULL, one_of_each
from federation import VARIANTS, cases, ids, trial_of_case
from methods_tried import tried

from fedcache.federate.engine import run_state
from fedcache.federate.engine.context import ClientRng

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
    return all(
        torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
        for a, b in zip(one, other, strict=True)
    )


def takes_batches(case):
    """Whether a case declares batches of rows and takes steps on them.

    L-BFGS reads all rows at once, and ``tsamp_central`` trains on rows that the server draws.
    """
    hp = trial_of_case(case, "sequential").hp
    return (
        "batch" in hp
        and (case[0] != "central" or hp["probe"] == "sgd")
        and hp.get("ablation") != "tsamp_central"
    )


SWITCHES = {
    "ablation",
    "init",
    "noise_on",
    "probe",
    "proto_drop_last",
    "synth",
    "train_view",
    "views",
    "vp_template",
}
"""Switches that add or remove a stream; variants of others are tried in the full draw."""
EACH = [case for case in one_of_each(cases()) if case[0] != "central"]  # L-BFGS draws nothing


@pytest.mark.parametrize(
    "case", tried([*EACH, *(v for v in VARIANTS if FULL or SWITCHES & v[1].keys())]), ids=ids
)
def test_every_stream_of_a_method_is_another_with_another_seed(case, monkeypatch):
    one = draws_of(case, 3, monkeypatch)
    other = draws_of(case, 1, monkeypatch)
    assert one.keys() == other.keys()
    for how, stream in one:
        assert not alike(one[how, stream], other[how, stream]), (
            f"the stream {stream!r} does not depend on the seed"
        )
    if takes_batches(case):
        assert "permutations" in {how for how, _ in one}, (
            "the order of batches is not drawn from the seed"
        )
