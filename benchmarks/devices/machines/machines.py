"""
Several machines, simulated on one: network namespaces with their own addresses, host names and process ids.

    sudo -E python benchmarks/devices/machines/machines.py   # everything; needs root and iproute2
    sudo -E python benchmarks/devices/machines/machines.py --only torchrun unplugged
    MARFT_VLLM_PYTHON=.venv-vllm/bin/python ...              # with a machine that runs vLLM

Every row starts `train.py` on two machines as docs/guide/several_machines.md says, and compares the result with a
run of the same two processes on one machine. The table has the expected and the actual result. Speed is not measured.
"""

import argparse
import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path


HERE = Path(__file__).resolve().parent
PYTHON, TRAIN = sys.executable, str(HERE / "train.py")
NETWORK, PORT = "10.77.0", 29500
RENDEZVOUS = f"--rdzv_backend c10d --rdzv_endpoint node0:{PORT}"


def sh(command, **options):
    return subprocess.run(command, shell=True, check=True, **options)


class Machines:
    """Three machines `node0` to `node2` at 10.77.0.1 to 10.77.0.3."""

    def __init__(self, own_name_is_local=False):
        self.own_name_is_local = own_name_is_local

    def __enter__(self):
        self.remove()
        sh("ip link add marft0 type bridge && ip link set marft0 up")
        for i in range(3):
            sh(f"ip netns add marft{i} && ip link add mw{i} type veth peer name eth0 netns marft{i}")
            sh(f"ip link set mw{i} master marft0 up && ip -n marft{i} addr add {NETWORK}.{i + 1}/24 dev eth0")
            sh(f"ip -n marft{i} link set eth0 up && ip -n marft{i} link set lo up")
            hosts = ["127.0.0.1 localhost"]
            for j in range(3):
                is_local = self.own_name_is_local and i == j  # as Debian's installer writes a machine's own name
                hosts.append(f"{'127.0.1.1' if is_local else f'{NETWORK}.{j + 1}'} node{j}")
            folder = Path(f"/etc/netns/marft{i}")
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "hosts").write_text("\n".join(hosts) + "\n")
        return self

    def __exit__(self, *_):
        self.remove()

    @staticmethod
    def remove():
        for i in range(3):
            subprocess.run(f"ip netns del marft{i}", shell=True, stderr=subprocess.DEVNULL, check=False)
            shutil.rmtree(f"/etc/netns/marft{i}", ignore_errors=True)
        subprocess.run("ip link del marft0", shell=True, stderr=subprocess.DEVNULL, check=False)

    @staticmethod
    def plug(index, on):
        sh(f"ip -n marft{index} link set eth0 {'up' if on else 'down'}")

    @staticmethod
    def start(index, command, log, **environment):
        """Start a command on a machine; its output goes to a file."""
        inside = ["sh", "-c", f'hostname node{index}; exec "$@"', "sh", *command]
        unshared = ["unshare", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc", *inside]
        return subprocess.Popen(
            ["ip", "netns", "exec", f"marft{index}", *unshared],
            stdout=open(log, "w"),
            stderr=subprocess.STDOUT,
            env={**os.environ, **BASICS, **environment},
            start_new_session=True,
        )


BASICS = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore", "TQDM_DISABLE": "1"}


class Trial:
    """
    Runs of `train.py` on several machines, with their logs, exit codes and seconds.

    Args:
        folder: where outputs and checkpoints go.
        base: folder of the base.
    """

    def __init__(self, folder, base):
        self.folder, self.base = Path(folder), base
        self.logs, self.codes, self.seconds = {}, {}, {}

    def torchrun(self, machines, nodes=(0, 1), flags=None, script=(), out=None, wait=240, during=None, **environment):
        """Start torchrun on each machine. `during(started)` is called while they run."""
        flags = flags or f"--nnodes {len(nodes)} --nproc_per_node 1 --node_rank RANK --master_addr node0"
        flags += "" if "rdzv" in flags else f" --master_port {PORT}"
        commands = {
            node: [PYTHON, "-m", "torch.distributed.run", *flags.replace("RANK", str(rank)).split(), TRAIN]
            for rank, node in enumerate(nodes)
        }
        return self.run(machines, commands, script, out, wait, during, **environment)

    def run(self, machines, commands, script, out, wait, during, **environment):
        begin, started = time.monotonic(), {}
        for node, command in commands.items():
            output = out(node) if callable(out) else str(out or self.folder)
            Path(output).mkdir(parents=True, exist_ok=True)
            log = self.folder / f"node{node}.log"
            own = environment | ({"PYTHONPATH": str(HERE.parents[2])})
            started[node] = machines.start(node, [*command, self.base, output, *script], log, **own)
        if during is not None:
            during(started)
        for node, process in started.items():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(begin + wait - time.monotonic(), 1))
            self.codes[node], self.seconds[node] = process.poll(), round(time.monotonic() - begin)
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            self.logs[node] = (self.folder / f"node{node}.log").read_text(errors="replace")
        return self

    @property
    def text(self):
        return "\n".join(self.logs.values())

    @property
    def hashes(self):
        return set(re.findall(r"HASH (\w+)", self.text))

    def says(self, pattern):
        return re.search(pattern, self.text) is not None

    def wait_for(self, node, pattern, seconds=120):
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if re.search(pattern, (self.folder / f"node{node}.log").read_text(errors="replace")):
                return True
            time.sleep(0.2)
        return False


