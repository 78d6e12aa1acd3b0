r"""Equivalence of answers: rules, symmetry, public cases, benchmark golds, random wrong pairs, pathological input."""

import collections
import json
import random
import re
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from known_verdicts import ACCEPTED, KNOWN

from torl_grading import Grader, grade
from torl_grading.extraction import last_boxed
from torl_grading.normal import normalize, number, split_unit, strip_delimiters

UNDONE = re.compile(r"[+!]|\\binom|\\log|\\sum|\\cdot 1")  # an answer has to be worked out, a solution does not


@pytest.fixture(scope="module")
def grader():
    with Grader(num_workers=2) as grader:
        yield grader


def is_right(grader: Grader, solution: str, answer: str) -> bool:
    return grader.submit([f"\\boxed{{{answer}}}"], solution).result().correct


SAME = r"""
42 | 42.0
1,000 | 1000
1\,000 | 1000
1 000 | 1000
1{,}000{,}000 | 1000000
0,111 | 0.111
3{,}14 | 3.14
1.234.567,5 | 1234567.5
4\frac{4}{9} | \frac{40}{9}
4 4/9 | 40/9
-4\frac{1}{2} | -4.5
5\text{ cm} | 5
5 cm | 5
36\text{ cm}^2 | 36
90^\circ | 90
90^\circ | 90 degrees
10\% | 10
10\% | 10 percent
3:30 | 3:30\text{ p.m.}
12:00 | 12:00
2516_8 | 2516_{8}
(1,2) | 1,2
(1,2) | (1, 2)
\{1,2\} | 2,1
1,2 | \{2,1\}
1,2 | 2 \text{ and } 1
x=1 \text{ or } x=2 | 1,2
\pm 3 | 3,-3
3\pm\sqrt2 | 3+\sqrt{2}, 3-\sqrt{2}
[0,1) | 0 \le x < 1
(-\infty,3) | x<3
x<3 | 3>x
x \ge 2 | [2,\infty)
(-\infty,1)\cup(2,\infty) | x<1 \text{ or } x>2
(2,\infty)\cup(-\infty,1) | (-\infty,1)\cup(2,\infty)
y=2x+1 | 2x+1
x=5 | 5
f(x)=x^2+1 | x^2+1
\begin{pmatrix}1\\2\end{pmatrix} | (1,2)
\begin{pmatrix}1\\2\end{pmatrix} | \begin{bmatrix}1\\2\end{bmatrix}
\begin{pmatrix}1&2\\3&4\end{pmatrix} | \begin{bmatrix}1&2\\3&4\end{bmatrix}
\langle 1,2 \rangle | (1,2)
\text{(A)} | A
A | \textbf{(A)}\ 5
A | (A)
D | D. it can't be A
\text{Yes} | yes
\text{even} | Even
\frac{\pi}{6} | \dfrac{\pi}6
2\sqrt{3} | \sqrt{12}
x^2-1 | (x-1)(x+1)
\frac{1}{2}+\frac{1}{72} | \frac{37}{72}
1024 | 2^{10}
12 | \sqrt{144}
\frac{1}{3} | 0.333333
2^{2004}-1 | -1+2^{2004}
\frac{1}{2004!} | \frac{1}{2004!}
6+9i | 9i+6
-\frac{1}{2} | \frac{-1}{2}
-\frac{1}{2} | -0.5
-\frac{1}{2} | \frac{1}{-2}
3.0\times 10^{8} | 3 \cdot 10^8
3.0\times 10^{8} | 300000000
6.02e+23 | 6.02 \times 10^{23}
\frac{\sqrt{3}}{3} | \frac{1}{\sqrt{3}}
\log_2 3 | \frac{\ln 3}{\ln 2}
e^{2x} | (e^x)^2
\infty | +\infty
\text{no solution} | No solution
(3,\frac{\pi}{2}) | \left(3, \frac{\pi}{2}\right)
2x+4y-3=0 | y=\frac{3-2x}{4}
x+y=1 | y+x=1
x+y=1 | 2x+2y-2=0
\sqrt[3]{2} | 2^{1/3}
\$10 | 10
\$1,000.99 | 1000.99
10\text{ dollars} | \$10
\frac{x}{y} | x/y
\binom{10}{3} | 120
7.5 | 7\frac{1}{2}
(x,y)=(1,2) | (1,2)
x=1,y=2 | (1,2)
a_1=2, a_2=3 | a_2=3, a_1=2
|x-1| | |1-x|
\lfloor x\rfloor | \lfloor x \rfloor
n! | n!
\frac{n(n+1)}{2} | \frac{n^2+n}{2}
0.5 | .5
x\in\{1,2\} | 1,2
\emptyset | \emptyset
\mathbb{R} | (-\infty,\infty)
17 | 17\text{ students}
11:21 | 11 : 21
2,3,5 | 2, 3, and 5
-2 \le x \le 7 | [-2,7]
x\neq 3 | x\ne 3
45 | 45.
\cos x | \sin(\frac{\pi}{2}-x)
"""
DIFFERENT = r"""
42 | 41
42 | x = 41 = 42
42 | 1+41
42 | 41, 42
42 | 42, 42.5
42 | 41 \text{ or } 42
42 | 42\text{ or }41
42 | \{42, 43\}
42 | (42,42)
42 | x
42 | 42x
42 | 41 \le x \le 43
42 | x \ge 42
42 | \pm 42
42 | 41 < 42
42 | 42 \approx 43 \text{ or } 41
42 | 41 \approx 42
42 | 41=42
42 | 42=41
42 | 42 \ne 41
42 | \text{42 or 43}
42 | 42 43
42 | \frac{42}{1}\text{ or }\frac{43}{1}
42 | 42/0
5050 | \sum_{k=1}^{100} k
70 | \binom{8}{4}
3 | \log_2 8
10\% | 0.1
0.1 | 10\%
5\text{ cm} | 5\text{ m}
36^\circ | \$36
3:30\text{ a.m.} | 3:30\text{ p.m.}
7:00 | 7:30
2516_8 | 2516
2516_8 | 1358
2516_8 | 2516_9
(1,2) | (2,1)
(1,2) | 2,1
(1,2) | \{1,2\}
[0,1] | [0,1)
(0,1) | [0,1]
\frac{1}{2^{99}} | \frac{1}{2^{98}}
\frac{1}{2004!} | \frac{1}{2006!}
\frac{2^{2005}+1}{3\cdot 2^{2006}} | \frac{1}{3\cdot 2^{2006}}
\frac{\sqrt2}{2^{99}} | \frac{\sqrt2}{2^{98}}
\frac{x}{2^{99}} | \frac{x}{2^{98}}
1-\frac{1}{\mathrm{e}} | 1+\frac{1}{\mathrm{e}}
2x+z=1 | 1
1 | 2x+z=1
7=11a+c | 11a+c
11a+c | 7=11a+c
x=5 | y=5
x<3 | x>3
x<3 | x \le 3
x<3 | 3
(-\infty,1)\cup(2,\infty) | x<1 \text{ and } x>2
(1,2) | x>1 \text{ or } x<2
x>1 \text{ and } x<2 | x>1 \text{ or } x<2
4 | 4\sqrt(2)
4 | 4\sqrt{2}
4\sqrt{2} | 4\pi
2\sqrt{5} | 2\sqrt{3}
6+9i | 6-5i
1,2,3 | 1,2
1,2 | 1,2,3
1,2,\ldots,n | 1,2
32349 | 32, 349
0.333 | \frac{1}{3}
\frac13 | 0.33
0.0000001 | 0.0000002
1.5\times10^{-8} | 1.6\times10^{-8}
11 6/6 | 12
4 4/0 | 4
A | B
A | A, B, C, D
A | A \text{ or } B
A | ABCD
C | \text{A, B, C or D}
\text{east} | \text{seat}
\text{no} | \text{on}
ab | abc
2m | 2
2 | 2m
2x | 2
5n | 5
\begin{pmatrix}1\\2\end{pmatrix} | (2,1)
\begin{pmatrix}1&2\\3&4\end{pmatrix} | \begin{pmatrix}1&2\\3&5\end{pmatrix}
\begin{pmatrix}1&2\\3&4\end{pmatrix} | (1,2,3,4)
f(1)=2 | f(2)=2
1:2:3 | 1:2:4
1:2 | 2:1
x^2+y^2=1 | x^2+y^2=2
\emptyset | 0
\text{all real numbers} | \text{no real numbers}
3 | 3 \text{ or more}
3 | \le 3
3 | \text{at least } 3
42 | \text{the answer}
42 | 42 \text{ if } x>0 \text{ else } 43
42 | -42
42 | 42i
42 | 42!
42 | 4 2
42 | 42^1 \cdot 1 + 0
42 | \boxed{}
42 | ?
42 | \_
42 | \text{solution}
\mathbb{R} | \mathbb{N}
\pi | 3.14
\pi | 3.141592
\sqrt{2} | 1.414
e | E
x | X
2^{100} | 2^{101}
10^{50} | 10^{50}+1
\frac{10^{50}+1}{10^{50}} | 1
x+10^{-9} | x
\gamma+1 | \gamma+2
\sin x | \sin 2x
\log x | \log_2 x
"""


