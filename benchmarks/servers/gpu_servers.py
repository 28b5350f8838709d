"""
All figures of rollouts on vLLM servers, on a machine with a GPU, written as a page.

    MARFT_VLLM_PYTHON=.venv-vllm/bin/python python benchmarks/servers/gpu_servers.py --model Qwen/Qwen3-0.6B
    python benchmarks/servers/gpu_servers.py --serve_on 1   # one GPU for the server, another for training

`MARFT_VLLM_PYTHON` names the interpreter of an environment with vLLM. By default, server and trainer share the first
GPU, and the server takes the share `--memory` of it. With `--serve_on`, the server has its own GPUs; only then does
`overlap on the server` measure the gain of overlap. `--device cpu` with `--model tiny` tests the script itself.

The parts are those of `engines.py`, and learning at `max_staleness` 0, 1 and 4 of `staleness.py` (`--learning`).
"""

import datetime
import importlib.metadata
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

import engines
import torch
from engines import PEFT, RESULTS, arguments, median_and_range, run_parts
from vllm_server import Server, tiny_base, vllm_version


def versions():
    """Versions of the measured packages."""
    names = ("marft-trl", "trl", "transformers", "peft", "accelerate", "torch")
    packages = {name: importlib.metadata.version(name) for name in names}
    return {**packages, "vllm": vllm_version()}


def hardware(device):
    if device == "cpu":
        return f"{os.cpu_count()} CPU cores, {platform.machine()}"
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return ", ".join(names)


def page(options, learning):
    """The page, as Markdown."""
    packages = versions()
    shared = "the same device" if options.serve_on is None else f"GPU {options.serve_on}"
    lines = [
        "# Figures of rollouts on vLLM servers",
        "",
        f"- {datetime.date.today().isoformat()}, {hardware(options.device)}; the server on {shared}",
        f"- base: `{options.given_model}`; {', '.join(f'{name} {number}' for name, number in packages.items())}",
        f"- `python benchmarks/servers/gpu_servers.py {' '.join(sys.argv[1:])}`",
        "",
        "Medians, and the spread over the rounds.",
        "",
        "| what | median | smallest | largest | rounds |",
        "|---|---|---|---|---|",
        *(
            f"| {' | '.join([name, *median_and_range(values, form), str(len(values))])} |"
            for name, (values, form) in RESULTS.items()
        ),
        *(["", "## Learning", "", learning] if learning else []),
    ]
    return "\n".join(lines) + "\n"


def measured_learning(options):
    """The table of `staleness.py`, on its own server."""
    command = [sys.executable, "-W", "ignore", str(Path(__file__).with_name("staleness.py"))]
    command += ["--device", options.device, "--port", str(options.port + 1)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        return f"It failed:\n\n```text\n{done.stderr[-2000:]}\n```"
    return done.stdout


def main():
    parser = arguments()
    parser.description = __doc__
    parser.set_defaults(parts=[part for part in engines.PARTS if part not in engines.ALONE])
    parser.add_argument("--model", default="Qwen/Qwen3-0.6B", help="name or folder of the base, or `tiny`")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--serve_on", help="GPUs of the server, as in CUDA_VISIBLE_DEVICES")
    parser.add_argument("--memory", type=float, default=0.4, help="share of a GPU that both use, for the server")
    parser.add_argument("--flags", nargs="*", default=[], help="further flags of the server")
    parser.add_argument("--learning", action="store_true", help="learning at several `max_staleness`, over 5 seeds")
    parser.add_argument("--page", type=Path, default=Path("gpu.md"))
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("PyTorch finds no GPU. Use `--device cpu --model tiny` to test the script.")
    if "MARFT_VLLM_PYTHON" not in os.environ:
        raise SystemExit("Set `MARFT_VLLM_PYTHON` to the interpreter of an environment with vLLM.")
    flags = list(options.flags)
    if options.device == "cuda" and options.serve_on is None:
        flags += ["--gpu-memory-utilization", str(options.memory)]
    options.given_model = options.model
    with tempfile.TemporaryDirectory() as folder:
        if options.model == "tiny":
            options.model = tiny_base(folder)
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        if options.serve_on is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = options.serve_on
        server = Server(options.model, PEFT, folder, options.port, options.device, extra=flags)
        if options.serve_on is not None:
            os.environ.pop("CUDA_VISIBLE_DEVICES")
            if visible is not None:
                os.environ["CUDA_VISIBLE_DEVICES"] = visible
        with server:
            options.url = server.url
            try:
                run_parts(options)
            finally:  # keep the results of earlier parts
                options.page.write_text(page(options, ""), encoding="utf-8")
    if options.learning:
        options.page.write_text(page(options, measured_learning(options)), encoding="utf-8")
    print(f"written to {options.page}")


if __name__ == "__main__":
    main()
