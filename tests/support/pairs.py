"""The (method, execution) pairs that can be: tests of others are not collected, and laws say which pairs must be."""

from draws import FULL, one_of_each
from federation import ids

from fedcache.federate.engine.run import executors
from fedcache.federate.execution.memory_estimate import Load
from fedcache.federate.methods import METHODS


def fitting(case, execution):
    """The case as an execution can serve it (``gram`` takes SGD), or None."""
    name, settings = case
    declared = {h.name for h in METHODS[name].hparams}
    if execution == "gram" and "opt" in declared and "opt" not in settings:
        settings = {**settings, "opt": "sgd", "lr": 0.05}
    hp = METHODS[name].resolve("paper", settings)
    if executors()[execution].serves(METHODS[name], hp, Load(head_bytes=0, clients=2)):
        return None
    return name, settings


def served(cases, executions, only=lambda _name: True, *, in_turn=False):
    """Run a law with ``case`` and ``execution`` over the pairs that can be, of the methods for which ``only`` holds.

    With ``in_turn`` the short draw has one execution for each case: the executions take turns.

    The module of the law needs ``parametrize`` as its ``pytest_generate_tests``; a module that imports the law may
    choose other executions.
    """

    def mark(law):
        law.__dict__["pairs"] = (
            [case for case in cases if only(case[0])],
            tuple(executions),
            in_turn and not FULL,
        )
        return law

    return mark


def kind_of(case):
    """What an execution can see of a method: its steps, its server and whether statistics of batches travel."""
    method = METHODS[case[0]]
    return method.gradient, method.one_shot, method.central, case[1].get("bn")


def parametrize(metafunc, executions=()):
    """Parametrise a law that ``served`` has marked, over its own executions.

    With ``executions``, over those, and in the short draw over one case of each kind.
    """
    law = metafunc.function
    if not hasattr(law, "pairs"):
        return
    cases, own, in_turn = law.pairs
    cases = one_of_each(cases, kind_of) if executions else cases
    pairs = [
        (case, fitting(case, execution), execution)
        for execution in executions or own
        for case in cases
    ]
    found = [
        (fitted, execution, f"{execution}-{ids(case)}")
        for case, fitted, execution in pairs
        if fitted is not None
    ]
    if in_turn:
        of_case = {}
        for one in found:
            of_case.setdefault(one[2].partition("-")[2], []).append(one)
        found = [can_be[i % len(can_be)] for i, can_be in enumerate(of_case.values())]
    metafunc.parametrize(
        ("case", "execution"),
        [(case, execution) for case, execution, _ in found],
        ids=[name for *_, name in found],
    )
