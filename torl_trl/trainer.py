"""ToRLTrainer: TRL's GRPOTrainer with rollouts that use an interpreter.

The seam is TRL's `rollout_func` plus a thin wrapper that sees the dataset columns going in and the advantages coming
out. Everything about a rollout lies in `torl_trl.rollout`; everything about the loss lies in TRL.
"""

import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from accelerate.utils import gather
from datasets import Dataset
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback

from torl_interpreters.base import Interpreter
from torl_trl.config import ToRLConfig
from torl_trl.divergence import check_gradient
from torl_trl.engines.base import Sampling
from torl_trl.errors import UserError
from torl_trl.filters import Filters, Group, Sample, filter_metrics, groups_of
from torl_trl.generation import make_generation, vllm_for_trl
from torl_trl.metrics import Ratio, stats_metrics
from torl_trl.padding import score_completions_only, without_padding
from torl_trl.phase import RolloutPhase, Row, fail_together
from torl_trl.progress import RolloutStats
from torl_trl.recorder import Recorder
from torl_trl.refill import Refill
from torl_trl.rewards import AccuracyReward, score
from torl_trl.rollout import Rollout
from torl_trl.setup import check_setup
from torl_trl.skipping import SkippingTrainer

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")  # rollout_func may change in TRL; our TRL is pinned


