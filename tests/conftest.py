"""Fixtures that several test files use."""

import os
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
