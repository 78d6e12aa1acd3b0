"""The Colab notebook: as it is committed, and run from the top on the tiny recipe."""

import ast
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient
from nbformat import NotebookNode
from stand_in_hub import TOKEN, HubStandIn

from torl_trl.rollout import Rollout, Segment

ROOT = Path(__file__).parents[1]
NOTEBOOK = ROOT / "notebooks" / "torl_1.5b_colab.ipynb"
TINY = ROOT / "recipes" / "tiny"
STEPS = 10
"""As many as from one save to the next."""
HUB_REPO = "tester/notebook"


@pytest.fixture
def notebook() -> NotebookNode:
    return nbformat.read(NOTEBOOK, as_version=nbformat.NO_CONVERT)


def code_cells(notebook: NotebookNode) -> list[NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def cell(notebook: NotebookNode, name: str) -> NotebookNode:
    """The cell whose id is `name`."""
    return next(cell for cell in notebook.cells if cell.id == name)


def test_the_notebook_is_valid_and_normal(notebook):
    nbformat.validate(notebook)
    assert NOTEBOOK.read_text(encoding="utf-8") == nbformat.writes(notebook) + "\n"
    assert set(notebook.metadata) == {"accelerator", "colab", "kernelspec", "language_info"}
    assert [cell.metadata for cell in notebook.cells if cell.metadata] == [{"tags": ["parameters"]}]


def test_the_notebook_is_committed_without_outputs(notebook):
    assert all(cell.outputs == [] and cell.execution_count is None for cell in code_cells(notebook))


def test_code_cells_are_short_plain_python(notebook):
    for code in code_cells(notebook):
        ast.parse(code.source)
        assert len(code.source.splitlines()) < 25, code.id


def test_the_notebook_is_in_style():
    for command in (["check", "--ignore", "T20"], ["format", "--check"]):
        done = subprocess.run([sys.executable, "-m", "ruff", *command, NOTEBOOK], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout


# --- Its own functions -----------------------------------------------------------------------------------------------


def defined_in(notebook: NotebookNode, *names: str) -> dict[str, Any]:
    """What the cells of these ids define, each run alone."""
    defined: dict[str, Any] = {}
    for name in names:
        exec(cell(notebook, name).source, defined)
    return defined


def test_a_rollout_is_shown_in_its_colours_and_its_text_is_no_html(notebook):
    defined = defined_in(notebook, "show", "show-rollout")
    segments = [
        Segment(0, 3, False, "First.\n```python\nprint('<b>')\n```\n```output"),
        Segment(3, 5, True, "\n<b>\n```\n"),
        Segment(5, 6, False, "So \\boxed{<script>}"),
    ]
    rollout = Rollout(0, [], env_mask=[1, 1, 1, 0, 0, 1], segments=segments, stop_reason="eos")
    html = defined["show"](rollout).data
    shown = html.partition("<pre")[2]
    assert "4 tokens trained, 2 inserted and masked" in html
    assert "<b>" not in html and "<script>" not in html
    for kind, text in (
        ("trained", "First.\n"),
        ("trained code", "```python\nprint(&#x27;&lt;b&gt;&#x27;)\n```"),
        ("trained", "\n```output"),
        ("inserted", "\n&lt;b&gt;\n```\n"),
        ("trained", "So \\boxed{&lt;script&gt;}"),
    ):
        assert f'<span style="background: {defined["COLORS"][kind]}">{text}</span>' in shown
    assert "".join(text for _, text in defined["pieces"](rollout)) == rollout.completion


@pytest.fixture
def secret(notebook):
    """The notebook's function for keys and tokens."""
    source = ast.parse(cell(notebook, "interpreter").source)
    source.body = [node for node in source.body if isinstance(node, ast.FunctionDef) and node.name == "secret"]
    defined = {"os": os, "sys": sys}
    exec(compile(source, "interpreter", "exec"), defined)
    return defined["secret"]


def test_a_secret_is_a_variable_or_one_of_colabs(secret, monkeypatch):
    monkeypatch.setenv("KEY", "from the environment")
    monkeypatch.delenv("OTHER", raising=False)
    assert (secret("KEY"), secret("OTHER")) == ("from the environment", None)

    def get(name: str) -> str:
        if name == "OTHER":
            return "from Colab"
        raise colab.userdata.SecretNotFoundError

    colab = ModuleType("google.colab")
    errors = {name: type(name, (Exception,), {}) for name in ("SecretNotFoundError", "NotebookAccessError")}
    colab.userdata = SimpleNamespace(get=get, **errors)
    monkeypatch.setitem(sys.modules, "google.colab", colab)
    assert [secret(name) for name in ("KEY", "OTHER", "THIRD")] == ["from the environment", "from Colab", None]


# --- The whole of it -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("notebook")


@pytest.fixture(scope="module")
def hub() -> Iterator[HubStandIn]:
    with HubStandIn() as hub:
        yield hub


@pytest.fixture(scope="module")
def executed(run_folder, hub) -> NotebookNode:
    """The notebook after a run on the CPU: the tiny model's parameters stand in a cell after its own, as papermill
    puts them, and nothing else is changed."""
    notebook = nbformat.read(NOTEBOOK, as_version=nbformat.NO_CONVERT)
    given = {
        "model_name": str(TINY / "base"),
        "train_data": str(TINY / "train.jsonl"),
        "eval_data": f"tiny={TINY / 'eval.jsonl'}",
        "steps": STEPS,
        "learning_rate": 2e-3,
        "output_dir": str(run_folder / "run"),
        "hub_repo": HUB_REPO,
    }
    place = next(number for number, cell in enumerate(notebook.cells) if "parameters" in cell.metadata.get("tags", ()))
    source = "\n".join(f"{name} = {value!r}" for name, value in given.items())
    notebook.cells.insert(place + 1, nbformat.v4.new_code_cell(source))
    client = NotebookClient(
        notebook, timeout=600, kernel_name="python3", resources={"metadata": {"path": str(run_folder)}}
    )
    started = time.monotonic()
    client.execute(env=environment() | hub.environment)
    notebook.metadata["seconds"] = time.monotonic() - started
    return notebook


def environment() -> dict[str, str]:
    """Ours without a GPU and without the key that would take programs to E2B."""
    kept = {name: value for name, value in os.environ.items() if name != "E2B_API_KEY"}
    return kept | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}


def printed(notebook: NotebookNode, name: str) -> str:
    return "".join(output.text for output in cell(notebook, name).outputs if output.get("name") == "stdout")


def shown(notebook: NotebookNode, name: str, kind: str) -> str:
    """The last output of a cell, as `kind`."""
    return cell(notebook, name).outputs[-1].data[kind]


@pytest.mark.slow
def test_the_notebook_runs_from_the_top_in_under_ten_minutes(executed):
    assert executed.metadata["seconds"] < 600
    assert "on this machine" in printed(executed, "interpreter") and str(2**100) in printed(executed, "interpreter")
    assert f"{STEPS * 8} of 2000 problems" in printed(executed, "data")
    assert "←" in shown(executed, "gpu", "text/html")


@pytest.mark.slow
def test_the_executed_notebook_shows_rollouts_with_a_call(executed):
    for name in ("look", "chat"):
        html = shown(executed, name, "text/html")
        for kind in ("trained", "trained code", "inserted"):
            assert f"> {kind} <" in html
        assert "```python" in html and "```output" in html and "\\boxed{" in html
        assert " 0 inserted" not in html


@pytest.mark.slow
def test_the_executed_notebook_trains_and_draws_its_curves(executed, run_folder):
    lines = [line for line in printed(executed, "train").splitlines() if line.startswith("step ")]
    assert len(lines) == STEPS
    assert lines[0].startswith(f"step 1/{STEPS}   reward ") and " passed " in lines[0]
    assert shown(executed, "curves", "image/png")
    logged = [json.loads(line) for line in (run_folder / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in logged if line["split"] == "train"] == list(range(1, STEPS + 1))


@pytest.mark.slow
def test_the_executed_notebook_learns_and_compares(executed):
    assert "64 x 1" in printed(executed, "before")
    mean = next(line for line in printed(executed, "after").splitlines() if line.startswith("mean")).split()
    assert float(mean[2]) > float(mean[1])  # B, after training, and A


@pytest.mark.slow
def test_the_executed_notebook_saves_and_pushes_in_private_and_keeps_its_token(executed, run_folder, hub):
    repo = hub.repos[HUB_REPO]
    assert repo.private
    assert repo.messages[1:] == [f"Step {STEPS}", "End of training"]
    pushed = repo.files()
    for name in ("adapter_model.safetensors", "tokenizer.json", "evaluation.json", "config.yaml", "README.md"):
        assert pushed[name] == (run_folder / "run" / name).read_bytes()
    assert "library_name: peft" in pushed["README.md"].decode()
    assert "| tiny | 64 |" in pushed["README.md"].decode()
    assert f"pushed to {HUB_REPO}" in printed(executed, "save")
    assert TOKEN not in nbformat.writes(executed)
    assert all(TOKEN.encode() not in content for content in pushed.values())
