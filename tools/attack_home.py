"""Change one file of a home after a long story, read it again, and see that no figure changes unseen.

    OMP_NUM_THREADS=1 python tools/attack_home.py [--count 2000] [--seed 0] [--only KIND] [--how MUTATION]

The story: two backbones, a dataset that grows, a partition, shards, runs with tags, a run and a grid that were stopped
between rounds, a search with a pruned trial, a run whose clients have a file of their own, private runs (finished, made
again, simulated, stopped), embeddings, a federation that lost its server. Every file that a command opened in the home
must be of a kind of ``KINDS`` or of ``DECIDES_NOTHING``. Then,
mutation by mutation: one file of the home is changed (a bit, its length, its bytes, a digit, an older version, the
bytes of another file of its kind, or it is deleted), and the commands that read such a file run, each mutation in a
fork of this process. What they say is compared with what they say of the untouched home:

- detected: a command ends with exit 2 to 7 and a sentence, or it warns of what is damaged, begins again or is left out;
- harmless: every result is the same, byte for byte (of a grid's points all but ``points``: those that begin again are
  computed in another group, as after a kill; of a private run that resumes, what it reports of its cost and what the
  ledger then adds up to, as its noise is drawn again);
- WRONG: other figures with exit 0, exit 10 or 1, a traceback, or no end within two minutes.

Prints the counts by kind of file and by mutation, and exits 1 when anything was WRONG.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import chdir, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support")]

from command import fedcache, ok  # noqa: E402
from fake_grid import grid_of  # noqa: E402
from optuna.trial import Trial  # noqa: E402
from pictures import folder, picture  # noqa: E402

from fedcache.config import Home, TrainConfig  # noqa: E402
from fedcache.errors import Exit, FedcacheError  # noqa: E402
from fedcache.federate.engines.flower.plan import Plan  # noqa: E402
from fedcache.federate.engines.flower.server import federate  # noqa: E402
from fedcache.federate.engines.flower.site_names import SiteNames  # noqa: E402
from fedcache.progress import Silent  # noqa: E402
from fedcache.runs import loop, results  # noqa: E402
from fedcache.ui import server as ui_index  # noqa: E402
from fedcache.ui.server import RunIndex  # noqa: E402

HANG = 120.0
DETECTED = {
    Exit.USAGE,
    Exit.QUARANTINED,
    Exit.STORE,
    Exit.CORRUPT,
    Exit.ENVIRONMENT,
    Exit.FEDERATED,
}

IID = "--scheme iid --clients 3"
NOISE = "--dp-clip 1 --dp-noise 2"
THREE_CLIENTS = f"-b random-projection:16 {IID}"
REAL = f"train --method fedavg {THREE_CLIENTS} {NOISE} --dp-allow evaluation"
SIMULATED = f"train --method fedprox {THREE_CLIENTS} {NOISE} --dp-seed 3"
PRIVATE = f"{REAL} --rounds 2"
PRIVATE_STOPPED = f"{REAL} --rounds 4 --seeds 0,1"
SIMULATED_STOPPED = f"{SIMULATED} --rounds 4 --seeds 0,1"
SEARCH = (
    "grid --method fedavg --sampler optuna --trials 3 --pruner median --sweep lr=0.1,0.01,0.001 "
    f"--eval-every 1 --validation 0.4 --rounds 2 {THREE_CLIENTS}"
)
MANY_CLIENTS = "train --method fedavg --rounds 1 -b random-projection:16 -p even"
GRID = f"grid --method fedavg --sweep lr=0.1,0.01 --rounds 3 {THREE_CLIENTS}"
STOPPED = f"train --method fedavg --rounds 5 --seeds 0,1,2 {THREE_CLIENTS}"
FINISHED = (
    f"train --method fedrep --rounds 2 --seeds 0,1 {THREE_CLIENTS}",
    "train --method fed3r -b random-projection:32 -p uneven",
    f"train --method clip-zs -b glyph-clip {IID}",
    f"{SIMULATED} --rounds 2",
)
"""Command lines after ``fedcache``."""
NAMES = "flower/server-8000/names.json"
FEDERATED = Plan(
    TrainConfig(method="scaffold", rounds=4, execution="sequential"), sites=3, wait=0.01
)

WARNED = re.compile(
    r"was changed|does not match|trained again from the start|left out|is missing|not finished|damaged|unreadable"
    r"|has lost|cannot be read|extracted later|contains other tensors|is not a file|belongs to another run"
    r"|tags are lost|times are lost|not in the ledger|spends privacy again|is not JSON written|does not follow"
    r"|has another"
)
"""What is said of a file that is not read."""

KINDS = {
    "checkpoint": r"runs/.*/checkpoint-\d+\.safetensors",
    "finished seed": r"runs/.*/seed-\d+\.json",
    "result": r"runs/.*/result\.json",
    "models": r"runs/.*/models/seed-\d+\.safetensors",
    "list of models": r"runs/.*/models/models\.json",
    "test rows": r"runs/.*/test-rows\.npz",
    "columns of clients": r"runs/.*/clients\.parquet",
    "tags": r"runs/.*/tags\.json",
    "mark of a pruned run": r"runs/.*/pruned\.json",
    "trials of a search": r"runs/search-.*/trials\.jsonl",
    "record of a grid": r"grids/.*\.jsonl",
    "configuration": r"runs/.*/config\.toml",
    "digests of a run": r"runs/.*/files\.json",
    "measurements": r"runs/.*/measured\.json",
    "rounds": r"runs/.*/rounds\.jsonl",
    "partition of a run": r"runs/.*/partition-\d+\.partition",
    "names of sites": NAMES,
    "site state": r"flower/.*/after-\d+\.safetensors",
    "remembered digest": r"digests/.*\.json",
    "remembered recipe": r"recipes/.*\.json",
    "last store": r"last\.json",
    "ledger of privacy": r"privacy\.jsonl",
    "count of the ledger": r"privacy-count\.json",
    "rounds that were told": r"privacy-rounds/.*",
    "manifest": r"(stores|sites)/.*/manifest\.json",
    "history": r"(stores|sites)/.*/history\.jsonl",
    "partition of a store": r"(stores|sites)/.*/partitions/.*",
    "text features": r"(stores|sites)/.*\.zarr/text/.*",
    "samples": r"(stores|sites)/.*\.zarr/samples/.*",
    "features": r"(stores|sites)/.*\.zarr/features/.*",
    "other of a store": r"(stores|sites)/.*\.zarr/(?!locks/).*",
}
"""Kind of file -> pattern of its path inside the home; the first that fits."""

DECIDES_NOTHING = {
    "locks and who holds them": r".*/locks/.*|locks/.*|.*\.lock",
    "notes of outputs under way, which gc alone reads": r"outputs/.*",
    "the list of what a site sent, which no command reads": r"flower/.*/sent\.jsonl",
    "the trials of a search for Optuna's own tools, which is written and never read": r"runs/search-.*/study\.journal",
}
"""Why no figure depends on a file -> pattern of its path."""

MAY_GO = ("tags", "mark of a pruned run", "trials of a search", "record of a grid")
"""Kinds of files that a user may delete: what they held is then not there, which is no damage."""


class KeptWarnings(Silent):
    """Keeps warnings."""

    def __init__(self) -> None:
        self.warnings: list[str] = []

    def warn(self, text: str) -> None:
        self.warnings.append(text)


@dataclass
class Story:
    """A home, what its files were before, and which commands read them."""

    root: Path  # of all files; the home is ``root/home``
    # path inside the home -> earlier bytes
    older: dict[str, list[bytes]] = field(default_factory=dict)
    runs: dict[str, str] = field(default_factory=dict)  # directory -> the command that made it
    # directory -> the reader that resumes it
    unfinished: dict[str, str] = field(default_factory=dict)
    searched: set[str] = field(default_factory=set)  # directories of the search and of its runs
    # paths inside the home of files that commands opened
    opened: set[str] = field(default_factory=set)

    @property
    def home(self) -> Path:
        return self.root / "home"

    def files(self) -> dict[str, bytes]:
        """Every file of the home, by its path inside."""
        return {
            str(p.relative_to(self.home)): p.read_bytes()
            for p in sorted(self.home.rglob("*"))
            if p.is_file()
        }

    def note(self) -> None:
        """Remember what files hold now, as their older versions."""
        for name, raw in self.files().items():
            known = self.older.setdefault(name, [])
            if raw not in known:
                known.append(raw)


def tell(root: Path) -> Story:
    """Make the home."""
    story = Story(root)
    watched(story)
    images = folder(root / "images", train=5, test=3)
    extract = partial(
        ok, "extract --workers 0 --chunk-rows 8 --batch 8 --dataset", f"folder:{images}", "-b"
    )
    extract("random-projection:16")
    story.note()
    extract("random-projection:16,random-projection:32,glyph-clip")
    story.note()
    for i in range(2):
        picture(9_000 + i, 1).save(sorted((images / "train").iterdir())[1] / f"9{i}.png")
    extract("random-projection:16,random-projection:32,glyph-clip")
    ok("partition --scheme dirichlet --clients 3 --alpha 2 --name uneven")
    ok(f"partition {IID} --name even --partition-seed 3")
    story.note()
    ok("shard -p uneven --out", story.home / "sites")
    for line in (*FINISHED, MANY_CLIENTS):
        with few_clients_in_result(story, line):
            story.runs[Path(ok(line).data["path"]).name] = line
    for number, name in enumerate(list(story.runs)[:2]):
        ok("runs tag", f"tag-{number}", name)
    ok(SEARCH)
    story.searched = {path.name for path in (story.home / "runs").iterdir()} - story.runs.keys()
    for fresh in ("", "--fresh"):  # two releases of one run and seed: its result tells of one
        story.runs[Path(ok(f"{PRIVATE} {fresh}").data["path"]).name] = PRIVATE
        story.note()
    _stopped(story, "stopped run", STOPPED, 12, 1)
    _stopped(story, "stopped grid", GRID, 2)
    _stopped(story, "stopped simulation", SIMULATED_STOPPED, 6, 1)
    _stopped(story, "stopped private run", PRIVATE_STOPPED, 6, 1)
    export = root / "embeddings.safetensors"
    ok("export --store", next((story.home / "sites").glob("*.zarr")), export)
    ok("ingest --name mine", export)
    extract("random-projection:16")
    grid = grid_of(story.home / "sites", story.home / "flower")
    for node in grid.sites:
        grid.meddle[node] = lambda kind, n, packed: (
            "gone" if (kind, n) >= ("fit", 3) and kind == "fit" else packed
        )
    # no site answers in round 3: the server's checkpoint and the sites' states are left
    with suppress(FedcacheError):
        names = story.home / NAMES
        names.parent.mkdir(parents=True)
        federate(FEDERATED, grid, Home(story.home), Silent(), SiteNames(names))
    story.note()
    _name_unfinished(story, "federation")
    return story


def _stopped(story: Story, reader: str, line: str, *rounds: int) -> None:
    """Stop a command after so many rounds, each time that it resumes."""
    for number in rounds:
        with _stop_after(number):
            assert fedcache(line, "--json").code == Exit.INTERRUPTED
        story.note()
    _name_unfinished(story, reader)


def _name_unfinished(story: Story, reader: str) -> None:
    """Runs that no command before has left."""
    for path in (story.home / "runs").iterdir():
        if path.name not in story.runs and path.name not in story.searched:
            story.unfinished.setdefault(path.name, reader)


def few_clients_in_result(story: Story, line: str, *words: object) -> Any:
    """Let the run of ``MANY_CLIENTS`` keep its clients in a file of their own, as a run with very many does.

    ``line`` and ``words`` are the command: its own, or a training from the ``config.toml`` in its directory.
    """
    made = [name for name, options in story.runs.items() if options == MANY_CLIENTS]
    again = any(isinstance(word, Path) and word.parent.name in made for word in words)
    most = results.CLIENTS_IN_RESULT
    if again or line == MANY_CLIENTS:
        most = 2
    return patch.object(results, "CLIENTS_IN_RESULT", most)


def _stop_after(rounds: int) -> Any:
    """Let the next training stop as a signal would make it, when so many rounds have ended."""
    was = loop.SeedTraining._on_round
    ended = itertools.count(1)

    def counted(self: Any, *words: Any) -> None:
        if next(ended) >= rounds:
            self.policy.stop.ask()
        was(self, *words)

    return patch.object(loop.SeedTraining, "_on_round", counted)


# What reads a file, and what it says.


Reader = Callable[[Story], dict[str, Any]]


def readers_of(kind: str, name: str, story: Story) -> dict[str, Reader]:
    """The commands that read a file, by a name; none changes what a later one says of the untouched home."""
    top, inside = [*name.split("/"), ""][:2]
    images = f"folder:{story.root / 'images'}"
    # The last of these backbones is a new one.
    more = extracted(
        "-b random-projection:16,random-projection:32,random-projection:8 --dataset", images
    )
    runs = {"runs list": printed("runs list")}
    if top == "grids":
        return {"page of grids": page_of_grids}
    if kind == "tags":
        return {**runs, f"runs show {inside}": printed("runs show", inside)}
    if top == "runs" and inside in story.searched:
        return {**runs, "search": points_of(SEARCH)}
    if kind in ("models", "list of models") and inside in story.runs:
        run = story.home / "runs" / inside
        image = next((story.root / "images" / "test").rglob("*.png"))
        return {
            f"predict {inside}": printed("predict", run, image),
            f"evaluate {inside}": printed("evaluate", run, "--dataset", images),
            f"{inside} by its options": trained(story.runs[inside]),
        }
    if top == "runs" and inside in story.unfinished:
        reader = story.unfinished[inside]
        return {**runs, reader: GOING_ON[reader]}
    if top.startswith("privacy"):
        return {"ls --privacy": printed("ls --privacy"), "spent again": spent(f"{PRIVATE} --fresh")}
    if top == "runs":
        config = story.home / "runs" / inside / "config.toml"
        again = trained("train --config", config)
        readers = {**runs, "compare": printed("compare --over clients"), "report": report}
        # Of a private run this one alone: where its result is lost, other noise is drawn, which it says.
        if story.runs[inside] == PRIVATE:
            return {**readers, f"{inside} by its configuration": lists(again)}
        return {
            **readers,
            f"{inside} by its configuration": again,
            f"{inside} by its options": trained(story.runs[inside]),
        }
    if kind in ("site state", "names of sites"):
        return {"federation": federation}
    place = story.home / top / inside
    if top == "sites":
        return {f"verify {inside}": printed("verify", place), "federation": federation}
    if top == "stores":
        looks = {
            f"inspect {inside}": printed("inspect", place),
            f"verify {inside}": printed("verify", place),
        }
        fresh = {line: trained(f"{line} --fresh --runs", story.root / "fresh") for line in FINISHED}
        return {**looks, **fresh, "extract": more}
    default = trained(f"train --method fedncm {IID} --runs", story.root / "fresh")
    return {
        "train by default": lists(default),
        "extract by default": extracted("-b random-projection:16"),
        "extract": more,
    }


def _answer(line: str, *words: object) -> dict[str, Any]:
    """The data of a command, and its warnings apart."""
    done = fedcache(line, *words, "--json")
    envelope = json.loads(done.out.strip().splitlines()[-1]) if done.out.strip() else {}
    return {
        "code": done.code,
        "data": envelope.get("data"),
        "messages": [*envelope.get("warnings", []), done.err[-2000:]],
        "error": envelope.get("error"),
    }


def printed(line: str, *words: object) -> Reader:
    """A command that prints what it finds, without the bytes that files take on disk: they are counted as they are."""

    def go(story: Story) -> dict[str, Any]:
        answer = _answer(line, *words)
        if line == "verify" and answer["data"]:
            answer["data"].pop("bytes")
        if line == "runs list" and answer["data"]:
            for run in answer["data"]["entries"]:
                run.pop("model_bytes")
        return {**answer, "lists": True}

    return go


def lists(reader: Reader) -> Reader:
    """A command that names the store it takes, and warns of an older one."""
    return lambda story: {**reader(story), "lists": True}


def trained(line: str, *words: object) -> Reader:
    """A command that trains: the result's bytes are its data."""

    def go(story: Story) -> dict[str, Any]:
        with few_clients_in_result(story, line, *words):
            answer = _answer(line, *words)
        if answer["code"] == 0:
            answer["data"] = (Path(answer["data"]["path"]) / "result.json").read_text()
        return answer

    return go


