"""Opens the page that `warpsmith evidence --report` wrote in a headless Chromium, as its readers would.

`drive.py REPORT.html`; `--find` prints the browser that would be used, and fails if there is none.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[3] / "server" / "tests" / "page"))

from browser import Browser, Failure, Tab, find

ROWS = "[...document.querySelectorAll('table.sortable')[0].tBodies[0].rows]"
# The contrast of text with what is behind it; WCAG asks for 4.5.
CONTRAST = """(() => {
  const light = c => { const [r, g, b] = c.match(/[\\d.]+/g).map(x => x / 255)
    .map(x => x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4); return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
  const ground = light(getComputedStyle(document.body).backgroundColor);
  const poor = new Set();
  for (const e of document.querySelectorAll('h1, p, caption, th button, td, a, button.plain')) {
    const ink = light(getComputedStyle(e).color);
    const ratio = (Math.max(ink, ground) + 0.05) / (Math.min(ink, ground) + 0.05);
    if (ratio < 4.5) poor.add(`${e.tagName}.${e.className} ${ratio.toFixed(1)}`);
  }
  return [...poor];
})()"""


def check(holds: Any, told: str) -> None:
    """Fails with these words if something does not hold."""
    if not holds:
        raise Failure(told)


def finish(tab: Tab, url: str) -> None:
    """Nothing was fetched from elsewhere, and the console is silent."""
    foreign = [asked for asked in tab.requested() if not asked.startswith((url, "about:", "data:", "blob:"))]
    check(not foreign, f"the page asked for {foreign}")
    check(not tab.complaints(), f"the console says {tab.complaints()}")
    tab.close()


def sorting(tab: Tab, url: str) -> None:
    """A heading sorts its table by number, by keyboard too, and says so; typing leaves the rows that match."""
    tab.open(url)
    tab.js("document.querySelectorAll('table.sortable')[0].querySelectorAll('th button')[1].focus()")
    values = f"{ROWS}.map(row => row.cells[1].dataset.v).filter(v => v !== '').map(Number)"
    for key, order in (("Enter", 1), (" ", -1)):
        tab.press(key)
        time.sleep(0.05)
        seen = tab.js(values)
        check(len(seen) > 20 and seen == sorted(seen, reverse=order < 0), f"after {key!r} the order is {seen}")
    state = tab.js("document.querySelectorAll('table.sortable')[0].querySelectorAll('th')[1].ariaSort")
    check(state == "descending", f"a screen reader is told {state}")
    check("descending" in tab.text("#announce"), f"it is announced as {tab.text('#announce')!r}")
    missing = tab.js(f"{ROWS}.at(-1).cells[1].dataset.v")
    check(missing == "", f"rows without a number are not last, but {missing}")
    tab.type("#filter", "softmax")
    names = tab.js(f"{ROWS}.filter(row => !row.hidden).map(row => row.cells[0].textContent)")
    check(names and all("softmax" in name for name in names), f"softmax leaves {names}")
    finish(tab, url)


def plots(tab: Tab, url: str) -> None:
    """Every dot of the rooflines is in the plot and has a name, and the plot has one for a screen reader."""
    tab.open(url)
    outside = tab.js("""[...document.querySelectorAll('svg circle')].filter(c => { const box = c.ownerSVGElement.viewBox
        .baseVal; return !(c.cx.baseVal.value >= 0 && c.cx.baseVal.value <= box.width && c.cy.baseVal.value >= 0
        && c.cy.baseVal.value <= box.height && c.querySelector('title').textContent); }).length""")
    check(outside == 0, f"{outside} dots are outside of their plot or nameless")
    check(tab.js("document.querySelectorAll('svg circle').length") > 300, "there are too few dots")
    check(tab.js("[...document.querySelectorAll('svg')].every(e => e.role && e.ariaLabel)"), "a plot has no name")
    finish(tab, url)


def accessible(tab: Tab, url: str) -> None:
    """Headings go down by one, tables have captions, and the keyboard reaches what scrolls."""
    tab.open(url)
    levels = tab.js("[...document.querySelectorAll('h1, h2, h3')].map(e => Number(e.tagName[1]))")
    jumps = [pair for pair in itertools.pairwise(levels) if pair[1] > pair[0] + 1]
    check(levels[0] == 1 and levels.count(1) == 1 and not jumps, f"the headings are {levels}")
    check(tab.js("[...document.querySelectorAll('table')].every(e => e.caption && e.tHead)"), "a table has no caption")
    names = "e => e.role === 'region' && e.tabIndex === 0 && e.ariaLabel"
    check(tab.js(f"[...document.querySelectorAll('.scroll')].every({names})"), "a region that scrolls has no name")
    tab.press("Tab")
    check(tab.js("document.activeElement.className") == "skip", "the first stop is not the way to the content")
    check(not tab.js(CONTRAST), f"too little contrast: {tab.js(CONTRAST)}")
    finish(tab, url)


def narrow(tab: Tab, url: str) -> None:
    """Only tables and plots scroll sideways on a phone."""
    tab.open(url)
    sizes = tab.js("[document.documentElement.scrollWidth, document.documentElement.clientWidth]")
    check(sizes[0] <= sizes[1], f"the page is {sizes[0]} wide in a window of {sizes[1]}")
    finish(tab, url)


def dark(tab: Tab, url: str) -> None:
    """Dark is as readable as light."""
    tab.open(url)
    check(tab.js("getComputedStyle(document.body).backgroundColor") == "rgb(13, 17, 23)", "it is not dark")
    check(not tab.js(CONTRAST), f"too little contrast: {tab.js(CONTRAST)}")
    finish(tab, url)


def main() -> int:
    """Runs all checks. 0 if they hold."""
    program = find()
    if sys.argv[1:] == ["--find"]:
        print(program or "there is no browser")
        return 0 if program else 1
    if program is None or len(sys.argv) != 2:
        print("usage: drive.py REPORT.html, where there is a browser")
        return 2
    url = Path(sys.argv[1]).resolve().as_uri()
    plan: list[tuple[Callable[[Tab, str], None], Any]] = [
        (sorting, {}),
        (plots, {}),
        (accessible, {}),
        (narrow, {"width": 360, "height": 740}),
        (dark, {"features": {"prefers-color-scheme": "dark"}}),
    ]
    browser, failed = Browser(program), 0
    try:
        for test, settings in plan:
            began = time.monotonic()
            try:
                test(Tab(browser, **settings), url)
                print(f"report: {test.__name__} ok ({time.monotonic() - began:.1f} s)", flush=True)
            except Failure as failure:
                failed += 1
                print(f"report: {test.__name__} FAILED: {failure}", flush=True)
    finally:
        browser.close()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
