"""Private runs: fresh noise, what it costs over seeds, grids and repeats, what is told and tracked, and who trains."""

import json
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from command import data_of, fedcache, ok
from failing_command import must_fail
from heard import Heard
from made_path import place_of
from private_starts import CONFIG as STARTED
from private_starts import home, ingested
from refusal import corruption, stopped
from safetensors import safe_open
from text_tables import rows_of

from fedcache.config import Home
from fedcache.errors import Exit
from fedcache.process import Stop
from fedcache.runs import directory, trackers
from fedcache.runs.directory import measured_of, rounds_of
from fedcache.runs.loop import train
from fedcache.runs.privacy_ledger import Release, read_releases, record_release, totals_of_datasets

TRAIN = "train --method fedavg --scheme iid --clients 10 --rounds 4 --participation 0.5 --dp-clip 1"
REAL = f"{TRAIN} --dp-noise 2 --dp-allow evaluation"
GRID = REAL.replace("train", "grid")
SIMULATED = f"{TRAIN} --dp-noise 2 --dp-seed 3"


@pytest.fixture(autouse=True)
def store(once):
    pytest.importorskip("dp_accounting")
    return once(ingested)


def releases():
    return list(read_releases(home() / "privacy.jsonl"))


def kept(done):
    """Scores of a run that follow its weights closely: of every client and class."""
    return done["confusion"], done["accuracy"]["per_seed"]


def test_real_noise_must_be_asked_for_with_what_it_does_not_cover():
    assert "--dp-seed 0" in must_fail("--dp-allow evaluation", f"{TRAIN} --dp-noise 2")["hint"]
    assert not (home() / "privacy.jsonl").exists()
    assert not (home() / "runs").exists()


@pytest.mark.slow
def test_two_real_runs_of_one_command_differ_and_both_are_spent():
    first = data_of(REAL)
    again = data_of(REAL)
    assert again["reused"]
    assert kept(again) == kept(first)
    assert "--fresh draws new noise" in fedcache(REAL).err
    assert len(releases()) == 1
    fresh = data_of(f"{REAL} --fresh")
    assert fresh["digest"] == first["digest"]
    assert fresh["files"] != first["files"] or kept(fresh) != kept(first)
    assert len(releases()) == 2
    cost = fresh["trust"]["privacy"]
    assert cost["simulation"] is False
    assert cost["repeatable"] is False


def test_the_model_of_a_private_run_is_kept_and_what_its_loss_costs_is_said():
    run = place_of(REAL)
    simulated = place_of(SIMULATED)
    ok("gc --kind models --delete")
    assert (run / "models").is_dir()
    assert not (simulated / "models").exists()
    shutil.rmtree(run / "models")
    moved = simulated.rename(simulated.with_name("my run"))
    for path, told in ((run, True), (moved, False)):
        refused = fedcache("predict", path, "photo.jpg")
        assert refused.code == Exit.STORE
        assert ("spends as much privacy again" in refused.err) is told


@pytest.mark.slow
def test_a_simulation_says_so_wherever_its_epsilon_is_told():
    first = data_of(SIMULATED)
    assert data_of(f"{SIMULATED} --fresh")["files"] == first["files"]
    assert first["trust"]["privacy"]["simulation"] is True
    lines = [line for line in fedcache(SIMULATED).out.splitlines() if "epsilon" in line]
    assert lines
    assert all("Simulation of privacy" in line for line in lines)
    assert not (home() / "privacy.jsonl").exists()


@pytest.mark.slow
def test_a_simulation_has_the_same_noise_in_every_execution_and_in_a_grid():
    words = f"{SIMULATED} --dtype float64"
    one = data_of(f"{words} --execution sequential")
    assert kept(one) == kept(data_of(f"{words} --execution batched"))
    points = data_of(words.replace("train", "grid"), "--sweep", "lr=0.1,0.01")["points"]
    assert kept(points[1]) == kept(data_of(f"{words} --set lr=0.01"))


