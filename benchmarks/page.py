"""docs/performance.md: the table of the last ``make bench``, the ceilings of this machine, and curves of the cost."""

from __future__ import annotations

import json
from collections.abc import Sequence
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
    found: dict[str, float] = {}
    for threads in sorted({1, cores()}):
        torch.set_num_threads(threads)
        product = min(seconds_of(lambda: times_transposed(a, b)) for _ in range(7))
        stream = min(seconds_of(flat.sum) for _ in range(7))
        found[f"gflops/{threads}"] = 2.0 * 2048**3 / product / 1e9
        found[f"gbs/{threads}"] = flat.numel() * 4 / stream / 1e9
    torch.set_num_threads(1)
    parts = [(torch.randn(3200, 1024), torch.randint(10, (3200,)))]
    found["step"] = (
        min(seconds_of(lambda: clean.fedavg(parts, 10, 1, clean.sgd())) for _ in range(7))
        / 100
        * 1e6
    )
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
        f"step of a linear head costs 4 B D C operations: at B = {B}, D = {D} that is {step[10]:.0f} us for 10 classes "
        f"and {step[100]:.0f} us for 100, where a step of the clean loop takes {found['step']:.0f} us at 10 classes. "
        "Small heads are dispatch, which `batched` and `gram` share among clients; large heads are real work, which "
        "only `gram` makes less.",
        "",
        f"A round of `gram` cannot be faster than its two products with all rows, X W' before and A' X after: for 100 "
        f"clients of 50 rows {round_[10]:.1f} ms at 10 classes and {round_[100]:.1f} ms at 100, at the ceilings above. "
        f"The statistics of Fed3R on 50,000 rows are one product of {gram:.1f} s in float32 and twice that in float64.",
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
        said = [row[k] for k in ("error", "roofline", "detail") if row.get(k)]
        if said:
            notes.append(f"- **{row['name']}**: {'. '.join(said)}.")
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
        "Made by `make bench-gpu`: `--device cuda` beside the clean loop on the same GPU, and beside one core of the "
        "same machine, with the targets of the CPU. Random numbers are drawn on the CPU, so that a device never "
        "changes them.",
        "",
        *table(data["rows"]),
        "",
    ]


def page(
    machines: Sequence[dict[str, Any]], found: dict[str, float], gpu: dict[str, Any] | None = None
) -> str:
    """The text of docs/performance.md, of the results of each machine and a GPU, and the ceilings of this machine."""
    lines = [
        "# Performance",
        "",
        "Made by `make bench` and `python -m benchmarks --page`; edit the benchmarks, not this page.",
        "",
        "Ratios are of contenders that take turns in one process: of the best of at least five times where a row says "
        "no other number, so they may lie outside the quartiles, which are of the pairs (for `every method`, over the "
        "methods). One thread unless a row says otherwise.",
        "",
        "A ratio to a loop depends on the machine: where Python and torch start a step quickly, a loop over clients "
        "loses less, and the same engine is fewer times as fast. Each kind of machine that was measured has a table.",
        "",
        *(line for data in machines for line in section(data)),
        *(gpu_section(gpu) if gpu else []),
        "## Ceilings of the machine",
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
        f"FedAvg of a linear head with SGD, one epoch, batch 32, float32, one thread; {BASE['clients']} clients x "
        f"{BASE['rows']} rows, {BASE['width']} features and {BASE['classes']} classes where the axis does not say "
        "otherwise. Whole runs of two rounds: Gram matrices and the evaluation are inside.",
        "",
        *(line for axis in AXES for line in (f"![{LABELS[axis]}](performance/{axis}.svg)", "")),
        "To a million clients and ten million rows, with the floors: a round of 100 clients that have "
        f"{scale.OWN} of {scale.N:,} rows each ({scale.D} features in float16, {scale.C} classes) beside a clean loop "
        f"over 100 such clients, and Fed3R of rows with {scale.NARROW} features beside the one product X'X that it "
        "cannot do without.",
        "",
        *(
            line
            for axis in scale.AXES
            for line in (f"![{LABELS[axis]}](performance/{axis}.svg)", "")
        ),
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
