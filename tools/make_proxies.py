"""Make the section of docs/results.md that runs the papers' protocols on `digits`: one ``reproduce`` command each.

    python tools/make_proxies.py [--home DIR] [--jobs 2] [--only fst-table1,flesd-table1]

Each table stands under the command that made it, with what departs from the paper and the sentences of the tool on
where the order of its rows agrees with the printed one. Every process computes with one thread, so that the numbers
can be made again. Runs that are stored already are not run again; seconds are shown of a table all of whose runs were
new.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "results.md"

RECIPE = "efficientnet-lite0:size=96,efficientnet-lite2:size=96"
TRIO = ["--backbones", "efficientnet-lite0,efficientnet-lite2,glyph-clip", "--recipe", RECIPE]
CLIP = ["--backbones", "glyph-clip"]
TEN = ["--only", "dataset=CIFAR-10"]
SETTINGS = ["label shift, Digit-5", "feature & label shift, Digit-5"]
ENTRIES: dict[str, list[str]] = {
    "fedpcl-table2": TRIO,
    "fedpcl-table5": TRIO,
    "fedpcl-table6": TRIO,
    "fedpcl-table11": [*TRIO, *(word for s in SETTINGS for word in ("--only", f"setting={s}"))],
    "fedpcl-table12": TRIO,
    "fedpcl-table13": TRIO,
    "fedpcl-table14": TRIO,
    "fedpcl-table15": TRIO,
    "flesd-table1": [*CLIP, "--only", "dataset=CIFAR10", "--limit", "1500"],
    "tpfl-table1": [*CLIP, "--only", "dataset=EuroSAT"],
    "fst-table1": [*CLIP, *TEN],
    "fst-table2": [*CLIP, *TEN],
    "fst-table3": [*CLIP, *TEN],
    "fst-table4": [*CLIP, *TEN],
}
"""Entry -> options; where other data are replaced by `digits` all the same, one of the paper's datasets is compared."""

LONG = ("flesd-table1", "fedpcl-table2")
"""Begun first, so that no process is left alone with one at the end."""

CONV = """
### flesd with its convolutional encoder

It is not in the table above; it was run once to see that it learns: 3 clients with 200 images each at 32 px (the first
is the public set), a ResNet-18 of 16 channels, 2 rounds of 15 local epochs and 15 of distillation, all test rows:

    fedcache extract --dataset digits --backbones pixels --recipe size=32
    fedcache train --dataset digits --backbones pixels --method flesd --scheme few-shot --clients 3 --shots 20 \\
        --rounds 2 --set encoder=conv --set channels=16 --set flip=false --set batch=64 \\
        --set epochs=15 --set esd_epochs=15 --set esd_batch=64

The probe on the encoder gets 18.59 % (332 s on one core beside other work), and 10.74 % on the encoder it began with
(`epochs=0`, `esd_epochs=0`). On 606 images of the `flesd` scheme, 10 epochs: 26.71 % against 19.13 %.
"""

HEAD = [
    "## The papers' tables on digits",
    "",
    "Proxies: each paper's protocol with `digits` (9,797 images, 4 domains) in place of its data, and the backbones "
    "that pip brings in place of its own; 3 seeds, each with its own partition. The numbers say nothing about the "
    "papers'; the order of rows may. Made by `python tools/make_proxies.py` in 22 minutes on 2 cores, from nothing.",
    "",
    "FedPCL prints Adam with rate 0.001 for all methods, and no rate of pFedMe or Per-FedAvg, whose steps are plain "
    "SGD. With those of their released code (preset `official`, as in all of FedPCL's tables here) both have hardly "
    "begun to learn after these rounds, and rounding decides single points; `--preset tuned` has rates that learn, in "
    "the section on presets. Per-FedAvg adapts on training rows; the row that is named as a leak adapts on labelled "
    "test rows, as its released code does, and is compared with nothing.",
    "",
]


def command(name: str) -> list[str]:
    return ["reproduce", name, "--on", "digits", *ENTRIES[name], "--seeds", "0-2"]


def fedcache(*words: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "fedcache", *words, "--json"],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    if done.returncode != 0:
        raise SystemExit(f"fedcache {shlex.join(words)}\n{done.stderr}")
    found: dict[str, Any] = json.loads(done.stdout)["data"]
    return found


