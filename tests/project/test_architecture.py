"""The way through `fedcache train` that the page of the architecture shows: few files, few lines, names that exist."""

import ast
import re

from loaded_files import content

PLACE = re.compile(r"^\d+\. `([\w/]+\.py)` \(([^)]*)\)", re.MULTILINE)


def test_the_way_through_train_is_twelve_files_and_three_thousand_lines():
    page = content("docs/design/architecture.md")
    section = page.split("## To follow `fedcache train --method fedavg`")[1].split("\n## ")[0]
    places = PLACE.findall(section)
    assert len(places) == 12
    lines = 0
    for path, names in places:
        tree = ast.parse(content(f"fedcache/{path}"))
        length = {}
        for node in tree.body:
            name = getattr(node, "name", None)
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                name = node.targets[0].id
            length[name] = node.end_lineno - node.lineno + 1
        wanted = re.findall(r"`(\w+)`", names)
        assert set(wanted) <= set(length), path
        lines += sum(length[name] for name in wanted)
    assert 1_000 < lines <= 3_000
