"""Fixtures that several test files use."""

import json
import os
import subprocess
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of third-party data that is no part of this repository; tests that need it skip without it."""
    folder = Path(os.environ.get("TORL_SHARED", REPOSITORY.parent / "shared"))
    if not folder.is_dir():
        pytest.skip(f"needs third-party data: there is no folder {folder} (set TORL_SHARED)")
    return folder


def pytest_sessionstart() -> None:
    """Fail where the tests of vLLM were asked for and would skip."""
    if os.environ.get("VLLM") == "1":
        try:
            import vllm  # noqa: F401
        except ImportError as error:
            pytest.exit(f"VLLM=1 and vllm cannot be imported: {error}", returncode=1)


def pytest_terminal_summary(terminalreporter, exitstatus: int) -> None:
    """Write the counts to the file that TORL_TEST_RESULT names, for the record of `make test-slow`."""
    path = os.environ.get("TORL_TEST_RESULT")
    if not path:
        return
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=REPOSITORY, capture_output=True, text=True, check=False
    ).stdout.strip()
    counts = {name: len(terminalreporter.stats.get(name, [])) for name in ("passed", "failed", "error", "skipped")}
    seconds = round(time.time() - terminalreporter._session_start.time)
    record = {"commit": commit, "date": datetime.now(UTC).date().isoformat(), "seconds": seconds} | counts
    (REPOSITORY / path).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
