"""The texts that follow from a study's runs: table.csv, claims.csv, and both as Markdown. Pure functions of study.json and runs.csv."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

from .claims import Interval, difference, verdict
from .compare import Stat, stat
from .measures import MEASURES, Measure
from .read import settled
from .study import EARLY, GROWTH, Facts, Measured, Rows, as_csv, watched_alone
from .units import big

__all__ = ["NOT_YET", "claims_markdown", "columns", "conditions", "table_markdown", "texts"]

NOT_YET = "not measured yet"  # by runs that do not tell the number a claim is about

_PARAMETERS, _MACS, _SAD = "parameters kept", "multiply-adds kept", "mask changes per weight (SAD)"
_LOSS = "training loss at the end"


def texts(facts: Facts, rows: Rows) -> dict[str, str]:
    """All files that follow from the runs, by name."""
    page = [f"# {facts['title']}", table_markdown(facts, rows), claims_markdown(facts, rows), conditions(rows)]
    page += ["\n".join(f"- {note}" for note in facts["notes"])] if facts["notes"] else []
    return {
        "table.csv": as_csv([_numbers(facts, row, rows) for row in facts["rows"] if rows[row["label"]]]),
        "claims.csv": as_csv([_claim_numbers(facts, claim, rows) for claim in facts["claims"]]),
        "table.md": "\n\n".join(page) + "\n",
    }


# ---- rows ----


def _stat(found: Sequence[Measured], value: Callable[[Measured], float]) -> Stat:
    result = stat(map(value, found))
    assert result is not None
    return result


def _numbers(facts: Facts, row: Facts, rows: Rows) -> dict[str, Any]:
    found = rows[row["label"]]
    alone = row["label"] in watched_alone([other for other in facts["rows"] if rows[other["label"]]])
    score, sad = _stat(found, lambda run: run.score), None if alone else _stat(found, lambda run: run.sad)
    loss = _train_loss(found)
    numbers = {
        "row": row["label"],
        "n": score.n,
        "metric": found[0].metric,
        "score": score.mean,
        "score_sd": score.spread,
        "sad": sad and sad.mean,
        "sad_sd": sad and sad.spread,
        "kept": _stat(found, lambda run: run.kept).mean,
        "params": _stat(found, lambda run: run.params).mean,
        "macs": _macs(found),
        "epochs": found[0].epochs,
        "train_loss": loss and loss.mean,
        "train_loss_sd": loss and loss.spread,
        "paper": row["paper"],
    }
    for metric in _early_claimed(facts):
        early = _early(found, metric)
        numbers |= {metric: early and early.mean, f"{metric}_sd": early and early.spread}
    for name, key in _settled(rows).items():
        value = _found(found, name)
        numbers |= {key: value and value.mean, f"{key}_sd": value and value.spread}
    for name in _evaluations(rows):
        numbers |= _evaluation_numbers(found, name, MEASURES[facts["task"]])
    return numbers


def _early_claimed(facts: Facts) -> list[str]:
    """SAD_{0:1} and SAD_{0:10}, where the study claims something about them."""
    return list(dict.fromkeys(claim["metric"] for claim in facts["claims"] if claim["metric"].startswith(EARLY)))


def _early(found: Sequence[Measured], metric: str) -> Stat | None:
    return stat(run.early[metric] for run in found if metric in run.early)


def _early_text(found: Sequence[Measured], metric: str) -> str:
    value = _early(found, metric)
    return "" if value is None else _text(Stat(100 * value.mean, value.spread and 100 * value.spread, value.n), 3)


def _settled(rows: Rows) -> dict[str, str]:
    return settled(run.found for runs in rows.values() for run in runs)


def _found(found: Sequence[Measured], name: str) -> Stat | None:
    """What the seeds of a row have settled on."""
    return stat(run.found[name] for run in found if name in run.found)


def _found_text(found: Sequence[Measured], name: str) -> str:
    value = _found(found, name)
    return "" if value is None else f"{value.mean:.2g}" + ("" if value.spread is None else f" ± {value.spread:.1g}")


def _evaluations(rows: Rows) -> list[str]:
    """The names of all evaluations on other data."""
    return sorted({key.rpartition(".")[0] for runs in rows.values() for run in runs for key in run.evaluations})


def _evaluated(found: Sequence[Measured], name: str, measure: Measure) -> Stat | None:
    """The headline metric of an evaluation over the seeds of a row: of the weights that the score is of, or else of the plain ones."""
    of_score = [run.evaluations[key] for run in found if (key := f"{name}.{run.metric}") in run.evaluations]
    plain = f"{name}.{measure.name}"
    return stat(of_score or (run.evaluations[plain] for run in found if plain in run.evaluations))


def _evaluation_numbers(found: Sequence[Measured], name: str, measure: Measure) -> dict[str, Any]:
    value, head = _evaluated(found, name, measure), f"{name}.{measure.name}"
    mean, spread, n = (None, None, 0) if value is None else (value.mean, value.spread, value.n)
    return {head: mean, f"{head}_sd": spread, f"{head}_n": n}


def _evaluation_text(found: Sequence[Measured], name: str, measure: Measure) -> str:
    """Where only some seeds have it, it says how many."""
    value = _evaluated(found, name, measure)
    if value is None:
        return ""
    shown = Stat(measure.factor * value.mean, None if value.spread is None else measure.factor * value.spread, value.n)
    return _text(shown, measure.digits) + (f" ({value.n} of {len(found)} seeds)" if value.n < len(found) else "")


def table_markdown(facts: Facts, rows: Rows, wanted: Callable[[str], bool] = lambda label: True, *, brief: bool = False) -> str:
    """The rows whose labels are wanted and that have runs, and what SAD means; a brief table has four columns, and no line below it."""
    shown = columns(facts, rows, wanted, brief=brief)
    there = _there(facts, rows, wanted)
    lines = [list(shown), ["---"] * len(shown), *map(list, zip(*shown.values(), strict=True))]
    below = [] if brief else ["", _about_sad(facts, [row for row, _ in there])]
    below += ["", same] if not brief and (same := _about_same(there)) else []
    return "\n".join([*(f"| {' | '.join(cells)} |" for cells in lines), *below])


def _there(facts: Facts, rows: Rows, wanted: Callable[[str], bool]) -> list[tuple[Facts, list[Measured]]]:
    return [(row, rows[row["label"]]) for row in facts["rows"] if rows[row["label"]] and wanted(row["label"])]


def columns(facts: Facts, rows: Rows, wanted: Callable[[str], bool] = lambda label: True, *, brief: bool = False) -> dict[str, list[str]]:
    """The cells of a table by the heads of its columns, of which the first, "", has the labels. Columns that say nothing are left out."""
    measure, there = MEASURES[facts["task"]], _there(facts, rows, wanted)
    elsewhere, alone = [] if brief else _evaluations(rows), watched_alone([row for row, _ in there])
    heads: dict[str, list[str]] = {
        "": [row["label"] for row, _ in there],
        measure.words: [score_text(found, measure) for _, found in there],
        **{words: [_beside(found, metric, measure) for _, found in there] for metric, words in measure.beside},
        **{f"{name}: {measure.words}": [_evaluation_text(found, name, measure) for _, found in there] for name in elsewhere},
        "weights kept in sparse layers": [f"{_text(_stat(found, lambda run: 100 * run.kept), 1, silent=0.05)} %" for _, found in there],
        _PARAMETERS: [big(_stat(found, lambda run: run.params).mean) for _, found in there],
        _MACS: [big(macs) if (macs := _macs(found)) else "" for _, found in there],
        _SAD: ["" if row["label"] in alone else _text(_stat(found, lambda run: run.sad), 2) for row, found in there],
        **{_early_head(metric): [_early_text(found, metric) for _, found in there] for metric in ([] if brief else _early_claimed(facts))},
        _LOSS: [_text(loss, 3 if abs(loss.mean) >= 0.05 else 4) if (loss := _train_loss(found)) else "" for _, found in there],
        **{f"{name} found": [_found_text(found, name) for _, found in there] for name in ([] if brief else _settled(rows))},
        "epochs": [f"{found[0].epochs:.4g}" for _, found in there],
        "seeds": [str(len(found)) for _, found in there],
        _paper_head(facts): [row["paper"] for row, _ in there],
    }
    if len(set(heads["epochs"])) < 2:
        del heads["epochs"]
    if brief:
        heads = {head: cells for head, cells in heads.items() if head not in (_PARAMETERS, _MACS, _LOSS, _paper_head(facts))}
        watched = [f" (of {row['watched']} masks)" if row.get("watched") and row["label"] not in alone else "" for row, _ in there]
        heads[_SAD] = [cell + note for cell, note in zip(heads[_SAD], watched, strict=True)]
    return {head: cells for head, cells in heads.items() if head in ("", "seeds") or any(cells)}


def _paper_head(facts: Facts) -> str:
    """With the network and data that the paper's numbers are of; study.json of earlier versions does not tell."""
    return f"in the paper ({facts['paper_of']})" if facts.get("paper_of") else "in the paper, on its own network and data"


