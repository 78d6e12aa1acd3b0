"""The vLLM server engine: against a stand-in that misbehaves on command, and against a real vLLM server."""

import contextlib
import json
import os
import signal
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from toys import FakeInterpreter, ok
from vllm_server_process import vllm_server

from torl_interpreters.base import ExecutionResult, ExecutionStatus
from torl_trl import prompts
from torl_trl.engines import vllm_server as engine_module
from torl_trl.engines.base import EngineError, FinishedTurn, FinishReason, Sampling, TurnRequest
from torl_trl.engines.vllm_server import VLLMServerEngine, check_server
from torl_trl.rollout import Rollout, RolloutConfig, run_rollouts

SAMPLED = Sampling()
TINY = Path(__file__).resolve().parents[1] / "recipes" / "tiny"


def completion(token_ids: list[int], finish_reason="stop", stop_reason=None, cached_tokens=None) -> dict:
    """An answer of vLLM's `/v1/completions`; the logprob of a token is minus a hundredth of it."""
    details = None if cached_tokens is None else {"cached_tokens": cached_tokens}
    choice = {
        "index": 0,
        "text": "",
        "token_ids": token_ids,
        "logprobs": {"token_logprobs": [-t / 100 for t in token_ids]},
    }
    choice |= {"finish_reason": finish_reason, "stop_reason": stop_reason}
    return {"choices": [choice], "usage": {"prompt_tokens": 1, "prompt_tokens_details": details}}


def reversed_prompt(body: dict) -> dict:
    return completion(body["prompt"][::-1], "length")


def hang(body: dict) -> None:
    time.sleep(60)


