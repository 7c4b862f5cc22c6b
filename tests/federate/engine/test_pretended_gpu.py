"""Every method under every execution on a pretended GPU: no operation mixes devices, and the run is that of the CPU."""

from dataclasses import replace

import pytest
import torch
from draws import FULL, one_of_each
from federation import VARIANTS, cases, difference, gap, keeps, on_cpu, trial_of_case
from methods_tried import tried
from pairs import parametrize, served
from pretend_gpu import pretended_gpu
from setting_lines import set_to

from fedcache.federate.engine import run as engine
from fedcache.federate.engine.client_data import StoredRows
from fedcache.federate.engine.run import TrainingRun
from fedcache.federate.engine.simulated_time import TimingRule
from fedcache.federate.execution import memory_estimate
from fedcache.federate.methods import METHODS
from fedcache.federate.trust.attacks import parse_attack
from fedcache.federate.trust.pipeline import TrustPolicy
from fedcache.federate.trust.privacy import Privacy
from fedcache.federate.trust.robust_rules import parse_rule
from fedcache.testing.method_laws import fitted

pytest_generate_tests = parametrize


DRAWN = tried(cases() + VARIANTS if FULL else one_of_each(cases()))


@served(DRAWN, ["sequential", "batched", "gram"], in_turn=True)
def test_no_operation_mixes_devices(case, execution):
    trial = trial_of_case(case, execution)
    data, clients = trial.with_views()
    data = fitted(trial.method, data)
    here = trial.run((data, clients))
    with pretended_gpu():
        there = trial.run((data.to("cuda"), clients))
        assert {t.device.type for t in there.server.values()} <= {"cuda"}
        assert difference(here, on_cpu(there)) <= trial.closeness
    assert here.traffic == there.traffic


FEW = [case for case in DRAWN if case[0] in ("fedavg", "fedpcl", "ditto", "fed3r", "fst-cbdg")]


@pytest.mark.slow
@served(
    [case for case in FEW if not METHODS[case[0]].one_shot],
    ["sequential", "batched", "gram"],
    in_turn=True,
)
def test_a_run_goes_on_from_what_was_kept_of_either_device(case, execution):
    trial = trial_of_case(case, execution)
    data, clients = trial.with_views()
    whole = trial.run((data, clients), rounds=3)
    with pretended_gpu():
        for first, second in (("cpu", "cuda"), ("cuda", "cpu"), ("cuda", "cuda")):
            kept = []
            trial.run((data.to(first), clients), rounds=3, on_round=keeps(kept))
            # as a file has it
            snapshot = kept[0]._replace(tensors={k: t.cpu() for k, t in kept[0].tensors.items()})
            rest = trial.run((data.to(second), clients), rounds=3, state=snapshot)
            assert difference(whole, on_cpu(rest)) <= trial.closeness


WAYS = {
    **{
        rule: {"trust": TrustPolicy(parse_rule(rule))}
        for rule in ("median", "trimmed:0.3", "geomedian", "krum")
    },
    **{
        name: {"trust": TrustPolicy(attack=parse_attack(f"{name}:0.4"))}
        for name in ("alie", "gaussian", "mimic")
    },
    "labels": {"trust": TrustPolicy(attack=parse_attack("label-flip:0.4"))},
    "bounds": {"trust": TrustPolicy(on_bad="reject", max_norm=5.0, max_share=0.4)},
    "noise": {"trust": TrustPolicy(privacy=Privacy(1.0, 0.5, seed=0))},
    "asynchronous": {"timing": TimingRule(buffer=2), "rounds": 4},
}
"""In what runs differ beyond their method."""


@pytest.mark.parametrize("way", WAYS)
def test_ways_to_pool_and_wait_are_those_of_the_cpu(way):
    trial = trial_of_case(("fedavg", set_to("bn=false opt=sgd lr=0.05")), "batched")
    data, clients = trial.federation()
    here = trial.run((data, clients), **WAYS[way])
    with pretended_gpu():
        there = trial.run((data.to("cuda"), clients), **WAYS[way])
        assert difference(here, on_cpu(there)) <= trial.closeness


@served(FEW, ["sequential", "batched", "gram"], in_turn=True)
def test_stored_rows_are_those_of_the_cpu(case, execution):
    trial = trial_of_case(case, execution)
    data, clients = trial.with_views()
    text = None if data.text is None else data.text.float()
    stored = replace(data, x=StoredRows(data.x.half()), text=text)
    here = trial.run((stored, clients), dtype=torch.float32)
    with pretended_gpu():
        there = trial.run((stored.to("cuda"), clients), dtype=torch.float32)
        assert difference(here, on_cpu(there)) <= 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ditto", "solo"])
def test_what_clients_keep_in_a_file_is_read_to_the_gpu(name, tmp_path, monkeypatch):
    monkeypatch.setattr(memory_estimate, "STATES", 0)
    trial = trial_of_case((name, {}), "batched")
    data, clients = trial.federation()
    spec = {"rounds": 3, "participation": 3, "dtype": torch.float64, "execution": "batched"}
    table = tmp_path / "states.table"
    (here,) = engine.run_points(TrainingRun(trial.method, data, clients, **spec), [trial.hp])
    with pretended_gpu():
        run = TrainingRun(trial.method, data.to("cuda"), clients, **spec)
        (there,) = engine.run_points(run, [trial.hp], tables=[table])
        assert table.exists()
        assert there.client_accuracy.tolist() == here.client_accuracy.tolist()
        assert gap(here.server, {k: t.cpu() for k, t in there.server.items()}) <= trial.closeness