def _early_head(metric: str) -> str:
    return f"masks not as at the start, step {metric.removeprefix(EARLY)} (%)"


def _about_sad(facts: Facts, rows: Sequence[Facts]) -> str:
    every = f", counted every {facts['sad_every']} steps" if facts.get("sad_every") else ""
    said = f"SAD: how many times a weight of a sparse layer changed between kept and pruned in the whole run, on average{every}."
    by_pattern: dict[str, list[str]] = {}
    for row in rows:
        if row.get("watched"):
            by_pattern.setdefault(row["watched"], []).append(row["label"])
    alone = watched_alone(rows)
    for pattern, labels in by_pattern.items():
        masks = f"of the {pattern} masks that pruning would give"
        lone = f"not shown, since it is {masks}, and no other row has {pattern}"
        said += f" For {', '.join(labels)}: {lone if alone & {*labels} else masks}."
    return said


def _about_same(there: Sequence[tuple[Facts, Sequence[Measured]]]) -> str:
    """Which rows are one training under two names; "" where none are. On a small network an allocation may have nothing to choose."""
    pairs, mixes = [], False
    for i, (row, found) in enumerate(there):
        twin = next((other for other, its_runs in there[:i] if _are_same(found, its_runs)), None)
        if twin is not None:
            pairs.append(f'"{row["label"]}" is "{twin["label"]}"')
            mixes = mixes or ("pattern" in row and row["pattern"] is None)
    if not pairs:
        return ""
    why = " A budget that gives every layer the same pattern mixes nothing." * mixes
    return f"Equal in all numbers of all seeds, so one training under two names: {'; '.join(pairs)}.{why}"


