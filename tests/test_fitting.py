"""The memory of the backward pass is measured, and micro-batches are sized to the free memory."""

import gc
import json
import os
import subprocess
import sys
import weakref
from pathlib import Path

from marft_trl.learning import batching as micro_batcher
from marft_trl.learning.batching import Row, micro_batches
from marft_trl.learning.memory import free_memory, measure_activations
from marft_trl.shared_prefix import forward
from marft_trl.tiny import tiny_dataset

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .families import family_model
from .helpers import in_turn, moved_by_training, only_slice, team_trainer, weights


ROOT = Path(__file__).parents[1]


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the tensors that operations make and that are alive: `peak` is their largest number."""

    def __init__(self):
        super().__init__()
        self.now = self.peak = 0
        self.alive = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        outputs = function(*args, **(kwargs or {}))
        storages = {leaf.untyped_storage()._cdata for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)}
        for output in tree_leaves(outputs):
            if isinstance(output, torch.Tensor) and output.untyped_storage()._cdata not in storages | self.alive:
                storage = output.untyped_storage()
                self.alive.add(storage._cdata)
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self.freed, storage._cdata, storage.nbytes())
        return outputs

    def freed(self, key, size):
        self.alive.discard(key)
        self.now -= size


@pytest.mark.parametrize(("family", "attention"), in_turn([("qwen3",), ("gpt2",), ("gemma3_text",)], "sdpa", "eager"))
def test_measured_costs_predict_larger_passes(family, attention):
    model = family_model(family).get_base_model()
    model.set_attn_implementation(attention)
    for rows, shared_tokens, row_tokens in ((1, 0, 90), (6, 60, 30), (12, 30, 30), (8, 0, 200)):
        cost = measure_activations(model).at(shared_tokens + row_tokens)
        prompts = [[3] * shared_tokens + [4, 5 + row] for row in range(rows)]
        replies = [[3] * (row_tokens - (row > 0)) for row in range(rows)]
        with LiveBytes() as live:
            forward.hidden_states(model.base_model, prompts, replies).sum().backward()
        predicted = cost.size(shared_tokens + rows * (row_tokens + 1), rows * shared_tokens, checkpointing=False)
        assert live.peak <= predicted <= 1.5 * live.peak, (rows, shared_tokens, row_tokens, predicted / live.peak)


def room_for(monkeypatch, size):
    monkeypatch.setattr(micro_batcher, "free_memory", lambda device: size)


def fitted(model_folder, tmp_path):
    trainer = team_trainer(model_folder, tmp_path)
    return trainer, only_slice(trainer, [tiny_dataset(1)[0]] * 8)


def test_micro_batches_are_as_large_as_there_is_room(model_folder, tmp_path, monkeypatch):
    trainer, slice_ = fitted(model_folder, tmp_path)
    assert trainer.parts.batcher.max_tokens >= 4096 and not trainer.parts.passes.is_checkpointing
    assert len(list(trainer.parts.batcher.cut(slice_.rows))) == 2  # one for each agent
    longest = max(row.length for row in slice_.rows)
    activation_bytes = 1.6 * longest * trainer.parts.batcher.cost.per_token
    state = sum(12 * p.numel() for lora in trainer.parts.updates.trained_parameters().values() for p in lora.values())
    head_bytes = 6 * 4 * sum(len(row.completion_ids) for row in slice_.rows) * trainer.model.config.vocab_size
    room_for(monkeypatch, (activation_bytes + head_bytes) / 0.7 + state)
    trainer, slice_ = fitted(model_folder, tmp_path)
    assert longest <= trainer.parts.batcher.max_tokens <= 1.7 * longest and not trainer.parts.passes.is_checkpointing
    batches = list(trainer.parts.batcher.cut([row for row in slice_.rows if row.is_trained]))
    assert len(batches) > 2


def test_a_row_that_does_not_fit_is_checkpointed_and_training_is_the_same(model_folder, tmp_path, monkeypatch, caplog):
    ends = []
    for checkpoints in (False, True):
        if checkpoints:
            room_for(monkeypatch, 1000)
        trainer = team_trainer(model_folder, tmp_path, settings={"max_tokens_per_micro_batch": 400})
        trainer.train()
        assert trainer.parts.passes.is_checkpointing == checkpoints
        ends.append(weights(trainer))
    assert "Gradient checkpointing is now on" in caplog.text
    for name, weight in ends[0].items():
        torch.testing.assert_close(ends[1][name], weight, rtol=0, atol=1e-6, msg=name)


@pytest.mark.slow
def test_the_checkpointing_setting_stays_and_costs_do_not_depend_on_it(model_folder, tmp_path, monkeypatch):
    room_for(monkeypatch, 1000)
    costs = []
    for checkpointing in (True, False):
        settings = {"gradient_checkpointing": checkpointing, "max_steps": 1}
        trainer = team_trainer(model_folder, tmp_path, settings=settings)
        assert moved_by_training(trainer) and trainer.model.is_gradient_checkpointing == checkpointing
        costs.append(trainer.parts.batcher.measure(50))
    # the embeddings' output needs a gradient in one of them
    assert costs[0].per_token == pytest.approx(costs[1].per_token, rel=0.05)
    assert costs[0].per_checkpointed == pytest.approx(costs[1].per_checkpointed, rel=0.05)


def test_a_measurement_leaves_nothing_behind(model_folder, tmp_path):
    """Its graph holds the activations of a long row, which a run cannot spare."""
    trainer = team_trainer(model_folder, tmp_path)
    gc.collect()
    before = sum(map(torch.is_tensor, gc.get_objects()))
    trainer.parts.batcher.measure(50)
    gc.collect()
    assert sum(map(torch.is_tensor, gc.get_objects())) == before


def test_a_plan_reckons_with_little_room(model_folder, tmp_path, monkeypatch):
    trainer = team_trainer(model_folder, tmp_path)
    whole = trainer.memory_plan()
    monkeypatch.setattr(trainer.parts.batcher, "free_for_activations", lambda *sizes: whole.activations / 3)
    assert trainer.memory_plan().activations < whole.activations / 1.5


def test_a_plan_reckons_with_a_critic_that_reads_the_turns_of_all_agents(model_folder, tmp_path):
    def activations(critic):
        settings = {"advantage": "gae", "level": "token", "critic": critic}
        return team_trainer(model_folder, tmp_path, settings=settings).memory_plan().activations

    assert activations("shared") > 1.2 * activations("frozen")  # the turns of both agents, but without the LM head


def test_plans_change_nothing(model_folder, tmp_path):
    def cuts(plan):
        trainer = team_trainer(model_folder, tmp_path, settings={"max_tokens_per_micro_batch": 200})
        _ = trainer.memory_plan() if plan else None
        torch.manual_seed(0)
        rows = only_slice(trainer, [tiny_dataset(1)[0]] * 8).rows
        return [len(batch.rows) for batch in trainer.parts.batcher.cut(rows)]

    assert cuts(True) == cuts(False)


def test_each_process_counts_a_share_of_the_memory(monkeypatch):
    gc.collect()
    whole = free_memory(torch.device("cpu"))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert free_memory(torch.device("cpu")) == pytest.approx(whole / 4, rel=0.2)


V2 = ("memory.max", "memory.current")
V1 = ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes")


@pytest.mark.parametrize("names", [V1, V2])
def test_container_memory_limits_count(tmp_path, names):
    for name, size in zip(names, (5000, 2000), strict=True):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"{size}\n")
    assert free_memory(torch.device("cpu"), tmp_path) == 3000
    (tmp_path / names[0]).write_text("max\n")
    assert free_memory(torch.device("cpu"), tmp_path) > 10**6


def test_repeated_tokens_count_in_part():
    rows = [Row("a", "a", torch.arange(100), torch.arange(10)) for _ in range(8)]
    # 99 shared, 11 of each row's own: 99 + 8 x 11 = 187; half of what is repeated on top: 187 + 0.5 x 8 x 99 = 583
    for most, repeat, count in ((187, 0.0, 1), (186, 0.0, 2), (583, 0.5, 1), (582, 0.5, 2)):
        assert len(list(micro_batches(rows, 8, most, repeat=repeat))) == count


MEASURED = """
import json, sys
from pathlib import Path
import torch

