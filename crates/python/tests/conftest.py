"""What tests share."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import warpsmith
from device import DEVICE


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record", type=Path, metavar="FILE", help="write how many tests passed, and where")


def pytest_terminal_summary(terminalreporter: Any, exitstatus: int, config: pytest.Config) -> None:
    """Leaves a record of the run, also of one that failed."""
    file = config.getoption("--record")
    if file is None:
        return
    stats = terminalreporter.stats
    reasons = Counter(report.longrepr[2].removeprefix("Skipped: ") for report in stats.get("skipped", []))
    record = {
        "device": torch.cuda.get_device_name() if DEVICE != "cpu" else "cpu",
        "warpsmith": warpsmith.__version__,
        "torch": torch.__version__,
        "python": sys.version.split()[0],
        "exit_status": int(exitstatus),
        "passed": len(stats.get("passed", [])),
        "failed": sorted(report.nodeid for report in stats.get("failed", []) + stats.get("error", [])),
        "skipped": dict(sorted(reasons.items())),
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(record, indent=2) + "\n")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leaves out what needs the CPU, where tests run on a GPU."""
    if DEVICE != "cpu":
        for item in items:
            if item.get_closest_marker("cpu"):
                item.add_marker(pytest.mark.skip(reason="for tensors of the CPU"))


@pytest.fixture
def run_python() -> Callable[..., str]:
    """Runs a program in an interpreter of its own, which must end well; returns what it prints."""

    def run(program: str, **environment: str) -> str:
        done = subprocess.run(
            [sys.executable, "-X", "faulthandler", "-c", textwrap.dedent(program)],
            env=os.environ | environment,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, f"exit status {done.returncode}\n{done.stdout}{done.stderr}"
        return done.stdout

    return run
