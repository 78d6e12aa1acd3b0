"""Two evaluations compared in pairs, and the tables of one."""

import copy
import random

import numpy as np
import pytest

from torl_eval.comparison import compare
from torl_eval.tables import PAPER_TABLE, console_table, markdown_section, markdown_table
from torl_trl.errors import UserError


def evaluation(settings: dict | None = None, **benchmarks: dict[str, list[int]]) -> dict:
    return {
        "benchmarks": {
            name: {"title": name.upper(), "problems": {key: {"correct": value} for key, value in problems.items()}}
            for name, problems in benchmarks.items()
        },
        "settings": settings or {},
    }


def test_the_same_evaluation_differs_by_exactly_nothing():
    draw = random.Random(0)
    problems = {str(number): [draw.randint(0, 1) for _ in range(4)] for number in range(50)}
    same = evaluation({"seed": 0}, aime24=problems, math500=problems)
    comparison = compare(same, copy.deepcopy(same))
    for row in (*comparison.benchmarks.values(), comparison.mean):
        assert (row.value, row.low, row.high, row.won, row.lost) == (0, 0, 0, 0, 0)
        assert not row.excludes_zero
    assert comparison.settings == {}


def test_a_difference_is_paired_by_problem():
    a = evaluation(set={"p": [1, 0], "q": [0, 0], "r": [1, 1], "s": [0, 1]})
    b = evaluation(set={"s": [1, 0], "r": [0, 0], "q": [1, 0], "p": [1, 1]})
    row = compare(a, b).benchmarks["set"]
    assert (row.a, row.b, row.value) == (0.5, 0.5, 0.0)
    assert (row.won, row.lost, row.tied) == (2, 1, 1)
    assert row.low < 0 < row.high


def test_numbers_of_samples_may_differ():
    row = compare(evaluation(set={"p": [1], "q": [0]}), evaluation(set={"p": [1, 1, 0], "q": [0, 0, 0]})).mean
    assert row.value == pytest.approx(-1 / 6)
    assert (row.won, row.lost, row.tied) == (0, 1, 1)


def test_a_clear_gain_excludes_zero_and_is_the_opposite_seen_from_b():
    a = evaluation(set={str(number): [0] for number in range(40)})
    b = evaluation(set={str(number): [int(number < 20)] for number in range(40)})
    forth, back = compare(a, b).mean, compare(b, a).mean
    assert forth.excludes_zero and forth.low > 0.3
    assert back.excludes_zero and back.high < -0.3
    assert forth.value == -back.value == 0.5
    assert (forth.won, forth.lost, forth.tied) == (20, 0, 20)


def test_every_benchmark_counts_the_same_in_the_mean():
    large = {str(number): [0] for number in range(300)}
    a = evaluation(small={"p": [0], "q": [0]}, large=large)
    b = evaluation(small={"p": [1], "q": [1]}, large=large)
    comparison = compare(a, b)
    assert comparison.mean.value == 0.5
    assert (comparison.mean.low, comparison.mean.high) == (0.5, 0.5), "all of small was won, in every resample"


def test_what_only_one_has_is_left_out_and_said():
    a = evaluation({"seed": 0, "engine": "vllm", "template": "x" * 500}, aime24={"p": [0], "q": [0]}, gsm8k={"x": [1]})
    b = evaluation({"seed": 1, "engine": "vllm", "dtype": "float32"}, aime24={"q": [1], "r": [1], "s": [1]}, own={})
    comparison = compare(a, b)
    row = comparison.benchmarks["aime24"]
    assert (row.value, row.only_a, row.only_b) == (1.0, 1, 2)
    assert comparison.uncompared == ("gsm8k", "own")
    assert comparison.settings == {"seed": (0, 1), "template": ("x" * 500, None), "dtype": (None, "float32")}
    text = str(comparison)
    for part in (
        "1 problems only in A and 2 only in B",
        "gsm8k, own",
        "seed: 0 in A, 1 in B",
        "xxx... in A",
        "[+100.0, +100.0] *",
    ):
        assert part in text
    assert max(map(len, text.splitlines())) < 120


def test_nothing_in_common_is_said_in_one_sentence():
    with pytest.raises(UserError, match=r"no problem in common \(aime24 and gsm8k\)"):
        compare(evaluation(aime24={"p": [0]}), evaluation(gsm8k={"q": [0]}))


def test_the_interval_is_that_of_resampling_one_by_one():
    draw = np.random.default_rng(5)
    left, right = draw.integers(0, 2, (2, 60, 4))
    a = evaluation(set={str(number): row.tolist() for number, row in enumerate(left)})
    b = evaluation(set={str(number): row.tolist() for number, row in enumerate(right)})
    row = compare(a, b).mean
    differences = right.mean(axis=1) - left.mean(axis=1)
    means = differences[draw.integers(0, 60, (20_000, 60))].mean(axis=1)
    assert (row.low, row.high) == pytest.approx(np.percentile(means, [2.5, 97.5]), abs=0.01)
    assert compare(a, b) == compare(a, b), "a seed fixes it"
    assert compare(a, b, seed=1).mean.low != row.low


