"""Pages of PDF files that the tests write themselves."""

from __future__ import annotations

import ast
import io
import math
import os
import pickle
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from radical_rerank.errors import InputError, MissingExtraError
from radical_rerank.reranking import pages
from radical_rerank.reranking.encoding import is_pdf
from radical_rerank.reranking.pages import Page, close_all, pages_of
from tests.pdfs import Leaf, write_pdf

pytest.importorskip("pypdfium2", reason="an extra")
RED = "1 0 0 rg {} re f"


@pytest.fixture
def report(tmp_path: Path) -> Path:
    path = tmp_path / "report.pdf"
    path.write_bytes(write_pdf([Leaf([f"This is page {number}."]) for number in (1, 2, 3)]))
    return path


def test_what_is_a_pdf() -> None:
    for document in (
        "a.pdf",
        "x/y.PDF",
        Path("b.Pdf"),
        b"%PDF-1.4",
        bytearray(b"%PDF-2.0 x"),
        memoryview(b"%PDF-"),
    ):
        assert is_pdf(document), document
    others: tuple[Any, ...] = (
        "a.png",
        "pdf",
        "data:x.pdf",
        b"",
        b"%PDF",
        b" %PDF-1.4",
        b"PK",
        3,
        None,
        Image.new("L", (1, 1)),
    )
    for document in others:
        assert not is_pdf(document), document


def test_pages_in_order_with_their_text(report: Path) -> None:
    for document in (report, str(report), report.read_bytes(), memoryview(report.read_bytes())):
        found = pages_of(document, name="document 0")
        assert [page.number for page in found] == [1, 2, 3]
        assert [page.text() for page in found] == [f"This is page {number}." for number in (1, 2, 3)]
        expected = "document 0" if isinstance(document, (bytes, memoryview)) else str(report)
        assert {page.source for page in found} == {expected}


def test_text_is_tidy() -> None:
    lines = ["  Grüße (1)  an \\ alle ", "", "zweite\tZeile", "und eine dritte"]
    (page,) = pages_of(write_pdf([Leaf(lines)]), name="x")
    assert page.text() == "Grüße (1) an \\ alle zweite Zeile und eine dritte"
    (page,) = pages_of(write_pdf([Leaf(["A hyphen-", "ated word, a well-known", "one."])]), name="x")
    assert page.text() == "A hyphenated word, a well-known one."
    (empty,) = pages_of(write_pdf([Leaf(draw=RED.format("0 0 9 9"))]), name="x")
    assert empty.text() == ""


def corners(image: Image.Image) -> list[bool]:
    """Which corners are red: upper left, upper right, lower left, lower right."""
    right, bottom = image.width - 3, image.height - 3
    places = [(2, 2), (right, 2), (2, bottom), (right, bottom)]
    return [image.getpixel(place) == (255, 0, 0) for place in places]


