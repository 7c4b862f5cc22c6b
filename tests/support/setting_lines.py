"""Settings of methods as a person writes them after ``--set``: ``opt=sgd lr=0.05 bn=false``."""

import json


def set_to(line):
    """Settings by name; numbers, truth values and quoted words are read as JSON, other words as they are."""
    return {name: _value(word) for name, _, word in (part.partition("=") for part in line.split())}


def chosen(settings):
    """Settings that are given as a line, by name, or not at all."""
    if isinstance(settings, str):
        return set_to(settings)
    return settings or {}


def cases_of(table):
    """Cases of a table: each line has the name of a method and its settings."""
    found = []
    for line in table.strip().splitlines():
        name, _, settings = line.strip().partition(" ")
        found.append((name, set_to(settings)))
    return found


def swept(line):
    """The values of each swept key, as words: ``lr=0.1,0.01 rounds=3``."""
    words = (part.partition("=") for part in line.split())
    return {key: values.split(",") if values else [] for key, _, values in words}


def _value(word):
    try:
        return json.loads(word)
    except ValueError:
        return word
