"""ToRLTrainer: TRL's GRPOTrainer with rollouts that use an interpreter.

The seam is TRL's `rollout_func` plus a thin wrapper that sees the dataset columns going in and the advantages coming
out. Everything about a rollout lies in `torl_trl.rollout`; everything about the loss lies in TRL.
"""

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from datasets import Dataset
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback
from trl import GRPOTrainer
from trl.models import unwrap_model_for_generation

from torl_trl.config import ToRLConfig
from torl_trl.engines.base import Sampling
from torl_trl.engines.transformers import TransformersEngine
from torl_trl.errors import UserError
from torl_trl.generation_copy import GenerationCopy
from torl_trl.interpreters.base import Interpreter
from torl_trl.metrics import Ratio, metric_values, rollout_metrics
from torl_trl.padding import score_completions_only, without_padding
from torl_trl.progress import RolloutStats
from torl_trl.records import rollout_row, rollouts_path, write_rollouts
from torl_trl.rewards import AccuracyReward
from torl_trl.rollout import Rollout, run_rollouts
from torl_trl.sampler import EpochSampler

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")  # rollout_func may change in TRL; our TRL is pinned

HALF_PRECISION_MIN_LR = 1e-5
"""Pure half-precision AdamW at lr 1e-6 leaves 98 % of the weights where they were (measured)."""


