"""The stop before an update that would break the weights."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from torl_trl.checkpoints import last_whole_checkpoint
from torl_trl.errors import UserError

if TYPE_CHECKING:
    from torl_trl.trainer import ToRLTrainer


class DivergenceError(UserError):
    """A gradient norm that is no finite number, or above `stop_at_grad_norm`."""


def check_gradient(trainer: "ToRLTrainer", norm: float, micro_batches: Sequence[Mapping[str, Any]]) -> None:
    """Keep the batch and raise `DivergenceError` where the gradient's norm, before clipping, says that it diverged.

    To be called by all ranks, which see the same norm, after the last micro-batch of a step and before the optimizer.
    Each rank writes its micro-batches to `output_dir`/diverged_step_N_rank_R.pt, a dict to `torch.load`: `step`,
    `grad_norm` and `micro_batches`, the inputs of its loss. With fp16 the loss scale makes gradients infinite now and
    then, and such an update is left out, which helps no longer when that scale is below 1. (DeepSpeed has made its
    update by now; nothing saves it.)
    """
    args, step = trainer.args, trainer.state.global_step + 1
    if norm >= 0 and math.isfinite(norm):  # DeepSpeed's -1 stands for infinity
        if args.stop_at_grad_norm is None or norm <= args.stop_at_grad_norm:
            return
        what = f"{norm:.4g}, above stop_at_grad_norm: {args.stop_at_grad_norm:g}"
    elif trainer.accelerator.mixed_precision == "fp16":  # which a launcher may have set
        scaler = trainer.accelerator.scaler  # None with DeepSpeed, which stops at its smallest scale by itself
        if scaler is None or scaler.get_scale() >= 1:
            return
        what = f"{norm} although the loss scale fell to {scaler.get_scale():g}, and every update is left out"
    else:
        what = f"{norm}, which would have made every weight useless"
    folder = Path(args.output_dir)
    path = folder / f"diverged_step_{step}_rank_{args.process_index}.pt"
    folder.mkdir(parents=True, exist_ok=True)
    torch.save({"step": step, "grad_norm": norm, "micro_batches": _on_cpu(micro_batches)}, path)
    trainer.accelerator.wait_for_everyone()  # the first rank to end ends all
    last = last_whole_checkpoint(folder)
    raise DivergenceError(
        f"The gradient norm of step {step} is {what}: nothing was saved after step {step - 1}, the batch is in {path} "
        f"and the last whole checkpoint is {last or 'none'}; look at the batch, lower learning_rate or max_grad_norm, "
        f"then {'go on with resume_from_checkpoint: true' if last else 'start again'}."
    )


def _on_cpu(micro_batches: Sequence[Mapping[str, Any]]) -> list[dict[str, torch.Tensor]]:
    """Copies of their tensors; a view would be saved with all that it is a part of."""
    return [
        {name: value.to("cpu", copy=True) for name, value in inputs.items() if torch.is_tensor(value)}
        for inputs in micro_batches
    ]
