"""What holds for every test, and for every process that one starts.

One thread for torch: tensors are tiny here, and threads that wait for each other cost more than they bring. Set in the environment, so
that it holds for every thread and process. And Ctrl-C is heard: what a shell starts in the background is born deaf to it, and so are its
children, which would wait for ever where a test interrupts them.
"""

import os
import signal

os.environ.setdefault("OMP_NUM_THREADS", "1")
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
