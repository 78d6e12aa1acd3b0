"""A real vLLM server for tests: its own process group on a free port, with its log, ended with all its processes."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx

START_SECONDS = 240.0
"""The longest that a start may take; some 30 s are usual on two cores."""


@dataclass
class VLLMServer:
    url: str
    process: subprocess.Popen
    log: Path

    def kill(self) -> None:
        """End the server and its engine process at once, as a crash of the machine would."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def stop(self) -> None:
        """End it in order, so that it frees its shared memory; by force when that takes too long."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGCONT)
            self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(20)
        self.kill()

    def running(self) -> int:
        """How many requests the server works on or has waiting."""
        lines = httpx.get(f"{self.url}/metrics", timeout=30, trust_env=False).text.splitlines()
        gauges = ("vllm:num_requests_running{", "vllm:num_requests_waiting{")
        return round(sum(float(line.split()[-1]) for line in lines if line.startswith(gauges)))


@contextlib.contextmanager
def vllm_server(model: Path | str, *options: str) -> Iterator[VLLMServer]:
    """Serve the model in float32 and eagerly, so that greedy tokens are those of transformers; needs vllm."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--enforce-eager"]
    command += ["--max-model-len", "512", "--max-num-seqs", "64", "--logprobs-mode", "processed_logprobs"]
    # Without a GPU, vLLM 0.31 dies of a seeded prompt computed in pieces: "CPU Generator does not use offset".
    command += ["--enable-prompt-tokens-details", "--no-enable-chunked-prefill", *options]
    environment = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    environment |= {"VLLM_NO_USAGE_STATS": "1"}
    with tempfile.TemporaryDirectory(prefix="vllm-server-") as folder:
        log = Path(folder) / "log.txt"
        with log.open("wb") as output:
            process = subprocess.Popen(
                command, stdout=output, stderr=output, env=os.environ | environment, start_new_session=True
            )
        server = VLLMServer(f"http://127.0.0.1:{port}", process, log)
        try:
            _wait_until_healthy(server)
            yield server
        finally:
            server.stop()


def _wait_until_healthy(server: VLLMServer) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and server.process.poll() is None:
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{server.url}/health", timeout=5, trust_env=False).is_success:
                return
        time.sleep(0.5)
    log = server.log.read_text(encoding="utf-8", errors="replace")
    raise RuntimeError(f"The vLLM server did not start:\n{log[-20_000:]}")
