"""The model card of a run: README.md in its folder, and so of its repository on the Hub.

    write_card(Path("runs/tiny"))

Everything in it comes from the run's folder and this machine; what is not there is left out. The licence is the user's
to choose: the card names none.
"""

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from torl_eval.tables import markdown_section
from torl_report.facts import EVALUATION_NAME, PACKAGES, machine_facts, run_facts
from torl_report.summary import summarize_run
from torl_trl.prompts import load_template
from torl_trl.run_folder import CONFIG_NAME, CURVES_NAME, write_atomically

CARD_NAME = "README.md"
PAPER_URL = "https://arxiv.org/abs/2503.23383"

Options = Mapping[str, Any]

_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
_TRAINED_WITH = (
    *("max_steps", "num_train_epochs", "prompts_per_step", "num_generations", "per_device_train_batch_size"),
    *("gradient_accumulation_steps", "learning_rate", "lr_scheduler_type", "optim", "loss_type", "beta", "epsilon"),
    *("scale_rewards", "temperature", "max_tool_calls", "max_completion_length", "max_prompt_length"),
    *("max_observation_chars", "interpreter", "tool_trigger", "executability_penalty", "dtype", "bf16", "fp16"),
    *("use_peft", "lora_r", "lora_alpha", "use_vllm", "seed"),
)
"""Options that say what was trained; config.yaml has all."""
_LORA = ("lora_r", "lora_alpha")
_USE = """```python
from transformers import AutoModelForCausalLM, AutoTokenizer

from torl_trl import RolloutConfig, get_interpreter, run_rollouts
from torl_trl.engines.base import Sampling
from torl_trl.engines.transformers import TransformersEngine

name = {name!r}
tokenizer = AutoTokenizer.from_pretrained(name)
model = AutoModelForCausalLM.from_pretrained(name, device_map="auto").eval()
template = (
{template}
)
prompt = template.replace("{{question}}", "What is the sum of all primes below 100?")
engine = TransformersEngine(model, tokenizer, Sampling(temperature=0.0), eos_token_ids=[tokenizer.eos_token_id])
config = RolloutConfig(
{limits}
)
with get_interpreter("embedded") as interpreter:  # runs the model's programs isolated, on this machine
    (rollout,) = run_rollouts([tokenizer(prompt)["input_ids"]], engine, interpreter, tokenizer, config)
print(rollout.completion)
```"""


def write_card(run_folder: Path, *, evaluation: Path | None = None) -> Path:
    """Write README.md into a run's folder and return its path. `evaluation`: an evaluation.json of another folder."""
    config = run_folder / CONFIG_NAME
    options = (yaml.safe_load(config.read_text(encoding="utf-8")) or {}) if config.exists() else {}
    evaluation = evaluation or run_folder / EVALUATION_NAME
    results = json.loads(evaluation.read_text(encoding="utf-8")) if evaluation.exists() else None
    name = options.get("hub_model_id") or str(options.get("output_dir") or run_folder.resolve().name)
    sections = [
        f"---\n{yaml.safe_dump(_metadata(options), sort_keys=False, allow_unicode=True)}---",
        f"# {name.rstrip('/').rpartition('/')[2]}",
        _introduction(options),
        "## How to use",
        "With the package torl-trl, whose loop runs the model's programs as in training:",
        _example(name, options),
        "## Training",
        _data(options, run_facts(run_folder)["card"]),
        _table(["option", "value"], ([f"`{key}`", _cell(value)] for key, value in _shown(options).items())),
        *_measured(run_folder),
        *([markdown_section(results).rstrip()] if results and results["benchmarks"] else []),
        *_made_with(),
        "## Reference",
        f"[ToRL: Scaling Tool-Integrated RL]({PAPER_URL}), Xuefeng Li, Haoyang Zou, Pengfei Liu, 2025; trained with "
        "GRPO of [TRL](https://github.com/huggingface/trl).",
    ]
    path = run_folder / CARD_NAME
    write_atomically(path, "\n\n".join(section for section in sections if section) + "\n")
    return path


