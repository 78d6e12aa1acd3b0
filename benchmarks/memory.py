"""The memory estimate of torl_doctor.memory beside what training on a CPU takes.

    python benchmarks/memory.py [--cases NAME ...]      results of the cases replace those in results/memory.json

Each case trains two steps of a random model in a process of its own, by the transformers engine, every rollout at its
full length (random models do not end). Measured is the highest resident memory (VmHWM) less that after all imports,
once as it is, and once with an allocator that gives blocks back at once (glibc's MALLOC_MMAP_THRESHOLD_), which is
what the tensors take, without a "heap".
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from machine import machine_facts

from torl_trl.run_folder import write_atomically

RESULTS = Path(__file__).parent / "results" / "memory.json"
TOKENIZER = Path(__file__).parents[1] / "recipes" / "tiny" / "base"

WIDE = {"hidden_size": 768, "num_hidden_layers": 12, "intermediate_size": 3072, "num_attention_heads": 12}
DEEP = {"hidden_size": 576, "num_hidden_layers": 30, "intermediate_size": 1536, "num_attention_heads": 9}
MIDDLE = {"hidden_size": 640, "num_hidden_layers": 20, "intermediate_size": 1920, "num_attention_heads": 10}
FLAT = {"hidden_size": 512, "num_hidden_layers": 12, "intermediate_size": 2048, "num_attention_heads": 8}
SHAPES: dict[str, dict[str, Any]] = {
    "wide, 32k": WIDE | {"vocab_size": 32_000, "num_key_value_heads": 4},
    "deep, 49k": DEEP | {"vocab_size": 49_152, "num_key_value_heads": 3},
    "flat, 152k": FLAT | {"vocab_size": 151_936, "num_key_value_heads": 2},
    "middle, 64k": MIDDLE | {"vocab_size": 64_000, "num_key_value_heads": 2},
}
LORA = {"use_peft": True, "dtype": "bfloat16", "lora_r": 32, "lora_dropout": 0.0}
LORA["lora_target_modules"] = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]

GIVES_BACK = {"MALLOC_MMAP_THRESHOLD_": "131072"}
"""The environment of an allocator that returns blocks of 128 kB or more to the system at once."""


def _case(shape: str, *, lora: bool = False, checkpointing: bool = False, **options: Any) -> dict[str, Any]:
    sizes = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 2, "max_completion_length": 160}
    return {"shape": shape, "lora": lora, "gradient_checkpointing": checkpointing} | sizes | options


CASES = {
    "full, wide": _case("wide, 32k"),
    "full, wide, checkpointing": _case("wide, 32k", checkpointing=True),
    "full, wide, one micro-batch": _case("wide, 32k", gradient_accumulation_steps=1),
    "full, deep": _case("deep, 49k"),
    "full, deep, checkpointing": _case("deep, 49k", checkpointing=True),
    "full, flat": _case("flat, 152k"),
    "full, flat, checkpointing, short": _case("flat, 152k", checkpointing=True, max_completion_length=48),
    "LoRA, wide": _case("wide, 32k", lora=True),
    "LoRA, wide, checkpointing": _case("wide, 32k", lora=True, checkpointing=True),
    "LoRA, deep, checkpointing": _case("deep, 49k", lora=True, checkpointing=True),
    "LoRA, flat": _case("flat, 152k", lora=True),
    "full, middle, checkpointing": _case("middle, 64k", checkpointing=True),
    "LoRA, middle": _case("middle, 64k", lora=True),
}
"""The last two were measured after the factor of the heap had been fitted to the others."""


def measure(case: dict[str, Any]) -> dict[str, float]:
    """MB estimated and measured, in this process, which must have done nothing else."""
    import peft  # noqa: F401 - before the start of the count
    from datasets import Dataset
    from transformers import AutoTokenizer, Qwen2Config
    from trl import ModelConfig, get_peft_config

    from torl_doctor.memory import estimate_memory
    from torl_grading import Grader
    from torl_trl import AccuracyReward, ToRLConfig, ToRLTrainer
    from torl_trl.models import load_model

    case = dict(case)
    config = Qwen2Config(**SHAPES[case.pop("shape")], tie_word_embeddings=True, eos_token_id=0, pad_token_id=0)
    with tempfile.TemporaryDirectory() as folder:
        model_args = ModelConfig(model_name_or_path=folder, **(LORA if case.pop("lora") else {}))
        saving = (
            "from transformers import Qwen2Config, Qwen2ForCausalLM;"
            f"Qwen2ForCausalLM(Qwen2Config(**{config.to_diff_dict()!r})).save_pretrained({folder!r})"
        )
        subprocess.run([sys.executable, "-c", saving], check=True)
        args = ToRLConfig(
            output_dir=folder,
            use_cpu=True,
            bf16=True,
            num_generations=8,
            max_tool_calls=0,
            learning_rate=2e-5,
            max_steps=2,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            **case,
        )
        prompt = "What is 1 + 1? " * 12
        tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)
        tokens = len(tokenizer(prompt)["input_ids"])
        estimate = estimate_memory(config, args, model_args, prompt_tokens=tokens)
        problem = {"prompt": prompt, "problem": "1 + 1", "solution": "2", "problem_id": "0"}
        before = resident("VmRSS")
        with Grader(num_workers=1) as grader:
            trainer = ToRLTrainer(
                model=load_model(model_args, args),
                reward_funcs=[AccuracyReward(grader)],
                interpreter=None,
                args=args,
                train_dataset=Dataset.from_list([problem] * 8),
                processing_class=tokenizer,
                peft_config=get_peft_config(model_args),
            )
            parameters = sum(weight.numel() for weight in trainer.model.parameters())
            trainer.train()
    measured = resident("VmHWM") - before
    sizes = {"measured": measured, "estimated": estimate.peak, "generation": estimate.generation} | estimate.parts
    return {"parameters": parameters} | {f"{name}_mb": round(size / 2**20) for name, size in sizes.items()}


def resident(name: str) -> int:
    """Bytes that Linux counts for this process under `name`."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:")) << 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--here", action="store_true", help="measure in this process, as JSON")
    options = parser.parse_args()
    if options.here:
        print(json.dumps(measure(CASES[options.cases[0]])))
        return
    results = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    print(f"{'MB':34} {'estimated':>10} {'measured':>10} {'ratio':>7} {'tensors':>10} {'measured':>10} {'ratio':>7}")
    for name in options.cases:
        row, tensors = (_run(name, setting) for setting in ({}, GIVES_BACK))
        row |= {"tensors_mb": row["estimated_mb"] - row["heap_mb"], "measured_tensors_mb": tensors["measured_mb"]}
        row["ratio"] = round(row["estimated_mb"] / row["measured_mb"], 3)
        row["tensors_ratio"] = round(row["tensors_mb"] / row["measured_tensors_mb"], 3)
        first = f"{row['estimated_mb']:10} {row['measured_mb']:10} {row['ratio']:7}"
        print(f"{name:34} {first} {row['tensors_mb']:10} {row['measured_tensors_mb']:10} {row['tensors_ratio']:7}")
        results |= {f"{name}/{key}": value for key, value in row.items()} | machine_facts()
        write_atomically(RESULTS, json.dumps(results, indent=1) + "\n")


def _run(name: str, setting: dict[str, str]) -> dict[str, float]:
    command = [sys.executable, __file__, "--here", "--cases", name]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=os.environ | setting)
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    main()
