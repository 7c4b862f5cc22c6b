"""Extractions of texts: what changed is computed and nothing else, rows without a text are named, models read texts."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from command import Done, fedcache, ok

import fedcache as fc
from fedcache.errors import Exit, UsageError
from fedcache.store.store import Store

WORDS = ["sun", "rain", "wind", "snow", "bread", "soup", "fish", "salt"]


@pytest.fixture
def bag(encoders: str) -> str:
    """The name of a backbone of texts, in the working directory."""
    return f"module:{encoders}:bag"


def sentences(count: int) -> list[str]:
    """Different texts of one of two topics."""
    draw = np.random.default_rng(0)
    return [" ".join(draw.choice(WORDS[4 * (i % 2) :][:4], 3)) + f" number {'x' * (i + 1)}" for i in range(count)]


def write(path: Path, texts: list[str]) -> Path:
    rows = [f"{text},{('weather', 'food')[i % 2]},shop{i % 3}" for i, text in enumerate(texts)]
    path.write_text("text,label,shop\n" + "\n".join(rows) + "\n")
    return path


def extract(bag: str, path: Path, *words: object) -> Done:
    return ok("extract", "--dataset", f"texts:{path.name}", "--backbones", bag, "--batch", 4, "--chunk-rows", 8,
              *(words or ("--workers", 0)))  # fmt: skip


def passes(done: Done) -> int:
    return sum(array["forward_batches"] for array in done.data["arrays"])


@pytest.mark.slow
def test_a_changed_text_costs_one_chunk_and_a_renamed_file_none(bag, tmp_path):
    texts = sentences(64)
    first = extract(bag, write(tmp_path / "a.csv", texts))
    assert (passes(first), passes(extract(bag, tmp_path / "a.csv"))) == (16, 0)
    (tmp_path / "a.csv").rename(tmp_path / "renamed.csv")
    again = extract(bag, tmp_path / "renamed.csv")
    assert (passes(again), again.data["path"]) == (0, first.data["path"])
    texts[13] = "quite another text"
    changed = extract(bag, write(tmp_path / "renamed.csv", texts))
    # The new text is a row of its own behind the others: a chunk of one batch.
    assert passes(changed) == 1
    assert changed.data["growth"]["new"] == 1
    assert changed.data["growth"]["reused_chunks"] == 8
    assert "1 text new, 1 vanished, 8 chunks reused, 1 forward pass" in changed.err
    assert "image" not in changed.err + first.err
    shown = fedcache("extract", "--dataset", "texts:renamed.csv", "--backbones", bag, "--batch", 4, "--chunk-rows", 8)
    assert "image" not in shown.out + shown.err


def test_rows_without_a_text_are_quarantined_by_name_and_never_zeros(bag, tmp_path):
    bad = [0, 1, 2, 3, 9]  # of which four are a whole batch, which reaches no model
    texts = ["  " if i in bad else text for i, text in enumerate(sentences(40))]
    write(tmp_path / "a.csv", texts)
    words = ("extract", "--dataset", "texts:a.csv", "--backbones", bag, "--batch", 4, "--chunk-rows", 8)
    stopped = fedcache(*words)
    assert stopped.code == Exit.CORRUPT
    assert "--max-bad 1" in stopped.err
    done = fedcache(*words, "--max-bad", 5)
    assert done.code == Exit.QUARANTINED
    assert "5 texts could not be read" in done.out
    assert "03: there is no text" in done.out
    done = fedcache(*words, "--max-bad", 5, "--json")
    store = Store.open(Path(done.data["path"]))
    (key,) = store.arrays
    rows = store.reader(key).all()[:, 0]
    assert np.flatnonzero(np.isnan(rows).any(1)).tolist() == bad
    assert np.flatnonzero(store.samples.ok == 0).tolist() == bad


def test_texts_without_labels_have_features_and_no_text_features(bag, tmp_path):
    (tmp_path / "a.csv").write_text("text\none\ntwo\nthree\n")
    words = ("extract", "--dataset", "texts:a.csv", "--backbones", bag)
    assert ok(*words, "--dry-run").data["text"] == []
    done = ok(*words)
    assert (done.data["images"], done.data["text"]) == (3, [])
    assert ok(*words).data["decoded"] == 0
    assert "text        none" in fedcache("inspect", "--dataset", "texts:a.csv").out


@pytest.mark.slow
def test_a_plan_a_part_and_the_commands_that_look_at_a_store(bag, tmp_path):
    path = write(tmp_path / "a.csv", sentences(40))
    plan = fedcache("extract", "--dataset", "texts:a.csv", "--backbones", bag, "--dry-run")
    assert "Plan for 40 texts: about" in plan.out
    assert not list((tmp_path / "home").glob("stores/*"))
    assert ok("extract", "--dataset", "texts:a.csv", "--backbones", bag, "--limit", 10).data["images"] == 10
    extract(bag, path)
    inspected = fedcache("inspect", "--dataset", "texts:a.csv").out
    assert "texts       40 readable of 40" in inspected
    assert "texts as they are" in inspected
    for words in (("verify",), ("repair",), ("ls",), ("datasets", "info", "texts:a.csv")):
        done = fedcache(*words)
        assert done.code == 0, done.err
        assert "image" not in done.out.replace("--images-key", "")
    export = fedcache("export", "out.parquet", "--dataset", "texts:a.csv")
    assert export.code == 0, export.err
    assert ok("ingest", "out.parquet", "--name", "again").data


@pytest.mark.slow
def test_methods_train_on_texts_and_their_models_read_texts(bag, tmp_path):
    write(tmp_path / "a.csv", sentences(60))
    extract(bag, tmp_path / "a.csv")
    done = fedcache("train", "--method", "fed3r", "--by", "shop")
    assert "fedcache predict" in done.out
    assert "TEXTS.csv" in done.out
    run = ok("train", "--method", "fed3r", "--by", "shop").data
    assert run["accuracy"]["mean"] == 1.0
    assert run["dataset"]["holds"] == "texts"
    (tmp_path / "new.csv").write_text('id,text\nq,"bread soup"\np,"wind, snow"\nr,\n')
    found = fedcache("predict", run["path"], "new.csv", "--json")
    assert found.code == Exit.QUARANTINED
    rows = json.loads(found.out)["data"]["rows"]
    assert [(row["name"], row["class"]) for row in rows] == [("q", "food"), ("p", "weather"), ("r", None)]
    two = ok("evaluate", run["path"], "--dataset", "texts:a.csv").data
    assert two
    model = fc.load_model(run["path"])
    assert model.predict(["rain and sun", "fish"]) == ["weather", "food"]
    assert model.predict("fish soup") == ["food"]
    with pytest.raises(UsageError, match="these are none"):
        model.predict(["salt", 3])  # type: ignore[list-item]
    card = fedcache("export-model", run["path"], "-o", "head")
    assert "no torch module that takes pixels" in card.err
    refused = fedcache("train", "--method", "promptfl", "--dataset", "texts:a.csv")
    assert refused.code == Exit.USAGE
    assert "trained prompts go through both towers of a CLIP" in refused.err


def test_a_model_of_rows_predicts_from_a_store(bag, tmp_path):
    draw = np.random.default_rng(0)
    tone = np.arange(60) % 2
    waves = np.sin(np.arange(64) * (0.4 + 0.6 * tone[:, None])) + 0.1 * draw.normal(size=(60, 64))
    np.savez("w.npz", waves=waves.astype(np.float32), label=np.array(["low", "high"])[tone], shop=np.arange(60) % 3)
    name = bag.removesuffix("bag") + "spectrum"
    store = ok("extract", "--dataset", "rows:w.npz", "--backbones", name).data["path"]
    run = ok("train", "--method", "fed3r", "--by", "shop").data
    assert run["accuracy"]["mean"] == 1.0
    refused = fedcache("predict", run["path"], "w.npz")
    assert refused.code == Exit.USAGE
    assert f"fedcache extract --dataset rows:w.npz --backbones {name}" in refused.err
    assert len(ok("predict", run["path"], "--store", store).data["rows"]) == 60


def test_ingest_says_how_texts_come_in(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "a.csv", sentences(4))
    done = fedcache("ingest", "a.csv", "--name", "a")
    assert done.code == Exit.USAGE
    assert "fedcache extract --dataset texts:a.csv" in done.err


def test_the_column_of_texts_can_be_named(bag, tmp_path):
    (tmp_path / "a.csv").write_text("said,mood\n" + "".join(f"hello {'x' * i},{i % 2}\n" for i in range(8)))
    words = ("extract", "--dataset", "texts:a.csv", "--backbones", bag)
    refused = fedcache(*words)
    assert refused.code == Exit.USAGE
    assert "--images-key" in refused.err
    assert ok(*words, "--images-key", "said", "--label-key", "mood").data["images"] == 8
