"""The transformers engine: the tokens of `model.generate`, per row, with logprobs the trainer agrees with."""

from dataclasses import replace

import pytest
import torch
from toys import byte_level_tokenizer, metaspace_tokenizer, tiny_model

from torl_trl.engines.base import FinishReason, Sampling, TurnRequest
from torl_trl.engines.stopping import StopMatcher
from torl_trl.engines.transformers import TransformersEngine


def requests(count: int = 12) -> list[TurnRequest]:
    """Rows of different lengths and budgets that share a start, some of them twins."""
    generator = torch.Generator().manual_seed(1)
    start = torch.randint(1, 400, (7,), generator=generator).tolist()
    rows = [start + torch.randint(1, 400, (1 + i // 2,), generator=generator).tolist() for i in range(count)]
    rows[3] = list(rows[2])
    return [TurnRequest(i, row, max_tokens=3 + 4 * i) for i, row in enumerate(rows)]


def engine(temperature: float = 0.0, **options) -> TransformersEngine:
    sampling = Sampling(temperature=temperature, **options)
    return TransformersEngine(tiny_model(), byte_level_tokenizer(), sampling, eos_token_ids=[0])


def finished(engine: TransformersEngine, rows: list[TurnRequest]) -> dict:
    for row in rows:
        engine.add(row)
    return {turn.rollout_id: turn for turn in engine.step()}


def generated(row: TurnRequest, **options) -> list[int]:
    """What `model.generate` gives for one row alone, cut after EOS."""
    ids = tiny_model().generate(
        torch.tensor([row.token_ids]), max_new_tokens=row.max_tokens, do_sample=False, eos_token_id=0, **options
    )
    return ids[0, len(row.token_ids) :].tolist()


@pytest.mark.parametrize("options", [{}, {"repetition_penalty": 1.3}])
def test_greedy_tokens_are_those_of_generate_row_by_row(options):
    turns = finished(engine(**options), requests())
    for row in requests():
        assert turns[row.rollout_id].token_ids == generated(row, **options)


def test_each_row_keeps_its_own_budget():
    turns = finished(engine(temperature=1.0), requests())
    for row in requests():
        turn = turns[row.rollout_id]
        assert len(turn.token_ids) <= row.max_tokens
        assert (turn.finish_reason == FinishReason.LENGTH) == (
            len(turn.token_ids) == row.max_tokens and turn.token_ids[-1] != 0
        )


def test_each_row_keeps_its_own_stop_strings():
    row = requests()[-1]
    text = byte_level_tokenizer().decode(generated(row))
    stop = text[5:9]
    with_stop = TurnRequest(0, row.token_ids, row.max_tokens, stop=(stop,))
    without = TurnRequest(1, row.token_ids, row.max_tokens)
    turns = finished(engine(), [with_stop, without])
    assert turns[1].token_ids == generated(row)
    assert turns[0].finish_reason == FinishReason.STOP
    assert stop in byte_level_tokenizer().decode(turns[0].token_ids)
    assert stop not in byte_level_tokenizer().decode(turns[0].token_ids[:-1])


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_those_of_a_full_recomputation(temperature):
    torch.manual_seed(3)
    for turn in finished(engine(temperature), requests()).values():
        row = requests()[turn.rollout_id]
        ids = torch.tensor([row.token_ids + turn.token_ids])
        logprobs = (tiny_model()(ids).logits[0].float() / temperature).log_softmax(-1)
        expected = logprobs[len(row.token_ids) - 1 : -1].gather(1, torch.tensor(turn.token_ids)[:, None])[:, 0]
        assert torch.allclose(torch.tensor(turn.logprobs), expected, atol=1e-4)


def test_a_sliding_window_sees_tokens_and_not_padding():
    from transformers import MistralConfig, MistralForCausalLM

    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=420,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        sliding_window=8,
    )
    model = MistralForCausalLM(config).eval()
    windowed = TransformersEngine(model, byte_level_tokenizer(), Sampling(), eos_token_ids=[0])
    for turn in finished(windowed, requests()).values():
        row = requests()[turn.rollout_id]
        logprobs = model(torch.tensor([row.token_ids + turn.token_ids])).logits[0].log_softmax(-1)
        expected = logprobs[len(row.token_ids) - 1 : -1].gather(1, torch.tensor(turn.token_ids)[:, None])[:, 0]
        assert torch.allclose(torch.tensor(turn.logprobs), expected, atol=1e-4)


def test_sampling_repeats_under_a_seed():
    def sample():
        torch.manual_seed(5)
        return [(turn.rollout_id, turn.token_ids) for turn in finished(engine(temperature=1.0), requests()).values()]

    assert sample() == sample()


def test_with_seeds_a_row_draws_the_same_tokens_whatever_else_runs():
    rows = [replace(row, max_tokens=30, seed=100 + row.rollout_id) for row in requests()]

    def sampled(rows, **options):
        seeded = TransformersEngine(
            tiny_model(), byte_level_tokenizer(), Sampling(), eos_token_ids=[0], use_seeds=True, **options
        )
        return {name: turn.token_ids for name, turn in finished(seeded, rows).items()}

    together = sampled(rows)
    assert together == sampled(rows[::-1], max_batch_size=3)
    assert sampled(rows[4:6]) == {name: together[name] for name in (4, 5)}
    assert together[2] != together[3]  # twins with seeds of their own
    assert len(rows) >= 6  # so that an ended row stays in the batch for a while
    first_ends = sampled([replace(rows[0], max_tokens=2), *rows[1:]])
    assert {name: first_ends[name] for name in range(1, len(rows))} == {
        name: together[name] for name in range(1, len(rows))
    }


def test_seeded_draws_follow_the_distribution():
    model, start = tiny_model(), [5, 6, 7]
    expected = model(torch.tensor([start])).logits[0, -1].softmax(-1)
    seeded = TransformersEngine(model, byte_level_tokenizer(), Sampling(), eos_token_ids=[0], use_seeds=True)
    turns = finished(seeded, [TurnRequest(i, start, max_tokens=1, seed=i) for i in range(20_000)])
    counts = torch.bincount(torch.tensor([turn.token_ids[0] for turn in turns.values()]), minlength=len(expected))
    squares = ((counts - 20_000 * expected) ** 2 / (20_000 * expected)).sum()
    freedom = len(expected) - 1
    assert abs(squares - freedom) < 5 * (2 * freedom) ** 0.5  # the chi-squared statistic has this spread


def test_small_batches_give_the_same_greedy_tokens():
    small = TransformersEngine(
        tiny_model(), byte_level_tokenizer(), Sampling(temperature=0.0), eos_token_ids=[0], max_batch_size=5
    )
    for row_id, turn in finished(small, requests()).items():
        assert turn.token_ids == finished(engine(), requests())[row_id].token_ids


@pytest.mark.parametrize("options", [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}])
def test_truncated_sampling_keeps_only_what_it_should(options):
    turns = finished(engine(temperature=1.0, **options), requests())
    for row in requests():
        assert turns[row.rollout_id].token_ids == generated(row)


def test_abort_leaves_nothing_in_the_engine():
    used = engine()
    used.add(requests()[0])
    used.abort()
    assert used.step() == []


@pytest.mark.parametrize("tokenizer", [byte_level_tokenizer, metaspace_tokenizer])
def test_a_stop_string_is_found_at_the_token_that_completes_it_however_it_is_split(tokenizer):
    tokenizer = tokenizer()
    matcher = StopMatcher(tokenizer, len(tokenizer))
    for pieces in (["```output"], ["``", "`out", "put\n"], list("```output"), ["x```", "output and more"]):
        ids = [token for piece in pieces for token in tokenizer.encode(piece, add_special_tokens=False)]
        hits = [n for n in range(1, len(ids) + 1) if matcher.matches(ids[:n], ("```output",))]
        assert "```output" in tokenizer.decode(ids[: hits[0]])
        assert "```output" not in tokenizer.decode(ids[: hits[0] - 1])