def pairs(table: str) -> list[tuple[str, str]]:
    return [tuple(part.strip() for part in line.split(" | ")) for line in table.strip().splitlines()]


@pytest.mark.parametrize(("left", "right"), pairs(SAME))
def test_the_same_answer_in_either_order(grader, left, right):
    assert is_right(grader, left, right)
    if not (number(normalize(right)) and UNDONE.search(left)):
        assert is_right(grader, right, left)


@pytest.mark.parametrize(("left", "right"), pairs(DIFFERENT))
def test_different_answers_in_either_order(grader, left, right):
    assert not is_right(grader, left, right)
    if not (number(normalize(left)) and UNDONE.search(right)):
        assert not is_right(grader, right, left)


# --- Third-party data -----------------------------------------------------------------------------------------------


def boxed(text: str) -> str | None:
    """How a model would have boxed this prediction, or None where the test is about finding it in a sentence."""
    text = text.split("<|im_start|>")[0].strip()
    if "boxed" in text:
        return text
    whole, formulas = strip_delimiters(text), re.findall(r"\$([^$]+)\$(.*)", text)
    if re.search(r"\$ *\n", text):
        return None
    if match := re.search(r"(?:\bis|answer:) +(\$[^$]+\$|\S*[\d)])\.?(?: I hope it is correct\.)?$", text):
        return f"\\boxed{{{match[1].strip('$')}}}"
    if whole == text and len(formulas) == 1 and not text.endswith(("%", "percent", "pct")):
        whole = formulas[0][0].strip() if not re.search(r"\d", formulas[0][1]) else None
    if whole is None:
        return None
    if len(re.findall(r"(?<![\\A-Za-z])[A-Za-z]{3,}", whole)) > 4 and "\\text" not in whole:
        return None
    return f"\\boxed{{{whole}}}" if whole.count("$") < 3 else None


