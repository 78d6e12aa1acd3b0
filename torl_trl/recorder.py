"""What a run writes down of its rollouts: metrics added up over ranks and steps, and a parquet file for each step."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object

from torl_trl.config import ToRLConfig
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
        inputs: Sequence[dict[str, Any]],
        *,
        limit: int | None,
        group_size: int,
        advantages: torch.Tensor,
        rewards: torch.Tensor,
        reward_weights: torch.Tensor,
        reward_names: Sequence[str],
        extra: Mapping[str, Ratio],
    ) -> dict[str, Ratio]:
        """Add up the metrics of a generation batch over ranks (a collective call) and keep its rows.

        `inputs` are this rank's dataset rows with their `rollouts`, `advantages` (rows of this rank), `rewards` (rows
        of all ranks, reward functions; NaN is None). Rollouts from place `limit` of an evaluation on are repeats with
        which accelerate fills its last batch. Returns this batch's metrics over all ranks.
        """
        count, rank = len(inputs), self._accelerator.process_index
        first = self.first_place(mode, step, count)
        self._completions += self._accelerator.num_processes * count
        if limit is not None:
            inputs = inputs[: max(0, limit - first)]
        rollouts: list[Rollout] = [row["rollouts"] for row in inputs]
        local = rewards[rank * count : rank * count + len(inputs)]
        unscorable = local.isnan().all(dim=1)
        totals = (local * reward_weights.to(local.device)).nansum(dim=1).masked_fill(unscorable, torch.nan)
        executing = sum(call.result.seconds for rollout in rollouts for call in rollout.calls if call.result)
        reward = Ratio(totals.nansum().item(), int((~unscorable).sum()))
        ratios = self._over_ranks(
            rollout_metrics(rollouts)
            | {"reward": reward, "time/executing": Ratio(executing, 1)}
            | self._benchmark_averages(inputs, group_size)
            | dict(extra)
        )
        for name, ratio in ratios.items():
            self.add(mode, name, ratio)
        rows = [
            rollout_row(
                rollout,
                full=mode == "eval" or self._is_full(step),
                step=step,
                epoch=epoch,
                split=mode,
                problem_id=row["problem_id"],
                group_id=(first + position) // group_size,
                generation_index=(first + position) % group_size,
                rank=rank,
                prompt=row["prompt"],
                solution=row["solution"],
                reward=totals[position].item(),
                rewards=dict(zip(reward_names, local[position].tolist(), strict=True)),
                advantage=advantages[position].item(),
                engine=self._engine,
                seed=self._args.seed,
            )
            for position, (row, rollout) in enumerate(zip(inputs, rollouts, strict=True))
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
        steps_per_batch = args.steps_per_generation * args.num_iterations // args.gradient_accumulation_steps
        return step == 1 or step % args.save_rollouts_every < max(1, steps_per_batch)

    def _benchmark_averages(self, inputs: Sequence[dict[str, Any]], group_size: int) -> dict[str, Ratio]:
        """`<benchmark>/avg@k`, the same names on all ranks; a rollout whose interpreter failed counts nowhere."""
        averages = {f"{name}/avg@{group_size}": Ratio() for name in self._benchmarks}
        for row in inputs:
            if (verdict := row["rollouts"].verdict) is not None and row.get("benchmark"):
                averages[f"{row['benchmark']}/avg@{group_size}"] += Ratio(verdict.correct, 1)
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
