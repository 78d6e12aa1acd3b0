"""Evaluation: every problem of the benchmarks sampled by `run_rollouts`, graded, and added up.

    protocol = Protocol(samples=8, temperature=0.6)
    items = make_items(problems, prompt_ids, protocol, context=4096)
    with Parts(folder / "parts", rank) as parts:
        run_items(items, parts, protocol, engine, interpreter, tokenizer, grader, rank=rank, world_size=world_size)
    result = summarize(...)

Each rollout has a seed of its own, from the protocol's seed, the problem's text and the number of the sample. So the
result does not depend on the order of problems, on the number of processes, or on a restart: exactly so where an
engine's tokens do not depend on what else runs (vLLM in float32, transformers by fixed batches), nearly elsewhere.
"""

import hashlib
import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

from torl_eval.parts import Key, Parts
from torl_grading import Grader, Verdict
from torl_interpreters.base import Interpreter
from torl_trl.engines.base import Engine, Sampling, Tokenizer
from torl_trl.errors import UserError
from torl_trl.metrics import rollout_metrics
from torl_trl.progress import ProgressBar, RolloutStats
from torl_trl.records import rollout_row
from torl_trl.rollout import Rollout, RolloutConfig, run_rollouts

logger = logging.getLogger(__name__)

TIMED_METRICS = ("tools/seconds_mean", "tools/queue_seconds_mean")
"""They differ from run to run, and are left out of a result."""

MOST_FAILURES, MOST_FAILURES_SHARE = 20, 0.2
"""More rollouts than both, whose interpreter failed, end an evaluation early."""


@dataclass(frozen=True, slots=True)
class Protocol:
    """How to sample. The defaults are the paper's (section 3.1: greedy, one sample, C = 1), tokens as in its code."""

    samples: int = 1
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    rollout: RolloutConfig = field(default_factory=RolloutConfig)

    @property
    def sampling(self) -> Sampling:
        return Sampling(temperature=self.temperature, top_p=self.top_p)


@dataclass(frozen=True, slots=True)
class Item:
    """One sample of one problem. `max_tokens` is the completion's budget."""

    benchmark: str
    problem_id: str
    sample: int
    prompt_ids: list[int]
    solution: str
    seed: int
    max_tokens: int

    @property
    def key(self) -> Key:
        return (self.benchmark, self.problem_id, self.sample)


def sample_seed(seed: int, problem_id: str, sample: int) -> int:
    """A seed of 63 bits that is the same on every machine."""
    digest = hashlib.sha256(f"{seed} {problem_id} {sample}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def make_items(
    problems: Mapping[str, Sequence[Mapping[str, str]]],
    prompt_ids: Callable[[Sequence[str]], list[list[int]]],
    protocol: Protocol,
    *,
    context: int,
) -> list[Item]:
    """One item per sample of each problem (`problem`, `problem_id`, `solution`), by benchmark, in order.

    `prompt_ids` renders and tokenizes questions. Where a prompt leaves less of the model's `context` than the
    protocol's budget, the budget is what is left; a line says how often. Raises `UserError` if nothing is left.
    """
    items, shortened = [], 0
    limit = protocol.rollout.max_completion_length
    for benchmark, rows in problems.items():
        for row, ids in zip(rows, prompt_ids([row["problem"] for row in rows]), strict=True):
            budget = min(limit, context - len(ids))
            if budget < 1:
                raise UserError(
                    f"Problem {row['problem_id']} of {benchmark} has a prompt of {len(ids)} tokens and the model's "
                    f"context is {context}: take another model, or a file without this problem."
                )
            shortened += budget < limit
            items += [
                Item(
                    benchmark=benchmark,
                    problem_id=row["problem_id"],
                    sample=sample,
                    prompt_ids=ids,
                    solution=row["solution"],
                    seed=sample_seed(protocol.seed, row["problem_id"], sample),
                    max_tokens=budget,
                )
                for sample in range(protocol.samples)
            ]
    if shortened:
        logger.warning(
            "%d problems leave less than max_completion_length %d of the model's context of %d tokens: they get what "
            "is left.",
            *(shortened, limit, context),
        )
    return items


