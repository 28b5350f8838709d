# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Two processes: one fails and stays connected, the other waits in C, as in a collective of NCCL that never ends."""

import ctypes
import sys
import time

from marft_trl.system import processes as lookout
from marft_trl.system.processes import Processes

from accelerate import Accelerator


lookout._STUCK_SECONDS = float(sys.argv[1])
processes = Processes(Accelerator(cpu=True))
try:
    with processes.reporting_failures():
        if processes.index == 1:
            raise KeyError("the judge is gone")
        print("waiting", flush=True)
        ctypes.CDLL(None).sleep(600)
except KeyError:
    time.sleep(600)
