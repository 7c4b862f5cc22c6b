"""The words for executions, and those of earlier releases, which stay readable for one release."""

from __future__ import annotations

FORMER = {"loop": "sequential", "stack": "batched", "dual": "gram"}
"""Word of an earlier release -> the word now."""


def execution_name(word: str) -> str:
    """The word now for an execution that a user, a stored configuration or a result names."""
    return FORMER.get(word, word)
