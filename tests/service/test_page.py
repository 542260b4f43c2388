"""The page in a real browser."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the service is an extra")
pytest.importorskip("playwright.sync_api", reason="playwright is for tests")

from playwright.sync_api import expect, sync_playwright

from radical_rerank.backbones import Backbone
from radical_rerank.lab.bench.service import listening
from tests.cases import draw_list

FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip

pytestmark = pytest.mark.slow


def chromium() -> str | None:
    """The system's browser, or Playwright's own. `make browser` installs one of them."""
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if path := shutil.which(name):
            return path
    with sync_playwright() as driver:
        own = driver.chromium.executable_path
    return own if os.path.exists(own) else None


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    path = chromium()
    if path is None:
        message = "Chromium is not installed: run `make browser`"
        if os.environ.get("CI") == "true":
            pytest.fail(message)
        pytest.skip(message)
    with sync_playwright() as driver:
        # Playwright gives each launch an empty profile of its own.
        browser = driver.chromium.launch(executable_path=path, headless=True, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with listening(Backbone.from_pretrained("scenes"), patience=100.0) as url:
        yield url


@pytest.fixture(params=[(1280, 900), (390, 800)], ids=["desk", "phone"])
def page(browser: Any, url: str, request: pytest.FixtureRequest) -> Iterator[Any]:
    width, height = request.param
    page = browser.new_page(viewport={"width": width, "height": height})
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", lambda line: problems.append(line.text) if line.type == "error" else None)
    page.goto(url)
    yield page
    page.close()
    assert not [line for line in problems if "422" not in line]


def rank_sample(page: Any) -> None:
    page.get_by_role("button", name="Sample scenes").click()
    expect(page.locator("#pictures img")).to_have_count(12)
    assert page.locator("#query").input_value()
    page.get_by_role("button", name="Rank", exact=True).click()
    page.wait_for_selector("#results:not([hidden])", timeout=30_000)


def test_rank_the_sample_gallery_and_move_through_the_stages(page: Any) -> None:
    rank_sample(page)
    expect(page.locator("#status")).to_contain_text("12 images ranked")
    assert page.locator("#pruned canvas").count() == 12
    assert page.locator("#dense canvas").count() == 12
    assert "%" in page.locator("#facts").inner_text()

    def alive() -> list[str]:
        return page.eval_on_selector_all("#pruned canvas", "all => all.map(c => c.dataset.alive)")

    def pixels() -> str:
        return page.eval_on_selector("#pruned canvas", "c => c.toDataURL()")

    last, shown = alive(), pixels()
    assert all(value != "all" for value in last)
    page.locator("#stage").focus()
    page.keyboard.press("Home")
    assert alive() == ["all"] * 12
    assert page.locator("#stage").get_attribute("aria-valuetext") == "all tokens"
    assert pixels() != shown
    page.keyboard.press("ArrowRight")
    first = [int(value) for value in alive()]
    assert sum(first) > sum(int(value) for value in last)
    # No horizontal scrolling.
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    assert page.locator("#plot svg").count() == 1


def test_a_bad_file_and_a_single_image_show_an_error(page: Any, tmp_path: Path) -> None:
    bad = tmp_path / "bad.png"
    bad.write_bytes(b"no picture")
    page.locator("#files").set_input_files(str(bad))
    expect(page.locator("#status")).to_contain_text("bad.png")
    assert page.locator("#status.error").count() == 1
    page.locator("#query").fill("a red star")
    page.get_by_role("button", name="Rank", exact=True).click()
    expect(page.locator("#status")).to_contain_text("two images")


def test_every_bad_file_of_several_shows_an_error(page: Any, tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("first.png", "good.png", "second.png", "last.png")]
    for path in paths:
        path.write_bytes(b"no picture")
    for path in (paths[1], paths[3]):
        draw_list(1, 1)[1][0].save(path)
    page.locator("#files").set_input_files([str(path) for path in paths])
    expect(page.locator("#pictures img")).to_have_count(2)
    expect(page.locator("#status.error")).to_have_text(
        "2 images; first.png is not an image; second.png is not an image"
    )


def test_an_error_of_the_service_is_shown(page: Any) -> None:
    page.get_by_role("button", name="Sample scenes").click()
    expect(page.locator("#pictures img")).to_have_count(12)
    page.evaluate("document.getElementById('query').required = false")
    page.locator("#query").fill("")
    page.get_by_role("button", name="Rank", exact=True).click()
    page.wait_for_selector("#status.error")
    assert "query" in page.locator("#status").inner_text()


def test_images_are_removed_one_by_one(page: Any) -> None:
    rank_sample(page)
    page.get_by_role("button", name="Remove scene 3", exact=True).focus()
    page.keyboard.press("Enter")
    expect(page.locator("#pictures img")).to_have_count(11)
    expect(page.locator("#results")).to_be_hidden()
    expect(page.get_by_role("button", name="Remove scene 4", exact=True)).to_be_focused()
    page.get_by_role("button", name="Rank", exact=True).click()
    expect(page.locator("#pruned canvas")).to_have_count(11)


def test_accessibility(page: Any) -> None:
    """axe: names, roles, contrast, landmarks, before and after a ranking."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe is for tests").Axe()
    for prepare in (lambda page: page.wait_for_selector("#plot svg"), rank_sample):
        prepare(page)
        report = axe.run(page)
        assert report.violations_count == 0, report.generate_report()


def test_a_service_with_keys_asks_for_one(browser: Any) -> None:
    with listening(Backbone.from_pretrained("scenes"), api_keys=["sesame"]) as url:
        page = browser.new_page()
        page.goto(url)
        page.get_by_role("button", name="Sample scenes").click()
        expect(page.locator("#pictures img")).to_have_count(12)
        page.get_by_role("button", name="Rank", exact=True).click()
        expect(page.locator("#status.error")).to_contain_text("key")
        page.get_by_label("API key").fill("sesame")
        page.get_by_role("button", name="Rank", exact=True).click()
        page.wait_for_selector("#results:not([hidden])", timeout=30_000)
        page.close()
