"""Contenders taking turns in one process, the rows that are made of their times, and other processes that measure."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

Row = dict[str, Any]
Seconds = dict[str, list[float]]


def hardware() -> str:
    """Processor, whether it has AVX-512, and cores of this process."""
    named = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    for line in info.read_text().splitlines() if info.exists() else []:
        if line.startswith("model name"):
            named = line.partition(":")[2].strip()
            break
    return f"{named}{' with AVX-512' if avx512() else ''}, {cores()} cores"


def avx512() -> bool:
    """Whether torch computes with AVX-512, which makes products of matrices twice as fast and steps of a loop not."""
    return bool(torch.backends.cpu.get_cpu_capability() == "AVX512")  # type: ignore[no-untyped-call]


def cores() -> int:
    """Cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def seconds_of(call: Callable[[], Any]) -> float:
    """Wall time of one call, and of what it has left a GPU to do."""
    begin = time.perf_counter()
    call()
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter() - begin


def in_turn(
    calls: Mapping[str, Callable[[], Any]], times: int = 5, seconds: Seconds | None = None
) -> Seconds:
    """Seconds of every call, ``times`` turns of all of them; the first of a turn changes. One turn before is not kept.

    Args:
        calls: contenders.
        times: turns.
        seconds: of earlier turns, which are kept.
    """
    names = list(calls)
    if seconds is None:
        for call in calls.values():
            call()
    found = {n: list(seconds[n]) if seconds else [] for n in names}
    for turn in range(times):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            found[name].append(seconds_of(calls[name]))
    return found


def settled(
    calls: Mapping[str, Callable[[], Any]], times: int, bar: float, other: str, ours: str
) -> Seconds:
    """Seconds of ``times`` turns, of twice as many where the quartiles of ``other`` over ``ours`` cross the bar."""
    seconds = in_turn(calls, times)
    low, _, high = quartiles(pairs(seconds, other, ours))
    if low < bar <= high:
        seconds = in_turn(calls, times, seconds)
    return seconds


def quartiles(ratios: Sequence[float]) -> list[float]:
    """The three quartiles."""
    return [round(float(q), 3) for q in np.quantile(np.asarray(ratios), [0.25, 0.5, 0.75])]


def pairs(seconds: Seconds, other: str, ours: str) -> list[float]:
    """How many times faster ``ours`` was than ``other``, turn by turn."""
    return [a / b for a, b in zip(seconds[other], seconds[ours], strict=True)]


def best(seconds: Seconds, other: str, ours: str) -> float:
    """The same of the best times."""
    return min(seconds[other]) / min(seconds[ours])


def in_own_process(family: str, *words: object) -> Any:
    """What ``python -m benchmarks.FAMILY WORDS`` prints in its last line, as JSON.

    Raises:
        RuntimeError: it failed; the message is its last line.
    """
    line = [sys.executable, "-m", f"benchmarks.{family}", *map(str, words)]
    done = subprocess.run(line, check=False, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr.strip().splitlines()[-1])
    return json.loads(done.stdout.splitlines()[-1])


def shown(seconds: Seconds, scale: float = 1e3, unit: str = "ms") -> str:
    """The best time of every contender, in words."""
    return ", ".join(f"{name} {min(taken) * scale:.1f} {unit}" for name, taken in seconds.items())


def make_row(
    name: str,
    target: str,
    measured: float | None,
    spread: Sequence[float],
    met: bool,
    *,
    detail: str = "",
    roofline: str = "",
) -> Row:
    """A row of results.json; ``roofline`` is kept only where the target is missed, which it explains."""
    made = {
        "name": name,
        "target": target,
        "measured": None if measured is None else round(float(measured), 3),
        "quartiles": list(spread),
        "met": bool(met),
        "hardware": hardware(),
    }
    if roofline and not met:
        made["roofline"] = roofline
    if detail:
        made["detail"] = detail
    return made


def at_most(
    name: str, target: str, bar: float, seconds: Seconds, ours: str, other: str, detail: str
) -> Row:
    """The row of "``ours`` takes at most ``bar`` x the time of ``other``", of the best times."""
    measured = best(seconds, ours, other)
    spread = quartiles(pairs(seconds, ours, other))
    words = f"best of {len(seconds[ours])}: {shown(seconds)}; {detail}"
    return make_row(name, target, measured, spread, measured <= bar, detail=words)


def at_least(
    name: str,
    target: str,
    bar: float,
    calls: Mapping[str, Callable[[], Any]],
    other: str,
    ours: str,
    *,
    times: int = 5,
    detail: str = "",
    roofline: Callable[[Seconds], str] = lambda _seconds: "",
) -> Row:
    """The row of "``ours`` is ``bar`` x as fast as ``other``"; measured again where its quartiles cross the bar."""
    seconds = settled(calls, times, bar, other, ours)
    spread = quartiles(pairs(seconds, other, ours))
    measured = best(seconds, other, ours)
    words = f"best of {len(seconds[ours])}: {shown(seconds)}" + (f"; {detail}" if detail else "")
    return make_row(
        name, target, measured, spread, measured >= bar, detail=words, roofline=roofline(seconds)
    )