def read_jsonl(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_public_cases_are_decided_as_expected_but_for_those_in_the_table(grader, shared):
    pending = []
    for case in read_jsonl(shared / "cases" / "verify_cases.jsonl"):
        gold, prediction = (boxed(case[name]) for name in ("gold", "prediction"))
        if gold is not None and prediction is not None and last_boxed(gold) is not None:
            pending.append((case, grader.submit([prediction], last_boxed(gold))))
    otherwise = {case["id"] for case, future in pending if future.result().correct != case["expected"]}
    accepted = {case["id"] for case, future in pending if future.result().correct and not case["expected"]}
    assert len(pending) >= 260
    assert otherwise <= set(KNOWN)
    assert accepted <= ACCEPTED
    assert len(otherwise) <= 0.03 * len(pending)


@pytest.mark.parametrize(
    ("name", "count", "unusable"),
    [("aime24", 30, 0), ("aime25", 30, 0), ("amc23", 40, 0), ("math500", 500, 0), ("olympiadbench", 675, 3)],
)
def test_benchmark_solutions_are_right_for_themselves(grader, shared, name, count, unusable):
    answers = [str(row["answer"]) for row in read_jsonl(shared / "data" / f"{name}.jsonl")]
    assert len(answers) == count
    verdicts = [grader.submit([f"\\boxed{{{answer}}}"], answer) for answer in answers]
    assert all(verdict.result().correct for verdict in verdicts)
    refused = [answer for answer in answers if grader.check_solution(answer).result() is not None]
    assert len(refused) <= unusable, refused  # a condition in prose, m_{\\max}, and a typing error


def all_solutions(shared: Path) -> list[str]:
    names = ["math500", "olympiadbench", "minerva_math", "hmmt_feb_2025", "train_limr1389", "train_dsr_sub1209"]
    rows = [row for name in names for row in read_jsonl(shared / "data" / f"{name}.jsonl")]
    answers = [str(row.get("answer", row.get("solution"))) for row in rows]
    return [
        answer for answer in answers if len(answer) <= 300 and "(-1)^" not in answer
    ]  # n+1 and n-1 are alike there


def changed_number(answer: str, rng: random.Random) -> str:
    numbers = list(re.finditer(r"\d+", answer))
    if not numbers:
        return answer
    chosen = rng.choice(numbers)
    return f"{answer[: chosen.start()]}{int(chosen[0]) + rng.choice([1, 2, 10])}{answer[chosen.end() :]}"


def swapped_sign(answer: str, rng: random.Random) -> str:
    signs = list(re.finditer(r"(?<=[\w}) ])[+-]", answer))
    if not signs:
        return f"-{answer}" if answer[0].isdigit() and number(normalize(answer)) != (0, False) else answer
    chosen = rng.choice(signs)
    return f"{answer[: chosen.start()]}{'-' if chosen[0] == '+' else '+'}{answer[chosen.end() :]}"


def in_letters(answer: str) -> str:
    """What is left of an answer when everything is dropped that may be dropped: to see what is really equal."""
    text = re.sub(r"-(?=0(?![.\d]))|(?<=\\)[dt](?=frac)|\\(?:text|mathrm|mbox)\{[^}]*\}(?:\^2)?", "", answer)
    text = re.sub(r"\^\{?\\circ\}?|\\%|\\?\$|\s|\\[,!;]|\\left|\\right|^[a-zA-Z]=", "", text)
    return ",".join(sorted(re.split(r"(?<=\)),", text))) if text.startswith("(") else text


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_random_wrong_pairs_are_refused(grader, shared, seed):
    """5,000 pairs of solutions to other problems with the same look or the same numbers, and of changed solutions."""
    rng = random.Random(seed)
    solutions = all_solutions(shared)
    hard = [answer for answer in solutions if not number(normalize(answer))]
    alike = collections.defaultdict(list)
    for answer in hard:
        alike[re.sub(r"\d+", "0", re.sub(r"\s", "", answer))[:8]].append(answer)
        alike[tuple(re.findall(r"\d+", answer)[:1])].append(answer)
    pending = []
    while len(pending) < 5000:
        solution = rng.choice(hard if rng.random() < 0.8 else solutions)
        others = (
            alike[re.sub(r"\d+", "0", re.sub(r"\s", "", solution))[:8]],
            alike[tuple(re.findall(r"\d+", solution)[:1])],
        )
        makers = (changed_number(solution, rng), swapped_sign(solution, rng), *(rng.choice(o or hard) for o in others))
        answer = rng.choice(makers)
        if in_letters(answer) != in_letters(solution):
            pair = (solution, answer) if rng.random() < 0.5 else (answer, solution)
            pending.append((pair, grader.submit([f"\\boxed{{{pair[1]}}}"], pair[0])))
    accepted = {frozenset(pair) for pair, future in pending if future.result().correct}
    assert len(accepted) <= 2, accepted


# --- Properties -----------------------------------------------------------------------------------------------------

NUMBERS = st.integers(-999, 999)
MANY = settings(
    max_examples=300, derandomize=True, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@st.composite
def expressions(draw) -> tuple[str, str, str]:
    """An answer, the same one written otherwise, and one with another value."""
    a, b, c = draw(st.integers(1, 99)), draw(st.integers(1, 99)), draw(st.sampled_from([2, 3, 5, 7]))
    root, other = f"\\sqrt{{{c}}}", f"\\sqrt{{{c + 4}}}"
    return draw(
        st.sampled_from(
            [
                (f"\\frac{{{a}}}{{{b}}}", f"\\dfrac {{{a}}} {{{b}}}", f"\\frac{{{a + 1}}}{{{b}}}"),
                (f"{a}+{b}{root}", f"{b}{root} + {a}", f"{a}+{b}{other}"),
                (f"{a}+{b}{root}", f"\\left({a} + {b} {root}\\right)", f"{a}-{b}{root}"),
                (f"{a}x^2+{b}x+{c}", f"{c} + {b} x + {a} x^{{2}}", f"{a}x^2+{b}x-{c}"),
                (f"({a}, -{b})", f"\\left( {a},\\, -{b} \\right)", f"(-{b}, {a})"),
                (f"{a}, -{b}", f"-{b} \\text{{ and }} {a}", f"{a}, {b}"),
                (f"{a}\\text{{ cm}}", f"{a} cm", f"{a}\\text{{ kg}}"),
                (f"{a}^\\circ", f"{a}", f"{a + 1}^\\circ"),
                (f"[{a}, \\infty)", f"x \\ge {a}", f"({a}, \\infty)"),
                (f"x = {a}", f"{a}.0", f"x = -{a}"),
                (f"{a}{root}\\pi", f"\\pi {root} \\cdot {a}", f"{a + 1}{root}\\pi"),
                (f"{1000 * a + 999}", f"{a},999", f"{a}, 998"),
            ]
        )
    )


@MANY
@given(expressions())
def test_an_answer_equals_itself_rewritten_and_not_with_another_value(grader, case):
    answer, rewritten, other = case
    for left, right, expected in ((answer, rewritten, True), (answer, other, False), (rewritten, other, False)):
        assert is_right(grader, left, right) is expected, (left, right)
        assert is_right(grader, right, left) is expected, (right, left)
        assert is_right(grader, left, left)


PIECES = [
    r"\frac{1}{2}",
    r"\sqrt{2}",
    r"\text{cm}",
    r"\text{ or }",
    r"\pm",
    r"^\circ",
    r"\infty",
    r"\left(",
    r"\right]",
]
PIECES += [
    r"\begin{pmatrix}",
    r"\end{pmatrix}",
    r"\\",
    "&",
    "{",
    "}",
    "(",
    "]",
    "[",
    ")",
    "^",
    "_",
    "!",
    "%",
    "$",
    ",",
    ";",
]
PIECES += [
    "x",
    "y",
    "e",
    "i",
    "1",
    "2",
    "42",
    "0.5",
    "=",
    "<",
    r"\le",
    r"\cup",
    r"\in",
    ":",
    " ",
    "+",
    "-",
    "/",
    r"\{",
    r"\}",
]


def without_units(text: str) -> str:
    value = split_unit(text)[0]
    return value if value == text else without_units(value)


@MANY
@given(
    st.lists(st.sampled_from(PIECES), max_size=12).map("".join),
    st.lists(st.sampled_from(PIECES), max_size=12).map("".join),
)
def test_any_two_answers_get_the_same_verdict_in_either_order(grader, left, right):
    whole = all(last_boxed(f"\\boxed{{{text}}}") == text.strip() for text in (left, right))
    if whole and not any(number(without_units(normalize(text))) for text in (left, right)):  # else see UNDONE
        assert is_right(grader, left, right) == is_right(grader, right, left)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.text(max_size=300), st.sampled_from(["42", r"2\sqrt{3}", "(1, 2)", "x^2+1", "[0, 1)"]), st.integers(1, 400))
def test_no_text_is_too_strange(grader, text, solution, times):
    started = time.perf_counter()
    for candidate in (text * times, f"\\boxed{{{text}}}", f"\\boxed{{{text * times}}}"):
        verdict = grader.submit([candidate[:100_000]], solution).result()
        assert verdict.score in (1.0, -1.0)
    assert time.perf_counter() - started < 3 * grader.timeout_seconds


NEVER_ENDING = r"""
9^{9^9}   9^{9^{9^9}}   2003^{2002^{2001}}   10^{10^{10}}   (10^8)!   100000000!   ((5!)!)!   9!!!!!!   2^{100000}
2**100000   (9^9)^{(9^9)}   9^{(10-1)^{(10-1)}}   ((9^9)^9)^9   x^{9^{9^9}}   1e999999999   10^{-10^{10}}   1/0   0^0
\sum_{k=1}^{10^9} \frac{1}{k}   \prod_{k=1}^{1000000} k   \sum_{k=1}^{999999999} k^k   \sum_{k=1}^{9999} k^k
\binom{10^8}{5 \cdot 10^7}   \binom{100000000}{50000000}   (x+y+z+w)^{200}   (1+x)^{9999}   x^{9999}-1   \log 0
\int_0^1 \sin(\cos(\tan(x^x))) dx   \int_0^{\infty} e^{-x^2} \sin(x^3) dx   \infty-\infty   \frac{0}{0}
\lim_{x \to 0} \frac{\sin(\tan x)-\tan(\sin x)}{x^7}   \dfrac{5^{(5^{(5^{(5^5)})}-4)}-5}{16}
"""
PATHOLOGICAL = re.split(r" {3}|\n", NEVER_ENDING.strip())
PATHOLOGICAL += [
    unit * (390 // len(unit))
    for unit in ("9", "x", "!", "{", "\\{", "\\\\", "1/", "\x00", "\ud800", "٣", "∑∏∫√", "^9")
]
PATHOLOGICAL += [
    "0." + "9" * 390,
    "-" * 390 + "1",
    "^".join("9" * 50),
    ",".join("1" * 190),
    "(" * 190 + "x" + ")" * 190,
]
PATHOLOGICAL += [r"\frac{1}{" * 40 + "2" + "}" * 40, r"\sqrt{" * 40 + "2" + "}" * 40, r"\sin(" * 30 + "x" + ")" * 30]
PATHOLOGICAL += ["+".join(rf"\sqrt{{{n}}}" for n in range(2, 40)), ",".join(rf"\sqrt{{{n}}}" for n in range(30))]
PATHOLOGICAL += [r"\begin{pmatrix}" + "1 & " * 90 + r"1\end{pmatrix}", r"\left(" * 60]


def test_pathological_answers_are_wrong_within_the_limit(grader):
    assert len(PATHOLOGICAL) >= 40
    for solution in (r"2\sqrt{3}", "x^2+1", "42", "1, 2, 3"):
        for answer in PATHOLOGICAL:
            started = time.perf_counter()
            verdict = grader.submit([f"\\boxed{{{answer}}}"], solution).result()
            assert not verdict.correct, (solution, answer)
            assert time.perf_counter() - started < grader.timeout_seconds + 1.0, (solution, answer)


def test_pathological_solutions_are_found(grader):
    for answer in PATHOLOGICAL:
        started = time.perf_counter()
        grader.check_solution(answer).result()
        assert time.perf_counter() - started < grader.timeout_seconds + 1.0, answer


def test_one_text_is_graded_by_the_function():
    assert grade(r"So \boxed{\sqrt{12}}.", r"2\sqrt{3}").correct
