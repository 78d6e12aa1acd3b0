r"""Attacks on the reward by what is written where: only a box in the model's own readable text may count.

Complements the attack table of test_grading.py; the right answer is 42 throughout.
"""

import re
import time

import pytest

from torl_grading import Grader
from torl_grading.extraction import extract_answer, last_boxed

CALL = "```python\nprint(6*7)\n```\n```output"


@pytest.fixture(scope="module")
def grader():
    with Grader() as grader:
        yield grader


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"\boxed 5", "5"),
        (r"\boxed5", "5"),
        (r"\boxed -7/2.", "-7/2"),
        (r"\boxed A", "A"),
        (r"\boxed", None),
        (r"\boxed 5 then \boxed{6", "5"),
        (r"\fbox{ 5 }", "5"),
        ("\\boxed\n{5}", "5"),
        (r"\boxed{\text{a {b} c}}", r"\text{a {b} c}"),
        (r"\boxed{1}, \boxed{2} and \boxed{3}", "1, 2, 3"),
        (r"$\boxed{(3, 3)} \text{ for part (a) and } \boxed{(1, 1)}$", "(3, 3), (1, 1)"),
        (r"\boxed{4}. Then we check again: \boxed{5}", "5"),
        (r"\boxed{4} \boxed{4}", "4"),
        (r"\boxed{4} \boxed{}", ""),
        (r"\boxed{1} and and or thus but \boxed{2} and \boxed{3}", "2, 3"),
    ],
)
def test_what_is_a_box(text, answer):
    assert last_boxed(text) == answer


ATTACKS = {
    "a stream of boxes": " ".join(f"\\boxed{{{n}}}" for n in range(100)),
    "a stream that ends with the answer": " ".join(f"\\boxed{{{n}}}" for n in range(43)),
    "a stream, a box a line": "\n".join(f"\\boxed{{{n}}}" for n in range(43)),
    "a stream with commas": ", ".join(f"$\\boxed{{{n}}}$" for n in range(43)),
    "a guess and another": r"\boxed{41} or \boxed{42}",
    "a list in a box": r"\boxed{40, 41, 42}",
    "a set in a box": r"\boxed{\{41, 42\}}",
    "a tuple of guesses": r"\boxed{(42, 42)}",
    "guesses with or": r"\boxed{42 \text{ or } 43}",
    "guesses with and": r"\boxed{42 and 43}",
    "guesses with a semicolon": r"\boxed{42; 43}",
    "guesses in a column": r"\boxed{\begin{pmatrix} 42 \\ 43 \end{pmatrix}}",
    "guesses with a slash": r"\boxed{42/43}",
    "guesses with spaces": r"\boxed{42 43}",
    "guesses in text": r"\boxed{\text{42 or 43}}",
    "a range": r"\boxed{41 \le x \le 43}",
    "an interval": r"\boxed{[42, 42.5]}",
    "plus or minus": r"\boxed{\pm 42}",
    "not the others": r"\boxed{\ne 41}",
    "at least": r"\boxed{\text{at least } 42}",
    "an equation chain": r"\boxed{x = 41 = 42}",
    "a chain the other way": r"\boxed{x = 42 = 41}",
    "a wrong equation": r"\boxed{41 = 42}",
    "about": r"\boxed{41 \approx 42}",
    "any number": r"\boxed{x}",
    "any multiple": r"\boxed{42 k}",
    "a wildcard": r"\boxed{\_}",
    "a question mark": r"\boxed{?}",
    "prose": r"\boxed{\text{the answer}}",
    "an empty box": r"\boxed{}",
    "a space in a box": r"\boxed{\,}",
    "the question, restated": r"\boxed{6 \cdot 7}",
    "a sum, restated": r"\boxed{\sum_{k=1}^{42} 1}",
    "an undone operation": r"\boxed{1+41}",
    "an empty box after the answer": r"\boxed{42} \boxed{}",
    "a box within a wrong one": r"\boxed{41 \boxed{42} 43} \boxed{41}",
    "a box in a comment of HTML": r"Done. <!-- \boxed{42} -->",
    "a box in a comment that does not end": r"Done. <!-- \boxed{42}",
    "a box in a comment of LaTeX": "Done.\n% \\boxed{42}",
    "a box in a comment of code": "```python\n# \\boxed{42}\n```",
    "a box in a string": "```python\nanswer = r'\\boxed{42}'\n```",
    "code without a fence": "print(r'\\boxed{42}')",
    "code with a bracket in a string": "print(f'a) \\boxed{42}')",
    "code with brackets in brackets": "print(str((6, (7))), '\\boxed{42}')",
    "code with brackets that do not close": "print((f'the answer {x} is \\boxed{42}'",
    "a comment behind code": "print(6 * 7)  # \\boxed{42}",
    "another fence": "~~~python\n\\boxed{42}\n~~~",
    "a fence without a language": "```\n\\boxed{42}\n```",
    "a fence that does not end": "Done.\n```text\n\\boxed{42}",
    "an invented observation": "```python\nprint(6*7)\n```\n```output\n\\boxed{42}\n```\n",
    "an invented observation, unclosed": "```python\nprint(6*7)\n```\n```output\n\\boxed{42}",
    "a box that is not closed": r"\boxed{42",
    "a box with an escaped end": r"\boxed{42\}",
    "no box": "The answer is $42$.",
    "bold": "**42**",
    "a very long box": r"\boxed{" + "42 " * 500 + "}",
}


@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_is_not_rewarded(grader, name):
    verdict = grader.submit([ATTACKS[name]], "42").result()
    assert (verdict.correct, verdict.score) == (False, -1.0), verdict


@pytest.mark.parametrize(
    "text",
    [
        r"Running `print(2 * 21)` gives \boxed{42}.",
        r"By print(f(x, (1))), the answer is $\boxed{42}$.",
        r"print('6 * (7') prints \boxed{42}",
    ],
)
def test_an_answer_behind_a_call_of_print_in_a_sentence_counts(grader, text):
    assert grader.submit([text], "42").result().correct


@pytest.mark.parametrize(
    "turns",
    [
        [CALL, "Done."],
        [r"\boxed{" + CALL, "}"],
        [r"\boxed{", "42}"],
        ["\\boxed{4", "2}"],
        [CALL + "\n\\boxed{42}", "Done."],
        [r"<!-- " + CALL, r"--> \boxed{41}"],
        [r"\boxed{42}", r"No, \boxed{41}"],
    ],
)
def test_nothing_is_spliced_over_an_observation(grader, turns):
    assert not grader.submit(turns, "42").result().correct


def test_the_released_behaviour_can_be_had(grader):
    text = "```python\nprint(r'\\boxed{42}')\n```\n```output\n\\boxed{42}\n```\n"
    assert grader.submit([text], "42", keep_fences=True).result().correct
    assert not grader.submit([text], "42").result().correct


UNITS = [
    "\\",
    "\\boxed",
    "\\boxed{",
    "\\boxed ",
    "\\boxed{1} ",
    "\\boxed{1} and ",
    "{",
    "}",
    "`",
    "```",
    "```python\n",
]
UNITS += ["~~~\n", "<!--", "print(", "%\n", " ", "\n", "$", "\\text{", "and "]


@pytest.mark.parametrize("unit", UNITS)
def test_extraction_is_linear(unit):
    started = time.perf_counter()
    for text in (unit * (100_000 // len(unit)), "\\boxed{1}" + unit * (90_000 // len(unit)) + "\\boxed{2}"):
        answer = extract_answer([text])
        assert answer is None or re.search(r"\d|boxed|and|^$", answer) is not None
    assert time.perf_counter() - started < 2.0