@pytest.mark.slow
def test_epsilon_composes_over_seeds_points_and_repeats():
    done = data_of(f"{REAL} --seeds 0-4")["trust"]["privacy"]
    costs(done, 4, seeds=5)
    assert done["composed"]["epsilon_pld"] == pytest.approx(composed((2.0, 0.5, 20)))
    (spent,) = data_of(f"{GRID} --sweep lr=0.1,0.01,0.001 --seeds 0,1")["privacy"]
    # lr=0.1 is the run that has five seeds: none of them is trained again, and all of them count.
    costs(spent, 36, points=3, seeds=9)
    (total,) = data_of("ls --privacy")["entries"]
    costs(total, 36, releases=9, runs=3, rounds=36)
    ok(f"{REAL} --clients 5")  # other clients: a partition of its own
    both = data_of("ls --privacy")
    assert [entry["releases"] for entry in both["entries"]] == [9, 1]
    (of_rows,) = both["datasets"]
    assert of_rows["partitions"] == 2
    assert of_rows["releases"] == 10
    assert of_rows["rounds"] == 40
    share = both["releases"][-1]["share"]
    assert of_rows["epsilon_pld"] == pytest.approx(composed((2.0, 0.5, 36), (2.0, share, 4)))


def costs(told, of_rounds, **said):
    """Epsilon is that of so many rounds with noise of 2 and half of the clients in each, and the rest is as said."""
    assert {name: told[name] for name in said} == said
    assert told["epsilon_pld"] == pytest.approx(composed((2.0, 0.5, of_rounds)))


def composed(*spent):
    """Epsilon of (noise, share, rounds) together for delta 1e-5, by dp-accounting alone."""
    from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
    from dp_accounting.pld import PLDAccountant

    accountant = PLDAccountant(value_discretization_interval=1e-3)
    for noise, share, rounds in spent:
        accountant.compose(PoissonSampledDpEvent(share, GaussianDpEvent(noise)), rounds)
    return float(accountant.get_epsilon(1e-5))


@pytest.mark.slow
def test_the_epsilon_of_a_grid_covers_the_model_that_is_trained_again():
    words = f"{GRID} --validation 0.25 --sweep lr=0.1,0.01 --seeds 0,1 --retrain"
    (spent,) = data_of(words)["privacy"]
    # Two points and one retrained model, of two seeds with four rounds each: 3 * 2 * 4 rounds.
    costs(spent, 24, points=2, retrained=1, seeds=6, unit="client")
    assert f"epsilon {spent['epsilon_pld']:.3g}" in fedcache(words).out
    (of_rows,) = data_of("ls --privacy")["datasets"]
    costs(of_rows, 24, partitions=2, releases=6, epsilon_pld=spent["epsilon_pld"])


def test_the_epsilon_of_a_grid_over_partitions_is_told_for_a_row():
    (spent,) = data_of(f"{GRID} --scheme dirichlet --sweep alpha=1,10 --clients 10")["privacy"]
    costs(spent, 8, points=2, unit="row")


def test_the_epsilon_of_a_grid_covers_points_without_a_result():
    words = f"{GRID} --sweep lr=0.1,0.01 --exact"
    paths = [point["path"] for point in data_of(words)["points"]]
    (Path(paths[1]) / "rounds.jsonl").write_text("damaged")
    done = fedcache(words, "--json")
    assert done.code == Exit.CORRUPT
    (spent,) = done.data["privacy"]
    costs(spent, 8, points=2)


@pytest.mark.slow
def test_the_epsilon_of_a_search_covers_pruned_trials(monkeypatch):
    optuna = pytest.importorskip("optuna")
    asked = []
    # Noise decides what a pruner does: the second trial is stopped after its first round, with every score.
    monkeypatch.setattr(
        optuna.trial.Trial, "should_prune", lambda trial: asked.append(trial) or len(asked) == 4
    )
    words = (
        f"{GRID} --validation 0.25 --sweep lr=0.1,0.01,0.001 --sampler optuna --trials 3 "
        "--pruner median --eval-every 1"
    )
    for _ in ("made", "read again"):
        done = data_of(words)
        assert len(done["points"]) == 2
        assert len(done["pruned"]) == 1
        (spent,) = done["privacy"]
        costs(spent, 12, points=3)


