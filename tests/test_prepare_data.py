"""recipes/prepare_data.py: every step, restarting, sources, selection, mistakes, on small data; real data, slowly."""

import json
import os
import time

import datasets
import prepare_data
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from matplotlib.image import imread

from torl_data.curation import Benchmarks
from torl_data.sources import (
    Source,
    normalise_problem,
    open_source,
    parse_benchmarks,
    parse_source,
)
from torl_data.steps import Step, Workers, run_step
from torl_eval.benchmarks import answer_of, problem_of
from torl_grading import Grader
from torl_trl.command_line import run_main
from torl_trl.data import DataError, LoadReport, load_problems, problem_id
from torl_trl.errors import UserError

TOKENIZER = str(prepare_data.Path(prepare_data.__file__).parent / "tiny" / "base")
BENCHMARK = (
    "Let $z_0=\\frac{1}{137}+i$ and let $z_n=F(z_{n-1})$ for all positive integers $n$. Find $z_{2002}$ at last."
)
GOOD = [
    {"problem": "What is $6 \\cdot 7$?", "answer": 42.0, "source": "zoo"},
    {"problem": "3. Find the sum of the first ten primes, that is to say 2, 3, 5 and seven others.", "answer": "129"},
    {"problem": "Factor $z^4-z^2+1$ at $z = 1$.", "answer": "1"},
]
BAD = [
    {"problem": "What is $6\\times 7$?", "answer": "42"},  # the first again
    {"problem": "Find the total of the first ten primes, that is to say 2, 3, 5 and seven others.", "answer": "129"},
    {"problem": BENCHMARK.replace("Find", "Please find"), "answer": "1+274i"},
    {"problem": "Factor $z^4+z^2+1$ at $z = 1$.", "answer": "3"},
    {"problem": "Prove that $2 > 1$.", "answer": "proof"},
    {"problem": "Is 7 prime?", "answer": "yes"},
    {"problem": "(a) What is $1+1$? (b) What is $2+2$?", "answer": "4"},
    {"problem": "word " * 200 + "What is 1?", "answer": "1"},
    {"problem": "Unreadable answer?", "answer": "\\div"},
    {"problem": "No answer?", "answer": None},
    {"problem": "long " * 5000, "answer": "1"},
]


def write_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture
def prepare(tmp_path, monkeypatch):
    """Run the recipe on made data; returns the rows of train.parquet and the report."""
    write_lines(tmp_path / "raw.jsonl", GOOD + BAD)
    write_lines(tmp_path / "bench.jsonl", [{"id": "q1", "problem": BENCHMARK}, {"problem": BAD[3]["problem"]}])
    names = [source.name for source in parse_benchmarks([])]
    places = [f"{name}={tmp_path / 'bench.jsonl'}" for name in names]

    def prepare(*options, sources=("raw=" + str(tmp_path / "raw.jsonl"),)):
        command = ["prepare_data.py", "--sources", *sources, "--output_dir", str(tmp_path / "out"), "--num_proc", "1"]
        command += ["--benchmarks", *places, "--tokenizer", TOKENIZER, "--prompt_template", "{question}", *options]
        monkeypatch.setattr("sys.argv", command)
        prepare_data.main()
        report = json.loads((tmp_path / "out" / "report.json").read_text(encoding="utf-8"))
        return pq.read_table(tmp_path / "out" / "train.parquet").to_pylist(), report

    return prepare


def counts(report):
    return {step["name"]: step["rows"] - step["kept"] for step in report["steps"] if step["rows"] > step["kept"]}


EVERY_STEP_ONCE = {
    "read": 2,
    "contamination": 2,
    "open": 1,
    "multiple_choice": 1,
    "parts": 1,
    "length": 1,
    "duplicates": 1,
    "near_duplicates": 1,
    "unverifiable": 1,
}


def test_each_step_drops_its_own_and_the_card_says_so(tmp_path, prepare):
    rows, report = prepare()
    assert [row["answer"] for row in rows] == ["42", "129", "1"]
    assert rows[1]["problem"].startswith("Find the sum")  # its number is gone
    assert [row["source"] for row in rows] == ["zoo", "raw", "raw"]
    assert list(rows[0]) == ["problem", "answer", "source", "origin", "problem_id"]
    assert counts(report) == EVERY_STEP_ONCE
    hits = next(step["notes"] for step in report["steps"] if step["name"] == "contamination")
    assert [(hit["benchmark"], hit["benchmark_id"], hit["exact"]) for hit in hits] == [
        ("aime24", "q1", False),
        ("aime24", "1", True),
    ]
    card = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert "3 mathematical problems" in card and "data_files: [{split: train, path: train.parquet}]" in card
    assert "Found and dropped: 2 of aime24" in card and hits[0]["problem_id"] in card
    assert "| near duplicates | 5 | 1 | 4 |" in card
    assert str(tmp_path) not in card