def test_the_interval_covers_the_true_difference_about_95_times_in_100():
    draw = np.random.default_rng(0)
    gain = 0.1
    covered = 0
    for _ in range(200):
        chances = draw.uniform(0.0, 0.9, 100)
        left, right = (draw.random((100, 4)) < chance[:, None] for chance in (chances, chances + gain))
        a = evaluation(set={str(number): row.tolist() for number, row in enumerate(left)})
        b = evaluation(set={str(number): row.tolist() for number, row in enumerate(right)})
        row = compare(a, b, resamples=1000).mean
        covered += row.low <= gain <= row.high
    assert 0.88 <= covered / 200 <= 0.99


# --- Tables ---------------------------------------------------------------------------------------------------------


def result(title: str, rows: int, avg: float) -> dict:
    return {
        "title": title,
        "rows": rows,
        "samples": 4,
        "avg": avg,
        "se_problems": 0.08,
        "se_samples": 0.01,
        "pass_at": {"1": avg, "2": avg, "4": 0.625, "16": 0.75},
        "maj": 0.5,
        "shares": {"no_box": 0.1, "truncated": 0.2, "timed_out": 0.0, "code_used": 0.9, "code_error": None},
        "calls": 0.95,
        "tokens": 801.4,
    }


RESULTS = {
    "benchmarks": {
        "aime24": result("AIME24", 30, 0.267),
        "aime25": result("AIME25", 30, 0.2),
        "math500": result("MATH500", 500, 0.778),
        "olympiadbench": result("OlympiadBench", 675, 0.44),
        "amc23": result("AMC23", 40, 0.675),
        "mine": result("mine", 12, 0.5),
    },
    "settings": {
        "model": "runs/torl/checkpoint-1000",
        "samples": 4,
        "temperature": 0.6,
        "top_p": 0.95,
        "seed": 0,
        "max_completion_length": 3072,
        "max_tool_calls": 1,
        "prompt": "torl",
        "engine": "vllm",
        "data_checks": {"aime25": "Benchmark 'aime25' is another set."},
        "versions": {"math-verify": "0.9.0", "vllm": None},
    },
}


def without(*names: str) -> dict:
    return RESULTS | {
        "benchmarks": {name: value for name, value in RESULTS["benchmarks"].items() if name not in names}
    }


def test_the_papers_rows_have_the_means_of_their_numbers():
    text = markdown_table(RESULTS, label="ours")
    assert "| ToRL-1.5B | yes | 26.7 | 26.7 | 77.8 | 44.0 | 67.5 | 48.5 |" in text
    assert "| ToRL-7B | yes | 43.3 | 30.0 | 82.2 | 49.9 | 75.0 | 56.1 ¹ |" in text
    assert "| Eurus-2-7B-PRIME | no | 26.7 | 13.3 | 79.2 | 42.1 | 57.4 | 43.7 ¹ |" in text
    assert "| 55.0 | 39.3 ¹ |" in text
    assert "| rStar-Math-7B | no | 26.7 | - | 78.4 | 47.1 | 47.5 | - |" in text
    assert "62.1 for ToRL-7B" in text
    assert len(PAPER_TABLE) == 9


def test_our_row_stands_beside_them_and_other_sets_below():
    text = markdown_table(RESULTS, label="ours")
    mean, error = 47.2, 0.08 / 5**0.5 * 100
    ours = ("ours", "yes", "26.7 ± 8.0", "20.0 ± 8.0", "77.8 ± 8.0", "44.0 ± 8.0", "67.5 ± 8.0")
    assert f"| {' | '.join(f'**{cell}**' for cell in (*ours, f'{mean} ± {error:.1f}'))} |" in text
    assert "| mine | 12 | 50.0 ± 8.0 |" in text
    assert "²" not in text


def test_sets_that_were_not_run_leave_the_mean_open():
    text = markdown_table(without("aime25", "mine"), label="ours")
    assert "| **26.7 ± 8.0** | - | **77.8 ± 8.0** |" in text
    assert "| **67.5 ± 8.0** | - |" in text
    assert "other set" not in text
    assert "**ours**" not in markdown_table(without(*RESULTS["benchmarks"].keys() - {"mine"}), label="ours")


def test_a_part_of_a_set_is_marked():
    part = RESULTS | {"benchmarks": RESULTS["benchmarks"] | {"math500": result("MATH500", 20, 0.8)}}
    text = markdown_table(part, label="ours")
    assert "**ours ²**" in text
    assert "² Not whole sets: MATH500 20 of 500 problems." in text


def test_the_console_table_is_aligned_and_complete():
    head, *rows = console_table(RESULTS).splitlines()
    assert len({len(line) for line in (head, *rows)}) == 1 and len(head) < 120
    assert " ".join(rows[0].split()) == "AIME24 30 x 4 26.7 8.0 75.0 50.0 10.0 20.0 0.0 90.0 - 0.95 801"
    assert len(rows) == 6


def test_a_model_card_gets_table_settings_and_caveats():
    text = markdown_section(RESULTS)
    assert text.startswith("## Evaluation\n\n| model | tool | AIME24 |")
    for part in (
        "**checkpoint-1000**",
        "temperature 0.6",
        "top_p 0.95",
        "3072 tokens",
        "tool calls at most 1",
        "seed 0",
    ):
        assert part in text
    assert "math-verify 0.9.0" in text and "vllm None" not in text
    assert "Benchmark 'aime25' is another set." in text
