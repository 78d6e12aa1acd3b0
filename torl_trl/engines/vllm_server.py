"""Turns from one or several vLLM servers: one `POST /v1/completions` per turn, all in flight together.

    vllm serve MODEL --logprobs-mode processed_logprobs --enable-prompt-tokens-details

Without a GPU add `--no-enable-chunked-prefill`: vLLM 0.31 dies there of a seeded prompt that it computes in pieces.
Every rank has its own engine and talks to the servers itself. The requests live in a background thread, so that they
go on while the caller handles tool results.

A long turn is silent until it is done, so silence on its request says nothing. Therefore each server is asked for
`GET /health` every few seconds while turns are in flight, and one rule holds for probes and turns: what fails is tried
again (its seed makes a turn come out the same), and `patience_seconds` of nothing but failure raise. So a dead server
ends the step after some 25 s and a frozen one within 40 s, while a turn of a healthy one may take half an hour
(`turn_timeout_seconds`; that ends what no probe sees, a server that answers while its GPU hangs).
"""

import asyncio
import logging
import math
import os
import queue
import random
import threading
import time
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Literal

import httpx

from torl_trl.engines.base import EngineError, FinishedTurn, Sampling, TurnRequest
from torl_trl.engines.stopping import vllm_finish_reason

logger = logging.getLogger(__name__)
if logging.getLogger("httpx").level == logging.NOTSET:
    logging.getLogger("httpx").setLevel(logging.WARNING)  # it logs a line per request

_STEP_SECONDS = 0.05  # how long `step` waits for a turn, and so the longest that a tool result waits for its rollout
_PROBE_PAUSE_SECONDS = 3.0
_CHECK_SECONDS = 60.0  # the one token of `check_server` may have to queue
_LONGEST_PAUSE_SECONDS = 4.0
_WARN_SECONDS = 10.0  # between two warnings, however much fails
_START_IT = "start it with the command of the README, which has --logprobs-mode processed_logprobs"


@dataclass(frozen=True, slots=True)
class _Server:
    url: str
    model: str
    client: httpx.AsyncClient  # one each: what a request costs httpx grows with the connections of its client


@contextmanager
def _asking(url: str) -> Iterator[httpx.Client]:
    try:
        with _client(httpx.Client, url, _CHECK_SECONDS) as client:
            _accept(client.get("/health"), url)
            yield client
    except (httpx.TransportError, httpx.InvalidURL) as error:
        what = f"No vLLM server answers at {url} ({_describe(error)})"
        raise EngineError(f"{what}: {_START_IT}, or correct vllm_server_base_url.") from error


def check_health(url: str) -> None:
    """Raise `EngineError` unless the server at `url` is up."""
    with _asking(url):
        return


def _served(client: httpx.Client, url: str) -> dict[str, Any]:
    return _accept(client.get("/v1/models"), url).json()["data"][0]


def context_of_server(url: str) -> int | None:
    """How many tokens the server at `url` takes, prompt and completion. Raises `EngineError`."""
    with _asking(url) as client:
        return _served(client, url).get("max_model_len")


def check_server(url: str) -> str:
    """Return the name of the model that the server at `url` serves.

    Raises `EngineError` when nothing answers there, the server refuses us, or its answers cannot train: without token
    ids, or with logprobs of another distribution than the one that tokens are drawn from.
    """
    try:
        with _asking(url) as client:
            model = _served(client, url)["id"]
            probe = {"model": model, "prompt": [0], "max_tokens": 1, "temperature": 1.0, "top_k": 1}
            answer = client.post("/v1/completions", json=probe | {"logprobs": 0, "return_token_ids": True})
    except (ValueError, LookupError, TypeError) as error:
        raise EngineError(f"What answers at {url} is no vLLM server: correct vllm_server_base_url.") from error
    if _read_turn(0, _accept(answer, url), url).logprobs[0] < -1e-3:  # of a token that had no alternative
        raise EngineError(f"The vLLM server at {url} returns logprobs from before temperature and top_k: {_START_IT}.")
    return model


