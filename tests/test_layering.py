"""Who may import whom: the light modules stay light, the package's names are complete."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import torl_sandbox
import torl_trl

PACKAGE = Path(torl_trl.__file__).parent
PACKAGES = {
    "torl_trl": 6000,
    "torl_grading": 1000,
    "torl_interpreters": 1500,
    "torl_sandbox": 1000,
    "torl_data": 1500,
    "torl_eval": 1500,
    "torl_report": 2000,
    "torl_doctor": 1500,
    "torl_guards": 600,
}
"""Each with the lines that it may have."""
MAY_IMPORT = {
    "torl_trl": {"torl_grading", "torl_interpreters"},
    "torl_grading": set(),
    "torl_interpreters": {"torl_sandbox"},
    "torl_sandbox": {"torl_interpreters"},  # kernel.py, of whose text E2B gets a copy
    "torl_data": {"torl_trl", "torl_interpreters", "torl_grading", "torl_eval", "torl_report"},
    "torl_eval": {"torl_trl", "torl_interpreters", "torl_grading"},
    "torl_report": {"torl_trl", "torl_interpreters", "torl_grading", "torl_eval"},
    "torl_doctor": {"torl_trl", "torl_interpreters", "torl_grading", "torl_eval"},
    "torl_guards": {"torl_trl", "torl_interpreters"},
}
"""Arrows between the packages; recipes import any, none imports recipes."""


def loaded_after(statement: str) -> set[str]:
    code = f"{statement}\nimport sys\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    return set(done.stdout.split())


@pytest.mark.parametrize("module", ["rollout", "prompts", "interpreters", "grading", "metrics", "engines.base"])
def test_a_light_module_loads_neither_torch_nor_trl(module):
    assert not {"torch", "trl", "transformers"} & loaded_after(f"import torl_trl.{module}")


def test_the_package_itself_loads_nothing_until_a_name_is_used():
    loaded = loaded_after("import torl_trl")
    assert {name for name in loaded if name.startswith("torl_trl")} == {"torl_trl"}
    assert "torch" not in loaded_after("from torl_trl import run_rollouts, get_interpreter, grade")


def test_every_exported_name_exists():
    for name in torl_trl.__all__:
        assert getattr(torl_trl, name).__name__ == name
    with pytest.raises(AttributeError, match="'Nothing'"):
        _ = torl_trl.Nothing


@pytest.mark.parametrize("package", PACKAGES)
def test_modules_stay_small(package):
    folder = PACKAGE.parent / package
    lines = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in folder.rglob("*.py")}
    assert {path.name: count for path, count in lines.items() if count > 350} == {}
    assert sum(lines.values()) < PACKAGES[package]


def imported_roots(path: Path, *, everywhere: bool = True) -> set[str]:
    """The packages that a module imports, in functions too or only at once."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    nodes = list(ast.walk(tree)) if everywhere else tree.body
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
    return {name.split(".")[0] for name in names}


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_import_only_what_is_below_them(package):
    recipes = {path.stem for path in (PACKAGE.parent / "recipes").glob("*.py")}
    for path in (PACKAGE.parent / package).rglob("*.py"):
        roots = imported_roots(path)
        assert roots & PACKAGES.keys() <= MAY_IMPORT[package] | {package}, path
        assert not roots & recipes, path


FOUND_WITHOUT_EXTRAS = {
    *("torch", "trl", "transformers", "accelerate", "datasets", "httpx", "math_verify", "pyarrow", "numpy", "sympy"),
    *("datasketch", "latex2sympy2_extended", "tqdm", "yaml", "huggingface_hub"),  # all but the first come with others
    *("matplotlib", "scipy", "plotly", "packaging"),
    *PACKAGES,
}
"""What requirements/base.txt brings: the demo has nothing else."""


def test_what_is_imported_at_once_is_there_without_extras():
    """vllm, requests, e2b, peft and trackers are imported where they are used: `make demo` does not install them."""
    for path in (
        path for package in PACKAGES.keys() - {"torl_sandbox"} for path in (PACKAGE.parent / package).rglob("*.py")
    ):
        assert imported_roots(path, everywhere=False) <= FOUND_WITHOUT_EXTRAS | set(sys.stdlib_module_names), path


def test_what_runs_beside_hostile_programs_needs_the_standard_library_only():
    sandbox = Path(torl_sandbox.__file__).parent
    own = {path.stem for path in sandbox.glob("*.py")}
    for path in sandbox.glob("*.py"):
        roots = imported_roots(path) - own - set(sys.stdlib_module_names)
        # kernel.py starts our fork server in E2B, from the text of these packages
        assert roots <= (
            {"torl_interpreters", "torl_sandbox"} if path.name == "kernel.py" else {"numpy", "sympy", "scipy"}
        )
