"""A linear head trained by Flower's simulation: run by ``benchmarks.flower`` with the Python of Flower's environment.

python -c "import flower_app; flower_app.main()" FEDERATION.npz ROUNDS
"""

from __future__ import annotations

import json
import os
import sys
import time
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from torch import nn
from torch.nn.functional import cross_entropy

PLACE = "FLOWER_BENCHMARK"
client_app = ClientApp()
server_app = ServerApp()
marks: list[float] = []


@lru_cache(maxsize=1)
def data() -> tuple[torch.Tensor, torch.Tensor]:
    """Features [clients, rows, D] and labels [clients, rows], read once in every process."""
    torch.set_num_threads(1)
    with np.load(os.environ[PLACE]) as file:
        return torch.from_numpy(file["x"]), torch.from_numpy(file["y"])


def head() -> nn.Linear:
    return nn.Linear(data()[0].shape[-1], 10)


@client_app.train()
def train(message: Message, context: Context) -> Message:
    x, y = (t[int(context.node_config["partition-id"])] for t in data())
    model = head()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    for rows in torch.randperm(len(y)).split(32):
        optimiser.zero_grad()
        cross_entropy(model(x[rows]), y[rows]).backward()
        optimiser.step()
    sent = {
        "arrays": ArrayRecord(model.state_dict()),
        "metrics": MetricRecord({"num-examples": len(y)}),
    }
    return Message(content=RecordDict(sent), reply_to=message)


def mark(_round: int, _arrays: ArrayRecord) -> Any:
    """Called by the strategy before the first round and after each."""
    marks.append(time.perf_counter())


@server_app.main()
def serve(grid: Grid, _context: Context) -> None:
    clients = len(data()[0])
    strategy = FedAvg(
        fraction_train=1.0,
        fraction_evaluate=0.0,
        min_train_nodes=clients,
        min_available_nodes=clients,
    )
    strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord(head().state_dict()),
        num_rounds=int(sys.argv[2]),
        evaluate_fn=mark,
    )


def main() -> None:
    os.environ[PLACE] = sys.argv[1]
    run_simulation(
        server_app,
        client_app,
        num_supernodes=len(data()[0]),
        backend_config={"client_resources": {"num_cpus": 1, "num_gpus": 0.0}},
    )
    print(json.dumps({"rounds": np.diff(marks).tolist()}))
