"""Load a model and its tokenizer; what is missing or broken becomes one sentence."""

import contextlib
from collections.abc import Iterator

from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from trl import ModelConfig

from torl_trl.config import ToRLConfig
from torl_trl.errors import UserError


def load_tokenizer(name: str, revision: str | None, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model folder or Hub id. Raises `UserError`."""
    with one_sentence("tokenizer", name):
        tokenizer = AutoTokenizer.from_pretrained(name, revision=revision, trust_remote_code=trust_remote_code)
    if tokenizer.eos_token_id is None:  # transformers makes an empty tokenizer for a folder that has none
        raise UserError(f"The model {name!r} has no tokenizer with an end-of-sequence token: add its tokenizer files.")
    return tokenizer


def load_config(name: str, revision: str | None, trust_remote_code: bool) -> PreTrainedConfig:
    """Load the configuration of a model folder or Hub id. Raises `UserError`."""
    with one_sentence("model", name):
        return AutoConfig.from_pretrained(name, revision=revision, trust_remote_code=trust_remote_code)


def load_model(model_args: ModelConfig, args: ToRLConfig) -> PreTrainedModel:
    """Load the weights as `dtype` says (float32 unless set) and `model_init_kwargs` overrides. Raises `UserError`."""
    name = model_args.model_name_or_path
    options = {
        "revision": model_args.model_revision,
        "trust_remote_code": args.trust_remote_code,
        "attn_implementation": model_args.attn_implementation,
        "dtype": model_args.dtype,
    }
    with one_sentence("model", name):
        return AutoModelForCausalLM.from_pretrained(name, **options | (args.model_init_kwargs or {}))


@contextlib.contextmanager
def one_sentence(what: str, name: str) -> Iterator[None]:
    """What fails while `name` is loaded becomes a `UserError`."""
    try:
        yield
    except (OSError, ValueError, ImportError, KeyError, AttributeError) as error:
        reason = " ".join(str(error).split()).partition(". ")[0]
        raise UserError(
            f"The {what} {name!r} cannot be loaded ({reason}): give a model folder or a Hub id that can be reached, "
            "and a dtype and attn_implementation that this machine has."
        ) from error
