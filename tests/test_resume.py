"""A resumed run equals one that was not interrupted, at every step, bit for bit."""

import functools
import re
import shutil
from dataclasses import dataclass, replace

from marft_trl import AgentSpec, MARFTConfig, load_adapters
from marft_trl.runs import run_folder
from marft_trl.runs.resume import check_structure
from marft_trl.system.files import import_file
from marft_trl.tiny import tiny_agents, tiny_dataset, tiny_model, tiny_tokenizer
from marft_trl.workflows import Sequential

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, TrainerCallback

from .exactness import SETTINGS, STEPS, differences, inexact_points, trainer_of
from .helpers import SETTINGS as SETTINGS_OF_TESTS
from .helpers import StopAt, began_at, lora, team_trainer
from .scripts.order import KINDS
from .test_distributed import launch


POINTS = range(1, STEPS)
# Every value of every part of a setting is in at least one of these
PER_COMMIT = [
    ("grpo", "sequential", 1, 1, 3),
    ("grpo", "graph", 2, 4, 1),
    ("grpo", "orchestrated", 2, 1, 3),
    ("ppo", "sequential", 2, 4, 3),
    ("ppo", "graph", 1, 4, 3),
    ("ppo", "orchestrated", 2, 1, 1),
]


def test_there_are_528_points_and_66_of_them_per_commit():
    assert len(SETTINGS) * len(POINTS) == 528 and len(PER_COMMIT) * len(POINTS) == 66
    assert set(PER_COMMIT) <= set(SETTINGS)
    assert all(
        {setting[part] for setting in PER_COMMIT} == {setting[part] for setting in SETTINGS} for part in range(5)
    )


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("setting", "ahead"),
    [
        *(pytest.param(setting, 2, marks=pytest.mark.slow) for setting in PER_COMMIT),
        *(pytest.param(setting, None, marks=pytest.mark.exhaustive) for setting in SETTINGS),  # to the end
    ],
    ids=str,
)
def test_a_run_resumed_at_any_step_goes_on_with_the_same_bits(small_model, tmp_path, setting, ahead, record_property):
    """Two steps later the checkpoint is the same, so every step after it is, too."""
    make = functools.partial(trainer_of, setting, small_model)
    assert inexact_points(make, tmp_path, POINTS, ahead) == []
    record_property("exact_points", len(POINTS))


# ---- Streams ----


@pytest.mark.slow
@pytest.mark.parametrize("at", [1, 3, 5])
def test_a_stream_is_resumed_in_any_pass(small_model, tmp_path, at):
    """Six steps are three passes over eight rows; each pass has its own order."""

    def make(folder, callbacks=None):
        stream = tiny_dataset(8).to_iterable_dataset(num_shards=2).shuffle(seed=5, buffer_size=4)
        settings = {**SAVE, "max_steps": 6, "per_device_train_batch_size": 8, "num_generations": 2}
        return team_trainer(small_model, folder, settings=settings, train_dataset=stream, callbacks=callbacks)

    make(tmp_path / "whole").train()
    make(tmp_path / "cut", [StopAt(at)]).train()
    make(tmp_path / "cut").train(resume_from_checkpoint=True)
    assert differences(tmp_path / "whole" / "checkpoint-6", tmp_path / "cut" / "checkpoint-6") == []


# ---- Several processes ----


@pytest.mark.distributed
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("processes", "kinds"),
    [
        pytest.param(2, ["map", "dynamic"], marks=pytest.mark.slow),
        pytest.param(2, [*KINDS], marks=pytest.mark.exhaustive),
        pytest.param(3, [*KINDS], marks=pytest.mark.exhaustive),
    ],
)
def test_every_process_finds_the_prompts_of_its_step_in_any_pass(small_model, tmp_path, processes, kinds):
    """Rows in memory and streamed, one and several generation batches a pass, resumed at every step."""
    done = launch(processes, "tests/scripts/order.py", small_model, str(tmp_path), *kinds, timeout=800)
    orders = [line.split("|")[1:] for line in done.stdout.splitlines() if line.startswith("ORDER")]
    assert len(orders) == len(kinds) * processes and all(int(batches) >= 4 for _, _, batches, _ in orders)
    assert [order for order in orders if order[-1] != "[]"] == []


# ---- Resuming with changes ----


SAVE = {"save_strategy": "steps", "save_steps": 1, "max_steps": 4, "per_device_train_batch_size": 4}
AGENTS = tiny_agents()


