"""What the engine is measured against: plain PyTorch, one client after another, torch.optim, rows in memory.

Written as somebody would who wants it fast and has no engine: a client's rows are cut once, a minibatch is one index,
modules and optimisers come from torch. The arithmetic is that of ``fedavg`` and ``fedpcl`` with the same switches.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize, one_hot

from fedcache.federate.engine.client_data import Data
from fedcache.federate.engine.run import TrainingRun, run, run_points
from fedcache.federate.methods import METHODS

Optimiser = Callable[[Any], torch.optim.Optimizer]
TESTS = 2  # rows of a client that are scored
BATCH = 32
LR = 0.1
MOMENTUM = 0.9
WD = 1e-4


@dataclass(frozen=True)
class Rows:
    """A client."""

    name: str
    train: np.ndarray
    test: np.ndarray


@dataclass(frozen=True)
class Federation:
    """Random unit features with random labels, as many rows for each client."""

    data: Data
    clients: list[Rows]

    def to(self, device: str) -> Federation:
        """The same with its data on another device."""
        return replace(self, data=self.data.to(device))

    def cut(self) -> list[tuple[Tensor, Tensor]]:
        """Features and labels of every client's training rows."""
        x = self.data.x[:, 0]
        return [(x[c.train], self.data.y[c.train]) for c in self.clients]

    def scored(self) -> list[tuple[Tensor, Tensor]]:
        """Features and labels of every client's test rows."""
        x = self.data.x[:, 0]
        return [(x[c.test], self.data.y[c.test]) for c in self.clients]

    def ours(
        self,
        method: str,
        settings: Mapping[str, Any],
        execution: str = "auto",
        rounds: int = 1,
        **how: Any,
    ) -> Any:
        """A run of the engine."""
        spec = TrainingRun(
            METHODS[method], self.data, self.clients, rounds, execution=execution, **how
        )
        return run(spec, self.hp(method, settings))

    def grid(
        self, method: str, points: Sequence[Mapping[str, Any]], rounds: int, execution: str = "auto"
    ) -> Any:
        """Points of the engine, as one program where the execution says so."""
        hps = [self.hp(method, p) for p in points]
        return run_points(
            TrainingRun(METHODS[method], self.data, self.clients, rounds, execution=execution), hps
        )

    def hp(self, method: str, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Hyperparameters of a method."""
        return dict(METHODS[method].resolve("paper", settings))


def federation(
    clients: int, rows: int, classes: int, width: int = 1024, *, text: bool = False
) -> Any:
    """``clients`` with ``rows`` training rows each; every row counts once, and a few rows are scored at the end."""
    g = torch.Generator().manual_seed(0)
    each = rows + TESTS
    x = normalize(torch.randn(clients * each, 1, width, generator=g), dim=-1)
    y = torch.randint(classes, (clients * each,), generator=g)
    rest = normalize(torch.randn(classes, width, generator=g), dim=-1) if text else None
    starts = range(0, clients * each, each)
    made = [
        Rows(f"c{i}", np.arange(s, s + rows), np.arange(s + rows, s + each))
        for i, s in enumerate(starts)
    ]
    return Federation(Data(x, y, classes, rest), made)


def sgd(lr: float = LR, wd: float = WD) -> Optimiser:
    """torch.optim.SGD."""
    return lambda p: torch.optim.SGD(p, lr=lr, momentum=MOMENTUM, weight_decay=wd)


def adam(lr: float = 1e-3, **how: Any) -> Optimiser:
    """torch.optim.Adam; ``fused=True`` is its fastest way on a CPU."""
    return lambda p: torch.optim.Adam(p, lr=lr, weight_decay=WD, **how)


def fedavg(
    parts: Sequence[tuple[Tensor, Tensor]], classes: int, rounds: int, make: Optimiser
) -> Any:
    """FedAvg of one linear head; returns the model."""
    server = nn.Linear(parts[0][0].shape[1], classes, device=parts[0][0].device)
    total = sum(len(y) for _, y in parts)
    for _ in range(rounds):
        mean = [torch.zeros_like(p) for p in server.parameters()]
        for x, y in parts:
            model = copy.deepcopy(server)
            optimiser = make(model.parameters())
            for rows in torch.randperm(len(y), device=y.device).split(BATCH):
                optimiser.zero_grad()
                cross_entropy(model(x[rows]), y[rows]).backward()
                optimiser.step()
            for m, p in zip(mean, model.parameters(), strict=True):
                m.add_(p.detach(), alpha=len(y) / total)
        with torch.no_grad():
            for p, m in zip(server.parameters(), mean, strict=True):
                p.copy_(m)
    return server


def fedavg_by_hand(
    parts: Sequence[tuple[Tensor, Tensor]], classes: int, rounds: int
) -> tuple[Tensor, Tensor]:
    """The same by SGD for clients with equally many rows: all take each step together, with gradients by hand."""
    x = torch.stack([rows for rows, _ in parts])  # [M, n, D]
    target = one_hot(torch.stack([labels for _, labels in parts]), classes).to(x.dtype)
    M, n, D = x.shape
    client = torch.arange(M)[:, None]
    start = nn.Linear(D, classes)
    weight = start.weight.detach()
    bias = start.bias.detach()
    for _ in range(rounds):
        W = weight.repeat(M, 1, 1)
        b = bias.repeat(M, 1, 1)
        W_velocity = torch.zeros_like(W)
        b_velocity = torch.zeros_like(b)
        for rows in torch.rand(M, n).argsort(1).split(BATCH, dim=1):
            x_batch = x[client, rows]
            error = torch.baddbmm(b, x_batch, W.mT).softmax(-1)
            error.sub_(target[client, rows]).div_(rows.shape[1])
            W_velocity.mul_(MOMENTUM).baddbmm_(error.mT, x_batch).add_(W, alpha=WD)
            b_velocity.mul_(MOMENTUM).add_(error.sum(1, keepdim=True)).add_(b, alpha=WD)
            W.sub_(W_velocity, alpha=LR)
            b.sub_(b_velocity, alpha=LR)
        weight = W.mean(0)
        bias = b.mean(0)
    return weight, bias


FST_SAMPLED = 10
FST_BETA = 0.9
FST_BATCH = 50


def fst_cbdg(
    parts: Sequence[tuple[Tensor, Tensor]], text: Tensor, rounds: int, make: Optimiser
) -> Any:
    """FST-CBDG of a linear head that starts from text: soft labels by client, synthetic rows spread over the steps.

    Returns:
        the model.
    """
    classes, width = text.shape
    server = nn.Linear(width, classes, device=text.device)
    with torch.no_grad():
        server.weight.copy_(text)
        server.bias.zero_()
    soft = {}
    for _ in range(rounds):
        chosen = torch.randperm(len(parts))[:FST_SAMPLED].tolist()
        mean = [torch.zeros_like(p) for p in server.parameters()]
        for c in chosen:
            x = parts[c][0]
            q = soft.setdefault(c, torch.softmax(x @ text.mT, -1))
            model = copy.deepcopy(server)
            optimiser = make(model.parameters())
            votes = torch.bincount(q.argmax(-1), minlength=classes)
            # The classes of the synthetic rows, which balance those of the real rows.
            drawn = torch.repeat_interleave(
                torch.arange(classes, device=x.device), votes.max() - votes
            )
            drawn = drawn[torch.randperm(len(drawn), device=x.device)]
            steps = torch.randperm(len(x), device=x.device).split(FST_BATCH)
            for rows, k in zip(steps, drawn.tensor_split(len(steps)), strict=True):
                u = model(x[rows])
                q[rows] = FST_BETA * q[rows] + (1.0 - FST_BETA) * torch.softmax(u.detach(), -1)
                loss = cross_entropy(u, q[rows])
                if len(k):
                    z = text[k] + torch.randn(len(k), width, device=x.device) * width**-0.5
                    loss = loss + cross_entropy(model(z), k)
                optimiser.zero_grad()
                loss.backward()
                optimiser.step()
            for m, p in zip(mean, model.parameters(), strict=True):
                m.add_(p.detach(), alpha=1.0 / FST_SAMPLED)
        with torch.no_grad():
            for p, m in zip(server.parameters(), mean, strict=True):
                p.copy_(m)
    return server


def class_means(z: Tensor, y: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """Prototypes [C, P] and counts [C]."""
    count = torch.bincount(y, minlength=classes).to(z.dtype)
    sums = z.new_zeros(classes, z.shape[1]).index_add_(0, y, z)
    return sums / count.clamp(min=1).unsqueeze(1), count


def fedpcl(
    parts: Sequence[tuple[Tensor, Tensor]],
    classes: int,
    rounds: int,
    make: Optimiser,
    *,
    tau: float = 0.07,
    tests: Sequence[tuple[Tensor, Tensor]],
) -> Any:
    """FedPCL: a projection per client, contrasted with the merged prototypes and with every client's own.

    Returns:
        the clients' accuracies on ``tests`` by their own prototypes.
    """
    models = [nn.Linear(x.shape[1], 256, device=x.device) for x, _ in parts]
    protos: tuple[Tensor, Tensor] | None = None
    for _ in range(rounds):
        made = []
        for (x, y), model in zip(parts, models, strict=True):
            if protos is not None:
                optimiser = make(model.parameters())
                for rows in torch.randperm(len(y), device=y.device).split(BATCH):
                    z = normalize(torch.relu(model(x[rows])), dim=-1)
                    u = (z @ protos[0].flatten(0, 1).mT / tau).view(len(z), -1, classes)
                    u = u.masked_fill(~protos[1], -torch.inf)
                    own = y[rows]
                    every = cross_entropy(
                        u.mT, own.unsqueeze(1).expand(-1, u.shape[1]), reduction="none"
                    )
                    optimiser.zero_grad()
                    (every[:, 0] + every[:, 1:].mean(1)).mean().backward()
                    optimiser.step()
            with torch.no_grad():
                made.append(class_means(normalize(torch.relu(model(x)), dim=-1), y, classes))
        sets = torch.stack([p for p, _ in made])
        count = torch.stack([c for _, c in made])
        share = count / count.sum(0).clamp(min=1)
        bar = (share.unsqueeze(-1) * sets).sum(0)
        has = count.sum(0) > 0
        sets = torch.where((count > 0).unsqueeze(-1), sets, bar)
        protos = torch.cat([bar.unsqueeze(0), sets]), has.expand(len(sets) + 1, classes)
    accuracy = []
    with torch.no_grad():
        for (x, y), model, (own, known) in zip(tests, models, made, strict=True):
            u = (normalize(torch.relu(model(x)), dim=-1) @ own.mT).masked_fill(
                known == 0, -torch.inf
            )
            accuracy.append(float((u.argmax(-1) == y).double().mean()))
    return accuracy
