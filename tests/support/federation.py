"""The federations of the tests: nine ragged clients, and the four that the public laws are stated on."""

from dataclasses import replace

import numpy as np
import torch
from setting_lines import cases_of, chosen

from fedcache.federate.engine import run as engine
from fedcache.federate.engine.run import RunCallbacks, TrainingRun
from fedcache.federate.methods import METHODS
from fedcache.testing.method_laws import TINY as TINY
from fedcache.testing.method_laws import TinyClient, Trial, fitted, make_federation
from fedcache.testing.method_laws import difference as difference
from fedcache.testing.method_laws import gap as gap
from fedcache.testing.method_laws import spread as spread
from fedcache.testing.method_laws import wide as wide

Rows = TinyClient
tiny = make_federation
SIZES = (12, 64, 7, 33, 1, 50, 8, 21, 40)  # nine clients; the first may be a public set
C = 6
D = 11
PER_ROUND = 5
ROUNDS = 3


def federation(seed=0, *, sizes=SIZES, classes=C, width=D, per_client=3, tests=6, **kwargs):
    """Nine clients of ``sizes`` rows, ``per_client`` of 6 classes each, 11 features."""
    return make_federation(
        seed,
        sizes=sizes,
        classes=classes,
        width=width,
        per_client=per_client,
        tests=tests,
        **kwargs,
    )


def rows_trained(clients):
    """The training rows of all clients, one client after another."""
    return np.concatenate([c.train for c in clients])


def rows_tested(clients):
    """The test rows of all clients, one client after another."""
    return np.concatenate([c.test for c in clients])


SMALL = {
    "batch": 16,
    "epochs": 2,
    "dim": 5,
    "hidden": 7,
    "proj": 4,
    "channels": 1,
    "esd_epochs": 2,
    "esd_batch": 4,
    "probe_epochs": 6,
    "probe_batch": 16,
    "n_ctx": 2,
    "synthetic": 20,
    "virtual": 20,
    "cal_epochs": 3,
    "lbfgs_steps": 60,
}
"""Sizes of the laws' models, for the methods that have such a switch."""


def small(name):
    """The settings under which the laws run a method."""
    declared = {h.name for h in METHODS[name].hparams}
    sizes = {k: v for k, v in SMALL.items() if k in declared}
    # a step runs a tower
    return {**sizes, "epochs": 1} if "image tower" in METHODS[name].needs else sizes


LAW_SIZES = {"batch": {16: 4, 8: 3}, "dim": {5: 7}, "queue": {8: 4}, "esd_batch": {4: 2}}
"""Sizes that the cases have for the nine clients -> those for four."""


def scaled(settings):
    """Settings of a case, with sizes for the tiny federation."""
    return {k: LAW_SIZES.get(k, {}).get(v, v) for k, v in settings.items()}


def trial_of_case(case, execution):
    """A case on trial, with settings that are small."""
    return Trial(METHODS[case[0]], execution, scaled(small(case[0]) | case[1]))


def on_cpu(out):
    """A run with its tensors on the CPU."""
    return replace(
        out,
        server={k: t.cpu() for k, t in out.server.items()},
        states={c: {k: t.cpu() for k, t in out.states[c].items()} for c in out.states},
    )


def go_tiny(name, settings=None, data=None, clients=None, **kwargs):
    """``go`` on the tiny federation: 3 of 4 clients, 2 rounds."""
    if data is None:
        data, clients = tiny()
    return go(
        name,
        scaled(small(name) | chosen(settings)),
        data,
        clients,
        **{"rounds": 2, "participation": 3, **kwargs},
    )


def cases():
    """Every method, with SGD-momentum and Adam where it takes steps, two epochs, batches of 16."""
    out = []
    for name, method in METHODS.items():
        declared = {h.name for h in method.hparams}
        small_ = small(name)
        if "opt" in declared:
            rates = {"sgd": 0.05, "adam": 0.01}
            out += [
                (name, {**small_, "opt": o, "lr": rates[o]})
                for o in rates
                if o in method.hparam("opt").choices
            ]
        else:
            out.append((name, small_))
    return out


