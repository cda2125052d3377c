"""The timeline's page in a real browser: where its bars are, what hovering shows, and that it asks for nothing."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from selenium.webdriver import Chrome, ChromeOptions, ChromeService
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement
from test_cli_timeline import a_failed_task, a_good_task

from nvflare_torchrun_plugin.cli.timeline_page import page
from nvflare_torchrun_plugin.timeline import read

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (shutil.which("chromium") and shutil.which("chromedriver")),
        reason="needs Debian's chromium and chromium-driver",
    ),
]


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Chrome]:
    options = ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    for switch in (
        "headless",
        "no-sandbox",
        "disable-gpu",
        "disable-quic",
        "no-first-run",
        "disable-background-networking",
        "disable-component-update",
        "disable-sync",
        "window-size=1400,900",
        f"user-data-dir={tmp_path / 'browser'}",
    ):
        options.add_argument(f"--{switch}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    browser = Chrome(options=options, service=ChromeService(shutil.which("chromedriver")))
    yield browser
    browser.quit()


def color(browser: Chrome, element: WebElement, which: str) -> str:
    return str(browser.execute_script(f"return getComputedStyle(arguments[0]).{which}", element))


def contrast(one: str, other: str) -> float:
    """By WCAG's formula, of two rgb() values."""

    def luminance(color: str) -> float:
        parts = [int(part) / 255 for part in color[color.index("(") + 1 : -1].split(",")[:3]]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    darker, lighter = sorted((luminance(one), luminance(other)))
    return (lighter + 0.05) / (darker + 0.05)


def test_bars_details_and_colors(tmp_path: Path, browser: Chrome) -> None:
    a_good_task(tmp_path / "good")
    a_failed_task(tmp_path / "failed")
    file = tmp_path / "timeline.html"
    file.write_text(page(read(tmp_path), "a run"), encoding="utf-8")
    browser.get(file.as_uri())
    assert browser.title == "Where the time went: a run"

    rows = browser.find_elements(By.CSS_SELECTOR, ".bars tbody tr")
    assert len(rows) == 4
    failing = next(row for row in rows if "✗ rank 3: exit code 1" in row.text)
    track = failing.find_element(By.CLASS_NAME, "track").rect
    segments = failing.find_elements(By.CLASS_NAME, "seg")
    words = [segment.get_attribute("aria-label") or "" for segment in segments]
    assert [word.split(",")[0] for word in words] == [
        "launching 2.0 s",
        "joining 4.0 s",
        "importing 2.0 s",
        "receiving 1.0 s",
        "training 3.0 s",
        "cleaning up 2.0 s",
    ]
    # One axis for all: 22 s, the end of the longer task.
    for segment, begin, seconds in zip(segments, (0, 2, 6, 8, 9, 12), (2, 4, 2, 1, 3, 2), strict=True):
        assert segment.rect["x"] - track["x"] == pytest.approx(track["width"] * begin / 22, abs=1.5)
        assert segment.rect["width"] == pytest.approx(track["width"] * seconds / 22, abs=1.5)

    red = failing.find_element(By.CSS_SELECTOR, ".seg.failed")
    detail = red.find_element(By.TAG_NAME, "b")
    assert not detail.is_displayed()
    ActionChains(browser).move_to_element(red).perform()
    assert detail.is_displayed()
    assert "ended in the failure: rank 3: exit code 1" in detail.text
    ActionChains(browser).move_to_element(browser.find_element(By.TAG_NAME, "h1")).perform()
    assert not detail.is_displayed()
    browser.execute_script("arguments[0].focus()", red)
    assert detail.is_displayed()

    body, mark = browser.find_element(By.TAG_NAME, "body"), failing.find_element(By.CSS_SELECTOR, ".mark.bad")
    papers = []
    for scheme in ("light", "dark"):
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
        papers.append(color(browser, body, "backgroundColor"))
        assert contrast(color(browser, body, "color"), papers[-1]) >= 7
        assert contrast(color(browser, mark, "color"), color(browser, mark, "backgroundColor")) >= 4.5
        for segment in segments:
            assert contrast(color(browser, segment, "backgroundColor"), papers[-1]) >= 1.4
        others = [color(browser, segment, "backgroundColor") for segment in segments if segment.id != red.id]
        assert color(browser, red, "backgroundColor") not in others
    assert papers == ["rgb(255, 255, 255)", "rgb(22, 22, 22)"]

    asked = browser.execute_script("return performance.getEntriesByType('resource').map(entry => entry.name)")
    assert asked == []
    assert browser.get_log("browser") == []  # type: ignore[no-untyped-call]
