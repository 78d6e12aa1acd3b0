"""What the run reads: the model and its tokenizer, the problems, the prompts that they make."""

from collections.abc import Iterator

from transformers import GenerationConfig

from torl_doctor.findings import Finding, Run
from torl_eval.benchmarks import benchmark_names, evaluation_dataset
from torl_grading import Grader
from torl_trl.data import LoadReport, load_problems
from torl_trl.models import load_config, load_tokenizer
from torl_trl.prompts import FENCE, OUTPUT_MARKER, PYTHON_FENCE, load_template, shorten

SHOWN_CHARS = 600
"""Of the prompt that is shown."""


def model(run: Run) -> Iterator[Finding]:
    model_args = run.model_args
    place = (model_args.model_name_or_path, model_args.model_revision, run.args.trust_remote_code)
    config = run.config = load_config(*place)
    run.tokenizer = load_tokenizer(*place)
    vocabulary, tokens = config.get_text_config().vocab_size, len(run.tokenizer)
    text = f"{model_args.model_name_or_path} ({config.model_type}, {vocabulary} embeddings, {tokens} tokens)"
    if tokens > vocabulary:
        yield Finding("error", text, "take the tokenizer that belongs to the model")
    else:
        yield Finding("ok", text)


def tokens(run: Run) -> Iterator[Finding]:
    tokenizer = run.tokenizer
    if tokenizer is None:
        yield Finding("warning", "not checked, there is no tokenizer", "see the line of the model")
        return
    fences = (OUTPUT_MARKER,) if run.args.tool_trigger == "output_marker" else (PYTHON_FENCE, FENCE)
    fences = fences if run.args.max_tool_calls > 0 else ()
    wrong = False
    for fence in fences:
        ids = tokenizer.encode(fence, add_special_tokens=False)
        if tokenizer.decode(ids, clean_up_tokenization_spaces=False) != fence:
            wrong = True
            yield Finding("error", f"{fence!r} does not come back from its tokens {ids}", "take another tokenizer")
        elif special := set(ids) & set(tokenizer.all_special_ids):
            wrong = True
            yield Finding("error", f"{fence!r} holds the special token {special}, which is no text", "unregister it")
    eos = tokenizer.eos_token_id
    stops = _generation_eos(run)
    names = f"EOS {tokenizer.eos_token!r} ({eos}), padding {tokenizer.pad_token!r} ({tokenizer.pad_token_id})"
    if stops and eos not in stops:
        wrong = True
        remedy = "a base model often lists its chat model's here: check which one ends its texts"
        yield Finding("warning", f"{names}; generation_config.json ends at {stops}, training at all of them", remedy)
    if tokenizer.pad_token_id is None:
        wrong = True
        yield Finding("warning", f"{names}: TRL pads with EOS", "set pad_token in the tokenizer to be sure")
    if not wrong:
        counts = [f"{fence!r} ({len(tokenizer.encode(fence, add_special_tokens=False))} tokens)" for fence in fences]
        yield Finding("ok", ", ".join([*counts, names]))


def data(run: Run) -> Iterator[Finding]:
    script_args, args = run.script_args, run.args
    yield from _load(run, "train", script_args.dataset_name, script_args.dataset_train_split)
    needed = args.generation_batch_size // args.num_generations
    if "train" in run.data and len(run.data["train"]) < needed:
        remedy = "lower prompts_per_step or per_device_train_batch_size, or give more problems"
        yield Finding("error", f"a step takes {needed} problems and there are {len(run.data['train'])}", remedy)


def held_out(run: Run) -> Iterator[Finding]:
    script_args = run.script_args
    if run.args.eval_strategy == "no" and not run.args.eval_on_start:
        yield Finding("ok", "the run does not evaluate")
        return
    path = script_args.eval_data()
    if (names := benchmark_names(path)) is None:
        yield from _load(run, "eval", path, script_args.dataset_test_split)
        return
    for name in names:
        template = load_template(script_args.prompt_template)
        run.data[name] = evaluation_dataset([name], template, max_problems=script_args.max_eval_problems)
        yield Finding("ok", f"{name}: {len(run.data[name])} problems")


def _load(run: Run, name: str, path: str, split: str) -> Iterator[Finding]:
    """Load problems as a training does, golds verified, into `run.data`."""
    if run.tokenizer is None:
        yield Finding("warning", "not checked, there is no tokenizer", "see the line of the model")
        return
    script_args, report = run.script_args, LoadReport(name)
    with Grader(num_workers=run.args.grading_workers) as grader:
        run.data[name] = load_problems(
            path,
            template=load_template(script_args.prompt_template),
            tokenizer=run.tokenizer,
            grader=grader,
            split=split,
            subset=script_args.dataset_config,
            problem_column=script_args.problem_column,
            answer_column=script_args.answer_column,
            max_prompt_length=script_args.max_prompt_length,
            max_problems=script_args.max_train_problems if name == "train" else script_args.max_eval_problems,
            name=name,
            report=report,
        )
    dropped = "".join(f"; dropped {count}: {reason}" for reason, count in report.dropped.items())
    yield Finding("ok", f"{name}: {report.kept} of {report.rows} problems of {path}{dropped}")


def prompts(run: Run) -> Iterator[Finding]:
    if not run.data:
        yield Finding("warning", "not checked, there are no problems", "see the line of the data")
        return
    args, tokenizer = run.args, run.tokenizer
    lengths = [len(ids) for data in run.data.values() for ids in tokenizer(list(data["prompt"]))["input_ids"]]
    first = next(iter(run.data.values()))["prompt"][0]
    text = f"the first has {lengths[0]} tokens, the longest {max(lengths)}: {shorten(first, SHOWN_CHARS)!r}"
    context = getattr(run.config.get_text_config(), "max_position_embeddings", None)
    if args.use_vllm and args.vllm_mode == "colocate":
        context = args.vllm_max_model_length or context
    longest = max(lengths) + args.max_completion_length
    if context and longest > context:
        remedy = "lower max_completion_length or max_prompt_length, or raise vllm_max_model_length"
        sizes = f"{max(lengths)} tokens, max_completion_length {args.max_completion_length} and the context {context}"
        yield Finding("error", f"the longest prompt has {sizes}", remedy)
    else:
        yield Finding("ok", text)


def _generation_eos(run: Run) -> list[int]:
    """The ids at which the model's generation configuration stops; none where there is none."""
    try:
        ends = GenerationConfig.from_pretrained(run.model_args.model_name_or_path).eos_token_id
    except OSError:
        ends = run.config.eos_token_id
    return [ends] if isinstance(ends, int) else list(ends or [])
