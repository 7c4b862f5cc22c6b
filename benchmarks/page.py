"""docs/performance.md: the table of the last ``make bench``, the ceilings of this machine, and curves of the cost."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import clean, scale
from benchmarks.gpu import RESULTS as GPU_RESULTS
from benchmarks.growth import AXES, BASE, curves
from benchmarks.measure import Row, cores, hardware, seconds_of
from benchmarks.runner import RESULTS, in_order, missing, verdict
from fedcache.heads.linear import times_transposed

DOCS = Path(__file__).resolve().parents[1] / "docs"
LABELS = {
    "clients": "clients of a round",
    "rows": "rows a client",
    "width": "features",
    "classes": "classes",
    "points": "grid points",
    "many-clients": "clients of a run, 100 of them in a round",
    "many-rows": "rows of 100 clients",
}


def ceilings() -> dict[str, float]:
    """GFLOP/s of a square float32 product and GB/s of a sum, on one thread and all cores; us of a clean linear step."""
    a = torch.randn(2048, 2048)
    b = torch.randn(2048, 2048)
    flat = torch.ones(64 << 20)
    found = {}
    for threads in sorted({1, cores()}):
        torch.set_num_threads(threads)
        product = min(seconds_of(lambda: times_transposed(a, b)) for _ in range(7))
        stream = min(seconds_of(flat.sum) for _ in range(7))
        found[f"gflops/{threads}"] = 2.0 * 2048**3 / product / 1e9
        found[f"gbs/{threads}"] = flat.numel() * 4 / stream / 1e9
    torch.set_num_threads(1)
    parts = [(torch.randn(3200, 1024), torch.randint(10, (3200,)))]
    # 3,200 rows are 100 steps.
    steps = min(seconds_of(lambda: clean.fedavg(parts, 10, 1, clean.sgd())) for _ in range(7))
    found["step"] = steps / 100 * 1e6
    return found


def roofline(found: dict[str, float]) -> list[str]:
    """What the ceilings mean for one step, one round and one Gram matrix, in words with numbers."""
    flops = found["gflops/1"]
    bandwidth = found["gbs/1"]
    D = 1024
    B = 32
    step = {C: 4.0 * B * D * C / flops / 1e3 for C in (10, 100)}  # us
    rows = 100 * 50
    round_ = {
        C: max(2 * 2.0 * rows * D * C / flops / 1e6, 2 * rows * D * 4 / bandwidth / 1e6)
        for C in (10, 100)
    }  # ms
    gram = 2.0 * 50_000 * D * D / flops / 1e9
    return [
        f"One thread multiplies float32 matrices at {flops:.0f} GFLOP/s and reads memory at {bandwidth:.1f} GB/s. A "
        f"step of a linear head costs 4 B D C operations. At B = {B} and D = {D} this takes {step[10]:.0f} us "
        f"for 10 classes and {step[100]:.0f} us for 100. A step of the clean loop takes {found['step']:.0f} us at 10 "
        f"classes. "
        "With small heads most of the time is spent on starting operations, which `batched` and `gram` share among "
        "clients. With large heads most of it is arithmetic, which only `gram` reduces.",
        "",
        "A round of `gram` cannot be faster than its two products with all rows (X W' before training and A' X after "
        f"it). At the speed above, a round of 100 clients with 50 rows each takes at least {round_[10]:.1f} ms for 10 "
        f"classes and {round_[100]:.1f} ms for 100. The statistics of Fed3R on 50,000 rows are one product, which "
        f"takes {gram:.1f} s in float32 and twice that in float64.",
    ]


def section(data: dict[str, Any]) -> list[str]:
    """The rows of one machine in Markdown, and below them what explains each."""
    lost = missing(data["rows"])
    return [
        f"## {data['hardware']}",
        "",
        *table(in_order(data["rows"])),
        "",
        *([f"Not measured: {', '.join(lost)}.", ""] if lost else []),
    ]


def table(rows: list[Row]) -> list[str]:
    """The rows in Markdown, and below it what explains each."""
    lines = ["| benchmark | target | measured | quartiles | verdict |", "|---|---|---|---|---|"]
    notes = []
    for row in rows:
        value = "-" if row["measured"] is None else f"{row['measured']:g}"
        spread = " / ".join(f"{q:g}" for q in row["quartiles"]) or "-"
        lines.append(f"| {row['name']} | {row['target']} | {value} | {spread} | {verdict(row)} |")
        why = [row[k] for k in ("error", "roofline", "detail") if row.get(k)]
        if why:
            notes.append(f"- **{row['name']}**: {'. '.join(why)}.")
    return [*lines, "", *notes]


def plot(axis: str, found: dict[str, list[float]], place: Path) -> None:
    """One curve as SVG, the same bytes for the same numbers."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "fedcache"
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(5.2, 3.4))
    for name, seconds in found.items():
        if name != "x":
            axes.plot(
                found["x"][: len(seconds)], [1e3 * s for s in seconds], marker="o", label=name
            )
    axes.set_xscale("log", base=10 if axis.startswith("many") else 2)
    axes.set_yscale("log")
    axes.set_xticks(found["x"], [f"{x:g}" for x in found["x"]])
    axes.set_xlabel(LABELS[axis])
    axes.set_ylabel("ms a round" + (", all points" if axis == "points" else ""))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(place, metadata={"Date": None})
    pyplot.close(figure)