def run_items(
    items: Sequence[Item],
    parts: Parts,
    protocol: Protocol,
    engine: Engine,
    interpreter: Interpreter | None,
    tokenizer: Tokenizer,
    grader: Grader,
    *,
    rank: int = 0,
    world_size: int = 1,
    batch_size: int = 64,
    engine_name: str = "",
) -> None:
    """Sample and grade this process's share of what `parts` has not yet, and write each rollout as it is graded.

    A continuous engine gets all of the share at once. One in rounds gets batches of `batch_size`, which are cut from
    the whole list, so that a rollout has the same neighbours in every run. A rollout whose interpreter failed is not
    written: `UserError` says so at the end, or early when they are many, and the next run samples it again.
    """
    parts.read()
    batches = list(_batches(items, parts.rows, engine.mode, rank, world_size, batch_size))
    work = _Work(parts, protocol, engine, interpreter, tokenizer, grader, rank, engine_name)
    with ProgressBar(sum(map(len, batches)), description="evaluation", disable=rank != 0) as bar:
        for batch in batches:
            work.run(batch, bar)
    if work.failed:
        raise UserError(work.failure())


def _batches(
    items: Sequence[Item], done: Mapping[Key, Any], mode: str, rank: int, world_size: int, batch_size: int
) -> Iterator[list[Item]]:
    """This process's batches; all items of one have one budget, which is a limit of `run_rollouts` as a whole."""
    by_budget = sorted(items, key=lambda item: -item.max_tokens)
    for _, group in groupby(by_budget, key=lambda item: item.max_tokens):
        group = list(group)
        if mode == "continuous":
            batch = [item for item in group[rank::world_size] if item.key not in done]
            if batch:
                yield batch
            continue
        cuts = [group[start : start + batch_size] for start in range(0, len(group), batch_size)]
        yield from (batch for batch in cuts[rank::world_size] if any(item.key not in done for item in batch))


@dataclass(slots=True)
class _Work:
    """What one process does in `run_items`."""

    parts: Parts
    protocol: Protocol
    engine: Engine
    interpreter: Interpreter | None
    tokenizer: Tokenizer
    grader: Grader
    rank: int
    engine_name: str
    stats: RolloutStats = field(default_factory=RolloutStats)
    failed: int = 0
    grading: deque[tuple[Item, Rollout, Future[Verdict]]] = field(default_factory=deque)

    def run(self, batch: Sequence[Item], bar: ProgressBar) -> None:
        def grade(rollout: Rollout) -> None:
            self.start_grading(batch[rollout.index], rollout)

        run_rollouts(
            [item.prompt_ids for item in batch],
            self.engine,
            self.interpreter,
            self.tokenizer,
            replace(self.protocol.rollout, max_completion_length=batch[0].max_tokens),
            seed=[item.seed for item in batch],
            on_finished=grade,
            on_progress=bar.update,
            stats=self.stats,
        )
        while self.grading:
            self.write_first()

    def start_grading(self, item: Item, rollout: Rollout) -> None:
        if rollout.interpreter_failed:
            self.failed += 1
            if self.failed > max(MOST_FAILURES, MOST_FAILURES_SHARE * self.stats.done):
                raise UserError(self.failure())
            return
        self.grading.append((item, rollout, self.grader.submit(rollout.model_texts, item.solution)))
        while self.grading and self.grading[0][2].done():
            self.write_first()

    def write_first(self) -> None:
        item, rollout, future = self.grading.popleft()
        rollout.verdict = future.result()
        row = rollout_row(
            rollout,
            full=True,
            prompt=self.tokenizer.decode(
                item.prompt_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
            ),
            reward=rollout.verdict.score,
            rewards={"accuracy": rollout.verdict.score},
            advantage=None,
            split="eval",
            step=0,
            problem_id=item.problem_id,
            solution=item.solution,
            generation_index=item.sample,
            rank=self.rank,
            engine=self.engine_name,
            seed=item.seed,
        )
        measured = {
            name: [ratio.numerator, ratio.denominator]
            for name, ratio in rollout_metrics([rollout]).items()
            if ratio.denominator and name not in TIMED_METRICS
        }
        self.parts.add(item.key, row | {"measured": measured})

    def failure(self) -> str:
        return (
            f"The interpreter failed in {self.failed} of {self.stats.done} rollouts, which have no result: mend it "
            "(the log says why it failed) and give the same command again, which samples only what is missing."
        )