class StandIn:
    """An HTTP server with vLLM's paths. `complete` turns a request's body into an answer: a dict, (status, dict), or
    None to cut the connection. `probe` answers the one token that `check_server` asks for. While `thawed` is not set,
    nothing is answered."""

    def __init__(self, complete=reversed_prompt, *, models=None, probe=None):
        self.complete = complete
        self.models = {"data": [{"id": "toy"}]} if models is None else models
        self.probe = probe or completion([0])
        self.bodies: list[dict] = []
        self.headers: dict[str, str] = {}
        self.thawed = threading.Event()
        self.thawed.set()
        self.connections: set[socket.socket] = set()
        stand_in = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def setup(self):
                super().setup()
                stand_in.connections.add(self.connection)

            def finish(self):
                stand_in.connections.discard(self.connection)
                super().finish()

            def log_message(self, *args):
                pass

            def do_GET(self):
                stand_in.thawed.wait()
                stand_in.headers = dict(self.headers)
                self.reply(200, stand_in.models if self.path == "/v1/models" else {})

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                stand_in.thawed.wait()
                if body["prompt"] == [0]:
                    return self.reply(200, stand_in.probe)
                stand_in.bodies.append(body)
                answer = stand_in.complete(body)
                if answer is None:
                    self.close_connection = True
                    return None
                return self.reply(*(answer if isinstance(answer, tuple) else (200, answer)))

            def reply(self, status, answer):
                data = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

        class Server(ThreadingHTTPServer):
            request_queue_size = 1024

            def handle_error(self, request, client_address):
                pass  # a client that has gone

        self.server = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    def kill(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thawed.set()
        self.cut_connections()

    def cut_connections(self) -> None:
        for connection in list(self.connections):
            with contextlib.suppress(OSError):  # gone meanwhile
                connection.shutdown(socket.SHUT_RDWR)

    def __enter__(self):
        return self

    def __exit__(self, *exc_info):
        self.kill()


@pytest.fixture(autouse=True)
def quick_probes(monkeypatch):
    monkeypatch.setattr(engine_module, "_PROBE_PAUSE_SECONDS", 0.2)


@pytest.fixture
def stand_in():
    with StandIn() as stand_in:
        yield stand_in


def engine_for(*servers, sampling=SAMPLED, **options) -> VLLMServerEngine:
    options = {"patience_seconds": 2.0, "answer_seconds": 0.5} | options
    return VLLMServerEngine([server.url for server in servers], sampling, eos_token_ids=[7], **options)


def rows(count: int, start: int = 0) -> list[TurnRequest]:
    return [TurnRequest(i, [1 + i, 2 + i, 3 + i], max_tokens=5, seed=i) for i in range(start, start + count)]


def finished(engine: VLLMServerEngine, requests: list[TurnRequest], seconds: float = 30.0) -> dict[int, FinishedTurn]:
    for request in requests:
        engine.add(request)
    turns: list[FinishedTurn] = []
    deadline = time.monotonic() + seconds
    while len(turns) < len(requests):
        assert time.monotonic() < deadline, f"{len(turns)} of {len(requests)} turns after {seconds} s"
        turns += engine.step()
    assert len({turn.rollout_id for turn in turns}) == len(turns) == len(requests)
    return {turn.rollout_id: turn for turn in turns}


def failure(engine: VLLMServerEngine, requests: list[TurnRequest]) -> tuple[str, float]:
    """The message of the EngineError and after how many seconds it came."""
    started = time.monotonic()
    with pytest.raises(EngineError) as caught:
        finished(engine, requests)
    return str(caught.value), time.monotonic() - started


def test_each_row_gets_its_own_tokens_logprobs_and_cached_count():
    def complete(body):
        time.sleep(0.001 * (body["prompt"][0] * 7 % 50))  # so that they finish in another order
        return completion(body["prompt"][::-1], "length", cached_tokens=body["prompt"][0])

    with StandIn(complete) as stand_in, engine_for(stand_in) as engine:
        for i, turn in finished(engine, rows(60)).items():
            ids = [3 + i, 2 + i, 1 + i]
            assert turn == FinishedTurn(i, ids, [-t / 100 for t in ids], FinishReason.LENGTH, 1 + i)


@pytest.mark.parametrize(
    ("reasons", "expected"),
    [(("stop", 7), "eos"), (("stop", None), "eos"), (("stop", "```output"), "stop"), (("length", None), "length")],
)
def test_the_reason_tells_eos_from_a_stop_string(reasons, expected):
    with StandIn(lambda body: completion([4], *reasons)) as stand_in, engine_for(stand_in) as engine:
        assert finished(engine, rows(1))[0].finish_reason == expected


def test_a_request_leaves_nothing_to_the_servers_defaults(stand_in):
    with engine_for(stand_in, sampling=Sampling(0.7, 0.9, 20, 0.1, 1.2)) as engine:
        finished(engine, [TurnRequest(0, [1, 2], max_tokens=5, stop=("```output",), seed=11)])
        engine.sampling = Sampling(temperature=0.0)
        finished(engine, [TurnRequest(0, [1, 2], max_tokens=5)])
    sampled, greedy = stand_in.bodies
    expected = {"temperature": 0.7, "top_p": 0.9, "top_k": 20, "min_p": 0.1, "repetition_penalty": 1.2, "seed": 11}
    expected |= {"model": "toy", "prompt": [1, 2], "max_tokens": 5, "stop": ["```output"], "stop_token_ids": [7]}
    assert expected.items() <= sampled.items()
    expected = {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "stop": []}
    assert expected.items() <= greedy.items()
    assert {name for name, value in greedy.items() if value is None} == {"seed"}


def test_hundreds_are_in_flight_at_once():
    together = threading.Barrier(400)

    def complete(body):
        together.wait(timeout=60)
        return reversed_prompt(body)

    with StandIn(complete) as stand_in, engine_for(stand_in, answer_seconds=10.0) as engine:
        assert finished(engine, rows(400), seconds=60)[399].token_ids == [402, 401, 400]


def test_max_in_flight_bounds_the_requests():
    lock, now, most = threading.Lock(), 0, 0

    def complete(body):
        nonlocal now, most
        with lock:
            now += 1
            most = max(most, now)
        time.sleep(0.02)
        with lock:
            now -= 1
        return reversed_prompt(body)

    with StandIn(complete) as stand_in, engine_for(stand_in, max_in_flight=5) as engine:
        finished(engine, rows(30))
    assert most == 5


def test_step_comes_back_empty_while_all_turns_run():
    release = threading.Event()

    def complete(body):
        if body["prompt"][0] == 1:
            release.wait(30)
        return reversed_prompt(body)

    with StandIn(complete) as stand_in, engine_for(stand_in) as engine:
        engine.add(rows(1)[0])
        started = time.monotonic()
        assert engine.step() == []
        assert time.monotonic() - started < 1.0
        engine.add(rows(2)[1])  # what a tool result adds meanwhile overtakes the long turn
        while not (turns := engine.step()):
            pass
        assert [turn.rollout_id for turn in turns] == [1]
        release.set()
        while not (turns := engine.step()):
            pass
        assert [turn.rollout_id for turn in turns] == [0]


@pytest.mark.parametrize("trouble", [None, (500, {}), (503, {}), (429, {"error": {"message": "slow down"}})])
def test_a_passing_failure_is_tried_again_with_the_same_request(trouble):
    def complete(body):
        return trouble if stand_in.bodies.count(body) < 3 else reversed_prompt(body)

    with StandIn(complete) as stand_in, engine_for(stand_in, patience_seconds=10.0) as engine:
        assert finished(engine, rows(3))[2].token_ids == [5, 4, 3]
        assert len(stand_in.bodies) == 9


def test_a_lasting_failure_ends_in_one_sentence_with_url_cause_and_remedy():
    broken = (500, {"error": {"message": "out\nof memory"}})
    with StandIn(lambda body: broken) as stand_in, engine_for(stand_in) as engine:
        message, seconds = failure(engine, rows(3))
    assert stand_in.url in message and "HTTP 500, out of memory" in message and "resume the run" in message
    assert 0.5 < seconds < 5


@pytest.mark.parametrize(
    ("status", "message"),
    [(400, "max_tokens is too large"), (404, "no such model"), (401, "set VLLM_API_KEY to its key")],
)
def test_a_refused_request_is_an_error_at_once_with_the_servers_words(status, message):
    with StandIn(lambda body: (status, {"error": {"message": message}})) as stand_in, engine_for(stand_in) as engine:
        told, seconds = failure(engine, rows(1))
        assert message in told and stand_in.url in told
        assert seconds < 1 and len(stand_in.bodies) == 1


def test_a_killed_server_ends_in_a_clear_error_in_bounded_time():
    with StandIn(hang) as stand_in, engine_for(stand_in) as engine:
        threading.Timer(0.5, stand_in.kill).start()
        message, seconds = failure(engine, rows(20))
        assert stand_in.url in message and "failed for" in message
        assert seconds < 0.5 + 2.0 + 1.5


def test_a_server_that_comes_back_in_time_goes_unnoticed(stand_in):
    with engine_for(stand_in, patience_seconds=10.0) as engine:
        stand_in.complete = hang
        for request in rows(5):
            engine.add(request)
        time.sleep(0.3)
        stand_in.complete = reversed_prompt
        stand_in.cut_connections()
        turns = []
        while len(turns) < 5:
            turns += engine.step()


def test_a_frozen_server_ends_in_a_clear_error_and_a_long_turn_does_not():
    with StandIn(lambda body: time.sleep(4.0) or reversed_prompt(body)) as stand_in, engine_for(stand_in) as engine:
        assert finished(engine, rows(1))[0].token_ids == [3, 2, 1]  # 4 s: longer than the patience of 2 s
        stand_in.thawed.clear()
        message, seconds = failure(engine, rows(1))
        assert f"{stand_in.url} failed for" in message and "/health: ReadTimeout" in message
        assert seconds < 4.0


def test_a_turn_that_takes_too_long_on_a_healthy_server_ends_in_a_clear_error():
    with StandIn(hang) as stand_in, engine_for(stand_in, turn_timeout_seconds=2.5) as engine:
        message, seconds = failure(engine, rows(1))
    assert "/v1/completions: ReadTimeout" in message and 2.5 <= seconds < 4.0


def test_abort_closes_the_connections_and_the_engine_is_usable_again():
    slow = threading.Event()

    def complete(body):
        slow.wait(1.0)
        return reversed_prompt(body)

    with StandIn(complete) as stand_in, engine_for(stand_in) as engine:
        for request in rows(50):
            engine.add(request)
        engine.step()
        engine.abort()
        assert not engine._turns and not engine._watches
        assert engine.step() == []
        slow.set()
        assert finished(engine, rows(4, start=100))[103].token_ids == [106, 105, 104]
        assert engine.step() == []
        deadline = time.monotonic() + 10
        while len(stand_in.connections) > 5 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert len(stand_in.connections) <= 5


def test_an_engine_is_usable_after_a_failure_and_its_abort(stand_in):
    with engine_for(stand_in) as engine:
        stand_in.complete = lambda body: (400, {"error": {"message": "no"}})
        failure(engine, rows(10))
        engine.abort()
        stand_in.complete = reversed_prompt
        assert len(finished(engine, rows(10))) == 10


def test_no_server_is_watched_between_two_uses(stand_in):
    with engine_for(stand_in, patience_seconds=0.5) as engine:
        finished(engine, rows(3))
        stand_in.thawed.clear()
        time.sleep(2.0)
        stand_in.thawed.set()
        assert engine.step() == []
        assert len(finished(engine, rows(3))) == 3


def test_several_servers_share_the_rollouts_and_a_rollout_stays():
    with StandIn() as first, StandIn() as second, engine_for(first, second) as engine:
        for _ in range(3):
            finished(engine, rows(10))
        assert len(first.bodies) == len(second.bodies) == 15
        assert {body["seed"] % 2 for body in first.bodies} == {0}
        assert {body["seed"] % 2 for body in second.bodies} == {1}


def test_one_of_several_servers_that_dies_is_named():
    with StandIn(hang) as first, StandIn(hang) as second, engine_for(first, second) as engine:
        threading.Timer(0.3, second.kill).start()
        message, _ = failure(engine, rows(4))
        assert second.url in message and first.url not in message


def test_a_turn_that_the_server_gave_up_is_an_error():
    with StandIn(lambda body: completion([4], "abort")) as stand_in, engine_for(stand_in) as engine:
        assert "gave up a turn (abort)" in failure(engine, rows(1))[0]


def test_a_proxy_of_the_environment_diverts_nothing(stand_in, monkeypatch):
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    with engine_for(stand_in) as engine:
        assert len(finished(engine, rows(2))) == 2


def test_the_api_key_is_sent(stand_in, monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    with engine_for(stand_in) as engine:
        finished(engine, rows(1))
    assert stand_in.headers["Authorization"] == "Bearer secret"


def test_the_check_says_that_nothing_listens_and_what_to_do():
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        with pytest.raises(EngineError, match=f"No vLLM server answers at {url} .*: start it .*vllm_server_base_url"):
            check_server(url)


@pytest.mark.parametrize("url", ["localhost:8000", "http://localhost:port"])
def test_the_check_refuses_what_is_no_url(url):
    with pytest.raises(EngineError, match="vllm_server_base_url"):
        check_server(url)


def test_the_check_takes_an_address_with_and_without_v1(stand_in):
    assert check_server(f"{stand_in.url}/v1/") == check_server(stand_in.url) == "toy"


@pytest.mark.parametrize("models", [{}, {"data": []}, ["hello"]])
def test_the_check_refuses_another_kind_of_server(models):
    with StandIn(models=models) as stand_in, pytest.raises(EngineError, match="is no vLLM server"):
        check_server(stand_in.url)


def test_the_check_refuses_a_server_without_token_ids():
    probe = completion([0])
    del probe["choices"][0]["token_ids"]
    with StandIn(probe=probe) as stand_in, pytest.raises(EngineError, match=r"'token_ids'.*use `vllm serve`"):
        check_server(stand_in.url)


def test_the_check_refuses_a_server_with_raw_logprobs():
    with StandIn(probe=completion([50])) as stand_in, pytest.raises(EngineError, match="--logprobs-mode processed"):
        check_server(stand_in.url)


# A real vLLM server.


@pytest.fixture(scope="module")
def tiny_server():
    pytest.importorskip("vllm")
    with vllm_server(TINY / "base") as server:
        yield server


@pytest.fixture(scope="module")
def tokenizer():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(TINY / "base")


@pytest.fixture(scope="module")
def model():
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(TINY / "base", dtype=torch.float32).eval()


def tiny_prompts(tokenizer, count: int) -> list[list[int]]:
    with (TINY / "train.jsonl").open(encoding="utf-8") as lines:
        return [
            tokenizer.encode(prompts.render_prompt(prompts.TORL_TEMPLATE, json.loads(next(lines))["problem"]))
            for _ in range(count)
        ]


def answer(code: str) -> ExecutionResult:
    """A result that depends on the code alone; for one code in three, an error."""
    if len(code) % 3 == 0:
        return ExecutionResult(ExecutionStatus.ERROR, "", "Traceback:\nNameError: name 'x' is not defined", 0.01)
    return ok(str(sum(map(ord, code)) % 97))


def tiny_rollouts(engine, tokenizer, count: int, seed: int | None = None, **hooks) -> list[Rollout]:
    config = RolloutConfig(max_tool_calls=2, max_completion_length=192)
    with FakeInterpreter(answer) as interpreter:
        return run_rollouts(tiny_prompts(tokenizer, count), engine, interpreter, tokenizer, config, seed=seed, **hooks)


def real_engine(server, **sampling) -> VLLMServerEngine:
    return VLLMServerEngine([server.url], Sampling(**sampling), eos_token_ids=[0])


def record(rollouts: list[Rollout]) -> list[tuple]:
    return [
        (r.completion_ids, r.env_mask, [(c.code, c.status, c.observation) for c in r.calls], r.stop_reason)
        for r in rollouts
    ]


@pytest.mark.vllm
def test_greedy_rollouts_are_those_of_the_transformers_engine(tiny_server, tokenizer, model):
    from torl_trl.engines.transformers import TransformersEngine

    expected = tiny_rollouts(
        TransformersEngine(model, tokenizer, Sampling(temperature=0.0), eos_token_ids=[0]), tokenizer, 60
    )
    with real_engine(tiny_server, temperature=0.0) as engine:
        rollouts = tiny_rollouts(engine, tokenizer, 60)
    assert record(rollouts) == record(expected)
    assert {len(rollout.calls) for rollout in expected} >= {1, 2}
    assert {call.status for rollout in expected for call in rollout.calls} >= {"ok", "error"}
    for rollout, other in zip(rollouts, expected, strict=True):
        assert rollout.logprobs == pytest.approx(other.logprobs, abs=2e-4)


@pytest.mark.vllm
@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.7}])
def test_logprobs_are_those_of_the_distribution_that_tokens_are_drawn_from(tiny_server, tokenizer, model, sampling):
    import torch

    with real_engine(tiny_server, **sampling) as engine:
        rollouts = tiny_rollouts(engine, tokenizer, 20, seed=3)
    for rollout in rollouts:
        ids = torch.tensor([rollout.prompt_ids + rollout.completion_ids])
        with torch.no_grad():
            logits = model(ids).logits[0, len(rollout.prompt_ids) - 1 : -1] / sampling.get("temperature", 1.0)
        expected = logits.log_softmax(-1).gather(1, torch.tensor(rollout.completion_ids)[:, None])[:, 0]
        difference = (torch.tensor(rollout.logprobs) - expected)[torch.tensor(rollout.env_mask) == 1]
        assert difference.abs().max() < 2e-4


