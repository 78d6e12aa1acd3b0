"""Small made-up run folders for the tests of the report page."""

import json

from torl_trl.records import SCHEMA, rollouts_path, write_rollouts

HOSTILE = "</script><script>window.hacked = 1</script><img src=x onerror='window.hacked = 1'>"


def rollout(
    step=1,
    group=0,
    index=0,
    *,
    split="train",
    correct=True,
    status="ok",
    prose="I compute.",
    code="print(17)",
    **facts,
):
    """A full row with one call, or none where `code` is None; `facts` replace columns."""
    pieces = [(False, f"{prose} \\boxed{{17}}")]
    calls = []
    if code is not None:
        observation = "17" if status == "ok" else "NameError"
        call = {"code": code, "observation": observation, "status": status, "seconds": 0.25, "queue_seconds": 0.5}
        calls.append(call | {"failures": 0})
        asked = f"{prose}\n```python\n{code}\n```\n```output"
        pieces = [(False, asked), (True, f"\n{observation}\n```\n"), (False, "So \\boxed{17}.")]
    columns = {
        "step": step,
        "epoch": 0.5,
        "split": split,
        "problem_id": f"problem-{group}",
        "group_id": group,
        "generation_index": index,
        "rank": 0,
        "full": True,
        "prompt": f"User: question {group}?\nAssistant:\n",
        "solution": "17",
        "completion": "".join(text for _, text in pieces),
        "prompt_ids": [1],
        "completion_ids": [1] * len(pieces),
        "env_mask": [0 if inserted else 1 for inserted, _ in pieces],
        "segments": [{"inserted": inserted, "tokens": 1, "chars": len(text)} for inserted, text in pieces],
        "calls": calls,
        "reward": 1.0 if correct else -1.0,
        "rewards": {"accuracy_reward": 1.0 if correct else -1.0},
        "correct": correct,
        "reason": "equal" if correct else "different",
        "extracted": "17",
        "advantage": 0.5,
        "dropped": None,
        "stop_reason": "eos",
        "sentinels": [],
        "engine": "scripted",
        "seed": 1,
    }
    row = columns | facts
    assert list(row) == SCHEMA.names
    return row


def write_run(folder, rows=(), metrics=()):
    """A training run's folder, a file for each step and split of `rows`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in metrics))
    for step, split in {(row["step"], row["split"]) for row in rows}:
        of_step = [row for row in rows if (row["step"], row["split"]) == (step, split)]
        write_rollouts(rollouts_path(folder, step, split), of_step)
    return folder
