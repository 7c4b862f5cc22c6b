"""A run of more clients than a result holds: their columns lie beside it, sealed, and are read from there."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from command import fedcache, ok
from pyarrow import parquet

import fedcache as fc
from fedcache.config import Home
from fedcache.errors import CorruptionError, Exit, MachineError
from fedcache.models import collect
from fedcache.runs import forecast
from fedcache.runs.client_columns import CLIENTS_IN_RESULT, check_recordable, client_columns
from fedcache.runs.row_sources import StoreRows

M = CLIENTS_IN_RESULT + 200
WORDS = ("--scheme", "iid", "--clients", M, "--rounds", 2, "--participation", 5)


def ingested(place: Path) -> Path:
    rng = np.random.default_rng(0)
    y = rng.integers(0, 3, 2 * M)
    x = (np.eye(3, 6)[y] + 0.6 * rng.standard_normal((2 * M, 6))).astype(np.float32)
    np.savez(place / "rows.npz", embeddings=x, labels=y, split=(np.arange(2 * M) >= M + 100).astype(np.int8))
    ok("ingest", place / "rows.npz", "--name", "many")
    return place


@pytest.fixture
def store(once: Callable[[Callable[[Path], Path]], Path]) -> Path:
    return once(ingested)


def test_many_clients_without_pyarrow_are_refused_before_they_are_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    check_recordable(CLIENTS_IN_RESULT)
    with pytest.raises(MachineError, match="pyarrow") as refused:
        check_recordable(CLIENTS_IN_RESULT + 1)
    assert "pip install 'fedcache[tables]'" in str(refused.value)


@pytest.mark.slow
def test_a_client_of_very_many_whose_model_was_not_saved_is_told_from_an_unknown_one(store: Path) -> None:
    run = ok(
        "train", "--method", "fedrep", *WORDS, "--set", "batch=1", "--set", "bn=false", "--save-clients", "client-0003"
    ).data["path"]
    for client, said in (("client-0004", "was not saved"), ("client-9999", "Unknown client 'client-9999'")):
        done = fedcache("predict", run, "--store", "many", "--client", client)
        assert (done.code, said in done.err) == (Exit.USAGE, True), done.err


@pytest.mark.slow
def test_what_is_not_saved_of_many_clients_says_how_it_is(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collect, "MOST_BYTES", 1000)
    said = fedcache("train", "--method", "fedrep", *WORDS, "--set", "batch=1", "--set", "bn=false").err
    assert "not saved: --fresh --save-clients all, or the names of some, saves them." in said


@pytest.mark.slow
@pytest.mark.parametrize(("method", "swept"), [("ditto", "lr"), ("perfedavg", "beta")])
def test_models_that_do_not_fit_into_memory_are_refused_before_anything_is_trained(
    store: Path, monkeypatch: pytest.MonkeyPatch, method: str, swept: str
) -> None:
    words = ("--method", method, *WORDS, "--set", "dim=128", "--set", "batch=1", "--set", "bn=false")
    for command in (("grid", *words, "--sweep", f"{swept}=0.1,0.2"), ("train", *words)):
        planned = ok(*command, "--dry-run").data["programs"][0]["memory"]["total"]
        monkeypatch.setattr(forecast, "free_memory", lambda *_, needed=planned: needed)  # as much as training needs
        done = fedcache(*command, "--save-clients", "all")
        assert done.code == Exit.ENVIRONMENT, done.err
        assert f"The models of {M:,} clients take " in done.err
        assert not list(Home.from_environment().runs.glob("*/rounds.jsonl"))
    ok("train", *words, "--save-clients", "client-0001,client-0002")
    ok("train", *words, "--fresh", "--save-clients", "none")


@pytest.mark.slow
def test_many_clients_have_a_column_of_validation_accuracy(store: Path) -> None:
    words = ("--scheme", "iid", "--clients", M - 150, "--validation", "0.4", "--rounds", 1, "--participation", 5)
    done = ok("train", "--method", "fedrep", "--seeds", "0,1", *words, "--set", "batch=1", "--set", "bn=false")
    path, found = Path(done.data["path"]), done.data["validation"]
    assert "per_client" not in found
    assert found["rows"] == 250  # of 1,300 rows that train, 1,050 clients have one and 250 of them another
    columns = client_columns(json.loads((path / "result.json").read_text()), path)
    assert columns.validation is not None
    scored = columns.validation[~np.isnan(columns.validation)]
    assert len(scored) == 250
    assert found["client_mean"] == pytest.approx(scored.mean(), abs=1e-12)
    assert found["pooled"] == pytest.approx(scored.mean(), abs=1e-12)  # one row each
    assert np.isin(scored, [0.0, 0.5, 1.0]).all()


@pytest.mark.slow
def test_a_result_of_many_clients_has_their_columns_in_a_file(store: Path, tmp_path: Path) -> None:
    done = ok("train", "--method", "fedrep", "--eval-clients", 300, "--seeds", "0,1", *WORDS, "--set", "bn=false")
    path = Path(done.data["path"])
    result = json.loads((path / "result.json").read_text())
    assert result["clients"] is None
    assert "per_client" not in result["accuracy"]
    assert (path / "result.json").stat().st_size < 20_000
    columns = client_columns(result, path)
    assert columns.names[:2] == ["client-0000", "client-0001"]
    assert len(columns.names) == M
    assert columns.per_seed.shape == (2, M)
    assert np.isfinite(columns.per_seed).sum(1).tolist() == [300, 300]
    both = np.isfinite(columns.per_seed).all(0)
    assert np.array_equal(columns.accuracy[both], columns.per_seed[:, both].mean(0))
    assert np.isnan(columns.accuracy[~both]).all()
    rounds = [json.loads(line) for line in (path / "rounds.jsonl").read_text().splitlines()]
    for number, (known, seed) in enumerate(zip(result["accuracy"]["eval_clients"], columns.per_seed, strict=True)):
        drawn = seed[np.isfinite(seed)]
        assert known["scored"] == 300
        told = [set(r["clients"]) for r in rounds if r["seed"] == number]
        assert known["trained"] == np.isfinite(seed)[list(set.union(*told))].sum() > 0
        assert known["standard_error"] == pytest.approx(drawn.std(ddof=1) / 300**0.5 * (1 - 300 / M) ** 0.5)
    assert result["classes_owned"]["least"] <= result["classes_owned"]["mean"] <= result["classes_owned"]["most"]
    table = parquet.read_table(path / "clients.parquet")
    assert table.column_names == ["client", "accuracy", "classes_owned", "accuracy_seed_0", "accuracy_seed_1"]
    # What reads clients reads them there.
    ok("train", "--method", "solo", "--eval-clients", 300, "--seeds", "0,1", *WORDS, "--set", "bn=false")
    page = tmp_path / "page.html"
    ok("report", "-o", page)
    assert "quantile" in page.read_text()
    assert "client-0777" not in page.read_text()
    assert page.stat().st_size < 3_000_000
    shown = fedcache("compare", "--over", "clients")
    assert shown.code == 0, shown.err
    assert f"{int(both.sum())}" in shown.out


@pytest.mark.slow
def test_a_run_of_many_clients_is_taken_up_and_its_file_is_a_promise(store: Path) -> None:
    done = ok("train", "--method", "fedavg", *WORDS)
    path = Path(done.data["path"])
    again = ok("train", "--method", "fedavg", *WORDS)
    assert again.data["reused"]
    raw = bytearray((path / "clients.parquet").read_bytes())
    raw[len(raw) // 2] ^= 1
    (path / "clients.parquet").write_bytes(raw)
    assert fedcache("train", "--method", "fedavg", *WORDS).code == 5
    with pytest.raises(CorruptionError, match=r"clients\.parquet"):
        client_columns(json.loads((path / "result.json").read_text()), path)
    parts = fc.partition("many", "iid", clients=M)
    run = fc.train("fedavg", "many", parts, rounds=2, participation=5, fresh=True)
    assert run.clients.names[-1] == f"client-{M - 1}"
    assert np.isfinite(run.clients.accuracy).all()


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("--eval-clients", 5_000), f"--eval-clients 5000, but there are {M} clients."),
        (("--eval-clients", "some"), "--eval-clients some is neither a number of clients nor a share."),
        (("--participation", M + 1), f"--participation {M + 1}, but there are {M} clients."),
    ],
)
def test_wrong_numbers_of_clients_are_refused_before_features_are_read(
    store: Path, words: tuple[object, ...], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StoreRows, "read", lambda *_: pytest.fail("features were read"))
    refused = fedcache("train", "--method", "fedrep", *WORDS, *words)
    assert refused.code == 2
    assert why in refused.err


@pytest.mark.slow
def test_who_takes_part_is_part_of_a_run_and_of_the_configuration_that_runs_it_again(
    store: Path, tmp_path: Path
) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("client,first,last\nclient-0003,1,1\nclient-0007,1,2\n")
    words = ("--availability", trace, "--client-sampling", "weighted", "--client-dropout", 0.1)
    done = ok("train", "--method", "fedavg", *words, *WORDS)
    path = Path(done.data["path"])
    rounds = [json.loads(line)["clients"] for line in (path / "rounds.jsonl").read_text().splitlines()]
    assert set(rounds[0]) <= {3, 7}
    assert set(rounds[1]) <= {7}
    said = json.loads((path / "result.json").read_text())["participants"]
    assert said["client_sampling"] == "weighted"
    assert said["client_dropout"] == 0.1
    again = ok("train", "--config", path / "config.toml")
    assert again.data["reused"]
    trace.write_text("client,first,last\nclient-0004,1,2\n")
    other = ok("train", "--method", "fedavg", *words, *WORDS)
    assert other.data["path"] != done.data["path"]
    assert ok("train", "--method", "fedavg", *WORDS).data["path"] not in (done.data["path"], other.data["path"])


@pytest.mark.slow
def test_clusters_of_clients_are_part_of_a_run_and_the_same_in_a_grid(store: Path, tmp_path: Path) -> None:
    clusters = tmp_path / "clusters.csv"
    clusters.write_text("client,cluster\n" + "".join(f"client-{i:04d},{i % 40}\n" for i in range(M)))
    words = ("--client-clusters", clusters, "--clusters-per-round", 2)
    done = ok("train", "--method", "fedavg", *words, *WORDS, "--set", "lr=0.05")
    path = Path(done.data["path"])
    rounds = [json.loads(line)["clients"] for line in (path / "rounds.jsonl").read_text().splitlines()]
    assert all(len(r) == 5 and len({c % 40 for c in r}) <= 2 for r in rounds)
    said = json.loads((path / "result.json").read_text())["participants"]
    assert (said["clusters_per_round"], said["client_clusters"][:7]) == (2, "sha256:")
    assert ok("train", "--config", path / "config.toml").data["reused"]
    moved = clusters.rename(tmp_path / "moved.csv")
    again = ("train", "--method", "fedavg", *WORDS, "--set", "lr=0.05", "--client-clusters", moved)
    assert ok(*again, "--clusters-per-round", 2).data["reused"], "the same clusters, from another place"
    others = {ok(*again).data["path"], ok("train", "--method", "fedavg", *WORDS, "--set", "lr=0.05").data["path"]}
    assert len(others - {done.data["path"]}) == 2
    dealt = ("--method", "fedavg", *WORDS, "--client-clusters", 40)
    lone = ok("train", *dealt, "--set", "lr=0.05").data
    assert lone["path"] not in others
    result = json.loads((Path(lone["path"]) / "result.json").read_text())
    assert result["participants"] == {"client_clusters": 40, "clusters_per_round": 1}
    for more in ((), ("--jobs", 2)):
        place = tmp_path / f"grid-{len(more)}"
        points = ok("grid", *dealt, "--exact", "--sweep", "lr=0.05,0.1", *more, "--runs", place).data["points"]
        (same,) = (p for p in points if p["digest"] == lone["digest"])
        for file in ("result.json", "rounds.jsonl"):
            assert (Path(same["path"]) / file).read_bytes() == (Path(lone["path"]) / file).read_bytes()


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("--availability", "1.5"), "--availability 1.5: expected a share above 0, at most 1, or a file."),
        (("--availability", "nowhere.csv"), "--availability nowhere.csv: there is no such file."),
        (("--client-dropout", "1"), "--client-dropout 1: expected a share from 0 to below 1."),
        (("--client-sampling", "fair"), "fair"),
        (("--client-clusters", "2.5"), "--client-clusters 2.5: expected a number from 1, or a file."),
        (("--client-clusters", M + 1), f"--client-clusters {M + 1}, but there are {M} clients."),
        (("--client-clusters", "nowhere.csv"), "--client-clusters nowhere.csv: there is no such file"),
        (("--clusters-per-round", "2"), "--clusters-per-round is of clusters of clients."),
        (("--client-clusters", "3", "--clusters-per-round", "4"), "--clusters-per-round 4, but there are 3 clusters."),
        (("--client-clusters", "3", "--dp-clip", "1", "--dp-noise", "1"), "--client-clusters changes who takes part"),
        (("--client-dropout", "0.1", "--dp-clip", "1", "--dp-noise", "1"), "--client-dropout changes who takes part"),
    ],
)
def test_wrong_words_of_who_takes_part_are_answered(store: Path, words: tuple[str, ...], why: str) -> None:
    refused = fedcache("train", "--method", "fedavg", *words, *WORDS)
    assert refused.code == 2
    assert why in refused.err
    for option in (("--client-dropout", "0.1"), ("--client-clusters", 3)):
        assert fedcache("train", "--method", "central", *option, *WORDS).code == 2


@pytest.mark.slow
def test_a_number_of_scored_clients_is_for_their_own_models(store: Path) -> None:
    said = "fedavg has one model for all, so --eval-clients 5 changes nothing."
    assert said in fedcache("train", "--method", "fedavg", "--eval-clients", 5, *WORDS).err.replace("\n", " ")
    assert said not in fedcache("train", "--method", "fedavg", "--eval-clients", "all", *WORDS).err.replace("\n", " ")


@pytest.mark.slow
def test_who_takes_part_and_who_is_scored_tells_runs_apart_and_is_said(store: Path) -> None:
    words = ("train", "--method", "solo", *WORDS, "--set", "bn=false", "--set", "batch=1")
    said = fedcache(*words, "--eval-clients", 300).out
    assert f"300 of {M:,} clients were drawn and scored, " in said
    assert " of which took part in some round; standard error " in said
    ok(*words, "--eval-clients", 200)
    ok(*words, "--eval-clients", 300, "--client-dropout", 0.5)
    told = [run["differs"].split() for run in ok("runs", "list").data["entries"]]
    listed = {" ".join(word for word in words if not word.startswith("execution=")) for words in told}
    assert listed == {"eval_clients=300", "eval_clients=200", "eval_clients=300 client_dropout=0.5"}
    by_options = {"client_dropout" in run["differs"]: run["name"] for run in ok("runs", "list").data["entries"]
                  if "eval_clients=300" in run["differs"]}  # fmt: skip
    untrained = ok("runs", "show", by_options[True]).data["figures"]
    assert untrained["standard error of drawn clients"] is None, "none of those that were scored took part"
    drawn = by_options[False]
    error = ok("runs", "show", drawn).data["figures"]["standard error of drawn clients"]
    assert 0 < error < 0.1
    lines = fedcache("runs", "show", drawn).out.splitlines()
    (line,) = (line for line in lines if "standard error of drawn clients" in line)
    assert line.split()[-2:] == [f"{100 * error:.2f}", "%"]