def _are_same(these: Sequence[Measured], those: Sequence[Measured]) -> bool:
    numbers = attrgetter("score", "sad", "kept", "params", "macs", "train_loss")
    mine, its = ({run.seed: numbers(run) for run in runs} for runs in (these, those))
    common = mine.keys() & its.keys()
    return bool(common) and all(mine[seed] == its[seed] for seed in common)


def _macs(found: Sequence[Measured]) -> float | None:
    """The mean of the runs that tell them: those of unstructured methods from before they did have none."""
    told = [run.macs for run in found if run.macs is not None]
    return sum(told) / len(told) if told else None


def _train_loss(found: Sequence[Measured]) -> Stat | None:
    """Of the seeds that tell it: a score that is worse in spite of a lower loss is a matter of generalization, not of training."""
    return stat(run.train_loss for run in found if run.train_loss is not None)


def _beside(found: Sequence[Measured], metric: str, measure: Measure) -> str:
    """Another metric of the same weights."""
    of = "ema_" if found[0].metric.startswith("ema_") else ""
    values = stat(measure.factor * run.metrics[f"{of}{metric}"] for run in found if f"{of}{metric}" in run.metrics)
    return "" if values is None else _text(values, measure.digits)


def score_text(found: Sequence[Measured], measure: Measure) -> str:
    """The score of a row, as its task counts it."""
    return _text(_stat(found, lambda run: measure.factor * run.score), measure.digits)


def _text(value: Stat, digits: int, silent: float = 0.0) -> str:
    """Mean ± spread; a spread below `silent` is not mentioned."""
    spread = "" if value.spread is None or value.spread < silent else f" ± {value.spread:.{digits}f}"
    return f"{value.mean:.{digits}f}{spread}"


# ---- claims ----


def _interval(claim: Facts, rows: Rows) -> Interval | None:
    first, second = ([run.value(claim["metric"]) for run in rows[claim[side]]] for side in ("first", "second"))
    return difference(*([float(value) for value in values if value is not None] for values in (first, second)))


def _has_seeds(claim: Facts, rows: Rows) -> bool:
    """Whether a claim could be judged, if the runs told what it is about."""
    return all(len(rows[claim[side]]) > 1 for side in ("first", "second"))


