from __future__ import annotations

import json
from pathlib import Path

import pytest

import radical_rerank
from radical_rerank import generated_list
from radical_rerank.backbones import Backbone
from radical_rerank.cli import main
from radical_rerank.pruning import METHODS, Profile
from tests.cases import draw_list, keep_profile

SCENES = Path(radical_rerank.__file__).parent / "embedded" / "scenes" / "weights"


@pytest.fixture(scope="module")
def folder(tiny_folders: dict[str, Path]) -> str:
    return str(tiny_folders["qwen3_vl"])


@pytest.fixture
def images(tmp_path: Path) -> list[str]:
    paths = []
    for number, image in enumerate(draw_list(1, 5)[1]):
        paths.append(str(tmp_path / f"picture [{number}].png"))
        image.save(paths[-1])
    return paths


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "240")


@pytest.fixture
def profiled(folder: str) -> None:
    keep_profile(Backbone.from_pretrained(folder))


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stop:
        main(list(arguments))
    captured = capsys.readouterr()
    return int(stop.value.code or 0), captured.out, captured.err


@pytest.mark.usefixtures("profiled")
def test_rank_prints_a_table_or_json(
    folder: str, images: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = run(capsys, "rank", "a red circle", *images, "--model", folder, "--keep", "0.3")
    assert code == 0
    assert "visual tokens" in out
    assert out.count("picture [") == 5
    code, out, _ = run(
        capsys, "rank", "a red circle", *images, "--model", folder, "--top-k", "2", "--keep", "0.3", "--json"
    )
    data = json.loads(out)
    assert code == 0
    assert [r["rank"] for r in data["results"]] == [1, 2]
    assert all(images[r["index"]] == r["document"] for r in data["results"])
    assert data["pruning"][0]["keep"] == 0.3
    assert data["pruning"][0]["stages"][0]["alpha"] is not None


@pytest.mark.usefixtures("profiled")
def test_rank_with_reference_and_other_methods(
    folder: str, images: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    for extra in (["--reference", images[0]], ["--method", "random"], ["--method", "dense"]):
        code, out, _ = run(
            capsys, "rank", "is blue instead", *images[1:], "--model", folder, "--json", *extra
        )
        assert code == 0
        assert len(json.loads(out)["results"]) == 4


def test_rank_pointwise_and_with_a_preset(
    folder: str, images: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = {"pair": "{image} {query}", "answers": ["A", "B"]}
    (tmp_path / "pairs.json").write_text(json.dumps(words))
    preset = {"models": [], "scorer": "pointwise", "template": words, "max_image_tokens": 16}
    (tmp_path / "preset.json").write_text(json.dumps(preset))
    own = ["--model", folder, "--method", "dense", "--json"]
    outputs = []
    for extra in (
        ["--scorer", "pointwise", "--template", str(tmp_path / "pairs.json"), "--max-image-tokens", "16"],
        ["--preset", str(tmp_path / "preset.json")],
    ):
        code, out, _ = run(capsys, "rank", "red", *images, *own, *extra)
        assert code == 0
        outputs.append(json.loads(out))
    first, second = outputs
    assert first["results"] == second["results"]
    assert first["totals"]["prompts"] == len(images)
    assert len(first["pruning"]) == 1
    code, out, _ = run(capsys, "rank", "red", *images, *own, "--preset", "none")
    assert json.loads(out)["totals"]["prompts"] == 1


@pytest.mark.usefixtures("profiled")
def test_unreadable_images_can_be_skipped(
    folder: str, images: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    broken = tmp_path / "broken.jpg"
    broken.write_text("no")
    arguments = ["rank", "red", *images, str(broken), "--model", folder]
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, "")
    assert "broken.jpg" in err
    code, out, err = run(capsys, *arguments, "--on-error", "skip", "--json")
    assert code == 0
    assert len(json.loads(out)["results"]) == 5
    assert json.loads(out)["skipped"][0]["index"] == 5
    assert "skipped" in err


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--method", "magic"], "unknown method 'magic'"),
        (["--keep", "0"], "keep must lie in (0, 1]"),
        (["--keep", "2"], "keep must lie in (0, 1]"),
        (["--model", "/none"], "there is no folder /none"),
        (["--scorer", "guess"], "scorer must be one of"),
        (["--preset", "jina"], "unknown preset 'jina'"),
        (["--top-k", "0"], "top_k must be a whole number of at least 1"),
        (["--reference", "/none.png"], "/none.png does not exist"),
        (["/none.png"], "/none.png does not exist"),
        (["--dtype", "float3"], "unknown dtype"),
        (["--template", "/none.json"], "cannot read the prompt template"),
    ],
)
def test_errors_are_one_line_on_stderr_with_code_2(
    extra: list[str], message: str, folder: str, images: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(capsys, "rank", "red", *images, "--model", folder, *extra)
    assert (code, out) == (2, "")
    assert message in err.replace("\n", " ")
    assert "Traceback" not in err


def test_an_empty_query_and_missing_arguments(
    folder: str, images: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = run(capsys, "rank", " ", *images, "--model", folder)
    assert code == 2
    assert "the query is empty" in err
    assert run(capsys, "rank", "red")[0] == 2
    assert run(capsys, "fly")[0] == 2


def test_calibrate_writes_a_profile_and_shows_the_schedule(
    folder: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    lists = tmp_path / "lists.jsonl"
    for number, image in enumerate(draw_list(3, 4)[1]):
        image.save(tmp_path / f"{number}.png")
    record = {"query": "a red circle", "images": [f"{n}.png" for n in range(4)]}
    lists.write_text(json.dumps(record) + "\n\n" + json.dumps(record) + "\n")
    out_file = tmp_path / "profile.json"
    code, out, err = run(
        capsys,
        "calibrate",
        folder,
        "--lists",
        str(lists),
        "--out",
        str(out_file),
        "--json",
        "--num-stages",
        "2",
    )
    assert code == 0
    assert "calibrating" in err
    profile = Profile.load(out_file)
    assert profile.lists == 2
    data = json.loads(out)
    assert data["alpha"] == list(profile.alpha)
    assert len(data["schedule"]) == 2
    code, out, _ = run(capsys, "calibrate", folder, "--lists", str(lists))
    assert code == 0
    assert out.count("prunes") == 4
    assert Profile.find(Backbone.from_pretrained(folder).identity) is not None


@pytest.mark.parametrize("line", ["{", '{"query": "x"}', '{"query": "", "images": ["a"]}', "[1]"])
def test_calibrate_names_the_bad_line(
    line: str, folder: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    lists = tmp_path / "lists.jsonl"
    lists.write_text(line + "\n")
    code, _, err = run(capsys, "calibrate", folder, "--lists", str(lists))
    assert code == 2
    assert "line 1" in err


def test_methods(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "methods")
    assert code == 0
    assert all(name in out for name in METHODS)
    code, out, _ = run(capsys, "methods", "--json")
    assert [row["name"] for row in json.loads(out)] == list(METHODS)


@pytest.mark.slow
@pytest.mark.usefixtures("profiled")
def test_bench_commands(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--shape", "small", "--width", "128", "--rounds", "1"]
    code, out, _ = run(
        capsys, "bench", "prefill", *small, "--keep", "0.5", "0.25", "--methods", "radical", "--json"
    )
    assert code == 0
    assert [(m["method"], m["keep"]) for m in json.loads(out)["methods"]] == [
        ("radical", 0.5), ("radical", 0.25),
    ]  # fmt: skip
    counts = ["--counts", "2", "4", "--rounds", "1"]
    code, out, err = run(capsys, "bench", "end-to-end", "--model", folder, *counts)
    assert code == 0
    assert "pruned warm" in out
    assert "time grows with N to the power of" in err
    short = ["--seconds", "1", "--requests", "10", "--rounds", "1"]
    code, out, _ = run(capsys, "bench", "service", "--model", folder, *short, "--json")
    assert code == 0
    measured = json.loads(out)
    assert set(measured["statuses"]) <= {"200", "429"}
    assert measured["overhead"]["median"] > 0
    for wrong in (
        ["prefill", "--shape", "huge"],
        ["prefill", "--methods", "best"],
        ["end-to-end", "--shape", "huge"],
    ):
        code, _, err = run(capsys, "bench", *wrong)
        assert code == 2
        assert "unknown" in err


def test_calibrate_scores_keeps_them_in_the_profile_and_says_how_good_they_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RADICAL_CACHE", str(tmp_path / "cache"))
    plot, out = tmp_path / "plot.png", tmp_path / "profile.json"
    wanted = ["calibrate", "scenes", "--scores", "scenes", "--limit", "6", "--keep", "0.3", "0.1"]
    code, text, _ = run(capsys, *wanted, "--out", str(out), "--plot", str(plot), "--json")
    assert code == 0
    rows = json.loads(text)["calibrations"]
    assert [row["settings"]["keep"] for row in rows] == [0.3, 0.1]
    assert all(row["measured"]["lists"] == 6 and row["lists"] == 12 for row in rows)
    assert plot.is_file()
    profile = Profile.load(out)
    assert len([one for one in profile.scores if one["lists"] == 12]) == 2
    assert profile.alpha == Profile.load(SCENES / "radical_profile.json").alpha
    code, text, _ = run(capsys, *wanted[:-3], "--keep", "0.3", "--out", str(out))
    assert code == 0
    assert "ECE" in text
    code, _, err = run(capsys, "calibrate", "scenes", "--scores", "scenes-composed")
    assert code == 2
    assert "scores are fitted on scenes or scenes-gallery" in err


def test_rank_shows_probabilities_and_says_that_nothing_fits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    query, images = generated_list(0, candidates=3)
    files = []
    for number, image in enumerate(images):
        files.append(str(tmp_path / f"{number}.png"))
        image.save(files[-1])
    asked = ["rank", query, *files, "--model", "scenes"]
    code, out, _ = run(capsys, *asked, "--permutations", "2")
    assert code == 0
    assert "probability" in out
    assert "2 prompts" in out
    code, out, _ = run(capsys, *asked, "--min-probability", "1.0")
    assert code == 0
    assert "nothing fits" in out
    code, out, _ = run(capsys, *asked, "--min-probability", "1.0", "--json")
    data = json.loads(out)
    assert data["results"] == []
    assert 0 < data["confidence"] < 1


def test_rank_takes_a_budget_in_other_terms(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = []
    for number, image in enumerate(generated_list(0, candidates=12)[1]):
        paths.append(str(tmp_path / f"{number}.png"))
        image.save(paths[-1])
    code, out, _ = run(capsys, "rank", "a red star", *paths, "--model", "scenes", "--flops", "0.4", "--json")
    assert code == 0
    assert json.loads(out)["totals"]["flops_saved"] == pytest.approx(0.6, abs=0.02)
    code, _, err = run(
        capsys, "rank", "a red star", *paths, "--model", "scenes", "--flops", "0.4", "--keep", "0.2"
    )
    assert code == 2
    assert "keep and flops are two budgets" in err