def wait_for_server(url: str, seconds: float) -> None:
    """`check_server`, again while nothing answers at `url` and `seconds` are not over."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            check_server(url)
            return
        except EngineError as error:
            if not isinstance(error.__cause__, httpx.TransportError) or time.monotonic() > deadline:
                raise
            time.sleep(2.0)


class VLLMServerEngine(AbstractContextManager):
    """An engine over the vLLM servers at `urls`, which all serve the same weights. Make it with all servers up.

    A rollout stays with one server, whose cache holds its earlier turns; `cached_tokens` needs the server's
    `--enable-prompt-tokens-details`. Set `sampling` to sample the next requests otherwise. `turn_timeout_seconds`
    bounds a turn, its wait in the server's queue included; a connection or a probe has `answer_seconds`, a failing
    server `patience_seconds`. `max_in_flight` counts over all servers; more requests wait here. Each takes an open
    file, of which a process often has 1024. `models` are the names that they serve it by. Raises `EngineError`, as
    `check_server` does.
    """

    mode: Literal["continuous"] = "continuous"

    def __init__(
        self,
        urls: Sequence[str],
        sampling: Sampling,
        *,
        eos_token_ids: list[int],
        turn_timeout_seconds: float = 1800.0,
        patience_seconds: float = 25.0,
        answer_seconds: float = 10.0,
        max_in_flight: int = 512,
    ) -> None:
        if not urls or isinstance(urls, str):
            raise ValueError(f"urls of the vLLM servers is {urls!r}: give a list with at least one URL.")
        self.sampling = sampling
        self._eos_token_ids = list(eos_token_ids)
        self._turn_seconds, self._patience = turn_timeout_seconds, patience_seconds
        self._answer_seconds = answer_seconds
        clients = [_client(httpx.AsyncClient, url, answer_seconds) for url in urls]
        self.models = [check_server(url) for url in urls]
        self._servers = [_Server(*parts) for parts in zip(urls, self.models, clients, strict=True)]
        self._places = asyncio.Semaphore(max_in_flight)
        self._turns: set[asyncio.Task[FinishedTurn]] = set()
        self._watches: set[asyncio.Task[None]] = set()
        self._finished: queue.SimpleQueue[FinishedTurn | BaseException] = queue.SimpleQueue()
        self._next_warning = 0.0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="vllm-server-engine", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        urls = ", ".join(server.url for server in self._servers)
        return f"vLLM servers at {urls}, {len(self._turns)} requests unfinished"

    def add(self, request: TurnRequest) -> None:
        """Send a request, to be sampled as `sampling` says now."""
        server = self._servers[request.rollout_id % len(self._servers)]
        # Whatever a request leaves out comes from the generation config of the served model, so it leaves out nothing.
        body = asdict(self.sampling) | {"presence_penalty": 0.0, "frequency_penalty": 0.0}
        body |= {"min_p": self.sampling.min_p or 0.0, "seed": request.seed, "model": server.model}
        body |= {"prompt": request.token_ids, "max_tokens": request.max_tokens}
        body |= {"stop": request.stop, "include_stop_str_in_output": True, "skip_special_tokens": False}
        body |= {"stop_token_ids": self._eos_token_ids, "ignore_eos": True}  # none but our EOS
        body |= {"return_token_ids": True, "return_tokens_as_token_ids": True, "logprobs": 0}  # of sampled tokens only
        self._loop.call_soon_threadsafe(self._start_turn, server, request.rollout_id, body)

    def step(self) -> list[FinishedTurn]:
        """Return the turns that finished, perhaps none after a short wait. Raises `EngineError`; then call `abort`."""
        finished = []
        try:
            while True:
                turn = self._finished.get(timeout=0 if finished else _STEP_SECONDS)
                if isinstance(turn, BaseException):
                    raise turn
                finished.append(turn)
        except queue.Empty:
            return finished

    def abort(self) -> None:
        """Close the connections of all requests, which ends them at the server too; returns when they are closed."""
        asyncio.run_coroutine_threadsafe(self._cancel_all(), self._loop).result()
        self._finished = queue.SimpleQueue()

    def close(self) -> None:
        """Abort and free everything. May be called twice."""
        if self._loop.is_closed():
            return
        self.abort()
        for server in self._servers:
            asyncio.run_coroutine_threadsafe(server.client.aclose(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    # All below runs in the background thread.

    def _start_turn(self, server: _Server, rollout_id: int, body: dict[str, Any]) -> None:
        if not self._turns:
            for each in self._servers:
                self._spawn(self._watch(each), self._watches)
        self._spawn(self._generate(server, rollout_id, body), self._turns)

    def _spawn(self, coroutine: Coroutine, tasks: set[asyncio.Task]) -> None:
        task = self._loop.create_task(coroutine)
        tasks.add(task)
        task.add_done_callback(self._settle)

    def _settle(self, task: asyncio.Task) -> None:
        is_watch = task in self._watches
        self._turns.discard(task)
        self._watches.discard(task)
        if not self._turns:
            for watch in self._watches:
                watch.cancel()
        if not task.cancelled() and (self._turns or not is_watch):  # without turns a watch has nothing to say
            self._finished.put(task.exception() or task.result())

    async def _cancel_all(self) -> None:
        tasks = self._turns | self._watches
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _generate(self, server: _Server, rollout_id: int, body: dict[str, Any]) -> FinishedTurn:
        async with self._places:
            response = await self._ask(server, "POST", "/v1/completions", self._turn_seconds, json=body)
        return _read_turn(rollout_id, response, server.url)

    async def _watch(self, server: _Server) -> None:
        while True:
            await asyncio.sleep(_PROBE_PAUSE_SECONDS)
            await self._ask(server, "GET", "/health", self._answer_seconds)

    async def _ask(self, server: _Server, method: str, path: str, seconds: float, **body: Any) -> httpx.Response:
        """Return the server's answer. Raises `EngineError`: at once if asking again is useless, else in the end."""
        timeout = httpx.Timeout(self._answer_seconds, read=seconds, pool=None)
        failing_since, pause = math.inf, 0.25
        while True:
            started = time.monotonic()
            try:
                response = await server.client.request(method, path, timeout=timeout, **body)
                if response.status_code < 500 and response.status_code != 429:
                    return _accept(response, server.url)
                trouble = _words(response)
            except httpx.TransportError as error:
                trouble = _describe(error)
                if isinstance(error, httpx.TimeoutException):  # the silence began when we asked
                    failing_since = min(failing_since, started)
            failing_since = min(failing_since, time.monotonic())
            failed = time.monotonic() - failing_since
            what = f"The vLLM server at {server.url} failed for {failed:.0f} s ({method} {path}: {trouble})"
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
            if failed + pause > self._patience:
                raise EngineError(f"{what}: read its log, start it again and resume the run.")
            if time.monotonic() >= self._next_warning:
                self._next_warning = time.monotonic() + _WARN_SECONDS
                logger.warning("%s; trying again.", what)
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))


