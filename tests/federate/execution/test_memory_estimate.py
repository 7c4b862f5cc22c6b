"""What is said of a run that does not fit into memory, by hand."""

from __future__ import annotations

import pytest

from fedcache.errors import Exit, FedcacheError
from fedcache.federate.execution.memory_estimate import ExecutionPlan, Forecast, Load, refuse_too_much


def test_a_run_that_does_not_fit_says_how_many_clients_at_once_would():
    # 40 MiB for 8 clients at once are 5 MiB for each; 30 MiB are needed besides, and 100 MiB for the features.
    found = Forecast(100 << 20, 2 << 20, 10 << 20, 15 << 20, 40 << 20, 3 << 20)
    load, plan = Load(1, 8), ExecutionPlan("batched", 8)
    assert (found.total >> 20, found.above >> 20) == (170, 70)

    def hint(free, loaded, plan=plan):
        with pytest.raises(FedcacheError, match=rf"^The run needs 170 MiB .*, and {free:,} MiB are free\.") as error:
            refuse_too_much(found, load, plan, free << 20, loaded=loaded)
        assert error.value.code is Exit.ENVIRONMENT
        return error.value.hint

    refuse_too_much(found, load, plan, 70 << 20, loaded=True)
    refuse_too_much(found, load, plan, 170 << 20, loaded=False)
    # (69 - 30) / 5 = 7.8, and (45 - 30) / 5 = 3 exactly; with the features still to be read (146 - 130) / 5 = 3.2
    for free, loaded, fits in ((69, True, 7), (45, True, 3), (146, False, 3)):
        assert hint(free, loaded).startswith(f"At most {fits} clients at once fit: the engine takes 8;")
    fewer = "Fewer clients a round (--participation), a smaller head, or fewer points at once would fit."
    assert hint(34, True) == hint(20, True) == fewer, "not one client fits"
    assert hint(69, True, ExecutionPlan("sequential", 1)) == fewer, "one at once is the least there is"
