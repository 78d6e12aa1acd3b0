"""Loading problems: every format, what is dropped and counted, and one clear sentence for each mistake."""

import csv
import json
import logging
from collections.abc import Iterator
from pathlib import Path

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from torl_grading import Grader
from torl_trl.data import DataError, LoadReport, load_problems, problem_id, solution_text

TEMPLATE = "Question: {question}\nAnswer:\n"
ROWS = [
    {"problem": "What is 6 * 7?", "answer": "42", "source": "zoo", "level": "1"},
    {"problem": "One half?", "answer": "\\frac{1}{2}", "source": "zoo", "level": "2"},
    {"problem": 'Where, "exactly",\nis {x}?', "answer": "x=1", "source": "park", "level": "3"},
]


@pytest.fixture(scope="module")
def grader() -> Iterator[Grader]:
    with Grader(num_workers=1) as grader:
        yield grader


@pytest.fixture
def load(grader):
    def words(prompts: list[str]) -> dict[str, list[list[str]]]:
        return {"input_ids": [prompt.split() for prompt in prompts]}

    def load(name_or_path, **options) -> datasets.Dataset:
        return load_problems(
            str(name_or_path), **{"template": TEMPLATE, "tokenizer": words, "grader": grader, **options}
        )

    return load


def write(path: Path, rows: list[dict]) -> Path:
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n\n" for row in rows), encoding="utf-8")
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows), encoding="utf-8")
    elif path.suffix == ".csv":
        with path.open("w", encoding="utf-8", newline="") as lines:
            writer = csv.DictWriter(lines, fieldnames=list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    else:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".csv", ".parquet"])
def test_every_format_gives_the_same_data(tmp_path, load, suffix):
    dataset = load(write(tmp_path / f"data{suffix}", ROWS))
    assert dataset.column_names == ["prompt", "problem", "problem_id", "solution", "source"]
    assert dataset["solution"][:] == ["42", "\\frac{1}{2}", "x=1"]
    assert dataset["source"][:] == ["zoo", "zoo", "park"]
    assert dataset[2]["prompt"] == 'Question: Where, "exactly",\nis {x}?\nAnswer:\n'
    assert dataset["problem_id"][:] == [problem_id(row["problem"]) for row in ROWS]


def test_a_folder_gives_the_files_of_the_split_or_all_of_them(tmp_path, load):
    write(tmp_path / "train-0.jsonl", ROWS[:1])
    write(tmp_path / "train-1.csv", ROWS[1:2])
    write(tmp_path / "test.jsonl", ROWS[2:])
    (tmp_path / "README.md").write_text("about")
    assert load(tmp_path)["solution"][:] == ["42", "\\frac{1}{2}"]
    assert load(tmp_path, split="test")["solution"][:] == ["x=1"]
    with pytest.raises(DataError, match=r"no file for the split 'validation', it has test\.jsonl, train-0"):
        load(tmp_path, split="validation")
    plain = tmp_path / "plain"
    plain.mkdir()
    write(plain / "b.jsonl", ROWS[:1])
    write(plain / "a.jsonl", ROWS[1:])
    assert load(plain)["solution"][:] == ["\\frac{1}{2}", "x=1", "42"]


def test_a_hub_data_set_is_asked_for_by_name_subset_and_split(monkeypatch, load):
    asked = []

    def load_dataset(name, subset, *, split):
        asked.append((name, subset, split))
        return datasets.Dataset.from_list(ROWS)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert len(load("someone/maths", subset="main", split="test")) == 3
    assert asked == [("someone/maths", "main", "test")]


def test_a_hub_that_does_not_answer_is_one_sentence(monkeypatch, load):
    def load_dataset(name, subset, *, split):
        raise ConnectionError("Couldn't reach it.\nMore lines.")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(
        DataError, match=r"'someone/maths' \(split 'train'\) is no local file .*\(Couldn't reach it\):"
    ):
        load("someone/maths")


