"""Runs programs, each in a process of its own that begins as a copy of this one, with PyTorch imported: the import
takes longer than most programs. Reads a line of JSON for each, and answers with its exit status."""

from __future__ import annotations

import json
import os
import sys

import numpy  # noqa: F401
import torch  # noqa: F401

program = ""
for line in sys.stdin:
    job = json.loads(line)
    child = os.fork()
    if child == 0:
        os.environ.update(job["environment"])
        for number in (1, 2):
            os.dup2(os.open(job["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
        program = job["program"]
        break
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
# Here, so that the interpreter ends as it does after any program.
exec(compile(program, "<program>", "exec"), {"__name__": "__main__"})
