"""A method whose own term is switched off is the plain method, to the bit, and with it another."""

import numpy as np
import pytest
import torch
from federation import federation, gap, go_all, small
from setting_lines import set_to
from text_tables import rows_of

LIMITS = rows_of(
    """
    fst-cbdg       | lambda=0.0       | lambda=0.5       | fst-cbdg ablation=ist_only |
    atpfl          | mu_aug=0.0       | mu_aug=5.0       | tpfl          | vp_init=randn lr=0.01
    atpfl          | mu_aug=0.0       | mu_aug=5.0       | tpfl          | vp_template=random_patch lr=0.01
    atpfl-feat     | mu_aug=0.0       | mu_aug=5.0       | tpfl-feat     | csc=true lr=0.01 epochs=2
    fedprox-simclr | mu=0.0           | mu=0.5           | fedavg-simclr |
    fedproto       | lambda_proto=0.0 | lambda_proto=1.0 | solo          | dim=8
    pfedprompt     | a=0.0            | a=500.0          | promptfl      | lr=0.01
    promptfolio    | theta=0.0        | theta=0.4        | promptfl      | lr=0.02
    kgcoop         | kg_weight=0.0    |                  | promptfl      | ctx_init=words lr=0.02
    prograd        | prograd_weight=0.0 |                | promptfl      | ctx_init=words lr=0.02
    tip-local      | a=0.0            | a=500.0          | clip-zs       |
    fed-tip-proto  | a=0.0            | a=500.0          | clip-zs       |
    fedavgm        | server_momentum=0.0 |               | fedavg | opt=sgd head=linear lr=0.01 wd=1e-4
    fedavgm        | server_momentum=0.0 |               | fedavg | opt=adam bn=true z_norm=none lr=0.01
    fedlc          | tau=0.0          |                  | fedavg | opt=sgd head=linear lr=0.01 wd=1e-4
    fedlc          | tau=0.0          |                  | fedavg | opt=adam bn=true z_norm=none lr=0.01
    fedntd         | beta=0.0         |                  | fedavg | opt=sgd head=linear lr=0.01 wd=1e-4
    fedntd         | beta=0.0         |           | fedavg | opt=adam head=mlp bn=true z_norm=none lr=0.01 wd=1e-4
    fedprox        | mu=0.0           |                  | fedavg | opt=sgd head=linear lr=0.01 wd=1e-4
    fedprox        | mu=0.0           |                  | fedavg | opt=adam bn=true z_norm=none lr=0.01
    moon           | mu=0.0           |                  | fedavg | opt=sgd bn=true z_norm=none lr=0.01 wd=1e-4
    moon           | mu=0.0           |                  | fedavg | opt=adam bn=true z_norm=none lr=0.01
    """
)
"""Method, its term off, and on, the plain method with settings of its own, and settings of both."""


def tensors(out):
    """All that the server and the clients of a run keep, by name."""
    of_clients = {f"{c}/{k}": t for c, state in out.states.items() for k, t in state.items()}
    return out.server | of_clients


ALONE = rows_of(
    """
    fedavg         | solo             | opt=sgd head=linear init=shared lr=0.01
    fedavg         | solo             | opt=adam dim=8 init=shared lr=0.01
    fedper         | solo             | opt=sgd dim=8 init=shared lr=0.05 reset_opt=false
    fedper         | solo             | opt=adam dim=8 init=shared lr=0.05 reset_opt=false
    lg-fedavg      | solo             | opt=sgd dim=8 init=shared lr=0.05 reset_opt=false
    lg-fedavg      | solo             | opt=adam dim=8 init=shared lr=0.05 reset_opt=false
    """
)


@pytest.mark.parametrize(("name", "plain", "settings"), ALONE)
def test_one_client_is_a_client_that_trains_alone_bit_for_bit(name, plain, settings):  # T-S2
    data, clients = federation(dtype=torch.float32)
    one, alone = (
        go_all(method, settings, data, clients[1:2], dtype=torch.float32)
        for method in (name, plain)
    )
    (wanted,) = alone.states.values()
    assert gap(one.server | one.states.get(0, {}), wanted) == 0.0
    assert one.client_accuracy == alone.client_accuracy


@pytest.mark.parametrize(("name", "off", "on", "plain", "both"), LIMITS)
def test_without_its_own_term_a_method_is_the_plain_one_bit_for_bit(name, off, on, plain, both):
    data, clients = federation(dtype=torch.float32, views=4, sizes=(1, 40, 17))
    if name == "fedproto":
        off = f"{off} proto_infer=head"
        on = f"{on} proto_infer=head"
    plain, *own = plain.split()
    without, held, expected = (
        go_all(
            method,
            small(method) | set_to(both) | set_to(settings),
            data,
            clients,
            rounds=2,
            dtype=torch.float32,
        )
        for method, settings in ((name, off), (name, on), (plain, " ".join(own)))
    )
    wanted = tensors(expected)
    found = tensors(without)
    other = tensors(held)
    common = wanted.keys() & found.keys()
    assert common or plain == "clip-zs"
    assert all(torch.equal(found[k], wanted[k]) for k in common)
    assert np.array_equal(without.evaluation.predictions, expected.evaluation.predictions)
    assert any(gap({k: other[k]}, {k: wanted[k]}) for k in common) or not np.array_equal(
        held.client_accuracy, expected.client_accuracy
    )
