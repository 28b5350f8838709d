"""A vLLM server for benchmarks, started with the documented command."""

import os
import shlex
import signal
import subprocess
import time
import urllib.request
from pathlib import Path

from marft_trl.extras.engines import vllm_command
from marft_trl.tiny import tiny_agents, tiny_model, tiny_tokenizer


def vllm_version():
    """Version of vLLM in the environment that the server runs in."""
    code = "import vllm; print(vllm.__version__)"
    command = [os.environ["MARFT_VLLM_PYTHON"], "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[-1]


def tiny_base(folder):
    """Save an untrained tiny model and its tokenizer, and return the folder."""
    tokenizer = tiny_tokenizer()
    tokenizer.save_pretrained(folder)
    tiny_model(len(tokenizer)).save_pretrained(folder)
    return str(folder)


class Server:
    """
    A vLLM server in its own process. `MARFT_VLLM_PYTHON` names the interpreter that has vLLM.

    Args:
        model (`str`): name or folder of the base.
        peft_config ([`~peft.PeftConfig`]): config of the adapters.
        folder (`str`): folder for its log.
        port (`int`): port.
        device (`str`): `"cpu"` or `"cuda"`.
        max_model_len (`int`): maximum tokens of a prompt and its turn.
        extra (`Sequence[str]`): further flags.
    """

    def __init__(self, model, peft_config, folder, port=8300, device="cpu", max_model_len=1024, extra=()):
        self.url, self.model = f"http://127.0.0.1:{port}", model
        limits = {"port": port, "max_model_len": max_model_len, "device": device, "extra": list(extra)}
        assignment, _, *flags = shlex.split(vllm_command(model, tiny_agents(), peft_config=peft_config, **limits))
        name, value = assignment.split("=")
        environment = {"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_NO_USAGE_STATS": "1", **os.environ, name: value}
        self._log = Path(folder) / "server.log"
        with open(self._log, "w") as log:
            command = [os.environ["MARFT_VLLM_PYTHON"], *flags]
            self._process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)

    def __enter__(self):
        for _ in range(1200):
            try:
                urllib.request.urlopen(self.url + "/health", timeout=5).close()
                return self
            except OSError:
                if self._process.poll() is not None:
                    break
                time.sleep(0.5)
        self.__exit__()
        raise RuntimeError(f"The server did not start:\n{self._log.read_text()[-3000:]}")

    def __exit__(self, *error):
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
