"""How a tiny model writes and answers, per family of problems: the base before training, or a checkpoint.

    python benchmarks/tiny_base.py [--model recipes/tiny/base] [--samples 4] [--calls 2]

Samples every held-out problem at temperature 1, prints a table, and writes benchmarks/results/tiny_base.json (only for
the base itself).
"""

import argparse
import json
import sys
import time
from collections import defaultdict
from pathlib import Path

import torch
from machine import machine_facts
from transformers import AutoModelForCausalLM, AutoTokenizer

from torl_grading import Grader
from torl_trl.engines.base import Sampling
from torl_trl.engines.transformers import TransformersEngine
from torl_trl.interpreters import get_interpreter
from torl_trl.metrics import metric_values, rollout_metrics
from torl_trl.prompts import TORL_TEMPLATE, render_prompt
from torl_trl.rollout import Rollout, RolloutConfig, run_rollouts

ROOT = Path(__file__).parent.parent
TINY = ROOT / "recipes" / "tiny"
RESULTS = ROOT / "benchmarks" / "results" / "tiny_base.json"
MEASURED = (
    "accuracy",
    "tools/code_ratio",
    "tools/pass_ratio",
    "tools/executed_code_ratio",
    "tools/accuracy_with_code",
    "tools/accuracy_without_code",
    "tools/call_frequency",
)


def sample(model: Path, problems: list[dict[str, str]], calls: int, seed: int) -> list[Rollout]:
    """A graded rollout for each problem, in order."""
    torch.manual_seed(seed)
    tokenizer = AutoTokenizer.from_pretrained(model)
    weights = AutoModelForCausalLM.from_pretrained(model).eval()
    engine = TransformersEngine(weights, tokenizer, Sampling(), eos_token_ids=[tokenizer.eos_token_id])
    prompts = [tokenizer.encode(render_prompt(TORL_TEMPLATE, problem["problem"])) for problem in problems]
    config = RolloutConfig(max_tool_calls=calls, max_completion_length=192)
    with get_interpreter("embedded") as interpreter, Grader(num_workers=1) as grader:
        rollouts = run_rollouts(prompts, engine, interpreter, tokenizer, config)
        verdicts = [
            grader.submit(rollout.model_texts, problem["answer"])
            for rollout, problem in zip(rollouts, problems, strict=True)
        ]
        for rollout, verdict in zip(rollouts, verdicts, strict=True):
            rollout.verdict = verdict.result()
    return rollouts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=TINY / "base")
    parser.add_argument("--samples", type=int, default=4, help="rollouts of each problem")
    parser.add_argument("--calls", type=int, default=2, help="tool calls per rollout")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--examples", type=int, default=0, help="print so many rollouts")
    options = parser.parse_args()

    lines = (TINY / "eval.jsonl").read_text(encoding="utf-8").splitlines()
    problems = [json.loads(line) for line in lines] * options.samples
    started = time.perf_counter()
    rollouts = sample(options.model, problems, options.calls, options.seed)
    seconds = time.perf_counter() - started

    groups: dict[str, list[Rollout]] = defaultdict(list)
    for rollout, problem in zip(rollouts, problems, strict=True):
        groups[problem["family"]].append(rollout)
    results: dict[str, float | str] = {"rollouts": len(rollouts), "seconds": seconds}
    sys.stdout.write(f"{'family':12}" + "".join(f"{name.removeprefix('tools/'):>24}" for name in MEASURED) + "\n")
    for family, members in [*sorted(groups.items()), ("all", rollouts)]:
        values = metric_values(rollout_metrics(members))
        results |= {f"{family}/{name}": values[name] for name in MEASURED if name in values}
        cells = "".join(f"{values.get(name, float('nan')):24.2f}" for name in MEASURED)
        sys.stdout.write(f"{family:12}{cells}\n")
    for rollout, problem in list(zip(rollouts, problems, strict=True))[: options.examples]:
        sys.stdout.write(f"\n--- {problem['problem']} ({problem['answer']}) {rollout.verdict}\n{rollout.completion}\n")
    if options.model.resolve() == (TINY / "base").resolve():
        RESULTS.parent.mkdir(exist_ok=True)
        RESULTS.write_text(json.dumps(machine_facts() | results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
