"""The report page in a real browser: Chromium without a window, driven by Playwright."""

import random
import re
import shutil
import time

import pytest
from report_runs import HOSTILE, rollout, write_run

from torl_report.page import build_page

pytestmark = pytest.mark.slow
sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright (pip install playwright)")
expect = sync_api.expect

LINES = [
    {"step": step, "split": split, "reward": step / 50, "accuracy": step / 50, "tools/pass_ratio": 0.5, "entropy": 0.1}
    for step in range(50)
    for split in ("train", "eval")
]
WIDE, NARROW = {"width": 1400, "height": 900}, {"width": 390, "height": 844}
TABS = ("curves", "behaviours", "rollouts", "run")


@pytest.fixture(scope="module")
def chromium():
    executable = shutil.which("chromium")
    if executable is None:
        pytest.skip("needs a program called chromium")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def visit(chromium):
    """visit(path, hash, ...) opens a page; afterwards it must have had no error and asked no other machine."""
    contexts, complaints = [], []

    def open_page(path, place="", viewport=WIDE, scheme="light"):
        context = chromium.new_context(viewport=viewport, color_scheme=scheme)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda sent: complaints.append(sent.url) if sent.url.startswith("http") else None)
        page.goto(f"{path.as_uri()}{place}")
        page.wait_for_selector("#loading", state="detached")
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert complaints == []


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """A run of 3 steps with 2 groups of 4; step 2 has failures, step 3 answers without code and hostile text."""
    rows = [rollout(1, group, index, correct=index > 1) for group in range(2) for index in range(4)]
    rows += [rollout(2, group, index, status="error", correct=False) for group in range(2) for index in range(4)]
    rows += [rollout(3, group, index, code=None, prose=f"Guess {index}.") for group in range(2) for index in range(4)]
    rows += [rollout(3, 7, 0, prose=HOSTILE, prompt=HOSTILE, sentinels=["faked_output"], stop_reason="length")]
    rows += [rollout(3, 0, 0, split="eval", prose="A needle in here.")]
    run = write_run(tmp_path_factory.mktemp("report") / "run", rows, LINES)
    (run / "config.yaml").write_text("learning_rate: 1e-4\n" + "long_option: " + "x" * 200 + "\n")
    return build_page([run])


def choose(page, **values):
    for name, value in values.items():
        control = page.locator(f"[name={name}]")
        if control.evaluate("node => node.tagName") == "SELECT":
            control.select_option(value)
        else:
            control.fill(value)


def matches(page):
    return int(page.inner_text("#count").split()[0].replace(",", ""))


def test_filters_give_the_right_rows_and_a_reset_gives_all(visit, path):
    page = visit(path, "#rollouts")
    assert matches(page) == 26
    for values, expected in (
        ({"split": "split:eval"}, 1),
        ({"answer": "answer:wrong"}, 12),
        ({"answer": "answer:wrong", "from": "2"}, 8),
        ({"from": "1", "to": "1"}, 8),
        ({"reward": "reward:−1"}, 12),
        ({"call": "call:error"}, 8),
        ({"stop": "stop:length"}, 1),
        ({"sentinel": "sentinel:faked_output"}, 1),
        ({"label": "label:right_without_code"}, 8),
        ({"label": "label:wrong_although_code_right", "search": "QUESTION 1"}, 2),
        ({"search": "needle"}, 1),
        ({"search": "no such text"}, 0),
    ):
        choose(page, **values)
        assert (values, matches(page)) == (values, expected)
        page.click("text=Reset")
        expect(page.locator("#count")).to_contain_text("26 match")


def test_a_link_opens_its_rollout_with_everything_about_it(visit, path):
    page = visit(path, "#r=run/train/1/1/2")
    text = page.inner_text("#detail")
    for part in (
        "Step 1, train: rollout 2 of group 1",
        "right (equal)",
        "accuracy_reward 1",
        "question 1?",
        "problem-1",
        "0.25",
    ):
        assert part in text
    kinds = page.locator("#detail .text:not(.prompt) span").evaluate_all(
        "spans => spans.map(span => [span.className, span.textContent])"
    )
    assert [kind for kind, _ in kinds] == ["", "code", "", "inserted", ""]
    assert kinds[1][1] == "```python\nprint(17)\n```"
    chips = page.locator("#detail a.chip")
    assert chips.count() == 4
    chips.nth(0).click()
    expect(page).to_have_url(re.compile("#r=run/train/1/1/0$"))
    expect(page.locator("#detail")).to_contain_text("wrong (different)")
    page.go_back()
    expect(page.locator("#detail")).to_contain_text("rollout 2 of group 1")


def test_a_link_to_a_rollout_that_is_not_there_says_so(visit, path):
    assert "run/train/9/9/9 is not among" in visit(path, "#r=run/train/9/9/9").inner_text("#detail")