def points_of(line: str) -> Reader:
    """A grid or a search: the results of its points, and the trials that were pruned."""

    def go(story: Story) -> dict[str, Any]:
        answer = _answer(line)
        if answer["code"] == 0:
            found = [
                json.loads((Path(p["path"]) / "result.json").read_bytes())
                for p in answer["data"]["points"]
            ]
            results = [{k: v for k, v in r.items() if k not in ("points", "sha256")} for r in found]
            answer["data"] = [results, answer["data"].get("pruned")]
        return answer

    return go


def page_of_grids(story: Story) -> dict[str, Any]:
    """What the page of the home shows of grids; a problem that it names counts as a warning.

    The process that trained the grids is this one. For a user it has ended, so it counts as ended here.
    """
    runs = RunIndex(story.home / "runs")
    runs.look()
    while runs.waiting:
        runs.look()
    with patch.object(ui_index, "still_runs", lambda _process: False):
        lines = ui_index.GridIndex(story.home / "grids", runs).lines()
    messages = [str(line["problem"]) for line in lines]
    return {"code": 0, "data": lines, "messages": messages, "error": None, "lists": True}


def spent(line: str) -> Reader:
    """A private run: what it tells of its cost, and what the ledger adds up to afterwards."""

    def go(story: Story) -> dict[str, Any]:
        answer = _answer(line)
        if answer["code"] == 0:
            result = json.loads((Path(answer["data"]["path"]) / "result.json").read_bytes())
            ledger = _answer("ls --privacy")
            answer["data"] = [
                result["trust"]["privacy"],
                ledger["code"],
                (ledger["data"] or {}).get("entries"),
            ]
            answer["messages"] += ledger["messages"]
        return {**answer, "lists": True}

    return go


