"""Plain words: a lint over handwritten pages, string literals and docstrings, and the length of the pages' sentences.

    python tools/words.py              # every finding, and the pages whose sentences are too long
    python tools/words.py --lengths    # median and 90th percentile of words per sentence, for each page and overall

A finding is a discouraged word, with its file, its line and the word to use instead. Code in backquotes, code blocks
and outputs in pages, and the texts that ``EXCEPTIONS`` lists are not checked. Exit code 1: a text needs a change.
"""

from __future__ import annotations

import argparse
import ast
import re
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]

WORDS = (
    (r"deals?|dealt|dealing", "partition, assign"),
    (r"at hand", "available"),
    (r"mend(s|ed|ing)?", "fix"),
    (r"anew", "again"),
    (r"asked for", "requested"),
    (r"found none", "name the missing option or column"),
    (r"(was|is|are|were) there already", "is stored already, exists already"),
    (r"(goes|go|went|going) on", "resume, continue"),
    (r"(is|are|be|not|nobody is) believed", "accepted; validated"),
    (r"not a choice", "best by test accuracy (no validation split)"),
    (r"for want of", "without, because there is no"),
    (r"in the place of", "instead of"),
    (r"to choose by", "to select on; validation rows"),
    (r"beside", "next to, in addition to"),
    (r"lies? (in|at|on|under|below|there|together|apart)", "is stored in, is in"),
    (r"flatters", "is optimistic"),
    (r"(cut|cuts) out of", "made from"),
    (
        r"told|whoever|nobody|learnt|whatever|of which",
        "name who or what it is; reported, trained",
    ),
    (r"for ever|comes? near", "never ends; approximates"),
)
"""Discouraged words as regular expressions (without case, whole words), and what to write instead."""

EXCEPTIONS = {
    "CHANGELOG.md": "the history of earlier releases is not rewritten",
    "changes/": "the next release's part of the same history",
    "docs/trust.md": "made by tools/make_trust.py",
    "docs/results.md": "made by tools/make_results.py",
    "docs/frozen-bench.md": "made by fedcache reproduce frozen-bench",
}
"""Pages and folders that are not checked -> the reason."""

MEDIAN = 18
NINETIETH = 30
"""Most words of a sentence of all pages together: the median and the 90th percentile."""

CODE = re.compile(r"``.+?``|`[^`]+`|\]\([^)]*\)|<[^>]+>", re.DOTALL)
FENCE = re.compile(r"^ *(```|~~~)")
SENTENCE = re.compile(r"(?<=[.!?:])\s+(?=[\"'(*`]*[A-Z0-9`])")


class Finding(NamedTuple):
    """A discouraged word in a text."""

    file: str
    line: int
    word: str
    instead: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.word!r}: write {self.instead}"


def find_words(file: str, text: str, line: int = 1) -> Iterator[Finding]:
    """The discouraged words of a text that begins at ``line``; code in backquotes is left out."""
    plain = CODE.sub(blank, text)
    for pattern, instead in PATTERNS:
        for found in pattern.finditer(plain):
            yield Finding(file, line + plain.count("\n", 0, found.start()), found[0], instead)


PATTERNS = [
    (re.compile(rf"(?<![\w-])(?:{p})(?![\w-])".replace(" ", r"\s+"), re.IGNORECASE), instead)
    for p, instead in WORDS
]


def blank(found: re.Match[str]) -> str:
    """Blanks of the same lines, so that line numbers stay."""
    return re.sub(r"[^\n]", " ", found[0])


def pages() -> list[str]:
    """Handwritten Markdown files in git that are not excepted."""
    found = listed("*.md", ":!tests", ":!.github", ":!shared")
    return [name for name in found if not name.startswith(tuple(EXCEPTIONS))]


def listed(*patterns: str) -> list[str]:
    """Names of the files in git that match."""
    words = ["git", "ls-files", *patterns]
    return subprocess.run(
        words, cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()


def prose(text: str) -> str:
    """A page with its code blocks and comments blanked."""
    lines = []
    fence = ""
    for line in text.split("\n"):
        mark = FENCE.match(line)
        if mark and not fence:
            fence = mark[1]
        elif mark and mark[1] == fence:
            fence = ""
            mark = FENCE.match("")
            line = ""
        lines.append("" if fence else line)
    return re.sub(r"<!--.*?-->", blank, "\n".join(lines), flags=re.DOTALL)


def literals(source: str) -> Iterator[tuple[int, str]]:
    """(line, text) of every string of two words or more: literals, the constant parts of f-strings, docstrings."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield node.lineno, node.value


def findings() -> list[Finding]:
    """All findings in pages, in the package and its data files, and in the texts of pages that ``make docs`` writes."""
    found = []
    for page in [*pages(), *listed("fedcache/*.toml", "fedcache/commands/templates/*")]:
        found += find_words(page, prose((ROOT / page).read_text(encoding="utf-8")))
    for path in [*sorted((ROOT / "fedcache").rglob("*.py")), ROOT / "tools" / "make_docs.py"]:
        source = path.read_text(encoding="utf-8")
        # One search tells whether a file needs to be parsed at all.
        if ANY.search(source):
            name = path.relative_to(ROOT).as_posix()
            for line, text in literals(source):
                found += find_words(name, text, line)
    return found


ANY = re.compile("|".join(pattern.pattern for pattern, _ in PATTERNS), re.IGNORECASE)


def sentence_lengths(text: str) -> list[int]:
    """Words of each sentence of a page's paragraphs and list items; headings and tables are left out."""
    lengths = []
    for block in re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )", prose(text)):
        lines = [line.strip() for line in block.strip().split("\n")]
        if lines[0].startswith(("#", "|", "!", "<", ":::", "---")) or not lines[0]:
            continue
        for sentence in SENTENCE.split(" ".join(lines)):
            words = re.findall(r"[^\W\d_][\w'-]*", CODE.sub("code", sentence))
            if len(words) > 2:
                lengths.append(len(words))
    return lengths


def shape(lengths: list[int]) -> tuple[float, float]:
    """Median and 90th percentile of at least two lengths."""
    return statistics.median(lengths), statistics.quantiles(lengths, n=10)[-1]


def main() -> int:
    """Print findings and sentence lengths; 1 if something is to be changed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--lengths", action="store_true", help="print the lengths of each page")
    arguments = parser.parse_args()
    every = []
    for page in pages():
        lengths = sentence_lengths((ROOT / page).read_text(encoding="utf-8"))
        every += lengths
        if arguments.lengths and len(lengths) > 1:
            median, most = shape(lengths)
            print(f"{page}: {len(lengths)} sentences, median {median:g}, 90th percentile {most:g}")
    found = findings()
    for finding in found:
        print(finding)
    median, most = shape(every)
    print(
        f"{len(found)} findings; sentences of all pages: median {median:g}, 90th percentile {most:g} words"
    )
    return int(bool(found) or median > MEDIAN or most > NINETIETH)


if __name__ == "__main__":
    sys.exit(main())