VARIANTS = cases_of(
    """
    solo reset_opt=false opt=adam
    fedavg head=linear opt=sgd lr=0.01 logit_scale=10.0
    fedavg head=linear opt=adam init=zero reset_opt=false
    fedavg bn=true batch=16 z_norm=none
    fedavg bn=true bn_mode=local batch=16 logit_head=relu_l2
    fedprox mu=0.5 prox_half=false opt=sgd lr=0.05 drop_last=true batch=8
    fedncm metric=euclid
    fed3r bias=true reg_bias=true w_normalize=true rff_dim=20
    fed3r omega=2.0 bias=true class_weight=local
    fed3r omega=0.5 rff_dim=20
    fed3r-prior lam=0.3 kappa=2.0
    fedcgs cov=total gamma_shrink=0.01
    fedcof gamma=0.1
    afl gamma=0.3 clean=false
    gda alpha=0.05 scale=20.0
    gh-ofl variance=pooled
    gh-ofl head=lda shrink=0.2
    gh-ofl head=qda shrink=0.2
    fedclip objective=ce batch=16 agg=uniform reset_opt=false drop_last=true
    lp-plus-plus bias=true momentum=0.9 alpha_grad=sum alpha_every=1 agg=uniform
    fedpft k_mix=3 cov=diag epochs=2
    fedpft k_mix=2 cov=full epochs=2 reg_covar=0.001
    tip-local a=3.0 b=2.0 feat_post=none
    fed-tip-proto min_rows=4
    fedproto protodist=sq_l2 proto_agg=eq6 proto_infer=local dim=5
    fedproto proto_infer=head init=independent dim=5 opt=sgd
    fedpcl objective=proto_anchor terms=p lp_reduce=sum views="2" warmup=zero_loss proto_agg=mean \
        infer_score=mse init=independent batch=8 dim=5 drop_last=true proto_drop_last=true
    fedpcl pad=false denominator=include proto_norm=true infer_proto=local_padded dim=5
    fedpcl terms=g bn=true infer_proto=global infer_score=cos batch=16 dim=5
    fedpcl noise_on=proto noise=laplace noise_local_infer=true dim=5 batch=16
    fedpcl noise_on=features views="2" s=0.2 dim=5 batch=16
    fedpcl views=twice train_view=aug proto_view=aug dim=5 batch=16
    fedproto train_view=aug proto_view=aug dim=5 batch=16 epochs=2
    fedavg train_view=aug dim=5 batch=16 epochs=2
    perfedavg train_view=aug alpha=0.3 beta=0.1 batch=8 dim=5
    fst-cbdg train_view=aug tsamp_reduce=sum renorm_synth=true batch=16 epochs=2
    fst-cbdg tsamp_scope=iteration synth=strata tsamp_reduce=joint lambda=0.3 batch=16
    fst-cbdg ablation=ist_only batch=16 logit_scale=20.0
    fst-cbdg synth=strata strata=2 gamma=0.4 batch=16 epochs=2
    fst-cbdg synth=strata tsamp_scope=batch tsamp_reduce=sum batch=16
    fst-cbdg ablation=tsamp_only sampling=equal pseudo=uniform sigma=0.3
    fst-cbdg ablation=tsamp_central central_rows=9 batch=16
    central l2=0.01
    central probe=sgd init=zero epochs=2
    central probe=sgd logit_scale=5.0
    central logit_scale=5.0
    fedprox-simclr mu=0.3 prox_half=false simclr=one_way hidden=7 proj=4 epochs=1
    flesd-head send=matrix sim_topk_percent=40.0 sim_at=trunk zeta=0.5 exclude_self=true hidden=7 \
        proj=4 epochs=1 esd_epochs=2 esd_batch=4
    flesd-head anchors=queue queue=8 esd_batch=4 queue_warm=false hidden=7 proj=4 epochs=1 esd_epochs=2
    fedrep bn=true bn_mode=local init=independent e_h=2 batch=16 dim=5
    fedrep bn=true logit_head=relu_l2 agg=uniform e_b=2 opt=sgd lr=0.05 batch=16 drop_last=true
    pfedme K=2 lambda=3.0 eta=0.2 beta=0.6 inner_decay=0.01 eval=global batch=8
    pfedme head=linear init=zero lambda=2.0 eta=0.5 agg=uniform epochs=2
    pfedme bn=true eta=0.05 dim=5 batch=16
    perfedavg alpha=0.3 beta=0.1 adapt_on=test adapt_steps=3 batch=8 dim=5
    perfedavg alpha=0.2 beta=0.1 bn=true adapt_steps=2 batch=16 dim=5
    perfedavg head=linear alpha=0.2 beta=0.1 adapt_steps=0 agg=uniform epochs=2
    supcon views="2" tau=0.2 infer_score=mse init=independent batch=8 dim=5 drop_last=true \
        proto_drop_last=true proto_norm=true
    supcon bn=true infer_score=cos reset_opt=false batch=16 dim=5
    fedntd head=mlp bn=true bn_mode=local batch=16 dim=5 tau=3.0 agg=uniform
    fedntd logit_scale=20.0 tau=2.0 lr=0.002 batch=16
    fedntd lr_decay=0.5 reset_opt=false init=zero beta=0.3 lr=0.5 drop_last=true batch=8
    scaffold head=linear lr_g=0.5 epochs=2 batch=16
    scaffold bn=true bn_mode=local dim=5 drop_last=true batch=8
    ditto bn=true bn_mode=local batch=16 dim=5 reset_opt=false lambda=2.0
    ditto head=linear opt=sgd personal_epochs=3 batch=16
    moon bn=true batch=16 dim=5 z_norm=none reset_opt=false mu=5.0
    moon bn=true bn_mode=local batch=16 dim=5 opt=sgd lr=0.05 tau=0.1
    promptfl n_ctx=3 ctx_pos=middle csc=true train_view=aug reset_opt=false batch=16
    promptfolio n_ctx=2 theta=0.7 csc=true reset_opt=false batch=16
    fedpgp ctx_init=words rank=2 mu=3.0 tau=0.1 csc=true agg=uniform batch=16
    dp-fpl ctx_init=words csc=true noise=0.0 opt=sgd lr=0.05 epochs=2 batch=16
    pfedprompt n_ctx=2 values=features a=2.0 batch=16
    fedtpg n_ctx=2 depth=1 heads=2 names=all ctx_pos=middle agg=weighted
    tofa prior=equal fusion=half texts=3 tau=0.5 power=1.0
    tofa fusion=vision texts=1 power=0.0 scale=null
    promptfl ctx_init=words ctx_pos=front warm_rounds=1 sched_rounds=2 scale=null
    tpfl n_ctx=2 vp_template=fixed_patch vp_init=randn reset_opt=false batch=16
    tpfl n_ctx=2 vp_template=random_patch vp_size=2 agg=uniform batch=16
    atpfl n_ctx=2 vp_template=random_patch vp_size=2 csc=true batch=16 lr=0.01
    atpfl n_ctx=2 vp_size=0 mu_aug=3.0 gamma_aug=0.1 reset_opt=false batch=16
    local-prompt n_ctx=2 vp_size=0 reset_opt=false opt=sgd sched_unit=none batch=16
    local-supervised score=probe opt=sgd batch=16
    tpfl-feat csc=true a=2.0 batch=16 agg=uniform reset_opt=false
    atpfl-feat csc=true mu_aug=3.0 gamma_aug=0.1 batch=16 warm_rounds=1 lr=0.01
    feddisco metric=l2 a=0.2 dim=5 batch=16
    gda proto_view=aug alpha=0.5
    feddyn alpha_by=rows clip=0.5 alpha=0.2 dim=5 batch=16 bn=true
    fedlc denominator=exclude tau=0.5 head=linear opt=sgd lr=0.01 batch=16
    gh-ofl-trained head=proto-hyper synthetic=20 batch=16 epochs=2 rank=3
    ccvr calibrate_at=2 virtual=8 cal_epochs=2 batch=16 dim=5
    ccvr head=linear calibrate_at=1 virtual=8 virtual_of=share cal_epochs=2 batch=16 agg=uniform
    """
)
"""Switches away from their defaults; every choice that a law could break appears at least once."""


