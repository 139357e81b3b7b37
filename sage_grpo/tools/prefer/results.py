"""`result`: who wins and how sure that is, as a page and as JSON beside it."""

import argparse
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path
from statistics import median, pvariance
from typing import Any

from sage_grpo.escape import terminal_text
from sage_grpo.exit_codes import DONE
from sage_grpo.files.foreign import replace_text
from sage_grpo.files.json_files import write_json
from sage_grpo.runs.preferences import KIND
from sage_grpo.tools.paired import aligned
from sage_grpo.tools.prefer.answers import Answer, read_answers
from sage_grpo.tools.prefer.statistics import MANY_RATERS, Share, krippendorff, more_prompts, share
from sage_grpo.tools.prefer.study import (
    BAD,
    LEFT,
    RIGHT,
    TIE,
    Study,
    StudyClip,
    StudyError,
    clip_path,
)
from sage_grpo.tools.templating import render

SHOWN = 6  # disputed pairs on the page
METHOD = (
    "Ties, and pairs of two bad clips, count half. Intervals are 95 %: Wilson's, with the variance "
    "between prompts{raters} (cluster-robust) and Student's quantile for their number."
)


def result(options: argparse.Namespace) -> int:
    study, answers = read_answers(options.answers)
    if not answers:
        raise StudyError(f"{options.answers} holds no answers yet")
    page = options.output or options.answers.with_suffix(".html")
    record = summarize(study, answers)
    text = render(
        "result.html",
        title=f"Preferences: {' against '.join(study.systems)}",
        record=record,
        tables=tables(record),
        disputed=disputed(study, answers, options.answers),
    )
    replace_text(page, text)
    write_json(page.with_suffix(".json"), record)
    shown = [
        aligned([[terminal_text(cell) for cell in row] for row in table.rows])
        for table in tables(record)
    ]
    print("\n\n".join([*shown, str(page)]))
    return DONE


def summarize(study: Study, answers: Sequence[Answer]) -> dict[str, Any]:
    """Everything that the page says, as plain values."""
    raters = list(dict.fromkeys(answer.rater for answer in answers))
    prompts = {study.prompt(answer.pair) for answer in answers}
    both = " and between raters" if len(raters) >= MANY_RATERS else ""
    return {
        "kind": KIND,
        "systems": list(study.systems),
        "answers": len(answers),
        "pairs": len({answer.pair for answer in answers}),
        "prompts": len(prompts),
        "created": study.created,
        "method": METHOD.format(raters=both),
        "questions": {
            question: {
                "comparisons": comparisons(study, answers, question),
                "alpha": alpha(answers, question),
                "rewards": reward_agreement(study, answers, question),
            }
            for question in study.questions
        },
        "raters": {rater: rater_figures(study, answers, rater) for rater in raters},
    }


# systems


def comparisons(study: Study, answers: Sequence[Answer], question: str) -> list[dict[str, Any]]:
    """Win rates of each system against each earlier one; empty for pairs of one system."""
    found = []
    for other, system in combinations(range(len(study.systems)), 2):
        wins: list[float] = []
        choices: list[str] = []
        chosen = [answer for answer in answers if systems_of(study, answer.pair) == {other, system}]
        for answer in chosen:
            first_system = study.clips[study.pairs[answer.pair][0]].system
            outcome = answer.outcome(question)
            wins.append(outcome if first_system == system else 1 - outcome)
            choices.append(answer.choices[question])
        if not chosen:
            continue
        prompts = [study.prompt(answer.pair) for answer in chosen]
        rate = share(wins, prompts, [answer.rater for answer in chosen])
        found.append(
            {
                "system": study.systems[system],
                "other": study.systems[other],
                "wins": wins.count(1.0),
                "losses": wins.count(0.0),
                "ties": choices.count(TIE),
                "both_bad": choices.count(BAD),
                "win_rate": asdict(rate),
                "decided": rate.decided,
                "more_prompts": more_prompts(rate, len(set(prompts))),
            }
        )
    return found


def systems_of(study: Study, pair: int) -> set[int]:
    return {study.clips[clip].system for clip in study.pairs[pair]}


# raters


