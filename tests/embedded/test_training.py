"""Training from a seed, killed or not."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch

from radical_rerank import Reranker
from radical_rerank.cli import main
from radical_rerank.embedded.scenes.lists import make_list
from radical_rerank.embedded.scenes.training.plan import Phase, Plan
from radical_rerank.embedded.scenes.training.run import SceneTraining, train
from radical_rerank.errors import InputError

T = TypeVar("T")


def small_plan(**changes: Any) -> Plan:
    phases = (Phase(3, 3, 2, 1, 0.3, extras=2), Phase(2, 4, 2, 1, 0.5, extras=0))
    options = {"num_layers": 8, "align_steps": 5, "align_scenes": 6, "phases": phases, "validate_every": 4}
    options["absent_steps"] = 0
    return Plan(**{**options, **changes})


class KilledError(Exception):
    """Stands for a kill of the process."""


class KillBefore:
    """A progress that ends the run before each of these steps, once."""

    def __init__(self, *steps: int) -> None:
        self.steps = set(steps)

    def __call__(self, items: Iterable[T], label: str, *, total: int | None = None) -> Iterable[T]:
        for step in items:
            if step in self.steps:
                self.steps.remove(step)
                raise KilledError
            yield step


@pytest.mark.slow
def test_training_resumes_to_the_same_state(tmp_path: Path) -> None:
    plan = small_plan(absent_steps=3)
    whole = train(tmp_path / "whole", plan, save_every=4)
    kill = KillBefore(3, 7, 9, 10, 12)
    resumed = None
    while resumed is None:
        with suppress(KilledError):
            resumed = train(tmp_path / "killed", plan, save_every=2, progress=kill)
    assert not kill.steps
    for (name, a), b in zip(
        whole.model.state_dict().items(), resumed.model.state_dict().values(), strict=True
    ):
        assert torch.equal(a, b), name
    logs = [[json.loads(line) for line in run.log.read_text().splitlines()] for run in (whole, resumed)]
    for record in [*logs[0], *logs[1]]:
        assert record.pop("seconds") > 0
    assert logs[0] == logs[1]
    assert [record["step"] for record in logs[0]] == list(range(13))
    assert "validation R@1" in logs[0][8]
    assert "validation AUROC" in logs[0][12]
    with pytest.raises(InputError, match="another plan"):
        SceneTraining(small_plan(seed=1, absent_steps=3), tmp_path / "whole")
    ranking = Reranker.from_pretrained(tmp_path / "whole", "dense").rank(
        "a red star", make_list("test", 0, 4).images
    )
    assert len(ranking) == 4


@pytest.mark.slow
def test_a_longer_plan_goes_on_where_a_shorter_one_stopped(tmp_path: Path) -> None:
    """If it would have done the same so far, and only then."""
    first = Phase(4, 3, 2, 1, 0.3, extras=2)
    short = small_plan(phases=(first,), fade_from=0.9, fade_to=0.95)
    long = small_plan(
        phases=(replace(first, steps=2), Phase(4, 4, 2, 1, 0.5, extras=1, composed=2, composed_candidates=3)),
        fade_from=0.9,
        fade_to=0.95,
    )
    with suppress(KilledError):
        train(tmp_path / "a", short, save_every=1, progress=KillBefore(7))
    resumed = train(tmp_path / "a", long)
    whole = train(tmp_path / "b", long)
    for a, b in zip(resumed.model.state_dict().values(), whole.model.state_dict().values(), strict=True):
        assert torch.equal(a, b)
    with pytest.raises(InputError, match="another plan"):
        SceneTraining(small_plan(phases=(replace(first, queries=1), first)), tmp_path / "b")


@pytest.mark.slow
def test_stage_c_can_go_on_from_trained_weights(tmp_path: Path) -> None:
    before = train(tmp_path / "before", small_plan())
    start = str(tmp_path / "before")
    plan = small_plan(absent_steps=2, start=start)
    training = SceneTraining(plan, tmp_path / "after")
    assert training.step == plan.absent_from == before.plan.steps
    for (name, old), new in zip(
        before.model.state_dict().items(), training.model.state_dict().values(), strict=True
    ):
        torch.testing.assert_close(new, old, atol=2e-3, rtol=2e-3, msg=name)  # written in half precision
    training.run(save_every=1)
    records = [json.loads(line) for line in training.log.read_text().splitlines()]
    assert [record["step"] for record in records] == [10, 11]
    frozen = "model.visual.patch_embed.proj.weight"
    assert torch.equal(training.model.state_dict()[frozen], before.model.state_dict()[frozen].half().float())
    answers = json.loads((tmp_path / "after" / "radical_template.json").read_text())
    assert answers["none"] == " no"
    with pytest.raises(InputError, match="another plan"):
        SceneTraining(small_plan(absent_steps=2), tmp_path / "after")
    with pytest.raises(InputError, match="another model"):
        SceneTraining(small_plan(num_layers=9, start=start, absent_steps=1), tmp_path / "deeper")


@pytest.mark.slow
def test_the_alignment_loss_falls(tmp_path: Path) -> None:
    training = SceneTraining(small_plan(align_steps=14, align_scenes=12), tmp_path)
    losses = [training.advance()["loss"] for _ in range(14)]
    assert sum(losses[-3:]) < 0.85 * sum(losses[:3])


@pytest.mark.slow
def test_messages_say_how_far_it_is(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    phase = Phase(2, 3, 2, 1, 0.3, extras=0)
    training = SceneTraining(
        small_plan(align_steps=1, align_scenes=2, phases=(phase,), validate_every=2), tmp_path
    )
    with caplog.at_level(logging.INFO, logger="radical_rerank"):
        training.run(log_every=2)
    messages = [record.getMessage() for record in caplog.records]
    assert [message.split(":")[0] for message in messages] == ["step 2 of 3", "step 3 of 3"]
    assert "loss " in messages[0]
    assert ", R@1 " in messages[0]
    assert "validation R@1 " in messages[1]


@pytest.mark.slow
def test_the_training_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = tmp_path / "plan.json"
    phase = {"steps": 1, "candidates": 3, "queries": 2, "lists": 1, "similarity": 0.3}
    plan.write_text(
        json.dumps(
            {"num_layers": 8, "align_steps": 1, "align_scenes": 4, "phases": [phase], "absent_steps": 0}
        )
    )
    with pytest.raises(SystemExit) as stop:
        main(["scenes", "train", str(tmp_path / "run"), "--plan", str(plan)])
    assert not stop.value.code
    assert (tmp_path / "run" / "model.safetensors").is_file()
    assert "the model is in" in capsys.readouterr().err
    plan.write_text('{"depth": 3}')
    with pytest.raises(SystemExit) as stop:
        main(["scenes", "train", str(tmp_path / "other"), "--plan", str(plan)])
    assert stop.value.code == 2
    assert "depth" in capsys.readouterr().err
