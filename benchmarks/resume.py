"""Kill an extraction three times, resume it, and compare it with one that was left alone.

    python benchmarks/resume.py --dataset folder:cifar10.zip --backbones efficientnet-lite0 --size 128 --limit 6000

Kills with SIGKILL after about a quarter, half and three quarters of the chunks. Prints the chunks each resume kept,
the forward batches of all processes together, and whether the two stores have the same bytes. Exits 1 when they have
not, or when more than three chunks' worth of batches per backbone was computed twice.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any


def content(store: Path) -> dict[str, str]:
    return {
        str(f.relative_to(store)): hashlib.sha256(f.read_bytes()).hexdigest()
        for f in sorted(store.rglob("*"))
        if f.is_file() and f.name != "history.jsonl" and "locks" not in f.parts
    }


def chunks(store: Path) -> int:
    lines = 0
    for journal in store.glob("journal-*.jsonl"):
        lines += sum(1 for line in journal.read_bytes().splitlines() if b'"chunk":' in line)
    return lines


def counter(folder: Path) -> Path:
    """A folder for PYTHONPATH whose sitecustomize makes every process of an extraction log its forward batches.

    Killed processes report nothing, so the count is taken from outside: one byte per batch and backbone, appended
    before the model runs.
    """
    place = folder / "counter"
    place.mkdir()
    (place / "sitecustomize.py").write_text(
        "import os\n"
        "from fedcache.extract import batches\n"
        "real = batches.BatchRunner._encode\n"
        "def counted(self, *args):\n"
        "    fd = os.open(os.environ['FORWARD_LOG'], os.O_WRONLY | os.O_CREAT | os.O_APPEND)\n"
        "    os.write(fd, b'.')\n"
        "    os.close(fd)\n"
        "    return real(self, *args)\n"
        "batches.BatchRunner._encode = counted\n"
    )
    return place


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dataset", required=True)
    parser.add_argument("--backbones", required=True)
    parser.add_argument("--size", default="128")
    parser.add_argument("--limit", default="6000")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        words = [
            sys.executable,
            "-m",
            "fedcache",
            "extract",
            "--dataset",
            options.dataset,
            "--backbones",
            options.backbones,
            "--size",
            options.size,
            "--limit",
            options.limit,
            "--workers",
            "2",
            "--json",
        ]
        environment = {**os.environ, "FEDCACHE_HOME": str(home / "home"), "OMP_NUM_THREADS": "1"}

        def run(store: Path, env: dict[str, str]) -> dict[str, Any]:
            done = subprocess.run(
                [*words, "--store", str(store)],
                env=env,
                capture_output=True,
                text=True,
                check=False,
            )
            if done.returncode not in (0, 3):
                sys.exit(done.stderr)
            found: dict[str, Any] = json.loads(done.stdout)["data"]
            return found

        whole = run(home / "whole.zarr", environment)
        alone = sum(a["forward_batches"] for a in whole["arrays"])
        total = sum(a["chunks"] for a in whole["arrays"])
        per_chunk = max(-(-a["forward_batches"] // a["chunks"]) for a in whole["arrays"])
        part = home / "part.zarr"
        log = home / "batches"
        counted = {**environment, "FORWARD_LOG": str(log), "PYTHONPATH": str(counter(home))}
        for share in (0.25, 0.5, 0.75):
            process = subprocess.Popen(
                [*words, "--store", str(part)],
                env=counted,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
            while process.poll() is None and chunks(part) < share * total:
                time.sleep(0.01)
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            print(f"killed with {chunks(part)} of {total} chunks journalled")
        last = run(part, counted)
        for array in last["arrays"]:
            print(
                f"{array['key']}: the last run kept {array['kept_chunks']} of {array['chunks']} chunks"
            )
        same = content(part) == content(home / "whole.zarr")
        print(f"byte-identical: {same}")
        done = log.stat().st_size
        backbones = len(whole["arrays"])
        allowed = alone + 3 * per_chunk * backbones
        print(
            f"forward batches: {alone} alone, {done} in the four processes together; allowed {allowed}"
        )
        sys.exit(0 if same and done <= allowed else 1)


if __name__ == "__main__":
    main()