def extracted(line: str, *words: object) -> Reader:
    """An extraction again: which stores there are, and what the one that it names holds."""

    def go(story: Story) -> dict[str, Any]:
        answer = _answer(f"extract --workers 0 {line}", *words)
        if answer["code"] == 0:
            answer = _answer("inspect", answer["data"]["path"])
        if answer["code"] == 0:
            answer["data"]["stores"] = sorted(p.name for p in (story.home / "stores").iterdir())
        return answer

    return go


def report(story: Story) -> dict[str, Any]:
    """The page of all runs; its counts show what differs."""
    out = story.root / "page.html"
    answer = _answer("report --embed none -o", out)
    left = (answer["data"] or {}).get("left_out")
    answer["data"] = [left, out.read_text() if answer["code"] == 0 else ""]
    answer["messages"] += ["left out"] * (left or 0)
    return {**answer, "lists": True}


def federation(story: Story) -> dict[str, Any]:
    """The federation resumes, with its sites in this process."""
    progress = KeptWarnings()
    grid = grid_of(story.home / "sites", story.home / "flower")
    try:
        (run,) = federate(
            FEDERATED, grid, Home(story.home), progress, SiteNames(story.home / NAMES)
        )
    except FedcacheError as error:
        return {
            "code": int(error.code),
            "data": None,
            "messages": [str(error)],
            "error": {"message": error.message},
        }
    messages = [f"left out: {m}" for m in run.result["federation"]["missed"]]
    data = (run.path / "result.json").read_text()
    return {
        "code": 0,
        "data": data,
        "messages": [*messages, *progress.warnings],
        "error": None,
        "lists": True,
    }