def authorization() -> dict[str, str]:
    """The header with the servers' key, from the variable that they read themselves."""
    key = os.environ.get("VLLM_API_KEY")
    return {"Authorization": f"Bearer {key}"} if key else {}


def _client(kind: type, url: str, seconds: float) -> Any:
    # No idle connections: for each request httpx looks at all pairs of them. Opening one is nothing next to a turn.
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    base_url = url.rstrip("/").removesuffix("/v1")
    # trust_env: the environment's proxy is for the outside world, not for our servers.
    return kind(base_url=base_url, headers=authorization(), limits=limits, timeout=seconds, trust_env=False)


def _describe(error: Exception) -> str:
    return f"{type(error).__name__} {error}".strip()


def _words(response: httpx.Response) -> str:
    """The status and what the server says."""
    try:
        text = response.json()["error"]["message"]
    except (ValueError, LookupError, TypeError):
        text = response.text
    return f"HTTP {response.status_code}, {' '.join(str(text).split())[:500]}"


def _accept(response: httpx.Response, url: str) -> httpx.Response:
    if response.is_success:
        return response
    refused = response.status_code in (401, 403)
    hint = "set VLLM_API_KEY to its key" if refused else "change the run's or the server's options"
    raise EngineError(f"The vLLM server at {url} refused a request ({_words(response)}): {hint}.")


def _read_turn(rollout_id: int, response: httpx.Response, url: str) -> FinishedTurn:
    try:
        answer = response.json()
        choice = answer["choices"][0]
        ids, logprobs = choice["token_ids"], choice["logprobs"]["token_logprobs"]
        reason, stopped_by = choice["finish_reason"], choice["stop_reason"]
        cached_tokens = (answer["usage"].get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        what = f"The server at {url} answered without what vLLM's completions hold ({_describe(error)})"
        raise EngineError(f"{what}: use `vllm serve`, 0.22 or later.") from error
    if (end := vllm_finish_reason(reason, stopped_by)) is None:
        raise EngineError(f"The vLLM server at {url} gave up a turn ({reason}): do not stop or pause it in a step.")
    return FinishedTurn(rollout_id, ids, logprobs, end, cached_tokens)
