"""
Compare two versions of the package: weights and logs of the same runs, bit for bit. For refactoring that must not
change any number.

    git worktree add /tmp/before HEAD~1
    python benchmarks/same_numbers.py /tmp/before

Every configuration trains the tiny team for three steps in each version, with this environment; some on two gloo
processes as well. The table names what differs. A configuration that a version does not support counts as different.
"""

import argparse
import dataclasses
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path


HERE = Path(__file__).resolve()
CRITIC = {"advantage": "gae", "critic": "shared"}
EVALUATED = {"eval_strategy": "steps", "eval_steps": 1, "num_generations_eval": 2, "per_device_eval_batch_size": 8}
# Training arguments, and arguments of the trainer by name, see `_arguments`
RUNS = {
    "plain": {},
    "leave_one_out": {"advantage": "leave_one_out", "num_iterations": 2},
    "critic": CRITIC,
    "action": {**CRITIC, "critic": "per_agent", "level": "action"},
    "mappo": {"preset": "mappo", "num_iterations": 2},
    "c3": {"preset": "c3"},
    "credit": {"credit": "per_step", "with": "own rewards"},
    "counterfactual": {"credit": "counterfactual"},
    "sequential": {"update_order": "sequential", "learning_rate": 1e-2},
    "reference": {"beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 1},
    "dynamic": {"dynamic_sampling": True, "with": "rare rewards"},
    "shared": {"agent_weight": "equal", "with": "one adapter"},
    "debate": {"with": "debate", **EVALUATED, "eval_k": [1, 2]},
}
ON_TWO = ["plain", "leave_one_out", "critic", "sequential", "reference", "dynamic", "shared"]
# Times, and memory of the machine
_NOT_COMPARED = ("time", "runtime", "per_second", "memory")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("other", help="a checkout of the other version")
    parser.add_argument("--worker", nargs=2, metavar=("MODEL", "OUT"), help=argparse.SUPPRESS)
    parser.add_argument("--only", nargs="*", default=list(RUNS), choices=list(RUNS))
    options = parser.parse_args()
    if options.worker:
        _work(options.other, *options.worker, options.only)
        return
    with tempfile.TemporaryDirectory() as folder:
        results = [
            {processes: _results(tree, folder, options.only, processes) for processes in (1, 2)}
            for tree in (Path(options.other).resolve(), HERE.parent.parent)
        ]
    differing = 0
    print("| run | processes | |\n|---|---|---|")
    for processes, current in results[1].items():
        for name, result in current.items():
            verdict = _difference(results[0][processes].get(name), result)
            differing += verdict != "same"
            print(f"| {name} | {processes} | {verdict} |")
    sys.exit(bool(differing))


def _results(tree: Path, folder: str, names: list[str], processes: int) -> dict[str, dict]:
    names = [name for name in names if processes == 1 or name in ON_TWO]
    out = Path(folder, f"{tree.name}-{hash(str(tree))}-{processes}.json")
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    command = [sys.executable, "-W", "ignore", *launcher, str(HERE), str(tree)]
    command += ["--worker", f"{folder}/model", str(out)]
    environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    if names:
        subprocess.run([*command, "--only", *names], env=environment, check=True, stdout=subprocess.DEVNULL)
    return json.loads(out.read_text()) if names else {}


def _difference(before: dict | None, after: dict) -> str:
    if before is None or "error" in before or "error" in after:
        return f"failed: {(before or {}).get('error')} / {after.get('error')}"
    if before["weights"] != after["weights"]:
        return "other weights"
    for step, (old_row, new_row) in enumerate(zip(before["logs"], after["logs"], strict=False), start=1):
        names = [name for name in {**old_row, **new_row} if old_row.get(name) != new_row.get(name)]
        if names:
            return f"row {step} of the log: {', '.join(names[:5])}"
    return "same" if len(before["logs"]) == len(after["logs"]) else "other rows in the log"


def _work(tree: str, model: str, out: str, names: list[str]) -> None:
    """Train each configuration, and write the hash of its weights and its logs."""
    import marft_trl
    from marft_trl.tiny import tiny_model, tiny_tokenizer, warm_up

    import torch

    assert Path(marft_trl.__file__).is_relative_to(tree), f"{marft_trl.__file__} is not in {tree}"
    torch.set_num_threads(1)
    if not Path(model).exists():
        torch.manual_seed(0)
        tokenizer = tiny_tokenizer()
        base = tiny_model(len(tokenizer))
        warm_up(base, tokenizer, steps=60)
        tokenizer.save_pretrained(model)
        base.save_pretrained(model)
    results = {}
    for name in names:
        try:
            results[name] = _trained(model, name)
        except Exception as error:  # another version may not know it
            results[name] = {"error": f"{type(error).__name__}: {error}"}
    if int(os.environ.get("RANK", 0)) == 0:
        Path(out).write_text(json.dumps(results))


def _trained(model: str, name: str) -> dict:
    from marft_trl import MARFTConfig, MARFTTrainer

    from peft import LoraConfig

    settings = dict(RUNS[name])
    arguments = _arguments(settings.pop("with", None))
    with tempfile.TemporaryDirectory() as folder:
        defaults = {"per_device_train_batch_size": 8, "num_generations": 4, "max_steps": 3, "logging_steps": 1}
        defaults |= {"learning_rate": 1e-3, "max_completion_length": 16, "save_strategy": "no", "report_to": []}
        args = MARFTConfig(folder, use_cpu=True, disable_tqdm=True, **(defaults | settings))
        trainer = MARFTTrainer(model, args=args, peft_config=LoraConfig(r=4, target_modules="all-linear"), **arguments)
        trainer.train()
    trained = sorted((key, weight) for key, weight in trainer.model.named_parameters() if weight.requires_grad)
    digest = hashlib.sha256()
    for key, parameter in trained:
        digest.update(key.encode() + parameter.detach().float().numpy().tobytes())
    rows = [
        {key: value for key, value in row.items() if not any(part in key for part in _NOT_COMPARED)}
        for row in trainer.state.log_history
    ]
    return {"weights": digest.hexdigest(), "logs": rows}


def _arguments(kind: str | None) -> dict:
    from marft_trl.tiny import tiny_agents, tiny_dataset
    from marft_trl.workflows import Debate

    agents, arguments = tiny_agents(), {"reward_funcs": _varied}
    if kind == "own rewards":
        agents = [dataclasses.replace(agent, reward_funcs=_length) for agent in agents]
    elif kind == "one adapter":
        agents = [dataclasses.replace(agent, adapter="both") for agent in agents]
    elif kind == "rare rewards":
        arguments["reward_funcs"] = _rare
    elif kind == "debate":
        arguments |= {"workflow": Debate([agent.name for agent in agents]), "eval_dataset": tiny_dataset(8)}
    return {**arguments, "agents": agents, "train_dataset": tiny_dataset(64)}


def _varied(completions, **kwargs):
    return [float(sum(map(ord, str(completion))) % 7) for completion in completions]


def _rare(completions, **kwargs):
    return [float(sum(map(ord, str(completion))) % 5 == 0) for completion in completions]


def _length(completions, **kwargs):
    return [float(len(str(completion))) for completion in completions]


if __name__ == "__main__":
    main()
