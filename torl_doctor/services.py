"""What the run talks to: its interpreter, the Hub, vLLM servers."""

import time
from collections.abc import Iterator

from huggingface_hub import HfApi, set_client_factory
from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError

from torl_doctor.findings import Finding, Run
from torl_interpreters.base import ExecutionStatus
from torl_interpreters.e2b import PLAN_CREATIONS_PER_SECOND
from torl_trl.data import first_line
from torl_trl.engines.vllm_server import check_server
from torl_trl.hub import hub_client
from torl_trl.interpreters import Interpreter, get_interpreter

TIMEOUT_SECONDS = 2.0  # of the programs here
ANSWER_SECONDS = 90.0  # for a call, with what a service may take to start
PROGRAMS = {
    "prints": ("print(2**100)", ExecutionStatus.OK, "1267650600228229401496703205376\n"),
    "prints nothing": ("x = 1", ExecutionStatus.OK, ""),
    "fails": ("print(1)\n1 / 0", ExecutionStatus.ERROR, "1\n"),
    "never ends": ("print(1, flush=True)\nwhile True: pass", ExecutionStatus.TIMEOUT, "1\n"),
}
"""Programs that every interpreter runs alike: code, status, what it printed."""
ORDINARY = "import sympy\nx = sympy.symbols('x')\nprint(sympy.factor(x**4 - 1))"
"""What a model writes, for the speed."""
MOST_CALLS = 64
LONG_SECONDS = 60.0
"""Seconds of programs in a step from which on they hold it up."""


def interpreter(run: Run) -> Iterator[Finding]:
    args = run.args
    if args.max_tool_calls == 0:
        yield Finding("ok", "none, max_tool_calls is 0")
        return
    options = args.interpreter_options | {"timeout_seconds": TIMEOUT_SECONDS}
    with get_interpreter(args.interpreter, **options) as opened:
        tier = getattr(opened, "tier", None)
        where = f"{args.interpreter}{f', tier {tier}' if tier else ''}"
        results = {name: opened.submit(code) for name, (code, _, _) in PROGRAMS.items()}
        wrong = []
        for name, (_, status, printed) in PROGRAMS.items():
            result = results[name].result(ANSWER_SECONDS)
            if (result.status, result.stdout) != (status, printed):
                wrong.append(f"the program that {name} is {result.status} with {result.stdout[:50]!r}")
            elif name == "fails" and "ZeroDivisionError" not in result.stderr:
                wrong.append("the error of a program is not told")
        if wrong:
            yield Finding("error", f"{where}: {'; '.join(wrong)}", "mend the service, or take another interpreter")
            return
        if tier is not None and tier.level < 2:
            remedy = "install bubblewrap, or set isolation: strict in interpreter_options"
            yield Finding("warning", f"{where}: programs can read files and reach the network", remedy)
        else:
            yield Finding("ok", f"{where}: programs print, fail and are stopped as they should")
        yield _capacity(run, opened)


def _capacity(run: Run, opened: Interpreter) -> Finding:
    """How long the programs of a step take, by the speed of some ordinary ones that run together."""
    args, slots = run.args, opened.slots
    opened.submit(ORDINARY).result(ANSWER_SECONDS)
    count = min(2 * slots, MOST_CALLS)
    started = time.perf_counter()
    for future in [opened.submit(ORDINARY) for _ in range(count)]:
        future.result(ANSWER_SECONDS)
    rate = count / (time.perf_counter() - started)
    calls = int(args.generation_batch_size * args.max_tool_calls * (1 + args.refill_limit))
    seconds = calls / rate
    text = f"at most {calls} calls a step, {slots} at a time, {rate:.0f} a second here: {seconds:.0f} s a step"
    remedy = "raise slots where there are cores for them, or add servers"
    if args.interpreter == "e2b":
        creations = args.interpreter_options.get("creations_per_second", PLAN_CREATIONS_PER_SECOND)
        text += f", and {slots / creations:.0f} s until all {slots} sandboxes are created"
        remedy = "raise sandboxes and creations_per_second to what your plan allows"
    if seconds > LONG_SECONDS:
        return Finding("warning", f"{text}, which may hold up the step", remedy)
    return Finding("ok", text)


def hub(run: Run) -> Iterator[Finding]:
    if not run.args.push_to_hub:
        yield Finding("ok", "nothing is pushed, push_to_hub is false")
        return
    set_client_factory(hub_client)
    api = HfApi(token=run.args.hub_token)
    try:
        user = api.whoami()
    except LocalTokenNotFoundError:
        yield Finding("error", "there is no token", "run `hf auth login`, set HF_TOKEN, or set push_to_hub: false")
        return
    except HfHubHTTPError as error:
        yield Finding("error", f"{api.endpoint} refuses the token ({first_line(error)})", "give one that is valid")
        return
    except OSError as error:  # of the network
        yield Finding(
            "warning", f"{api.endpoint} is not reached ({first_line(error)})", "check network and HF_ENDPOINT"
        )
        return
    token = user.get("auth", {}).get("accessToken", {})
    text = f"{user['name']} at {api.endpoint}, a token that may {token.get('role', 'do unknown things')}"
    if token.get("role") == "read":
        yield Finding("error", text, "give a token that may write, or set push_to_hub: false")
    elif token.get("role") != "write":
        yield Finding("warning", text, f"make sure that it may write to {run.args.hub_model_id or 'the repository'}")
    else:
        yield Finding("ok", text)


def vllm(run: Run) -> Iterator[Finding]:
    args = run.args
    if not args.use_vllm or args.vllm_mode != "server":
        yield Finding("ok", "in the process" if args.use_vllm else "not used, use_vllm is false")
        return
    for url in args.server_urls():
        served = check_server(url)
        text = f"{url} serves {served}, with token ids and logprobs as training needs them"
        if served.rstrip("/") != run.model_args.model_name_or_path.rstrip("/"):
            remedy = f"make sure that it is {run.model_args.model_name_or_path}"
            yield Finding("warning", text, remedy)
        else:
            yield Finding("ok", text)
