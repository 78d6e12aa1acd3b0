"""What a run writes down of its rollouts: metrics added up over ranks and steps, and a parquet file for each step."""

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object

from torl_trl.config import ToRLConfig
from torl_trl.filters import Sample, total_reward
from torl_trl.metrics import Ratio, metric_values, rollout_metrics
from torl_trl.records import rollout_row, rollouts_path, write_rollouts
from torl_trl.rollout import Rollout


class Recorder:
    """Takes the generation batches of training ("train") and evaluation ("eval"); every rank has one."""

    def __init__(self, args: ToRLConfig, accelerator: Accelerator, engine: str, benchmarks: Sequence[str] = ()):
        self._args = args
        self._benchmarks = benchmarks  # those that evaluation rows may name in their column `benchmark`
        self._accelerator = accelerator
        self._engine = engine
        self._sums: dict[str, dict[str, Ratio]] = {"train": {}, "eval": {}}
        self._rows: list[dict[str, Any]] = []  # of the step or evaluation in `_rows_of`, on the main process
        self._rows_of: tuple[str, int] | None = None
        self._completions = 0  # of it so far, on all ranks

    def first_place(self, mode: str, step: int, count: int) -> int:
        """Where this rank's next `count` rollouts stand among those of the step, over all ranks."""
        if self._rows_of != (mode, step):
            self._rows, self._rows_of, self._completions = [], (mode, step), 0
        return self._completions + self._accelerator.process_index * count

    def record(
        self,
        mode: str,
        step: int,
        epoch: float,
        samples: Sequence[Sample],
        left_out: Sequence[Sample] = (),
        *,
        limit: int | None,
        group_size: int,
        weights: Mapping[str, float],
        extra: Mapping[str, Ratio],
    ) -> dict[str, Ratio]:
        """Add up the metrics of a generation batch over ranks (a collective call) and keep its rows.

        `samples` are this rank's, as many as every rank has; `left_out` were sampled beyond them, and are measured
        and kept like them, for the filters chose by reward. `weights` are those of the reward functions, by name.
        Rollouts from place `limit` of an evaluation on are repeats with which accelerate fills its last batch.
        Returns this batch's metrics over all ranks.
        """
        rank = self._accelerator.process_index
        self.first_place(mode, step, len(samples))
        self._completions += self._accelerator.num_processes * len(samples)
        samples = [sample for sample in (*samples, *left_out) if limit is None or sample.place < limit]
        rollouts: list[Rollout] = [sample.rollout for sample in samples]
        totals = [total_reward(sample.scores, list(weights.values())) for sample in samples]
        scored = [total for total in totals if not math.isnan(total)]
        executing = sum(call.result.seconds for rollout in rollouts for call in rollout.calls if call.result)
        ratios = self._over_ranks(
            rollout_metrics(rollouts)
            | {"reward": Ratio(sum(scored), len(scored)), "time/executing": Ratio(executing, 1)}
            | _reward_means(samples, weights)
            | self._benchmark_averages(samples, group_size)
            | dict(extra)
        )
        for name, ratio in ratios.items():
            self.add(mode, name, ratio)
        rows = [
            rollout_row(
                sample.rollout,
                full=mode == "eval" or self._is_full(step),
                step=step,
                epoch=epoch,
                split=mode,
                problem_id=sample.row["problem_id"],
                group_id=sample.place // group_size,
                generation_index=sample.place % group_size,
                rank=rank,
                prompt=sample.row["prompt"],
                solution=sample.row["solution"],
                reward=total,
                rewards=dict(zip(weights, sample.scores, strict=True)),
                advantage=sample.advantage,
                dropped=None if sample.dropped is None else str(sample.dropped),
                engine=self._engine,
                seed=self._args.seed,
            )
            for sample, total in zip(samples, totals, strict=True)
        ]
        self._rows += gather_object(rows) if self._accelerator.num_processes > 1 else rows
        if mode == "train":  # an evaluation has many batches and is written once, when it is logged
            self._write_rows()
        return ratios

    def add(self, mode: str, name: str, ratio: Ratio) -> None:
        """Add to what `take_values` divides."""
        self._sums[mode][name] = self._sums[mode].get(name, Ratio()) + ratio

    def take_values(self, mode: str) -> dict[str, float]:
        """The metrics since the last call; closes the file of an evaluation."""
        values = metric_values(self._sums[mode])
        self._sums[mode].clear()
        if mode == "eval" and self._rows_of is not None:
            self._write_rows()
            self._rows_of = None  # another evaluation at this step starts anew
        return values

    def _is_full(self, step: int) -> bool:
        """Whether the step's texts are kept; a generation batch that serves several steps counts for each of them."""
        args = self._args
        steps_per_batch = args.generation_cycle // args.gradient_accumulation_steps
        return step == 1 or step % args.save_rollouts_every < max(1, steps_per_batch)

    def _benchmark_averages(self, samples: Sequence[Sample], group_size: int) -> dict[str, Ratio]:
        """`<benchmark>/avg@k`, the same names on all ranks; a rollout whose interpreter failed counts nowhere."""
        averages = {f"{name}/avg@{group_size}": Ratio() for name in self._benchmarks}
        for sample in samples:
            if (verdict := sample.rollout.verdict) is not None and sample.row.get("benchmark"):
                averages[f"{sample.row['benchmark']}/avg@{group_size}"] += Ratio(verdict.correct, 1)
        return averages

    def _over_ranks(self, ratios: dict[str, Ratio]) -> dict[str, Ratio]:
        if self._accelerator.num_processes == 1:
            return ratios
        pairs = [[ratio.numerator, ratio.denominator] for ratio in ratios.values()]
        pairs = torch.tensor(pairs, dtype=torch.float64, device=self._accelerator.device)
        pairs = self._accelerator.reduce(pairs, reduction="sum").tolist()
        return {name: Ratio(*pair) for name, pair in zip(ratios, pairs, strict=True)}

    def _write_rows(self) -> None:
        if self._accelerator.is_main_process:
            mode, step = self._rows_of
            write_rollouts(rollouts_path(Path(self._args.output_dir), step, mode), self._rows)


def _reward_means(samples: Sequence[Sample], names: Iterable[str]) -> dict[str, Ratio]:
    """`rewards/<function>/mean`, of the rollouts that have a reward from it."""
    means = {}
    for place, name in enumerate(names):
        known = [score for sample in samples if not math.isnan(score := sample.scores[place])]
        means[f"rewards/{name}/mean"] = Ratio(sum(known), len(known))
    return means
