"""recipes/report.py: the page of a run, and its saved rollouts graded or executed again."""

import json
import sys

import pytest
import report
from report_runs import rollout

from torl_trl.errors import UserError
from torl_trl.records import rollouts_path, write_rollouts


@pytest.fixture
def folder(tmp_path):
    """A run of four rollouts whose programs print 17, but for one that was recorded with another result."""
    rows = [rollout(index=index) for index in range(3)]
    rows.append(rollout(index=3, code="print(18)"))
    write_rollouts(rollouts_path(tmp_path, 1, "train"), rows)
    (tmp_path / "config.yaml").write_text("interpreter: embedded\nmax_observation_chars: 256\n")
    return tmp_path


def run(monkeypatch, *words):
    monkeypatch.setattr(sys, "argv", ["report.py", *map(str, words)])
    report.main()


def test_a_run_gets_its_page(folder, monkeypatch):
    run(monkeypatch, folder)
    assert (folder / "report.html").stat().st_size > 1_000_000


def test_rollouts_are_graded_and_executed_again_as_the_run_was_configured(folder, monkeypatch):
    run(monkeypatch, folder, "--regrade", "--reexecute")
    regraded, executed = (json.loads((folder / f"{name}.json").read_text()) for name in ("regrade", "reexecute"))
    assert regraded["checked"] == 4 and regraded["differences"] == [] and regraded["grade_text"] == "own"
    (difference,) = executed["differences"]
    assert (difference["generation_index"], difference["observation_after"]) == (3, "18")
    assert not (folder / "report.html").exists()


def test_what_is_no_run_is_refused_in_a_sentence(tmp_path):
    with pytest.raises(UserError, match="is no folder"):
        report.parse_arguments([str(tmp_path / "nowhere")])
    with pytest.raises(UserError, match="take one RUN_FOLDER"):
        report.parse_arguments([str(tmp_path), str(tmp_path), "--regrade"])
    with pytest.raises(UserError, match=r"no config.yaml and no settings.json"):
        report.run_settings(tmp_path)
