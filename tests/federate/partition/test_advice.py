"""What the refusal of a partition advises works when it is run."""

import re
import shlex

import numpy as np
import pytest
from draws import examples
from hypothesis import example, given, settings
from hypothesis import strategies as st
from partition_rows import columns_from

from fedcache.errors import FedcacheError
from fedcache.federate.partition.partition import SCHEMES, InfeasibleError, make, with_column
from fedcache.federate.partition.scheme import FEWER
from fedcache.runs.partitions import typed_arguments

COMMAND = re.compile(r"fedcache partition --[^\n]*")
ADVICE = re.compile(r"; ((?:--\S+ \S+ )+)assigns the requested rows")


def advised(error):
    """Commands of the hint that deal rows."""
    return [found for found in COMMAND.findall(error.hint) if "--scheme" in found]


def words_of(options):
    """Arguments of options of schemes, as words."""
    found = {}
    for option, value in zip(options[::2], options[1::2], strict=True):
        name, word = (
            value.split("=", 1) if option == "--option" else (option[2:].replace("-", "_"), value)
        )
        found[name] = word
    return found


def run_command(command, columns):
    """Deal as a command says that names options of schemes alone."""
    given_words = words_of(shlex.split(command)[2:])
    scheme = given_words.pop("scheme")
    seed = int(given_words.pop("partition_seed", 0))
    chosen, arguments = with_column(scheme, given_words)
    assert chosen is not None
    make(chosen, columns, seed=seed, **typed_arguments(chosen, arguments))


def rows_of_values(sizes):
    """Rows by value of the domain and class, a fifth are test rows."""
    label = [c for counts in sizes for c, count in enumerate(counts) for _ in range(count)]
    domain = [d for d, counts in enumerate(sizes) for count in counts for _ in range(count)]
    split = [int(i % 5 == 4) for i in range(len(label))]
    return columns_from(label, domain, split, np.ones(len(label)), len(sizes[0]), len(sizes))


SIZES = st.lists(st.lists(st.integers(0, 40), min_size=2, max_size=2), min_size=2, max_size=4)


@pytest.mark.slow
@settings(deadline=None)
@given(
    sizes=SIZES,
    inside=st.sampled_from([None, *(name for name in SCHEMES if name != "natural")]),
    clients=st.integers(1, 6),
    alpha=st.sampled_from([0.1, 1.0, 50.0]),
    more=st.integers(1, 12),
    seed=st.integers(0, 9),
)
@example(sizes=[[60, 60], [55, 70]], inside="label-shift", clients=5, alpha=1.0, more=10, seed=0)
@example(sizes=[[20, 20], [20, 20]], inside="feature-shift", clients=2, alpha=1.0, more=4, seed=0)
@example(sizes=[[8, 8], [1, 1]], inside="label-shift", clients=2, alpha=1.0, more=4, seed=0)
@example(sizes=[[15, 15], [7, 7], [30, 30]], inside="iid", clients=30, alpha=1.0, more=4, seed=3)
@example(sizes=[[9, 9], [20, 20]], inside="lda", clients=2, alpha=0.1, more=4, seed=2)
def test_what_is_advised_works_for_every_value_of_a_column(
    sizes, inside, clients, alpha, more, seed
):
    columns = rows_of_values(sizes)
    arguments = {"by": "domain"}
    if inside is None:
        arguments["min_rows"] = more * 5
    else:
        own = {a.name for a in SCHEMES[inside].arguments}
        arguments |= {"inside": inside, "clients": clients}
        arguments |= {
            k: v for k, v in {"alpha": alpha, "shards": more, "shots": more}.items() if k in own
        }
    check("natural", columns, arguments, seed)


@pytest.mark.slow
@pytest.mark.parametrize("scheme", [s for s in SCHEMES if s != "natural"])
@examples(25, 200)
@given(
    sizes=SIZES,
    clients=st.integers(1, 30),
    alpha=st.sampled_from([0.05, 1.0, 50.0]),
    more=st.integers(1, 12),
    pool=st.sampled_from(["train", "test"]),
    seed=st.integers(0, 9),
)
def test_what_is_advised_works(scheme, sizes, clients, alpha, more, pool, seed):
    own = {a.name for a in SCHEMES[scheme].arguments}
    asked = {"clients": clients, "alpha": alpha, "shards": more, "shots": more, "pool": pool}
    check(scheme, rows_of_values(sizes), {k: v for k, v in asked.items() if k in own}, seed)


def test_domains_without_training_rows_are_left_out_by_the_advice():
    check("feature-shift", rows_of_values([[0, 0], [0, 5], [0, 5]]), {}, 0)


def check(scheme, columns, arguments, seed):
    """What a warning advises gives every client the rows asked for, and what a refusal advises works."""
    try:
        made = make(scheme, columns, seed=seed, **arguments)
    except FedcacheError as error:
        refused = error
    else:
        check_warnings(made, columns, arguments)
        return
    assert refused.hint
    for command in advised(refused):
        run_command(command, columns)
    if isinstance(refused, InfeasibleError) and refused.instead:
        make(scheme, columns, seed=seed, **arguments | refused.instead)


def check_warnings(made, columns, arguments):
    for note in made.notes:
        advice = ADVICE.search(note)
        if advice is None:
            continue
        changed = words_of(shlex.split(advice.group(1)))
        enough = make(
            made.scheme,
            columns,
            seed=made.seed,
            **arguments | typed_arguments(made.scheme, changed),
        )
        assert not any(FEWER in note for note in enough.notes), (advice.group(1), enough.notes)
