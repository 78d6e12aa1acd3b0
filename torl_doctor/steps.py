"""The arithmetic of the run's steps, and where a resume would go on."""

from collections.abc import Iterator
from pathlib import Path

from torl_doctor.findings import Finding, Run
from torl_trl.batch import accumulation_steps
from torl_trl.checkpoints import is_whole, last_whole_checkpoint


def batch(run: Run) -> Iterator[Finding]:
    args = run.args
    per_device, generations = args.per_device_train_batch_size, args.num_generations
    accumulation = args.gradient_accumulation_steps
    prompts = args.prompts_per_step
    if prompts is not None:
        accumulation = accumulation_steps(prompts, generations, per_device, run.processes)
    else:
        prompts = run.processes * per_device * accumulation / generations
    text = (
        f"a step is {prompts:g} prompts x {generations} rollouts = {run.processes} (processes) x {per_device} "
        f"(per device) x {accumulation} (gradient accumulation); {args.max_steps} steps"
    )
    if prompts != int(prompts):
        remedy = "set prompts_per_step, from which accumulation follows"
        yield Finding("error", f"{text}: a group is cut", remedy)
    else:
        yield Finding("ok", text)


def resume(run: Run) -> Iterator[Finding]:
    args, folder = run.args, Path(run.args.output_dir)
    chosen, last = args.resume_from_checkpoint, last_whole_checkpoint(folder)
    broken = [path.name for path in sorted(folder.glob("checkpoint-*")) if not is_whole(path)]
    if broken:
        text = f"{', '.join(broken)} cannot be resumed from (half written, or saved with save_only_model)"
        yield Finding("warning", text, "remove what a killed run left")
    every = f"a save every {args.save_steps:g} steps, at the end of a generation cycle"
    if args.save_strategy != "steps":
        every = f"save_strategy is {args.save_strategy!s}"
    if chosen:
        states = len(list(Path(chosen).glob("rng_state*.pth")))
        if states != run.processes:
            text = f"goes on from {chosen}, which {states} processes wrote and {run.processes} resume"
            yield Finding("warning", text, "the same number ends with the same weights")
        else:
            yield Finding("ok", f"goes on from {chosen}; {every}")
    elif last:
        text = f"starts anew, though {last} is there, and writes over it"
        yield Finding("warning", text, "set resume_from_checkpoint: true, or another output_dir")
    elif args.save_strategy == "no":
        yield Finding("warning", "nothing is saved, save_strategy is no", "set save_strategy: steps and save_steps")
    else:
        yield Finding("ok", f"starts anew; {every}")
