"""The part of the trainer that skips updates in which nothing trains, and micro-batches that would add nothing.

What trains is known by micro-batch: TRL shuffles the rollouts of a generation batch before it splits them, and an
update may take a part of a generation batch, or several.
"""

import logging
import time
from collections.abc import Sequence
from typing import Any

import torch

from torl_trl.pushing import PushingTrainer

logger = logging.getLogger(__name__)

_OVER_TOKENS = ("entropy", "kl", "cispo_clip_ratio", "vespo/phi_seq_mean")
"""Means that TRL takes over the tokens of a micro-batch that train, as `clip_ratio/...`: 0 where there are none."""


class SkippingTrainer(PushingTrainer):
    """GRPOTrainer that leaves the weights alone where nothing trains: AdamW moves them without gradients, too."""

    _tokens: Sequence[int] = ()
    """That train, of all ranks, in each micro-batch of the present generation batch; none before the first."""

    def __init__(self, *args: Any, **kwargs: Any):
        self._update_inputs: list[dict[str, Any]] = []  # of the present update's micro-batches, once through the model
        super().__init__(*args, **kwargs)

    def _prepare_inputs(self, generation_batch: Any) -> dict[str, Any]:
        before = self._buffered_inputs
        inputs = super()._prepare_inputs(generation_batch)
        if self._buffered_inputs is not before:
            counts = [(batch["completion_mask"] * batch["tool_mask"]).sum() for batch in self._buffered_inputs]
            self._tokens = self.accelerator.reduce(torch.stack(counts), reduction="sum").tolist()
        return inputs

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        started = time.perf_counter()
        try:
            return super().training_step(*args, **kwargs)
        except _NothingToTrain:  # what TRL does at the end of its own
            self._step += 1
            self._current_train_step_time += time.perf_counter() - started
            if self._step % self.current_gradient_accumulation_steps == 0:
                self._metrics["train"]["step_time"].append(self._current_train_step_time)
                self._current_train_step_time = 0.0
            return torch.zeros((), device=self.accelerator.device)

    def _compute_loss(self, model: torch.nn.Module, inputs: dict[str, Any]) -> torch.Tensor:
        if not self.model.training:
            return super()._compute_loss(model, inputs)
        trains = not self._tokens or self._tokens[self._step % len(self._tokens)] > 0
        # The last micro-batch of an update makes ranks exchange gradients, and DeepSpeed make its step.
        if not trains and not (self._update_inputs and self.accelerator.sync_gradients):
            raise _NothingToTrain
        self._update_inputs.append(inputs)
        lengths = {name: len(values) for name, values in self._metrics["train"].items()}
        loss = super()._compute_loss(model, inputs)
        if not trains:
            for name, values in self._metrics["train"].items():
                if name in _OVER_TOKENS or name.startswith("clip_ratio/"):
                    del values[lengths.get(name, 0) :]
        return loss

    def _clip_grad_norm(self, model: torch.nn.Module) -> Any:
        return super()._clip_grad_norm(model) if self._update_inputs else None

    def _get_grad_norm(self, model: torch.nn.Module, grad_norm: Any = None) -> Any:
        """Called once an update, right before the optimizer's step."""
        trains, self._update_inputs = bool(self._update_inputs), []
        self._metrics["train"]["filter/skipped_step"].append(float(not trains))
        if trains:
            return super()._get_grad_norm(model, grad_norm=grad_norm)
        if self.accelerator.is_main_process:
            logger.warning(
                "Step %d trains nothing: all of its rollouts were left out (filter/... in metrics.jsonl says why), so "
                "the update is skipped. If this goes on, the problems are too easy or too hard.",
                self.state.global_step + 1,
            )
        # The optimizer does nothing in a micro-step that does not synchronize; the Trainer sets that again before the
        # next. The schedule goes on: it was laid out for all steps of the run.
        self.accelerator.gradient_state._set_sync_gradients(False)
        return 0.0


class _NothingToTrain(Exception):
    """Ends a micro-step between the rollouts and the loss."""
