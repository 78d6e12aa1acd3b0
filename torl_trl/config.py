"""Configuration of a run: TRL's dataclasses with ToRL's fields and the paper's values as defaults.

Every field can be set in a recipe's YAML and overridden on the command line. What TRL would silently ignore with our
rollouts is refused here (`REFUSED`).
"""

import contextlib
import json
import logging
import math
import os
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from accelerate.utils import is_deepspeed_available, parse_flag_from_env
from trl import GRPOConfig

from torl_trl.batch import derive_batch
from torl_trl.errors import UserError
from torl_trl.filters import Filters
from torl_trl.loss_options import check_filters, check_loss_options
from torl_trl.rollout import RolloutConfig
from torl_trl.run_folder import plain_options

logger = logging.getLogger(__name__)

REFUSED: dict[str, tuple[Any, str]] = {
    "generation_kwargs": (None, "set temperature, top_p, top_k, min_p or repetition_penalty instead"),
    "cache_implementation": (None, "remove it, the engine manages its own cache"),
    "chat_template_kwargs": (None, "remove it, prompts are plain text made by prompt_template"),
    "max_tool_calling_iterations": (None, "set max_tool_calls instead"),
    "use_transformers_continuous_batching": (False, "remove it, the transformers engine works in rounds"),
    "transformers_continuous_batching_config": (None, "remove it, the transformers engine works in rounds"),
    "use_transformers_paged": (False, "remove it, the transformers engine works in rounds"),
    "vllm_structured_outputs_regex": (None, "remove it, rollouts are free text"),
}
"""Inherited options that have no effect on our rollouts: the only accepted value, and what to do instead."""


