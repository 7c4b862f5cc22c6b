"""Private runs on the real command line: fresh noise, what it costs over seeds, grids and repeats, and what is told."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from command import fedcache, ok
from heard import Heard

from fedcache.config import Home, TrainConfig
from fedcache.errors import Exit, FedcacheError
from fedcache.process import Stop
from fedcache.runs.directory import rounds_of
from fedcache.runs.loop import train
from fedcache.runs.privacy_ledger import Release, read_releases, record_release, totals_of_datasets

TRAIN = ("train", "--method", "fedavg", "--scheme", "iid", "--clients", 10, "--rounds", 4, "--participation", 0.5,
         "--dp-clip", 1)  # fmt: skip
REAL = (*TRAIN, "--dp-noise", 2, "--dp-allow", "evaluation")
SIMULATED = (*TRAIN, "--dp-noise", 2, "--dp-seed", 3)


def ingested(place: Path) -> Path:
    y = np.tile(np.arange(5), 40)
    x = (np.random.default_rng(0).normal(size=(200, 8)) + 2 * np.eye(5, 8)[y]).astype(np.float32)
    np.savez(place / "rows.npz", features=x, labels=y, split=(np.arange(200) % 4 == 0).astype(int))
    return Path(ok("ingest", place / "rows.npz", "--name", "rows").data["path"])


@pytest.fixture
def store(once: Callable[[Callable[[Path], Path]], Path]) -> Path:
    pytest.importorskip("dp_accounting")
    return once(ingested)


def home() -> Path:
    return Path(os.environ["FEDCACHE_HOME"])


def run_of(done: dict) -> Path:
    return home() / "runs" / done["digest"][:16]


def kept(done: dict) -> tuple[list, list]:
    """Scores of a run that follow its weights closely: of every client and class."""
    return done["confusion"], done["accuracy"]["per_seed"]


@pytest.mark.usefixtures("store")
def test_real_noise_must_be_asked_for_with_what_it_does_not_cover() -> None:
    done = fedcache(*TRAIN, "--dp-noise", 2, "--json")
    assert done.code == Exit.USAGE
    error = done.envelope["error"]
    assert "what epsilon does not cover: evaluation" in error["message"]
    assert "--dp-allow evaluation" in error["hint"]
    assert "--dp-seed 0" in error["hint"]
    assert not (home() / "privacy.jsonl").exists()
    assert not (home() / "runs").exists()


@pytest.mark.slow
@pytest.mark.usefixtures("store")
def test_two_real_runs_of_one_command_differ_and_both_are_spent() -> None:
    first = ok(*REAL).data
    again = ok(*REAL)
    assert again.data["reused"]
    assert kept(again.data) == kept(first)
    told = [note for note in fedcache(*REAL).err.splitlines() if "there already" in note]
    assert "spends no more privacy, --fresh draws new noise and spends as much again" in told[0]
    assert len(read_releases(home() / "privacy.jsonl")) == 1
    fresh = ok(*REAL, "--fresh").data
    assert fresh["digest"] == first["digest"]
    assert (fresh["confusion"], fresh["files"]) != (first["confusion"], first["files"]) or kept(fresh) != kept(first)
    assert len(read_releases(home() / "privacy.jsonl")) == 2
    cost = fresh["trust"]["privacy"]
    assert cost["simulation"] is False
    assert cost["repeatable"] is False
    assert cost["noise_from"] == "the operating system"
    assert "spends privacy again" in (run_of(fresh) / "config.toml").read_text().splitlines()[0]
    assert ok("train", "--config", run_of(fresh) / "config.toml").data["reused"]


@pytest.mark.usefixtures("store")
def test_the_model_of_a_private_run_is_kept_and_what_its_loss_costs_is_said() -> None:
    run, simulated = run_of(ok(*REAL).data), run_of(ok(*SIMULATED).data)
    listed = fedcache("gc", "--kind", "models", "--delete")
    assert listed.code == 0, listed.err
    assert (run / "models").is_dir()
    assert not (simulated / "models").exists()
    shutil.rmtree(run / "models")
    for path, told in ((run, True), (simulated, False)):
        refused = fedcache("predict", path, "photo.jpg")
        assert refused.code == 4
        assert ("spends as much privacy again" in refused.err) is told
        assert f"fedcache train --config {path / 'config.toml'} --fresh" in refused.err
    moved = simulated.rename(simulated.with_name("my run"))
    refused = fedcache("predict", moved, "photo.jpg")
    assert f"in the directory {simulated.name} of your runs" in refused.err
    assert f"--config '{moved / 'config.toml'}' --fresh" in refused.err


@pytest.mark.slow
@pytest.mark.usefixtures("store")
def test_a_simulation_says_so_wherever_its_epsilon_is_told(tmp_path: Path) -> None:
    first = ok(*SIMULATED).data
    again = ok(*SIMULATED, "--fresh").data
    assert kept(again) == kept(first)
    assert again["files"] == first["files"]
    assert first["trust"]["privacy"]["simulation"] is True
    assert first["trust"]["privacy"]["noise_from"] == "--dp-seed 3"
    lines = [line for line in fedcache(*SIMULATED).out.splitlines() if "epsilon" in line]
    assert lines
    assert all("Simulation of privacy" in line for line in lines)
    assert not (home() / "privacy.jsonl").exists()
    assert "No private run" in fedcache("ls", "--privacy").err
    ok("report", "--out", tmp_path / "page.html")
    assert "simulation of epsilon" in (tmp_path / "page.html").read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.usefixtures("store")
def test_a_simulation_has_the_same_noise_in_every_execution_and_in_a_grid() -> None:
    one, two = (ok(*SIMULATED, "--dtype", "float64", "--execution", e).data for e in ("sequential", "batched"))
    assert kept(one) == kept(two)
    points = ok("grid", *SIMULATED[1:], "--dtype", "float64", "--sweep", "lr=0.1,0.01").data["points"]
    alone = ok(*SIMULATED, "--dtype", "float64", "--set", "lr=0.01").data
    assert kept(points[1]) == kept(alone)


@pytest.mark.slow
@pytest.mark.usefixtures("store")
def test_epsilon_composes_over_seeds_points_and_repeats() -> None:
    from fedcache.federate.trust.accounting import Spent, epsilons

    def after(rounds: int) -> float:
        return epsilons([Spent(2.0, 0.5, rounds)], 1e-5)["epsilon_pld"]

    done = ok(*REAL, "--seeds", "0-4").data["trust"]["privacy"]
    assert done["seeds"] == 5
    assert done["epsilon_pld"] == pytest.approx(after(4))
    assert done["composed"]["epsilon_pld"] == pytest.approx(after(20))
    assert f"{after(20):.3g} for all of them together" in fedcache(*REAL, "--seeds", "0-4").out
    grid = ok("grid", *REAL[1:], "--sweep", "lr=0.1,0.01,0.001", "--seeds", "0,1")
    (spent,) = grid.data["privacy"]
    assert (spent["points"], spent["seeds"]) == (3, 6)
    assert spent["epsilon_pld"] == pytest.approx(after(24))
    (total,) = ok("ls", "--privacy").data["entries"]
    assert (total["releases"], total["runs"], total["rounds"]) == (11, 4, 44)
    assert total["epsilon_pld"] == pytest.approx(after(44))
    assert [t["epsilon_pld"] for t in ok("ls", "--privacy").data["datasets"]] == [total["epsilon_pld"]]
    ok(*REAL, "--clients", 5)  # other clients: a partition of its own
    both = ok("ls", "--privacy").data
    assert [e["releases"] for e in both["entries"]] == [11, 1]
    (of_rows,) = both["datasets"]
    assert (of_rows["partitions"], of_rows["releases"], of_rows["rounds"]) == (2, 12, 48)
    share = both["releases"][-1]["share"]
    assert of_rows["epsilon_pld"] == pytest.approx(composed((2.0, 0.5, 44), (2.0, share, 4)))


def composed(*spent: tuple[float, float, int]) -> float:
    """Epsilon of (noise, share, rounds) together for delta 1e-5, by dp-accounting alone."""
    from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
    from dp_accounting.pld import PLDAccountant

    accountant = PLDAccountant(value_discretization_interval=1e-3)
    for noise, share, rounds in spent:
        accountant.compose(PoissonSampledDpEvent(share, GaussianDpEvent(noise)), rounds)
    return float(accountant.get_epsilon(1e-5))


@pytest.mark.slow
@pytest.mark.usefixtures("store")
def test_the_epsilon_of_a_grid_covers_the_model_that_is_trained_again() -> None:
    words = ("grid", *REAL[1:], "--validation", 0.25, "--sweep", "lr=0.1,0.01", "--seeds", "0,1", "--retrain")
    done = ok(*words).data
    (spent,) = done["privacy"]
    assert (spent["points"], spent["retrained"], spent["seeds"], spent["unit"]) == (2, 1, 6, "client")
    # Two points and one retrained model, of two seeds with four rounds each: 3 * 2 * 4 rounds.
    assert spent["epsilon_pld"] == pytest.approx(composed((2.0, 0.5, 24)))
    assert f"epsilon {spent['epsilon_pld']:.3g}" in fedcache(*words).out
    (of_rows,) = ok("ls", "--privacy").data["datasets"]
    assert (of_rows["partitions"], of_rows["releases"]) == (2, 6)
    assert of_rows["epsilon_pld"] == spent["epsilon_pld"]
    assert "all 2" in fedcache("ls", "--privacy").out


@pytest.mark.usefixtures("store")
def test_the_epsilon_of_a_grid_over_partitions_is_told_for_a_row() -> None:
    done = ok("grid", *REAL[1:], "--scheme", "dirichlet", "--sweep", "alpha=1,10", "--clients", 10).data
    (spent,) = done["privacy"]
    assert (spent["points"], spent["unit"]) == (2, "row")
    assert spent["epsilon_pld"] == pytest.approx(composed((2.0, 0.5, 8)))


@pytest.mark.usefixtures("store")
def test_the_epsilon_of_a_grid_covers_points_without_a_result() -> None:
    words = ("grid", *REAL[1:], "--sweep", "lr=0.1,0.01", "--exact")
    paths = [point["path"] for point in ok(*words).data["points"]]
    (Path(paths[1]) / "rounds.jsonl").write_text("damaged")
    done = fedcache(*words, "--json")
    assert done.code == Exit.CORRUPT
    (spent,) = done.envelope["data"]["privacy"]
    assert spent["points"] == 2
    assert spent["epsilon_pld"] == pytest.approx(composed((2.0, 0.5, 8)))


@pytest.mark.slow
@pytest.mark.usefixtures("store")
def test_the_epsilon_of_a_search_covers_pruned_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    optuna = pytest.importorskip("optuna")
    asked = []
    # Noise decides what a pruner does: the second trial is stopped after its first round, whatever it scored.
    monkeypatch.setattr(optuna.trial.Trial, "should_prune", lambda trial: asked.append(trial) or len(asked) == 4)
    words = ("grid", *REAL[1:], "--validation", 0.25, "--sweep", "lr=0.1,0.01,0.001", "--sampler", "optuna",
             "--trials", 3, "--pruner", "median", "--eval-every", 1)  # fmt: skip
    for _ in ("made", "read again"):
        done = ok(*words).data
        assert (len(done["points"]), len(done["pruned"])) == (2, 1)
        (spent,) = done["privacy"]
        assert spent["points"] == 3
        assert spent["epsilon_pld"] == pytest.approx(composed((2.0, 0.5, 12)))


def test_releases_of_one_dataset_are_added_up_by_its_name_and_by_its_content() -> None:
    pytest.importorskip("dp_accounting")
    grown = replace(RELEASE, dataset_digest="grown", partition="q", time=1.0)
    renamed = replace(RELEASE, dataset="copy", dataset_digest="grown", partition="r", time=2.0)
    other = replace(RELEASE, dataset="other", dataset_digest="o", time=3.0)
    rows, apart = totals_of_datasets([RELEASE, grown, other, renamed])
    assert (rows.dataset, rows.partitions, rows.releases) == ("rows, copy", 3, 3)
    assert rows.epsilon_pld == pytest.approx(composed((2.0, 0.5, 12)))
    assert (apart.dataset, apart.releases) == ("other", 1)


@pytest.mark.slow
@pytest.mark.usefixtures("store")
def test_nothing_that_is_written_down_tells_who_took_part_unless_that_is_allowed() -> None:
    secret = ok(*REAL, "--rounds", 12).data
    assert {r["clients"] is None for r in rounds_of(run_of(secret))} == {True}
    assert {r["traffic"]["clients"] for r in rounds_of(run_of(secret))} == {5}
    assert len({r["traffic"]["up"] for r in rounds_of(run_of(secret))}) == 1
    assert json.loads((run_of(secret) / "measured.json").read_text())["content"]["per_seed"]["0"]["rounds"] == []
    told = ok(*REAL[:-1], "evaluation,participants", "--rounds", 12).data
    assert len({len(r["clients"]) for r in rounds_of(run_of(told))}) > 1
    figures = told["trust"]["privacy"]
    assert figures["epsilon_pld"] == secret["trust"]["privacy"]["participants_known"]["epsilon_pld"]
    assert figures["epsilon_pld"] > 1.5 * secret["trust"]["privacy"]["epsilon_pld"]
    assert [r.share for r in read_releases(home() / "privacy.jsonl")] == [0.5, 1.0]


class StopAfter:
    """Asks for a stop when a round is told, and notes which state was on the disk then."""

    def __init__(self, rounds: int) -> None:
        self.rounds, self.stop, self.kept = rounds, Stop(), []

    def __call__(self, told) -> None:
        from safetensors import safe_open

        with safe_open(told.path / f"checkpoint-{told.seed}.safetensors", framework="pt") as file:
            sealed = json.loads(next(iter(file.metadata().values())))
        self.kept.append((told.round, json.loads(sealed["content"])["round"]))
        if told.round == self.rounds:
            self.stop.requested = True


@pytest.mark.slow
@pytest.mark.usefixtures("store")
def test_a_private_run_that_is_stopped_makes_no_told_round_twice() -> None:
    config = TrainConfig(method="fedavg", rounds=6, participation="0.5", dp_clip=1.0, dp_noise=2.0,
                         dp_allow="evaluation", eval_every=1)  # fmt: skip
    place, told = Home(home()), []
    for stop_after in (2, 4):
        hook = StopAfter(stop_after)
        with pytest.raises(FedcacheError) as stopped:
            train(config, place, hooks=[hook], stop=hook.stop)
        assert stopped.value.code is Exit.INTERRUPTED
        new = [(told_, kept_) for told_, kept_ in hook.kept if told_ > len(told)]
        assert all(told_ == kept_ for told_, kept_ in new)  # a round is kept before it is told
        told += new
    rounds = []
    done = train(config, place, hooks=[lambda r: rounds.append((r.round, r.stored, r.accuracy))])
    assert [(r, stored) for r, stored, _ in rounds] == [(r, r <= 4) for r in range(1, 7)]
    assert [a for *_, a in rounds] == [r["accuracy"] for r in rounds_of(done.path)]
    assert len(read_releases(home() / "privacy.jsonl")) == 1  # one seed, one release


@pytest.mark.usefixtures("store")
def test_a_run_that_the_ledger_lacks_is_told_of() -> None:
    ledger, count = home() / "privacy.jsonl", home() / "privacy-count.json"
    ok(*REAL, "--seeds", "0,1")
    ok(*SIMULATED)
    assert ok("ls", "--privacy").envelope["warnings"] == []
    whole, counted = ledger.read_bytes(), count.read_bytes()
    ledger.write_bytes(whole[: whole.index(b"\n") + 1])  # of another home, with one line
    count.unlink()
    (warning,) = ok("ls", "--privacy").envelope["warnings"]
    assert "the ledger does not know of" in warning
    count.write_bytes(counted)
    ledger.write_bytes(whole.replace(b'"rounds":4', b'"rounds":1'))
    assert fedcache("ls", "--privacy").code == Exit.CORRUPT
    assert fedcache(*REAL, "--fresh").code == Exit.CORRUPT  # nothing more is spent beside a count that is not known


@pytest.mark.usefixtures("store")
def test_a_result_that_is_gone_is_made_again_with_a_warning_of_what_that_spends() -> None:
    first = ok(*REAL)
    (run_of(first.data) / "result.json").unlink()
    (warning,) = (w for w in ok(*REAL).envelope["warnings"] if "before" in w)
    assert "seed 0" in warning
    assert "spends privacy again" in warning
    assert len(read_releases(home() / "privacy.jsonl")) == 2
    assert not any("before" in w for w in ok(*REAL, "--fresh").envelope["warnings"])  # asked for


@pytest.mark.slow
@pytest.mark.usefixtures("store")
def test_a_ledger_that_lost_its_last_lines_is_refused_and_the_hint_starts_a_new_one() -> None:
    ledger, count = home() / "privacy.jsonl", home() / "privacy-count.json"
    for fresh in ((), ("--fresh",), ("--fresh",)):  # of the same run and seed: its result tells of one release
        ok(*REAL, *fresh)
    whole, counted = ledger.read_bytes(), count.read_bytes()
    for left in (b"".join(whole.splitlines(keepends=True)[:2]), whole[:-1], b"", None):
        ledger.unlink() if left is None else ledger.write_bytes(left)
        for words in (("ls", "--privacy"), (*REAL, "--fresh")):
            done = fedcache(*words, "--json")
            assert done.code == Exit.CORRUPT, done.out
            assert "privacy-count.json tells of 3" in done.envelope["error"]["message"]
        ledger.write_bytes(whole)
    for left in (counted.replace(b"3", b"2"), b"", None):
        count.unlink() if left is None else count.write_bytes(left)
        assert fedcache("ls", "--privacy").code == fedcache(*REAL, "--fresh").code == Exit.CORRUPT
        count.write_bytes(counted)
    assert ok("ls", "--privacy").data["entries"][0]["releases"] == 3
    ledger.unlink()
    hint = fedcache("ls", "--privacy", "--json").envelope["error"]["hint"]
    subprocess.run(hint.rpartition(": ")[2], shell=True, check=True)
    ok(*REAL, "--fresh")
    assert ok("ls", "--privacy").data["entries"][0]["releases"] == 1


RELEASE = Release("run", "fedavg", 0, "rows", "d", "p", 10, 1.0, 2.0, 0.5, 4, 1e-5, 0.0)


def test_any_change_of_the_ledger_but_a_torn_last_line_is_found(tmp_path: Path) -> None:
    ledger = tmp_path / "home" / "privacy.jsonl"
    assert read_releases(ledger) == []
    for _ in range(3):
        record_release(ledger, RELEASE)
    whole = ledger.read_bytes()
    lines = whole.splitlines(keepends=True)
    rng = np.random.default_rng(0)
    for _ in range(200):
        place, bit = int(rng.integers(len(whole) - 1)), 1 << int(rng.integers(8))
        ledger.write_bytes(whole[:place] + bytes([whole[place] ^ bit]) + whole[place + 1 :])
        with pytest.raises(FedcacheError) as damaged:
            read_releases(ledger)
        assert damaged.value.code is Exit.CORRUPT
    for changed in (lines[0] + lines[2], lines[1] + lines[0] + lines[2], lines[0] + lines[0] + lines[1], lines[1]):
        ledger.write_bytes(changed if isinstance(changed, bytes) else b"".join(changed))
        with pytest.raises(FedcacheError, match="does not follow"):
            read_releases(ledger)
    ledger.write_bytes(whole + lines[2][:-5])  # a power cut while a fourth was written: nothing of it was told
    assert len(read_releases(ledger)) == 3
    record_release(ledger, RELEASE)
    assert len(read_releases(ledger)) == 4
    count = ledger.with_name("privacy-count.json")
    counted = count.read_bytes()
    record_release(ledger, RELEASE)
    count.write_bytes(counted)  # a kill between the line and the count of it
    assert len(read_releases(ledger)) == 5
    whole = ledger.read_bytes()
    record_release(ledger, RELEASE)
    assert len(read_releases(ledger)) == 6
    ledger.write_bytes(whole[:-20] + b"x" + whole[-19:])
    with pytest.raises(FedcacheError) as damaged:
        record_release(ledger, RELEASE)
    assert damaged.value.code is Exit.CORRUPT


def test_a_grid_of_processes_writes_every_release(tmp_path: Path) -> None:
    from concurrent.futures import ThreadPoolExecutor

    ledger = tmp_path / "privacy.jsonl"
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: record_release(ledger, RELEASE), range(20)))
    assert len(read_releases(ledger)) == 20


def stopped_after(rounds: int, config: TrainConfig, heard: Heard | None = None) -> Path:
    """A private run that was stopped after so many rounds: its directory."""
    hook = StopAfter(rounds)
    with pytest.raises(FedcacheError):
        train(config, Home(home()), hooks=[hook], stop=hook.stop, observer=heard)
    (path,) = (home() / "runs").iterdir()
    return path


LONG = TrainConfig(method="fedavg", rounds=6, participation="0.5", dp_clip=1.0, dp_noise=2.0, dp_allow="evaluation")


@pytest.mark.usefixtures("store")
def test_going_on_from_an_older_state_is_another_release() -> None:
    ledger = home() / "privacy.jsonl"
    run = stopped_after(2, LONG)
    older = (run / "checkpoint-0.safetensors").read_bytes()
    stopped_after(4, LONG)
    assert len(read_releases(ledger)) == 1
    (run / "checkpoint-0.safetensors").write_bytes(older)
    heard = Heard()
    train(LONG, Home(home()), observer=heard)
    assert len(read_releases(ledger)) == 2
    (said,) = (w for w in heard.warnings if "spends privacy again" in w)
    assert "is that after round 2, and round 4 was told" in said
    assert not list((home() / "privacy-rounds").iterdir())  # the seed has ended


@pytest.mark.usefixtures("store")
@pytest.mark.parametrize(
    ("lost", "said"), [("rounds", "how many were told is not known"), ("ledger", "the ledger has no line of it")]
)
def test_a_state_of_which_it_is_not_known_what_was_told_is_another_release(lost: str, said: str) -> None:
    run = stopped_after(2, LONG)
    gone = {"rounds": [home() / "privacy-rounds" / f"{run.name}-0.json"],
            "ledger": [home() / "privacy.jsonl", home() / "privacy-count.json"]}[lost]  # fmt: skip
    for path in gone:
        path.unlink()
    heard = Heard()
    stopped_after(4, LONG, heard)
    assert [said in w for w in heard.warnings if "spends privacy again" in w] == [True]
    released = 2 if lost == "rounds" else 1
    assert len(read_releases(home() / "privacy.jsonl")) == released
    heard = Heard()
    train(LONG, Home(home()), observer=heard)
    assert not any("spends privacy again" in w for w in heard.warnings)  # from then on it is known
    assert len(read_releases(home() / "privacy.jsonl")) == released


@pytest.mark.usefixtures("store")
def test_noise_too_small_to_compute_with_is_refused() -> None:
    for noise in ("1e-300", "0.0001", "-1", "nan"):
        done = fedcache(*TRAIN, "--dp-noise", noise, "--dp-seed", 0, "--json")
        assert done.code == Exit.USAGE, noise
        assert "--dp-noise" in done.envelope["error"]["message"]
    assert ok(*TRAIN, "--dp-noise", 0.001, "--dp-seed", 0).data["trust"]["privacy"]["composed"]["epsilon_pld"] is None


@pytest.mark.usefixtures("store")
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--max-update-norm", 0.001), "--max-update-norm with --dp-noise would tell something of single clients"),
        (("--max-row-norm", 5), "--max-row-norm with --dp-noise would tell something of single clients"),
        (("--max-rows-per-client", 80), "--max-rows-per-client with --dp-noise would tell"),
        (("--set", "head=mlp", "--set", "bn=true"), "makes variances of BatchNorm negative"),
        (("--dp-delta", "1e-300"), "--dp-delta 1e-300 is out of range"),
    ],
)
def test_what_would_tell_of_single_clients_or_mean_nothing_is_refused(words: tuple, said: str) -> None:
    done = fedcache(*REAL, *words, "--json")
    assert done.code == Exit.USAGE
    assert said in done.envelope["error"]["message"]
    assert not (home() / "runs").exists() or not list((home() / "runs").glob("*/result.json"))
    assert not (home() / "privacy.jsonl").exists()


@pytest.mark.usefixtures("store")
def test_a_model_with_batchnorm_is_trained_without_it_and_says_so() -> None:
    done = ok(*SIMULATED, "--set", "head=mlp")
    assert done.data["hyperparameters"]["bn"] is False
    assert any("trained without BatchNorm" in line for line in done.err.splitlines())
    refused = fedcache(*SIMULATED, "--set", "head=mlp", "--set", "bn=true", "--json")
    assert refused.code == Exit.USAGE
    assert "--set bn=false" in refused.envelope["error"]["hint"]


@pytest.mark.slow
@pytest.mark.usefixtures("store")
def test_a_delta_that_allows_to_tell_of_one_client_is_warned_of() -> None:
    (warning,) = (w for w in ok(*SIMULATED, "--dp-delta", 0.2).envelope["warnings"] if "delta" in w)
    assert "1 of 10 clients" in warning
    assert not any("delta" in w for w in ok(*SIMULATED).envelope["warnings"])