def test_training_loads_what_was_prepared_without_dropping_any(tmp_path, prepare):
    rows, _ = prepare()
    report = LoadReport("train")
    with Grader() as grader:
        dataset = load_problems(
            str(tmp_path / "out"),
            template="{question}",
            tokenizer=lambda prompts: {"input_ids": [prompt.split() for prompt in prompts]},
            grader=grader,
            report=report,
        )
    assert (len(dataset), report.dropped) == (3, {})
    assert dataset["problem_id"][:] == [row["problem_id"] for row in rows]


@pytest.mark.parametrize("step", ["contamination", "open", "multiple_choice", "parts", "length", "near_duplicates"])
def test_each_step_can_be_skipped(prepare, step):
    _, report = prepare("--skip", step)
    assert step not in {one["name"] for one in report["steps"]}


def test_two_processes_give_the_same(prepare):
    rows, report = prepare()
    again, other = prepare("--num_proc", "2", "--near_duplicate_threshold", "0.61")
    assert again == rows and counts(other) == counts(report)


def test_finished_steps_are_not_repeated_and_changed_ones_are(tmp_path, prepare):
    rows, first = prepare()
    assert not any(step["reused"] for step in first["steps"])
    _, second = prepare()
    assert all(step["reused"] for step in second["steps"])
    assert counts(second) == counts(first)
    _, changed = prepare("--max_prompt_length", "399")
    redone = [step["name"] for step in changed["steps"] if not step["reused"]]
    assert redone == ["length", "duplicates", "near_duplicates", "unverifiable"]
    # Half a file, as a crash of the disk leaves it, is no finished step.
    path = tmp_path / "out" / "work" / "near_duplicates.parquet"
    path.write_bytes(path.read_bytes()[:-20])
    again, mended = prepare("--max_prompt_length", "399")
    assert [step["name"] for step in mended["steps"] if not step["reused"]] == ["near_duplicates"]
    assert again == rows
    write_lines(tmp_path / "raw.jsonl", GOOD)
    _, other = prepare("--max_prompt_length", "399")
    assert not any(step["reused"] for step in other["steps"])