GOING_ON: dict[str, Reader] = {
    "stopped run": trained(STOPPED),
    "stopped grid": points_of(GRID),
    "stopped simulation": trained(SIMULATED_STOPPED),
    "stopped private run": spent(PRIVATE_STOPPED),
    "federation": federation,
}

# What is done to a file.


def flipped(raw: bytes, draw: random.Random) -> bytes:
    at = draw.randrange(len(raw))
    return raw[:at] + bytes([raw[at] ^ 1 << draw.randrange(8)]) + raw[at + 1 :]


def digit(raw: bytes, draw: random.Random) -> bytes:
    """One digit of the text of a file changed; of a file of safetensors, of its metadata."""
    begin = 0
    end = len(raw)
    if raw[8:9] == b"{":  # a file of safetensors: the length of its metadata, then the metadata
        begin = 8
        end = min(end, 8 + int.from_bytes(raw[:8], "little"))
    places = [m.start() for m in re.compile(rb"\d").finditer(raw, begin, end)]
    if not places:
        return flipped(raw, draw)
    while True:
        at = draw.choice(places)
        other = (int(raw[at : at + 1]) + draw.randrange(1, 10)) % 10
        changed = raw[:at] + b"%d" % other + raw[at + 1 :]
        if not same_json(raw, changed):
            return changed