def _claim_numbers(facts: Facts, claim: Facts, rows: Rows) -> dict[str, Any]:
    interval = _interval(claim, rows)
    numbers = (None, None, None) if interval is None else (interval.mean, interval.low, interval.high)
    said = verdict(claim, interval, MEASURES[facts["task"]])
    return {
        "claim": claim["text"],
        "metric": claim["metric"],
        **dict(zip(("difference", "low", "high"), numbers, strict=True)),
        "verdict": said,
    }


def claims_markdown(facts: Facts, rows: Rows, wanted: Callable[[str], bool] = lambda label: True) -> str:
    """The claims of wanted rows that there are runs for, and what the words of the last column mean. Runs from before a number was
    recorded leave its claims open."""
    lines = ["| claim | difference of means | 95 % interval | here |", "| --- | --- | --- | --- |"]
    judged, level = judgements(facts, rows), False
    for claim in facts["claims"]:
        if wanted(claim["first"]) and wanted(claim["second"]) and (claim["text"] in judged or _has_seeds(claim, rows)):
            lines.append(f"| {claim['text']} | {' | '.join(judged.get(claim['text'], ('', '', NOT_YET)))} |")
            level = level or claim["level"]
    if len(lines) == 2:
        return "No claim can be judged yet: that takes two seeds or more of each of its rows (--seeds)."
    words = "holds: all of the interval is on the side that the claim says; fails: on the other; open: neither."
    if level:
        words += f" Level: all of it within ± {MEASURES[facts['task']].level:g}; open, but worse: not all of it, and zero is not in it."
    return "\n".join([*lines, "", words])


def judgements(facts: Facts, rows: Rows) -> dict[str, tuple[str, str, str]]:
    """The claims that there are runs for, by their words: difference of means, interval, verdict."""
    measure, found = MEASURES[facts["task"]], {}
    for claim in facts["claims"]:
        interval = _interval(claim, rows)
        if interval is not None:
            mean, low, high = _shown(claim, interval, measure)
            found[claim["text"]] = (mean, f"{low} to {high}", _word(claim, interval, measure))
    return found


def _word(claim: Facts, interval: Interval, measure: Measure) -> str:
    """The verdict; where two rows are neither level nor apart by more than that, which of them is nevertheless the better."""
    word = verdict(claim, interval, measure)
    if claim["level"] and word == "open" and interval.low * interval.high > 0:
        return f"open, but {'better' if measure.better(interval.mean) > 0 else 'worse'}"
    return word


def _shown(claim: Facts, interval: Interval, measure: Measure) -> tuple[str, str, str]:
    metric = claim["metric"]
    early = metric.startswith(EARLY) or metric == GROWTH
    unit = "% of weights" if early else {"score": measure.unit, "train_loss": "(loss)"}.get(metric, "SAD")
    factor = measure.factor if metric == "score" else 100.0 if early else 1.0
    size = abs(factor * interval.mean)
    digits = measure.digits if metric == "score" else 2 if size > 0.05 else 3 if size > 0.005 else 4
    mean, low, high = (f"{factor * value:+.{digits}f}" for value in (interval.mean, interval.low, interval.high))
    return f"{mean} {unit}", low, high


# ---- conditions ----


def conditions(rows: Rows) -> str:
    """On what, by what and with which seeds the runs were made."""
    found = [run for runs in rows.values() for run in runs]
    hardware, torch, sources, folders = (
        sorted({str(getattr(run, name)) for run in found if getattr(run, name)})
        for name in ("hardware", "torch", "commit", "workdir_commit")
    )
    installed = [source for source in sources if source.startswith("nofm ")]
    seeds = sorted({run.seed for run in found})
    parts = [", ".join(hardware), f"torch {', '.join(torch)}"]
    parts += installed
    parts += [f"commit {_short(commits)}"] if (commits := [source for source in sources if source not in installed]) else []
    parts += [f"started in a repository at {_short(folders)}"] if folders else []
    parts.append(f"seeds {', '.join(map(str, seeds))}")
    return f"{'; '.join(parts)}. Mean ± sample standard deviation over seeds; intervals by Welch's t."


def _short(commits: Sequence[str]) -> str:
    return ", ".join(commit[:12] + "+" * commit.endswith("+") for commit in commits)
