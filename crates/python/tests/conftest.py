"""What tests share."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable

import pytest
from device import DEVICE


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