def test_a_run_that_is_stopped_goes_on_where_it_was(monkeypatch, prepare):
    with monkeypatch.context() as patch:
        patch.setattr("torl_data.filters.NearDuplicates.find_or_add", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            prepare()
    _, report = prepare()
    assert [step["name"] for step in report["steps"] if not step["reused"]] == ["near_duplicates", "unverifiable"]


def test_selection_by_pass_rate_and_lim_score(tmp_path, prepare):
    ids = [problem_id(normalise_problem(row["problem"])) for row in GOOD]
    ids[1] = problem_id(GOOD[1]["problem"])  # as a run knows it that trained on the raw file
    accuracy = {
        ids[0]: [0.2, 0.4, 0.8],
        ids[1]: [0.3, 0.5, 0.7],
        ids[2]: [0.0, 0.0, 0.0],
        "elsewhere": [1.0, 1.0, 1.0],
    }
    table = write_lines(
        tmp_path / "table.jsonl",
        [
            {"problem_id": name, "epoch": k + 0.5, "accuracy": value}
            for name, row in accuracy.items()
            for k, value in enumerate(row)
        ],
    )
    rows, report = prepare("--select", "pass_rate", "--rollouts", str(table))
    assert [row["answer"] for row in rows] == ["42", "129"]
    assert [row["pass_rate"] for row in rows] == [pytest.approx(1.4 / 3), pytest.approx(0.5)]
    rows, _ = prepare("--select", "pass_rate", "--rollouts", str(table), "--min_pass_rate", "0.48")
    assert [row["answer"] for row in rows] == ["129"]
    rows, report = prepare("--select", "limr", "--rollouts", str(table), "--lim_count", "1")
    assert len(rows) == 1 and rows[0]["lim_score"] > 0.6
    assert (
        "3 problems have a score, 1 are kept, of which 0 were never solved" in report["steps"][-1]["notes"][0]["note"]
    )
    assert "![lim_score](lim_score.png)" in (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert imread(tmp_path / "out" / "lim_score.png").shape[1] > 500
    rows, _ = prepare("--select", "pass_rate", "limr", "--rollouts", str(table), "--lim_threshold", "-9")
    assert [row["answer"] for row in rows] == ["42", "129"]
    assert {"pass_rate", "lim_score"} <= set(rows[0])


def test_rollouts_of_a_run_are_read_without_their_texts(tmp_path, prepare):
    folder = tmp_path / "run" / "rollouts"
    folder.mkdir(parents=True)
    name = problem_id(GOOD[0]["problem"])
    for step, correct in enumerate([True, False, None]):
        row = {"problem_id": name, "epoch": float(step), "correct": correct, "reward": -1.0, "completion": "..."}
        pq.write_table(pa.Table.from_pylist([row]), folder / f"step_{step + 1:06d}.parquet")
    (folder / "eval_step_000001.parquet").write_bytes(b"not read")
    rows, report = prepare("--select", "pass_rate", "--rollouts", str(tmp_path / "run"))
    assert [(row["answer"], row["pass_rate"]) for row in rows] == [("42", 0.5)]
    assert report["steps"][-1]["dropped"] == {"no score: not seen in the rollouts (for LIMR in every epoch)": 2}


@pytest.mark.parametrize(
    ("row", "problem", "answer"),
    [
        ({"problem": "P", "answer": "1"}, "P", "1"),
        ({"question": "Q", "answer": "so\n#### 72"}, "Q", "72"),
        ({"problem": "P", "solution": "Thus $\\boxed{\\frac{1}{2}}$."}, "P", "\\frac{1}{2}"),
        ({"problem": "P", "answer": "\\boxed{5}"}, "P", "5"),
        ({"question": "Q", "final_answer": ["7"]}, "Q", "7"),
        ({"question": "Q", "final_answer": ["7", "8"]}, "Q", None),
        ({"prompt": [{"role": "user", "content": "P"}], "reward_model": {"ground_truth": "3"}}, "P", "3"),
        ({"problem": " ", "answer": ""}, None, None),
        ({"problem": 5, "solution": "no box"}, None, None),
        ({}, None, None),
    ],
)
def test_columns_are_found(row, problem, answer):
    assert (problem_of(row, None), answer_of(row, None)) == (problem, answer)


def test_columns_can_be_named(tmp_path, prepare):
    write_lines(tmp_path / "other.jsonl", [{"text": "What is 1 + 2?", "gold": 3}])
    source = (f"{tmp_path / 'other.jsonl'}",)
    rows, _ = prepare("--problem_column", "text", "--answer_column", "gold", sources=source)
    assert [(row["problem"], row["answer"], row["origin"]) for row in rows] == [("What is 1 + 2?", "3", "other")]
    with pytest.raises(DataError, match=r"has no problem column, .* can be used: text, gold; set"):
        prepare("--max_prompt_length", "300", sources=source)


def test_a_benchmark_that_cannot_be_read_is_refused(tmp_path, prepare):
    write_lines(tmp_path / "mine.jsonl", [{"Question": "What is 1 + 2?"}])
    with pytest.raises(DataError, match=r"^Benchmark .*mine.jsonl' has no problems that can be read"):
        prepare("--benchmarks", f"aime24={tmp_path / 'mine.jsonl'}")


@pytest.mark.parametrize(
    ("text", "source"),
    [
        ("math", Source("math", "DigitalLearningGmbH/MATH-lighteval")),
        ("gsm8k", Source("gsm8k", "openai/gsm8k", "main")),
        ("AI-MO/NuminaMath-1.5", Source("NuminaMath-1.5", "AI-MO/NuminaMath-1.5")),
        ("mine=a/b:c@test", Source("mine", "a/b", "c", "test")),
        ("some/where.jsonl", Source("where", "some/where.jsonl")),
    ],
)
def test_a_source_is_a_short_text(text, source):
    assert parse_source(text) == source


def test_benchmarks_are_the_five_and_others(tmp_path):
    path = write_lines(tmp_path / "a=b@c.jsonl", GOOD)
    sources = {source.name: source for source in parse_benchmarks([f"math500={path}", "gsm8k=openai/gsm8k:main@test"])}
    assert list(sources) == ["aime24", "aime25", "math500", "olympiadbench", "amc23", "gsm8k"]
    assert sources["math500"].place == str(path)
    assert sources["olympiadbench"] == Source("olympiadbench", "zkshan2002/olympiad_bench", None, "test")


def test_a_hub_data_set_is_streamed_with_the_columns_of_use(monkeypatch):
    asked = []

    def load_dataset(name, subset, *, split):
        asked.append((name, subset, split))
        return datasets.Dataset.from_list([{"problem": "P", "answer": "1", "messages": "long"}])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    checksum, rows = open_source(Source("x", "some/one", "main", "test"), set())
    assert checksum and list(rows) == [{"problem": "P", "answer": "1"}]
    assert asked == [("some/one", "main", "test")]

    def fail(*_, **__):
        raise ConnectionError("Couldn't reach it.\nMore.")

    monkeypatch.setattr(datasets, "load_dataset", fail)
    with pytest.raises(DataError, match=r"Source 'some/one@train' .*\(Couldn't reach it\).*give a file as x=PATH"):
        open_source(Source("x", "some/one"), set())


def test_files_of_every_kind_and_folders_are_streamed(tmp_path):
    rows = [{"problem": f"P{i}", "answer": str(i), "other": "x"} for i in range(3)]
    (tmp_path / "data").mkdir()
    write_lines(tmp_path / "data" / "train-0.jsonl", rows[:1])
    pq.write_table(pa.Table.from_pylist(rows[1:2]), tmp_path / "data" / "train-1.parquet")
    (tmp_path / "data" / "test.json").write_text(json.dumps(rows[2:]))
    read = [row["problem"] for row in open_source(Source("x", str(tmp_path / "data")), set())[1]]
    assert read == ["P0", "P1"]
    assert [row["problem"] for row in open_source(Source("x", str(tmp_path / "data" / "test.json")), set())[1]] == [
        "P2"
    ]


def test_a_large_file_is_not_read_ahead(tmp_path):
    path = write_lines(tmp_path / "data.jsonl", GOOD)
    path.write_text(path.read_text(encoding="utf-8") + "{broken\n", encoding="utf-8")
    rows = open_source(Source("x", str(path)), set())[1]
    assert next(rows) == GOOD[0]
    with pytest.raises(DataError, match=r"'data\.jsonl' cannot be read"):
        list(rows)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("12. Find $x$.", "Find $x$."),
        ("Example 3. Find $x$.", "Find $x$."),
        ("**Problem 5.** Find $x$.", "Find $x$."),
        ("## Task B-2.1.\nFind $x$.", "Find $x$."),
        ("(10 points) Find $x$.", "Find $x$."),
        ("5. (10 points) Find $x$.", "Find $x$."),
        ("Find\u200b $x$.  \r\n\n\n\nNow.", "Find $x$.\n\nNow."),
        ("3.5 + 2 = ?", "3.5 + 2 = ?"),
        ("2. x", "2. x"),
        ("10 points are on a circle.", "10 points are on a circle."),
        ("7.", "7."),
    ],
)
def test_problems_are_normalised_once(text, expected):
    assert normalise_problem(text) == expected
    assert normalise_problem(expected) == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--skip", "everything"], "Argument --skip: invalid choice: 'everything'"),
        (["--unknown", "1"], "Unrecognized arguments: --unknown 1"),
        (["--near_duplicate_threshold", "0"], "near_duplicate_threshold is 0.0: give a share"),
        (["--contamination_threshold", "1.5"], "contamination_threshold is 1.5: give a share"),
        (["--num_proc", "0"], "num_proc is 0: give at least 1"),
        (["--select", "limr"], "--select and --rollouts belong together"),
        (["--rollouts", "x"], "--select and --rollouts belong together"),
        (["--select", "limr", "--rollouts", "none"], "'none' is no table and no folder of a run"),
        (
            ["--select", "limr", "--rollouts", "x", "--lim_threshold", "1", "--lim_count", "1"],
            "--lim_threshold and --lim_count are both given",
        ),
        (["--tokenizer", "./none"], "Tokenizer './none' is no folder"),
        (["--prompt_template", "none"], "prompt_template 'none' is neither"),
        (["--max_prompt_length", "1"], "No problem is left"),
        (["--benchmarks", "aime24=./none.jsonl"], "Source './none.jsonl' is no file"),
    ],
)
def test_a_mistake_is_one_sentence(prepare, options, message):
    with pytest.raises(UserError) as raised:
        prepare(*options)
    assert message in str(raised.value) and "\n" not in str(raised.value)