def alpha(answers: Sequence[Answer], question: str) -> float:
    """Krippendorff's alpha between raters, on the first showings of pairs."""
    units: dict[int, list[float]] = defaultdict(list)
    for answer in answers:
        if not answer.repeat:
            units[answer.pair].append(answer.outcome(question))
    return krippendorff(list(units.values()))


def rater_figures(study: Study, answers: Sequence[Answer], rater: str) -> dict[str, Any]:
    """Answers, seconds, side bias, and how often a rater said the same about a pair that was shown twice."""
    own = [answer for answer in answers if answer.rater == rater]
    first = {answer.pair: answer for answer in own if not answer.repeat}
    same = []
    prompts = []
    for answer in own:
        if answer.repeat and answer.pair in first:
            for question in study.questions:
                same.append(float(answer.outcome(question) == first[answer.pair].outcome(question)))
                prompts.append(study.prompt(answer.pair))
    choices = [choice for answer in own for choice in answer.choices.values()]
    decided = [choice for choice in choices if choice in (LEFT, RIGHT)]
    return {
        "answers": len(own),
        "median_seconds": median(answer.seconds for answer in own),
        "ties": (choices.count(TIE) + choices.count(BAD)) / len(choices),
        "left": decided.count(LEFT) / len(decided) if decided else math.nan,
        "consistency": asdict(share(same, prompts)),
    }


# rewards


def reward_agreement(
    study: Study, answers: Sequence[Answer], question: str
) -> dict[str, dict[str, Any]]:
    """By score: how often the preferred clip has the higher one; ties and pairs without that score are left out."""
    agreement = {}
    for name in score_names(study):
        right = []
        chosen = []
        for answer in answers:
            outcome = answer.outcome(question)
            first, second = pair_scores(study, answer.pair, name)
            if outcome != 0.5 and first != second and not math.isnan(first + second):
                right.append(float((first > second) == (outcome == 1)))
                chosen.append(answer)
        prompts = [study.prompt(answer.pair) for answer in chosen]
        agreement[name] = asdict(share(right, prompts, [answer.rater for answer in chosen]))
    return agreement


def score_names(study: Study) -> list[str]:
    """The scores that any clip has: that of one clip may have failed."""
    return list(dict.fromkeys(name for clip in study.clips for name in clip.scores))


def pair_scores(study: Study, pair: int, name: str) -> tuple[float, float]:
    """A score of the first and of the second clip; NaN where a clip lacks it."""
    first, second = (study.clips[clip].scores.get(name, math.nan) for clip in study.pairs[pair])
    return first, second


# disputed clips


@dataclass(frozen=True)
class Shown:
    """A clip on the page."""

    path: Path
    system: str
    scores: Mapping[str, float]


@dataclass(frozen=True)
class Disputed:
    """A pair about which raters disagree, or people and rewards do."""

    prompt: str
    clips: tuple[Shown, Shown]
    reason: str


def disputed(study: Study, answers: Sequence[Answer], path: Path) -> list[Disputed]:
    """The pairs with the most disagreement among raters, then those where a score contradicts people most.

    Pairs of which a file is missing are left out.
    """
    shown_answers = [answer for answer in answers if has_files(study, answer.pair, path)]
    found: dict[int, str] = {}
    for pair, reason in disagreements(study, shown_answers):
        if len(found) < SHOWN // 2:
            found.setdefault(pair, reason)
    for pair, reason in contradictions(study, shown_answers):
        if len(found) < SHOWN:
            found.setdefault(pair, reason)

    shown = []
    for pair, reason in found.items():
        first, second = (study.clips[clip] for clip in study.pairs[pair])
        clips = (shown_clip(study, first, path), shown_clip(study, second, path))
        shown.append(Disputed(study.prompt(pair), clips, reason))
    return shown


def has_files(study: Study, pair: int, path: Path) -> bool:
    """Whether both clips of a pair are there; a study may come without them."""
    return all(clip_path(path, study.clips[clip]).is_file() for clip in study.pairs[pair])


