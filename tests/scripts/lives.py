"""
Kills training runs and starts them again with the same command, until they end.

    python tests/scripts/lives.py random FOLDER MODEL [--kills 10] [--seed 0] [--processes 1]
    python tests/scripts/lives.py operations FOLDER MODEL [--every 1] [--rank 0] [--processes 1]
    python tests/scripts/lives.py faults FOLDER MODEL [--kinds raise hang ...]

`random`: SIGKILL at random instants. `operations`: SIGKILL at each (or every n-th) file operation of a save, on one
process. `faults`: two processes, of which one raises, hangs, dies, gets a signal or has nothing to learn from. Prints
the outcome as JSON. The processes of a life are forked, so that they need not import anything.
"""

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import socket
import sys
import time
import traceback
from pathlib import Path


os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}  # accelerate would set the first

import safetensors.torch
import torch
from transformers import TrainerCallback


sys.path.insert(0, str(Path(__file__).parent.parent.parent))

from marft_trl.runs.run_folder import RunFolder, is_remainder
from tests import exactness
from tests.helpers import StopAt, varied_reward


# The step in whose save processes are killed, after one checkpoint that is complete
STEP = 3
LIMIT = 120  # seconds of a life


class KillAt(TrainerCallback):
    """
    Kills the process at a file operation of the save of [`STEP`].

    Args:
        folder (`Path`): operations on paths in it count.
        number (`int`, *optional*): the operation; without it, no process is killed.
        report (`Path`): the file that gets the operations, one a line.
    """

    def __init__(self, folder: Path, number: int | None, report: Path):
        self._folder, self._number, self._report = str(folder), number, report
        self._count, self._is_saving = 0, False

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == STEP:
            self._is_saving = True
            sys.addaudithook(self._audit)
            self._wrap(os, "fsync")
            self._wrap(safetensors.torch, "save_file")
            self._wrap(torch, "save")

    def on_save(self, args, state, control, **kwargs):
        self._is_saving = False

    def _audit(self, event, arguments):
        if event == "open" or event.startswith(("os.rename", "os.remove", "os.mkdir", "os.rmdir")):
            path = arguments[0]
            if self._is_saving and isinstance(path, (str, os.PathLike)) and str(path).startswith(self._folder):
                self._note(f"{event} {Path(path).name}")

    def _wrap(self, module, name):
        original = getattr(module, name)

        def wrapped(*arguments, **named):
            self._note(f"before {name}")
            result = original(*arguments, **named)
            if name != "fsync":
                target = next(argument for argument in arguments if isinstance(argument, (str, os.PathLike)))
                self._note(f"half of {Path(target).name}", target)
            return result

        setattr(module, name, wrapped)
        if module is safetensors.torch:  # where it was imported by name
            for other in list(sys.modules.values()):
                for alias in [attribute for attribute, value in vars(other).items() if value is original]:
                    setattr(other, alias, wrapped)

    def _note(self, operation, half=None):
        if not self._is_saving:
            return
        self._count += 1
        if self._count == self._number:
            if half is not None:
                os.truncate(half, os.path.getsize(half) // 2)
            os.kill(os.getpid(), signal.SIGKILL)
        if self._number is None:
            self._is_saving = False  # the report is no operation of the save
            with open(self._report, "a") as file:
                file.write(operation + "\n")
            self._is_saving = True


class Faulty:
    """A reward function that fails in the third step on one process."""

    __name__ = "faulty"

    def __init__(self, kind, report):
        self.kind, self.report, self.calls = kind, report, 0

    def __call__(self, completions, **kwargs):
        self.calls += 1
        if self.kind == "nothing":
            return [None] * len(completions)
        if self.calls == 3:
            self.report.write_text(str(time.time()))
            self.fail()
        return varied_reward(completions)

    def fail(self):
        if self.kind == "raise":
            raise ZeroDivisionError("boom")
        if self.kind == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.kind == "signal":
            os.kill(os.getpid(), signal.SIGTERM)
            return
        if self.kind == "stuck":  # cannot be interrupted
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGRTMAX, signal.SIGALRM])
        time.sleep(300)


