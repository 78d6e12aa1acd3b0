"""Tables of an evaluation: beside the paper's, on a console, in a model card.

`results` is the content of an evaluation.json, as `torl_eval.results` makes it.
"""

from collections.abc import Iterable, Mapping
from pathlib import PurePath
from typing import Any

from torl_eval.benchmarks import BENCHMARKS, PAPER_BENCHMARKS

Results = Mapping[str, Any]
Benchmark = Mapping[str, Any]

PAPER_TABLE = (
    ("Qwen2.5-Math-1.5B-Instruct", "no", (10.0, 10.0, 66.0, 31.0, 62.5), None),
    ("Qwen2.5-Math-1.5B-Instruct-TIR", "yes", (13.3, 13.3, 73.8, 41.3, 55.0), 41.3),
    ("ToRL-1.5B", "yes", (26.7, 26.7, 77.8, 44.0, 67.5), None),
    ("Qwen2.5-Math-7B-Instruct", "no", (10.0, 16.7, 74.8, 32.4, 65.0), None),
    ("Qwen2.5-Math-7B-Instruct-TIR", "yes", (26.7, 16.7, 78.8, 45.0, 70.0), None),
    ("SimpleRL-Zero", "no", (33.3, 6.7, 77.2, 37.6, 62.5), None),
    ("rStar-Math-7B", "no", (26.7, None, 78.4, 47.1, 47.5), None),
    ("Eurus-2-7B-PRIME", "no", (26.7, 13.3, 79.2, 42.1, 57.4), 43.1),
    ("ToRL-7B", "yes", (43.3, 30.0, 82.2, 49.9, 75.0), 62.1),
)
"""The paper's Table 3: model, tool, accuracies in percent in the order of `PAPER_BENCHMARKS` (None: not given), and
the mean that the paper prints, where that is not the mean of its row."""


def markdown_table(results: Results, *, label: str) -> str:
    """Return the paper's Table 3 with a row for `label` below it, if its sets were run, and a table of others."""
    paper = _beside_the_paper(results, label) if results["benchmarks"].keys() & set(PAPER_BENCHMARKS) else []
    others = [benchmark for name, benchmark in results["benchmarks"].items() if name not in PAPER_BENCHMARKS]
    if not others:
        return "\n".join(paper)
    lines = [_row(["set", "problems", label]), _row(["---"] * 3)]
    lines += [_row([benchmark["title"], str(benchmark["rows"]), _percent(benchmark)]) for benchmark in others]
    return "\n".join([*paper, *([""] if paper else []), *lines])


def _beside_the_paper(results: Results, label: str) -> list[str]:
    titles = [BENCHMARKS[name].title for name in PAPER_BENCHMARKS]
    lines = [_row(["model", "tool", *titles, "mean"]), _row(["---"] * (len(titles) + 3))]
    notes = []
    for model, tool, values, printed in PAPER_TABLE:
        given = [value for value in values if value is not None]
        mean = f"{sum(given) / len(given):.1f}" if len(given) == len(values) else "-"
        if printed is not None:
            notes.append(f"{printed} for {model}")
            mean += " ¹"
        lines.append(_row([model, tool, *("-" if value is None else f"{value:.1f}" for value in values), mean]))
    ours = [results["benchmarks"].get(name) for name in PAPER_BENCHMARKS]
    partial = _partial(results)
    tool = "yes" if results["settings"]["max_tool_calls"] else "no"
    cells = [f"{label} ²" if partial else label, tool, *map(_percent, ours), _mean(ours)]
    lines.append(_row(cell if cell == "-" else f"**{cell}**" for cell in cells))
    lines += [
        "",
        "In percent; ± is a standard error over problems. The paper's rows: one greedy sample, at most one call.",
        f"¹ The mean of the row; the paper prints {', '.join(notes[:-1])} and {notes[-1]}.",
    ]
    return lines + ([f"² Not whole sets: {', '.join(partial)}."] if partial else [])


def console_table(results: Results) -> str:
    """Return what there is to know of each benchmark as plain text. `calls` and `tokens` are per rollout; the other
    columns are in percent: of rollouts, but `failed` of programs."""
    shares = ("no_box", "truncated", "timed_out", "code_used", "code_error")
    head = ["benchmark", "problems", "avg@k", "± se", "pass@k", "maj@k"]
    rows = [[*head, "no box", "cut", "timed out", "code", "failed", "calls", "tokens"]]
    for benchmark in results["benchmarks"].values():
        best = benchmark["pass_at"][max(benchmark["pass_at"], key=int)]
        rows.append(
            [
                benchmark["title"],
                f"{benchmark['rows']} x {benchmark['samples']}",
                *map(_share, (benchmark["avg"], benchmark["se_problems"], best, benchmark["maj"])),
                *(_share(benchmark["shares"][name]) for name in shares),
                f"{benchmark['calls']:.2f}",
                f"{benchmark['tokens']:.0f}",
            ]
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(_aligned(row, widths) for row in rows)


def _aligned(cells: list[str], widths: list[int]) -> str:
    first, *others = (cell.rjust(width) for cell, width in zip(cells, widths, strict=True))
    return "  ".join([first.strip().ljust(widths[0]), *others])


def markdown_section(results: Results) -> str:
    """Return a section for a model card: the table, the settings, and what the numbers cannot tell."""
    settings = results["settings"]
    versions = ", ".join(f"{name} {version}" for name, version in settings["versions"].items() if version)
    lines = [
        *("## Evaluation", "", markdown_table(results, label=PurePath(settings["model"]).name), ""),
        f"Samples per problem {settings['samples']}, temperature {settings['temperature']:g}, "
        f"top_p {settings['top_p']:g}, seed {settings['seed']}; completions of up to "
        f"{settings['max_completion_length']} tokens; tool calls at most {settings['max_tool_calls']}; "
        f"prompt {settings['prompt']}; engine {settings['engine']}. Answers in the last box, verified ({versions}).",
        *settings["data_checks"].values(),
        "One problem is 3.3 points of AIME and 2.5 of AMC23. Another engine, batch size or data type may change "
        "answers, greedy ones too.",
    ]
    return "\n".join(lines) + "\n"


def _partial(results: Results) -> list[str]:
    """The registered sets that were not run as a whole, or are another copy."""
    return [
        f"{benchmark['title']} {benchmark['rows']} of {BENCHMARKS[name].rows} problems"
        for name, benchmark in results["benchmarks"].items()
        if name in BENCHMARKS and benchmark["rows"] != BENCHMARKS[name].rows
    ]


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _percent(benchmark: Benchmark | None) -> str:
    if benchmark is None:
        return "-"
    error = benchmark["se_problems"]
    return _share(benchmark["avg"]) + (f" ± {_share(error)}" if error is not None else "")


def _mean(benchmarks: list[Benchmark | None]) -> str:
    """The mean of all five with its standard error: the sets are independent."""
    if not all(benchmarks):
        return "-"
    count = len(benchmarks)
    error = sum((benchmark["se_problems"] or 0.0) ** 2 for benchmark in benchmarks) ** 0.5 / count
    return f"{_share(sum(benchmark['avg'] for benchmark in benchmarks) / count)} ± {_share(error)}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f}"
