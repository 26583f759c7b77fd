"""Opens reports in a headless Chromium and uses them.

    python3 drive.py REPORT.html OTHER.html            checks both
    python3 drive.py REPORT.html --screenshot FILE.png [--width N] [--height N] [--dark]

`--find` prints the browser that would be used, and fails if there is none.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3] / "server" / "tests" / "page"))

from browser import Browser, Failure, Tab, find

TABLE = "document.querySelector('[data-table=kernels]')"
TIMELINE = "document.querySelector('#timeline-0 canvas')"


def check(holds: object, told: str) -> None:
    """Fails with these words if something does not hold."""
    if not holds:
        raise Failure(told)


def open_report(tab: Tab, report: Path) -> None:
    tab.open(report.as_uri())
    tab.wait("document.documentElement.dataset.ready === 'yes'")


def finish(tab: Tab, report: Path) -> None:
    """Nothing was fetched, and nothing went wrong."""
    foreign = [asked for asked in tab.requested() if asked != report.as_uri() and not asked.startswith("about:")]
    check(not foreign, f"the page asked for {foreign}")
    check(not tab.complaints(), f"the console says {tab.complaints()}")
    check(tab.js("window.hacked") is None, "a name in the data has run")
    tab.close()


def plot(tab: Tab, report: Path) -> None:
    """The roofline has its lines and a dot for each form, inside of the drawing."""
    open_report(tab, report)
    dots = tab.js("[...document.querySelectorAll('#roofline .dot')].map(e => [e.cx.baseVal.value, e.cy.baseVal.value])")
    check(len(dots) == 6, f"there are {len(dots)} dots")
    check(all(60 <= x <= 860 and 0 <= y <= 420 for x, y in dots), f"dots are at {dots}")
    told = tab.js("document.querySelector('#roofline .dot title').textContent")
    check("linear_avx2" in told and "60 % of products of f32" in told, f"a dot says {told!r}")
    names = tab.js("[...document.querySelectorAll('#roofline text.limit')].map(e => e.textContent).join('; ')")
    for part in ("copy 20.0 GB/s", "read 25.0 GB/s", "f32 100 GFLOP/s"):
        check(part in names, f"the limits are {names!r}, without {part!r}")
    hollow = tab.js("getComputedStyle(document.querySelector('.dot.hollow')).fillOpacity")
    check(hollow == "0", f"a hollow dot is filled by {hollow}")
    bar = tab.js("[...document.querySelectorAll('.bar')].map(e => e.getBoundingClientRect().width)")
    check(len(bar) == 2 and min(bar) > 200, f"the bars are {bar} wide")
    finish(tab, report)


def sorting(tab: Tab, report: Path) -> None:
    """A click on a heading sorts, the next one the other way round; by keyboard too."""
    open_report(tab, report)

    def column(number: int) -> list[str]:
        cells = f"[...{TABLE}.tBodies[0].rows].map(row => row.cells[{number}].textContent)"
        return list(tab.js(cells))

    before = column(0)
    check(before[0] == "linear_avx2", f"at first the kernels are {before}")
    tab.click("[data-table=kernels] th:nth-child(1) button")
    check(column(0) == sorted(before), f"by name they are {column(0)}")
    tab.click("[data-table=kernels] th:nth-child(1) button")
    check(column(0) == sorted(before, reverse=True), f"backwards they are {column(0)}")
    tab.click("[data-table=kernels] th:nth-child(3) button")
    check(column(0) == before, f"by time they are {column(0)}")
    check(tab.js(f"{TABLE}.tHead.rows[0].cells[2].ariaSort") == "descending", "the order is not told")
    tab.js(f"{TABLE}.tHead.rows[0].cells[2].querySelector('button').focus()")
    tab.press("Enter")
    check(column(0) == before[::-1], f"by the keyboard they are {column(0)}")
    finish(tab, report)


def timeline(tab: Tab, report: Path) -> None:
    """The timeline is drawn, moves, and names what is under the pointer."""
    open_report(tab, report)
    picture = f"{TIMELINE}.toDataURL().length"
    tab.wait(f"{TIMELINE}.height > 100")
    tab.js(f"{TIMELINE}.scrollIntoView()")
    whole = tab.js(f"{TIMELINE}.toDataURL()")
    check(tab.js(picture) > 2000, "nothing is drawn")
    tab.click("#timeline-0 [data-do=in]")
    check(tab.js(f"{TIMELINE}.toDataURL()") != whole, "it cannot be enlarged")
    tab.click("#timeline-0 [data-do=all]")
    check(tab.js(f"{TIMELINE}.toDataURL()") == whole, "it does not come back")
    tab.js(f"{TIMELINE}.focus()")
    tab.press("+")
    check(tab.js(f"{TIMELINE}.toDataURL()") != whole, "the keyboard does not enlarge it")
    tab.press("Home")
    place = tab.js(f"(r => [r.x, r.y, r.width])({TIMELINE}.getBoundingClientRect())")
    event = {"type": "mouseMoved", "x": place[0] + place[2] / 2, "y": place[1] + 22 + 18 + 5}
    tab.call("Input.dispatchMouseEvent", event)
    told = tab.text("#timeline-0 figcaption")
    check("request 0" in told, f"under the pointer is {told!r}")
    finish(tab, report)


def narrow(tab: Tab, report: Path) -> None:
    """On a phone nothing is wider than the window, and buttons are large enough to touch."""
    open_report(tab, report)
    wide = tab.js("document.documentElement.scrollWidth")
    check(wide <= 360, f"the page is {wide} wide")
    heights = tab.js("[...document.querySelectorAll('.controls button')].map(e => e.offsetHeight)")
    check(min(heights) >= 24, f"buttons are {heights} high")
    finish(tab, report)


def accessible(tab: Tab, report: Path) -> None:
    """Headings come in order, pictures and buttons have names, and text stands out in the dark, too."""
    open_report(tab, report)
    levels = tab.js("[...document.querySelectorAll('h1, h2, h3')].map(e => Number(e.tagName[1]))")
    skips = [pair for pair in itertools.pairwise(levels) if pair[1] > pair[0] + 1]
    check(levels[0] == 1 and levels.count(1) == 1 and not skips, f"the headings are {levels}")
    nodes = tab.call("Accessibility.getFullAXTree")["nodes"]
    unnamed = [
        node["role"]["value"]
        for node in nodes
        if not node["ignored"]
        and node["role"]["value"] in ("button", "image", "region", "columnheader", "link")
        and not node.get("name", {}).get("value")
    ]
    check(not unnamed, f"without a name are {unnamed}")
    colors = tab.js(
        "['--ground', '--text', '--quiet'].map(n => getComputedStyle(document.documentElement).getPropertyValue(n))"
    )

    def light(color: str) -> float:
        digits = color.strip().lstrip("#")
        digits = "".join(2 * c for c in digits) if len(digits) == 3 else digits
        parts = [int(digits[i : i + 2], 16) / 255 for i in (0, 2, 4)]
        parts = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]

    ground, *inks = map(light, colors)
    ratios = [(max(ground, ink) + 0.05) / (min(ground, ink) + 0.05) for ink in inks]
    check(min(ratios) >= 4.5, f"text has contrasts of {ratios}")
    finish(tab, report)


def other(tab: Tab, report: Path) -> None:
    """A page without limits has no plot, but all else."""
    open_report(tab, report)
    check(tab.js("document.querySelector('#roofline')") is None, "there is a plot without limits")
    check("sample_kernel" in tab.text("[data-table=kernels]"), "a kernel is missing")
    finish(tab, report)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("reports", nargs="*", type=Path)
    parser.add_argument("--find", action="store_true")
    parser.add_argument("--screenshot", type=Path)
    parser.add_argument("--width", type=int, default=1280)
    parser.add_argument("--height", type=int, default=900)
    parser.add_argument("--dark", action="store_true")
    asked = parser.parse_args()
    program = find()
    if asked.find or program is None:
        print(program or "no browser was found")
        return 0 if program else 1
    browser = Browser(program)
    dark = {"prefers-color-scheme": "dark"}
    try:
        report = asked.reports[0].resolve()
        if asked.screenshot:
            tab = Tab(browser, asked.width, asked.height, dark if asked.dark else None)
            open_report(tab, report)
            tab.screenshot(asked.screenshot)
            return 0
        for use in (plot, sorting, timeline):
            use(Tab(browser), report)
        narrow(Tab(browser, 360, 740), report)
        accessible(Tab(browser), report)
        accessible(Tab(browser, features=dark), report)
        other(Tab(browser), asked.reports[1].resolve())
    except Failure as failure:
        print(f"report: {failure}")
        return 1
    finally:
        browser.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