def number(value: dict[str, Any] | None, unit: str) -> str:
    """A mean with its std, as the papers print them."""
    if value is None or value.get("mean") is None:
        return (value or {}).get("text") or "-"
    form = "{:,.0f}" if unit != "%" else "{:.2f}"
    std = value.get("std")
    return form.format(value["mean"]) + (f" ({std:.2f})" if std is not None and unit == "%" else "")


def section(name: str, before: str) -> list[str]:
    begun = time.perf_counter()
    data = fedcache(*command(name))
    seconds = time.perf_counter() - begun
    fresh = not any(c["reused"] for c in data["cells"])
    cells = data["cells"]
    metrics = list(cells[0]["values"])
    pairs = [f"{m.replace('domain:', '')} {w}" for m in metrics for w in ("printed", "got")]
    if len(metrics) == 1:
        pairs = ["printed", "got"]
    lines = [
        f"### {name}: {data['title'].split(': ', 1)[-1]}",
        "",
        f"    fedcache {shlex.join(command(name))}",
        "",
    ]
    lines += [
        "| " + " | ".join([*cells[0]["labels"], *pairs]) + " |",
        "|" + "---|" * (len(cells[0]["labels"]) + len(pairs)),
    ]
    for cell in cells:
        row = list(cell["labels"].values())
        for value in cell[
            "values"
        ].values():  # a row may be scored by another metric, as the lowest of its clients
            unit = value.get("unit", "%")
            row += [number(value.get("printed"), unit), number(value.get("got"), unit)]
        note = "" if cell["run"] else f" (not run: {cell['why_not']})"
        row[-1] += note if cell["fidelity"] in ("", "exact") else f" ({cell['fidelity']}){note}"
        lines.append("| " + " | ".join(str(c).replace("|", "\\|") for c in row) + " |")
    lines += ["", *(o["sentence"] for o in data.get("orders", [])), ""]
    lines += ["Departures: " + "; ".join(data["departures"]) + ".", ""]
    if fresh:
        lines += [f"{seconds:.0f} s on one core, beside other work.", ""]
    elif known := re.search(r"^\d+ s on one core.*$", before, re.MULTILINE):
        lines += [known[0], ""]
    print(
        f"{name}: {seconds:.0f} s{'' if fresh else ', some runs were there already'}",
        file=sys.stderr,
        flush=True,
    )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--home", help="FEDCACHE_HOME of the runs")
    parser.add_argument("--jobs", type=int, default=2, help="tables at once, one thread each")
    parser.add_argument(
        "--only", default=",".join(ENTRIES), help="entries; the others keep what the page says"
    )
    options = parser.parse_args()
    if options.home:
        os.environ["FEDCACHE_HOME"] = options.home
    begun = time.perf_counter()
    for words in (TRIO, CLIP):
        fedcache("extract", "--dataset", "digits", *words)
    wanted = options.only.split(",")
    page = PAGE.read_text()
    old = re.search(r"<!-- proxies -->\n(.*?)<!-- end proxies -->", page, re.DOTALL)
    parts = dict(re.findall(r"<!-- (\S+) -->\n(.*?)<!-- / -->\n", old[1], re.DOTALL)) if old else {}
    order = sorted(wanted, key=lambda name: name not in LONG)
    with ThreadPoolExecutor(options.jobs) as pool:
        made = dict(
            zip(order, pool.map(section, order, [parts.get(n, "") for n in order]), strict=True)
        )
    parts |= {name: "\n".join(lines) for name, lines in made.items()}
    body = "\n".join(HEAD) + "".join(
        f"\n<!-- {n} -->\n{parts[n].rstrip()}\n<!-- / -->\n" for n in ENTRIES if n in parts
    )
    text = f"<!-- proxies -->\n{body}{CONV}\n<!-- end proxies -->\n"
    PAGE.write_text(page.replace(old[0] + "\n", text) if old else f"{page.rstrip()}\n\n{text}")
    print(
        f"{PAGE}: {len(made)} tables, {time.perf_counter() - begun:.0f} s in all", file=sys.stderr
    )


if __name__ == "__main__":
    main()