def disagreements(study: Study, answers: Sequence[Answer]) -> list[tuple[int, str]]:
    """Pairs about which raters disagree in one question, on first showings; the largest variance first."""
    outcomes: dict[tuple[int, str], list[float]] = defaultdict(list)
    for answer in answers:
        if not answer.repeat:
            for question in study.questions:
                outcomes[answer.pair, question].append(answer.outcome(question))
    found = []
    for (pair, question), values in outcomes.items():
        variance = pvariance(values)
        if variance:
            reason = (
                f"Raters disagree ({question}): {values.count(1.0)} prefer the first clip, "
                f"{values.count(0.0)} the second, {values.count(0.5)} neither."
            )
            found.append((variance, pair, reason))
    found.sort(key=lambda row: -row[0])
    return [(pair, reason) for _, pair, reason in found]


def contradictions(study: Study, answers: Sequence[Answer]) -> list[tuple[int, str]]:
    """Pairs that a score orders against people's mean answer, the largest difference first, in units of its spread."""
    outcomes: dict[int, list[float]] = defaultdict(list)
    for answer in answers:
        outcomes[answer.pair] += [answer.outcome(question) for question in study.questions]
    found = []
    for name in score_names(study):
        values = [clip.scores[name] for clip in study.clips if name in clip.scores]
        mean = sum(values) / len(values)
        spread = math.hypot(*(value - mean for value in values)) / math.sqrt(len(values))
        if not spread > 0:
            continue
        for pair, of_pair in outcomes.items():
            liking = 2 * sum(of_pair) / len(of_pair) - 1  # 1: all prefer the first
            first, second = pair_scores(study, pair, name)
            contradiction = -liking * (first - second) / spread
            if contradiction > 0:  # NaN is not
                preferred = "first" if liking > 0 else "second"
                reason = f"People prefer the {preferred} clip, {name} the other one."
                found.append((contradiction, pair, reason))
    found.sort(key=lambda row: -row[0])
    return [(pair, reason) for _, pair, reason in found]


def shown_clip(study: Study, clip: StudyClip, path: Path) -> Shown:
    return Shown(clip_path(path, clip), study.systems[clip.system], clip.scores)


# tables


@dataclass(frozen=True)
class ResultTable:
    title: str
    rows: list[list[str]]
    caption: str = ""


def tables(record: Mapping[str, Any]) -> list[ResultTable]:
    """The figures of a record as rows of text, titles first."""
    wins = [["", "win rate", "95 %", "wins", "losses", "ties", "both bad", "more prompts needed"]]
    agreement = [["", "agreement", "95 %", "answers"]]
    for question, part in record["questions"].items():
        for row in part["comparisons"]:
            rate = Share(**row["win_rate"])
            name = f"{row['system']} against {row['other']}, {question}"
            counts = [str(row[key]) for key in ("wins", "losses", "ties", "both_bad")]
            wins.append([name, *percent(rate), *counts, needed(row["more_prompts"])])
        for name, values in part["rewards"].items():
            agrees = Share(**values)
            agreement.append([f"{name}, {question}", *percent(agrees), str(agrees.count)])

    raters = [["", "answers", "ties", "left", "same answer twice", "95 %", "median seconds"]]
    for name, figures in record["raters"].items():
        consistency = Share(**figures["consistency"])
        cells = [str(figures["answers"]), f"{figures['ties']:.0%}", number(figures["left"], ".0%")]
        raters.append([name, *cells, *percent(consistency), f"{figures['median_seconds']:.1f}"])
    alphas = [
        f"{question} {number(part['alpha'], '.2f')}"
        for question, part in record["questions"].items()
    ]
    found = [
        ResultTable("Win rates", wins, record["method"]),
        ResultTable(
            "Raters",
            raters,
            f"Krippendorff's alpha between raters: {', '.join(alphas)} (1: they agree, 0: as by chance).",
        ),
        ResultTable(
            "People and rewards",
            agreement,
            "How often the preferred clip has the higher score; ties left out.",
        ),
    ]
    return [table for table in found if len(table.rows) > 1]


def percent(value: Share) -> tuple[str, str]:
    if not value.count:
        return "–", "–"
    return f"{value.mean:.0%}", f"{value.low:.0%} to {value.high:.0%}"


def number(value: float | None, form: str) -> str:
    return "–" if value is None or math.isnan(value) else format(value, form)


def needed(more: int | None) -> str:
    """How many more prompts would decide a comparison that stays as it is."""
    if more == 0:
        return "none: decided"
    return "cannot be decided" if more is None else f"about {more}"