def status(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":"))

sys.path.insert(0, sys.argv[2])
from tests.helpers import team_trainer
from marft_trl import AgentSpec, Workflow
from marft_trl.tiny import tiny_model, tiny_tokenizer

torch.set_num_threads(1)
tokenizer = tiny_tokenizer()

class Alone(Workflow):  # no agent sees other turns, which are tokenized to fewer tokens than the plan assumes
    async def run(self, episode):
        for agent in episode.agents:
            await episode.turn(agent, sees=[])

def trainer(hidden, layers, episodes, tokens):
    model = tiny_model(2048, hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=layers)
    model.generation_config.eos_token_id = None
    agents = [AgentSpec("left", system_prompt="a"), AgentSpec("right", system_prompt="b")]
    settings = {"per_device_train_batch_size": episodes, "num_generations": 4, "max_completion_length": tokens}
    settings |= {"generation_kwargs": {"min_new_tokens": tokens}, **json.loads(sys.argv[3])}
    arguments = {"agents": agents, "processing_class": tokenizer, "workflow": Alone()}
    return team_trainer(model, sys.argv[1], settings=settings, **arguments)

trainer(32, 2, 4, 4).train()  # whatever libraries load on their first use
before = status("VmRSS")
team = trainer(*json.loads(sys.argv[4]))
plan = team.memory_plan()
team.train()
print(json.dumps({"planned": plan.total, "measured": status("VmHWM") - before, "plan": str(plan)}))
"""


@pytest.mark.slow
@pytest.mark.parametrize("size", [[256, 4, 64, 32], [512, 6, 32, 48], [128, 3, 128, 96]], ids=str)
@pytest.mark.parametrize("settings", [{}, {"advantage": "gae", "level": "token", "critic": "shared"}], ids=str)
def test_the_plan_is_a_close_bound_of_training_memory(tmp_path, settings, size):
    """Of models (width, layers) with episodes and tokens of a turn."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}
    arguments = [str(tmp_path / "out"), os.getcwd(), json.dumps(settings), json.dumps(size)]
    command = [sys.executable, "-W", "ignore", "-c", MEASURED, *arguments]
    process = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=280)
    assert process.returncode == 0, process.stderr[-3000:]
    memory = json.loads(process.stdout.splitlines()[-1])
    assert memory["measured"] < memory["planned"] < 1.25 * memory["measured"], memory


@pytest.mark.slow
def test_the_page_of_memory_has_the_lines_of_its_command():
    command = [sys.executable, "-W", "ignore", str(ROOT / "benchmarks/devices/what_fits.py"), "--models", "0.5B"]
    lines = subprocess.run(command, capture_output=True, text=True, timeout=280, check=True).stdout.splitlines()
    page = (ROOT / "docs/reference/what_fits.md").read_text(encoding="utf-8")
    assert len(lines) == 4 and "\n".join(lines) in page
