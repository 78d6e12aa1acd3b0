"""A training step of Qwen2.5-Math-1.5B on one GPU, measured: where its time and memory go.

    python benchmarks/gpu_step.py [--minutes 8] [--parts full lora versus] [--engine vllm]
    python benchmarks/gpu_step.py --cpu --results gpu_step.json       the same on tiny sizes, in a minute or two

Needs no network, no weights and no data: the model has the exact architecture with random weights, and the tiny
recipe's tokenizer, its vocabulary padded to Qwen's. Random weights never write code, so rollouts are written in
advance with lengths of ToRL's shape (trainer_scripted.py): as many tokens are decoded for real, the script's ids take
their place, their programs run in the embedded interpreter, and the answers are graded. The batch is smaller than a
recipe's: 32 rollouts, 8 of each of 4 prompts, which have 400 tokens.

Parts, each in a process of its own, which has what is left of the minutes:

- full: ToRLTrainer, all weights in float32 with bfloat16 autocast, gradient checkpointing, 3,072 tokens.
- lora: qwen1.5b_lora.yaml's adapters on bfloat16 weights, at its 2,048 tokens.
- versus: ToRLTrainer beside plain GRPOTrainer, scripted as in trainer.py, all weights of both, 3,072 tokens.

The engine is vLLM in this process where it is installed, as in the recipes, else transformers. Tokens of the first
turn are computed again after the call, also by vLLM, whose cache holds those that it sampled. Peak memory is what
torch allocated in the step.

In full and lora the first step warms up, the second updates with rollouts that are ready, and the third decodes them,
too. `other` is what the split leaves: records, checks, the push of weights to vLLM. Results are written as soon
as they are there.
"""

import argparse
import importlib.util
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from machine import machine_facts
from trainer import compare, make_trainers
from trainer_scripted import TOKENIZER, ScriptedGeneration, Work
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PrinterCallback,
    Qwen2Config,
    TrainerCallback,
)

from torl_grading import Grader
from torl_interpreters.base import Interpreter
from torl_trl import AccuracyReward, ToRLConfig, ToRLTrainer, get_interpreter
from torl_trl.run_folder import write_atomically

RESULTS = Path(__file__).parent / "results" / "gpu_step.json"
PARTS = ("full", "lora", "versus")
ENGINES = ("vllm", "transformers")
STEPS = 3
VERSUS_TURNS = 3

Write = Callable[[dict[str, Any]], None]

# Hugging Face, Qwen/Qwen2.5-Math-1.5B, config.json: 1.54 billion parameters.
QWEN_1_5B: dict[str, Any] = {
    "vocab_size": 151_936,
    "hidden_size": 1536,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "intermediate_size": 8960,
    "max_position_embeddings": 4096,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
    "rms_norm_eps": 1e-6,
    "initializer_range": 0.02,
    "tie_word_embeddings": True,
    "eos_token_id": 0,  # as the tiny recipe's tokenizer has it
    "pad_token_id": 0,
}
TINY = {
    "vocab_size": 1024,
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 256,
}
LORA = {"r": 32, "lora_alpha": 64, "lora_dropout": 0.0, "task_type": "CAUSAL_LM"}
LORA_LAYERS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


class Sizes:
    """What is measured: the real sizes, or tiny ones on a CPU."""

    def __init__(self, cpu: bool, engine: str):
        self.device, self.engine = "cpu" if cpu else "cuda", engine
        self.config = Qwen2Config(**QWEN_1_5B)
        self.work = Work(4, 8, 4, prompt_tokens=400, mean_tokens=800.0, completion_tokens=3072)
        self.lora_work = replace(self.work, completion_tokens=2048)
        self.options: dict[str, Any] = {"bf16": True, "gradient_checkpointing": True}
        if cpu:
            self.config = Qwen2Config(**QWEN_1_5B | TINY)
            self.work = self.lora_work = Work(2, 4, 4, prompt_tokens=40, mean_tokens=70.0, completion_tokens=160)
            self.options["use_cpu"] = True

    def model(self, dtype: torch.dtype) -> PreTrainedModel:
        torch.manual_seed(0)
        with torch.device(self.device):
            return AutoModelForCausalLM.from_config(self.config, dtype=dtype)


class StepReport(TrainerCallback):
    """Tells `written` where a step's seconds and memory went."""

    def __init__(self, written: Callable[[int, dict[str, float]], None]):
        self._written = written
        self.trainer: ToRLTrainer

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer.phase.generation.decodes = state.global_step == STEPS - 1
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        self._started, self._scored = time.perf_counter(), self.trainer._scoring_seconds

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self._seconds = time.perf_counter() - self._started
        self._update = self._seconds - (self.trainer._scoring_seconds - self._scored)
        self._peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9  # of the process, so far
        if torch.cuda.is_available():
            self._peak = torch.cuda.max_memory_allocated() / 1e9

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **kwargs: Any) -> None:
        if "time/generating" not in logs:  # the summary of the run
            return
        work = self.trainer.args
        generating, tools, grading = (logs[f"time/{name}"] for name in ("generating", "waiting", "grading"))
        found = {
            "seconds": self._seconds,
            "generation_seconds": generating,
            "tools_seconds": tools,
            "grading_seconds": grading,
            "update_seconds": self._update,
            "other_seconds": self._seconds - generating - tools - grading - self._update,
            "programs_seconds": logs["time/executing"],
            "peak_memory_gb": self._peak,
        }
        tokens = logs["completions/mean_length"] * work.generation_batch_size
        found |= {"sampled_tokens": tokens, "sampled_tokens_per_second": tokens / self._seconds}
        if self.trainer.phase.generation.decodes:
            found["generated_tokens_per_second"] = tokens / generating
        self._written(state.global_step, found)


