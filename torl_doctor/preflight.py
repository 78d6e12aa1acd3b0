"""The cheap checks that a training makes itself, as warnings: it goes on, and the first step shows who was right."""

import logging
import os

import torch
from trl import ModelConfig

from torl_doctor import machine
from torl_doctor.findings import Run, examine
from torl_trl.config import ToRLConfig
from torl_trl.models import load_config
from torl_trl.script_arguments import ToRLScriptArguments

logger = logging.getLogger("torl_trl.preflight")

CHECKS = {"versions": machine.versions, "devices": machine.devices, "memory": machine.memory, "disk": machine.disk}


def preflight(script_args: ToRLScriptArguments, args: ToRLConfig, model_args: ModelConfig) -> None:
    """Log what of versions, devices, memory and disk may end or slow the run. On the main process alone."""
    if args.process_index:
        return
    run = look_at(script_args, args, model_args)
    run.config = load_config(model_args.model_name_or_path, model_args.model_revision, args.trust_remote_code)
    for finding in examine(run, CHECKS):
        level = logging.DEBUG if finding.level == "ok" else logging.WARNING
        logger.log(level, "%s: %s%s", finding.check, finding.value, f": {finding.remedy}" if finding.remedy else "")


def look_at(script_args: ToRLScriptArguments, args: ToRLConfig, model_args: ModelConfig) -> Run:
    """The run with its number of processes."""
    gpus = 1 if args.use_cpu else max(1, torch.cuda.device_count())
    return Run(script_args, args, model_args, processes=int(os.environ.get("WORLD_SIZE", gpus)))
