"""Kinds of problems, the normal form, near duplicates and contamination, on small texts."""

import pytest

from torl_data.curation import (
    Benchmarks,
    NearDuplicates,
    has_parts,
    is_multiple_choice,
    is_open,
    normal_tokens,
    signs,
    sketch,
)


def form(text: str) -> str:
    return " ".join(normal_tokens(text))


@pytest.mark.parametrize(
    ("problem", "answer", "question_type", "expected"),
    [
        ("Prove that $\\sqrt{2}$ is irrational.", "see proof", "", True),
        ("Show that $n^2+n$ is even.", "2", "", True),
        ("Let $n > 1$.", "x", "proof", True),
        ("Find $x$.", "Proof.", "", True),
        ("Find $x$.", "not found", "", True),
        ("Explain why there is no such $n$.", "0", "", True),
        ("Who wins?", "The first player wins if and only if n is odd", "", True),
        ("Show that $n$ is unique and find $n$.", "7", "", False),
        ("The figure shows that $AB = 3$. What is $CD$?", "4", "", False),
        ("Find the speed.", "8 \\text{ square centimeters per second}", "math-word-problem", False),
        ("Evaluate.", "\\frac{\\sqrt{\\sin\\theta\\cos\\theta\\tan\\theta}}{\\log\\alpha\\beta}", "", False),
    ],
)
def test_proofs_and_open_questions(problem, answer, question_type, expected):
    assert is_open(problem, answer, question_type) is expected


@pytest.mark.parametrize(
    ("problem", "answer", "question_type", "expected"),
    [
        ("What is 1+1? $\\textbf{(A)}\\ 1 \\qquad \\textbf{(B)}\\ 2 \\qquad \\textbf{(C)}\\ 3$", "2", "", True),
        ("Which is prime?\nA. 4\nB. 6\nC. 7\nD. 9", "C", "", True),
        ("Which? (A) 4 (B) 6 (C) 7", "7", "", True),
        ("Enter the letter of the graph.", "\\text{B}", "", True),
        ("Enter the letters of the options that are true.", "A, C", "", True),
        ("Is 7 prime?", "\\text{Yes}", "", True),
        ("Is it so?", "False.", "", True),
        ("Anything", "5", "MCQ", True),
        ("Points A, B and C lie on a circle through $D$. Find $AB$.", "5", "", False),
        (
            "The clock shows $\\text{A:BC}$, where $\\text{A}$, $\\text{B}$, $\\text{C}$ are digits. Find it.",
            "275",
            "",
            False,
        ),
        ("Express the area in terms of $C$ and $D$.", "D", "", False),
        ("Find $f(A)+f(B)+f(C)$.", "5", "", False),
    ],
)
def test_multiple_choice(problem, answer, question_type, expected):
    assert is_multiple_choice(problem, answer, question_type) is expected


@pytest.mark.parametrize(
    ("problem", "answer", "expected"),
    [
        ("Let $f(x)=x^2$.\n(a) Find $f(2)$.\n(b) Find $f(3)$.", "9", True),
        ("(1) Find the value of $C$. (2) If $a=1$, find $b$.", "2", True),
        ("a) How many are red? b) How many are blue?", "5", True),
        ("(i) What is $x$? (ii) What is $y$?", "5", True),
        ("Find both.", "(a) 5; (b) 7", True),
        ("A function satisfies (i) $f(1)=1$, (ii) $f$ is odd. Find $f(-1)$.", "-1", False),
        ("Rules: 1) double it; 2) add three. What comes after 5?", "13", False),
        ("Find $f(a)f(b)$ where (1) and (2) are the equations above.", "1", False),
    ],
)
def test_several_sub_answers(problem, answer, expected):
    assert has_parts(problem, answer) is expected


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("Find $x^{2}+18x.$", "find $x^2 + 18 x$"),
        ("$\\dfrac{1}{2}$ and $\\frac12$", "$\\frac{1}{2}$ and $\\tfrac{1}{2}$"),
        ("$a_1, \\ldots, a_n$", "$a_1,\\dots,a_n$"),
        ("\\[x \\neq 1,000\\]", "$x\\ne 1000$"),
        ("$z \\not= i$", "$z\\neq i$"),
        ("x² − 3·y ≤ 5 × 2", "$x^2 - 3 \\cdot y \\leq 5 \\times 2$"),
        ("$\\left( x \\right)$ if $\\text{ odd }$", "$(x)$ if odd"),
        ("$(a b c)^{2}$", "$(abc)^2$"),  # as scanned texts space it
        ("angle\u200b ABC", "$\\angle ABC$"),
    ],
)
def test_typography_does_not_matter(one, other):
    assert form(one) == form(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("$z^4+z^2+1$", "$z^4-z^2+1$"),
        ("$2(x+1)$", "$2x+1$"),
        ("$x^{a+b}$", "$x^a+b$"),
        ("$5!$", "$5$"),
        ("$3.5$", "$35$"),
        ("$x < 1$", "$x \\le 1$"),
        ("$AB$", "$ab$"),
        ("$1 2$", "$12$"),
        ("$(a, b)$", "$(a b)$"),
    ],
)
def test_operators_numbers_and_names_do(one, other):
    assert form(one) != form(other)