def gpu_section(data: dict[str, Any]) -> list[str]:
    """The rows of a machine with a GPU."""
    return [
        f"## {data['hardware']}",
        "",
        "`make bench-gpu` compares `--device cuda` with the clean loop on the same GPU and with one core of the same "
        "machine. The targets are the same as for the CPU. Random numbers are drawn on the CPU, so they are the "
        "same for every device.",
        "",
        *table(data["rows"]),
        "",
    ]


def drawings(axes: Iterable[str]) -> list[str]:
    """Lines that show the curve of each axis."""
    return [line for axis in axes for line in (f"![{LABELS[axis]}](performance/{axis}.svg)", "")]


def page(
    machines: Sequence[dict[str, Any]], found: dict[str, float], gpu: dict[str, Any] | None = None
) -> str:
    """The text of docs/performance.md, of the results of each machine and a GPU, and the ceilings of this machine."""
    lines = [
        "# Performance",
        "",
        "This page compares fedcache with plain loops over clients, with other libraries and with the limits of the "
        "machine. `make bench` and `python -m benchmarks --page` make this page.",
        "",
        "- A ratio compares two programs that take turns in one process. It is computed from the best of at least five "
        "repeats, unless the row gives another number. The quartiles are those of the ratios of single pairs of runs "
        "(for `every method`: of the ratios of the methods), so the ratio in the row can lie outside them.",
        "- One thread is used unless a row says otherwise.",
        "- A *clean loop* is a plain loop over clients in PyTorch. Its speed depends on the machine: if Python and "
        "torch start a step quickly, the loop loses less time, and the ratio is smaller. Therefore each kind of "
        "machine has its own table.",
        "- *Missed, roofline* means that the machine cannot reach the target; a note below the table gives its limit.",
        "",
        *(line for data in machines for line in section(data)),
        *(gpu_section(gpu) if gpu else []),
        "## Limits of the machine",
        "",
        f"Measured on: {hardware()}.",
        "",
        "| threads | float32 product of 2048 x 2048 | sum over 256 MB |",
        "|---|---|---|",
        *(
            f"| {t} | {found[f'gflops/{t}']:.0f} GFLOP/s | {found[f'gbs/{t}']:.1f} GB/s |"
            for t in sorted({int(k.split("/")[1]) for k in found if "/" in k})
        ),
        "",
        *roofline(found),
        "",
        "## How cost grows",
        "",
        "The figures show FedAvg of a linear head with SGD, one epoch, batch 32, float32, one thread. There are "
        f"{BASE['clients']} clients with {BASE['rows']} rows each, {BASE['width']} features and {BASE['classes']} "
        "classes, except for the quantity on the axis. The times are of whole runs of two rounds, with Gram matrices "
        "and evaluation.",
        "",
        *drawings(AXES),
        "The next two figures go up to a million clients and ten million rows. The first shows a round of 100 clients "
        f"with {scale.OWN} of {scale.N:,} rows each ({scale.D} features in float16, {scale.C} classes), next to a "
        f"clean loop over 100 such clients. The second shows the time of Fed3R on rows with {scale.NARROW} features, "
        "and the time of X'X, the only large matrix product that Fed3R needs.",
        "",
        *drawings(scale.AXES),
    ]
    return "\n".join(lines).rstrip() + "\n"


def write_page(docs: Path = DOCS, results: Sequence[Path] = RESULTS) -> None:
    """Measure ceilings and curves, and write the page and its plots."""
    machines = [json.loads(path.read_text()) for path in results if path.exists()]
    found = ceilings()
    folder = docs / "performance"
    folder.mkdir(parents=True, exist_ok=True)
    for axis, curve in {**curves(), **scale.curves()}.items():
        plot(axis, curve, folder / f"{axis}.svg")
    gpu = json.loads(GPU_RESULTS.read_text()) if GPU_RESULTS.exists() else None
    (docs / "performance.md").write_text(page(machines, found, gpu))
    print(docs / "performance.md")