def ids(case):
    if case in VARIANTS:
        return f"{case[0]}-variant{VARIANTS.index(case)}"
    return f"{case[0]}-{case[1].get('opt', 'closed')}"


def run(
    method,
    hp,
    data,
    clients,
    *,
    rounds,
    state=None,
    on_round=None,
    watch=None,
    execution="auto",
    own=None,
    **spec,
):
    """``engine.run`` with everything named at once; ``on_round`` is called without the number of the point."""
    callbacks = RunCallbacks(watch, on_round and (lambda _point, *rest: on_round(*rest)))
    spec = TrainingRun(
        method, data, clients, rounds, execution=execution, overrides=own or {}, **spec
    )
    return engine.run(spec, hp, state=state, callbacks=callbacks)


def run_points(method, hps, data, clients, *, rounds, execution="auto", cache=None, **spec):
    """``engine.run_points`` with everything named at once."""
    return engine.run_points(
        TrainingRun(method, data, clients, rounds, execution=execution, **spec), hps, cache=cache
    )


def go(name, settings=None, data=None, clients=None, **kwargs):
    """A run in float64, 5 of 9 clients sampled, 3 rounds unless told otherwise; settings by name or as a line.

    ``name`` is a method's, or a method.
    """
    kwargs = {"rounds": ROUNDS, "participation": PER_ROUND, "dtype": torch.float64, **kwargs}
    if data is None:
        data, clients = federation(dtype=kwargs["dtype"])
    method = METHODS[name] if isinstance(name, str) else name
    data = fitted(method, data)
    return run(method, method.resolve("paper", chosen(settings)), data, clients, **kwargs)


def start_of(name, settings, *pair, **kwargs):
    """The server of a method before its first step."""
    return go_all(name, {**settings, "epochs": 0}, *pair, rounds=1, **kwargs).server


def go_points(name, grid, data=None, clients=None, **kwargs):
    """The points of a grid, each from its settings, as ``go_all`` runs one: every client in one round, in float64."""
    if data is None:
        data, clients = federation()
    method = METHODS[name] if isinstance(name, str) else name
    hps = [method.resolve("paper", chosen(settings)) for settings in grid]
    kwargs = {"rounds": 1, "dtype": torch.float64, **kwargs}
    return run_points(method, hps, fitted(method, data), clients, **kwargs)


def server_gap(one, other):
    """The largest difference between the servers of two runs."""
    return gap(one.server, other.server)


def keeps(saved):
    """An ``on_round`` that adds the snapshot of every round to a list."""
    return lambda _round, _metrics, _traffic, snapshot: saved.append(snapshot())


def go_all(name, settings=None, data=None, clients=None, **kwargs):
    """``go`` with every client in every round."""
    return go(name, settings, data, clients, participation=None, **kwargs)
