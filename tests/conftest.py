"""One thread for torch in the tests: their tensors are tiny, and threads that wait for each other cost more than they bring.

Set in the environment, so that it holds for every thread and every process that a test starts.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
