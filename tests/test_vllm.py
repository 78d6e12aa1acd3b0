"""The vLLM engine in this process, for real: the tiny recipe's model on vLLM for CPUs, in float32."""

import itertools
import random
import time
from types import SimpleNamespace

import pytest
import torch
from toys import FakeInterpreter, ok
from transformers import AutoModelForCausalLM, AutoTokenizer

from torl_interpreters.base import ExecutionResult, ExecutionStatus, InterpreterUnavailable
from torl_trl.data import read_rows
from torl_trl.engines.base import EngineError, Sampling, TurnRequest
from torl_trl.engines.transformers import TransformersEngine
from torl_trl.interpreters import get_interpreter
from torl_trl.progress import RolloutStats
from torl_trl.prompts import load_template, render_prompt
from torl_trl.rollout import Rollout, RolloutConfig, StopReason, run_rollouts

vllm = pytest.importorskip("vllm", reason="needs vllm: make test VLLM=1 installs it")

from torl_trl.engines.vllm import CPU_OPTIONS, VLLMEngine, keep_plain_weights  # noqa: E402

pytestmark = pytest.mark.vllm

BASE = "recipes/tiny/base"
CONFIG = RolloutConfig(max_tool_calls=2, max_completion_length=192)


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(BASE)


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(BASE, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def prompts(tokenizer) -> list[list[int]]:
    problems = [row["problem"] for row in read_rows("recipes/tiny/eval.jsonl")[:40]]
    return tokenizer([render_prompt(load_template(None), problem) for problem in problems])["input_ids"]


@pytest.fixture(scope="module")
def llm():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        patch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
        keep_plain_weights()
        yield vllm.LLM(
            BASE,
            max_num_seqs=64,
            logprobs_mode="processed_logprobs",
            **CPU_OPTIONS,
        )


@pytest.fixture
def engine(llm, tokenizer) -> VLLMEngine:
    engine = VLLMEngine(llm, Sampling(), eos_token_ids=[tokenizer.eos_token_id])
    yield engine
    assert not llm.llm_engine.has_unfinished_requests()


@pytest.fixture(scope="module")
def interpreter():
    with get_interpreter("embedded", slots=2) as interpreter:
        yield interpreter


def facts(rollout: Rollout) -> tuple:
    calls = [(call.code, call.status, call.observation) for call in rollout.calls]
    return rollout.completion_ids, rollout.env_mask, calls, rollout.stop_reason


def test_greedy_rollouts_are_those_of_transformers_token_for_token(engine, model, tokenizer, prompts, interpreter):
    engine.sampling = Sampling(temperature=0.0)
    ours = run_rollouts(prompts, engine, interpreter, tokenizer, CONFIG)
    peer = TransformersEngine(model, tokenizer, engine.sampling, eos_token_ids=[tokenizer.eos_token_id])
    theirs = run_rollouts(prompts, peer, interpreter, tokenizer, CONFIG)
    assert [facts(rollout) for rollout in ours] == [facts(rollout) for rollout in theirs]
    assert sum(len(rollout.calls) for rollout in ours) > 20
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.logprobs == pytest.approx(other.logprobs, abs=5e-4)


def test_seeded_rollouts_are_the_same_in_any_batch_and_whatever_the_order_of_answers(engine, tokenizer, prompts):
    def sampled(count: int, delay_seed: int) -> list[Rollout]:
        delays = random.Random(delay_seed)

        def answer(code: str) -> ExecutionResult:
            time.sleep(delays.random() / 20)
            return ok(str(len(code)))

        with FakeInterpreter(answer) as interpreter:
            return run_rollouts(prompts[:count], engine, interpreter, tokenizer, CONFIG, seed=7)

    first, second, alone = sampled(40, 1), sampled(40, 2), sampled(3, 3)
    assert [facts(rollout) for rollout in first] == [facts(rollout) for rollout in second]
    assert [facts(rollout) for rollout in first[:3]] == [facts(rollout) for rollout in alone]
    assert sum(len(rollout.calls) for rollout in first) > 10


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.7), Sampling(top_k=5), Sampling(top_p=0.8)])
def test_logprobs_are_those_of_the_distribution_that_tokens_were_drawn_from(
    sampling, engine, model, tokenizer, prompts, interpreter
):
    """The reference is float64: the trainer's own float32 is off by up to 2e-4 where two logits nearly cancel."""
    engine.sampling = sampling
    rollouts = run_rollouts(prompts, engine, interpreter, tokenizer, CONFIG, seed=3)
    double = AutoModelForCausalLM.from_pretrained(BASE, dtype=torch.float64).eval()
    errors = []
    for rollout in rollouts:
        ids = torch.tensor([rollout.prompt_ids + rollout.completion_ids])
        with torch.no_grad():
            logits = double(ids).logits[0, len(rollout.prompt_ids) - 1 : -1] / sampling.temperature
        logits = _truncated(logits, sampling)
        logprobs = logits.log_softmax(-1).gather(1, ids[0, len(rollout.prompt_ids) :, None])[:, 0].tolist()
        errors += [
            abs(expected - got)
            for expected, got, sampled in zip(logprobs, rollout.logprobs, rollout.env_mask, strict=True)
            if sampled
        ]
    assert any(len(rollout.calls) == 2 for rollout in rollouts)  # tokens after tool calls are among them
    assert max(errors) < 1e-4