@pytest.mark.parametrize(("rotate", "corner"), [(0, 0), (90, 1), (180, 3), (270, 2), (-90, 2), (450, 1)])
def test_pages_are_upright_on_white(rotate: int, corner: int) -> None:
    leaf = Leaf(["upright"], (0, 0, 300, 400), rotate=rotate, draw=RED.format("0 360 40 40"))
    (page,) = pages_of(write_pdf([leaf]), name="x")
    image = page.image(120_000)
    assert image.mode == "RGB"
    assert image.size == ((300, 400) if rotate % 180 == 0 else (400, 300))
    assert [place == corner for place in range(4)] == corners(image)
    assert image.getpixel((image.width // 2, image.height // 2)) == (255, 255, 255)
    assert page.text() == "upright"
    cropped = Leaf(box=(0, 0, 300, 400), crop=(0, 200, 150, 400), draw=RED.format("0 360 40 40"))
    (page,) = pages_of(write_pdf([cropped]), name="x")
    image = page.image(120_000)
    assert image.size == (300, 400)
    assert corners(image) == [True, False, False, False]


def test_a_page_that_is_a_picture() -> None:
    pixels = np.kron(np.random.default_rng(0).integers(0, 255, (6, 4, 3)), np.ones((20, 20, 1))).astype(
        np.uint8
    )
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PDF", quality=95)  # one point per pixel
    (page,) = pages_of(buffer.getvalue(), name="x")
    drawn = page.image(80 * 120)
    assert drawn.size == (80, 120)
    middle = np.asarray(drawn).astype(float)[10::20, 10::20]
    assert abs(middle - pixels[10::20, 10::20]).max() < 8


@given(
    width=st.floats(0.5, 14_000),
    height=st.floats(0.5, 14_000),
    max_pixels=st.one_of(st.integers(1, 400), st.integers(400, 200_000)),
)
def test_a_picture_has_at_most_so_many_pixels(width: float, height: float, max_pixels: int) -> None:
    (page,) = pages_of(write_pdf([Leaf(box=(0, 0, width, height))]), name="x")
    image = page.image(max_pixels)
    assert 1 <= image.width * image.height <= max_pixels
    # As large as it may be: one more pixel on each side is too many, or finer than 300 dots per inch.
    larger = (image.width + 1) * (image.height + 1) > max_pixels
    assert larger or max(image.width / width, image.height / height) > 4.1
    # The ratio of the sides is kept, up to rounding them up to whole pixels.
    scale = min(image.width / width, image.height / height)
    assert image.width - width * scale < 1.01
    assert image.height - height * scale < 1.01


def test_wrong_sizes() -> None:
    flat = Leaf(box=(0, 0, 100, 100), crop=(900, 900, 950, 950))
    page, none = pages_of(write_pdf([Leaf(), flat]), name="document 7")
    with pytest.raises(InputError, match="page 2 of document 7 has no size"):
        none.image(1000)
    for wrong in (0, -5):
        with pytest.raises(InputError, match="max_pixels must be at least 1"):
            page.image(wrong)
    assert math.prod(page.image(1).size) == 1


def test_unusable_files_are_named(tmp_path: Path) -> None:
    whole = write_pdf([Leaf(["x"])])
    for data, reason in (
        (b"", "is not a PDF that can be read"),
        (b"%PDF-1.7", "is not a PDF that can be read"),
        (whole[: len(whole) // 2], "is not a PDF that can be read"),
        (write_pdf([]), "has no pages"),
        (write_pdf([Leaf(["x"])], password="secret"), "is encrypted: it needs a password"),
    ):
        path = tmp_path / "wrong.pdf"
        path.write_bytes(data)
        with pytest.raises(InputError) as caught:
            pages_of(path, name="document 4")
        assert str(caught.value) == f"document 4 ({path}) {reason}"
        with pytest.raises(InputError) as caught:
            pages_of(data, name="document 4")
        assert str(caught.value) == f"document 4 {reason}"
        path.unlink()
    with pytest.raises(InputError, match=r"document 4 \(.*/none\.pdf\) does not exist"):
        pages_of(tmp_path / "none.pdf", name="document 4")
    (tmp_path / "folder.pdf").mkdir()
    with pytest.raises(InputError, match=r"folder\.pdf\) is not a file"):
        pages_of(tmp_path / "folder.pdf", name="document 4")
    with pytest.raises(InputError, match="document 4 has 3 pages, more than the limit of 2"):
        pages_of(write_pdf([Leaf()] * 3), name="document 4", max_pages=2)
    # An owner's password alone does not hinder reading.
    assert len(pages_of(write_pdf([Leaf()], password=""), name="x")) == 1


@given(st.data())
def test_damaged_files_are_input_errors(data: st.DataObject) -> None:
    whole = write_pdf([Leaf(["one"]), Leaf(["two"], picture=Image.new("RGB", (8, 8), "red"))])
    place = data.draw(st.integers(0, len(whole) - 1))
    noise = data.draw(st.binary(min_size=1, max_size=30))
    damaged = whole[:place] + noise + whole[place + len(noise) :]
    message = "document 0"
    try:
        for page in pages_of(damaged, name="document 0"):
            assert isinstance(page.text(), str)
            assert math.prod(page.image(1000).size) <= 1000
    except InputError as error:
        message = str(error)
    assert "document 0" in message


def test_identity(report: Path, tmp_path: Path) -> None:
    first, again = pages_of(report, name="a"), pages_of(str(report), name="b")
    assert first == again
    assert len({*first, *again}) == 3
    copy = tmp_path / "copy.pdf"
    copy.write_bytes(report.read_bytes())
    others = pages_of(copy, name="a")
    assert not set(first) & set(others)
    data = report.read_bytes()
    assert pages_of(data, name="a") == pages_of(data, name="b")
    # The key is of the content.
    keys = [page.key() for page in first]
    assert len(set(keys)) == 3
    assert keys == [page.key() for page in others] == [page.key() for page in pages_of(data, name="c")]
    other = write_pdf([Leaf(["other"]), Leaf(), Leaf()])
    assert not set(keys) & {page.key() for page in pages_of(other, name="a")}
    moved = pickle.loads(pickle.dumps(first[1]))
    assert moved == first[1]
    assert moved.text() == "This is page 2."
    with pytest.raises(AttributeError):
        first[0].number = 2  # type: ignore[misc]


def test_a_file_that_changes(report: Path) -> None:
    first = pages_of(report, name="document 1")
    assert first[0].text() == "This is page 1."
    report.write_bytes(write_pdf([Leaf(["Other."])]))
    os.utime(report, (5, 5))
    for use in (Page.text, Page.key, lambda page: page.image(100)):
        with pytest.raises(InputError, match=r"document 1 \(.*\) has changed since its pages were listed"):
            use(first[0])
    assert [page.text() for page in pages_of(report, name="x")] == ["Other."]
    report.unlink()
    with pytest.raises(InputError, match="cannot be read: No such file"):
        first[0].text()


def test_opening_draws_nothing(report: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import pypdfium2

    def used(*_: object) -> None:
        raise AssertionError("a page was loaded")

    monkeypatch.setattr(pypdfium2.PdfDocument, "get_page", used)
    assert len(pages_of(report, name="x")) == 3


def test_few_files_stay_open(tmp_path: Path) -> None:
    close_all()
    found = []
    for number in range(pages.OPEN_FILES + 3):
        path = tmp_path / f"{number}.pdf"
        path.write_bytes(write_pdf([Leaf([str(number)])]))
        found += pages_of(path, name="x")
    assert len(pages._open) == pages.OPEN_FILES
    assert [page.text() for page in found] == [str(number) for number in range(len(found))]
    held = {os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if _is_link(fd)}
    assert sum(name.endswith(".pdf") for name in held) <= pages.OPEN_FILES
    close_all()
    assert not pages._open


def _is_link(fd: str) -> bool:
    return os.path.lexists(f"/proc/self/fd/{fd}")


def test_threads_take_turns(tmp_path: Path) -> None:
    found = []
    for number in range(6):
        path = tmp_path / f"{number}.pdf"
        path.write_bytes(write_pdf([Leaf([f"{number} {place}"]) for place in range(5)]))
        found += [(page, f"{number} {place}") for place, page in enumerate(pages_of(path, name="x"))]
    wrong: list[object] = []

    def read(own: list[tuple[Page, str]]) -> None:
        try:
            for page, text in own:
                if page.text() != text or page.image(5000).width < 10:
                    wrong.append(page)
        except Exception as error:
            wrong.append(error)

    threads = [
        threading.Thread(target=read, args=(found[start:] + found[:start],)) for start in range(0, 30, 4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pypdfium2", None)
    pages._library.cache_clear()
    close_all()
    with pytest.raises(MissingExtraError, match=r"this needs pypdfium2: pip install 'radical-rerank\[pdf\]'"):
        pages_of(write_pdf([Leaf()]), name="x")


def test_torch_is_not_imported() -> None:
    tree = ast.parse(Path(pages.__file__).read_text(encoding="utf-8"))
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {name for name in names if name.startswith("radical_rerank")} == {"radical_rerank.errors"}
    assert "torch" not in names


WALK = """
import resource, sys
from radical_rerank.reranking.pages import pages_of

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()

before, most = resident(), 0
found = pages_of(sys.argv[1], name="x")
opened = resident() - before
for page in found:
    image = page.image(400_000)
    assert 390_000 < image.width * image.height <= 400_000 and page.text() == f"Page {page.number}"
    most = max(most, resident() - before)
print(len(found), opened, most)
"""


@pytest.mark.slow
def test_a_long_file_takes_little_memory(tmp_path: Path) -> None:
    """300 pages with a large picture each, one after the other, add less than 300 MB."""
    rng = np.random.default_rng(0)
    noise = [Image.fromarray(rng.integers(0, 255, (1100, 800, 3), dtype=np.uint8)) for _ in range(3)]
    leaves = [Leaf([f"Page {n + 1}"], picture=noise[n % 3]) for n in range(300)]
    path = tmp_path / "long.pdf"
    path.write_bytes(write_pdf(leaves))
    assert path.stat().st_size > 300_000_000
    done = subprocess.run([sys.executable, "-c", WALK, str(path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""  # files are closed before the library ends
    count, opened, most = map(int, done.stdout.split())
    assert count == 300
    assert opened < 50_000_000
    assert most < 300_000_000