def train(part: str, sizes: Sizes, folder: Path, interpreter: Interpreter, grader: Grader, write: Write) -> None:
    """Three steps of ToRLTrainer: the first warms up, the last decodes."""
    tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)
    work, options, peft_config = sizes.work, dict(sizes.options), None
    model = sizes.model(torch.bfloat16 if part == "lora" else torch.float32)
    if part == "lora":
        from peft import LoraConfig

        work, peft_config = sizes.lora_work, LoraConfig(target_modules=LORA_LAYERS, **LORA)
    if sizes.engine == "vllm":
        model.name_or_path = str(folder / "model")
        sizes.model(torch.bfloat16).save_pretrained(model.name_or_path)  # where vLLM loads it from
        tokenizer.save_pretrained(model.name_or_path)
        options |= {"use_vllm": True, "vllm_mode": "colocate", "vllm_enable_sleep_mode": sizes.device == "cuda"}
        options |= {"vllm_gpu_memory_utilization": 0.3}
        options |= {"vllm_max_model_length": work.prompt_tokens + work.completion_tokens + 16}
    elif part == "full":
        options["generation_dtype"] = "bfloat16"

    def written(step: int, found: dict[str, float]) -> None:
        if step > 1:
            name = "decoded" if step == STEPS else "scripted"
            write({f"{part}/{name}/{what}": value for what, value in found.items()})

    report = StepReport(written)
    report.trainer = trainer = ToRLTrainer(
        model,
        [AccuracyReward(grader)],
        interpreter,
        ToRLConfig(**work.options(folder, max_steps=STEPS, **options)),
        work.problems(tokenizer),
        processing_class=tokenizer,
        callbacks=[report],
        peft_config=peft_config,
    )
    trainer.remove_callback(PrinterCallback)
    trainer.phase.generation = ScriptedGeneration(trainer.phase.generation, work.scripts(tokenizer), decodes=False)
    facts = {"engine": sizes.engine, "rollouts": work.rollouts, "completion_tokens": work.completion_tokens}
    write({f"{part}/{what}": fact for what, fact in facts.items()})
    trainer.train()


def measure(part: str, sizes: Sizes, write: Write) -> None:
    with tempfile.TemporaryDirectory() as folder, Grader(num_workers=2) as grader:
        if part != "versus":
            with get_interpreter("embedded") as interpreter:
                train(part, sizes, Path(folder), interpreter, grader, write)
            return
        make_model = partial(sizes.model, torch.float32)
        trainers = make_trainers(make_model, sizes.work, Path(folder), grader, None, max_steps=3, **sizes.options)
        found = compare(trainers, VERSUS_TURNS, sizes.work.rollouts)
        write({f"versus/{name}": value for name, value in found.items()})


def write_to(path: Path, found: dict[str, Any]) -> None:
    """Add to the results, so that nothing is lost when a later part fails."""
    known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    found = {name: float(f"{value:.5g}") if isinstance(value, float) else value for name, value in found.items()}
    write_atomically(path, json.dumps(known | found, indent=1) + "\n")
    sys.stdout.write("".join(f"{name:45} {value}\n" for name, value in found.items()))
    sys.stdout.flush()


def forget(path: Path, parts: Sequence[str]) -> None:
    """Drop what is known of `parts`; the others stay."""
    known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    kept = {name: value for name, value in known.items() if name.split("/")[0] not in parts}
    write_atomically(path, json.dumps(kept, indent=1) + "\n")


def run_parts(parts: Sequence[str], arguments: Sequence[str], minutes: float, write: Write) -> None:
    """Run each part in a process of its own until the time is up."""
    deadline = time.monotonic() + 60 * minutes
    for part in parts:
        started, state = time.monotonic(), "done"
        if started >= deadline:
            write({f"{part}/state": "not measured: the time was up"})
            continue
        command = [sys.executable, __file__, "--part", part, *arguments]
        try:
            subprocess.run(command, timeout=deadline - started, check=True)
        except subprocess.TimeoutExpired:
            state = "stopped: the time was up"
        except subprocess.CalledProcessError as error:
            state = f"failed: exit code {error.returncode}"
        write({f"{part}/state": state, f"{part}/part_seconds": time.monotonic() - started})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=8.0, help="for all parts together")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    engine = ENGINES[importlib.util.find_spec("vllm") is None]
    parser.add_argument("--engine", choices=ENGINES, default=engine)
    parser.add_argument("--cpu", action="store_true", help="tiny sizes on the CPU; needs --results")
    parser.add_argument("--results", type=Path, help="default: benchmarks/results/gpu_step.json")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)  # this process is the part's own
    options = parser.parse_args()
    if not options.cpu and not torch.cuda.is_available():
        parser.error("there is no GPU here: give --cpu to run tiny sizes")
    if options.cpu and not options.results:
        parser.error("--cpu needs --results: a CPU's numbers are not those of this benchmark")
    path = options.results or RESULTS
    write = partial(write_to, path)
    if options.part:
        measure(options.part, Sizes(options.cpu, options.engine), write)
        return
    forget(path, options.parts)
    gpu = "none, tiny sizes on the CPU" if options.cpu else torch.cuda.get_device_name()
    write(machine_facts() | {"machine/gpu": gpu})
    arguments = ["--results", str(path), "--engine", options.engine, *(["--cpu"] if options.cpu else [])]
    run_parts(options.parts, arguments, options.minutes, write)


if __name__ == "__main__":
    main()