@pytest.fixture(scope="module")
def stopped(small_model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("stopped")
    team_trainer(small_model, folder, settings=SAVE, callbacks=[StopAt(2)], workflow=CHAIN).train()
    return folder


@pytest.fixture
def resuming(small_model, stopped, tmp_path):
    """A function that makes a trainer which resumes a copy of the stopped run."""
    shutil.copytree(stopped, tmp_path / "run")

    def make(model=small_model, settings=None, **changes):
        arguments = {"workflow": CHAIN, "settings": {**SAVE, **(settings or {})}, **changes}
        return team_trainer(model, tmp_path / "run", **arguments)

    return make


CHAIN = Sequential(["reasoner", "actor"])
STRUCTURE = {
    "dataset": ({"train_dataset": tiny_dataset(40)}, r"dataset\.rows +64 +40"),
    "rows": ({"train_dataset": tiny_dataset(64, seed=2)}, r"dataset\.content"),
    "seed": ({"settings": {"seed": 7}}, r"seed\.seed +42 +7"),
    "workflow": ({"workflow": Sequential(["reasoner", "actor"], rounds=2)}, r"workflow\.rounds +1 +2"),
    "rank": ({"peft_config": lora(8)}, r"adapters\.actor\.r +4 +8"),
    "scale": ({"peft_config": LoraConfig(r=4, lora_alpha=32, target_modules="all-linear")}, r"lora_alpha +8 +32"),
    "targets": ({"peft_config": LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj"])}, r"target_modules"),
    "group": ({"settings": {"num_generations": 2}}, r"batch\.num_generations +4 +2"),
    "iterations": ({"settings": {"num_iterations": 2}}, r"batch\.num_iterations +1 +2"),
    "per generation": ({"settings": {"steps_per_generation": 2}}, r"batch\.steps_per_generation +1 +2"),
    "optimizer": ({"settings": {"optim": "sgd"}}, r"optimizer\.optim +adamw_\w+ +sgd"),
    "critic": (
        {"settings": {"advantage": "gae", "critic": "shared", "num_generations": 1}},
        r"(critic|The agents|the agents and adapters)",
    ),
    "order": ({"agents": AGENTS[::-1]}, r"workflow\.team +\['reasoner', 'actor'\] +\['actor', 'reasoner'\]"),
}


def slow_except(names, fast):
    """Names as parameters; those that are not in `fast` are slow."""
    return [name if name in fast else pytest.param(name, marks=pytest.mark.slow) for name in names]


@pytest.mark.parametrize("name", slow_except(STRUCTURE, {"dataset", "workflow", "rank", "critic", "order"}))
def test_a_structural_change_is_refused_with_then_and_now(resuming, name):
    """Before the first generation."""
    change, message = STRUCTURE[name]
    trainer = resuming(**change)
    trainer.parts.runner.generator.generate = lambda *_, **__: pytest.fail("generated before the error")
    with pytest.raises(ValueError, match=message):
        trainer.train(resume_from_checkpoint=True)


def test_another_base_of_the_same_shape_is_refused(resuming, tokenizer):
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "head_dim": 8}
    other = tiny_model(len(tokenizer), seed=987, **sizes)
    with pytest.raises(ValueError, match=r"base\.weights"):
        resuming(other, processing_class=tokenizer).train(resume_from_checkpoint=True)


def test_another_chat_template_is_refused(resuming):
    other = tiny_tokenizer()
    other.chat_template = other.chat_template.replace("assistant", "helper")
    with pytest.raises(ValueError, match=r"tokenizer\.chat_template"):
        resuming(processing_class=other).train(resume_from_checkpoint=True)


def with_actor(**fields):
    return {"agents": [AGENTS[0], replace(AGENTS[1], **fields)]}


TUNABLE = {
    "temperature": ({"settings": {"temperature": 0.5}}, "temperature: 1.0 -> 0.5"),
    "beta": ({"settings": {"beta": 0.1}}, "beta: 0.0 -> 0.1"),
    "steps": ({"settings": {"max_steps": 5}}, "max_steps: 4 -> 5"),
    "reward": ({"reward_funcs": lambda completions, **_: [1.0] * len(completions)}, "team.rewards[0]: varied_reward"),
    "prompt": (with_actor(system_prompt="Answer."), "agents.actor.system_prompt: Write the answer. -> Answer."),
    "length": (with_actor(max_completion_length=5), "agents.actor.max_completion_length: 6 -> 5"),
}


@pytest.mark.parametrize("name", slow_except(TUNABLE, {"reward"}))
def test_a_changed_tunable_is_applied_and_logged(resuming, caplog, name):
    change, message = TUNABLE[name]
    trainer = resuming(**change)
    trainer.train(resume_from_checkpoint=True)
    setting, _, values = message.partition(": ")
    words = f"`{setting}` from {values.replace(' -> ', ' to ')}"
    assert began_at(trainer) == 2 and words in caplog.text.replace("\n", " ")
    assert caplog.text.count("Changed since checkpoint-2") == 1


@dataclass
class LaterConfig(MARFTConfig):
    """A config of a later TRL version, with fields that this version does not know."""

    log_rates_differently: bool = False
    save_gradients_for_later: float = 1.0


def test_unclassified_fields_are_compared(small_model, tmp_path, caplog):
    def run(**settings):
        args = LaterConfig(str(tmp_path), **SETTINGS_OF_TESTS | SAVE | settings)
        trainer = team_trainer(small_model, tmp_path, args=args)
        trainer.train(resume_from_checkpoint=trainer.args.max_steps > 1)
        return trainer

    run(max_steps=1)
    changed = {"log_rates_differently": True, "save_gradients_for_later": 2.0, "disable_dropout": True}
    changed |= {"pad_to_multiple_of": 8, "vllm_importance_sampling_mode": "token_mask"}  # unused here, not everywhere
    run(max_steps=2, logging_steps=7, **changed)
    logged_fields = re.findall(r"Changed since [^:]+: `(\w+)` from", caplog.text)
    assert {*logged_fields} == {*changed, "max_steps"}


def test_a_changed_learning_rate_takes_effect_at_the_step_of_the_checkpoint(resuming, caplog):
    """Also with a schedule: half of a linear schedule of four steps is left."""
    trainer = resuming(settings={"learning_rate": 1e-4})
    trainer.train(resume_from_checkpoint=True)
    rates = [entry["learning_rate"] for entry in trainer.state.log_history if "learning_rate" in entry]
    change = rates[0] - rates[1]  # in the steps before the checkpoint
    assert change == pytest.approx(1e-3 / 4) and rates[2] > 0
    assert rates[2:] == pytest.approx([(rates[1] - change) / 10, (rates[1] - 2 * change) / 10])
    assert "`learning_rate` from 0.001 to 0.0001" in caplog.text.replace("\n", " ")


EDITOR = AgentSpec("editor", system_prompt="Write the answer.", max_completion_length=6)


def test_a_changed_team_starts_a_new_run_from_the_adapters(small_model, stopped, resuming, tmp_path):
    """The error names the change and the fix, which keeps the weights of the agents that stay."""
    arguments = {"agents": [AGENTS[0], EDITOR], "workflow": Sequential(["reasoner", "editor"])}
    trainer = resuming(**arguments)
    trainer.parts.runner.generator.generate = lambda *_, **__: pytest.fail("generated before the error")
    message = r"\(new: editor; missing: actor\)\. A run resumes with the .*`model=load_adapters\(base, '(.*)'\)`"
    with pytest.raises(ValueError, match=message) as error:
        trainer.train(resume_from_checkpoint=True)
    folder = re.search(message, str(error.value))[1]
    base = AutoModelForCausalLM.from_pretrained(small_model)
    arguments |= {"agents": [AGENTS[0], replace(EDITOR, adapter="actor")]}  # the name of an adapter may stay
    trainer = team_trainer(load_adapters(base, folder), tmp_path / "new", **arguments, peft_config=None)
    for name in ("reasoner", "actor"):
        saved = load_file(stopped / "checkpoint-2" / name / "adapter_model.safetensors")
        now = {key.replace(f".{name}.", "."): value for key, value in trainer.policies.parameters(name).items()}
        assert now.keys() == saved.keys() and all(torch.equal(now[key], saved[key]) for key in saved)


def test_an_accepted_change_resumes_and_other_versions_are_logged(resuming, tmp_path, caplog):
    folder = tmp_path / "run" / "checkpoint-2"
    saved_commit = run_folder.read_commit(folder)
    versions = {**saved_commit.settings["versions"], "torch": "2.0"}
    run_folder.commit(folder, saved_commit.run, 2, {**saved_commit.settings, "versions": versions})
    settings = {"seed": 7, "resume_changes": {"accept": ["dataset", "seed"]}}
    trainer = resuming(settings=settings, train_dataset=tiny_dataset(40))
    trainer.train(resume_from_checkpoint=True)
    assert began_at(trainer) == 2 and trainer.state.global_step == 4
    assert "dataset.rows: 64 -> 40" in caplog.text and "seed.seed: 42 -> 7" in caplog.text
    assert "versions.torch: 2.0 -> " in caplog.text and "not be bit-exact" in caplog.text


@pytest.mark.slow
def test_a_checkpoint_has_the_code_that_ran_and_not_the_file_that_was_edited_meanwhile(small_model, tmp_path, caplog):
    file = tmp_path / "edited_rewards.py"
    text = "class Reward:\n    def __call__(self, completions, **columns):\n        return [1.0] * len(completions)\n"
    file.write_text(text)

    class Edit(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            file.write_text("# Edited while the run goes on\n" + text.replace("1.0", "2.0"))

    def trainer(callbacks=()):
        reward = import_file(file).Reward()
        return team_trainer(small_model, tmp_path / "run", settings=SAVE, reward_funcs=reward, callbacks=[*callbacks])

    trainer([Edit()]).train()
    file.write_text(text)
    trainer().train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))
    assert "rewards[0]" not in caplog.text
    file.write_text(text.replace("1.0", "2.0"))
    trainer().train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))
    assert "team.rewards[0]" in caplog.text  # a change between two runs is logged


def test_workflows_whose_module_moved_are_unchanged():
    """Checkpoints of version 0.3 have the old module path of the workflows of tasks."""
    saved, present = ({"workflow": {"class": f"marft_trl.{path}.TextArena"}} for path in ("tasks", "extras.tasks"))
    assert check_structure(saved, present, (), "folder") == []
