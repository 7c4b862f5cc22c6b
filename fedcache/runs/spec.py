"""What a run is asked to do, resolved: every default in place, contradictions refused, the device chosen."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fedcache.config import PartitionConfig, TrainConfig
from fedcache.errors import Exit, FedcacheError, unknown
from fedcache.extract.device import known_device, resolve_device
from fedcache.progress import Observer
from fedcache.runs.prepare import Setting, parse_participation, parse_seeds
from fedcache.runs.trust import non_default_options, policy_from_config

DTYPES = ("float32", "float64")


def resolved_config(setting: Setting, config: TrainConfig) -> dict[str, Any]:
    """The configuration that determines the result: every hyperparameter and every default in place."""
    method = setting.method
    rounds = 1 if method.one_shot else config.rounds or method.defaults.rounds
    participation = config.participation
    if participation is None:
        known = method.defaults.participation
        official = method.defaults.official_participation
        clients = len(next(iter(setting.partitions.values())).clients)
        if config.preset == "official" and official is not None and clients > official:
            known = official
        if isinstance(known, int) and known > clients:
            known = None
        participation = "all" if known is None else str(known)
    parse_participation(participation)
    return {
        "method": method.name,
        "preset": config.preset,
        "backbones": list(setting.keys),
        "domain": list(config.domain),
        "rounds": rounds,
        "participation": participation,
        "seeds": ",".join(map(str, parse_seeds(config.seeds))),
        "eval_every": config.eval_every,
        "lift": config.lift,
        "dtype": config.dtype,
        "set": {
            **{k: ("auto" if v is None else v) for k, v in sorted(setting.hp.items())},
        },
        **non_default_options(config),
        **({"client_backbones": list(config.client_backbones)} if config.client_backbones else {}),
        **({"client_set": {k: str(v) for k, v in config.client_set.items()}} if config.client_set else {}),
    }


def refuse_contradictions(config: TrainConfig, dealt: PartitionConfig) -> None:
    """Refuse options of which one would be ignored.

    Raises:
        FedcacheError: USAGE, naming both.
    """
    deals = dealt.scheme is not None or dealt.clients is not None or bool(dealt.options)
    pairs = (
        (
            config.store is not None and config.dataset is not None,
            "--store and --dataset",
            "A store holds its dataset.",
        ),
        (config.partition is not None and deals, "--partition and options of a scheme", "A saved partition is dealt."),
        (config.clients_from is not None and deals, "--clients-from and options of a scheme", "The stores are dealt."),
        (
            config.clients_from is not None and bool(config.store or config.dataset or config.partition),
            "--clients-from and another store, dataset or partition",
            "The client stores are all there is.",
        ),
    )
    for given, names, why in pairs:
        if given:
            raise FedcacheError(Exit.USAGE, f"{names} are both given. {why}", "Leave one of them out.")


def check_values(config: TrainConfig) -> None:
    """Refuse wrong values before minutes of extraction, not after.

    Raises:
        FedcacheError: USAGE.
    """
    from fedcache.federate.execution.choose import executors

    for what, value, legal in (("dtype", config.dtype, DTYPES), ("lift", config.lift, ("auto", *executors()))):
        if value not in legal:
            raise unknown(what, value, legal)
    known_device(config.device)
    policy_from_config(config)
    parse_participation(config.participation)


def training_device(requested: str, observer: Observer, *, live: bool = False) -> str:
    """``auto`` is the CPU, where light heads are fast and the docs were measured; ``cuda`` never falls back.

    With ``live`` encoders ``auto`` takes a GPU when torch can use one.

    Raises:
        FedcacheError: USAGE for an unknown device, ENVIRONMENT for ``cuda`` without a usable GPU.
    """
    import torch

    if requested == "auto" and not live:
        if torch.cuda.is_available():
            observer.note(
                "Training on the CPU, although there is a GPU: heads are light (--device cuda moves it there)."
            )
        return "cpu"
    return resolve_device(requested).kind


def on_device(setting: Setting, device: str) -> Setting:
    """The setting with its tensors where they are computed on."""
    if device == "cpu":
        return setting
    d = setting.data
    moved = replace(
        d,
        x=d.x.to(device),
        y=d.y.to(device),
        text=None if d.text is None else d.text.to(device),
        domain=None if d.domain is None else d.domain.to(device),
        towers=None if d.towers is None else d.towers.to(device),
    )
    return replace(setting, data=moved)
