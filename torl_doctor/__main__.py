"""The command: every check in order, a line each, and an exit code.

    python -m torl_trl.doctor --config X.yaml [--key value ...] [--json]

Exit code 0: no error; 1: an error; 2: the options cannot be read, or are refused.
"""

import json
import logging
import sys
from dataclasses import asdict
from pathlib import Path

from torl_doctor import inputs, machine, services, steps
from torl_doctor.findings import Check, Finding, examine
from torl_doctor.preflight import look_at
from torl_trl.command_line import parse_arguments
from torl_trl.errors import UserError

RECIPES = Path(__file__).parents[1] / "recipes"
CHECKS: dict[str, Check] = {
    "versions": machine.versions,
    "devices": machine.devices,
    "batch": steps.batch,
    "model": inputs.model,
    "tokens": inputs.tokens,
    "data": inputs.data,
    "held-out data": inputs.held_out,
    "prompts": inputs.prompts,
    "memory": machine.memory,
    "disk": machine.disk,
    "interpreter": services.interpreter,
    "hub": services.hub,
    "vllm": services.vllm,
    "resume": steps.resume,
}
"""In this order: later ones use what earlier ones loaded."""
NO_GPU = "to look a GPU's run over elsewhere add --use_cpu true --vllm_enable_sleep_mode false"


def main(arguments: list[str]) -> int:
    """Print the findings, and return the exit code."""
    logging.basicConfig(format="%(message)s", stream=sys.stderr)
    logging.getLogger("torl_trl").setLevel(logging.ERROR)  # what it would say stands in the findings
    as_json = "--json" in arguments
    findings: list[Finding] = []
    try:
        run = look_at(*parse_arguments([word for word in arguments if word != "--json"], RECIPES))
    except UserError as error:
        findings.append(
            Finding("error", str(error).removesuffix("."), NO_GPU if "use_cpu" in str(error) else "", "options")
        )
        code = 2
    else:
        for finding in examine(run, CHECKS):
            findings.append(finding)
            if not as_json:
                sys.stdout.write(f"{finding}\n")
                sys.stdout.flush()
        code = int(any(finding.level == "error" for finding in findings))
    if as_json:
        sys.stdout.write(json.dumps([asdict(finding) for finding in findings], indent=1) + "\n")
    elif code == 2:
        sys.stdout.write(f"{findings[0]}\n")
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
