# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""
Runs a command, and ends it with all its processes when the standard input of this script ends: when the process that
started it has ended, in whatever way. Run as a script, without the package.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading


def main() -> int:
    child = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL, start_new_session=True)  # noqa: S603

    def end_with_its_owner() -> None:
        while os.read(0, 1024):  # not `sys.stdin`, which an interpreter that ends waits for
            pass
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)

    threading.Thread(target=end_with_its_owner, daemon=True).start()
    status = child.wait()
    with contextlib.suppress(ProcessLookupError):  # an engine that outlives its server
        os.killpg(child.pid, signal.SIGKILL)
    return status


if __name__ == "__main__":
    sys.exit(main())
