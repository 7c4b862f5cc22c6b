"""Flower's SecAgg+ through the real ClientApp and transport, in one process: the sum is right, and all that is seen."""

import copy
import dataclasses
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
from refusal import training_error
from small_sites import sharded

pytest.importorskip("flwr", reason="pip install 'fedcache[flower]'")
pytestmark = [pytest.mark.engines]

from flwr.app import Context, RecordDict  # noqa: E402
from flwr.common import bytes_to_ndarray  # noqa: E402
from flwr.supercore.task_identity import TaskIdentity  # noqa: E402

from fedcache.config import Home, TrainConfig  # noqa: E402
from fedcache.federate.engines.flower import site as site_module  # noqa: E402
from fedcache.federate.engines.flower import transport as transport_module  # noqa: E402
from fedcache.federate.engines.flower.client_app import app  # noqa: E402
from fedcache.federate.engines.flower.masking import MODULUS  # noqa: E402
from fedcache.federate.engines.flower.messages import refusal_of, unpack  # noqa: E402
from fedcache.federate.engines.flower.plan import Plan  # noqa: E402
from fedcache.federate.engines.flower.secure_aggregation import least_that_stay  # noqa: E402
from fedcache.federate.engines.flower.server import federate  # noqa: E402
from fedcache.federate.engines.flower.transport import FlowerTransport, from_record  # noqa: E402
from fedcache.progress import Silent  # noqa: E402
from fedcache.runs.loop import train  # noqa: E402


class OneProcess:
    """Flower's grid with the ClientApp behind it: every message is copied, answered, and every answer kept."""

    def __init__(self, nodes):
        self.run = SimpleNamespace(run_id=1)
        self._contexts = {
            node: Context(1, node, config, RecordDict(), {}) for node, config in nodes.items()
        }
        self._answers = {}
        self.seen = []  # node, type and content of each answer
        # (node, number of its answer from 1) that never arrive
        self.lost = set()
        self.harm = {}  # what is done to such an answer

    def get_node_ids(self):
        return list(self._contexts)

    def get_nodes(self):
        return [SimpleNamespace(node_id=node, public_key=b"") for node in self._contexts]

    def push_messages(self, messages):
        for message in messages:
            node, number = message.metadata.dst_node_id, f"m{len(self.seen)}-{len(self._answers)}"
            asked = copy.deepcopy(message)
            asked.metadata.__dict__["_message_id"] = number
            count = 1 + sum(n == node and kind == "train" for n, kind, _ in self.seen)
            if message.metadata.message_type == "train" and (node, count) in self.lost:
                self.seen.append((node, "train", RecordDict()))
                yield ""
                continue
            TaskIdentity.node_id = node
            answer = app(asked, self._contexts[node])
            TaskIdentity.node_id = 1
            answer.metadata.__dict__["_reply_to_message_id"] = number
            answer.metadata.__dict__["_src_node_id"] = node
            if message.metadata.message_type == "train" and (node, count) in self.harm:
                self.harm[node, count](answer.content)
            self.seen.append((node, message.metadata.message_type, copy.deepcopy(answer.content)))
            self._answers[number] = answer
            yield number

    def pull_messages(self, message_ids):
        yield from [
            self._answers.pop(number) for number in list(message_ids) if number in self._answers
        ]


@pytest.fixture
def sites(tmp_path, monkeypatch):
    TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1
    monkeypatch.setattr(transport_module, "PULL_EVERY", 0.0)
    return sharded(tmp_path, 5, "dirichlet", "--alpha", 1, rows=240, classes=4)


def grid_of(sites, tmp_path, **config):
    shards = sorted(sites.glob("*.zarr"))
    return OneProcess(
        {
            100 + i: {"shard": str(path), "state": str(tmp_path / "state" / path.stem), **config}
            for i, path in enumerate(shards)
        }
    )


def federation(method, grid, tmp_path, **words):
    config = TrainConfig(method=method, rounds=2, execution="sequential")
    plan = Plan(
        config, sites=5, wait=0.01, secure=True, secure_bound=64.0, runs=str(tmp_path / "runs")
    ).checked()
    return federate(
        dataclasses.replace(plan, **words), FlowerTransport(grid), Home(tmp_path), Silent()
    )[0]