def test_rollouts_that_do_not_fit_are_one_sentence(tmp_path, prepare):
    table = write_lines(tmp_path / "table.jsonl", [{"problem_id": "elsewhere", "epoch": 0, "reward": 1.0}])
    for how, message in (("pass_rate", "1 problems and none is in the data"), ("limr", "at least 2 epochs")):
        with pytest.raises(UserError, match=message):
            prepare("--select", how, "--rollouts", str(table))
    write_lines(table, [{"problem_id": "a", "score": 1}])
    with pytest.raises(UserError, match=r"'table\.jsonl' have a row without"):
        prepare("--select", "limr", "--rollouts", str(table))


def test_two_sources_need_two_names(tmp_path, prepare):
    with pytest.raises(UserError, match="Two sources are called 'raw'"):
        prepare(sources=(str(tmp_path / "raw.jsonl"), f"raw={tmp_path / 'bench.jsonl'}"))


def kill_self(rows):
    os.kill(os.getpid(), 9)


def test_a_worker_that_is_killed_is_one_sentence(tmp_path):
    rows = [{"problem": "P", "answer": "1", "problem_id": "x"}]
    step = Step("killed", "killed", kill_self, lambda row, value: None)
    with Workers(2, Benchmarks()) as workers, pytest.raises(UserError, match="give a smaller --num_proc"):
        run_step(step, rows, "key", tmp_path, workers)


