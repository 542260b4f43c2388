"""The index of a folder against a slow version that embeds everything anew."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pypdfium2
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from radical_rerank.errors import InputError
from radical_rerank.reranking.pages import pages_of
from radical_rerank.retrieval import FolderIndex, Found, folder
from radical_rerank.retrieval.folder import SUFFIXES
from tests.pdfs import Leaf, write_pdf

COLOURS = {"red": (200, 3, 9), "green": (1, 180, 9), "blue": (5, 3, 220), "grey": (90, 90, 90)}


class Colours:
    """Embeds a picture as the colour of its first pixel: whole numbers, so that sums are exact.

    Ends with `end` when it has embedded `stop` pictures.
    """

    def __init__(self, name: str = "colours", fingerprint: str = "0", stop: int | None = None) -> None:
        self.name, self.fingerprint, self.stop = name, fingerprint, stop
        self.calls: list[int] = []

    def end(self) -> None:
        raise KeyboardInterrupt

    def embed_images(self, images: Sequence[Any]) -> torch.Tensor:
        if self.stop is not None and self.embedded + len(images) > self.stop:
            self.end()
        if any(image.width > 100 * image.height for image in images):
            raise ValueError("the picture is too wide")
        self.calls.append(len(images))
        return torch.tensor([image.getpixel((0, 0)) for image in images], dtype=torch.float32)

    def embed_queries(self, queries: Sequence[str]) -> torch.Tensor:
        return torch.tensor([COLOURS[query] for query in queries], dtype=torch.float32)

    @property
    def embedded(self) -> int:
        return sum(self.calls)


def page(colour: str) -> Leaf:
    """A page of one colour."""
    red, green, blue = (part / 255 for part in COLOURS[colour])
    return Leaf(draw=f"{red} {green} {blue} rg -9 -9 999 999 re f", box=(0, 0, 50, 70))


class Clock:
    """Gives every written file a time of change of its own, long ago."""

    now = 1_600_000_000

    def write(self, path: Path, colour: str | None, size: tuple[int, int] = (4, 3)) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        if colour is None:
            path.write_bytes(b"no picture")
        elif path.suffix == ".pdf":
            flat = Leaf(box=(0, 0, 9, 9), crop=(50, 50, 60, 60))
            path.write_bytes(write_pdf([page(colour), flat, page("grey")]))
        else:
            Image.new("RGB", size, COLOURS[colour]).save(path, "BMP")  # all of one size in bytes
        self.now += 1
        os.utime(path, (self.now, self.now))
        return path


def slow_search(root: Path, query: str, k: int) -> list[tuple[str, int | None, float]]:
    """Embed every picture alone, and sort."""
    found = []
    for path in root.rglob("*"):
        inner = path.relative_to(root)
        hidden = any(part.startswith(".") for part in inner.parts)
        if hidden or not path.is_file() or path.suffix.lower() not in (*SUFFIXES, ".pdf"):
            continue
        for number, image in slow_pictures(path):
            score = float(Colours().embed_images([image])[0] @ Colours().embed_queries([query])[0])
            found.append((inner.as_posix(), number, score))
    return sorted(found, key=lambda each: (-each[2], each[0], each[1] or 0))[:k]


def slow_pictures(path: Path) -> Iterator[tuple[int | None, Image.Image]]:
    """Yield the pictures of a file that can be read, with the numbers of pages."""
    if path.suffix != ".pdf":
        with suppress(OSError):
            yield None, Image.open(path).convert("RGB")
        return
    with suppress(pypdfium2.PdfiumError), pypdfium2.PdfDocument(path) as pdf:
        for number, each in enumerate(pdf, start=1):
            if each.get_width():
                yield number, each.render(scale=1).to_pil()


def listed(root: Path, found: Sequence[Found]) -> list[tuple[str, int | None, float]]:
    return [(each.path.relative_to(root).as_posix(), each.page, each.score) for each in found]


NAMES = ["a.png", "b.JPG", "sub/c.webp", "d.pdf", ".hidden.png", ".dot/a.png", "notes.txt"]
OPERATIONS = st.lists(
    st.tuples(
        st.one_of(
            st.tuples(st.just("write"), st.sampled_from(NAMES), st.sampled_from([*COLOURS, None])),
            st.tuples(st.just("rename"), st.sampled_from(NAMES), st.sampled_from(NAMES)),
            st.tuples(st.just("remove"), st.sampled_from(NAMES), st.none()),
            st.tuples(st.just("new process"), st.none(), st.none()),
        ),
        st.sampled_from([None, 0, 1, 99, 99]),  # after how many pictures the update is stopped
    ),
    min_size=3,
    max_size=25,
)


@pytest.mark.slow
@settings(max_examples=200)
@given(operations=OPERATIONS, query=st.sampled_from(sorted(COLOURS)))
def test_after_any_changes_it_finds_what_the_slow_version_finds(
    operations: list[tuple[tuple[str, Any, Any], int | None]],
    query: str,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    root, cache = tmp_path_factory.mktemp("gallery"), tmp_path_factory.mktemp("cache")
    clock, embedder = Clock(), Colours()
    index = FolderIndex(root, embedder, cache=cache)
    for (what, first, second), stop in operations:
        if what == "write":
            clock.write(root / first, second)
        elif what == "rename" and (root / first).exists():
            (root / second).parent.mkdir(parents=True, exist_ok=True)
            os.replace(root / first, root / second)
        elif what == "remove":
            (root / first).unlink(missing_ok=True)
        elif what == "new process":
            index = FolderIndex(root, embedder, cache=cache)
        if stop is not None:
            embedder.stop, embedder.calls = stop, []
            with suppress(KeyboardInterrupt), pytest.MonkeyPatch.context() as small:
                small.setattr(folder, "BATCH", 1)
                index.update()
    embedder.stop = None
    index.update()
    expected = slow_search(root, query, 4)
    assert len(index) == len(slow_search(root, query, 99))
    for again in (index, FolderIndex(root, Colours(), cache=cache)):
        if expected:
            assert listed(root, again.search(query, 4)) == expected
        else:
            with pytest.raises(InputError, match="has no pictures that can be read"):
                again.search(query, 4)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """40 pictures in two folders."""
    clock = Clock()
    for number in range(40):
        colour = list(COLOURS)[number % len(COLOURS)]
        clock.write(tmp_path / "gallery" / str(number % 2) / f"{number}.png", colour)
    return tmp_path / "gallery"


def test_only_what_changed_is_embedded_again(root: Path) -> None:
    first = FolderIndex(root, Colours()).update()
    assert (first.new, first.changed, first.removed, first.embedded) == (40, 0, 0, 40)
    embedder = Colours()
    assert not any(vars(FolderIndex(root, embedder).update()).values())
    clock = Clock()
    clock.write(root / "0" / "2.png", "red")  # the same size in bytes
    clock.write(root / "new.png", "red")
    (root / "1" / "3.png").unlink()
    (root / "0" / "0.png").rename(root / "0" / "zero.png")
    update = FolderIndex(root, embedder).update()
    assert (update.new, update.changed, update.removed, update.embedded) == (2, 1, 2, 3)
    assert embedder.embedded == 3
    index = FolderIndex(root, embedder)
    index.clear()
    assert index.update().embedded == 40


def test_later_searches_open_no_picture(root: Path) -> None:
    FolderIndex(root, Colours()).update()
    for path in root.rglob("*.png"):  # the contents go, the size and the time of change stay
        known = path.stat()
        path.write_bytes(bytes(known.st_size))
        os.utime(path, ns=(known.st_atime_ns, known.st_mtime_ns))
    index = FolderIndex(root, Colours())
    assert index.update().unreadable == ()
    saved = index.path.stat().st_mtime_ns
    assert [each.path.name for each in index.search("red", 2)] == ["0.png", "12.png"]
    assert index.path.stat().st_mtime_ns == saved


def test_what_was_embedded_before_an_error_is_kept(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder, "BATCH", 8)
    with pytest.raises(KeyboardInterrupt):
        FolderIndex(root, Colours(stop=19)).update()
    rest = Colours()
    update = FolderIndex(root, rest).update()
    assert rest.embedded == update.embedded == 40 - 16
    assert listed(root, FolderIndex(root, rest).search("red", 7)) == slow_search(root, "red", 7)


def test_what_was_saved_before_a_kill_is_kept(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder, "BATCH", 8)
    monkeypatch.setattr(folder, "SAVED_EVERY", -1.0)
    child = os.fork()
    if child == 0:
        embedder = Colours(stop=19)
        embedder.end = lambda: os._exit(9)  # type: ignore[method-assign]
        try:
            FolderIndex(root, embedder).update()
        finally:
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    rest = Colours()
    FolderIndex(root, rest).update()
    assert rest.embedded == 40 - 16


def test_embedders_folders_and_weights_do_not_mix(root: Path, tmp_path: Path) -> None:
    other = tmp_path / "other" / "gallery"
    Clock().write(other / "0.png", "blue")
    indexes = [
        FolderIndex(root, Colours()),
        FolderIndex(root, Colours("others")),
        FolderIndex(root, Colours(fingerprint="1")),
        FolderIndex(other, Colours()),
    ]
    for index in indexes:
        index.update()
    assert len({index.path for index in indexes}) == 4
    assert [len(index) for index in indexes] == [40, 40, 40, 1]
    link = tmp_path / "link"
    link.symlink_to(root)
    assert FolderIndex(link, Colours()).path == indexes[0].path
    # A file under another's name is not taken for one's own.
    os.replace(indexes[1].path, indexes[0].path)
    assert len(FolderIndex(root, Colours())) == 0


@given(damage=st.data())
def test_a_damaged_index_is_made_anew(
    damage: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    root = tmp_path_factory.mktemp("gallery")
    for number, colour in enumerate(COLOURS):
        Clock().write(root / f"{number}.png", colour)
    index = FolderIndex(root, Colours(), cache=root / ".cache")
    index.update()
    good = index.path.read_bytes()
    cut = damage.draw(st.integers(0, 999)) * len(good) // 1000  # its length depends on the clock
    noise = damage.draw(st.binary(max_size=8))
    index.path.write_bytes(good[:cut] + noise + (good[cut + len(noise) :] if noise else b""))
    again = FolderIndex(root, Colours(), cache=root / ".cache")
    again.update()
    assert listed(root, again.search("green", 3)) == slow_search(root, "green", 3)


def test_a_damaged_index_is_named(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    index = FolderIndex(root, Colours())
    index.update()
    index.path.write_bytes(index.path.read_bytes()[:-200])
    with caplog.at_level(logging.WARNING, "radical_rerank"):
        assert FolderIndex(root, Colours()).update().embedded == 40
    (message,) = caplog.messages
    assert f"the index {index.path} cannot be read, and is made anew" in message
    assert FolderIndex(root, Colours()).update().embedded == 0


def test_unreadable_pictures_are_named_once(root: Path) -> None:
    clock = Clock()
    broken, wide = clock.write(root / "broken.png", None), clock.write(root / "wide.png", "red", (900, 2))
    cut = clock.write(root / "cut.png", "red", (40, 40))
    cut.write_bytes(cut.read_bytes()[:-900])
    os.utime(cut, (1, 1))
    (root / "empty.jpg").touch()
    os.utime(root / "empty.jpg", (1, 1))
    embedder = Colours()
    update = FolderIndex(root, embedder).update()
    assert (update.new, update.embedded, len(update.unreadable)) == (44, 40, 4)
    for path, reason in (
        (broken, "is not in an image format"),
        (wide, "cannot be embedded: the picture is too wide"),
        (cut, "cannot be read as an image"),
        (root / "empty.jpg", "is empty"),
    ):
        assert any(message.startswith(f"{path} {reason}") for message in update.unreadable), path
    index = FolderIndex(root, embedder)
    assert index.update().unreadable == ()
    assert set(index.unreadable) == {"broken.png", "wide.png", "cut.png", "empty.jpg"}
    clock.now += 99
    clock.write(broken, "red")
    update = index.update()
    assert (update.changed, update.embedded, update.unreadable) == (1, 1, ())
    assert len(index) == 41


def test_links_hidden_files_and_unreadable_folders(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Clock().write(tmp_path / "elsewhere" / "x.png", "red")
    (root / "loop").symlink_to(root, target_is_directory=True)
    (root / "away").symlink_to(tmp_path / "elsewhere", target_is_directory=True)
    (root / "linked.png").symlink_to(tmp_path / "elsewhere" / "x.png")
    (root / "nowhere.png").symlink_to(tmp_path / "none.png")
    (root / "self.png").symlink_to(root / "self.png")
    (root / "folder.png").mkdir()
    os.mkfifo(root / "pipe.png")
    Clock().write(root / ".trash" / "x.png", "red")
    Clock().write(root / "closed" / "x.png", "red")
    scandir = os.scandir

    def closed(path: Any) -> Any:
        if Path(path).name == "closed":
            raise PermissionError(13, "Permission denied")
        return scandir(path)

    monkeypatch.setattr(os, "scandir", closed)
    index = FolderIndex(root, Colours())
    update = index.update()
    assert (update.new, update.embedded) == (41, 41)
    assert update.unreadable == (f"the folder {root / 'closed'} cannot be read: Permission denied",)
    assert "linked.png" in {each.path.name for each in index.search("red", 41)}
    monkeypatch.setattr(os, "scandir", scandir)
    assert index.update().new == 1


def test_names_that_are_no_text(tmp_path: Path) -> None:
    name = os.fsdecode(b"caf\xe9 [1].png")
    Clock().write(tmp_path / "gallery" / name, "red")
    FolderIndex(tmp_path / "gallery", Colours()).update()
    (found,) = FolderIndex(tmp_path / "gallery", Colours()).search("red", 5)
    assert found.path.name == name


def test_no_folder_and_no_pictures(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"the folder .*/none does not exist"):
        FolderIndex(tmp_path / "none", Colours())
    (tmp_path / "file.png").touch()
    with pytest.raises(InputError, match=r"file\.png is not a folder"):
        FolderIndex(tmp_path / "file.png", Colours())
    (tmp_path / "empty").mkdir()
    index = FolderIndex(tmp_path / "empty", Colours())
    assert not any(vars(index.update()).values())
    with pytest.raises(InputError, match=r"the folder .*/empty has no pictures that can be read"):
        index.search("red", 1)


def test_a_second_change_at_the_same_time_is_noticed(tmp_path: Path) -> None:
    """File systems tell the time in ticks: a file that is read in the tick of its change may change again."""
    path = tmp_path / "gallery" / "a.png"
    clock = Clock()
    clock.write(path, "red")
    now = time.time()
    os.utime(path, (now, now))
    index = FolderIndex(tmp_path / "gallery", Colours())
    index.update()
    clock.write(path, "blue")
    os.utime(path, (now, now))
    assert index.update().changed == 1
    assert listed(tmp_path / "gallery", index.search("blue", 1)) == slow_search(
        tmp_path / "gallery", "blue", 1
    )


def test_batches_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder, "BATCH", 4)
    monkeypatch.setattr(folder, "BATCH_PIXELS", 100)
    clock = Clock()
    for number in range(9):
        clock.write(tmp_path / "small" / f"{number}.png", "red", (2, 2))
        clock.write(tmp_path / "large" / f"{number}.png", "red", (7, 7))
        clock.write(tmp_path / "huge" / f"{number}.png", "red", (20, 20))
    for name, calls in (("small", [4, 4, 1]), ("large", [2, 2, 2, 2, 1]), ("huge", [1] * 9)):
        embedder = Colours()
        FolderIndex(tmp_path / name, embedder).update()
        assert embedder.calls == calls


def test_progress_counts_pictures(root: Path) -> None:
    shown: list[tuple[str, int | None, int]] = []

    def watched(items: Any, label: str, *, total: int | None = None) -> Any:
        items = list(items)
        shown.append((label, total, len(items)))
        return items

    index = FolderIndex(root, Colours())
    index.update(watched)
    index.update(watched)
    assert shown == [("embedding", 40, 40)]


def test_every_page_of_a_pdf_is_a_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root, clock = tmp_path / "gallery", Clock()
    clock.write(root / "a.png", "red")
    clock.write(root / "b.pdf", "red")  # its second page has no size
    broken = clock.write(root / "c.pdf", None)
    monkeypatch.setattr(folder, "BATCH", 1)
    with pytest.raises(KeyboardInterrupt):
        FolderIndex(root, Colours(stop=2)).update()
    index = FolderIndex(root, Colours())
    update = index.update()  # goes on in the middle of the PDF
    assert (update.new, update.embedded) == (0, 1)
    assert listed(root, index.search("red", 9)) == slow_search(root, "red", 9)
    assert {(each.path.name, each.page) for each in index.search("grey", 9)} == {
        ("b.pdf", 3), ("a.png", None), ("b.pdf", 1),
    }  # fmt: skip
    assert index.unreadable == {
        "b.pdf, page 2": f"page 2 of the PDF ({root}/b.pdf) has no size",
        "c.pdf": f"the PDF ({broken}) is not a PDF that can be read",
    }
    third = next(each for each in index.search("grey", 9) if each.page == 3)
    drawn = third.document()
    assert isinstance(drawn, Image.Image)
    assert drawn.getpixel((5, 5)) == COLOURS["grey"]
    clock.write(root / "b.pdf", "blue")
    assert index.update().embedded == 2
    assert listed(root, index.search("blue", 9)) == slow_search(root, "blue", 9)
    (root / "b.pdf").unlink()
    assert index.update().removed == 1
    assert len(index) == 1
    with pytest.raises(InputError, match="does not exist"):
        third.document()


def test_without_the_extra_pdf_files_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Clock().write(tmp_path / "gallery" / "a.png", "red")
    Clock().write(tmp_path / "gallery" / "b.pdf", "red")
    index = FolderIndex(tmp_path / "gallery", Colours())
    with monkeypatch.context() as missing:
        missing.setattr(folder, "find_spec", lambda name: None)
        update = index.update()
    assert (update.new, update.embedded) == (1, 1)
    (message,) = update.unreadable
    assert "pip install 'radical-rerank[pdf]'" in message
    assert index.update().embedded == 2


def test_an_interrupt_while_pages_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a.pdf", "b.pdf", "c.pdf"):
        Clock().write(tmp_path / "gallery" / name, None if name == "a.pdf" else "red")
    index = FolderIndex(tmp_path / "gallery", Colours())
    count = pages_of

    def stop(path: Path, **options: Any) -> Any:
        if path.name == "c.pdf":
            raise KeyboardInterrupt
        return count(path, **options)

    monkeypatch.setattr(folder, "pages_of", stop)
    with pytest.raises(KeyboardInterrupt):
        index.update()
    monkeypatch.setattr(folder, "pages_of", count)
    Clock().write(tmp_path / "gallery" / "a.pdf", "red")
    index.update()
    assert list(index.unreadable) == ["a.pdf, page 2", "b.pdf, page 2", "c.pdf, page 2"]
    assert len(index) == 6
