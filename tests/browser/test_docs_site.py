"""The documentation as a site on a disk: searched without a server, formulas drawn, nothing asked of another host."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    place = tmp_path_factory.mktemp("docs") / "site"
    words = ["-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(place)]
    done = subprocess.run(
        [sys.executable, *words], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return place


def test_the_site_is_read_and_searched_from_a_disk(opened, site):
    with opened(site / "methods" / "fedpcl.html") as page:
        rows = page.locator("div.formula mtable > mtr")
        assert rows.count() == 2, "the two lines of its formula stand below each other"
        assert rows.nth(1).bounding_box()["y"] > rows.nth(0).bounding_box()["y"] + 10
        assert page.locator("nav .md-nav__item--active").count() > 0
        page.goto((site / "index.html").as_uri())
        page.keyboard.press("/")
        page.keyboard.type("ridge regression")
        results = page.locator(".md-search-result__link")
        results.first.wait_for(timeout=20_000)
        assert results.count() >= 3
        assert any("fed3r" in link.get_attribute("href") for link in results.all())