def same_json(one: bytes, other: bytes) -> bool:
    """Whether both are JSON of the same values: of a float, the last of 17 digits may say nothing."""
    try:
        return bool(json.loads(one) == json.loads(other))
    except ValueError:
        return False


def word(raw: bytes, draw: random.Random) -> bytes:
    """One letter of a word of the text changed."""
    places = [m.start() for m in re.finditer(rb"[a-z]", raw)]
    at = draw.choice(places or [0])
    return raw[:at] + draw.choice("abcdefgh").encode() + raw[at + 1 :]


def cut(raw: bytes, draw: random.Random) -> bytes:
    return raw[: draw.randrange(len(raw))]


def grown(raw: bytes, draw: random.Random) -> bytes:
    return raw + draw.randbytes(draw.randrange(1, 64))


CHANGES: dict[str, Callable[[bytes, random.Random], bytes]] = {
    "bit": flipped,
    "digit": digit,
    "letter": word,
    "cut": cut,
    "grown": grown,
    "zeroed": lambda raw, _: bytes(len(raw)),
    "emptied": lambda _raw, _draw: b"",
}
MUTATIONS = (*CHANGES, "another's", "exchanged", "older", "deleted")


def mutate(
    story: Story, name: str, kind: str, how: str, draw: random.Random, files: Mapping[str, bytes]
) -> str:
    """Change a file; what was done, or "" where there is nothing to do."""
    path = story.home / name
    raw = files[name]
    others = [n for n, r in files.items() if n != name and kind_of(n) == kind and r != raw]
    before = [r for r in story.older.get(name, []) if r != raw]
    if how == "deleted" and kind in MAY_GO:
        return ""
    if how == "deleted":
        path.unlink()
        return f"{name} deleted"
    if how in ("another's", "exchanged"):
        if not others:
            return ""
        other = draw.choice(others)
        _overwrite(path, files[other])
        if how == "exchanged":
            _overwrite(story.home / other, raw)
        return f"{name} {how} {other}"
    if how == "older":
        # An older result of a private run is that of a release that was made and is counted: no wrong figure.
        if not before or (kind == "result" and story.runs.get(name.split("/")[1]) == PRIVATE):
            return ""
        _overwrite(path, draw.choice(before))
        return f"{name} is an older one"
    made = CHANGES[how](raw, draw) if raw else b"x"
    if made == raw:
        return ""
    _overwrite(path, made)
    at = _first_difference(raw, made)
    near = slice(max(at - 20, 0), at + 20)
    return f"{name} {how} at {at}: {raw[near]!r} -> {made[near]!r}"