ROWS = {}


def row(title):
    def keep(function):
        ROWS[function.__name__] = (title, function)
        return function

    return keep


def alone(new, machines, **options):
    """The same two processes on one machine."""
    flags = f"--nnodes 1 --nproc_per_node 2 --master_addr node0 --master_port {PORT}"
    return new().torchrun(machines, nodes=(0,), flags=flags, **options).hashes


@row("torchrun, `--node_rank` and `--master_addr`")
def torchrun(new, machines):
    split, whole = new().torchrun(machines).hashes, alone(new, machines)
    return "the weights of one machine", f"{split} and {whole}", len(split) == 1 and split == whole


@row("torchrun, `--rdzv_backend c10d`")
def rendezvous(new, machines):
    flags = f"--nnodes 2 --nproc_per_node 1 {RENDEZVOUS} --rdzv_id 1"
    split, whole = new().torchrun(machines, flags=flags).hashes, alone(new, machines)
    return "the weights of one machine", f"{split} and {whole}", len(split) == 1 and split == whole


def accelerate(new, machines, kind, **environment):
    trial, commands = new(), {}
    for node in (0, 1):
        config = trial.folder / f"accelerate{node}.yaml"
        config.write_text(
            f"compute_environment: LOCAL_MACHINE\ndistributed_type: {kind}\nnum_machines: 2\nnum_processes: 2\n"
            f"machine_rank: {node}\nmain_process_ip: node0\nmain_process_port: {PORT}\nmain_training_function: main\n"
            "rdzv_backend: static\nsame_network: true\nmixed_precision: 'no'\nuse_cpu: "
            + str(kind == "MULTI_CPU").lower()
            + "\n"
        )
        commands[node] = [PYTHON, "-m", "accelerate.commands.launch", "--config_file", str(config), TRAIN]
    return trial.run(
        machines,
        commands,
        (),
        lambda node: f"{trial.folder}/{node if kind == 'MULTI_CPU' else ''}",
        240,
        None,
        **environment,
    )


@row("accelerate, `distributed_type: MULTI_GPU`")
def multi_gpu(new, machines):
    split, whole = accelerate(new, machines, "MULTI_GPU", ACCELERATE_USE_CPU="true").hashes, alone(new, machines)
    return "the weights of one machine", f"{split} and {whole}", len(split) == 1 and split == whole


@row("accelerate, `distributed_type: MULTI_CPU`")
def multi_cpu(new, machines):
    trial = accelerate(new, machines, "MULTI_CPU")
    warned = all("This run has 1 process, but" in log for log in trial.logs.values())
    return "a warning: each machine trains a run of its own", f"warned: {warned}", warned


@row("FSDP2 over both machines")
def fsdp(new, machines):
    environment = {
        "SHARD_ON_CPU": "1",
        "ACCELERATE_USE_FSDP": "true",
        "FSDP_VERSION": "2",
        "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
        "FSDP_RESHARD_AFTER_FORWARD": "true",
    }
    split = new().torchrun(machines, **environment).hashes
    whole = alone(new, machines)
    return "the weights of data parallelism on one machine", f"{split} and {whole}", len(split) == 1 and split == whole