def _metadata(options: Options) -> dict[str, Any]:
    """The block that the Hub reads."""
    base, data = (_hub_id(options.get(key)) for key in ("model_name_or_path", "dataset_name"))
    return {
        "library_name": "peft" if options.get("use_peft") else "transformers",
        **({"base_model": base} if base else {}),
        **({"datasets": [data]} if data else {}),
        "pipeline_tag": "text-generation",
        "tags": ["torl", "grpo", "trl", "math", "reinforcement-learning"],
    }


def _hub_id(name: Any) -> str | None:
    """The name, if it is an id on the Hub and no path or URL."""
    return name if isinstance(name, str) and _HUB_ID.fullmatch(name) and not Path(name).exists() else None


def _link(name: str, url: str) -> str:
    if "://" in name:
        return f"[{name}]({name})"
    return f"[{name}]({url}{name})" if _hub_id(name) else f"`{Path(name).name}`"  # a local path tells nobody anything


def _introduction(options: Options) -> str:
    base = options.get("model_name_or_path")
    return (
        f"{_link(base, 'https://huggingface.co/') if base else 'A base model'} trained with [ToRL]({PAPER_URL}), "
        "reinforcement learning with a Python interpreter: in the middle of a completion the model writes a program, "
        "asks for its output, and goes on with it."
    )


def _example(name: str, options: Options) -> str:
    template = load_template(options.get("prompt_template"))
    limits = ("max_tool_calls", "max_completion_length", "max_observation_chars", "tool_trigger")
    return _USE.format(
        name=name,
        template="\n".join(f"    {line!r}" for line in template.splitlines(keepends=True)),
        limits="\n".join(f"    {key}={options[key]!r}," for key in limits if key in options),
    )


def _data(options: Options, data_card: str | None) -> str:
    name = options.get("dataset_name")
    if not name:
        return ""
    lines = [f"Problems: {_link(name, 'https://huggingface.co/datasets/')}."]
    if data_card:
        body = re.sub(r"\A---\n.*?\n---\n", "", data_card, flags=re.DOTALL)
        paragraphs = (part.strip() for part in body.split("\n\n"))
        lines += [next((f"> {part}".replace("\n", "\n> ") for part in paragraphs if part and part[0] != "#"), "")]
    return "\n\n".join(lines)


def _shown(options: Options) -> dict[str, Any]:
    """Those of `_TRAINED_WITH` that were set and count."""
    hidden = set(() if options.get("use_peft") else _LORA)
    hidden |= {"num_train_epochs"} if (options.get("max_steps") or 0) > 0 else {"max_steps"}
    return {key: options[key] for key in _TRAINED_WITH if options.get(key) is not None and key not in hidden}


def _measured(run_folder: Path) -> list[str]:
    if (summary := summarize_run(run_folder)) is None:
        return []
    first, last = summary.first, summary.last
    rows = [
        [label, *(f"{line[name]:.3f}" if line.get(name) is not None else "-" for line in (first, last))]
        for name, label in ({"reward": "mean reward"} | summary.labels).items()
        if last.get(name) is not None
    ]
    what = "On held-out problems" if summary.split == "eval" else "On the problems of training, while sampling"
    table = _table([what, f"step {first['step']}", f"step {last['step']}"], rows)
    figure = f"![Learning curves]({CURVES_NAME})" if (run_folder / CURVES_NAME).exists() else ""
    return ["## Measured while training", table, figure]


def _made_with() -> list[str]:
    """The heading and the list are as TRL's cards have them, and as `torl_report.facts` reads them."""
    facts = machine_facts()
    versions = [f"- {name}: {facts[name]}" for name in ("python", *PACKAGES) if name in facts]
    return ["### Framework versions", "\n".join(versions), f"Hardware: {facts['system']}; GPUs: {facts['GPUs']}."]


def _table(head: list[str], rows: Iterable[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines) if len(lines) > 2 else ""


def _cell(value: Any) -> str:
    return str(value).replace("|", "\\|").replace("\n", " ")