class ToRLTrainer(GRPOTrainer):
    """GRPO with tool-integrated rollouts.

    Args:
        model: a model folder, a Hub id, or a model.
        reward_funcs: reward functions in TRL's signature; they get the records as the keyword `rollouts`.
        interpreter: runs the model's code; None only with `max_tool_calls: 0`. The caller closes it.
        args: the run's configuration.
        train_dataset, eval_dataset: columns `prompt` (text), `solution`, `problem_id`, as `torl_trl.data` makes them.

    Raises `UserError` for settings that cannot work.
    """

    args: ToRLConfig

    def __init__(
        self,
        model: str | PreTrainedModel,
        reward_funcs: Sequence[Callable[..., list[float | None]]],
        interpreter: Interpreter | None,
        args: ToRLConfig,
        train_dataset: Dataset | None = None,
        eval_dataset: Dataset | None = None,
        processing_class: PreTrainedTokenizerBase | None = None,
        callbacks: list[TrainerCallback] | None = None,
        peft_config: Any = None,
    ):
        self._interpreter = interpreter
        self._inputs: list[dict[str, Any]] = []
        self._rewards: torch.Tensor | None = None  # (completions of all ranks, reward functions)
        self._ratios: dict[str, dict[str, Ratio]] = {"train": {}, "eval": {}}
        self._stats = RolloutStats()
        self._grading_seconds = 0.0
        self._scoring_seconds = 0.0
        self._training_seconds = Ratio()
        self._rows: list[dict[str, Any]] = []  # of the step or evaluation in `_rows_of`, on the main process
        self._rows_of: tuple[str, int] | None = None
        self._completions = 0  # of the step or evaluation so far, on all ranks
        super().__init__(
            model=model,
            reward_funcs=list(reward_funcs),
            args=args,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            callbacks=callbacks,
            peft_config=peft_config,
            rollout_func=_rollout_func,
        )
        self._accuracy_rewards = [function for function in self.reward_funcs if isinstance(function, AccuracyReward)]
        self._check_setup()
        if self.accelerator.device.type == "cpu":
            score_completions_only()
        self._generation_copy = self._make_generation_copy(args.generation_dtype) if args.generation_dtype else None
        self._engine = TransformersEngine(
            self.accelerator.unwrap_model(self.model),
            self.processing_class,
            self._sampling("train"),
            eos_token_ids=list(self.eos_token_ids),
        )

    # --- rollouts -----------------------------------------------------------------------------------------------

    def rollout(self, prompts: list[str]) -> dict[str, list]:
        """Sample this rank's prompts, already repeated `num_generations` times; TRL's `rollout_func` contract."""
        inputs, stats, sampling = self._inputs, RolloutStats(), self._sampling(self._mode)
        prompt_ids = self.processing_class(text=prompts)["input_ids"]

        def start_grading(rollout: Rollout) -> None:
            for function in self._accuracy_rewards:
                function.start(rollout, inputs[rollout.index]["solution"])

        with self._generating_model() as model:
            self._engine.model = model
            self._engine.sampling = sampling
            rollouts = run_rollouts(
                prompt_ids,
                self._engine,
                self._interpreter,
                self.processing_class,
                self.args.rollout_config(),
                seed=self.args.seed + self.state.global_step,
                on_finished=start_grading,
                stats=stats,
            )
        self._stats = stats
        return {
            "prompt_ids": [rollout.prompt_ids for rollout in rollouts],
            "completion_ids": [rollout.completion_ids for rollout in rollouts],
            "logprobs": [rollout.logprobs for rollout in rollouts],
            "env_mask": [_training_mask(rollout) for rollout in rollouts],
            "rollouts": rollouts,
        }

    @property
    def _mode(self) -> str:
        return "train" if self.model.training else "eval"

    def _sampling(self, mode: str) -> Sampling:
        return Sampling(
            temperature=self.temperature if mode == "train" else self.args.eval_temperature,
            top_p=self.args.top_p,
            top_k=self.args.top_k or 0,
            min_p=self.args.min_p,
            repetition_penalty=self.args.repetition_penalty,
        )

    @contextlib.contextmanager
    def _generating_model(self) -> Iterator[PreTrainedModel]:
        """The model that generates: the trained one, whole on this rank, or its half-precision copy.

        It is in eval mode meanwhile: dropout, LoRA's for one, would sample from another policy than the loss sees.
        """
        if self._generation_copy is not None:
            yield self._generation_copy.at(self.state.global_step)
            return
        with unwrap_model_for_generation(
            self.model_wrapped,
            self.accelerator,
            gather_deepspeed3_params=self.args.ds3_gather_for_generation,
            gradient_checkpointing_kwargs=self.args.gradient_checkpointing_kwargs,
        ) as model:
            was_training = model.training
            model.eval()
            try:
                yield model
            finally:
                model.train(was_training)

    def _make_generation_copy(self, dtype: str) -> GenerationCopy:
        source = self.accelerator.unwrap_model(self.model)
        if not isinstance(source, PreTrainedModel) or self.is_deepspeed_enabled:
            raise UserError(
                f"generation_dtype is {dtype!r} with LoRA or DeepSpeed, which it does not support: remove it."
            )
        return GenerationCopy(source, dtype)

    # --- the wrapper around TRL's step ----------------------------------------------------------------------------

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        started, scoring = time.perf_counter(), self._scoring_seconds
        loss = super().training_step(*args, **kwargs)
        scoring = self._scoring_seconds - scoring
        steps = int(self.accelerator.sync_gradients)  # seconds of all micro-steps, per optimizer step
        self._training_seconds += Ratio(time.perf_counter() - started - scoring, steps)
        return loss

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        started = time.perf_counter()
        self._inputs = inputs
        output = super()._generate_and_score_completions(inputs)
        self._record(inputs, output["advantages"])
        self._inputs = []
        self._scoring_seconds += time.perf_counter() - started
        return output

    def _get_train_sampler(self, dataset: Dataset | None = None) -> EpochSampler:
        return EpochSampler(super()._get_train_sampler(dataset))

    def _compute_loss(self, model: torch.nn.Module, inputs: dict[str, Any]) -> torch.Tensor:
        return super()._compute_loss(model, without_padding(inputs))

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        started = time.perf_counter()
        self._rewards = super()._calculate_rewards(*args, **kwargs)
        self._grading_seconds = time.perf_counter() - started
        return self._rewards

    def _record(self, inputs: list[dict[str, Any]], advantages: torch.Tensor) -> None:
        """Add up metrics over ranks and write the rollouts of this generation batch."""
        mode = self._mode
        step = self.state.global_step + (mode == "train")  # the step that these rollouts train
        if self._rows_of != (mode, step):
            self._rows, self._rows_of, self._completions = [], (mode, step), 0
        first = self._completions + self.accelerator.process_index * len(inputs)  # places in the step, of all ranks
        self._completions += self.accelerator.num_processes * len(inputs)
        group_size = self.num_generations if mode == "train" else self.num_generations_eval
        if mode == "eval":  # accelerate fills the last batch up with repeats, so that ranks have equally many rows
            inputs = inputs[: max(0, len(self.eval_dataset) * group_size - first)]
        rollouts: list[Rollout] = [row["rollouts"] for row in inputs]
        offset = self.accelerator.process_index * len(advantages)
        local = self._rewards[offset : offset + len(inputs)]  # (rows of this rank, reward functions); NaN is None
        unscorable = local.isnan().all(dim=1)
        totals = (local * self.reward_weights.to(local.device)).nansum(dim=1).masked_fill(unscorable, torch.nan)
        executing = sum(call.result.seconds for rollout in rollouts for call in rollout.calls if call.result)
        tier = getattr(self._interpreter, "tier", None)  # the embedded one has tiers
        totals_of_ranks = self._add_ratios(
            rollout_metrics(rollouts)
            | {
                "reward": Ratio(totals.nansum().item(), int((~unscorable).sum())),
                "time/generating": Ratio(self._stats.generating_seconds, 1),
                "time/waiting": Ratio(self._stats.waiting_seconds, 1),
                "time/executing": Ratio(executing, 1),
                "time/grading": Ratio(self._grading_seconds, 1),
                "tools/isolation": Ratio(tier.level, 1) if tier else Ratio(),
            }
        )
        steps_per_batch = max(
            1, self.args.steps_per_generation * self.num_iterations // self.args.gradient_accumulation_steps
        )
        full = mode == "eval" or step == 1 or step % self.args.save_rollouts_every < steps_per_batch
        rows = [
            rollout_row(
                rollout,
                full=full,
                step=step,
                epoch=float(self.state.epoch or 0.0),
                split=mode,
                problem_id=row["problem_id"],
                group_id=(first + position) // group_size,
                generation_index=(first + position) % group_size,
                rank=self.accelerator.process_index,
                prompt=row["prompt"],
                solution=row["solution"],
                reward=totals[position].item(),
                rewards=dict(zip(self.reward_func_names, local[position].tolist(), strict=True)),
                advantage=advantages[position].item(),
                engine="transformers",
                seed=self.args.seed,
            )
            for position, (row, rollout) in enumerate(zip(inputs, rollouts, strict=True))
        ]
        if self.accelerator.num_processes > 1:
            rows = gather_object(rows)
        if self.accelerator.is_main_process:
            self._rows += rows
            if mode == "train":  # an evaluation has many batches and is written once, in `log`
                self._write_rows()
        self._check_interpreter(totals_of_ranks["tools/interpreter_failure"], mode, step)

    def _check_interpreter(self, failures: Ratio, mode: str, step: int) -> None:
        """Stop a run whose interpreter fails: what is left to train on is not what was asked for. On all ranks."""
        limit = self.args.max_interpreter_failures
        if failures.numerator > limit * failures.denominator:
            raise UserError(
                f"The interpreter {self.args.interpreter!r} failed in {failures.numerator:.0f} of "
                f"{failures.denominator:.0f} rollouts of {mode} step {step}, more than max_interpreter_failures: "
                f"{limit} allows: mend it (the log says why it failed), then go on with resume_from_checkpoint: true."
            )

    def _write_rows(self) -> None:
        mode, step = self._rows_of
        write_rollouts(rollouts_path(Path(self.args.output_dir), step, mode), self._rows)

    # --- metrics --------------------------------------------------------------------------------------------------

    def _add_ratios(self, ratios: dict[str, Ratio]) -> dict[str, Ratio]:
        """Sum over ranks (a collective call) and add to the sums that `log` divides. Returns the sums over ranks."""
        if self.accelerator.num_processes > 1:
            pairs = [[ratio.numerator, ratio.denominator] for ratio in ratios.values()]
            pairs = torch.tensor(pairs, dtype=torch.float64, device=self.accelerator.device)
            pairs = self.accelerator.reduce(pairs, reduction="sum").tolist()
            ratios = {name: Ratio(*pair) for name, pair in zip(ratios, pairs, strict=True)}
        sums = self._ratios[self._mode]
        for name, ratio in ratios.items():
            sums[name] = sums[name] + ratio if name in sums else ratio
        return ratios

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        mode = self._mode
        prefix = "eval_" if mode == "eval" else ""
        sums = self._ratios[mode]
        if mode == "train" and self._training_seconds.denominator:
            sums["time/training"] = self._training_seconds
            self._training_seconds = Ratio()
        values = metric_values(sums)
        sums.clear()
        if "reward" in values:  # TRL's is a mean of batch means, in which a short last batch weighs too much
            self._metrics[mode]["reward"] = [values.pop("reward")]
        logs.update({prefix + name: value for name, value in values.items()})
        if mode == "eval" and self._rows_of is not None:
            if self.accelerator.is_main_process:
                self._write_rows()
            self._rows_of = None  # another evaluation at this step starts anew
        super().log(logs, start_time)

    # --- checks ---------------------------------------------------------------------------------------------------

    def _check_setup(self) -> None:
        if self.args.max_tool_calls > 0 and self._interpreter is None:
            raise UserError(
                f"max_tool_calls is {self.args.max_tool_calls} and there is no interpreter: pass one, or set it to 0."
            )
        if not self._accuracy_rewards:
            raise UserError("No AccuracyReward is among the reward functions: add one, metrics need its verdicts.")
        needed = self.args.generation_batch_size // self.num_generations
        if self.train_dataset is not None and len(self.train_dataset) < needed:
            raise UserError(
                f"There are {len(self.train_dataset)} problems and a step takes {needed}, so that no step would be "
                "made: lower per_device_train_batch_size or gradient_accumulation_steps, or give more problems."
            )
        if self.is_fsdp_enabled or (self.is_deepspeed_enabled and not self.args.ds3_gather_for_generation):
            raise UserError(
                "The transformers engine needs the whole model on each process while ranks generate different numbers "
                "of turns: use DDP or ZeRO, with ds3_gather_for_generation: true."
            )
        half = {name for name, p in self.model.named_parameters() if p.requires_grad and p.element_size() < 4}
        if half and not self.is_deepspeed_enabled and self.args.learning_rate < HALF_PRECISION_MIN_LR:
            raise UserError(
                f"dtype is half precision and learning_rate is {self.args.learning_rate}, so that most updates round "
                f"to nothing: set dtype: float32 (with bf16: true for speed), or a learning rate of at least "
                f"{HALF_PRECISION_MIN_LR}."
            )


def _rollout_func(prompts: list[str], trainer: ToRLTrainer) -> dict[str, list]:
    return trainer.rollout(prompts)


def _training_mask(rollout: Rollout) -> list[int]:
    """The mask TRL trains with: all zero where our interpreter failed, so that no token counts anywhere."""
    return [0] * len(rollout.env_mask) if rollout.interpreter_failed else rollout.env_mask
