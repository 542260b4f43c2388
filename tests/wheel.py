"""Run by `make wheel-test` in an empty environment: the wheel ranks, prunes and shows every --help."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path

MEGABYTES = 60
EXTRAS = {"matplotlib": "lab", "ir_measures": "lab", "fastapi": "serve", "ray": "ray", "faiss": "retrieval"}
GROUPS = {
    "": ["", "rank", "calibrate", "methods", "demo", "eval", "datasets", "experiment", "serve"],
    "scenes": ["train", "evaluate", "card"],
    "photos": ["train", "evaluate", "card"],
    "bench": ["prefill", "end-to-end", "throughput", "service", "attacks"],
}
COMMANDS = [[*group.split(), *command.split()] for group, commands in GROUPS.items() for command in commands]


def main(wheel: Path) -> None:
    size = wheel.stat().st_size / 1e6
    assert size < MEGABYTES, f"the wheel has {size:.1f} MB"
    for package, extra in EXTRAS.items():
        assert importlib.util.find_spec(package) is None, f"{package} belongs to the extra [{extra}]"

    from radical_rerank import RaDiCal, Reranker, generated_list

    query, images = generated_list(0)
    ranking = Reranker("scenes", method=RaDiCal(keep=0.2)).rank(query, images)
    report = ranking.report
    assert len(ranking) == 20
    assert report is not None
    assert report.visual_tokens_left < 0.25 * report.visual_tokens
    radical = str(Path(sys.executable).with_name("radical"))
    for words in COMMANDS:
        subprocess.run([radical, *words, "--help"], check=True, stdout=subprocess.DEVNULL)
    with tempfile.TemporaryDirectory() as folder:
        for number, image in enumerate(images[:5]):
            image.save(f"{folder}/{number}.png")
        pictures = map(str, sorted(Path(folder).glob("*.png")))
        subprocess.run([radical, "rank", query, *pictures, "--json"], check=True, stdout=subprocess.DEVNULL)
        for command, extra in (
            (["eval", "--limit", "1", "--out", f"{folder}/eval"], "lab"),
            (["experiment", "main", "--limit", "1", "--out", f"{folder}/main"], "lab"),
            (["serve"], "serve"),
        ):
            run = subprocess.run([radical, *command], capture_output=True, text=True)
            assert run.returncode == 2, (command, run.stderr)
            assert f"radical-rerank[{extra}]" in run.stderr, (command, run.stderr)
    packages = len(list(metadata.distributions()))
    print(f"the wheel ({size:.1f} MB, {packages} packages installed) ranks, prunes and shows every --help")


main(Path(sys.argv[1]))
