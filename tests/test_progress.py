"""The counts of a rollout phase and the bar that shows them."""

import io
import sys

import pytest

from torl_trl import progress
from torl_trl.metrics import metric_values, stats_metrics
from torl_trl.progress import ProgressBar, RolloutStats

STATS = RolloutStats(
    rollouts=8,
    done=2,
    generating=5,
    executing=1,
    sampled_tokens=4000,
    recomputed_tokens=16,
    seconds=10.0,
    generating_seconds=9.0,
    waiting_seconds=0.5,
    rollout_seconds=50.0,
    tool_seconds=5.0,
)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_sees_what_rollouts_do(monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_UPDATES", 0.0)
    with ProgressBar(8, description="train step 3") as bar:
        bar.update(STATS)
        shown = sys.stderr.getvalue()
    assert "train step 3" in shown and "2/8" in shown and "5 generating, 1 executing" in shown and "tokens/s" in shown


def test_the_bar_is_drawn_twice_a_second_at_most(monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    with ProgressBar(8) as bar:
        for _ in range(1000):
            bar.update(STATS)
        assert sys.stderr.getvalue().count("generating") == 0


@pytest.mark.parametrize(("terminal", "disable"), [(io.StringIO, False), (Terminal, True)])
def test_a_log_file_and_other_ranks_see_nothing(terminal, disable, monkeypatch):
    monkeypatch.setattr(sys, "stderr", terminal())
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_UPDATES", 0.0)
    with ProgressBar(8, disable=disable) as bar:
        bar.update(STATS)
    assert sys.stderr.getvalue() == ""


def test_shares_and_speeds_add_up_over_ranks():
    other = RolloutStats(rollouts=8, sampled_tokens=1000, seconds=10.0, generating_seconds=5.0, rollout_seconds=50.0)
    sums = {name: ratio + stats_metrics(other)[name] for name, ratio in stats_metrics(STATS).items()}
    assert metric_values(sums) == pytest.approx(
        {
            "time/generating": 7.0,
            "time/waiting": 0.25,
            "rollout/tokens_per_second": 250.0,
            "rollout/engine_idle_share": 0.3,
            "rollout/tool_wait_share": 0.05,
            "rollout/prefill_recomputed_tokens": 1.0,
            "rollout/resampled": 0.0,
        }
    )
