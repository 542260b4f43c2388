"""Lists of one's own: the file, what is ranked, and what a record notices."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from radical_rerank import Backbone, Query
from radical_rerank.cli import main
from radical_rerank.embedded.scenes.datasets import TESTBED
from radical_rerank.errors import InputError
from radical_rerank.lab.catalog import open_dataset
from radical_rerank.lab.judged import judged_lists
from radical_rerank.lab.metrics import measure
from radical_rerank.lab.own_lists import own_lists
from radical_rerank.lab.records import Cell, Records
from radical_rerank.lab.runner import Runner, work_of
from radical_rerank.lab.tables import facts_of, summarize
from radical_rerank.reranking.encoding import Parts, data_uri
from tests.cases import PROFILE, draw_list, keep_profile

PICTURES = draw_list(4, 6)[1]
DENSE, FASTV = Cell("Dense", "dense"), Cell("FastV 50%", "fastv", 0.5)
LINES: list[dict[str, Any]] = [
    {
        "id": "mugs",
        "query": "a small red star",
        "documents": [
            {"id": "a", "image": "0.png", "text": "red star"},
            {"id": "b", "images": ["1.png", "2.png"], "text": "blue circle"},
            {"id": "c", "text": "green square"},
            {"id": "d", "image": "3.png"},
        ],
        "relevant": ["a"],
    },
    {
        "query": {"text": "large circle", "image": "4.png", "instruction": "small"},
        "documents": [{"id": "a", "image": "0.png", "text": "red star"}, {"id": 7, "text": "blue star"}],
        "relevant": {"a": 2, "7": 1, "c": 0},
    },
    {
        "id": "changed",
        "query": {"text": "is red", "reference": "5.png"},
        "documents": [{"id": "d", "image": "3.png"}, {"id": "e", "image": data_uri(PICTURES[1])}],
        "relevant": ["e"],
    },
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for number, image in enumerate(PICTURES):
        image.save(tmp_path / f"{number}.png")
    return tmp_path


def write(folder: Path, lines: list[Any]) -> Path:
    path = folder / "mine.jsonl"
    path.write_text("\n\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return path


# The file.


def test_a_file_is_read(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = write(folder, LINES)
    data = open_dataset(str(path), testbed=TESTBED)
    assert (data.name, list(data.gallery)) == ("mine", ["a", "b", "c", "d", "7", "e"])
    assert [task.id for task in data.tasks] == ["mugs", "3", "changed"]  # by default the number of the line
    assert [task.candidates for task in data.tasks] == [("a", "b", "c", "d"), ("a", "7"), ("d", "e")]
    assert [task.relevant for task in data.tasks] == [{"a": 1}, {"a": 2, "7": 1}, {"e": 1}]
    assert Parts.of(data.document("b"), "b") == Parts((folder / "1.png", folder / "2.png"), "blue circle")
    assert data.query(data.tasks[1]) == Query("large circle", images=(folder / "4.png",), instruction="small")
    assert data.query(data.tasks[2]) == Query("is red", folder / "5.png")
    # Pictures in another folder.
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "mine.jsonl"
    elsewhere.write_text(path.read_text())
    moved = open_dataset(str(elsewhere), testbed=TESTBED, images=str(folder))
    assert moved.document("a") == data.document("a")
    with pytest.raises(InputError, match=r"mine\.jsonl, line 1, document 0: the picture .*0\.png is missing"):
        own_lists(elsewhere)


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.lists(st.tuples(st.integers(0, 3), st.text(max_size=9), st.booleans()), min_size=1, max_size=4),
        min_size=1,
        max_size=4,
    )
)
def test_what_is_written_is_read(folder: Path, drawn: list[list[tuple[int, str, bool]]]) -> None:
    lines: list[dict[str, Any]] = []
    expected = {}
    for number, own in enumerate(drawn):
        documents = []
        for place, (images, text, alone) in enumerate(own):
            text = text.strip() or "star"
            files = [f"{i}.png" for i in range(images)]
            name = f"{number} {place}"
            shown = {"image": files[0]} if images == 1 and alone else {"images": files} if images else {}
            documents.append({"id": name, **shown, "text": text})
            expected[name] = Parts(tuple(folder / file for file in files), text)
        lines.append({"query": "red", "documents": documents, "relevant": [f"{number} 0"]})
    data = own_lists(write(folder, lines))
    assert {name: Parts.of(data.document(name), name) for name in data.gallery} == expected
    assert [task.candidates for task in data.tasks] == [tuple(d["id"] for d in n["documents"]) for n in lines]


def changed(**fields: Any) -> dict[str, Any]:
    return {k: v for k, v in {**LINES[0], "id": "x", **fields}.items() if v is not None}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 3 is not JSON"),
        ("[]", "line 3 is not an object"),
        (changed(documnts=[]), r"unknown field 'documnts' of .*line 3; did you mean 'documents'"),
        (changed(query=None), "line 3 has no query"),
        (changed(query=" "), "the query of .*line 3 has neither"),
        (changed(query={"txt": "a"}), "unknown field 'txt' of the query of .*line 3"),
        (changed(query={"text": "a", "image": 3}), "line 3: a picture is a path or a data URI, not a int"),
        (changed(query={"text": "a", "image": "no.png"}), r"line 3: the picture .*no\.png is missing"),
        (changed(query={"reference": "0.png", "image": "1.png"}), "line 3: a query with a reference has"),
        (changed(query={"text": "a", "instruction": 1}), "line 3: the instruction is no text"),
        (changed(documents=None), "line 3 has no list of documents"),
        (changed(documents=[]), "line 3 has no list of documents"),
        (changed(documents=["a.png"]), "line 3, document 0 has no id"),
        (changed(documents=[{"id": "a"}]), "line 3, document 0 has neither a picture nor a text"),
        (changed(documents=[{"id": "z", "img": "0.png"}]), "unknown field 'img' of .*line 3, document 0"),
        (
            changed(documents=[{"id": "z", "image": "no.png"}]),
            r"document 0: the picture .*no\.png is missing",
        ),
        (changed(documents=[{"id": "z", "text": "s"}] * 2), "line 3, document 1: z occurs twice"),
        (changed(documents=[{"id": "a", "text": "s"}]), "document 0: a is another document in an earlier"),
        (changed(id="mugs"), "line 3: the query mugs occurs twice"),
        (changed(relevant=None), "line 3: relevant is no list"),
        (changed(relevant="a"), "line 3: relevant is no list"),
        (changed(relevant={"a": 0.5}), "line 3: relevant is no list"),
        (changed(relevant=[]), "line 3 has no relevant documents"),
        (changed(relevant=["a", "q"]), "line 3: relevant names 'q', which is no document"),
    ],
)
def test_a_bad_line_is_named(folder: Path, line: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        own_lists(write(folder, [LINES[0], line]))


def test_an_empty_or_missing_file_is_named(folder: Path) -> None:
    with pytest.raises(InputError, match=r"mine\.jsonl has no queries"):
        own_lists(write(folder, []))
    with pytest.raises(InputError, match=r"cannot read .*none\.jsonl"):
        own_lists(folder / "none.jsonl")


# What is ranked.


def test_records_are_the_library_s_rankings(backbone: Backbone, folder: Path) -> None:
    data = own_lists(write(folder, LINES))
    runner = Runner(backbone, {}, profile=PROFILE)
    records = Records()
    runner.run(data, [DENSE, FASTV], records)
    # By hand, from the lines alone.
    for number, (task, line) in enumerate(zip(data.tasks, LINES, strict=True)):
        asked = line["query"]
        query: Any = asked
        if isinstance(asked, dict):
            pictures = {k: folder / asked[k] for k in ("image", "reference") if k in asked}
            query = Query(
                asked["text"],
                pictures.get("reference"),
                [pictures["image"]] if "image" in pictures else [],
                asked.get("instruction"),
            )
        shown = {}
        for document in line["documents"]:
            files = document.get("images") or ([document["image"]] if "image" in document else [])
            images = [file if file.startswith("data:") else folder / file for file in files]
            shown[str(document["id"])] = {"images": images, "text": document.get("text", "")}
        order = list(shown)
        random.Random(f"42 {task.id}").shuffle(order)
        for cell in (DENSE, FASTV):
            ranking = runner.reranker(cell).rank(query, [shown[name] for name in order])
            (record,) = (r for r in records if r["task"] == str(number) and r["cell"] == cell.name)
            assert record["ranking"] == [order[i] for i in ranking.order]
            assert record["scores"] == pytest.approx([result.score for result in ranking], abs=2e-5)
            assert record["cut"] == 0


def test_texts_that_were_cut_are_counted(backbone: Backbone, folder: Path) -> None:
    data = own_lists(write(folder, LINES[:1]))
    runner = Runner(backbone, {}, options={"max_text_tokens": 1})
    (record,) = runner.records_of(data, 0, [DENSE])
    assert record["cut"] == 3
    assert "documents whose text was too long and was cut: Dense 3" in facts_of(summarize([record]))


def test_a_model_without_texts_is_an_error_that_names_the_query(folder: Path) -> None:
    data = own_lists(write(folder, LINES[:1]))
    with pytest.raises(InputError, match=r"^mine, query mugs, Dense: .*no place for a document's text"):
        list(Runner(Backbone.from_pretrained("scenes")).records_of(data, 0, [DENSE]))


# What a record notices.


def test_whatever_a_line_says_is_part_of_the_key(backbone: Backbone, folder: Path) -> None:
    runner = Runner(backbone, {})

    def key(line: dict[str, Any]) -> tuple[str, ...]:
        data = own_lists(write(folder, [line]))
        return runner.key(DENSE, 0, work_of(data, 0).content)

    plain = LINES[0]["documents"]

    def with_document(**fields: Any) -> dict[str, Any]:
        own = {k: v for k, v in {**plain[1], **fields}.items() if v is not None}
        return {**LINES[0], "documents": [plain[0], own, *plain[2:]]}

    def asked(**fields: Any) -> dict[str, Any]:
        return {**LINES[0], "query": {"text": "a small red star", **fields}}

    keys = {
        "as it is": key(LINES[0]),
        "text": key(with_document(text="blue star")),
        "no text": key(with_document(text=None)),
        "fewer pictures": key(with_document(images=["1.png"])),
        "order of pictures": key(with_document(images=["2.png", "1.png"])),
        "other picture": key(with_document(images=["1.png", "4.png"])),
        "picture of the query": key(asked(image="4.png")),
        "another": key(asked(image="5.png")),
        "two": key(asked(images=["4.png", "5.png"])),
        "reference": key(asked(reference="4.png")),
        "instruction": key(asked(instruction="small")),
        "another instruction": key(asked(instruction="large")),
        "judgements": key({**LINES[0], "relevant": ["b"]}),
    }
    # The same list in other words.
    assert key(asked()) == keys["as it is"]
    PICTURES[5].save(folder / "4.png")
    keys["pixels of the query's picture"] = key(asked(image="4.png"))
    PICTURES[5].save(folder / "1.png")
    keys["pixels"] = key(LINES[0])
    same = [(a, b) for a in keys for b in keys if a < b and keys[a] == keys[b]]
    assert not same


def test_the_command_continues_and_notices_a_changed_text(
    tiny_folders: dict[str, Path], folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"

    def evaluate(lines: list[Any]) -> tuple[int, list[dict[str, Any]]]:
        command = ["eval", "--dataset", str(write(folder, lines)), "--methods", "fastv", "--keep", "0.5",
                   "--model", str(tiny_folders["qwen3_vl"]), "--out", str(out), "--json"]  # fmt: skip
        with pytest.raises(SystemExit) as stop:
            main(command)
        captured = capsys.readouterr()
        assert not stop.value.code, captured.err
        written = [json.loads(line) for line in (out / "records.jsonl").read_text().splitlines()]
        return len(written), json.loads(captured.out)

    count, rows = evaluate(LINES)
    assert count == 6  # Dense is always there
    records = [json.loads(line) for line in (out / "records.jsonl").read_text().splitlines()]
    for row in rows:
        own = [record for record in records if record["cell"] == row["name"]]
        runs, grades = ({r["task"]: r[name] for r in own} for name in ("ranking", "relevant"))
        by_hand = [values["MRR@10"] for values in measure(runs, grades).values()]
        assert row["measures"]["MRR@10"] == pytest.approx(100 * np.mean(by_hand))
    assert evaluate(LINES)[0] == 6
    lines = json.loads(json.dumps(LINES))
    lines[0]["documents"][2]["text"] = "red square"
    assert evaluate(lines)[0] == 8


# Scores.


def test_scores_are_fitted_on_lists_of_one_s_own(
    backbone: Backbone, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keep_profile(backbone)
    words = ("red star", "blue circle", "green square", "large star")
    lines = [
        {
            "query": f"small {words[n % 4]}",
            "documents": [
                {"id": f"{n} {i}", "text": words[(n + i) % 4], **({"image": f"{i}.png"} if i % 2 else {})}
                for i in range(4)
            ],
            "relevant": [f"{n} 0"],
        }
        for n in range(8)
    ]
    path, out = write(folder, lines), tmp_path / "profile.json"
    own = judged_lists(own_lists(path), 5, pytest.fail)
    assert len(own) == 5
    assert own[1].relevant == [True, False, False, False]
    assert own[1].documents[1] == {"images": [folder / "1.png"], "text": words[2]}
    with pytest.raises(SystemExit) as stop:
        main(["calibrate", backbone.name, "--scores", str(path), "--keep", "0.5",
              "--out", str(out), "--json"])  # fmt: skip
    captured = capsys.readouterr()
    assert not stop.value.code, captured.err
    assert json.loads(captured.out)["dataset"] == "mine"
    assert len(json.loads(out.read_text())["scores"]) == 1


# MTEB.


@pytest.mark.slow
def test_mteb_evaluates_documents_with_texts(backbone: Backbone, folder: Path) -> None:
    mteb = pytest.importorskip("mteb", reason="an extra")
    from radical_rerank import Reranker
    from radical_rerank.integrations.mteb import RadicalSearch
    from radical_rerank.lab.mteb_task import task_of

    with pytest.raises(InputError, match="at most one picture"):
        task_of(own_lists(write(folder, LINES)))
    single = [{**LINES[0], "documents": [d for d in LINES[0]["documents"] if d["id"] != "b"]}, LINES[2]]
    single.append({**LINES[1], "query": {"text": "large circle", "reference": "4.png"}})
    data = own_lists(write(folder, single))
    task = task_of(data)
    assert task.metadata.category == "it2it"
    reranker = Reranker(backbone, "fastv", keep=0.5)
    results = mteb.evaluate(RadicalSearch(reranker=reranker), task, cache=None, show_progress_bar=False)
    runs = {}
    for own in data.tasks:
        names = own.candidates or ()
        ranking = reranker.rank(data.query(own), [data.document(name) for name in names])
        runs[own.id] = [names[i] for i in ranking.order]
    ours = measure(runs, {own.id: own.relevant for own in data.tasks})
    theirs = results[0].scores["test"][0]
    assert theirs["mrr_at_10"] == pytest.approx(np.mean([v["MRR@10"] for v in ours.values()]), abs=1e-5)
    assert theirs["ndcg_at_10"] == pytest.approx(np.mean([v["nDCG@10"] for v in ours.values()]), abs=1e-5)
