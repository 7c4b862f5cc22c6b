"""The report as a person has it: in Chromium with the network refused, in light, dark and on a phone, by keyboard."""

import csv
import re
from xml.etree import ElementTree

import pytest
from axe_check import serious

SMALLEST = 12.0
"""Pixels of the smallest letters."""


@pytest.mark.parametrize("size", ["light", "dark", "phone"])
@pytest.mark.parametrize("which", ["demo", "grid"])
def test_a_page_is_quiet_fits_and_can_be_read(opened, which, size, request):
    path = request.getfixturevalue(which)
    assert path.stat().st_size < 5_000_000
    with opened(path, size) as page:
        fits(page)
        theme = page.evaluate("document.documentElement.dataset.theme")
        assert theme == ("dark" if size == "dark" else "light")
        texts = page.evaluate(
            "[...document.querySelectorAll('figure svg text')].map(t => {"
            " const m = t.getScreenCTM(); return Math.hypot(m.a, m.b) * parseFloat(getComputedStyle(t).fontSize); })"
        )
        assert len(texts) > 20
        assert min(texts) >= SMALLEST - 0.01
        small = page.evaluate(
            "[...document.querySelectorAll('body *')].filter(e => !e.closest('svg, script, style') && e.offsetParent"
            " && [...e.childNodes].some(n => n.nodeType === 3 && n.data.trim())"
            f" && parseFloat(getComputedStyle(e).fontSize) < {SMALLEST}).map(e => e.outerHTML.slice(0, 80))"
        )
        assert small == []
        # What is drawn stays inside its drawing.
        outside = page.evaluate(
            "[...document.querySelectorAll('figure svg')].flatMap(s => { const b = s.getBoundingClientRect();"
            " return [...s.querySelectorAll('text')].filter(t => { const r = t.getBoundingClientRect();"
            " return r.left < b.left - 6 || r.right > b.right + 6; }).map(t => t.textContent); })"
        )
        assert outside == []
        ink, paper = page.evaluate(
            "['--ink', '--paper'].map(n => getComputedStyle(document.documentElement).getPropertyValue(n).trim())"
        )
        assert contrast(ink, paper) > 7
        assert serious(page) == []


def fits(page):
    wide, seen = page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
    assert wide <= seen


def contrast(a, b):
    """WCAG's ratio of two #rrggbb colours."""

    def light(colour):
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        r, g, b = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
        return 0.2126 * r + 0.7152 * g + 0.0722 * b

    low, high = sorted((light(a), light(b)))
    return (high + 0.05) / (low + 0.05)


def test_every_control_works_by_keyboard(opened, demo):
    with opened(demo) as page:
        stops = []
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.textContent") == "Skip to the results"
        for _ in range(400):
            page.keyboard.press("Tab")
            at = page.evaluate(
                "(() => { const e = document.activeElement; return e === document.body ? '' :"
                " e.tagName + '#' + (e.closest('[id]')?.id ?? '') + ' ' + e.textContent.slice(0, 12); })()"
            )
            if not at:
                break
            stops.append(at)
        controls = page.evaluate(
            "[...document.querySelectorAll('main button, main a, summary, .drawing, .scroll, select, [data-filter]')]"
            ".filter(e => e.checkVisibility()).length"
        )
        assert len(stops) >= controls
        page.focus("#theme")
        page.keyboard.press("Enter")
        assert page.evaluate("document.documentElement.dataset.theme") == "dark"
        page.keyboard.press("Space")
        assert page.evaluate("document.documentElement.dataset.theme") == "light"
        page.focus("summary")
        page.keyboard.press("Enter")
        assert page.evaluate("document.querySelector('details').open")


def test_columns_are_sorted_and_chosen_by_keyboard(opened, demo):
    with opened(demo) as page:
        head = page.locator("#s0 th[scope=col]", has_text="accuracy %")
        read = "[...document.querySelectorAll('#s0 .sortable tbody tr')].map(r => r.cells[0].textContent)"
        before = page.evaluate(read)
        head.locator("button").focus()
        page.keyboard.press("Enter")
        assert head.get_attribute("aria-sort") == "descending"
        assert page.evaluate(read) == before  # the page begins with the best
        page.keyboard.press("Enter")
        assert head.get_attribute("aria-sort") == "ascending"
        assert page.evaluate(read) == before[::-1]
        assert page.evaluate("document.querySelectorAll('#s0 [aria-sort]').length") == 1
        head = page.locator("#s0 thead th", has_text="macro F1 %")
        assert not head.is_visible()
        page.focus("#s0 .choose summary")
        page.keyboard.press("Enter")
        page.locator("#s0 .choose label", has_text="macro F1 %").locator("input").focus()
        page.keyboard.press("Space")
        assert head.is_visible()
        page.keyboard.press("Escape")
        assert page.evaluate("document.querySelector('#s0 .choose').open") is False


def test_words_of_marks_come_by_arrow_keys_and_by_mouse(opened, demo):
    with opened(demo) as page:
        for figure in page.evaluate("[...document.querySelectorAll('figure')].map(f => f.id)"):
            drawing = page.locator(f"#{figure} .drawing")
            if not page.evaluate(f"document.querySelectorAll('#{figure} .mark').length"):
                continue
            drawing.focus()
            # Focusing scrolls, and a scroll hides the tip: its event comes with one of the next frames.
            page.evaluate(
                "() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))"
            )
            for key in ("End", "Home"):
                page.keyboard.press(key)
                assert page.locator("#tip").is_visible()
                assert page.locator("#tip").text_content()
            page.keyboard.press("Escape")
            assert not page.locator("#tip").is_visible()
        page.locator("#s0-dots .mark").first.hover()
        assert "rows" in page.locator("#tip").text_content()