def _overwrite(path: Path, raw: bytes) -> None:
    """Other bytes, and the same time: runs are listed by it."""
    stat = path.stat()
    path.write_bytes(raw)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def watched(story: Story) -> None:
    """Note every file of the home that this process opens from now on."""
    inside = f"{story.home}{os.sep}"

    def note(event: str, details: tuple[Any, ...]) -> None:
        if event != "open" or not isinstance(details[0], str) or not details[0].startswith(inside):
            return
        if not os.path.isdir(details[0]):  # noqa: PTH112  (a path object would open nothing, and takes longer)
            # A file that is being written counts under the name that it gets.
            path = re.sub(
                r"(^|/)\.([^/]+)\.\d+-[\w-]+\.partial(/|$)",
                r"\1\2\3",
                details[0].removeprefix(inside),
            )
            story.opened.add(path)

    sys.addaudithook(note)


def unlisted(story: Story) -> list[str]:
    """Files of the home, and files that a command opened there, that are of no kind that is listed."""
    found = story.opened | story.files().keys()
    decides_nothing = re.compile("|".join(DECIDES_NOTHING.values()))
    return sorted(
        name for name in found if kind_of(name) is None and not decides_nothing.fullmatch(name)
    )


def kind_of(name: str) -> str | None:
    """The kind of a file; None for what decides nothing."""
    return next((kind for kind, pattern in KINDS.items() if re.fullmatch(pattern, name)), None)


