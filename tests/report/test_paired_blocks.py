"""What a comparison says of runs that are not scored alike."""

from arrays import ingested
from command import ok


def test_a_comparison_of_a_run_with_drawn_clients_says_so(own_home, tmp_path):
    ingested(tmp_path)
    paths = [
        ok("train --scheme iid --clients 4 --rounds 1 --method fedrep", *more).data["path"]
        for more in ((), ("--eval-clients", 2))
    ]
    assert (
        "Scored over different numbers of clients." in ok("compare", *paths, "--over", "seeds").out
    )
