"""Small real parts for tests: tokenizers trained on the spot, a random tiny model, a fake interpreter."""

import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from torl_interpreters.base import ExecutionResult, ExecutionStatus

EOS = "<|endoftext|>"
CORPUS = [
    "Let me compute it.\n```python\nprint(6 * 7)\n```\n```output\n42\n```\nThe answer is \\boxed{42}.\n",
    "from math import gcd\n```python\nx = gcd(12, 18)\nprint(x)\n```\n```output\n6\n```\nSo \\boxed{6}.\n",
    "NameError: name 'gcd' is not defined\nZeroDivisionError: division by zero\n",
] * 20


@cache
def byte_level_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE of Qwen's kind; id 0 is EOS. Merges cross spaces and newlines, and the token "put\\n" reaches
    beyond the stop string ```output, so that fences meet odd tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420, special_tokens=[EOS], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens(["put\n"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=EOS, pad_token=EOS)


@cache
def metaspace_tokenizer() -> PreTrainedTokenizerFast:
    """BPE of Llama's kind: spaces become "▁", unknown characters fall back to bytes; id 0 is EOS."""
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<0x00>"))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    trainer = trainers.BpeTrainer(vocab_size=420, special_tokens=[EOS, *byte_tokens], show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=EOS, pad_token=EOS)


@cache
def tiny_model():
    """A random Qwen2 model (2 layers, hidden 32) for `byte_level_tokenizer`."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(byte_level_tokenizer()),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        eos_token_id=0,
        bos_token_id=None,
        pad_token_id=0,
    )
    return Qwen2ForCausalLM(config).eval()


def ok(stdout: str) -> ExecutionResult:
    return ExecutionResult(ExecutionStatus.OK, stdout, "", 0.01)


class FakeInterpreter:
    """Answers from a function of the code: a result, or an exception to raise; after `seconds`, in `slots` threads."""

    def __init__(self, answer, *, seconds: float = 0.0, slots: int = 8):
        self.answer = answer
        self.seconds = seconds
        self.codes: list[str] = []
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(slots)

    def submit(self, code: str) -> Future[ExecutionResult]:
        return self._pool.submit(self._run, code)

    def _run(self, code: str) -> ExecutionResult:
        time.sleep(self.seconds)
        with self._lock:
            self.codes.append(code)
        answer = self.answer(code)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def __enter__(self):
        return self

    def __exit__(self, *exc_info) -> None:
        self.close()