@pytest.mark.parametrize("method", ["fed3r", "fedavg", "fedncm", "scaffold"])
def test_the_sum_under_masks_gives_the_accuracy_of_one_process(method, sites, tmp_path):
    run = federation(method, grid_of(sites, tmp_path, **{"masked-only": "yes"}), tmp_path)
    config = TrainConfig(method=method, rounds=2, execution="sequential", clients_from=str(sites))
    alone = train(config, Home(tmp_path), runs=tmp_path / "alone")
    assert run.result["accuracy"]["mean"] == pytest.approx(
        alone.result["accuracy"]["mean"], abs=1e-9
    )
    assert run.result["federation"]["missed"] == []


def test_nothing_that_the_server_sees_is_a_single_upload(sites, tmp_path, monkeypatch):
    true = []
    real = site_module.Masking.vector

    def kept(self, *words):
        true.append(real(self, *words))
        return true[-1]

    monkeypatch.setattr(site_module.Masking, "vector", kept)
    grid = grid_of(sites, tmp_path)
    federation("fedavg", grid, tmp_path)
    raws = [v.numpy().tobytes() for v in true] + [v.float().numpy().tobytes() for v in true]
    masked = []
    for _, kind, content in grid.seen:
        for record in content.values():
            for value in record.values():
                parts = value if isinstance(value, list) else [value]
                for part in (getattr(p, "data", p) for p in parts):
                    if not isinstance(part, bytes):
                        continue
                    assert not any(raw[:64] in part for raw in raws), (
                        f"an upload in an answer of {kind}"
                    )
                    if part.startswith(b"\x93NUMPY"):
                        masked.append(bytes_to_ndarray(part))
    vectors = [m for m in masked if m.size == true[0].numel()]
    assert len(vectors) == len(true) == 5 * 2  # sites x rounds
    found = np.concatenate(vectors) / MODULUS
    assert 0 <= found.min() <= found.max() < 1
    # Masked numbers are spread evenly and do not follow the upload, which lies in a small part of the range.
    assert abs(found.mean() - 0.5) < 5 * np.sqrt(1 / 12 / len(found))
    sent = np.concatenate([v.numpy() for v in true])
    assert abs(np.corrcoef(found, sent)[0, 1]) < 5 / np.sqrt(len(found))


def test_a_site_that_leaves_before_its_vector_or_its_shares_is_survived(sites, tmp_path):
    grid = grid_of(sites, tmp_path)
    grid.lost = {(101, 3), (102, 8)}  # its vector in the first round, its shares in the second
    run = federation("fedavg", grid, tmp_path)
    assert [m["round"] for m in run.result["federation"]["missed"]] == [1]


def test_of_three_sites_none_may_leave_as_the_sum_of_two_gives_either_the_upload_of_the_other(
    sites, tmp_path
):
    assert [least_that_stay(n) for n in (3, 4, 5, 6, 9, 100)] == [3, 3, 4, 4, 6, 67]
    for shard in sorted(sites.glob("*.zarr"))[3:]:
        shutil.rmtree(shard)
    grid = grid_of(sites, tmp_path)
    assert federation("fedncm", grid, tmp_path, sites=3).result["federation"]["missed"] == []
    grid.lost = {(101, 3), (101, 7)}
    training_error(
        lambda: federation("fedncm", grid, tmp_path, sites=3, fresh=True),
        "too few sites were left",
    )


def test_a_site_that_sends_masked_uploads_alone_refuses_a_plain_one(sites, tmp_path):
    grid = grid_of(sites, tmp_path, **{"masked-only": "yes"})
    training_error(
        lambda: federation("fedavg", grid, tmp_path, secure=False),
        "0 of 5 sites sent a valid upload",
    )
    refusals = [
        refusal_of(unpack(from_record(content)))
        for _, kind, content in grid.seen
        if kind == "train.fit"
    ]
    assert len(refusals) == 5
    assert all(r is not None and "only under secure aggregation" in r.message for r in refusals)


def no_shares(content):
    content.config_records["secaggplus_configs"].clear()


def other_words(content):
    for record in content.config_records.values():
        if "words" in record:
            record["words"] = "[" * 5000


@pytest.mark.parametrize(
    ("number", "harm", "said"),
    [
        (1, no_shares, "the exchange of keys is malformed"),
        (2, no_shares, "the exchange of shares is malformed"),
        (4, no_shares, "taking the masks off is malformed"),
        (3, other_words, "belongs to another round or job"),
    ],
)
def test_a_site_that_sends_anything_ends_the_round_in_one_sentence(
    number, harm, said, sites, tmp_path
):
    grid = grid_of(sites, tmp_path)
    grid.harm = {(102, number): harm}
    training_error(lambda: federation("fedavg", grid, tmp_path), said)
