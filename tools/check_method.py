"""Try one method: golden figures, documentation page, its own tests, its cases of tests over all methods, and style.

    make check-method NAME=fedprox

The golden figures of a new method are written, and those of a known one are compared. The page is written to
docs/methods/NAME.md. The last line says which files to commit, or how to restore the JSON files if a check fails, with
exit code 1.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

import golden  # noqa: E402
import make_docs  # noqa: E402
import method_catalogue  # noqa: E402
import quick  # noqa: E402

from fedcache.federate.methods import METHODS, NAMES, module_of  # noqa: E402


def main() -> int:
    """Write what is derived from the method, and run its tests."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("name", help="name of the method on the command line")
    name = parser.parse_args().name
    if name not in NAMES:
        parser.error(
            f"no method {name!r}: its file would be fedcache/federate/methods/{name.replace('-', '_')}.py"
        )
    if METHODS[name].page is None:
        parser.error(
            f"{name} has no documentation: give its Method a page=MethodPage(...), as fedprox.py does"
        )
    page = ROOT / "docs" / "methods" / f"{name}.md"
    page.parent.mkdir(exist_ok=True)
    page.write_text(make_docs.method_page(name), encoding="utf-8")
    print(f"page: {page.relative_to(ROOT)}", flush=True)
    method_catalogue.write([name])
    print(f"list of methods: {method_catalogue.PATH.relative_to(ROOT)}", flush=True)
    known = {case.partition("/")[0] for case in json.loads(golden.TABLE.read_text())}
    if name not in known:
        with golden.stage() as place:
            golden.write_in_table(name, golden.table_of(name, place))
        print(f"golden figures: {golden.TABLE.relative_to(ROOT)}", flush=True)
    file = f"{module_of(name).replace('.', '/')}.py"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "FEDCACHE_CHANGED": file}
    over_methods = [*quick.files_over_methods(), "tests/project/test_pages.py", "-k", name]
    commands = [
        ["-m", "pytest", "-q", "-m", quick.MARKS, *over_methods],
        ["-m", "ruff", "check", "fedcache", "tests"],
        ["-m", "ruff", "format", "--check", "fedcache", "tests"],
        ["tools/words.py"],
    ]
    own = f"tests/federate/methods/test_methods_{name.replace('-', '_')}.py"
    if (ROOT / own).is_file():
        commands.insert(0, ["-m", "pytest", "-q", own])
    codes = [
        subprocess.run([sys.executable, *words], cwd=ROOT, env=environment, check=False).returncode
        for words in commands
    ]
    made = f"{golden.TABLE.relative_to(ROOT)} {method_catalogue.PATH.relative_to(ROOT)}"
    if any(codes):
        print(f"{name}: a check failed. To restore the JSON files: git checkout {made}")
        return 1
    print(
        f"{name}: all checks hold. Commit {file}, its test, {made} and, if changed, docs/papers.bib and changes/."
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
