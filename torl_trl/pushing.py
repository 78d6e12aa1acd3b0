"""The part of the trainer that talks to the Hub: pushes in the background, which training never waits for."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers.trainer_utils import HubStrategy

from torl_trl.config import ToRLConfig
from torl_trl.errors import UserError
from torl_trl.hub import HubPush, open_repo
from torl_trl.resuming import ResumingTrainer


class PushingTrainer(ResumingTrainer):
    """A trainer with our way to the Hub, and a model card of the caller's; transformers calls these methods."""

    args: ToRLConfig
    _model_card: Callable[[], Any] | None = None
    _hub: HubPush | None = None
    """On the main process of a run that pushes."""

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
