"""One page that shows runs, or their saved rollouts graded or executed again; no model, no GPU.

    python recipes/report.py runs/tiny                       writes runs/tiny/report.html
    python recipes/report.py runs/a runs/b --output ab.html  compares runs
    python recipes/report.py runs/tiny --regrade full        which verdicts change? regrade.json
    python recipes/report.py runs/tiny --reexecute --interpreter sandbox_fusion    which results? reexecute.json

A run is the output folder of a training, finished or not, or of an evaluation. The page is a single file that works
offline.
"""

import argparse
import json
import logging
import sys
from pathlib import Path
from typing import Any, get_args

import yaml

from torl_grading import Grader
from torl_report.page import build_page
from torl_report.replay import Replayed, reexecute, regrade, replay_table, write_replay
from torl_trl.command_line import CommandParser, run_main
from torl_trl.errors import UserError
from torl_trl.interpreters import get_interpreter
from torl_trl.rewards import GradeText
from torl_trl.run_folder import CONFIG_NAME

logger = logging.getLogger("torl_trl.report")


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    """Parse the command line. Raises `UserError`."""
    parser = CommandParser(description=__doc__)
    add = parser.add_argument
    add("runs", nargs="+", type=Path, metavar="RUN_FOLDER")
    add("--output", type=Path, help="of the page; default: report.html in the first folder")
    add(
        "--regrade",
        nargs="?",
        const="own",
        choices=get_args(GradeText),
        help="grade again: the model's own text, or all",
    )
    add("--reexecute", action="store_true", help="execute the programs again")
    add("--interpreter", help="default: the run's")
    add("--interpreter_options", type=json.loads, metavar="JSON", help="default: the run's")
    add("--grading_workers", type=int, default=2)
    args = parser.parse_args(arguments)
    for run in args.runs:
        if not run.is_dir():
            raise UserError(f"{str(run)!r} is no folder: give the output_dir of a run.")
    if (args.regrade or args.reexecute) and (len(args.runs) > 1 or args.output):
        raise UserError("--regrade and --reexecute take one RUN_FOLDER and no --output: their result goes there.")
    return args


def main() -> None:
    args = parse_arguments(sys.argv[1:])
    if args.regrade:
        with Grader(num_workers=args.grading_workers) as grader:
            _show(regrade(args.runs[0], grade_text=args.regrade, grader=grader), args.runs[0])
    if args.reexecute:
        settings = run_settings(args.runs[0])
        name = args.interpreter or settings.get("interpreter") or "embedded"
        given = args.interpreter_options
        if given is None:
            given = settings.get("interpreter_options") if args.interpreter is None else None
        with get_interpreter(name, **(given or {})) as interpreter:
            chars = settings["max_observation_chars"]
            _show(reexecute(args.runs[0], interpreter=interpreter, max_observation_chars=chars), args.runs[0])
    if not args.regrade and not args.reexecute:
        logger.info("%s", build_page(args.runs, args.output))


def run_settings(run: Path) -> dict[str, Any]:
    """The configuration of a training or of an evaluation. Raises `UserError` where there is none."""
    for name in (CONFIG_NAME, "settings.json"):
        if (run / name).exists():
            return yaml.safe_load((run / name).read_text(encoding="utf-8"))  # JSON is YAML
    raise UserError(f"{str(run)!r} has no {CONFIG_NAME} and no settings.json: give the output_dir of a run.")


def _show(result: Replayed, run: Path) -> None:
    path = write_replay(result, run)
    logger.info("%s\n%s", replay_table(result, path), path)


if __name__ == "__main__":
    run_main(main)
