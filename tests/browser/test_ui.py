"""``fedcache ui`` as a person has it: before, while and after a grid, by keyboard, on a phone, in the dark."""

import os
import signal
import time
from pathlib import Path

import pytest
from axe_check import serious
from command import ok, start
from files_now import files_now
from homes import made_once
from made_path import extracted, place_of
from test_page import fits
from ui_client import served

from fedcache.runs.directory import FILES, WRITTEN
from fedcache.store.files import write_sealed

IID = "--scheme iid --clients 4 --set batch=4 --set dim=8"


def shapes(place):
    return extracted(place, "random-projection --size 8", train=24, test=8)


def trained(place):
    """A home with everything that a page shows: a store, runs, a grid, a run that was killed and a damaged one."""
    shapes(place)
    ok(f"train --method fedavg {IID} --rounds 4 --eval-every 1 --seeds 0,1")
    made = place_of("train --method fed3r --scheme iid --clients 4 --seeds 0,1")
    ok(
        f"grid --method fedavg,fedprox {IID} --rounds 2 --sweep lr=0.1,0.01 --seeds 0,1 "
        "--validation 0.2"
    )
    for name in ("a" * 16, "d" * 16):
        (made.parent / name).mkdir()
        (made.parent / name / "config.toml").write_bytes((made / "config.toml").read_bytes())
        write_sealed(made.parent / name / WRITTEN, {"kind": FILES}, {"config.toml": ""})
    (made.parent / ("d" * 16) / "result.json").write_text("{}")
    return made


whole = made_once(trained)


def go(page, to):
    page.goto("/".join(page.url.split("/")[:4]) + f"/{to}")
    page_has(page, "!document.querySelector('#pulse').textContent.includes('reading')")


def page_has(page, true):
    """Wait for an expression to hold; ``wait_for_function`` needs eval, which the page's policy refuses."""
    until(lambda: page.evaluate(true) or page.wait_for_timeout(50), true)


def links(page):
    """Where the names in the first column of a table lead."""
    return [a.get_attribute("href") for a in page.locator("main tbody th a").all()]


def test_one_window_shows_a_home_before_while_and_after_a_grid_is_trained(opened, tmp_path):
    """Nothing is loaded again in between: what changes comes by itself."""
    home = Path(os.environ["FEDCACHE_HOME"])
    with served(home) as (address, _), opened(address) as page:
        assert "Nothing is here yet" in page.text_content("main")
        assert serious(page) == []
        shapes(tmp_path)
        page.wait_for_selector("main a[href^='store']")
        words = "--rounds 1500 --eval-every 100 --sweep lr=0.1,0.01 --validation 0.2 --exact"
        grid = start(f"grid --method fedavg {IID} {words}", home=home)
        try:
            until(
                lambda: files_now(home / "runs", "*/checkpoint-*.safetensors"),
                "no run kept a state",
            )
            # at work, and as it is for as long as the page is looked at
            os.killpg(grid.pid, signal.SIGSTOP)
            page.click("text=Grid of fedavg")
            page.wait_for_selector("h1 .running")
            page.wait_for_selector("main > [role=status]:has-text('left')")
            assert "waiting" in page.text_content("table")
            assert 0 < float(page.get_attribute("main > .bar", "data-share")) < 50
            assert serious(page) == []
            page.click("tbody th a")
            page.wait_for_selector("h1 .running")
            assert "of 1,500 rounds" in page.text_content("main")
            assert "fedcache train --config" in page.text_content(".command")
            assert serious(page) == []
            page.go_back()
            os.killpg(grid.pid, signal.SIGCONT)
            assert grid.wait(240) == 0
        finally:
            if grid.poll() is None:
                os.killpg(grid.pid, signal.SIGKILL)
                grid.wait()
        page.wait_for_selector("h1 .finished", timeout=20_000)
        assert page.locator(".heat td.top").count() == 1
        assert "Best by validation accuracy" in page.text_content("main")
        assert serious(page) == []
        go(page, "")
        page.wait_for_selector("text=Best method for the newest setting")


def until(true, otherwise):
    end = time.monotonic() + 120
    while not true():
        assert time.monotonic() < end, otherwise
        time.sleep(0.05)


