"""What an evaluation found: its rows added up to one plain dictionary, which is evaluation.json.

    {"benchmarks": {name: {...}}, "mean": ..., "settings": {...}}

Shares are in 0..1. Nothing in it depends on when, by how many processes, or in how many goes the work was done.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from torl_eval.benchmarks import PAPER_BENCHMARKS
from torl_eval.estimators import answer_classes, average, graders_equal, majority, pass_at
from torl_grading import Grader
from torl_trl.metrics import Ratio, metric_values
from torl_trl.rollout import StopReason

Row = Mapping[str, Any]


def summarize(rows: Mapping[str, Mapping[str, Sequence[Row]]], titles: Mapping[str, str], grader: Grader) -> dict:
    """Add up `rows[benchmark][problem_id]`, the samples of a problem in order, each as `run_items` writes it.

    `mean` is the unweighted mean of the benchmarks' averages; `paper_mean` that of the paper's five, when all are
    there.
    """
    benchmarks = {name: _summarize_one(titles[name], problems, grader) for name, problems in rows.items()}
    averages = {name: benchmark["avg"] for name, benchmark in benchmarks.items()}
    result: dict[str, Any] = {"benchmarks": benchmarks, "mean": sum(averages.values()) / len(averages)}
    if set(PAPER_BENCHMARKS) <= averages.keys():
        result["paper_mean"] = sum(averages[name] for name in PAPER_BENCHMARKS) / len(PAPER_BENCHMARKS)
    return result


def _summarize_one(title: str, problems: Mapping[str, Sequence[Row]], grader: Grader) -> dict[str, Any]:
    correct = [[row["correct"] for row in samples] for samples in problems.values()]
    extracted = [[row["extracted"] for row in samples] for samples in problems.values()]
    equal = graders_equal(grader)
    classes = [answer_classes(*answers, equal) for answers in zip(extracted, correct, strict=True)]
    estimate = average(correct)
    rows = [row for samples in problems.values() for row in samples]
    measured: dict[str, Ratio] = {}
    for row in rows:
        for name, pair in row["measured"].items():
            measured[name] = measured.get(name, Ratio()) + Ratio(*pair)
    executed = [[call for call in row["calls"] if call["seconds"] is not None] for row in rows]
    calls = [call for calls in executed for call in calls]
    return {
        "title": title,
        "rows": len(problems),
        "samples": len(correct[0]),
        "avg": estimate.value,
        "se_problems": estimate.se_problems,
        "se_samples": estimate.se_samples,
        "pass_at": {str(k): value for k, value in pass_at(correct).items()},
        "maj": majority(classes, correct),
        "shares": {
            "no_box": _share(row["extracted"] is None for row in rows),
            "truncated": _share(
                row["stop_reason"] in (StopReason.LENGTH, StopReason.OBSERVATION_OVERFLOW) for row in rows
            ),
            "timed_out": _share(any(call["status"] == "timeout" for call in calls) for calls in executed),
            "grading_timed_out": _share(row["reason"] == "timeout" for row in rows),
            "code_used": _share(bool(calls) for calls in executed),
            "code_error": _share(call["status"] != "ok" for call in calls),
        },
        "calls": len(calls) / len(rows),
        "tokens": sum(len(row["completion_ids"]) for row in rows) / len(rows),
        "observation_tokens": sum(row["env_mask"].count(0) for row in rows) / len(rows),
        "metrics": metric_values(measured),
        "problems": {
            problem_id: {
                "correct": [int(row["correct"]) for row in samples],
                "extracted": [row["extracted"] for row in samples],
                "solution": samples[0]["solution"],
            }
            for problem_id, samples in problems.items()
        },
    }


def _share(flags: Any) -> float | None:
    """Of no cases there is no share."""
    flags = list(flags)
    return sum(flags) / len(flags) if flags else None
