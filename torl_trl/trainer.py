"""ToRLTrainer: TRL's GRPOTrainer with rollouts that use an interpreter.

The seam is TRL's `rollout_func` plus a thin wrapper that sees the dataset columns going in and the advantages coming
out. Everything about a rollout lies in `torl_trl.rollout`; everything about the loss lies in TRL.
"""

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from datasets import Dataset
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback
from transformers.trainer_utils import HubStrategy
from trl import GRPOTrainer

from torl_trl.config import ToRLConfig
from torl_trl.divergence import check_gradient
from torl_trl.engines.base import Engine, EngineError, Sampling
from torl_trl.errors import UserError
from torl_trl.generation import make_generation, vllm_for_trl
from torl_trl.hub import HubPush, open_repo
from torl_trl.interpreters.base import Interpreter
from torl_trl.metrics import Ratio, stats_metrics
from torl_trl.padding import score_completions_only, without_padding
from torl_trl.progress import ProgressBar, RolloutStats
from torl_trl.recorder import Recorder
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
        train_dataset, eval_dataset: columns `prompt` (text), `solution`, `problem_id`, as `torl_trl.data` makes them;
            an evaluation with a column `benchmark` logs `<benchmark>/avg@k` for each.
        model_card: writes README.md into the run's folder, at each save on the main process; without it TRL does.

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
        model_card: Callable[[], Any] | None = None,
    ):
        self._interpreter = interpreter
        self._model_card = model_card
        self.on_rollouts: Callable[[str, RolloutStats, Engine], None] | None = None
        """Called as a rollout phase starts and after each step of its engine; the text is like "train step 3"."""
        self._hub: HubPush | None = None  # on the main process of a run that pushes
        self._inputs: list[dict[str, Any]] = []
        self._rewards: torch.Tensor | None = None  # (completions of all ranks, reward functions)
        self._stats = RolloutStats()
        self._grading_seconds = 0.0
        self._scoring_seconds = 0.0
        self._training_seconds = Ratio()
        with vllm_for_trl(args):
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
        self._generation = make_generation(self)
        named = eval_dataset is not None and "benchmark" in eval_dataset.column_names
        benchmarks = eval_dataset.unique("benchmark") if named else ()
        self._recorder = Recorder(args, self.accelerator, self._generation.name, benchmarks)

    # --- rollouts -----------------------------------------------------------------------------------------------

    def rollout(self, prompts: list[str]) -> dict[str, list]:
        """Sample this rank's prompts, already repeated `num_generations` times; TRL's `rollout_func` contract.

        A rank that fails here fails the others too: they would wait for it in their next collective call.
        """
        rollouts, failure = [], None
        try:
            rollouts = self._run_rollouts(prompts)
        except Exception as error:
            failure = error
        self._fail_together(failure)
        return {
            "prompt_ids": [rollout.prompt_ids for rollout in rollouts],
            "completion_ids": [rollout.completion_ids for rollout in rollouts],
            "logprobs": [rollout.logprobs for rollout in rollouts],
            "env_mask": [_training_mask(rollout) for rollout in rollouts],
            "rollouts": rollouts,
        }

    def _run_rollouts(self, prompts: list[str]) -> list[Rollout]:
        inputs, self._stats = self._inputs, RolloutStats()
        mode, step = self._mode, self._rollouts_step
        place = self._recorder.first_place(mode, step, len(prompts))

        def start_grading(rollout: Rollout) -> None:
            for function in self._accuracy_rewards:
                function.start(rollout, inputs[rollout.index]["solution"])

        def show(stats: RolloutStats) -> None:
            bar.update(stats)
            if self.on_rollouts is not None:
                self.on_rollouts(f"{mode} step {step}", stats, engine)

        bar = ProgressBar(
            len(prompts), description=f"{mode} step {step}", disable=not self.accelerator.is_main_process
        )
        with self._generation.engine(self._sampling(mode)) as engine, bar:
            show(self._stats)
            return run_rollouts(
                self.processing_class(text=prompts)["input_ids"],
                engine,
                self._interpreter,
                self.processing_class,
                self.args.rollout_config(),
                seed=hash((self.args.seed, mode == "train", step, place)),  # ints: the same in every process
                on_finished=start_grading,
                on_progress=show,
                stats=self._stats,
            )

    def _fail_together(self, failure: Exception | None) -> None:
        """Raise this rank's failure, or another's, on every rank (a collective call)."""
        if self.accelerator.num_processes > 1:
            said = [(self.accelerator.process_index, str(failure))] if failure else []
            for rank, words in gather_object(said):
                if failure is None:
                    raise EngineError(f"Rank {rank} failed in its rollouts: {words}")
        if failure is not None:
            raise failure

    @property
    def _rollouts_step(self) -> int:
        """The step that rollouts made now train, or that an evaluation is of."""
        return self.state.global_step + (self._mode == "train")

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

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)
        self.accelerator.wait_for_everyone()  # see torl_trl.checkpoints

    def _get_grad_norm(self, model: torch.nn.Module, grad_norm: Any = None) -> Any:
        norm = super()._get_grad_norm(model, grad_norm=grad_norm)
        if norm is not None:  # DeepSpeed has none where its configuration leaves it out
            check_gradient(self, float(norm))
        return norm

    def _compute_loss(self, model: torch.nn.Module, inputs: dict[str, Any]) -> torch.Tensor:
        return super()._compute_loss(model, without_padding(inputs))

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        started = time.perf_counter()
        self._rewards = super()._calculate_rewards(*args, **kwargs)
        self._grading_seconds = time.perf_counter() - started
        return self._rewards

    def _record(self, inputs: list[dict[str, Any]], advantages: torch.Tensor) -> None:
        """Add up metrics over ranks and write the rollouts of this generation batch."""
        mode, step = self._mode, self._rollouts_step
        group_size = self.num_generations if mode == "train" else self.num_generations_eval
        tier = getattr(self._interpreter, "tier", None)  # the embedded one has tiers
        totals = self._recorder.record(
            mode,
            step,
            float(self.state.epoch or 0.0),
            inputs,
            limit=len(self.eval_dataset) * group_size if mode == "eval" else None,
            group_size=group_size,
            advantages=advantages,
            rewards=self._rewards,
            reward_weights=self.reward_weights,
            reward_names=self.reward_func_names,
            extra=stats_metrics(self._stats)
            | {
                "time/grading": Ratio(self._grading_seconds, 1),
                "tools/isolation": Ratio(tier.level, 1) if tier else Ratio(),
            },
        )
        self._check_interpreter(totals["tools/interpreter_failure"], mode, step)

    def _check_interpreter(self, failures: Ratio, mode: str, step: int) -> None:
        """Stop a run whose interpreter fails: what is left to train on is not what was asked for. On all ranks."""
        limit = self.args.max_interpreter_failures
        if failures.numerator > limit * failures.denominator:
            raise UserError(
                f"The interpreter {self.args.interpreter!r} failed in {failures.numerator:.0f} of "
                f"{failures.denominator:.0f} rollouts of {mode} step {step}, more than max_interpreter_failures: "
                f"{limit} allows: mend it (the log says why it failed), then go on with resume_from_checkpoint: true."
            )

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        mode = self._mode
        prefix = "eval_" if mode == "eval" else ""
        if mode == "train" and self._training_seconds.denominator:
            self._recorder.add(mode, "time/training", self._training_seconds)
            self._training_seconds = Ratio()
        for name in [name for name in self._metrics["eval"] if name.startswith("sampling/")]:
            del self._metrics["eval"][name]  # vLLM's logprobs are at the evaluation's temperature, TRL's own are not
        values = self._recorder.take_values(mode)
        if "reward" in values:  # TRL's is a mean of batch means, in which a short last batch weighs too much
            self._metrics[mode]["reward"] = [values.pop("reward")]
        logs.update({prefix + name: value for name, value in values.items()})
        if self._hub is not None and mode == "train":
            logs["hub/failed_pushes"] = self._hub.failed
        super().log(logs, start_time)

    # --- the Hub --------------------------------------------------------------------------------------------------

    def init_hf_repo(self, token: str | None = None) -> None:
        if self.is_world_process_zero():
            self.hub_model_id = open_repo(self.args)
            self._hub = HubPush(self.args, self.hub_model_id)

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        if self._model_card is None:
            super().create_model_card(*args, **kwargs)
        elif self.is_world_process_zero():
            self._model_card()

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        strategy, step = self.args.hub_strategy, self.state.global_step
        if self._hub is None or strategy == HubStrategy.END:
            return
        self.callback_handler.on_push_begin(self.args, self.state, self.control)
        checkpoint = Path(checkpoint_folder)
        folders = {HubStrategy.CHECKPOINT: "last-checkpoint", HubStrategy.ALL_CHECKPOINTS: checkpoint.name}
        branch = f"step-{step:06d}" if self.args.hub_branch_per_save else None
        self._hub.start(checkpoint, f"Step {step}", branch=branch, resumable=folders.get(strategy))

    def _finish_current_push(self) -> None:
        if self._hub is not None:
            self._hub.wait()

    def push_to_hub(self, commit_message: str = "End of training", **_: Any) -> None:
        """Push the model as it is now and the run's files, and wait for it; a failure is said, and counted."""
        if not self.args.push_to_hub:
            raise UserError("push_to_hub is false: set it to true.")
        self.save_model(_internal_call=True)
        self.create_model_card()
        if self._hub is not None:
            self.callback_handler.on_push_begin(self.args, self.state, self.control)
            self._hub.wait()
            self._hub.start(Path(self.args.output_dir), commit_message)
            self._hub.wait()

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
