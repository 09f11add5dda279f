"""What holds for every test, and for every process that one starts.

One thread for torch: tensors are tiny here, and threads that wait for each other cost more than they bring. Set in the environment, so
that it holds for every thread and process. And Ctrl-C is heard: what a shell starts in the background is born deaf to it, and so are its
children, which would wait for ever where a test interrupts them.
"""

import os
import signal
from collections.abc import Iterator

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """One thread where the environment says otherwise too: for tests that take thousands of steps, or compare last bits."""
    import torch  # not before the environment is as above

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