@dataclass
class ToRLConfig(GRPOConfig):
    """Training arguments. Defaults follow the paper (section 3.1 and the released scripts) where TRL's differ."""

    num_generations: int | None = field(default=16, metadata={"help": "Rollouts per prompt (a group). Paper: 16."})
    max_completion_length: int | None = field(
        default=3072, metadata={"help": "Token budget of a rollout: model text and observations of all turns."}
    )
    lr_scheduler_type: str = field(
        default="constant", metadata={"help": "Learning rate schedule. Released code: constant."}
    )
    vllm_importance_sampling_correction: bool = field(
        default=False, metadata={"help": "Correct for engine and trainer differences. The paper has none."}
    )
    vllm_importance_sampling_mode: str = field(
        default="token_truncate",
        metadata={"help": "How. TRL's sequence_mask drops long rollouts whole, since their ratios multiply."},
    )
    logging_steps: float = field(default=1, metadata={"help": "Log every that many steps."})
    hub_private_repo: bool | None = field(default=True, metadata={"help": "Whether a new repository is private."})
    gradient_accumulation_steps: int | None = field(
        default=None, metadata={"help": "Micro-batches per update: 1, or what prompts_per_step makes it."}
    )

    prompts_per_step: int | None = field(
        default=None,
        metadata={"help": "Prompts of a step; gradient accumulation is derived from it. Paper: 128."},
    )
    max_tool_calls: int = field(default=1, metadata={"help": "Tool calls per rollout, the paper's C. 0: no tool."})
    tool_trigger: str = field(
        default="output_marker",
        metadata={
            "help": "What asks for a tool call: the model's own ```output (output_marker), or the fence that closes "
            "a python block (code_fence), for models that do not write the marker.",
            "choices": ["output_marker", "code_fence"],
        },
    )
    max_observation_chars: int = field(
        default=256, metadata={"help": "Longer observations keep head and tail. Released code: 256."}
    )
    interpreter: str = field(default="embedded", metadata={"help": "Interpreter backend."})
    interpreter_options: dict[str, Any] | str | None = field(
        default=None, metadata={"help": "Options of the backend, such as {timeout_seconds: 5, slots: 4}."}
    )
    interpreter_retries: int = field(
        default=2, metadata={"help": "How often a call is tried again after a failure of the interpreter itself."}
    )
    max_interpreter_failures: float = field(
        default=0.2,
        metadata={"help": "Stop when the interpreter fails in more than this share of a step's rollouts."},
    )
    grade_text: str = field(
        default="own",
        metadata={
            "help": "Text that is graded: the model's own (own), or all of it with observations, as released (full).",
            "choices": ["own", "full"],
        },
    )
    grading_workers: int = field(default=2, metadata={"help": "Grader processes per machine."})
    executability_penalty: bool = field(
        default=False, metadata={"help": "Add the paper's -0.5 for code that fails (its ablation; off in its runs)."}
    )
    penalty_scope: str = field(
        default="failed_code",
        metadata={
            "help": "Whom the penalty hits: completions whose code failed (failed_code, the paper's text), or all "
            "without passed code (no_pass, the released code).",
            "choices": ["failed_code", "no_pass"],
        },
    )
    drop_void_turns: bool = field(
        default=False,
        metadata={"help": "Leave rollouts out in which a turn has neither a complete code block nor a boxed answer."},
    )
    drop_dead_groups: bool = field(
        default=False, metadata={"help": "Leave groups out in which nobody has an advantage and trains."}
    )
    accuracy_band: list[float] | None = field(
        default=None,
        metadata={"help": "Leave groups out whose share of right answers is outside of these two, such as 0.1 0.9."},
    )
    refill_limit: float = field(
        default=0.0,
        metadata={"help": "Replace groups that are left out: sample up to that many times the step's prompts more."},
    )
    overlong_penalty_tokens: int = field(
        default=0,
        metadata={"help": "Over these last tokens of the budget the reward falls by up to 1. 0: never."},
    )
    resample_failures: int = field(
        default=0, metadata={"help": "How often a rollout whose interpreter failed is sampled again in its step."}
    )
    eval_temperature: float = field(default=0.0, metadata={"help": "Temperature in evaluation. Paper: 0, greedy."})
    generation_dtype: str | None = field(
        default=None,
        metadata={
            "help": "Generate with a copy of the weights in this dtype, refreshed every step (transformers engine).",
            "choices": ["bfloat16", "float16"],
        },
    )
    stop_at_grad_norm: float | None = field(
        default=None,
        metadata={
            "help": "Stop before an update whose gradient norm, before clipping, is above this. One that is no finite "
            "number always stops the run."
        },
    )
    hang_timeout: float | None = field(
        default=None,
        metadata={
            "help": "End the run, with all stacks in `output_dir`/hang_rank*.txt, after that many seconds without any "
            "movement. Must be longer than the longest stretch that is silent: a round of the transformers engine, "
            "the wait of a process for the rollouts of the others, a turn of a vLLM server, the grading of a "
            "step, a micro-batch, a save."
        },
    )
    save_rollouts_every: int = field(
        default=10,
        metadata={"help": "Steps between rollout files with full text; problem ids and rewards are always kept."},
    )
    hub_branch_per_save: bool = field(
        default=False, metadata={"help": "Keep each save that is pushed as a branch such as step-000020, beside main."}
    )

    def __post_init__(self) -> None:
        self._check_sharding()
        if self.prompts_per_step is not None:
            derive_batch(self, self.prompts_per_step)
        if self.gradient_accumulation_steps is None:
            self.gradient_accumulation_steps = 1
        # Or the ranks that wait for the one that hangs end first. (Other values are refused below.)
        if isinstance(self.hang_timeout, (int, float)) and 0 < self.hang_timeout < math.inf:
            self.ddp_timeout = max(self.ddp_timeout, math.ceil(self.hang_timeout) + 60)
        super().__post_init__()
        if self.deepspeed_plugin is not None:  # else bfloat16, which would lose small gradients of later micro-batches
            self.deepspeed_plugin.deepspeed_config.setdefault("data_types", {}).setdefault("grad_accum_dtype", "fp32")
        self._check_processes()
        self.interpreter_options = self._parsed_interpreter_options()
        self._check_choices()
        self._check_refused()
        self._check_ranges()
        check_loss_options(self)
        check_filters(self)
        if self.use_vllm:
            self._check_vllm()

    @property
    def generation_cycle(self) -> int:
        """Micro-steps that train on one generation batch, which no checkpoint keeps: saves belong between them."""
        return self.steps_per_generation * self.num_iterations

    @property
    def device(self) -> torch.device:
        """Without the index that accelerate gives a rank's CPU: torch reads no optimizer's state to `cpu:0`."""
        device = super().device
        return torch.device("cpu") if device.type == "cpu" else device

    def to_dict(self) -> dict[str, Any]:
        """The options as plain values, without secrets: trackers store it."""
        return plain_options(super().to_dict())

    def __getstate__(self) -> dict[str, Any]:
        """What copies and training_args.bin hold, without secrets."""
        return self.__dict__ | {"hub_token": None, "interpreter_options": plain_options(self.interpreter_options)}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.to_dict()})"

    __str__ = __repr__

    def rollout_config(self) -> RolloutConfig:
        """The part that `run_rollouts` takes."""
        return RolloutConfig(
            max_tool_calls=self.max_tool_calls,
            max_completion_length=self.max_completion_length,
            max_observation_chars=self.max_observation_chars,
            tool_trigger=self.tool_trigger,
            interpreter_retries=self.interpreter_retries,
        )

    def filters(self) -> Filters:
        """Which rollouts and groups train."""
        return Filters(
            truncated=self.mask_truncated_completions,
            void_turns=self.drop_void_turns,
            dead_groups=self.drop_dead_groups,
            accuracy_band=tuple(self.accuracy_band) if self.accuracy_band else None,
        )

    def _parsed_interpreter_options(self) -> dict[str, Any]:
        """A mapping from the YAML, or JSON text from the command line."""
        options = self.interpreter_options or {}
        if isinstance(options, str):
            with contextlib.suppress(json.JSONDecodeError):
                options = json.loads(options)
        if not isinstance(options, dict):
            raise UserError(f"interpreter_options is {options!r}: give a mapping, such as {{timeout_seconds: 5}}.")
        return options

    def _check_sharding(self) -> None:
        """Of DeepSpeed settings here and in accelerate's config, transformers would take a mixture without a word."""
        if not self.deepspeed:
            return
        if not is_deepspeed_available():
            raise UserError("deepspeed is set and the package is missing: install requirements.txt, or remove it.")
        for name in ("DEEPSPEED", "FSDP"):
            if parse_flag_from_env(f"ACCELERATE_USE_{name}"):
                raise UserError(
                    f"The recipe sets deepspeed and the accelerate config {name}: launch without --config_file or "
                    'with ddp.yaml, or add --deepspeed "" to use the accelerate config alone.'
                )

    def _check_processes(self) -> None:
        if self.prompts_per_step and self.generation_batch_size != self.prompts_per_step * self.num_generations:
            raise UserError(
                f"The launcher started {os.environ['WORLD_SIZE']} processes and {self.world_size} work together: "
                "without a GPU set use_cpu: true."
            )

    def _check_choices(self) -> None:
        for option in fields(self):
            choices = option.metadata.get("choices")
            value = getattr(self, option.name)
            if choices and option.name in ToRLConfig.__annotations__ and value not in [*choices, option.default]:
                raise UserError(f"{option.name} is {value!r}: choose one of {', '.join(choices)}.")

    def _check_refused(self) -> None:
        for name, (accepted, remedy) in REFUSED.items():
            value = getattr(self, name)
            if value != accepted and value is not None:
                raise UserError(f"{name} is {value!r}, which has no effect on ToRL rollouts: {remedy}.")

    def server_urls(self) -> list[str]:
        """The vLLM servers: `vllm_server_base_url` holds one or several, separated by commas."""
        given = self.vllm_server_base_url or f"http://{self.vllm_server_host}:{self.vllm_server_port}"
        return [url.strip().rstrip("/").removesuffix("/v1") for url in given.split(",")]

    def _check_vllm(self) -> None:
        if self.vllm_mode not in ("colocate", "server"):
            raise UserError(f"vllm_mode is {self.vllm_mode!r}: choose colocate or server.")
        urls = self.server_urls()
        if len(set(urls)) < len(urls) or not all(url.startswith(("http://", "https://")) for url in urls):
            raise UserError(
                f"vllm_server_base_url is {self.vllm_server_base_url!r}: give different URLs, such as http://host:8000."
            )
        if self.vllm_enable_sleep_mode and self.use_cpu:
            raise UserError("vllm_enable_sleep_mode is true with use_cpu, where vLLM cannot sleep: set it to false.")
        if self.vllm_tensor_parallel_size > 1 and self.vllm_mode == "colocate":
            raise UserError(
                f"vllm_tensor_parallel_size is {self.vllm_tensor_parallel_size} with vllm_mode: colocate, whose ranks "
                "generate different numbers of turns: set it to 1, or use vllm_mode: server with a larger server."
            )
        if self.generation_dtype:
            raise UserError(f"generation_dtype is {self.generation_dtype!r}, which vLLM ignores: remove it.")
        changed = self.top_p < 1 or self.top_k or self.min_p or self.repetition_penalty != 1
        if changed and self.vllm_importance_sampling_correction:
            logger.warning(
                "vLLM samples with top_p %s, top_k %s, min_p %s and repetition_penalty %s, of which the trainer knows "
                "nothing: the ratios of vllm_importance_sampling_correction are biased.",
                *(self.top_p, self.top_k, self.min_p, self.repetition_penalty),
            )

    def _check_ranges(self) -> None:
        for name, minimum in (
            ("max_tool_calls", 0),
            ("max_observation_chars", 16),
            ("interpreter_retries", 0),
            ("max_interpreter_failures", 0.0),
            ("grading_workers", 1),
            ("eval_temperature", 0.0),
            ("save_rollouts_every", 1),
            ("refill_limit", 0.0),
            ("overlong_penalty_tokens", 0),
            ("resample_failures", 0),
            ("max_completion_length", 1),
        ):
            value = getattr(self, name)
            if not isinstance(value, (int, float)) or not minimum <= value < math.inf:
                raise UserError(f"{name} is {value!r}: give a number of at least {minimum}.")
            if isinstance(minimum, int) and value != int(value):
                raise UserError(f"{name} is {value!r}: give a whole number.")
        for name in ("stop_at_grad_norm", "hang_timeout"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, (int, float)) and value > 0):
                raise UserError(f"{name} is {value!r}: give a number above 0, or remove it.")
        if self.temperature <= 0:
            raise UserError(f"temperature is {self.temperature!r}: training samples, give a value above 0.")
        cycle = self.generation_cycle
        every = self.save_steps if self.save_steps >= 1 else math.ceil(self.save_steps * max(self.max_steps, 0))
        if self.save_strategy == "steps" and every * self.gradient_accumulation_steps % cycle:
            raise UserError(
                f"save_steps is {self.save_steps}, which cuts a generation cycle of {cycle} micro-steps, so that a "
                f"resumed run would differ: make save_steps x gradient_accumulation_steps a multiple of {cycle}."
            )
