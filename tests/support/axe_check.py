"""axe-core on a page of Playwright: what it finds that a person with a screen reader or a keyboard cannot pass."""

from importlib.resources import files


def serious(page):
    """Findings of impact serious or critical, each with the element; of WCAG 2 A and AA and of best practice."""
    page.evaluate(files("axe_playwright_python").joinpath("axe.min.js").read_text(encoding="utf-8"))
    found = page.evaluate("axe.run(document, {resultTypes: ['violations']})")
    return [
        f"{v['id']}: {node['target']} {node['failureSummary']}"
        for v in found["violations"]
        if v["impact"] in ("serious", "critical")
        for node in v["nodes"]
    ]