def test_figures_are_left_out_only_where_enough_words_remain():
    words = (
        "Triangle $ABC$ is isosceles with $AB = AC$ and altitude $AM = 11$. Now find its whole perimeter in inches. "
    )
    figure = "[asy] draw((0,0)--(1,1)); [/asy]"
    assert normal_tokens(words + figure, figures=False) == normal_tokens(words)
    assert normal_tokens("Find the area. " + figure, figures=False) == normal_tokens("Find the area. " + figure)


def test_signs_are_what_makes_another_problem():
    found = signs(normal_tokens("A bag has 3 red balls; $x+1$ are in $AB$ of the ELLIPSE, and $x$ are not."))
    assert found == {"3": 1, "x": 2, "+": 1, "1": 1, "AB": 1, "ELLIPSE": 1}
    assert not signs(normal_tokens("Find the value of all that are there."))


def near(problem: str, other: str, answer: str = "5", other_answer: str = "5", threshold: float = 0.6) -> bool:
    known = NearDuplicates(threshold)
    assert known.find_or_add("first", sketch(problem, answer)) is None
    found = known.find_or_add("second", sketch(other, other_answer))
    assert found is None or (found[0] == "first" and threshold <= found[1] <= 1)
    return found is not None


LONG = "There are two values of $a$ for which the equation $4x^2 + ax + 8x + 9 = 0$ has only one solution for $x$. "


def test_other_words_are_a_near_duplicate_and_other_numbers_are_not():
    assert near(LONG + "What is the sum of these values of $a$?", LONG + "What is the sum of those values of $a$?")
    assert not near(LONG + "What is the sum?", LONG.replace("9", "7") + "What is the sum?")
    assert not near(LONG + "What is the sum?", LONG.replace("+ ax", "- ax") + "What is the sum?")
    assert not near(LONG + "What is the sum?", LONG + "What is the sum?", "5", "6")
    assert near(LONG + "What is the sum?", LONG + "What is the sum?", "1,000", "$1000$")


def test_the_threshold_decides():
    one, other = LONG + "Find their sum.", LONG + "Say what their total value comes to."
    assert near(one, other, threshold=0.5) and not near(one, other, threshold=0.99)


def test_equal_normal_forms_have_equal_sketches():
    assert sketch("Find $x^{2}$.", "\\frac12") == sketch("find $x^2$", "$\\dfrac{1}{2}$")
    assert sketch("Find $x^2$.", "1").form == sketch("Find $x^2$.", "2").form


BENCHMARK = (
    "Let $F(z)=\\frac{z+i}{z-i}$ for all complex numbers $z\\not= i,$ and let $z_n=F(z_{n-1})$ for all positive "
    "integers $n.$ Given that $z_0=\\frac 1{137}+i,$ find $z_{2002}.$"
)


@pytest.fixture
def benchmarks() -> Benchmarks:
    known = Benchmarks()
    known.add("math500", "q1", BENCHMARK)
    known.add("math500", "q2", "Factor $z^4+z^2+1$.")
    known.add("amc23", "q3", "Determine the number of ways to arrange the letters of the word ELLIPSE.")
    return known


def test_a_benchmark_problem_is_found_whatever_its_typography(benchmarks):
    hit = benchmarks.find(BENCHMARK.replace("\\not= i,$", "\\neq i$,").replace("\\frac 1{137}", "\\dfrac{1}{137}"))
    assert (hit.benchmark, hit.benchmark_id, hit.overlap, hit.exact) == ("math500", "q1", 1.0, True)
    assert benchmarks.find("Factor  $z^{4}+z^{2}+1$").benchmark_id == "q2"


def test_a_reworded_or_lengthened_one_is_found_too(benchmarks):
    longer = BENCHMARK.replace("find $z_{2002}.$", "and $z_{2002}=a+bi$, where $a$ and $b$ are real, find $a+b$.")
    hit = benchmarks.find(longer)
    assert hit.benchmark_id == "q1" and not hit.exact and 0.85 <= hit.overlap < 1
    reworded = benchmarks.find(BENCHMARK.replace("for all positive integers", "for every positive integer"))
    assert reworded.benchmark_id == "q1" and not reworded.exact


@pytest.mark.parametrize(
    "problem",
    [
        "Factor $z^4-z^2+1$.",
        BENCHMARK.replace("2002", "2003"),
        BENCHMARK.replace("z+i", "z-i"),
        "Determine the number of ways to arrange the letters of the word MADAM.",
        "Let $F(z)=z$ for all complex numbers $z$. Find $z_0$.",
        "",
    ],
)
def test_other_problems_are_no_hits(benchmarks, problem):
    assert benchmarks.find(problem) is None


def test_nothing_is_found_in_no_benchmarks():
    assert Benchmarks().find(BENCHMARK) is None