def test_releases_of_one_dataset_are_added_up_by_its_name_and_by_its_content():
    grown = replace(RELEASE, dataset_digest="grown", partition="q", time=1.0)
    renamed = replace(RELEASE, dataset="copy", dataset_digest="grown", partition="r", time=2.0)
    other = replace(RELEASE, dataset="other", dataset_digest="o", time=3.0)
    rows, apart = totals_of_datasets([RELEASE, grown, other, renamed])
    assert rows.dataset == "rows, copy"
    assert rows.partitions == 3
    assert rows.releases == 3
    assert rows.epsilon_pld == pytest.approx(composed((2.0, 0.5, 12)))
    assert apart.dataset == "other"
    assert apart.releases == 1


@pytest.mark.slow
def test_nothing_that_is_written_down_tells_who_took_part_unless_that_is_allowed():
    secret = data_of(f"{REAL} --rounds 12")
    rounds = rounds_of(Path(secret["path"]))
    assert {r["clients"] for r in rounds} == {None}
    assert {r["traffic"]["clients"] for r in rounds} == {5}
    assert len({r["traffic"]["up"] for r in rounds}) == 1
    assert measured_of(Path(secret["path"]), secret)["per_seed"]["0"]["rounds"] == []
    told = data_of(f"{REAL},participants --rounds 12")
    assert len({len(r["clients"]) for r in rounds_of(Path(told["path"]))}) > 1
    figures = told["trust"]["privacy"]
    assert figures["epsilon_pld"] == secret["trust"]["privacy"]["participants_known"]["epsilon_pld"]
    assert figures["epsilon_pld"] > 1.5 * secret["trust"]["privacy"]["epsilon_pld"]
    assert [release.share for release in releases()] == [0.5, 1.0]


CONFIG = replace(STARTED, rounds=6, seeds="0")


def stopped_after(rounds, heard=None):
    """A private run that was stopped after so many rounds: its directory. A round is kept before it is told."""
    stop = Stop()

    def hook(told):
        if not told.stored:
            with safe_open(
                told.path / f"checkpoint-{told.seed}.safetensors", framework="pt"
            ) as file:
                sealed = json.loads(next(iter(file.metadata().values())))
            assert json.loads(sealed["content"])["round"] == told.round
        if told.round == rounds:
            stop.ask()

    stopped(lambda: train(CONFIG, Home(home()), hooks=[hook], stop=stop, observer=heard))
    (path,) = (home() / "runs").iterdir()
    return path


@pytest.mark.slow
def test_a_private_run_that_is_stopped_makes_no_told_round_twice():
    stopped_after(2)
    stopped_after(4)
    rounds = []
    done = train(CONFIG, Home(home()), hooks=[rounds.append])
    assert [(r.round, r.stored) for r in rounds] == [(r, r <= 4) for r in range(1, 7)]
    assert [r.accuracy for r in rounds] == [r["accuracy"] for r in rounds_of(done.path)]
    assert len(releases()) == 1  # one seed, one release


def test_a_run_that_the_ledger_lacks_is_told_of():
    ledger = home() / "privacy.jsonl"
    count = home() / "privacy-count.json"
    ok(f"{REAL} --seeds 0,1")
    ok(SIMULATED)
    assert ok("ls --privacy").warnings == []
    whole = ledger.read_bytes()
    counted = count.read_bytes()
    ledger.write_bytes(whole[: whole.index(b"\n") + 1])  # of another home, with one line
    count.unlink()
    (warning,) = ok("ls --privacy").warnings
    assert "is missing from the ledger" in warning
    count.write_bytes(counted)
    ledger.write_bytes(whole.replace(b'"rounds":4', b'"rounds":1'))
    assert fedcache("ls --privacy").code == Exit.CORRUPT
    # nothing more is spent beside a count that is not known
    assert fedcache(f"{REAL} --fresh").code == Exit.CORRUPT


def test_a_result_that_is_gone_is_made_again_with_a_warning_of_what_that_spends():
    run = place_of(REAL)
    (run / "result.json").unlink()
    assert ok(REAL).warnings == []  # it is made from the seed, which draws no noise
    (run / "result.json").unlink()
    (run / "seed-0.json").unlink()
    assert [w for w in ok(REAL).warnings if "seed 0" in w and "spends privacy again" in w]
    assert len(releases()) == 2
    assert not any("before" in w for w in ok(f"{REAL} --fresh").warnings)  # asked for