@row("a reward raises on machine 1")
def raises(new, machines):
    trial = new().torchrun(machines, script=["--fail", "1:2:raise"])
    right = trial.says("Process 1 of the run failed: .*the judge is gone") and trial.says("complete step is saved")
    return "both end with its words, the step is saved", f"after {trial.seconds} s: {right}", right


@row("a process of machine 1 is killed")
def killed(new, machines):
    trial = new().torchrun(machines, script=["--fail", "1:2:kill"])
    right = trial.says(r"Process 1 \(pid \d+ on node1\) is silent")
    return "the other names it and its machine", f"after {trial.seconds} s: {right}", right


@row("`--max_restarts 2` and c10d, a process is killed, and a reward raises, three times each")
def restarts(new, machines):
    flags = f"--nnodes 2 --nproc_per_node 1 --max_restarts 2 {RENDEZVOUS} --rdzv_id 2"
    whole, found = alone(new, machines), []
    for how in ("kill", "raise") * 3:
        trial = new().torchrun(
            machines, flags=flags, script=["--fail", f"1:2:{how}"], TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1"
        )
        found.append(trial.hashes)
    return "the weights of an undisturbed run", f"{found} and {whole}", all(hashes == whole for hashes in found)


def unplug(new, machines, index):
    trial, has_begun = new(), []

    def act(started):
        has_begun.append(trial.wait_for(0, r"step +1/"))
        machines.plug(index, False)

    limits = {"ddp_timeout": 40, "reward_timeout": 20, "workflow_timeout": 20, "tool_timeout": 20}
    settings = json.dumps({"max_steps": 200, "save_steps": 1000, **limits})
    try:
        trial.torchrun(machines, script=["--settings", settings, "--seconds", "0.5"], wait=200, during=act)
    finally:
        machines.plug(index, True)
    return trial, has_begun == [True] and all(code is not None for code in trial.codes.values())


@row("machine 1 is unplugged, `ddp_timeout=40`")
def unplugged(new, machines):
    trial, ended = unplug(new, machines, 1)
    right = ended and re.search(r"Process 1 \(pid \d+ on node1\) is silent", trial.logs[0]) is not None
    return "both end, machine 0 names it", f"after {trial.seconds} s: {right}", right


@row("machine 0, with the store, is unplugged")
def store_unplugged(new, machines):
    trial, ended = unplug(new, machines, 0)
    return "both end", f"after {trial.seconds} s: {ended}", ended


@row("`--nnodes 1:2`, machine 1 is off for good")
def elastic(new, machines):
    trial = new()
    flags = (
        f"--nnodes 1:2 --nproc_per_node 1 --max_restarts 3 {RENDEZVOUS} --rdzv_id 3 "
        "--rdzv_conf join_timeout=60,last_call_timeout=5,keep_alive_interval=1,keep_alive_max_attempt=3"
    )

    def act(started):
        trial.wait_for(0, r"step +2/")
        os.killpg(started[1].pid, signal.SIGKILL)

    settings = json.dumps({"max_steps": 8, "resume_changes": {"accept": ["processes", "batch"]}})
    trial.torchrun(machines, flags=flags, script=["--settings", settings, "--seconds", "0.5"], wait=200, during=act)
    ends = re.findall(r"HASH \w+ of (\d) processes after step (\d+)", trial.logs[0])
    return "machine 0 goes on alone", f"{ends} after {trial.seconds[0]} s", ends == [("1", "8")]


@row("SIGTERM to torchrun, a step of 42 s, `--shutdown-timeout 120`")
def terminated(new, machines):
    trial = new()
    flags = "--nnodes 2 --nproc_per_node 1 --node_rank RANK --master_addr node0 --shutdown-timeout 120"

    def act(started):
        trial.wait_for(0, "Training planner")
        time.sleep(5)
        for process in started.values():  # as a batch system does: to the launcher on each machine
            sh(
                f"pkill -TERM -P $(pgrep -P {process.pid} -f unshare || echo {process.pid}) || true",
                stderr=subprocess.DEVNULL,
            )

    trial.torchrun(machines, flags=flags, script=["--seconds", "42"], wait=200, during=act)
    saved = list(trial.folder.glob("run/checkpoint-*/.complete")) or list(trial.folder.glob("run/checkpoint-1"))
    return "the step is finished and saved", f"{bool(saved)} after {trial.seconds} s", bool(saved)


