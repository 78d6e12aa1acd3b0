"""Make the tiny recipe's base model from scratch: tokenizer, documents, pretraining. Everything follows from a seed.

    python recipes/tiny/make_base.py                 writes recipes/tiny/base

The model is a Qwen2 of 0.84 million parameters with a byte-level tokenizer of Qwen's kind. It reads solved problems
(solutions.py) of which most are wrong, each document being a prompt of ToRL's template and one solution.
benchmarks/tiny_base.py measures it.
"""

import argparse
import logging
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Self

import torch
from problems import FOLDER, draw_problem
from solutions import HABITS, Habits, write_solution
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from torl_trl.prompts import QUESTION_PLACE, TORL_TEMPLATE, render_prompt

logger = logging.getLogger("make_base")

END = "<|endoftext|>"
TYPICAL_LENGTH = 50
"""Tokens of a solution, about; sets the scale of the loss."""
POOL = 50
"""Batches that are drawn and sorted by length together."""
QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Qwen's pre-tokenizer: words with their leading space, digits one by one, punctuation with its line ends."""


PRACTICE = replace(HABITS, code=1.0, mend=1.0, miscopy=0.0)
"""Only programs, and answers that are what they printed: copying numbers is the hard part, and guesses drown it."""


@dataclass(frozen=True)
class Recipe:
    """How the base is made."""

    seed: int = 0
    vocabulary: int = 768
    layers: int = 4
    hidden: int = 128
    heads: int = 4
    key_heads: int = 2
    intermediate: int = 352
    initial_range: float = 0.05
    """Standard deviation of the first weights; 0.02 suits large models and starts a small one with flat attention."""
    stages: tuple[tuple[Habits, int], ...] = ((PRACTICE, 3000), (HABITS, 450))
    """What is read, and for how many steps."""
    batch: int = 32
    """Documents a step."""
    learning_rate: float = 3e-3
    warmup: int = 100
    weight_decay: float = 0.05

    @property
    def steps(self) -> int:
        return sum(steps for _, steps in self.stages)


def train_tokenizer(recipe: Recipe, documents: int = 4000) -> PreTrainedTokenizerFast:
    """A byte-level BPE whose merges make the template's words single tokens."""
    rng = Random(recipe.seed)
    texts = []
    for _ in range(documents):
        problem = draw_problem(rng)
        prompt = render_prompt(TORL_TEMPLATE, problem.question)
        texts.append(prompt + "".join(passage.text for passage in write_solution(problem, rng)))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=recipe.vocabulary,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END, pad_token=END, clean_up_tokenization_spaces=False
    )


def new_model(recipe: Recipe, tokenizer: PreTrainedTokenizerFast) -> Qwen2ForCausalLM:
    torch.manual_seed(recipe.seed)
    end = tokenizer.eos_token_id
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=recipe.vocabulary,
            hidden_size=recipe.hidden,
            intermediate_size=recipe.intermediate,
            num_hidden_layers=recipe.layers,
            num_attention_heads=recipe.heads,
            num_key_value_heads=recipe.key_heads,
            max_position_embeddings=1024,
            tie_word_embeddings=True,
            initializer_range=recipe.initial_range,
            bos_token_id=None,
            eos_token_id=end,
            pad_token_id=end,
        )
    )
    for key_head in range(recipe.key_heads):
        look_back(model, key_head, offset=key_head + 1)
    return model


@torch.no_grad()
def look_back(model: Qwen2ForCausalLM, key_head: int, offset: int, strength: float = 4.8) -> None:
    """Start a key head of the first layer, and its query heads, as one that attends `offset` tokens back.

    Biases of queries and keys are rotated by their positions (RoPE), so constant ones make a score that depends on the
    distance only; phases of -offset x frequency put its peak there. Copying needs such heads, and finding them takes
    most of the training of a model as small as this.
    """
    config, attention = model.config, model.model.layers[0].self_attn
    size = config.hidden_size // config.num_attention_heads
    half, group = size // 2, config.num_attention_heads // config.num_key_value_heads
    phases = offset * model.model.rotary_emb.inv_freq
    keys = attention.k_proj.bias.view(-1, size)[key_head]
    queries = attention.q_proj.bias.view(-1, size)[key_head * group : (key_head + 1) * group]
    keys[:half] = strength
    queries[:, :half], queries[:, half:] = strength * phases.cos(), -strength * phases.sin()