def test_the_command_prints_an_error_and_exits(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["prepare_data.py"])
    with pytest.raises(SystemExit) as raised:
        run_main(prepare_data.main)
    assert raised.value.code == 2
    assert capsys.readouterr().err.startswith("Error: The following arguments are required: --sources")


KNOWN_OVERLAPS = {
    "aime": {f"math500-test-intermediate_algebra-{number}" for number in (1365, 582, 90, 2146, 1411, 1849)},
    "math": {"olympiadbench-2713", "olympiadbench-2895"},
    "deepscaler": {"olympiadbench-1930"},
    "limr": {"olympiadbench-2791"},
    "gsm8k": set(),
}
"""Found by others' normalisers (exact ones); ours finds these and reworded ones."""


@pytest.mark.slow
def test_shared_data_end_to_end(tmp_path, monkeypatch, shared):
    data = shared / "data"
    files = {
        "math": "train_math7k",
        "math_rest": "train_math12k_rest",
        "gsm8k": "train_gsm8k",
        "aime": "train_aime_1983_2023",
        "deepscaler": "train_dsr_sub1209",
        "limr": "train_limr1389",
    }
    command = ["prepare_data.py", "--sources", *(f"{name}={data / file}.jsonl" for name, file in files.items())]
    names = ("aime24", "aime25", "math500", "olympiadbench", "amc23", "minerva_math", "gsm8k_test", "hmmt_feb_2025")
    command += ["--benchmarks", *(f"{name}={data / name}.jsonl" for name in names)]
    command += ["--output_dir", str(tmp_path), "--num_proc", "2", "--tokenizer", TOKENIZER, "--skip", "length"]
    monkeypatch.setattr("sys.argv", command)
    started = time.monotonic()
    prepare_data.main()
    assert time.monotonic() - started < 600
    report = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    assert report["steps"][0]["rows"] == 7470 + 4500 + 7473 + 975 + 1208 + 1389
    hits = next(step["notes"] for step in report["steps"] if step["name"] == "contamination")
    found = {name: {hit["benchmark_id"] for hit in hits if hit["origin"].startswith(name)} for name in KNOWN_OVERLAPS}
    assert all(known <= found[name] for name, known in KNOWN_OVERLAPS.items())
    assert found["gsm8k"] == set()
    assert {hit["benchmark"] for hit in hits} == {"math500", "olympiadbench"}
    assert len(hits) < 40
    dropped = counts(report)
    assert dropped["multiple_choice"] > 200 and dropped["duplicates"] > 600 and dropped["near_duplicates"] > 20
    rows = pq.read_table(tmp_path / "train.parquet").to_pylist()
    assert 20_000 < len(rows) == len({row["problem_id"] for row in rows})
    card = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert all(hit["benchmark_id"] in card for hit in hits)
