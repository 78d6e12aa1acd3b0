"""The benchmarks load whole, by name or from a file of one's own, and a copy that differs is noticed."""

import json
from pathlib import Path

import pytest

from torl_eval.benchmarks import (
    BENCHMARKS,
    PAPER_BENCHMARKS,
    benchmark_names,
    checksum,
    load_benchmark,
    load_benchmarks,
)
from torl_grading import Grader
from torl_trl.data import DataError

ROWS = {
    "aime24": 30,
    "aime25": 30,
    "math500": 500,
    "olympiadbench": 675,
    "amc23": 40,
    "minerva_math": 272,
    "gsm8k": 1319,
    "hmmt_feb_2025": 30,
}


@pytest.fixture(scope="session")
def data(shared: Path) -> Path:
    return shared / "data"


def write(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def test_the_papers_five_are_registered_in_its_order():
    assert [BENCHMARKS[name].title for name in PAPER_BENCHMARKS] == (
        ["AIME24", "AIME25", "MATH500", "OlympiadBench", "AMC23"]
    )
    assert {name: benchmark.rows for name, benchmark in BENCHMARKS.items()} == ROWS


@pytest.mark.parametrize("name", ROWS)
def test_a_benchmark_loads_whole_and_is_the_right_copy(name, data):
    loaded = load_benchmark(name, folder=data)
    assert loaded.check is None
    assert (loaded.name, loaded.title, len(loaded.problems)) == (name, BENCHMARKS[name].title, ROWS[name])
    assert len({row["problem_id"] for row in loaded.problems}) == ROWS[name]
    assert all(row["problem"] and row["solution"] for row in loaded.problems)


def changed(rows: list[dict], place: int, **values: str) -> list[dict]:
    return [*rows[:place], rows[place] | values, *rows[place + 1 :]]


def test_every_change_of_content_is_noticed_and_said(data, tmp_path):
    rows = load_benchmark("aime24", folder=data).problems
    changes = {
        "answer": changed(rows, 7, solution="1"),
        "problem": changed(rows, 7, problem=rows[7]["problem"].replace("2024", "2025").replace(".", "?", 1)),
        "missing": rows[1:],
        "doubled": [*rows, rows[3]],
        "swapped answers": changed(changed(rows, 0, solution=rows[1]["solution"]), 1, solution=rows[0]["solution"]),
    }
    for kind, other in changes.items():
        path = write(tmp_path / "aime24.jsonl", [{"problem": r["problem"], "answer": r["solution"]} for r in other])
        loaded = load_benchmark("aime24", folder=tmp_path)
        assert loaded.check == load_benchmark(str(path)).check, kind
        assert loaded.checksum in loaded.check and f"{len(other)} with" in loaded.check, kind
        assert "30 rows" in loaded.check and "not comparable" in loaded.check, kind
        assert len(loaded.problems) == len(other), kind


def test_order_and_layout_are_no_difference(data):
    rows = load_benchmark("math500", folder=data).problems
    other = [
        {
            "problem": row["problem"].replace("\\frac", "\\dfrac").replace("(", "\\left(").replace(" ", "\n ") + "\\!",
            "solution": row["solution"].replace("\\frac", "\\tfrac").replace(")", "\\,\\right)").replace(" ", ""),
        }
        for row in reversed(rows)
    ]
    assert checksum(other) == checksum(rows) == BENCHMARKS["math500"].checksums[0]


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("25", "025", True),
        ("27", "27.0", True),
        ("336", r"336^\circ", True),
        ("2125", "2,125", True),
        (r"\frac{1}{2}", r"$\dfrac{1}{2}$", True),
        ("2", "20", False),
        ("1,2", "12", False),
        (r"\leftarrow", "arrow", False),
        ("0.25", "25", False),
        ("-1", "1", False),
    ],
)
def test_two_writings_of_an_answer_may_be_the_same(one, other, same):
    first, second = ([{"problem": "p", "solution": solution}] for solution in (one, other))
    assert (checksum(first) == checksum(second)) == same


# --- Sets of one's own ----------------------------------------------------------------------------------------------