def test_what_cannot_be_used_is_dropped_and_counted_in_one_line_each(tmp_path, load, caplog):
    rows = [
        {"problem": "Good", "answer": 27.0, "family": "sum"},
        {"problem": " Good\n", "answer": 28, "family": "sum"},
        {"problem": "No answer", "answer": None, "family": "sum"},
        {"problem": "Empty answer", "answer": "  ", "family": "sum"},
        {"problem": "", "answer": "1", "family": "sum"},
        {"answer": "1"},
        {"problem": "Unreadable", "answer": "\\div", "family": "sum"},
        {"problem": "word " * 30, "answer": "1", "family": "sum"},
        {"problem": "Also good", "answer": 3},
        {"problem": "Third", "answer": 4},
    ]
    report = LoadReport("eval")
    with caplog.at_level(logging.INFO, logger="torl_trl.data"):
        dataset = load(
            write(tmp_path / "data.jsonl", rows), max_prompt_length=20, max_problems=2, name="eval", report=report
        )
    assert dataset["solution"][:] == ["27", "3"]
    assert dataset["source"][:] == ["sum", ""]
    assert (report.rows, report.kept) == (10, 2)
    assert report.dropped == {
        "missing problem or answer": 4,
        "duplicate of an earlier problem": 1,
        "prompt too long (over 20 tokens)": 1,
        "answer the verifier cannot use": 1,
    }
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 5
    assert "eval data: dropped 4 of 10 rows: missing problem or answer." in messages


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (27, "27"),
        (27.0, "27"),
        (-0.5, "-0.5"),
        (1e-7, "0.0000001"),
        ("27.0", "27"),
        ("27.50", "27.50"),
        (" 5 ", "5"),
        ("Natalia sold 48/2 = 24 clips.\n#### 72", "72"),
        (["7"], "7"),
        (["7", "8"], None),
        ([], None),
        (float("nan"), None),
        (True, None),
        ("", None),
        (None, None),
        ({"a": 1}, None),
    ],
)
def test_answers_become_text(answer, text):
    assert solution_text(answer) == text


def test_columns_have_the_names_that_the_user_gives(tmp_path, load):
    path = write(tmp_path / "data.jsonl", [{"question": "What is 6 * 7?", "answer": "... #### 42"}])
    assert load(path, problem_column="question")["solution"][:] == ["42"]


def test_problem_ids_depend_on_the_words_only():
    assert problem_id("What  is\n6*7? ") == problem_id("What is 6*7?")
    assert problem_id("z^4+z^2+1") != problem_id("z^4-z^2+1")
    assert len(problem_id("x")) == 12


def test_torl_schema_is_recognised_and_its_copies_are_dropped(shared, load):
    report = LoadReport("train")
    dataset = load(shared / "data" / "torl_test.parquet", report=report)
    assert report.rows == 374
    assert report.kept == len(dataset) == 194  # 30 + 30 AIME problems, four copies each, and 134 of MATH-500
    assert report.dropped == {"duplicate of an earlier problem": 180}
    assert dataset[0]["solution"] == "204"
    assert dataset[0]["problem"].startswith("Every morning Aya goes")
    assert sorted(dataset.unique("source")) == ["aime24", "aime25", "math500"]


def test_grade_school_problems_load_without_a_worker(shared, load):
    with Grader() as untouched:
        dataset = load(shared / "data" / "train_gsm8k.jsonl", grader=untouched)
        assert untouched._workers == set()
    assert len(dataset) > 7000


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("data.jsonl", '{"problem": "a"\n', "cannot be read as jsonl"),
        ("data.jsonl", "[1, 2]\n", "not a list of objects"),
        ("data.json", '{"problem": "a"}', "not a list of objects"),
        ("data.json", "", "cannot be read as json"),
        ("data.csv", 'problem,answer\n"a,1\n', "cannot be read as csv"),
        ("data.parquet", "no parquet", "cannot be read as parquet"),
        ("data.jsonl", b"\xff\xfe\xfa", "cannot be read as jsonl"),
        ("data.txt", "a", "unknown type: use one of .jsonl, .json, .csv, .parquet"),
        ("data.jsonl", "", "has 0 rows and none can be used"),
        (
            "data.jsonl",
            '{"question": "a", "level": 1}\n',
            "no column 'problem' and no column 'answer', it has 'question', 'level'",
        ),
        ("data.jsonl", '{"problem": "a", "gold": 1}\n', "no column 'answer', it has 'problem', 'gold'"),
        ("data.jsonl", '{"problem": "a", "answer": null}\n', "none can be used .1 missing problem or answer"),
    ],
)
def test_unusable_data_is_one_sentence(tmp_path, load, file, content, message):
    path = tmp_path / file
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DataError, match=message) as raised:
        load(path)
    assert file in str(raised.value) and "\n" not in str(raised.value)


def test_a_missing_file_and_an_empty_folder_are_one_sentence(tmp_path, load):
    for missing in (tmp_path / "none.jsonl", tmp_path / "none", "none.parquet", "./none"):
        with pytest.raises(DataError, match="does not exist"):
            load(missing)
    with pytest.raises(DataError, match="has no file of type"):
        load(tmp_path)


def test_answers_beyond_the_limit_are_not_checked(tmp_path, load):
    rows = [{"problem": f"p{i}", "answer": "\\div" if i == 1 else i} for i in range(9)]
    report = LoadReport("train")
    dataset = load(write(tmp_path / "data.jsonl", rows), max_problems=2, report=report)
    assert dataset["solution"][:] == ["0", "2"]
    assert (report.rows, report.kept, report.dropped) == (9, 2, {"answer the verifier cannot use": 1})