def train(folder, model, processes, callbacks=(), reward=None):
    """One life of one process."""
    setting = ("ppo", "graph", 2, 4, 3) if reward is None else ("ppo", "graph", 1, 1, 1)
    settings = {"per_device_train_batch_size": 4 // processes, "use_cpu": True, "save_total_limit": 1}
    settings |= {"ddp_timeout": 60, "reward_timeout": 30, "workflow_timeout": 30, "tool_timeout": 5}
    if reward is not None:
        settings |= {"reward_timeout": 2, "save_steps": 50}
    arguments = {} if reward is None else {"reward_funcs": reward}
    trainer = exactness.trainer_of(setting, model, folder, list(callbacks), settings=settings, **arguments)
    trainer.train(resume_from_checkpoint=True)


def begin(folder, model, processes, callbacks=lambda rank: (), reward=lambda rank: None):
    """Fork the processes of a life."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    pids = []
    for rank in range(processes):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                if processes > 1:
                    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(processes)}
                    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
                with open(f"{folder}.{rank}.log", "a") as log:
                    os.dup2(log.fileno(), 1)
                    os.dup2(log.fileno(), 2)
                    try:
                        train(folder, model, processes, callbacks(rank), reward(rank))
                        code = 0
                    except SystemExit as error:
                        traceback.print_exc()
                        code = error.code
                    except BaseException:
                        traceback.print_exc()
            finally:
                os._exit(code)
        pids.append(pid)
    return pids


def end(pids):
    """Wait for the processes of a life. Returns their exit statuses; 9 for those that were killed."""
    until, statuses = time.monotonic() + LIMIT, {}
    while len(statuses) < len(pids):
        for pid in set(pids) - statuses.keys():
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                statuses[pid] = os.waitstatus_to_exitcode(status)
        if time.monotonic() > until:
            for pid in set(pids) - statuses.keys():
                os.kill(pid, signal.SIGKILL)
            raise TimeoutError(f"A life took more than {LIMIT} seconds.")
        time.sleep(0.01)
    return [statuses[pid] for pid in pids]


def half_written(folder):
    """Whether the folder holds a checkpoint that is not complete."""
    runs = RunFolder(folder)
    return any(is_remainder(checkpoint, runs.known_run() or "") for checkpoint in runs.checkpoints())


def finish(folder, model, processes, whole):
    """Start the run again until it has ended, and compare it with the one that was not interrupted."""
    statuses = end(begin(folder, model, processes))
    last = f"checkpoint-{exactness.STEPS}"
    if any(statuses):
        return [f"the restart ended with {statuses}"]
    return exactness.differences(whole / last, folder / last)


def at_random(folder, model, processes, kills, seed):
    """Kill at random instants."""
    draw = random.Random(seed)
    whole, cut = folder / "whole", folder / "cut"
    start = time.monotonic()
    assert end(begin(whole, model, processes)) == [0] * processes, "the run itself fails"
    length = time.monotonic() - start
    count = inside = 0
    while count < kills:
        pids = begin(cut, model, processes)
        time.sleep(draw.uniform(0.1, 0.7) * length)
        if os.waitpid(pids[0], os.WNOHANG)[0]:  # it had ended: begin another run
            with contextlib.suppress(ChildProcessError):
                end(pids[1:])
            if wrong := exactness.differences(whole / "checkpoint-12", cut / "checkpoint-12"):
                return {"kills": count, "in_saves": inside, "wrong": wrong}
            shutil.rmtree(cut)
            continue
        os.kill(draw.choice(pids), signal.SIGKILL)
        end(pids)
        count += 1
        inside += half_written(cut)
    return {"kills": count, "in_saves": inside, "wrong": finish(cut, model, processes, whole)}


def at_operations(folder, model, processes, rank, every, restarts):
    """Kill at file operations of a save."""
    whole, first, cut, report = folder / "whole", folder / "first", folder / "cut", folder / "operations.txt"
    assert end(begin(whole, model, processes)) == [0] * processes, "the run itself fails"
    assert end(begin(first, model, processes, lambda rank: [StopAt(STEP - 1)])) == [0] * processes
    shutil.copytree(first, cut)
    watched = lambda process, number: [*([KillAt(cut, number, report)] if process == rank else []), StopAt(STEP)]  # noqa: E731
    assert end(begin(cut, model, processes, lambda process: watched(process, None))) == [0] * processes
    operations = report.read_text().splitlines()
    outcome = {"operations": len(operations), "kills": 0, "restarts": 0, "stood": {}, "wrong": []}
    for number in range(1, len(operations) + 1, every):
        shutil.rmtree(cut)
        shutil.copytree(first, cut)
        statuses = end(begin(cut, model, processes, lambda process, number=number: watched(process, number)))
        assert statuses[rank] == -signal.SIGKILL, (number, statuses)
        outcome["kills"] += 1
        newest = RunFolder(cut).newest()
        step = newest[1].step if newest else None
        outcome["stood"][str(step)] = outcome["stood"].get(str(step), 0) + 1
        wrong = [] if step in (STEP - 1, STEP) else [f"checkpoint {step} stands"]
        if not wrong and outcome["kills"] % restarts == 0:
            outcome["restarts"] += 1
            wrong = finish(cut, model, processes, whole)
        outcome["wrong"] += [f"{operations[number - 1]} ({number}): {', '.join(wrong)}"] if wrong else []
    return outcome


def with_faults(folder, model, kinds, rank):
    """Cause each fault on one of two processes. Returns exit statuses and the seconds from fault to end."""
    outcome = {}
    for kind in kinds:
        cut, report = folder / kind, folder / f"{kind}.time"
        rewards = {1 - rank: varied_reward, rank: Faulty(kind, report)}
        statuses = end(begin(cut, model, 2, reward=rewards.get))
        seconds = time.time() - float(report.read_text()) if report.exists() else None
        newest = RunFolder(cut).newest()
        logs = [Path(f"{cut}.{rank}.log").read_text() for rank in (0, 1)]
        errors = [[line for line in log.splitlines() if "Error" in line or "TookTooLong" in line][-1:] for log in logs]
        stands = newest[1].step if newest else None
        outcome[kind] = {"statuses": statuses, "seconds": seconds, "errors": errors, "stands": stands}
    return outcome


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("mode", choices=["random", "operations", "faults"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("model")
    # The run is started again after every `restarts` kills
    for name, default in {"processes": 1, "kills": 10, "seed": 0, "rank": 0, "every": 1, "restarts": 1}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    kinds = ["raise", "hang", "die", "signal", "nothing", "stuck"]
    parser.add_argument("--kinds", nargs="+", choices=kinds, default=kinds)
    options = parser.parse_args()
    torch.set_num_threads(1)
    options.folder.mkdir(parents=True, exist_ok=True)
    run, arguments = {
        "random": (at_random, (options.processes, options.kills, options.seed)),
        "faults": (with_faults, (options.kinds, options.rank)),
        "operations": (at_operations, (options.processes, options.rank, options.every, options.restarts)),
    }[options.mode]
    print(json.dumps(run(options.folder, options.model, *arguments)))


if __name__ == "__main__":
    main()