@pytest.mark.vllm
@pytest.mark.parametrize("count", [30, pytest.param(300, marks=pytest.mark.slow)])
def test_seeds_repeat_however_many_are_in_flight(tiny_server, tokenizer, count):
    with real_engine(tiny_server) as engine:
        runs = [record(tiny_rollouts(engine, tokenizer, count, seed=seed)) for seed in (5, 5, 6)]
        alone = record(tiny_rollouts(engine, tokenizer, 10, seed=5))
    assert runs[0] == runs[1] != runs[2]
    assert runs[0][:10] == alone


@pytest.mark.vllm
def test_abort_leaves_no_request_at_the_server(tiny_server, tokenizer):
    def becomes(busy: bool) -> bool:
        deadline = time.monotonic() + 10
        while (tiny_server.running() > 0) != busy and time.monotonic() < deadline:
            time.sleep(0.1)
        return (tiny_server.running() > 0) == busy

    with real_engine(tiny_server) as engine:
        engine._eos_token_ids = []  # so that every turn takes all its tokens, over a minute in sum
        for i, ids in enumerate(tiny_prompts(tokenizer, 300)):
            engine.add(TurnRequest(i, ids, max_tokens=300, seed=i))
        assert becomes(busy=True)
        engine.abort()
        assert becomes(busy=False)
        engine._eos_token_ids = [0]
        assert len(tiny_rollouts(engine, tokenizer, 10)) == 10


