"""The documentation as a site on a disk: searched without a server, formulas drawn, nothing asked of another host."""

from pathlib import Path

SITE = Path(__file__).parents[2] / "site"
"""What ``make docs`` has built, before these tests run."""


def test_the_site_is_read_and_searched_from_a_disk(opened):
    with opened(SITE / "methods" / "fedpcl.html") as page:
        rows = page.locator("div.formula mtable > mtr")
        assert rows.count() == 2, "the two lines of its formula stand below each other"
        assert rows.nth(1).bounding_box()["y"] > rows.nth(0).bounding_box()["y"] + 10
        assert page.locator("nav .md-nav__item--active").count() > 0
        page.goto((SITE / "index.html").as_uri())
        page.keyboard.press("/")
        page.keyboard.type("ridge regression")
        results = page.locator(".md-search-result__link")
        results.first.wait_for(timeout=20_000)
        assert results.count() >= 3
        assert any("fed3r" in link.get_attribute("href") for link in results.all())