@dataclass(frozen=True)
class Document:
    """Token ids of a prompt and a solution, as a rollout would build them: each passage tokenized alone."""

    ids: list[int]
    prompt_length: int

    @classmethod
    def draw(cls, rng: Random, tokenizer: PreTrainedTokenizerFast, habits: Habits) -> Self:
        problem = draw_problem(rng)
        ids = tokenizer.encode(render_prompt(TORL_TEMPLATE, problem.question), add_special_tokens=False)
        prompt_length = len(ids)
        for passage in write_solution(problem, rng, habits):
            ids += tokenizer.encode(passage.text, add_special_tokens=False)
        return cls([*ids, tokenizer.eos_token_id], prompt_length)


def batches(recipe: Recipe, tokenizer: PreTrainedTokenizerFast) -> Iterator[list[Document]]:
    """Yield the documents of each step; those of like length stand together."""
    rng = Random(recipe.seed + 1)
    for habits, steps in recipe.stages:
        for start in range(0, steps, POOL):
            count = min(POOL, steps - start) * recipe.batch
            pool = sorted((Document.draw(rng, tokenizer, habits) for _ in range(count)), key=lambda d: len(d.ids))
            groups = [pool[first : first + recipe.batch] for first in range(0, count, recipe.batch)]
            rng.shuffle(groups)
            yield from groups


def loss_of(model: Qwen2ForCausalLM, documents: list[Document], common: int) -> torch.Tensor:
    """Next-token loss of solutions, observations included. Prompts are read, not predicted: their digits are noise.

    The first `common` tokens, which all prompts share, pass the model once. The sum is divided by a constant, not by
    the tokens of this batch: a mean would give short documents (mostly guesses) more weight than long ones.
    """
    ids = pad_sequence([torch.tensor(document.ids) for document in documents], batch_first=True)
    labels = torch.full_like(ids, -100)
    for row, document in enumerate(documents):
        labels[row, document.prompt_length : len(document.ids)] = torch.tensor(document.ids[document.prompt_length :])
    cache = DynamicCache(config=model.config)
    model(input_ids=ids[:1, :common], past_key_values=cache, use_cache=True)
    cache.batch_repeat_interleave(len(ids))
    logits = model(input_ids=ids[:, common:], past_key_values=cache, use_cache=True).logits[:, :-1]
    total = cross_entropy(logits.flatten(0, 1), labels[:, common + 1 :].flatten(), reduction="sum")
    return total / (len(ids) * TYPICAL_LENGTH)


def pretrain(model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, recipe: Recipe) -> None:
    """AdamW with a warm-up and a cosine to zero."""
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=recipe.learning_rate, betas=(0.9, 0.98), weight_decay=recipe.weight_decay
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min((step + 1) / recipe.warmup, 0.5 * (1 + math.cos(math.pi * min(1.0, step / recipe.steps)))),
    )
    common = len(tokenizer.encode(TORL_TEMPLATE.split(QUESTION_PLACE)[0], add_special_tokens=False))
    model.train()
    started = time.perf_counter()
    for step, documents in enumerate(batches(recipe, tokenizer)):
        loss = loss_of(model, documents, common)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % 50 == 0 or step + 1 == recipe.steps:
            logger.info("step %4d  loss %.4f  %4.0f s", step, loss.item(), time.perf_counter() - started)


def make_base(folder: Path, recipe: Recipe) -> None:
    """Write the base to `folder`; the same recipe gives the same weights on the same kind of processor."""
    torch.set_num_threads(1)  # sums in one order
    tokenizer = train_tokenizer(recipe)
    model = new_model(recipe, tokenizer)
    logger.info("%d parameters, %d documents", model.num_parameters(), recipe.steps * recipe.batch)
    pretrain(model, tokenizer, recipe)
    model.eval().save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=FOLDER / "base")
    make_base(parser.parse_args().folder, Recipe())
