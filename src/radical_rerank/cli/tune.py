"""`radical tune MODEL`: schedules for every cost, and the promise about the order, without labels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from radical_rerank import progress as bars
from radical_rerank.cli.common import log, print_json, print_table
from radical_rerank.errors import CalibrationError, InputError

if TYPE_CHECKING:
    from radical_rerank.pruning import Profile, TunedSchedule

HEADS = ("arithmetic", "before layers", "tokens left", "relevance", "nucleus", "KL to Dense", "same best")
AGREEMENTS = (0.95, 0.98, 0.99, 0.995)
"""shown in the table of promises"""


def tune_model(
    model: str,
    lists: str | None,
    *,
    limit: int,
    promise: int,
    budgets: Sequence[float] | None,
    promise_only: bool,
    data: str | None,
    out: str | None,
    loading: dict[str, Any],
    as_json: bool,
) -> None:
    """Tune a model's schedules, keep them in its profile, and show them."""
    from radical_rerank.backbones import Backbone
    from radical_rerank.pruning import Profile
    from radical_rerank.reranking import Reranker
    from radical_rerank.reranking.calibration import profile_of
    from radical_rerank.reranking.safety import worth_keeping
    from radical_rerank.reranking.tuning import BUDGETS, Tuner

    wanted = sorted(budgets or BUDGETS)
    if any(not 0 < one < 1 for one in wanted):
        raise InputError("every --flops must lie between 0 and 1")
    if promise_only and (budgets or not promise):
        raise InputError(
            "--promise-only tunes no schedules and needs lists: leave out --flops, and --promise 0"
        )
    given = _lists(model, lists, limit + promise, data)
    backbone = Backbone.from_pretrained(model, **loading)
    profile = profile_of(backbone)
    if promise_only and not profile.schedules:
        raise InputError(f"{model} has no tuned schedules: leave out --promise-only")
    profile = replace(profile, fingerprint=backbone.fingerprint)
    reranker, path = Reranker(backbone), out or Profile.cache_path(backbone.identity)
    if not promise_only:
        tuner = Tuner(reranker, given[:limit], profile)
        tuner.dense(bars.bar)
        if not budgets:  # everything is tuned anew: schedules for other costs go
            profile = _only(profile, wanted)
        for flops in wanted:
            found = tuner.nucleus(tuner.search(flops, bars.bar, known=profile.schedules), bars.bar)
            profile = _with_schedule(profile, found)
            profile.save(path)  # a kill costs only what comes after
    # The promise is made from other lists than the schedules were chosen on, if there are enough.
    others = given[limit : limit + promise] if len(given) >= limit + promise else given[:promise]
    if promise:
        pairs = worth_keeping(Tuner(reranker, others, profile).safety(profile.schedules, bars.bar))
        profile = replace(profile, safety=tuple(one.to_dict() for one in pairs))
    log.info("saved to %s", profile.save(path))
    _show(profile, f"{backbone.name}, {len(given[:limit])} lists", len(others), as_json)


def _only(profile: Profile, costs: Sequence[float]) -> Profile:
    """Return the profile with the schedules for these costs alone, and what is known of them."""
    schedules = tuple(one for one in profile.schedules if one.flops in costs)
    known = {one.flops for one in schedules} | {1.0}
    pairs = [one for one in profile.safety if {one.get("small"), one.get("large")} <= known]
    return replace(profile, schedules=schedules, safety=tuple(pairs))


def _with_schedule(profile: Profile, found: TunedSchedule) -> Profile:
    """Return the profile with a new schedule. What was seen of the old one for this cost goes."""
    rest = _only(profile, [one.flops for one in profile.schedules if one.flops != found.flops])
    return replace(rest, schedules=tuple(sorted([*rest.schedules, found], key=lambda one: one.flops)))


def _show(profile: Profile, title: str, lists: int, as_json: bool) -> None:
    """Show the schedules, and what they promise."""
    from radical_rerank.reranking.safety import Safety

    try:
        pairs = list(map(Safety.from_dict, profile.safety))
    except CalibrationError:  # of another version, and --promise 0: using it raises, tuning need not
        pairs = []
    costs = {agreement: min(pairs, key=lambda one: one.cost(agreement)) for agreement in AGREEMENTS if pairs}
    if as_json:
        found = {str(agreement): {"cost": one.cost(agreement), "small": one.small, "large": one.large}
                 for agreement, one in costs.items() if one.threshold(agreement) is not None}  # fmt: skip
        print_json(
            {"model": profile.model, "schedules": list(map(asdict, profile.schedules)), "agreement": found}
        )
        return
    rows = [
        [
            f"{one.flops:.0%}",
            ", ".join(map(str, one.layers)),
            ", ".join(f"r^{e:.2f}" for e in one.exponents),
            one.relevance,
            "–" if one.nucleus is None else f"{one.nucleus:.4f}",
            f"{one.kl:.4f}",
            f"{one.agreement:.1%}",
        ]
        for one in profile.schedules
    ]
    print_table(HEADS, rows, title)
    promised = [
        [
            f"{agreement:.1%}",
            f"{one.small:.0%}",
            "Dense" if one.large == 1 else f"{one.large:.0%}",
            f"{one.cost(agreement):.1%}",
        ]
        for agreement, one in costs.items()
        if one.threshold(agreement) is not None
    ]
    if promised:
        heads = ("same best as Dense", "first at", "again at", "mean cost of Dense")
        print_table(heads, promised, f"the promise, from {lists} lists")


def _lists(model: str, lists: str | None, count: int, data: str | None) -> list[tuple[Any, Any]]:
    """Return (query, documents) pairs: the user's own, the testbed's of a model that ships, or scenes."""
    from radical_rerank.cli.lab import _testbed
    from radical_rerank.embedded import MODELS
    from radical_rerank.lab.own_lists import own_lists

    if lists is not None:
        source = own_lists(lists)
        if source.tasks[0].candidates is None:
            raise InputError(f"{lists} has no lists of documents to rank")
    else:
        testbed = _testbed(model if model in MODELS else "scenes", data)
        source = testbed.for_fitting(testbed.name, count)
        if model not in MODELS:
            log.warning(
                "tuning on generated scenes, so the promise of --agreement holds for lists like them: "
                "pass lists of your own with --lists FILE.jsonl"
            )
    return source.pairs(count)