@pytest.mark.parametrize("size", ["light", "dark", "phone", "phone-dark"])
def test_every_page_fits_is_quiet_and_has_no_serious_finding(opened, whole, own_home, size):
    with served(own_home) as (address, _), opened(address, size) as page:
        theme = page.evaluate("document.documentElement.dataset.theme")
        assert theme == ("dark" if "dark" in size else "light")
        go(page, "grids")
        (grid,) = links(page)
        go(page, "stores")
        (store,) = links(page)
        go(page, "runs?state=finished")
        finished = links(page)
        names = [to.partition("=")[2] for to in finished]
        pages = [
            "",
            "runs",
            "grids",
            "stores",
            grid,
            store,
            store.replace("store", "images"),
            finished[0],
            f"run?name={'a' * 16}",
            f"run?name={'d' * 16}",
            f"compare?runs={','.join(names)}",
        ]
        for to in pages:
            go(page, to)
            page.wait_for_timeout(150)
            fits(page)
            assert serious(page) == [], to
            smallest = page.evaluate(
                "Math.min(...[...document.querySelectorAll('main *')].filter(e => e.textContent.trim())"
                ".map(e => parseFloat(getComputedStyle(e).fontSize)))"
            )
            assert smallest >= 12, to
        go(page, "runs")
        assert {"finished", "stopped", "damaged"} <= set(
            page.locator("tbody .tag").all_text_contents()
        )


def test_all_is_reached_and_done_by_keyboard(opened, whole, own_home):
    with served(own_home) as (address, _), opened(address) as page:
        page.wait_for_selector("main table")
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.textContent") == "Skip to the content"
        page.keyboard.press("Enter")
        page_has(page, "document.activeElement.id === 'main'")
        page.keyboard.press("/")
        page.wait_for_url("**/runs#filter")
        page_has(page, "document.activeElement.id === 'filter'")
        page.keyboard.type("fedavg lr=0.1")
        page_has(page, "document.querySelectorAll('tbody tr').length === 1")
        page.fill("#filter", "")
        page_has(page, "document.querySelectorAll('tbody tr').length > 4")
        assert page.evaluate("document.activeElement.id") == "filter", (
            "what is drawn anew keeps the focus"
        )
        page.press("thead a:has-text('accuracy')", "Enter")
        page_has(page, "document.querySelector('[aria-sort]').textContent.startsWith('accuracy')")
        assert page.get_attribute("th:has-text('accuracy')", "aria-sort") == "descending"
        alike = page.evaluate(  # of one partition, which has no validation rows
            "[...document.querySelectorAll('tbody tr')].filter(t => !t.cells[6].textContent)"
            ".map(t => t.querySelector('input')?.id).filter(Boolean)"
        )
        assert len(alike) == 2
        for box in alike:
            page.press(f"#{box}", "Space")
        assert "2 runs chosen" in page.text_content("#chosen")
        page.reload()
        page.wait_for_selector("#chosen:not([hidden])")
        page.press("#chosen a", "Enter")
        page.wait_for_selector("main h1:has-text('Comparison')")
        page.wait_for_selector(".command code")
        assert page.text_content(".command code").startswith("fedcache compare ")
        page.press("#theme", "Space")
        assert page.evaluate("document.documentElement.dataset.theme") == "dark"
        page.press("#chosen button", "Enter")
        assert not page.is_visible("#chosen")
        # From the first control to the last, none keeps the focus.
        go(page, "runs")
        stops = 0
        page.evaluate("document.activeElement.blur()")
        for _ in range(300):
            page.keyboard.press("Tab")
            if page.evaluate("document.activeElement === document.body"):
                break
            stops += 1
        controls = page.evaluate(
            "document.querySelectorAll('main button, main a, main input, main select').length"
        )
        assert stops >= controls


def test_a_report_is_read_in_the_page_and_thumbnails_come_when_asked_for(opened, whole, own_home):
    with served(own_home) as (address, _), opened(address) as page:
        go(page, "runs?state=finished")
        page.click("text=Choose all 6 finished")
        page.click("#chosen >> text=Report")
        page.wait_for_selector("iframe", timeout=120_000)
        inside = page.frame_locator("iframe")
        inside.locator("h1").wait_for()
        assert inside.locator("table").count() > 0
        go(page, "stores")
        assert page.locator("img").count() == 0
        page.click("main table a")
        page.click("text=Show thumbnails")
        page.wait_for_selector(".pictures img")
        sizes = page.evaluate(
            "[...document.querySelectorAll('.pictures img')].map(i => i.complete && i.naturalWidth)"
        )
        assert len(sizes) == 24
        assert min(sizes) > 0
        assert serious(page) == []
        page.click("text=Later")
        page.wait_for_selector("text=25 to")


def test_an_end_of_the_server_is_said(chromium, own_home):
    with served(own_home) as (address, process):
        context = chromium.new_context()
        page = context.new_page()
        page.goto(address)
        page.wait_for_selector("h1")
        process.send_signal(signal.SIGINT)
        process.wait(20)
        page.wait_for_selector("text=The server does not answer")
        context.close()
