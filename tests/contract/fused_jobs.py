"""What `attach(..., fused=True)` promises, through Triton's interpreter. A process of its own, started by test_fused_step.py with
TRITON_INTERPRET=1, which has to be set before Triton is imported. Each job is a function in one of the files that are imported here;
its name is printed when it holds.

Where bits are compared, all numbers have so few digits that no operation rounds: the order of operations then makes no difference, and
neither does a fused multiply-add.
"""

from __future__ import annotations

import sys
import traceback

import fused_edge_jobs  # noqa: F401
import fused_kernel_jobs  # noqa: F401
import fused_run_jobs  # noqa: F401
from fused_register import JOBS

if __name__ == "__main__":
    for name in sys.argv[1:] or list(JOBS):
        try:
            JOBS[name]()
        except Exception:
            print("BREAKS", name, traceback.format_exc(), flush=True)
        else:
            print("holds", name, flush=True)
