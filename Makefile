# `make` lists the targets. Set-up is scripts/setup.sh; a second call finds it done.
VENV ?= .venv
export VENV PYTHON TORCH_INDEX_URL VLLM
# Threads that wait for each other spin for a moment only, then sleep. On two idle cores a step of the demo takes the
# same 2 s; beside two busy processes about 6 s, by the default 7 to 95 s.
export GOMP_SPINCOUNT ?= 2000

.PHONY: help demo test test-slow quality style

help:
	@echo "make demo       train the tiny model on the CPU and show what it learned (runs/tiny)"
	@echo "make test       run the tests"
	@echo "make test-slow  run the tests that take long"
	@echo "make quality    check style; make style mends it"
	@echo
	@echo "Each makes the environment .venv when it is not there. Variables, as in make demo PYTHON=python3.12:"
	@echo "  PYTHON           the Python to use (3.11 or newer); default: the newest of 3.11 to 3.13 on PATH, else python3"
	@echo "  TORCH_INDEX_URL  where to take torch from (pip's --index-url); on Linux pip takes the large CUDA build,"
	@echo "                   the installation page of PyTorch names the index of the small CPU build"
	@echo "  VLLM=1           add vLLM for CPUs, so that its tests do not skip; needs the CPU build of torch"
	@echo "To set up anew, delete .venv."

demo:
	@scripts/setup.sh demo
	$(VENV)/bin/accelerate launch --quiet --config_file accelerate_configs/cpu.yaml recipes/grpo_torl.py --config tiny.yaml

test:
	@scripts/setup.sh test
	$(VENV)/bin/python -m pytest

test-slow:
	@scripts/setup.sh slow
	TORL_TEST_RESULT=tests/slow_result.json $(VENV)/bin/python -m pytest -m slow

quality:
	@scripts/setup.sh test
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

style:
	@scripts/setup.sh test
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .
