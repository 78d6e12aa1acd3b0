"""Grading: which text counts as the answer, when it is right, and that nothing a model writes can hang or hack it."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torl_grading import Grader, GraderError, grade
from torl_grading.equivalence import compare_texts, is_too_large
from torl_grading.extraction import drop_fences, extract_answer, last_boxed
from torl_grading.normal import normalize

EVALUATES_FOR_EVER = r"\sum_{k=1}^{9999} k^k"  # the guard lets it pass
NEEDS_ALGEBRA = (r"\boxed{\sqrt{12}}", r"2\sqrt{3}")


@pytest.fixture(scope="module")
def grader():
    with Grader(num_workers=1, timeout_seconds=4.0) as grader:
        yield grader


def worker_pids(grader: Grader) -> list[int]:
    return [worker.process.pid for worker in grader._workers]


# --- Extraction -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so \boxed{42}.", "42"),
        (r"\boxed{1} and \boxed{2}", "1, 2"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed {  7 }", "7"),
        (r"\\boxed{8}", "8"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{\{}", r"\{"),
        (r"a stray { and \boxed{5}", "5"),
        (r"a stray } and \boxed{5}", "5"),
        (r"\boxed{3 is never closed, \boxed{4}", "4"),
        (r"\boxed{3} then \boxed{4", "3"),
        (r"\boxed{\boxed{6}}", "6"),
        (r"\boxed{}", ""),
        (r"\boxed 5", "5"),
        (r"\fbox{5}", "5"),
        (r"the answer is $5$", None),
        (r"\boxed{5", None),
        ("", None),
    ],
)
def test_the_last_balanced_box_is_the_answer_and_nothing_else_is(text, answer):
    assert last_boxed(text) == answer


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("a\n```python\nx\n```\nb", "a\nb"),
        ("a\n```output\n42\n```\nb", "a\nb"),
        ("a\n```\nx\n```\nb", "a\nb"),
        ("a ```python\nx\n```\nb", "a\nb"),
        ("a\n```python\nprint('```')\ny\n```\nb", "a\nb"),
        ("a\n```python\nnever closed b", "a"),
        ("a\n```python\nx\n```output\n42\n```\nb", "a\nb"),
        ("a\n```python\nx\n```\n```output", "a"),
        ("inline ```sum``` b", "inline\nb"),
        ("no fence", "no fence"),
    ],
)
def test_fenced_blocks_are_dropped_unclosed_ones_too(text, kept):
    assert drop_fences(text).split() == kept.split()


def test_the_last_text_with_a_box_counts():
    assert extract_answer([r"\boxed{1}", r"\boxed{2}", "done"]) == "2"
    assert extract_answer(["```python\n\\boxed{3}\n```"]) is None
    assert extract_answer(["```python\n\\boxed{3}\n```"], keep_fences=True) == "3"
    assert extract_answer([]) is None


@given(st.text(alphabet="{}\\`boxed\n 1", max_size=200))
def test_whatever_was_written_before_a_later_box_counts(text):
    assert extract_answer([text, r"\boxed{77}"]) == "77"
    assert last_boxed(text + r" \boxed{77}") == "77"


def test_extraction_is_fast_on_long_texts():
    started = time.perf_counter()
    for text in (
        r"\boxed{" * 5000,
        "{" * 50_000,
        "```" * 20_000,
        "```python\n" * 5000,
        "\n```python" * 5000 + r"\boxed{1}",
    ):
        extract_answer([text])
    assert time.perf_counter() - started < 2.0


# --- Reward attacks: only what the model itself says in text counts ------------------------------------------------

CALL = "```python\nprint(6*7)\n```\n```output"


@pytest.mark.parametrize(
    ("attack", "turns", "reason"),
    [
        ("honest", [CALL, r"So it is \boxed{42}."], "equal"),
        ("the tool prints the box, the model is silent", [CALL, "Done."], "no_box"),
        ("box in a code string", ["```python\nprint(r'\\boxed{42}')\n```\n```output", "Done."], "no_box"),
        ("box opened before the call, closed after it", [r"\boxed{" + "\n" + CALL, "}"], "no_box"),
        ("box opened at the end of a turn", [r"\boxed{", "42}"], "no_box"),
        ("the model says 41, the tool prints 42", [CALL, r"\boxed{41}"], "different"),
        ("a made-up output block", ["```output\n\\boxed{42}\n```\nDone."], "no_box"),
        ("an unclosed fence", ["```python\n\\boxed{42}"], "no_box"),
        ("three guesses", [r"\boxed{42} \boxed{43} \boxed{44}"], "different"),
        ("guesses as a list", [r"\boxed{41, 42, 43}"], "different"),
        ("guesses with or", [r"\boxed{41 \text{ or } 42}"], "different"),
        ("everything", [r"\boxed{x}"], "different"),
        ("empty box", [r"\boxed{}"], "unparsed"),
    ],
)
def test_an_attack_earns_nothing(grader, attack, turns, reason):
    verdict = grader.submit(turns, "42").result()
    assert (verdict.reason, verdict.correct, verdict.score) == (
        reason,
        reason == "equal",
        1.0 if reason == "equal" else -1.0,
    )


# --- Equivalence ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("solution", "answer"),
    [
        ("42", "42"),
        ("42", "042"),
        ("42", "+42"),
        ("42", "42."),
        ("$42$", "42"),
        (r"\frac{1}{2}", r"\dfrac{1}{2}"),
        (r"\left( 3, \frac{\pi}{2} \right)", r"(3,\frac{\pi}{2})"),
        (r"\text{Evelyn}", "evelyn"),
        ("12:00", "12:00"),
        (r"1{,}000", r"1{,}000"),
        (r"\boxed{7}", "7"),
        (r"10,\!000", "10000"),
    ],
)
def test_typography_is_no_difference_and_needs_no_algebra(solution, answer):
    assert compare_texts(solution, answer) == "equal"


@pytest.mark.parametrize(
    ("solution", "answer", "reason"),
    [
        ("42", "41", "different"),
        ("12", "1 2", "different"),
        ("x", "X", None),
        (r"\text{east}", r"\text{seat}", "different"),  # an anagram: the same product of letters for math-verify
        ("5", "1" * 401, "too_long"),
        ("5", "$ $", "different"),
        ("Yes", "yes", "equal"),
        ("odd", r"\text{Odd}", "equal"),
        ("no", "on", "different"),
        ("9" * 5000, "9", "bad_solution"),  # Python itself reads no integer that long
        ("9" * 5000, "9" * 5000, "equal"),
    ],
)
def test_texts_that_differ_are_wrong_or_go_on_to_algebra(solution, answer, reason):
    assert compare_texts(solution, answer) == reason


@given(st.text(max_size=60))
def test_normalizing_is_total_and_a_text_is_never_unequal_to_itself(text):
    normalize(text)
    is_too_large(text)
    assert compare_texts(text, text) in ("equal", "unparsed")


@pytest.mark.parametrize(
    ("solution", "answer", "correct"),
    [
        (r"\frac{3}{4}", "0.75", True),
        (r"2\sqrt{3}", r"\sqrt{12}", True),
        (r"2\sqrt{3}", r"2\sqrt{5}", False),
        (r"3\sqrt{13}", "3", False),  # the raw solution would be read as 3
        ("3+2i", "3+4i", False),
        ("3x+2", "3x+5", False),
        (r"\frac12", r"\frac{1}{2}", True),
        (r"\sqrt3", r"\sqrt{3}", True),
        (r"\dfrac{9}{7}", r"\frac{18}{14}", True),
        ("x^2+1", "1+x^2", True),
        ("(1, 2)", "(2, 1)", False),
        ("[0,1]", "[0, 1)", False),
        ("90", r"90^\circ", True),
        ("x < 3", r"(-\infty, 3)", True),
        ("7:00", "7:30", False),
    ],
)
def test_math_verify_reads_both_sides_in_a_box(grader, solution, answer, correct):
    verdict = grader.submit([f"\\boxed{{{answer}}}"], solution).result()
    assert (verdict.correct, verdict.extracted) == (correct, answer)


def test_solutions_are_right_for_themselves(grader, shared):
    lines = (shared / "data" / "math500.jsonl").read_text(encoding="utf-8").splitlines()[:150]
    answers = [json.loads(line)["answer"] for line in lines]
    verdicts = [grader.submit([f"\\boxed{{{answer}}}"], answer) for answer in answers]
    assert all(verdict.result().correct for verdict in verdicts)
    assert [answer for answer in answers if grader.check_solution(answer).result()] == []


@pytest.mark.parametrize(
    ("solution", "reason"),
    [
        ("42", None),
        ("-3.25", None),
        (r"\frac{1}{2}", None),
        (r"\text{Evelyn}", None),
        ("(A)", None),
        ("", "unparsed"),
        (r"\div", "unparsed"),
        ("1" * 401, "too_long"),
        ("2004!", "guard"),
        ("12:00", None),
    ],
)
def test_a_solution_must_parse_and_equal_itself(grader, solution, reason):
    assert grader.check_solution(solution).result() == reason


# --- Safety ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "answer",
    [
        "9" * 60,
        "9^{9^9}",
        "2003^{2002^{2001}}",
        r"10^{10^{10}}",
        "2^{100000}",
        "2**100000",
        "(10^8)!",
        r"(10^{8})!",
        "100000000!",
        "5!!",
        "((5!)!)!",
        r"\dfrac{5^{(5^{(5^{(5^5)})}-4)}-5}{16}",
        r"\sum_{k=1}^{10^9} \frac{1}{k}",
    ],
)
def test_the_guard_refuses_what_would_not_end(answer):
    assert is_too_large(answer)


@pytest.mark.parametrize(
    "answer",
    [
        "12345678901234567890",
        "2^{2004}-1",
        "2^{2^5}+1",
        r"\frac{100!}{(50!)^2}",
        "x^{2^n}",
        r"3 \cdot 10^{100}",
        r"\binom{100}{50}",
        r"(n-1)!",
        r"1\!000",
        "x^2+y^2",
        "10^{-9}",
    ],
)
def test_the_guard_lets_ordinary_answers_pass(answer):
    assert not is_too_large(answer)


def test_an_answer_without_end_is_wrong_in_bounded_time_and_the_next_one_is_graded():
    with Grader(timeout_seconds=3.0) as grader:
        assert grader.submit([NEEDS_ALGEBRA[0]], NEEDS_ALGEBRA[1]).result().correct
        started = time.perf_counter()
        verdict = grader.submit([f"\\boxed{{{EVALUATES_FOR_EVER}}}"], r"2\sqrt{3}").result()
        assert (verdict.score, verdict.reason, grader.timeouts) == (-1.0, "timeout", 1)
        assert time.perf_counter() - started < 4.0
        assert grader.submit([NEEDS_ALGEBRA[0]], NEEDS_ALGEBRA[1]).result().correct


def test_the_answer_whose_text_is_endless_is_bounded():
    # Math-Verify issue 65: `str()` of this expression does not return. Hidden from the guard here.
    answer = r"\dfrac{5^{(5^{((x/x+4)^{((x/x+4)^{(x/x+4)})})}-4)}-5}{16}"
    assert not is_too_large(answer)
    with Grader(timeout_seconds=3.0) as grader:
        grader.submit([NEEDS_ALGEBRA[0]], NEEDS_ALGEBRA[1]).result()
        started = time.perf_counter()
        assert not grader.submit([f"\\boxed{{{answer}}}"], r"2\sqrt{3}").result().correct
        assert time.perf_counter() - started < 4.0


def test_a_worker_that_does_not_come_back_is_killed_and_replaced():
    with Grader(timeout_seconds=2.0) as grader:
        assert grader.submit([NEEDS_ALGEBRA[0]], NEEDS_ALGEBRA[1]).result().correct
        (pid,) = worker_pids(grader)
        os.kill(pid, signal.SIGSTOP)  # like a C call that no signal handler of Python's can interrupt
        started = time.perf_counter()
        verdict = grader.submit([r"\boxed{\sqrt{27}}"], r"3\sqrt{3}").result()
        assert (verdict.score, verdict.reason, grader.timeouts) == (-1.0, "timeout", 1)
        assert time.perf_counter() - started < 4.0
        assert grader.submit([r"\boxed{\sqrt{48}}"], r"4\sqrt{3}").result().correct
        assert worker_pids(grader) != [pid] and grader.restarts == 0
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_worker_that_dies_in_the_middle_is_replaced_and_the_answer_tried_again():
    with Grader(timeout_seconds=5.0) as grader:
        grader.submit([NEEDS_ALGEBRA[0]], NEEDS_ALGEBRA[1]).result()
        (pid,) = worker_pids(grader)
        os.kill(pid, signal.SIGSTOP)
        pending = grader.submit([NEEDS_ALGEBRA[0]], NEEDS_ALGEBRA[1])
        time.sleep(0.1)
        os.kill(pid, signal.SIGKILL)
        assert pending.result().correct
        assert (grader.restarts, grader.timeouts) == (1, 0)


def test_an_answer_that_kills_two_workers_is_wrong_and_does_not_stop_the_others(monkeypatch, tmp_path):
    stand_in = tmp_path / "python"
    stand_in.write_text(
        "#!/bin/sh\n"
        "echo '{\"ready\": true}'\n"
        'while read line; do case "$line" in *27*) kill -9 $$;; *) echo \'{"reason": "equal"}\';; esac; done\n'
    )
    stand_in.chmod(0o755)
    monkeypatch.setattr("torl_grading.pool.sys.executable", str(stand_in))
    with Grader() as grader:
        killer = grader.submit([r"\boxed{\sqrt{27}}"], r"3\sqrt{3}")
        assert (killer.result().score, killer.result().reason, grader.restarts) == (-1.0, "crashed", 2)
        assert grader.submit([r"\boxed{\sqrt{12}}"], r"2\sqrt{3}").result().correct


def test_workers_that_never_get_ready_are_an_error_and_never_a_wrong_answer(monkeypatch):
    monkeypatch.setattr("torl_grading.pool.sys.executable", shutil.which("false"))
    with Grader() as grader:
        pending = grader.submit([NEEDS_ALGEBRA[0]], NEEDS_ALGEBRA[1])
        with pytest.raises(GraderError, match="Two grading workers in a row did not get ready"):
            pending.result()
    monkeypatch.setattr("torl_grading.pool.sys.executable", "/does/not/exist")
    with Grader() as grader, pytest.raises(GraderError, match="does not start"):
        grader.submit([NEEDS_ALGEBRA[0]], NEEDS_ALGEBRA[1]).result()


def test_grading_works_from_any_thread_and_in_parallel(grader):
    verdicts: dict[int, bool] = {}

    def work(index: int) -> None:
        verdicts[index] = (
            grader.submit([f"\\boxed{{{index}\\sqrt{{12}}}}"], f"{2 * index}\\sqrt{{3}}").result().correct
        )

    threads = [threading.Thread(target=work, args=(index,)) for index in range(1, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert verdicts == dict.fromkeys(range(1, 9), True)


def test_answers_decided_by_text_start_no_process():
    with Grader() as grader:
        assert grader.submit([r"\boxed{42}"], "42").done()
        assert grader.check_solution("42").done()
        assert worker_pids(grader) == []


def test_close_fails_what_waits_and_leaves_no_process():
    grader = Grader(timeout_seconds=60.0)
    grader.submit([NEEDS_ALGEBRA[0]], NEEDS_ALGEBRA[1]).result()
    (pid,) = worker_pids(grader)
    os.kill(pid, signal.SIGSTOP)
    pending: list[Future] = [grader.submit([NEEDS_ALGEBRA[0]], NEEDS_ALGEBRA[1]) for _ in range(3)]
    grader.close()
    grader.close()
    for future in pending:
        with pytest.raises(GraderError):
            future.result(timeout=5)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    with pytest.raises(GraderError, match="closed"):
        grader.submit([r"\boxed{42}"], "42")


def test_the_worker_sees_little_of_the_environment_and_loads_no_torch(monkeypatch, grader):
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    grader.submit([NEEDS_ALGEBRA[0]], NEEDS_ALGEBRA[1]).result()
    code = "import sys, torl_grading.worker; print([m for m in ('torch', 'trl', 'transformers') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
    if sys.platform == "linux":
        (pid,) = worker_pids(grader)
        with open(f"/proc/{pid}/environ", encoding="utf-8") as environment:
            assert "secret" not in environment.read()


def test_one_text_is_graded_by_the_function():
    assert grade(f"```python\nx\n```\n```output\n1\n```\n so {NEEDS_ALGEBRA[0]}", NEEDS_ALGEBRA[1]).score == 1.0
    assert grade("no answer", "5").reason == "no_box"
    with pytest.raises(TypeError, match="one string per turn"):
        Grader().submit("text", "5")


def test_a_script_without_a_main_guard_can_grade(tmp_path):
    # With multiprocessing's spawn, each worker would run this script again.
    script = tmp_path / "script.py"
    script.write_text(
        f"from torl_grading import grade\nprint(grade(r'{NEEDS_ALGEBRA[0]}', r'{NEEDS_ALGEBRA[1]}').score)\n"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout == "1.0\n"


@pytest.mark.skipif(sys.platform != "linux", reason="the memory limit holds on Linux only")
def test_a_worker_has_a_memory_limit(grader):
    grader.submit([NEEDS_ALGEBRA[0]], NEEDS_ALGEBRA[1]).result()
    (pid,) = worker_pids(grader)
    limits = Path(f"/proc/{pid}/limits").read_text(encoding="utf-8")
    assert f"Max address space         {4 << 30}" in limits


@pytest.mark.parametrize(("option", "value"), [("num_workers", 0), ("timeout_seconds", 0)])
def test_impossible_options_are_refused(option, value):
    with pytest.raises(ValueError, match=option):
        Grader(**{option: value})
