"""The largest of many weights, and random numbers by a hash, are by Triton what they are by plain torch, bit for bit.

The kernels run through Triton's interpreter, in processes of their own; tests/gpu runs them on a GPU.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def test_triton_chooses_and_draws_what_plain_torch_does():
    script = Path(__file__).with_name("selection_interpreted.py")
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    environment.pop("NOFM_KERNELS", None)
    command = [sys.executable, str(script)]
    started = [
        subprocess.Popen([*command, str(i), "2"], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for i in range(2)
    ]
    printed = [process.communicate(timeout=280) for process in started]
    for process, (out, err) in zip(started, printed, strict=True):
        assert process.returncode == 0, out[-2000:] + err[-4000:]
    assert sum(line.startswith("compared") for out, _ in printed for line in out.splitlines()) == 12 + 7
