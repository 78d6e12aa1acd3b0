"""Train a model with ToRL.

    accelerate launch recipes/grpo_torl.py --config tiny.yaml [--key value ...]

The YAML is found in the working directory or beside this script; every key can be overridden. The run's folder
(`output_dir`) gets config.yaml, metrics.jsonl, rollouts/, curves.png, report.html and the checkpoints.
"""

import sys
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from console import StepLines, log_summary, remove_bars
from datasets import Dataset
from transformers import set_seed
from trl import get_peft_config

from torl_doctor import dry_run
from torl_doctor.preflight import preflight
from torl_doctor.stand_ins import stand_in
from torl_eval.benchmarks import benchmark_names, evaluation_dataset, load_benchmark
from torl_grading import Grader
from torl_guards.alarms import add_alarms
from torl_guards.beats import watched
from torl_report.card import write_card
from torl_report.curves import draw_curves
from torl_report.page import build_page
from torl_report.tracking import RolloutTables, hide_secrets, log_report
from torl_trl import AccuracyReward, ExecutabilityPenalty, OverlongPenalty, ToRLTrainer, get_interpreter
from torl_trl.batch import DERIVED
from torl_trl.command_line import parse_arguments, run_main
from torl_trl.data import load_problems, on_main_process
from torl_trl.hub import open_repo
from torl_trl.metrics_file import MetricsFile
from torl_trl.models import load_model, load_tokenizer
from torl_trl.prompts import load_template
from torl_trl.run_folder import write_config
from torl_trl.shares import interpreter_options_of_rank, share_of_rank


def main() -> None:
    recipes = Path(__file__).parent
    arguments, left_out = dry_run.prepare(sys.argv[1:], recipes)
    script_args, args, model_args = parse_arguments(arguments, recipes)
    set_seed(args.seed)
    hide_secrets(sys.argv, args)
    if script_args.dry_run:
        left_out += stand_in(script_args, args, model_args, recipes / "tiny", load_benchmark)
    run_folder = Path(args.output_dir)
    if args.push_to_hub:  # asked first: a run that cannot push would say so after hours
        args.hub_model_id = on_main_process(partial(open_repo, args))
    if args.process_index == 0:
        # TRL derives generation_batch_size, and refuses it beside steps_per_generation when it is given again.
        derived = DERIVED if args.prompts_per_step else ("generation_batch_size",)
        leave_out = (*derived, "resume_from_checkpoint", "dry_run")
        write_config(run_folder, script_args, args, model_args, leave_out=leave_out)

    with ExitStack() as resources:
        # What can fail at once comes before what takes long.
        template = load_template(script_args.prompt_template)
        interpreter = None
        if args.max_tool_calls > 0:
            options = interpreter_options_of_rank(args.interpreter, args.interpreter_options)
            interpreter = resources.enter_context(get_interpreter(args.interpreter, **options))
        grader = resources.enter_context(Grader(**share_of_rank({"num_workers": args.grading_workers}, "num_workers")))
        tokenizer = load_tokenizer(model_args.model_name_or_path, model_args.model_revision, args.trust_remote_code)

        def problems(name: str, path: str, split: str, limit: int | None) -> Dataset:
            load = partial(
                load_problems,
                path,
                name=name,
                split=split,
                subset=script_args.dataset_config,
                problem_column=script_args.problem_column,
                answer_column=script_args.answer_column,
                template=template,
                tokenizer=tokenizer,
                max_prompt_length=script_args.max_prompt_length,
                grader=grader,
                max_problems=limit,
            )
            return on_main_process(load)

        def held_out() -> Dataset:
            path, limit = script_args.eval_data(), script_args.max_eval_problems
            if names := benchmark_names(path):
                return on_main_process(partial(evaluation_dataset, names, template, max_problems=limit))
            return problems("eval", path, script_args.dataset_test_split, limit)

        train_dataset = problems(
            "train", script_args.dataset_name, script_args.dataset_train_split, script_args.max_train_problems
        )
        eval_dataset = None
        if args.eval_strategy != "no" or args.eval_on_start:
            eval_dataset = held_out()

        reward_funcs = [AccuracyReward(grader, grade_text=args.grade_text)]
        if args.executability_penalty:
            reward_funcs.append(ExecutabilityPenalty(scope=args.penalty_scope))
        if args.overlong_penalty_tokens:
            reward_funcs.append(OverlongPenalty(args.overlong_penalty_tokens, args.max_completion_length))

        trackers = [RolloutTables(run_folder)] if "wandb" in args.report_to else []
        preflight(script_args, args, model_args)
        model = load_model(model_args, args)
        args.model_init_kwargs = None  # used; TRL refuses them beside a model
        trainer = ToRLTrainer(
            model=model,
            reward_funcs=reward_funcs,
            interpreter=interpreter,
            args=args,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=tokenizer,
            callbacks=[MetricsFile(run_folder), StepLines(), *trackers],
            peft_config=get_peft_config(model_args),
            model_card=partial(write_card, run_folder),
        )
        remove_bars(trainer)
        add_alarms(trainer)

        with watched(trainer, interpreter):
            trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)

        if trainer.is_world_process_zero():
            draw_curves(run_folder)
        if args.push_to_hub:
            trainer.push_to_hub()
        if trainer.is_world_process_zero():
            page = build_page([run_folder])
            if trackers:
                log_report(page)
            log_summary(run_folder)
        if script_args.dry_run:
            dry_run.log_end(args, model_args, left_out)


if __name__ == "__main__":
    run_main(main)