@pytest.mark.slow
def test_a_ledger_that_lost_its_last_lines_is_refused_and_the_hint_starts_a_new_one():
    ledger = home() / "privacy.jsonl"
    count = home() / "privacy-count.json"
    for fresh in ("", "--fresh", "--fresh"):  # of one run and seed: its result tells of one release
        ok(f"{REAL} {fresh}")
    whole = ledger.read_bytes()
    counted = count.read_bytes()
    two_lines = b"".join(whole.splitlines(keepends=True)[:2])
    for file, left in (
        (ledger, two_lines),
        (ledger, whole[:-1]),
        (ledger, b""),
        (ledger, None),
        (count, counted.replace(b"3", b"2")),
        (count, b""),
        (count, None),
    ):
        file.unlink()
        if left is not None:
            file.write_bytes(left)
        for words in ("ls --privacy", f"{REAL} --fresh"):
            assert fedcache(words).code == Exit.CORRUPT, (file, left)
        ledger.write_bytes(whole)
        count.write_bytes(counted)
    ledger.unlink()
    hint = fedcache("ls --privacy --json").error["hint"]
    subprocess.run(hint.rpartition(": ")[2], shell=True, check=True)
    ok(f"{REAL} --fresh")
    assert data_of("ls --privacy")["entries"][0]["releases"] == 1


RELEASE = Release("run", "fedavg", 0, "rows", "d", "p", 10, 1.0, 2.0, 0.5, 4, 1e-5, 0.0)


def test_any_change_of_the_ledger_but_a_torn_last_line_is_found(tmp_path):
    ledger = tmp_path / "home/privacy.jsonl"
    assert read_releases(ledger) == []
    for _ in range(3):
        record_release(ledger, RELEASE)
    whole = ledger.read_bytes()
    first, second, third = whole.splitlines(keepends=True)
    rng = np.random.default_rng(0)
    for _ in range(200):
        place = int(rng.integers(len(whole) - 1))
        bit = 1 << int(rng.integers(8))
        ledger.write_bytes(whole[:place] + bytes([whole[place] ^ bit]) + whole[place + 1 :])
        corruption(lambda: read_releases(ledger))
    for lines in (first + third, second + first + third, first + first + second):
        ledger.write_bytes(lines)
        corruption(lambda: read_releases(ledger))
    # a power cut while a fourth was written: nothing of it was told
    ledger.write_bytes(whole + third[:-5])
    assert len(read_releases(ledger)) == 3
    record_release(ledger, RELEASE)
    assert len(read_releases(ledger)) == 4
    count = ledger.with_name("privacy-count.json")
    counted = count.read_bytes()
    record_release(ledger, RELEASE)
    count.write_bytes(counted)  # a kill between the line and the count of it
    assert len(read_releases(ledger)) == 5
    whole = ledger.read_bytes()
    ledger.write_bytes(whole[:-20] + b"x" + whole[-19:])
    corruption(lambda: record_release(ledger, RELEASE))


def test_a_grid_of_processes_writes_every_release(tmp_path):
    ledger = tmp_path / "privacy.jsonl"
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: record_release(ledger, RELEASE), range(20)))
    assert len(read_releases(ledger)) == 20


def test_resuming_from_an_older_state_is_another_release():
    run = stopped_after(2)
    older = (run / "checkpoint-0.safetensors").read_bytes()
    stopped_after(4)
    assert len(releases()) == 1
    (run / "checkpoint-0.safetensors").write_bytes(older)
    heard = Heard()
    train(CONFIG, Home(home()), observer=heard)
    assert len(releases()) == 2
    (said,) = (w for w in heard.warnings if "spends privacy again" in w)
    assert "after round 2, but round 4 was published already" in said
    assert not list((home() / "privacy-rounds").iterdir())  # the seed has ended