# What came of it.


def judged(answers: Mapping[str, Any], expected: Mapping[str, Any], kind: str) -> tuple[str, str]:
    """detected, harmless or WRONG, and why."""
    verdict = "harmless"
    for which, answer in answers.items():
        reference = expected[which]
        code = answer["code"]
        same = answer["data"] == reference["data"]
        warned = _warnings(answer) > _warnings(reference)
        if any("Traceback" in text for text in answer["messages"]):
            return "WRONG", f"a traceback: {answer['messages'][-1][-400:]}"
        if code == reference["code"] and same:
            verdict = "detected" if warned else verdict
        elif (code in DETECTED and (answer["error"] or answer["data"])) or (
            code == 0 and answer.get("lists") and (warned or kind == "measurements")
        ):
            verdict = "detected"
        else:
            return (
                "WRONG",
                f"{which}: exit {code}, {_differing(answer['data'], reference['data'])}, {answer['messages']}",
            )
    return verdict, ""


def _warnings(answer: Mapping[str, Any]) -> int:
    return len(WARNED.findall("\n".join(answer["messages"])))


def _differing(one: Any, other: Any) -> str:
    """Where two texts begin to differ."""
    a = str(one)
    b = str(other)
    at = _first_difference(a, b)
    near = slice(max(at - 100, 0), at + 100)
    return f"..{a[near]}.. and not ..{b[near]}.."


def _first_difference(one: str | bytes, other: str | bytes) -> int:
    """Where two texts differ first; the length of the shorter one where it is the beginning of the other."""
    for at, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return at
    return min(len(one), len(other))


