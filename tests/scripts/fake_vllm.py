"""
Stands in for the interpreter of an environment with vLLM: a server without a model, at `--port`. Writes the requests,
the arguments and the environment to the file that `FAKE_VLLM_LOG` names.
"""

import json
import math
import os
import subprocess
import sys
import time

from tests.vllm_server import FakeServer, as_text, turn


VOCABULARY = 398


def main(arguments):
    if os.environ.get("FAKE_VLLM_FAILS"):
        raise SystemExit("no such model")
    child = subprocess.Popen(["sleep", "600"])  # as the process of an engine
    server = FakeServer(int(arguments[arguments.index("--port") + 1]))
    flat = -math.log(VOCABULARY)
    server.logps = lambda adapter, ids, temperature: {5: flat if temperature > 1 else flat + 0.5}
    server.fault = lambda body: as_text(turn({**body, "model": ""}))
    server.start()
    while True:
        report = {"arguments": arguments, "environment": dict(os.environ), "calls": server.calls, "child": child.pid}
        with open(os.environ["FAKE_VLLM_LOG"] + ".part", "w") as log:
            json.dump(report, log)
        os.replace(os.environ["FAKE_VLLM_LOG"] + ".part", os.environ["FAKE_VLLM_LOG"])
        time.sleep(0.05)


if __name__ == "__main__":
    main(sys.argv[1:])
