"""Which checkpoints of a run are whole.

A run that is killed while it saves leaves a half-written folder. transformers writes trainer_state.json last, on the
main process, and `ToRLTrainer` lets it wait until all ranks have written theirs; so where that file can be read, all
others are there. Older checkpoints are deleted only after that.
"""

import json
import re
from pathlib import Path

_NAME = re.compile(r"checkpoint-(\d+)")


def is_whole(checkpoint: Path) -> bool:
    """Whether a run can go on from this folder: saved to its end, and with the states that a resume needs."""
    name = _NAME.fullmatch(checkpoint.name)
    try:
        state = json.loads((checkpoint / "trainer_state.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    # without the states of random numbers it was saved with save_only_model
    return (name is None or state["global_step"] == int(name[1])) and any(checkpoint.glob("rng_state*.pth"))


def last_whole_checkpoint(output_dir: Path) -> Path | None:
    """The whole checkpoint-N of the largest N, or None."""
    steps = {int(name[1]): path for path in output_dir.glob("checkpoint-*") if (name := _NAME.fullmatch(path.name))}
    return next((path for _, path in sorted(steps.items(), reverse=True) if is_whole(path)), None)
