"""What tests share."""

from __future__ import annotations

import json
import select
import subprocess
import sys
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator
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


def pytest_configure(config: pytest.Config) -> None:
    """Processes that share a machine take a thread each."""
    if hasattr(config, "workerinput"):
        torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leaves out what needs the CPU, where tests run on a GPU."""
    if DEVICE != "cpu":
        for item in items:
            if item.get_closest_marker("cpu"):
                item.add_marker(pytest.mark.skip(reason="for tensors of the CPU"))


@pytest.fixture(scope="session")
def zygote() -> Iterator[subprocess.Popen[str]]:
    """A process that programs are started from, see ``zygote.py``."""
    command = [sys.executable, "-X", "faulthandler", str(Path(__file__).with_name("zygote.py"))]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()


@pytest.fixture(scope="session")
def run_python(zygote: subprocess.Popen[str], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """Runs a program in an interpreter of its own, which must end well; returns what it prints."""

    def run(program: str, **environment: str) -> str:
        assert zygote.stdin is not None and zygote.stdout is not None
        output = tmp_path_factory.mktemp("program") / "output"
        job = {"program": textwrap.dedent(program), "environment": environment, "output": str(output)}
        zygote.stdin.write(json.dumps(job) + "\n")
        zygote.stdin.flush()
        ended = select.select([zygote.stdout], [], [], 120)[0]
        status = zygote.stdout.readline().strip() if ended else "none after 120 s"
        assert status == "0", f"exit status {status}\n{output.read_text()}"
        return output.read_text()

    return run
