"""ToRL (tool-integrated reinforcement learning, arXiv 2503.23383) on TRL.

Names are imported when they are first used, so that `import torl_trl` and the modules without torch stay light.
"""

from importlib import import_module
from typing import Any

_HOMES = {
    "AccuracyReward": "torl_trl.rewards",
    "ExecutabilityPenalty": "torl_trl.rewards",
    "OverlongPenalty": "torl_trl.rewards",
    "Rollout": "torl_trl.rollout",
    "RolloutConfig": "torl_trl.rollout",
    "ToRLConfig": "torl_trl.config",
    "ToRLScriptArguments": "torl_trl.script_arguments",
    "ToRLTrainer": "torl_trl.trainer",
    "get_interpreter": "torl_trl.interpreters",
    "grade": "torl_trl.grading",
    "run_rollouts": "torl_trl.rollout",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