def _truncated(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    if sampling.top_k:
        logits = logits.masked_fill(logits < logits.topk(sampling.top_k).values[:, -1:], -torch.inf)
    if sampling.top_p < 1:
        ordered, order = logits.sort(descending=True)
        before = ordered.softmax(-1).cumsum(-1) - ordered.softmax(-1)
        logits = logits.masked_fill(torch.zeros_like(before).scatter(1, order, before) >= sampling.top_p, -torch.inf)
    return logits


def test_a_returning_rollout_finds_its_prefix_in_the_cache(engine, tokenizer):
    stats = RolloutStats()
    prompt = [5] * 300  # two whole blocks of the CPU's 128 tokens
    with FakeInterpreter(lambda code: ok("1")) as interpreter:
        engine.add(TurnRequest(0, prompt, 4, seed=1))
        first = _turn(engine)
        engine.add(TurnRequest(0, prompt + first.token_ids, 4, seed=1))
        assert first.cached_tokens == 0 and _turn(engine).cached_tokens == 256
        run_rollouts([prompt], engine, interpreter, tokenizer, CONFIG, seed=1, stats=stats)
    assert stats.recomputed_tokens < 128 * 2


def _turn(engine: VLLMEngine):
    while not (turns := engine.step()):
        pass
    return turns[0]


def test_a_request_beyond_the_context_is_one_sentence(engine):
    with pytest.raises(EngineError, match=r"may take 1025 tokens .* context has 1024: lower max_completion_length"):
        engine.add(TurnRequest(0, [5] * 25, 1000))


def test_500_rollouts_with_failures_time_outs_and_aborts_leave_nothing_behind(llm, engine, tokenizer, prompts):
    chance = random.Random(0)

    def answer(code: str) -> ExecutionResult | Exception:
        kind = chance.random()
        if kind < 0.1:
            return InterpreterUnavailable("down")
        if kind < 0.3:
            return ExecutionResult(ExecutionStatus.TIMEOUT, "", "", 3.0)
        time.sleep(chance.random() / 100)
        return ok(f"{kind} ```output")

    class Stop(Exception):
        pass

    done: list[Rollout] = []
    config = RolloutConfig(max_tool_calls=3, max_completion_length=128, interpreter_retries=1)
    aborted = 0
    for patience in itertools.cycle([5, 20, 100, 40]):  # of batches of 60: three in four are aborted
        ended: list[Rollout] = []

        def on_finished(rollout: Rollout, ended=ended, patience=patience) -> None:
            ended.append(rollout)
            if len(ended) == patience:
                raise Stop

        batch = [chance.choice(prompts) for _ in range(60)]
        try:
            with FakeInterpreter(answer) as interpreter:
                run_rollouts(batch, engine, interpreter, tokenizer, config, seed=len(done), on_finished=on_finished)
        except Stop:
            aborted += 1
            assert not llm.llm_engine.has_unfinished_requests()
        for rollout in ended:  # `run_rollouts` has checked the invariants of each
            assert rollout.prompt_ids == batch[rollout.index]
            text = tokenizer.decode(rollout.completion_ids)
            assert text.removesuffix(tokenizer.eos_token) == rollout.completion
        done += ended
        if len(done) >= 500:
            break
    reasons = {rollout.stop_reason for rollout in done}
    assert aborted > 8 and reasons >= {StopReason.EOS, StopReason.LENGTH, StopReason.INTERPRETER_FAILED}


def test_grading_runs_while_others_still_generate(engine, tokenizer, prompts, interpreter):
    """A slow grader in another thread costs the rollouts nothing, since `on_finished` only hands over."""
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(40) as graders:
        graded: list[float] = []
        pending = []

        def grade() -> None:
            time.sleep(0.05)
            graded.append(time.perf_counter())

        run_rollouts(
            prompts,
            engine,
            interpreter,
            tokenizer,
            CONFIG,
            seed=1,
            on_finished=lambda rollout: pending.append(graders.submit(grade)),
        )
        ended = time.perf_counter()
        for future in pending:
            future.result()
    assert len(graded) == 40
    assert sum(moment < ended for moment in graded) > 10


def test_sleeping_vllm_is_woken_once_for_a_phase_and_gets_its_weights_again():
    """vLLM for CPUs cannot sleep: the order of calls is checked on a stand-in of TRL's object."""
    from torl_trl.generation import ColocatedVLLM

    calls: list[str] = []
    engine = SimpleNamespace(model_config=SimpleNamespace(max_model_len=512))
    llm = SimpleNamespace(
        llm_engine=engine,
        wake_up=lambda tags: calls.append(f"wake {tags[0]}"),
        sleep=lambda level: calls.append(f"sleep {level}"),
    )
    trl = SimpleNamespace(llm=llm, enable_sleep_mode=True, _llm_weights_sleeping=False)

    def sync_weights() -> None:
        calls.append("push")
        trl._llm_weights_sleeping = False

    trl.sync_weights = sync_weights
    generation = ColocatedVLLM(
        SimpleNamespace(vllm_generation=trl, eos_token_ids=[0], train_dataset=None, eval_dataset=None)
    )
    with generation.engine(Sampling()):  # TRL has pushed the weights of this step
        calls.append("rollouts")
    with pytest.raises(RuntimeError), generation.engine(Sampling()):  # an evaluation in the same step, which fails
        calls.append("rollouts")
        raise RuntimeError
    phase = ["wake kv_cache", "rollouts", "sleep 2"]
    assert calls == [*phase, "push", *phase] and trl._llm_weights_sleeping


def served(**options):
    from torl_trl.config import ToRLConfig

    return ToRLConfig(use_cpu=True, bf16=False, num_generations=8, use_vllm=True, vllm_mode="server", **options)


def test_a_server_that_nobody_started_is_one_sentence():
    from torl_trl.generation import vllm_for_trl

    args = served(vllm_server_base_url="http://127.0.0.1:9", vllm_server_timeout=0.0)
    words = r"^No vLLM server answers at http://127.0.0.1:9 .*: start it with"
    with pytest.raises(EngineError, match=words), vllm_for_trl(args):
        raise AssertionError


def test_what_trl_misses_for_a_weight_push_is_one_sentence(monkeypatch):
    from torl_trl import generation
    from torl_trl.errors import UserError

    monkeypatch.setattr(generation, "wait_for_server", lambda url, seconds: None)
    args = served(vllm_server_base_url="http://a:1,http://b:2")
    words = r"Weights cannot be pushed to the server\. The server has no weight-transfer"
    with pytest.raises(UserError, match=words), generation.vllm_for_trl(args):
        assert args.vllm_server_base_url == "http://a:1"
        raise RuntimeError("The server has no weight-transfer engine.")
    assert args.vllm_server_base_url == "http://a:1,http://b:2"


def test_a_server_that_is_gone_when_weights_come_is_one_sentence(monkeypatch):
    import requests

    from torl_trl import generation

    def dead() -> None:
        raise requests.exceptions.ConnectionError("refused")

    trl = SimpleNamespace(vllm_client="client", sync_weights=dead)
    generation._push_to_all(trl, ["http://127.0.0.1:9"], SimpleNamespace(is_main_process=True))
    with pytest.raises(EngineError, match=r"No vLLM server answers at http://127.0.0.1:9"):
        trl.sync_weights()
    monkeypatch.setattr(generation, "check_health", lambda url: None)
    with pytest.raises(EngineError, match=r"http://127.0.0.1:9 failed while it took the weights .*refused"):
        trl.sync_weights()


def test_a_prompt_that_can_never_fit_is_found_before_training():
    from torl_trl.errors import UserError
    from torl_trl.generation import _check_context

    trainer = SimpleNamespace(
        train_dataset={"prompt": ["a", "a b c"]},
        eval_dataset=None,
        processing_class=lambda text: {"input_ids": [t.split() for t in text]},
        args=SimpleNamespace(max_completion_length=10),
    )
    _check_context(trainer, 13)
    with pytest.raises(UserError, match=r"longest prompt has 3 tokens.* vLLM's context of 12"):
        _check_context(trainer, 12)


def test_servers_are_not_asked_through_the_environment_s_proxy(monkeypatch):
    from requests.utils import should_bypass_proxies

    from torl_trl.generation import _without_proxy

    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", "other")
    monkeypatch.delenv("NO_PROXY", raising=False)
    _without_proxy(["http://gen:8000", "http://gen:8001", "http://more:8000/prefix"])
    asked = [f"http://{host}:8000/health" for host in ("gen", "more", "other", "outside")]
    assert [bool(should_bypass_proxies(url, no_proxy=None)) for url in asked] == [True, True, True, False]


def test_the_client_that_pushes_weights_sends_the_servers_key(monkeypatch):
    from torl_trl.generation import PushClient

    sent = []
    client = object.__new__(PushClient)
    client.session = SimpleNamespace(
        get=lambda url, **options: sent.append(options) or SimpleNamespace(status_code=200, json=dict)
    )
    client._get("http://gen:8000/v1/models")
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    client._get("http://gen:8000/v1/models")
    assert [options["headers"] for options in sent] == [{}, {"Authorization": "Bearer secret"}]