def test_j_and_k_go_through_the_list_but_not_while_typing(visit, path):
    page = visit(path, "#rollouts")
    for key, expected in (("j", 0), ("j", 1), ("k", 0), ("k", 0)):
        page.keyboard.press(key)
        assert f"rollout {expected} of group 0" in page.inner_text("#detail")
    page.keyboard.press("/")
    page.keyboard.type("needle jjj")
    assert page.input_value("[name=search]") == "needle jjj"
    assert "rollout 0 of group 0" in page.inner_text("#detail")


def test_a_search_is_marked_in_the_text(visit, path):
    page = visit(path, "#r=run/eval/3/0/0")
    choose(page, search="NEEDLE")
    assert page.evaluate("CSS.highlights.get('found').size") == 1


def test_hostile_text_is_shown_and_does_nothing(visit, path):
    page = visit(path, "#r=run/train/3/7/0")
    assert HOSTILE in page.inner_text("#detail")
    page.wait_for_timeout(200)
    assert page.evaluate("window.hacked") is None
    assert page.locator("#rollouts-tab img, #rollouts-tab script").count() == 0


def test_curves_are_drawn_and_the_papers_can_be_switched_off(visit, path):
    page = visit(path)
    expect(page.locator("#panels")).to_contain_text("paper, 1.5B, C = 1")
    page.uncheck("#paper")
    expect(page.locator("#panels")).not_to_contain_text("paper, 1.5B")
    assert "Not logged: " in page.inner_text("#missing")


def test_examples_of_a_behaviour_open_in_the_browser(visit, path):
    page = visit(path, "#behaviours")
    page.locator("#labels tr", has_text="right without code").locator("a.chip").first.click()
    page.wait_for_selector("#detail h2")
    assert page.inner_text("#detail .chips >> nth=0") == "right without code"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_follows_the_theme_and_can_be_switched(visit, path, scheme):
    page = visit(path, "#r=run/train/1/0/0", scheme=scheme)

    def looks():
        style = "node => [getComputedStyle(node).backgroundColor, getComputedStyle(node).color].join()"
        return [page.locator(place).first.evaluate(style) for place in ("body", "#detail .code", "#detail .inserted")]

    before = looks()
    assert len(set(before)) == 3
    assert before[0].startswith("rgb(255, 255, 255)") == (scheme == "light")
    page.click("#theme")
    assert all(old != new for old, new in zip(before, looks(), strict=True))


@pytest.mark.parametrize("tab", TABS)
def test_a_phone_needs_no_horizontal_scrolling(visit, path, tab):
    page = visit(path, f"#{tab}", viewport=NARROW)
    page.locator(f"#{tab}-tab details").evaluate_all("all => all.forEach(node => (node.open = true))")
    assert page.evaluate("document.documentElement.scrollWidth") == 390


def test_a_phone_shows_the_list_or_the_rollout(visit, path):
    page = visit(path, "#rollouts", viewport=NARROW)
    page.locator(".row").first.click()
    page.wait_for_selector("#list", state="hidden")
    assert page.locator("#detail .text").first.is_visible()
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    page.click("text=← list")
    page.wait_for_selector("#list", state="visible")


def test_twenty_thousand_rollouts_are_made_shown_and_filtered_in_time(visit, tmp_path):
    random_numbers = random.Random(1)
    sentences = [
        " ".join(random_numbers.choice(("so", "the", "sum", "of", "we", "x", "=", "is", "prime")) for _ in range(12))
        + f" {random_numbers.randint(0, 10**6)}."
        for _ in range(2000)
    ]
    rows = [
        rollout(step, group, index, correct=index % 2 > 0, prose=" ".join(random_numbers.choices(sentences, k=12)))
        for step in range(10, 510, 10)
        for group in range(25)
        for index in range(16)
    ]
    run = write_run(tmp_path, rows, LINES)
    begin = time.monotonic()
    path = build_page([run])
    seconds = time.monotonic() - begin
    page = visit(path, "#rollouts")
    assert matches(page) == 20_000
    assert page.locator(".row").count() < 60
    slowest = page.evaluate(
        """() => Math.max(...["prime", "nowhere to be found", "so the sum", ""].map((query) => {
            const field = document.querySelector("[name=search]");
            const begin = performance.now();
            field.value = query;
            field.dispatchEvent(new Event("input", { bubbles: true }));
            document.querySelector("#list").getBoundingClientRect();
            return performance.now() - begin;
        }))"""
    )
    size = path.stat().st_size
    print(f"\n20,000 rollouts: made in {seconds:.1f} s, {size / 1e6:.1f} MB, slowest filter {slowest:.0f} ms")  # noqa: T201
    assert (seconds < 60, size < 15_000_000, slowest < 300) == (True, True, True)
