"""``python -m benchmarks [--only FAMILY] [--page]``: measure, write the results of this kind of processor (benchmarks/
results.json, or results-avx512.json) or docs/performance.md.

Exits 1 when a line of the table has no row, or one is missed without a roofline.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from benchmarks.runner import bench, family_rows
from benchmarks.table import LINES
from fedcache.process import keep_freed_memory


def main() -> None:
    families = ", ".join(dict.fromkeys(line.family for line in LINES))
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="FAMILY",
        help=f"measure this one alone (repeatable): {families}",
    )
    parser.add_argument(
        "--page",
        action="store_true",
        help="measure the growth curves and write docs/performance.md",
    )
    parser.add_argument(
        "--gpu", action="store_true", help="measure on a GPU, and write benchmarks/results-gpu.json"
    )
    parser.add_argument("--family", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.family:
        keep_freed_memory()  # as the commands do
        options.out.write_text(json.dumps(family_rows(options.family)))
    elif options.gpu:
        from benchmarks.gpu import bench as bench_gpu

        sys.exit(bench_gpu())
    elif options.page:
        from benchmarks.page import write_page

        write_page()
    else:
        sys.exit(bench(options.only))


if __name__ == "__main__":
    main()
