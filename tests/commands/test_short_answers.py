"""Short answers of ``train``, ``grid``, ``compare`` and ``predict``; -v and --all print the rest."""

import re

from arrays import overlapping
from command import data_of, fedcache, ok
from homes import made_once

from fedcache.federate.methods import METHODS
from fedcache.parsing import without_codes
from fedcache.report.methods import facts
from fedcache.reproduce import planning

store = made_once(overlapping)


def test_train_prints_what_the_accuracy_the_cost_the_place_and_the_next_command(store, own_home):
    words = f"train fedavg --rounds 2 -s iid -m 4 --store {store}"
    done = fedcache(words)
    what, accuracy, cost, place, following = done.out.splitlines()
    assert "fedavg" in what
    assert re.search(r"accuracy [\d.]+ % \(95 % interval [\d.]+ to [\d.]+ over", accuracy)
    assert "Each client sends" in cost
    assert f"{own_home}/runs" in place
    assert following.split()[:3] == ["Next:", "fedcache", "predict"]
    assert "default of fedavg's paper" not in done.err
    wordy = fedcache(f"{words} -v --fresh")
    assert {what, accuracy, place} <= set(wordy.out.splitlines())
    assert "macro-F1" in wordy.out
    assert "default of fedavg's paper" in wordy.err
    without = fedcache(f"train fedncm -s iid -m 4 --store {store} --no-model").out.splitlines()
    assert without[-1] == "  Next:  fedcache compare"
    assert len(without) == 5


def test_a_grid_trains_the_best_setting_of_every_method_again_and_shows_it(store):
    words = f"grid fedavg,fedper --sweep lr=0.01,0.3 --rounds 2 -s iid -m 4 --store {store}"
    done = data_of(f"{words} --validation 0.25 --retrain --score pooled")
    assert done["score"] == "pooled"
    assert {again["method"] for again in done["retrained"]} == {"fedavg", "fedper"}
    for again in done["retrained"]:
        own = [p for p in done["points"] if p["method"] == again["method"]]
        assert again["sweep"] == max(own, key=lambda p: p["validation"]["pooled"])["sweep"]
    shown = fedcache(f"{words} --validation 0.25 --retrain --score pooled")
    for again in done["retrained"]:
        (line,) = [
            line
            for line in shown.out.splitlines()
            if line.split()[:2] == [again["method"], again["sweep"]["lr"]]
        ]
        assert f"{100 * again['accuracy']['pooled']:.2f}" in line.split()[4]
    best = done["retrained"][0]["path"].rpartition("/")[2]
    assert f"fedcache predict {best[:8]}" in shown.out.splitlines()[-1]
    assert "Configurations 1 to" not in shown.err


def test_compare_prints_at_most_forty_lines_and_says_what_a_test_cannot_show(store):
    for clients in (2, 3, 4, 5):
        ok(f"grid fed3r,fedncm --sweep bias=true,false -s iid -m {clients} --store {store}")
    many = fedcache("compare")
    assert len(many.out.splitlines()) <= 40
    assert "is best in" in many.out
    assert len(fedcache("compare --all").out.splitlines()) > 40
    blocks = fedcache("compare --over settings").out
    assert (
        "too few for this test to show significance: its smallest possible p is 0.125"
        in " ".join(blocks.split())
    )
    assert many.out.splitlines()[-1] == "Next:  fedcache report"
    # Six settings are enough for a test, so it is over settings without being asked.
    for clients in (6, 7):
        ok(f"grid fed3r,fedncm --sweep bias=true,false -s iid -m {clients} --store {store}")
    assert [c["over"] for c in data_of("compare")["comparisons"]] == ["settings"]
    assert {c["over"] for c in data_of("compare --over seeds")["comparisons"]} == {"seeds"}


def test_printed_texts_have_no_codes_of_the_documentation():
    texts = [facts.objective(name) for name in METHODS]
    texts += [h.help for method in METHODS.values() for h in method.hparams]
    for name in planning.names():
        entry = planning.entry(name)
        texts += [*entry.not_given, *entry.notes]
    assert [text for text in map(without_codes, texts) if re.search(r"\b[DT]-[A-Z]?\d", text)] == []
    assert without_codes("f() (a; D-12, D-15) g(x, y)") == "f() (a) g(x, y)"
    assert "PROXY" not in fedcache("reproduce --help-all").out