def forked(work: Callable[[], Any]) -> Any:
    """What a function returns in a fork of this process; TimeoutError after two minutes."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.close(reader)
            with os.fdopen(writer, "w") as sink:
                json.dump(work(), sink)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    os.close(writer)
    signal.signal(signal.SIGALRM, _too_long)
    signal.setitimer(signal.ITIMER_REAL, HANG)
    try:
        with os.fdopen(reader) as source:
            answer = source.read()
        os.waitpid(pid, 0)
    except TimeoutError:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        raise
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    if not answer:
        raise ChildProcessError("the fork died; its traceback is above")
    return json.loads(answer)


def _too_long(*_: Any) -> None:
    raise TimeoutError


def attack(
    story: Story, count: int, seed: int, only: str | None, by: str | None
) -> list[tuple[str, str, str, str]]:
    """(kind, mutation, verdict, why) of every mutation."""
    draw = random.Random(seed)
    done = list[tuple[str, str, str, str]]()
    files = story.files()
    pristine = story.root / "pristine"
    shutil.copytree(story.home, pristine)
    gc.freeze()  # forks then share what is here, instead of copying it when they collect garbage
    named = {}
    for name in files:
        if (kind := kind_of(name)) is not None and (only is None or kind == only):
            named.setdefault(kind, []).append(name)
    expected = {}  # what each reader says of the untouched home
    while len(done) < count:
        kind = draw.choice(sorted(named))
        name = draw.choice(named[kind])
        how = draw.choice([by] if by else MUTATIONS)
        readers = readers_of(kind, name, story)
        if draw.random() < 0.75:  # it takes as long as all others together
            readers.pop("report", None)
        for which in readers.keys() - expected.keys():
            expected[which] = forked(partial(readers[which], story))
            restore(story, pristine)
        what = mutate(story, name, kind, how, draw, files)
        if not what:
            continue
        try:
            answers = forked(
                lambda readers=readers: {which: read(story) for which, read in readers.items()}
            )
            verdict, why = judged(answers, expected, kind)
        except TimeoutError:
            verdict = "WRONG"
            why = f"no end within {HANG:g} s"
        except ChildProcessError as error:
            verdict = "WRONG"
            why = str(error)
        if verdict == "WRONG":
            print(f"WRONG: {what}: {why}", flush=True)
        done.append((kind, how, verdict, what))
        if len(done) % 100 == 0:
            print(f"{len(done)} of {count}", file=sys.stderr, flush=True)
        restore(story, pristine)
    return done


def restore(story: Story, pristine: Path) -> None:
    """Put the home back; times of files too, as runs are listed by them."""
    shutil.rmtree(story.home)
    shutil.rmtree(story.root / "fresh", ignore_errors=True)
    shutil.copytree(pristine, story.home)


def table(done: list[tuple[str, str, str, str]], column: int, heading: str) -> list[str]:
    """Counts of verdicts by one column."""
    counts = Counter((row[column], row[2]) for row in done)
    lines = [f"| {heading} | detected | harmless | WRONG |", "|---|---|---|---|"]
    for name in sorted({row[column] for row in done}):
        figures = [str(counts[name, verdict]) for verdict in ("detected", "harmless", "WRONG")]
        lines.append(f"| {name} | {' | '.join(figures)} |")
    return lines


def run(
    count: int, seed: int, root: Path, only: str | None = None, by: str | None = None
) -> list[tuple[str, str, str, str]]:
    """Make a home under ``root`` and attack it."""
    os.environ["FEDCACHE_HOME"] = str(root / "home")
    os.environ.pop("FEDCACHE_CASES", None)
    # Let the pruner stop the trial with the lowest rate: what was drawn decides, so a trial made again ends as before.
    lowest = patch.object(Trial, "should_prune", lambda trial: trial.params["lr"] == 0)
    with chdir(root), lowest:
        story = tell(root)
        if names := unlisted(story):
            raise SystemExit(
                f"These files of a home are of no kind that this tool knows: {', '.join(names)}"
            )
        if kinds := KINDS.keys() - {kind_of(name) for name in story.files()}:
            raise SystemExit(
                f"The story makes no file of these kinds, so none is attacked: {', '.join(kinds)}"
            )
        return attack(story, count, seed, only, by)


def main() -> int:
    """Attack, print, and tell whether anything was wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=KINDS, help="files of this kind alone")
    parser.add_argument("--how", choices=MUTATIONS, help="this mutation alone")
    options = parser.parse_args()
    began = time.monotonic()
    memory = Path("/dev/shm")  # no fsync there
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as place:
        done = run(options.count, options.seed, Path(place), options.only, options.how)
    wrong = sum(row[2] == "WRONG" for row in done)
    print("\n".join([*table(done, 0, "file"), "", *table(done, 1, "mutation"), ""]))
    print(
        f"{len(done)} mutations, seed {options.seed}: {wrong} WRONG, in {time.monotonic() - began:.0f} s."
    )
    if wrong:
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