@pytest.mark.parametrize(
    ("lost", "released"), [("privacy-rounds/*-0.json", 2), ("privacy*.json*", 1)]
)
def test_a_state_of_which_it_is_not_known_what_was_told_is_another_release(lost, released):
    stopped_after(2)
    for path in home().glob(lost):
        path.unlink()
    first = Heard()
    second = Heard()
    stopped_after(4, first)
    assert len([w for w in first.warnings if "spends privacy again" in w]) == 1
    assert len(releases()) == released
    train(CONFIG, Home(home()), observer=second)
    assert not any("spends privacy again" in w for w in second.warnings)  # from then on it is known
    assert len(releases()) == released


@pytest.mark.parametrize(
    ("words", "named"),
    rows_of(
        """
        --max-update-norm 0.001      | --max-update-norm
        --max-rows-per-client 80     | --max-rows-per-client
        --set head=mlp --set bn=true | BatchNorm
        --dp-clip 0                  | --dp-clip is 0, but it must be above 0 and at most 1,000,000
        --dp-delta 1e-300            | must be at least 1e-12 and below 1
        --dp-noise 1e-300            | must be 0, or at least 0.001 and at most 1,000,000
        --dp-noise nan               | --dp-noise
        """
    ),
)
def test_what_would_tell_of_single_clients_or_mean_nothing_is_refused(words, named):
    must_fail(named, f"{REAL} {words}")
    assert not list((home() / "runs").glob("*/result.json"))
    assert not (home() / "privacy.jsonl").exists()


def test_a_private_run_that_is_made_again_and_killed_while_it_is_stored_is_not_damaged(monkeypatch):
    class Killed(BaseException):
        pass

    def killed(*_):
        raise Killed

    train(STARTED, Home(home()))
    with monkeypatch.context() as patched:
        patched.setattr(directory, "write_result", killed)
        with pytest.raises(Killed):
            train(STARTED, Home(home()), fresh=True)
    assert len(releases()) == 4
    assert not train(STARTED, Home(home())).reused
    # its seeds had ended: no noise is drawn again
    assert len(releases()) == 4
    ok("runs list")


def tracked(name, config, monkeypatch, stop_after):
    """Which of ``trained`` and ``tracked`` happened, in order."""
    order = []
    stop = Stop()
    library = mock.Mock()
    library.write = lambda _round: order.append("tracked")
    kind = type(trackers.tracker(f"{name}:there", Path()))
    monkeypatch.setattr(kind, "begin", lambda *_: library)

    def trained(_round):
        order.append("trained")
        if len(order) == stop_after:
            stop.ask()

    with trackers.tracking(f"{name}:there", Home(home()), None, None) as hooks:
        try:
            train(config, Home(home()), hooks=[trained, *hooks], stop=stop, fresh=True)
        except BaseException:
            assert stop.requested
    return order


AT_THE_END = ["trained"] * 8 + ["tracked"] * 8


@pytest.mark.parametrize(
    ("name", "config", "stop_after", "order"),
    [
        *(
            pytest.param(name, {}, 99, AT_THE_END, marks=pytest.mark.slow)
            for name in trackers.TRACKERS
        ),
        ("tensorboard", {}, 3, ["trained"] * 3 + ["tracked"] * 3),
        ("tensorboard", {"dp_allow": "evaluation,participants"}, 99, ["trained", "tracked"] * 8),
        ("tensorboard", {"dp_seed": 0, "dp_allow": None}, 99, ["trained", "tracked"] * 8),
    ],
    ids=[*trackers.TRACKERS, "stopped", "participants are allowed", "a simulation"],
)
def test_a_tracker_is_told_of_a_private_run_when_its_rounds_have_ended_and_else_round_by_round(
    name, config, stop_after, order, monkeypatch
):
    pytest.importorskip(name)
    assert tracked(name, replace(STARTED, **config), monkeypatch, stop_after) == order


def test_all_events_of_a_private_run_in_tensorboard_have_one_time(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with trackers.tracking(f"tensorboard:{tmp_path}", Home(home()), None, None) as hooks:
        run = train(STARTED, Home(home()), hooks=hooks)
    for seed in (0, 1):
        read = EventAccumulator(str(tmp_path / run.path.name / f"seed-{seed}"))
        read.Reload()
        times = {e.wall_time for name in ("accuracy", "bytes/up") for e in read.Scalars(name)}
        assert len(times) == 1
