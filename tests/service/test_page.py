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

from radical_rerank import Reranker
from radical_rerank.backbones import Backbone
from radical_rerank.lab.bench.service import listening
from tests.cases import draw_list, keep_profile
from tests.pdfs import Leaf, write_pdf

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


def test_a_model_without_texts_has_no_captions(page: Any) -> None:
    expect(page.locator("#note")).to_contain_text("reads images alone")
    page.get_by_role("button", name="Sample scenes").click()
    expect(page.locator("#pictures img")).to_have_count(12)
    expect(page.get_by_role("textbox", name="Caption of scene 1", exact=True)).to_be_hidden()
    rank_sample(page)
    assert page.locator("#pruned .text").count() == 0


# A model that reads texts.


@pytest.fixture(scope="module")
def reading_url(reader: Backbone, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RADICAL_CACHE", str(tmp_path_factory.mktemp("cache")))
        keep_profile(reader)
        with listening(reader, patience=100.0, max_text_tokens=6) as url:
            yield url


@pytest.mark.parametrize("page", [(1280, 900), (390, 800)], indirect=True)
def test_a_caption_is_ranked_with_its_image(
    page: Any, reading_url: str, reader: Backbone, tmp_path: Path
) -> None:
    page.goto(reading_url)
    expect(page.locator("#note")).to_contain_text("write or paste a caption")
    _, shown = draw_list(1, 3)
    paths = [tmp_path / f"{number}.png" for number in range(3)]
    for path, picture in zip(paths, shown, strict=True):
        picture.save(path)
    page.locator("#files").set_input_files([str(path) for path in paths])
    expect(page.locator("#pictures img")).to_have_count(3)
    captions = ["red star", "", "small blue circle and a large green square"]
    for number in (0, 2):
        page.get_by_role("textbox", name=f"Caption of {number}.png").fill(captions[number])
    page.locator("#query").fill("red circle")
    with page.expect_response(
        lambda answer: answer.request.post_data and '"keep"' in answer.request.post_data
    ) as got:
        page.get_by_role("button", name="Rank", exact=True).click()
    page.wait_for_selector("#results:not([hidden])", timeout=30_000)
    keep_profile(reader)
    documents = [{"image": p, "text": c} if c else p for p, c in zip(shown, captions, strict=True)]
    expected = Reranker(reader, "radical", keep=0.2, max_text_tokens=6).rank("red circle", documents)
    results = got.value.json()["results"]
    assert [result["index"] for result in results] == expected.order
    scores = [result["relevance_score"] for result in results]
    assert scores == pytest.approx([result.probability for result in expected], abs=1e-4)
    expect(page.locator("#status")).to_contain_text("captions cut to the model's limit: 1")
    texts = page.locator("#pruned li").all_inner_texts()
    assert [captions[i] in text for i, text in zip(expected.order, texts, strict=True)] == [True] * 3
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe is for tests").Axe()
    report = axe.run(page)
    assert report.violations_count == 0, report.generate_report()
    page.get_by_role("textbox", name="Caption of 1.png").fill("blue")
    expect(page.locator("#results")).to_be_hidden()  # it shows the ranking of other documents


def test_the_pages_of_a_pdf_become_images(page: Any, reading_url: str, tmp_path: Path) -> None:
    pytest.importorskip("pypdfium2", reason="an extra")
    good, bad = tmp_path / "report.pdf", tmp_path / "broken.pdf"
    good.write_bytes(
        write_pdf([Leaf(lines=(words,), box=(0, 0, 300, 200)) for words in ("red star", "blue circle")])
    )
    bad.write_bytes(b"%PDF-1.7" + bytes(100))
    page.locator("#files").set_input_files([str(good), str(bad)])  # a model without texts
    expect(page.locator("#pictures img")).to_have_count(2)
    expect(page.locator("#status.error")).to_contain_text(
        "broken.pdf: document 0 is not a PDF that can be read"
    )
    page.goto(reading_url)
    page.wait_for_selector("#plot svg")
    page.locator("#files").set_input_files([str(good)])
    expect(page.locator("#pictures img")).to_have_count(2)
    assert page.get_by_role("textbox", name="Caption of report.pdf, page 2").input_value() == "blue circle"
    page.locator("#query").fill("red circle")
    page.get_by_role("button", name="Rank", exact=True).click()
    page.wait_for_selector("#results:not([hidden])", timeout=30_000)
    assert page.locator("#pruned .text").count() == 2


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