@row("`output_dir` is on no common disk")
def not_shared(new, machines):
    trial = new()
    trial.torchrun(machines, out=lambda node: f"{trial.folder}/disk{node}")
    right = trial.says("output_dir|not see|shared") and not trial.hashes
    return "refused before training", f"after {trial.seconds} s: {right}", right


@row("a machine's own name is 127.0.1.1, `GLOO_SOCKET_IFNAME=eth0`")
def own_name(new, machines):
    machines.own_name_is_local = True
    with machines:
        split = new().torchrun(machines, GLOO_SOCKET_IFNAME="eth0").hashes
    machines.own_name_is_local = False
    return "the weights of one machine", str(split), len(split) == 1


@row("two machines train, a third one serves, is unplugged and comes back")
def served(new, machines):
    from marft_trl.extras.engines.own_server import vllm_command

    from train import LORA, TEAM

    trial, has_begun = new(), []
    adapters = trial.folder / "adapters"
    adapters.mkdir()
    line = vllm_command(trial.base, TEAM, peft_config=LORA, host=f"{NETWORK}.3", max_model_len=512, device="cpu")
    (variable, value), command = line.split()[0].split("="), shlex.split(line)[2:]
    python = os.environ["MARFT_VLLM_PYTHON"]
    log = trial.folder / "server.log"
    server = machines.start(2, [python, *command], log, **{variable: value, "VLLM_CPU_KVCACHE_SPACE": "1"})
    probe = ["ip", "netns", "exec", "marft0", PYTHON, "-c", PROBE]
    try:
        end = time.monotonic() + 300
        while subprocess.run(probe, stderr=subprocess.DEVNULL, check=False).returncode and time.monotonic() < end:
            time.sleep(2)

        def act(started):
            has_begun.append(trial.wait_for(0, r"step +2/", 200))
            machines.plug(2, False)
            time.sleep(15)
            machines.plug(2, True)

        settings = {
            "use_vllm": True,
            "vllm_mode": "server",
            "vllm_server_base_url": f"http://{NETWORK}.3:8000",
            "vllm_adapter_dir": str(adapters),
            "max_steps": 6,
        }
        trial.torchrun(machines, script=["--settings", json.dumps(settings)], wait=400, during=act)
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()
    hashes = re.findall(r"HASH (\w+) of 2 processes after step 6", trial.text)
    right = has_begun == [True] and len(hashes) == 2 and len(set(hashes)) == 1
    return "training waits and goes on", f"{hashes} after {trial.seconds} s", right


PROBE = f"import urllib.request; urllib.request.urlopen('http://{NETWORK}.3:8000/health', timeout=2)"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=list(ROWS), default=list(ROWS))
    parser.add_argument("--keep", type=Path, help="folder for the outputs, which are removed otherwise")
    options = parser.parse_args()
    if os.geteuid() or shutil.which("ip") is None:
        raise SystemExit("Network namespaces need root and iproute2.")
    if "served" in options.only and "MARFT_VLLM_PYTHON" not in os.environ:
        print("Without MARFT_VLLM_PYTHON, an interpreter with vLLM, no machine serves.", file=sys.stderr)
        options.only = [name for name in options.only if name != "served"]
    from marft_trl.tiny import tiny_model, tiny_tokenizer

    failed = 0
    with tempfile.TemporaryDirectory() as temporary, Machines() as machines:
        folder = options.keep or Path(temporary)
        base = folder / "base"
        tokenizer = tiny_tokenizer()
        tokenizer.save_pretrained(base)
        tiny_model(len(tokenizer)).save_pretrained(base)
        count = iter(range(1000))

        def new():
            trial_folder = folder / f"trial{next(count)}"
            trial_folder.mkdir(parents=True)
            return Trial(trial_folder, str(base))

        print("| what | expected | happened | |\n|---|---|---|---|", flush=True)
        for name in options.only:
            title, trial = ROWS[name]
            expected, happened, right = trial(new, machines)
            failed += not right
            print(f"| {title} | {expected} | {happened} | {'as expected' if right else '**NOT**'} |", flush=True)
    raise SystemExit(bool(failed))


if __name__ == "__main__":
    main()