@pytest.mark.vllm
def test_the_servers_cache_is_counted_and_its_refusals_are_told(tiny_server, tokenizer):
    ids = (tiny_prompts(tokenizer, 1)[0] * 10)[:300]  # without a GPU, vLLM caches blocks of 128 tokens
    with real_engine(tiny_server) as engine:
        finished(engine, [TurnRequest(0, ids, max_tokens=1)])
        assert finished(engine, [TurnRequest(0, ids, max_tokens=1)])[0].cached_tokens >= 128
        assert "max_model_len=512" in failure(engine, [TurnRequest(0, ids, max_tokens=600)])[0]


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_server_that_dies_or_freezes_in_a_step_ends_it_within_a_minute(how, tokenizer, monkeypatch):
    pytest.importorskip("vllm")
    monkeypatch.undo()  # the real pauses
    when: list[float] = []

    def strike(rollout: Rollout) -> None:
        if not when:
            when.append(time.monotonic())
            os.killpg(server.process.pid, how)

    with vllm_server(TINY / "base") as server, real_engine(server) as engine:
        with pytest.raises(EngineError, match=f"{server.url} failed for .* resume the run"):
            tiny_rollouts(engine, tokenizer, 300, on_finished=strike)
        assert 20 < time.monotonic() - when[0] < 50