def test_a_set_of_ones_own_keeps_every_row_and_is_not_checked(tmp_path):
    rows = [
        {"question": "How much is 1 + 1?", "final_answer": ["2"]},
        {"question": " How much is  1 + 1?", "final_answer": ["2"]},
        {"problem": "And 2 + 2?", "solution": r"It is $\boxed{4}$."},
        {"prompt": [{"role": "user", "content": "And 3 + 3?"}], "reward_model": {"ground_truth": "6"}},
        {"question": "And 30 + 3?", "answer": "Add them. #### 33"},
    ]
    loaded = load_benchmark(str(write(tmp_path / "mine.jsonl", rows)))
    assert (loaded.name, loaded.title, loaded.check) == ("mine", "mine", None)
    assert [row["solution"] for row in loaded.problems] == ["2", "2", "4", "6", "33"]
    first, second = (row["problem_id"] for row in loaded.problems[:2])
    assert second == f"{first}-2"
    assert load_benchmark(f"exam={tmp_path / 'mine.jsonl'}").name == "exam"


def test_two_sets_of_one_name_are_refused(tmp_path):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        write(tmp_path / folder / "test.jsonl", [{"problem": f"{folder}?", "answer": "1"}])
    places = [str(tmp_path / folder / "test.jsonl") for folder in ("a", "b")]
    with pytest.raises(DataError, match="Two benchmarks are called 'test': name one as NAME=PLACE"):
        load_benchmarks(places)
    assert [loaded.name for loaded in load_benchmarks([places[0], f"other={places[1]}"])] == ["test", "other"]


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("aime24", ["aime24"]),
        ("exam=data/mine.jsonl", ["exam=data/mine.jsonl"]),
        ("aime24,exam=data/mine.jsonl", ["aime24", "exam=data/mine.jsonl"]),
        ("data/mine.jsonl", None),
        ("owner/name", None),
        ("https://host/file.parquet?part=1", None),
    ],
)
def test_an_evaluation_while_training_is_of_benchmarks_where_it_names_them(text, names):
    assert benchmark_names(text) == names


def test_a_registered_name_given_to_a_file_has_it_checked(data):
    assert load_benchmark(f"gsm8k={data / 'gsm8k_test.jsonl'}").check is None
    assert "not comparable" in load_benchmark(f"aime25={data / 'aime24.jsonl'}").check


def test_a_hub_id_may_name_subset_and_split(monkeypatch):
    asked = []

    def read(place, *, split, subset):
        asked.append((place, subset, split))
        return [{"problem": "How much is 1 + 1?", "answer": 2}]

    monkeypatch.setattr("torl_eval.benchmarks.read_rows", read)
    names = [load_benchmark(text).name for text in ("me/set", "me/set:hard@dev", "exam=me/set@train", "gsm8k")]
    assert names == ["set", "set", "exam", "gsm8k"]
    assert asked == [
        ("me/set", None, "test"),
        ("me/set", "hard", "dev"),
        ("me/set", None, "train"),
        ("openai/gsm8k", "main", "test"),
    ]


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"problem": "p"}, "Row 2 .* no single known answer .*problem"),
        ({"problem": "p", "answer": ["1", "2"]}, "no single known answer"),
        ({"problem": "p", "answer": ""}, "no single known answer"),
        ({"problem": "  ", "answer": "1"}, "Row 2 of benchmark 'mine' has no problem"),
    ],
)
def test_a_row_that_cannot_count_is_named_not_dropped(tmp_path, row, words):
    path = write(tmp_path / "mine.jsonl", [{"problem": "p", "answer": "1"}, row])
    with pytest.raises(DataError, match=words):
        load_benchmark(str(path))


def test_what_is_not_there_is_said(tmp_path):
    with pytest.raises(DataError, match="'aime26' is unknown: name one of aime24, "):
        load_benchmark("aime26")
    with pytest.raises(DataError, match="has no file for the benchmark 'aime24'"):
        load_benchmark("aime24", folder=tmp_path)
    with pytest.raises(DataError, match="does not exist"):
        load_benchmark("aime24", folder=tmp_path / "nowhere")
    for name in ("gsm8k_test", "gsm8k_train"):
        write(tmp_path / f"{name}.jsonl", [])
    with pytest.raises(DataError, match=r"2 files \(gsm8k_test.jsonl, gsm8k_train.jsonl\)"):
        load_benchmark("gsm8k", folder=tmp_path)
    with pytest.raises(DataError, match="has no rows"):
        load_benchmark(str(tmp_path / "gsm8k_test.jsonl"))


@pytest.mark.parametrize("name", ROWS)
def test_every_solution_in_a_box_is_right(name, data):
    problems = load_benchmark(name, folder=data).problems
    with Grader(num_workers=2) as grader:
        verdicts = [grader.submit([f"\\boxed{{{row['solution']}}}"], row["solution"]) for row in problems]
        wrong = [
            row["solution"] for row, verdict in zip(problems, verdicts, strict=True) if not verdict.result().correct
        ]
    assert len(wrong) <= (0.003 * len(problems) if name == "olympiadbench" else 0), wrong
