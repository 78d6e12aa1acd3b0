"""One HTML page about runs that works offline: curves, behaviours, a browser of rollouts, and facts.

    build_page([Path("runs/tiny")], Path("runs/tiny/report.html"))

The page holds everything: its script and style, plotly, and the data, compressed. Text of models and data is hostile:
it travels as base64, and the script sets it as text only.
"""

import base64
import gzip
import html
import json
import re
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from plotly.offline import get_plotlyjs

from torl_report.behaviours import BEHAVIOURS, LABELS
from torl_report.facts import EVALUATION_NAME, differing_options, machine_facts, run_facts
from torl_report.sampling import StoredRollouts, choose_groups, label_lines, read_groups
from torl_report.series import METRIC_SECTIONS, Lines, Panel, draw_sections
from torl_trl.errors import UserError
from torl_trl.run_folder import METRICS_NAME, ROLLOUTS_NAME, read_metrics, write_atomically

PAGE_NAME = "report.html"
PAGE_BYTES = 14_500_000
"""What a page may have; rollouts get what the rest of it leaves, all runs the same."""


def build_page(run_folders: Sequence[Path], path: Path | None = None) -> Path:
    """Write the page of these runs (training or evaluation folders) and return its path: report.html in the first.

    Several runs make a comparison. A run may still be going on. Raises `UserError` for a folder that is no run.
    """
    folders = [Path(folder) for folder in run_folders]
    for folder in folders:
        _check_run(folder)
    names = _names(folders)
    lines = {name: _metrics(folder) for name, folder in zip(names, folders, strict=True)}
    stored = {name: read_groups(folder, run) for run, (name, folder) in enumerate(zip(names, folders, strict=True))}
    sections, missing = draw_sections(lines, METRIC_SECTIONS)
    data = {
        "runs": [{"name": name} | run_facts(folder) for name, folder in zip(names, folders, strict=True)],
        "made": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "machine": machine_facts(),
        "differences": differing_options(folders),
        "sections": sections,
        "missing": missing,
        "labels": _labels(stored),
        "labelSections": draw_sections(
            {name: label_lines(of_run) for name, of_run in stored.items()}, _label_panels()
        )[0],
        "recorded": sum(of_run.recorded for of_run in stored.values()),
        "withText": sum(of_run.with_text for of_run in stored.values()),
        "withoutSegments": sum(of_run.without_segments for of_run in stored.values()),
    }
    text, plotly = json.dumps(data, ensure_ascii=False), _packed(get_plotlyjs())
    budget = (PAGE_BYTES - len(plotly) - len(_packed(text))) * 3 // 4  # base64 writes 3 bytes as 4
    chosen = [group for of_run in stored.values() for group in choose_groups(of_run.groups, budget // len(names))]
    text = f'{text[:-1]}, "rollouts": [{",".join(group.text() for group in chosen)}]}}'
    path = path or folders[0] / PAGE_NAME
    write_atomically(path, _render(", ".join(names), plotly, _packed(text)))
    return path


def _check_run(folder: Path) -> None:
    if not any((folder / name).exists() for name in (METRICS_NAME, EVALUATION_NAME, ROLLOUTS_NAME)):
        raise UserError(
            f"Run folder {str(folder)!r} has neither {METRICS_NAME} nor {EVALUATION_NAME} nor {ROLLOUTS_NAME}/: "
            "name the output_dir of a run that has begun."
        )


def _names(folders: Sequence[Path]) -> list[str]:
    """The folders' own names, or their paths where two are alike."""
    names = [folder.resolve().name for folder in folders]
    return names if len(set(names)) == len(names) else [str(folder) for folder in folders]


def _metrics(folder: Path) -> Lines:
    return read_metrics(folder) if (folder / METRICS_NAME).exists() else []


def _label_panels() -> dict[str, tuple[Panel, ...]]:
    def panels(labels: Sequence[str]) -> tuple[Panel, ...]:
        return tuple(
            Panel(label.replace("_", " ").capitalize(), "share of rollouts with text", {label: label})
            for label in labels
        )

    return {
        "The paper's behaviours (section 3.4)": panels(BEHAVIOURS),
        "Other labels": panels([label for label in LABELS if label not in BEHAVIOURS]),
    }


def _labels(stored: dict[str, StoredRollouts]) -> list[dict[str, Any]]:
    """Each label with its rule and its number of rollouts with text, by run."""
    return [
        {
            "key": label,
            "rule": rule,
            "counts": [sum(counts[label] for counts in of_run.labelled.values()) for of_run in stored.values()],
            "of": [of_run.with_text for of_run in stored.values()],
        }
        for label, rule in LABELS.items()
    ]


def _render(title: str, plotly: str, data: str) -> str:
    files = {
        kind: (Path(__file__).parent / f"page.{kind}").read_text(encoding="utf-8") for kind in ("html", "css", "js")
    }
    parts = {
        "TITLE": html.escape(title),
        "STYLE": files["css"],
        "SCRIPT": files["js"],
        "PLOTLY": plotly,
        "DATA": data,
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda place: parts[place[1]], files["html"])


def _packed(text: str) -> str:
    return base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode()
