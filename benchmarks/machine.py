"""Facts about the machine that stand beside every result."""

import os
import platform
from datetime import UTC, datetime
from importlib.metadata import version


def machine_facts() -> dict[str, str]:
    """Processor, cores, versions and the day, as flat names."""
    return {
        "machine/processor": _processor(),
        "machine/cores": str(os.cpu_count()),
        "machine/python": platform.python_version(),
        "machine/torch": version("torch"),
        "machine/transformers": version("transformers"),
        "machine/trl": version("trl"),
        "machine/date": datetime.now(UTC).date().isoformat(),
    }


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            return next(line.split(":", 1)[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