class ToRLTrainer(SkippingTrainer):
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
        self._inputs: list[dict[str, Any]] = []
        self._samples: list[Sample] = []  # this rank's rollouts of the generation batch, in TRL's order
        self._left_out: list[Sample] = []  # what was sampled for it beyond, and trains nothing
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
        check_setup(self, interpreter)
        if self.accelerator.device.type == "cpu":
            score_completions_only()
        self.phase = RolloutPhase(
            make_generation(self),
            interpreter,
            self.processing_class,
            args.rollout_config(),
            self._start_grading,
            resamples=args.resample_failures,
            shows_bar=self.accelerator.is_main_process,
        )
        self._filters = args.filters()
        self._refill: Refill | None = None
        if self._filters.drops_groups and train_dataset is not None:
            self._refill = Refill(len(train_dataset), args.seed, args.refill_limit, self.accelerator)
        named = eval_dataset is not None and "benchmark" in eval_dataset.column_names
        benchmarks = eval_dataset.unique("benchmark") if named else ()
        self._recorder = Recorder(args, self.accelerator, self.phase.generation.name, benchmarks)

    # --- rollouts -----------------------------------------------------------------------------------------------

    def rollout(self, prompts: list[str]) -> dict[str, list]:
        """Sample this rank's prompts, already repeated `num_generations` times; TRL's `rollout_func` contract.

        With filters the rows of groups that train nothing are replaced in the list that TRL reads afterwards.
        """
        mode, step = self._mode, self._rollouts_step
        self._stats, self._grading_seconds = RolloutStats(), 0.0
        place = self._recorder.first_place(mode, step, len(prompts))
        seed = hash((self.args.seed, mode == "train", step, place))  # ints: the same in every process
        samples, self._left_out = self._sample(self._inputs, place, seed), []
        if mode == "train" and self._refill is not None and not self._interpreter_is_down(samples):
            samples = self._refilled(samples)
            self._inputs[:] = [sample.row for sample in samples]
        self._samples = samples
        return {
            "prompt_ids": [sample.rollout.prompt_ids for sample in samples],
            "completion_ids": [sample.rollout.completion_ids for sample in samples],
            "logprobs": [sample.rollout.logprobs for sample in samples],
            "env_mask": [sample.rollout.env_mask for sample in samples],
            "rollouts": [sample.rollout for sample in samples],
        }

    def _generate(self, prompts: list[str]) -> tuple:
        """TRL's, which measures lengths with `env_mask`; from here on that is the mask of what trains."""
        prompt_ids, completion_ids, _, *rest = super()._generate(prompts)
        return (prompt_ids, completion_ids, [sample.training_mask for sample in self._samples], *rest)

    def _sample(self, rows: Sequence[Row], place: int, seed: int) -> list[Sample]:
        """Sample rows of this rank, the first of which stands at `place`, and mark who trains nothing. Collective.

        A rank that fails here fails the others too: they would wait for it in their next collective call.
        """
        mode, samples, failure = self._mode, [], None
        try:
            title = f"{mode} step {self._rollouts_step}"
            rollouts = self.phase.run(rows, self._sampling(mode), seed=seed, title=title, stats=self._stats)
            pairs = zip(rows, rollouts, strict=True)
            samples = [Sample(row, rollout, place + number) for number, (row, rollout) in enumerate(pairs)]
            self._filter(samples, self._filters if mode == "train" else Filters())
        except Exception as error:
            failure = error
        fail_together(self.accelerator, failure)
        return samples

    def _filter(self, samples: list[Sample], filters: Filters) -> None:
        filters.drop_rollouts(samples)
        if filters.drops_groups:
            rows, rollouts = [sample.row for sample in samples], [sample.rollout for sample in samples]
            started = time.perf_counter()
            scores = score(self.reward_funcs, rows, rollouts, trainer_state=self.state)
            self._grading_seconds += time.perf_counter() - started
            for sample, values in zip(samples, scores, strict=True):
                sample.scores = values
            normalize_each = self.multi_objective_aggregation == "normalize_then_sum"
            for group in groups_of(samples, self.num_generations):
                filters.drop_group(group, self.reward_weights.tolist(), normalize_each=normalize_each)

    def _interpreter_is_down(self, samples: list[Sample]) -> bool:
        """Whether so many rollouts failed on all ranks that `_record` will stop the run. Collective."""
        failed = [float(sample.rollout.interpreter_failed) for sample in samples]
        of_all = gather(torch.tensor(failed, device=self.accelerator.device))
        return self._fails_too_often(Ratio(of_all.sum().item(), len(of_all)))

    def _refilled(self, samples: list[Sample]) -> list[Sample]:
        """Replace groups that train nothing by groups of further problems, as far as refill_limit allows."""
        first_place = self.accelerator.num_processes * len(samples)

        def sample_groups(problems: list[int], position: int, offset: int) -> list[Group]:
            rows = [dict(row) for problem in problems for row in [self.train_dataset[problem]] * self.num_generations]
            seed = hash((self.args.seed, 2, self._rollouts_step, position))
            place = first_place + offset * self.num_generations
            return groups_of(self._sample(rows, place, seed), self.num_generations)

        groups, left_out = self._refill.fill(groups_of(samples, self.num_generations), sample_groups)
        self._left_out = [sample for group in left_out for sample in group]
        return [sample for group in groups for sample in group]

    def _start_grading(self, rollout: Rollout, row: Row) -> None:
        for function in self._accuracy_rewards:
            function.start(rollout, row["solution"])

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
        self._record(output["advantages"])
        self._inputs = []
        self._scoring_seconds += time.perf_counter() - started
        return output

    def _get_grad_norm(self, model: torch.nn.Module, grad_norm: Any = None) -> Any:
        micro_batches = self._update_inputs
        norm = super()._get_grad_norm(model, grad_norm=grad_norm)
        if norm is not None:  # DeepSpeed has none where its configuration leaves it out
            check_gradient(self, float(norm), micro_batches)
        return norm

    def _compute_loss(self, model: torch.nn.Module, inputs: dict[str, Any]) -> torch.Tensor:
        return super()._compute_loss(model, without_padding(inputs))

    def _calculate_rewards(self, inputs: list[dict[str, Any]], prompts: list[str], *args: Any) -> torch.Tensor:
        started = time.perf_counter()
        if self._mode == "train" and self._refill is not None:  # they are known
            prompts[:] = [row["prompt"] for row in inputs]  # TRL took them before rows were replaced
            scores = [sample.scores for sample in self._samples]
            self._rewards = gather(torch.tensor(scores, device=self.accelerator.device))
        else:
            self._rewards = super()._calculate_rewards(inputs, prompts, *args)
        self._grading_seconds += time.perf_counter() - started
        return self._rewards

    def _record(self, advantages: torch.Tensor) -> None:
        """Add up metrics over ranks and write the rollouts of this generation batch."""
        mode, step, samples = self._mode, self._rollouts_step, self._samples
        first = self.accelerator.process_index * len(samples)
        scores = self._rewards[first : first + len(samples)].tolist()
        for sample, values, advantage in zip(samples, scores, advantages.tolist(), strict=True):
            sample.scores, sample.advantage = values, advantage
        group_size = self.num_generations if mode == "train" else self.num_generations_eval
        tier = getattr(self._interpreter, "tier", None)  # the embedded one has tiers
        filtered = mode == "train" and self._filters != Filters()
        totals = self._recorder.record(
            mode,
            step,
            float(self.state.epoch or 0.0),
            samples,
            self._left_out,
            limit=len(self.eval_dataset) * group_size if mode == "eval" else None,
            group_size=group_size,
            weights=dict(zip(self.reward_func_names, self.reward_weights.tolist(), strict=True)),
            extra=stats_metrics(self._stats)
            | (filter_metrics(samples, self._left_out, group_size) if filtered else {})
            | {
                "time/grading": Ratio(self._grading_seconds, 1),
                "tools/isolation": Ratio(tier.level, 1) if tier else Ratio(),
            },
        )
        self._check_interpreter(totals["tools/interpreter_failure"], mode, step)

    def _check_interpreter(self, failures: Ratio, mode: str, step: int) -> None:
        """Stop a run whose interpreter fails: what is left to train on is not what was asked for. On all ranks."""
        if self._fails_too_often(failures):
            raise UserError(
                f"The interpreter {self.args.interpreter!r} failed in {failures.numerator:.0f} of "
                f"{failures.denominator:.0f} rollouts of {mode} step {step}, more than max_interpreter_failures: "
                f"{self.args.max_interpreter_failures} allows: mend it (the log says why it failed), then go on with "
                "resume_from_checkpoint: true."
            )

    def _fails_too_often(self, failures: Ratio) -> bool:
        return failures.numerator > self.args.max_interpreter_failures * failures.denominator

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        mode = self._mode
        prefix = "eval_" if mode == "eval" else ""
        if mode == "train" and self._training_seconds.denominator:
            self._recorder.add(mode, "time/training", self._training_seconds)
            self._training_seconds = Ratio()
        for name in [name for name in self._metrics["eval"] if name.startswith("sampling/")]:
            del self._metrics["eval"][name]  # vLLM's logprobs are at the evaluation's temperature, TRL's own are not
        values = self._recorder.take_values(mode)
        # TRL's are means of batch means, in which a short last batch weighs too much, and without what was left out.
        for name in [name for name in values if name == "reward" or name.startswith("rewards/")]:
            self._metrics[mode][name] = [values.pop(name)]
        logs.update({prefix + name: value for name, value in values.items()})
        if self._hub is not None and mode == "train":
            logs["hub/failed_pushes"] = self._hub.failed
        super().log(logs, start_time)


def _rollout_func(prompts: list[str], trainer: ToRLTrainer) -> dict[str, list]:
    return trainer.rollout(prompts)