def test_figures_leave_as_svg_png_and_csv(opened, demo, tmp_path):
    with opened(demo) as page:
        kept = {}
        for kind in ("svg", "png", "csv"):
            page.focus(f"#s0-dots button[data-save={kind}]")
            with page.expect_download() as caught:
                page.keyboard.press("Enter")
            assert caught.value.suggested_filename == f"s0-dots.{kind}"
            caught.value.save_as(tmp_path / f"dots.{kind}")
            kept[kind] = (tmp_path / f"dots.{kind}").read_bytes()
        assert kept["png"].startswith(b"\x89PNG")
        assert len(kept["png"]) > 3000
        svg = ElementTree.fromstring(kept["svg"])
        assert b"var(--" not in kept["svg"]
        titles = [t.text for t in svg.iter("{http://www.w3.org/2000/svg}title")]
        assert any("<script>alert(1)" in (t or "") for t in titles)
        rows = list(csv.reader(kept["csv"].decode().splitlines()))
        assert rows[0] == ["client", "class", "rows"]
        assert sum(int(r[2]) for r in rows[1:]) == 48


@pytest.mark.parametrize("size", ["light", "dark", "phone"])
def test_mistakes_are_small_pictures_that_load_and_fit(opened, mistakes, size):
    with opened(mistakes, size) as page:
        shown = page.evaluate(
            "[...document.querySelectorAll('.gallery img')].map(i => [i.complete && i.naturalWidth, i.naturalHeight,"
            " i.getBoundingClientRect().width, i.alt])"
        )
        assert 0 < len(shown) <= 24
        for width, height, drawn, name in shown:
            assert 0 < width <= drawn == 64
            assert 0 < height <= 64
            assert re.fullmatch(r"test/(zebra|ant|10|9|moth|2b)-with_a_name_\w+/\d+\.png", name)
        fits(page)
        columns = page.evaluate(
            "getComputedStyle(document.querySelector('.gallery ol')).gridTemplateColumns"
        )
        assert len(columns.split()) >= 2
        cut = page.evaluate(
            "[...document.querySelectorAll('.gallery li')].filter(l => l.scrollWidth > l.clientWidth + 1).length"
        )
        assert cut == 0
        assert "personal data" in page.locator("header").text_content()


def test_the_first_screen_says_what_to_take_and_shows_the_table_in_its_width(opened, demo):
    with opened(demo) as page:
        assert page.locator(".verdict .headline strong").first.text_content() in ("fed3r", "fedavg")
        assert page.locator("#s0 tbody tr").first.bounding_box()["y"] < 900
        wide, seen = page.evaluate(
            "(t => [t.scrollWidth, t.parentNode.clientWidth])(document.querySelector('#s0 table'))"
        )
        assert wide <= seen + 1
    with opened(demo, "phone") as page:
        heads = page.locator("#s0 thead th:not([hidden])")
        assert [heads.nth(i).text_content() for i in range(2)] == ["method", "accuracy %"]
        box = heads.nth(1).bounding_box()
        assert box["x"] + box["width"] <= 390


def shown_marks(page, run):
    """Marks of a run that are to be seen."""
    return page.evaluate(
        f"[...document.querySelectorAll('svg [data-run=\"{run}\"]')].filter(e =>"
        " e.getBoundingClientRect().width).length"
    )


def test_a_run_is_searched_filtered_and_ticked_off_in_all_figures(opened, grid):
    with opened(grid) as page:
        rows = page.locator("#s0 .sortable tbody tr:visible")
        assert rows.count() == 240
        last = page.evaluate(
            "[...document.querySelectorAll('#s0 .sortable tbody tr')].at(-1).dataset.run"
        )
        before = shown_marks(page, last)
        assert before >= 2, "in several figures"
        page.locator("[data-by=lr]").select_option("0.1")
        assert rows.count() == 40
        gone = page.evaluate(
            "[...document.querySelectorAll('#s0 .sortable tbody tr')].find(r => r.hidden).dataset.run"
        )
        assert shown_marks(page, gone) == 0
        assert "40 of 240 rows, 40 in figures" in page.locator("#s0 [data-count]").text_content()
        page.locator("[data-by=lr]").select_option("")
        page.fill("#s0 [data-filter]", "no such words")
        assert rows.count() == 0
        page.fill("#s0 [data-filter]", "")
        first = page.locator("#s0 .sortable tbody tr").first
        key = first.get_attribute("data-run")
        assert shown_marks(page, key) > 0
        first.locator("input").focus()
        page.keyboard.press("Space")
        assert shown_marks(page, key) == 0
        page.keyboard.press("ArrowDown")
        second = page.locator("#s0 .sortable tbody tr").nth(1)
        assert second.locator("input").evaluate("e => e === document.activeElement")
        # what is focused lights up in figures
        assert page.evaluate("document.querySelectorAll('.lit').length") > 1
        page.click("#s0 [data-none]")
        assert page.evaluate("document.querySelectorAll('svg [data-run]:not(.off)').length") == 0
        page.click("#s0 [data-all]")
        assert shown_marks(page, key) > 0
        page.locator(f"#s0-bytes .mark[data-run='{key}']").first.dispatch_event("pointerover")
        assert "lit" in first.get_attribute("class")
