"""What is saved, loaded again, resumed and pushed."""

import ast
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import marft_trl
from marft_trl import AgentSpec, Sequential, TeamManifest
from marft_trl.adapters.lora import load_adapter_weights
from marft_trl.algorithms.rows import Row, Slice
from marft_trl.episodes.records import SampledBy
from marft_trl.runs import run_folder as commits
from marft_trl.runs.checkpoints import load_rollouts, save_rollouts
from marft_trl.runs.run_folder import CheckpointError
from marft_trl.seams import libraries as versions
from marft_trl.tiny import tiny_agents, tiny_dataset

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from .exactness import differences
from .helpers import StopAt, began_at, moved, team_trainer, weights
from .hub_server import Hub
from .test_failures import Curriculum


ROOT = Path(__file__).parent.parent


def test_each_adapter_has_a_folder_that_peft_loads(model_folder, tmp_path):
    agents = [AgentSpec("solver", max_completion_length=4), AgentSpec("solver_2", system_prompt="x", trainable=False)]
    trainer = team_trainer(model_folder, tmp_path, agents=agents)
    trainer.train()
    trainer.save_model()
    for name in ("solver", "solver_2"):
        tensors = load_file(tmp_path / name / "adapter_model.safetensors")
        assert len(tensors) == len(trainer.policies.parameters(name))  # and no tensors of other adapters
        model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model_folder), tmp_path, subfolder=name)
        saved = {n.replace(".default.", f".{name}."): p for n, p in model.named_parameters() if "lora_" in n}
        trained = trainer.policies.parameters(name)
        assert saved.keys() == trained.keys() and all(torch.equal(saved[n], trained[n]) for n in trained)
    assert not (tmp_path / "adapter_model.safetensors").exists()


def test_the_manifest_lists_the_agents_of_the_team(model_folder, tmp_path):
    trainer = team_trainer(model_folder, tmp_path, workflow=Sequential(["reasoner", "actor"], rounds=2))
    trainer.save_model()
    manifest = TeamManifest.load(tmp_path)
    assert manifest.agents == tiny_agents()
    assert manifest.workflow == {"class": "Sequential", "agents": ["reasoner", "actor"], "rounds": 2}
    assert manifest.adapters == {name: {"folder": name, "trained": True} for name in ("actor", "reasoner")}
    assert manifest.base_model is None and manifest.versions["trl"] == version("trl")
    assert model_folder not in (tmp_path / "marft_team.json").read_text()
    card = (tmp_path / "README.md").read_text()
    assert "2504.16129" in card and "base_model:" not in card and model_folder not in card
    assert "| reasoner | [`reasoner`](./reasoner) | yes | Write the steps. |" in card
    assert "--max-lora-rank 8 --generation-config vllm" in card
    assert 'subfolder="reasoner"' in card and "marft_trl" in card
    assert '```mermaid\nflowchart LR\n    n0["reasoner 1"]\n    n1["actor 1"]\n' in card
    assert "    n0 --> n1\n    n1 --> n2\n    n2 --> n3\n```\n" in card
    trainer.hub_model_id = "me/my-team"  # set late, by `init_hf_repo`, which `push_to_hub` calls
    trainer.create_model_card()
    assert 'Team.from_pretrained("me/my-team"' in (tmp_path / "README.md").read_text()


@pytest.fixture(scope="module")
def manifest_text(model_folder, tmp_path_factory):
    folder = tmp_path_factory.mktemp("manifest")
    team_trainer(model_folder, folder).save_model()
    return (folder / "marft_team.json").read_text()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data.update(format=4), "format 4"),
        (lambda data: data.update(base=[1]), "'base' must be a JSON object"),
        (lambda data: data["inference"].update(generation=[1]), r"has \[1\] as 'generation'"),
        (lambda data: data.update(adapters=None), "is damaged: TypeError"),
        (lambda data: data["adapters"].pop("actor"), "is damaged: KeyError"),
        (lambda data: data.update(workflow="Sequential"), "is damaged: TypeError"),
        (lambda data: data.pop("agents"), "is damaged: KeyError"),
        (lambda data: data["adapters"]["actor"].update(folder="../actor"), "has '../actor' as the folder of"),
        (lambda data: data["adapters"].update({"../x": {"folder": "../x"}}), "cannot be the name of an adapter"),
        (lambda data: data["agents"][0].update(name="/tmp/x"), "cannot be the name of an agent"),
        (lambda data: data["agents"][0].update(rank=3), "agent 1 has the unknown field 'rank'"),
        (lambda data: data["agents"][0].update(temperature=10**400), "`temperature`"),
        (lambda data: data["agents"][0].update(peft_config={"r": 1}), "unknown field 'peft_config'"),
        (lambda data: data["inference"].update(workflow_timeout=float("nan")), "has nan as 'workflow_timeout'"),
        (lambda data: data["inference"].update(tool_limits={"bogus": 1}), "unknown field 'bogus'"),
        (lambda data: data["inference"].update(tool_limits={"calls": "x"}), "'tool_limits' has 'x'"),
        (lambda data: data["inference"].update(context_overflow="zz"), "'context_overflow' is 'zz'"),
        (lambda data: data["inference"].update(chat_template_kwargs={"tokenize": False}), "kwargs' has 'tokenize'"),
        (lambda data: data["inference"]["sampling"]["actor"].update(max_completion_length=None), "length' None"),
        (lambda data: data["inference"]["sampling"]["actor"].update(top_p="x"), "is damaged: TypeError"),
        (lambda data: data["inference"].update(tools={"x": 3}), "as 'tools'"),
        (lambda data: data["inference"].update(mixed_precision=["bf16"]), "as 'mixed_precision'"),
        (lambda data: data["inference"].update(workflow_timeout="soon"), "as 'workflow_timeout'"),
        (lambda data: data["inference"].update(share_prefixes=3), "as 'share_prefixes'"),
        (lambda data: data["inference"].update(sampling={"actor": 3}), "as 'sampling'"),
        (lambda data: data["base"].update(dtype=3), "as 'dtype'"),
        (lambda data: data["base"].update(quantization=[1]), "as 'quantization'"),
    ],
)
def test_a_bad_manifest_is_refused(manifest_text, tmp_path, change, message):
    data = json.loads(manifest_text)
    change(data)
    (tmp_path / "marft_team.json").write_text(json.dumps(data))
    with pytest.raises(ValueError, match=message):
        TeamManifest.load(tmp_path)


def test_no_manifest_and_broken_json(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"marft_team\.json"):
        TeamManifest.load(tmp_path)
    (tmp_path / "marft_team.json").write_text("{")
    with pytest.raises(ValueError, match="is damaged"):
        TeamManifest.load(tmp_path)


def test_weights_of_another_shape_are_not_loaded(model_folder, tmp_path):
    trainer = team_trainer(model_folder, tmp_path)
    trainer.save_model()
    file = tmp_path / "actor" / "adapter_model.safetensors"
    shutil.copy(tmp_path / "reasoner" / file.name, file)
    load_adapter_weights(trainer.model, "actor", tmp_path / "actor")  # the same tensors: fine
    tensors = load_file(file)
    tensors.popitem()
    save_file(tensors, file)
    with pytest.raises(ValueError, match="do not fit the adapter 'actor': missing"):
        load_adapter_weights(trainer.model, "actor", tmp_path / "actor")


RESUME = {"max_steps": 6, "save_strategy": "steps", "save_steps": 1, "per_device_train_batch_size": 4}
RESUME |= {"beta": 0.05, "num_train_epochs": 100}
SLOW = pytest.mark.slow
PPO = {"advantage": "gae", "num_generations": 1, "critic_learning_rate": 1e-2}


@pytest.mark.parametrize(
    "settings",
    [
        {"gradient_accumulation_steps": 2, "steps_per_generation": 4, "num_iterations": 2},
        pytest.param({**PPO, "critic": "shared", "update_order": "sequential", "num_iterations": 2}, marks=SLOW),
        pytest.param(
            {**PPO, "critic": "frozen", "level": "action", "num_iterations": 3, "target_kl": 0.5}, marks=SLOW
        ),
        pytest.param({"use_adaptive_entropy": True, "entropy_target": 0.4, "update_order": "resampled"}, marks=SLOW),
    ],
    ids=str,
)
@pytest.mark.parametrize("at", [2, *(pytest.param(step, marks=SLOW) for step in (1, 5))])
def test_a_resumed_run_ends_with_the_same_bits(model_folder, tmp_path, settings, at):
    agents = [AgentSpec("solver", max_completion_length=4), AgentSpec("solver_2", system_prompt="x")]  # begin alike
    rows = tiny_dataset(4 if "critic" in settings else settings.get("steps_per_generation", 2) + 1)

    def trainer(folder, callbacks=None):
        team = {"agents": agents, "train_dataset": rows, "callbacks": callbacks}
        return team_trainer(model_folder, tmp_path / folder, settings={**RESUME, **settings}, **team)

    whole = trainer("whole")
    whole.train()
    trainer("cut", callbacks=[StopAt(at)]).train()
    resumed = trainer("cut")
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 6 and int(resumed.state.epoch) >= 1  # past the first epoch, where order counts
    assert differences(tmp_path / "whole" / "checkpoint-6", tmp_path / "cut" / "checkpoint-6") == []
    assert not moved(weights(whole), weights(resumed))
    if "update_order" not in settings:  # there, only one agent may be updated after the cut
        for name in ("solver", "solver_2"):
            last = load_file(tmp_path / "cut" / f"checkpoint-{at}" / name / "adapter_model.safetensors")
            now = resumed.policies.parameters(name)
            assert not any(torch.equal(last[key.replace(f".{name}.", ".")], now[key]) for key in now)


@pytest.mark.slow
@pytest.mark.parametrize("cut", ["missing", "half"])
def test_a_run_killed_while_saving_goes_on_from_the_checkpoint_before(model_folder, tmp_path, cut):
    settings = {**RESUME, "max_steps": 4}
    whole = team_trainer(model_folder, tmp_path / "whole", settings=settings)
    whole.train()
    team_trainer(model_folder, tmp_path / "cut", settings=settings, callbacks=[StopAt(3)]).train()
    state = tmp_path / "cut" / "checkpoint-3" / "trainer_state.json"
    (state.parent / "actor" / "adapter_model.safetensors").write_bytes(b"half")
    state.write_text(state.read_text()[:100]) if cut == "half" else state.unlink()
    resumed = team_trainer(model_folder, tmp_path / "cut", settings=settings)
    resumed.train(resume_from_checkpoint=True)
    assert began_at(resumed) == 2
    assert not moved(weights(whole), weights(resumed))
    for step in (3, 4):  # the damaged checkpoint is whole again
        assert differences(tmp_path / "whole" / f"checkpoint-{step}", tmp_path / "cut" / f"checkpoint-{step}") == []
    for folder in (tmp_path / "cut").glob("checkpoint-*"):
        (folder / "trainer_state.json").unlink()
    restarted = team_trainer(model_folder, tmp_path / "cut", settings=settings)
    restarted.train(resume_from_checkpoint=True)  # without deleting anything by hand
    assert began_at(restarted) == 0 and not moved(weights(whole), weights(restarted))


@pytest.mark.slow
def test_a_finished_run_that_is_started_again_trains_nothing(model_folder, tmp_path):
    settings = {**RESUME, "max_steps": 2, "lr_scheduler_type": "constant"}
    first = team_trainer(model_folder, tmp_path, settings=settings)
    first.train(resume_from_checkpoint=True)  # into an empty folder: from the beginning
    assert first.state.global_step == 2
    again = team_trainer(model_folder, tmp_path, settings=settings)
    output = again.train(resume_from_checkpoint=True)
    assert output.global_step == again.state.global_step == 2
    assert not moved(weights(first), weights(again))
    longer = team_trainer(model_folder, tmp_path, settings={**settings, "max_steps": 3})
    longer.train(resume_from_checkpoint=True)
    assert longer.state.global_step == 3 and moved(weights(first), weights(longer))


def test_a_checkpoint_of_another_team_or_number_of_processes_is_refused(model_folder, tmp_path):
    team_trainer(model_folder, tmp_path, settings={**RESUME, "max_steps": 1}).train()

    def refused(message, **team):
        trainer = team_trainer(model_folder, tmp_path, settings={**RESUME, "max_steps": 2}, **team)
        with pytest.raises(ValueError, match=message):
            trainer.train(resume_from_checkpoint=True)

    three = [*tiny_agents(), AgentSpec("checker")]
    refused(r"has the agents and adapters .*'reasoner'.*but the team has .*'checker'", agents=three)
    frozen = [tiny_agents()[0], AgentSpec("actor", trainable=False)]
    refused(r"adapters\.actor\.trained +True +False", agents=frozen)
    folder = tmp_path / "checkpoint-1"
    path = folder / "marft_rollouts_0.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "world_size": 2}))
    written = commits.read_commit(folder)
    two = {**written.settings, "processes": {"count": 2}}
    commits.commit(folder, written.run, 1, two)
    refused(r"(?s)processes\.count +2 +1.*'processes': random states")
    commits.commit(folder, written.run, 1, {**two, "processes": {"count": 1}})
    refused("written by 2 processes, but there are 1")


def test_agents_in_another_order_keep_their_optimizer_state(model_folder, tmp_path):
    def trainer(folder, **team):
        settings = {**RESUME, "max_steps": 3, "resume_changes": {"accept": ["workflow"]}}
        workflow = Sequential(["reasoner", "actor"])
        return team_trainer(model_folder, tmp_path / folder, workflow=workflow, settings=settings, **team)

    whole = trainer("whole")
    whole.train()
    trainer("cut", callbacks=[StopAt(2)]).train()
    turned = trainer("cut", agents=tiny_agents()[::-1])
    turned.train(resume_from_checkpoint=True)
    after, expected = weights(turned), weights(whole)
    assert after.keys() == expected.keys() and not moved(expected, after)


@pytest.mark.slow
def test_the_best_model_is_loaded_for_all_agents(model_folder, tmp_path):
    settings = {**RESUME, "max_steps": 2, "eval_strategy": "steps", "eval_steps": 1, "load_best_model_at_end": True}
    settings |= {"metric_for_best_model": "reward", "greater_is_better": True, "per_device_eval_batch_size": 4}

    def falling(completions, trainer_state, **kwargs):
        return [i - 10.0 * trainer_state.global_step for i in range(len(completions))]

    team = {"reward_funcs": falling, "eval_dataset": tiny_dataset(2, seed=1)}
    trainer = team_trainer(model_folder, tmp_path, settings=settings, **team)
    trainer.train()
    assert trainer.state.best_model_checkpoint.endswith("checkpoint-1")
    for agent in ("reasoner", "actor"):
        best = load_file(tmp_path / "checkpoint-1" / agent / "adapter_model.safetensors")
        now = trainer.policies.parameters(agent)
        assert all(torch.equal(best[name.replace(f".{agent}.", ".")], now[name]) for name in now)


STATES = {
    "health": {"in_a_row": {"no signal": 3}, "said": ["kl/a"], "norms": {}, "first_norms": {}},
    "users": {"reward_funcs[0]": {"calls": 5}},
    "rollouts": {"unscored_in_a_row": 3, "counted": {"train": ["workflow/rounds"], "eval": []}},
    "reach": {"in_a_row": {"actor": 2}, "warned": [["reasoner"]], "cancelled": 4},
    "updates": {"entropy_control": {"actor": [0.5, 0.1]}, "skipped_in_a_row": {"actor": 2}},
    "sequential": {"warned": True},
    "runner": {"runs": 7},
    "own_returns": {"were_named": True},
    "running_baselines": {"actor/": [0.5, 2]},
    "value_scale": {"decay": 0.99999, "moments": {"_critic": [0.5, 2.0, 0.1]}},
    "dynamic_sampling": {"drawn": 12},
    "collapse": {"rewards": [0.5], "highest": 0.5, "largest": 0.5, "was_said": True, "best_evaluation": [0.7, 0.1]},
    "reporter": {"generated_tokens": 512},
}


@pytest.mark.parametrize(
    ("settings", "features"),
    [
        ({"update_order": "sequential", "advantage": "rae"}, {"sequential", "running_baselines"}),
        ({**PPO, "critic": "shared", "normalize_values": True}, {"value_scale"}),
        ({"dynamic_sampling": True}, {"dynamic_sampling", "collapse"}),  # with evaluations
    ],
    ids=["sequential", "critic", "dynamic"],
)
def test_the_state_of_every_owner_is_in_a_checkpoint(model_folder, tmp_path, settings, features):
    team = {"agents": tiny_agents()}
    if "collapse" in features:
        team["eval_dataset"] = tiny_dataset(4)
    trainer, other = (
        team_trainer(model_folder, tmp_path, reward_funcs=Curriculum(), settings=settings, **team) for _ in range(2)
    )
    stateful = trainer.parts.checkpoints.stateful
    optional = {"sequential", "running_baselines", "value_scale", "dynamic_sampling", "collapse"}
    assert set(stateful) == {"user_randomness", *STATES} - optional | features  # what is off has no state
    for name in stateful.keys() & STATES.keys():
        stateful[name].load_state_dict(STATES[name])
    with stateful["user_randomness"].user_states():
        torch.rand(3)
    trainer.parts.checkpoints.save(tmp_path)
    before = {name: owner.state_dict() for name, owner in other.parts.checkpoints.stateful.items()}
    other.parts.checkpoints.load(tmp_path)
    for name, owner in stateful.items():
        assert owner.state_dict() == other.parts.checkpoints.stateful[name].state_dict() != before[name], name


def test_rows_of_a_checkpoint_are_those_that_were_saved(tmp_path):
    def row(index):
        sampled = {"sampled_by": SampledBy("http://a", 3, 7), "sampling_logps": torch.tensor([-1.0])}
        sampled |= {"sampling_weights": torch.tensor([0.5]), "advantage": 0.5, "number": index + 7}
        return Row("a", "a", torch.tensor([5]), torch.tensor([6]), joint_action=index, **sampled)

    rows = [row(index) for index in range(3)]
    save_rollouts(tmp_path, 0, 1, 4, [Slice(rows[:2], tokens={"a": 2}), Slice(rows[2:])], {"x": 1})
    step, (first, second), extra = load_rollouts(tmp_path, 0, 1)
    assert (step, extra) == (4, {"x": 1}) and first.tokens == {"a": 2} and first.adapters == frozenset()
    assert [row.number for row in (*first.rows, *second.rows)] == [7, 8, 9]
    loaded = [*first.rows, *second.rows]
    assert [row.joint_action for row in loaded] == [0, 1, 2]
    for row in loaded:
        assert row.completion_ids.equal(torch.tensor([6])) and row.advantage == 0.5
        assert row.sampled_by == rows[0].sampled_by and isinstance(row.sampled_by, SampledBy)
        assert row.sampling_logps.item() == -1.0 and row.sampling_weights.item() == 0.5


@pytest.mark.slow
def test_a_checkpoint_that_is_written_again_pushes_no_state_of_the_run(model_folder, tmp_path):
    settings = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1, **PPO, "critic": "shared"}
    team_trainer(model_folder, tmp_path, settings=settings).train()
    resumed = team_trainer(model_folder, tmp_path, settings=settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    target = tmp_path / "pushed"
    target.mkdir()
    resumed.parts.files.copy_checkpoint(tmp_path / "checkpoint-2", target)
    assert {path.name for path in target.iterdir()} == {"marft_team.json", "actor", "reasoner", "_critic"}
    assert {path.name for path in (target / "_critic").iterdir()} >= {"value_heads.safetensors", "adapter_config.json"}


PUSH = """
import sys
sys.path.insert(0, {root!r})
from marft_trl.tiny import tiny_dataset
from tests.helpers import team_trainer
trainer = team_trainer({model!r}, {output!r}, settings=dict(
    max_steps=2, save_strategy="steps", save_steps=1, push_to_hub=True, hub_model_id="user/team",
    hub_strategy={strategy!r}, hub_token="hf_CANARY", hub_always_push=True))
trainer.train()
print(trainer.push_to_hub(dataset_name="openai/gsm8k"))
print([[turn.completion_ids for turn in episode.turns] for episode in trainer.team.run({questions!r}, greedy=True)])
"""

PULL = """
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM
from safetensors.torch import load_file
base = AutoModelForCausalLM.from_pretrained({model!r})
model = PeftModel.from_pretrained(base, "user/team", subfolder="actor")
saved = load_file({output!r} + "/actor/adapter_model.safetensors")
pulled = {{n.replace(".default.", "."): p for n, p in model.named_parameters() if "lora_" in n}}
assert saved.keys() == pulled.keys() and all(torch.equal(saved[n], pulled[n]) for n in saved)
from marft_trl import Team, load_adapters
loaded = load_adapters(AutoModelForCausalLM.from_pretrained({model!r}), "user/team")
assert sorted(loaded.peft_config) == ["actor", "reasoner"]
questions = {questions!r}
def answers(team):
    return [[turn.completion_ids for turn in episode.turns] for episode in team.run(questions, greedy=True)]
pulled_answers = answers(Team.from_pretrained("user/team", model={model!r}))
assert pulled_answers == answers(Team.from_pretrained({output!r}, model={model!r})) == {answers!r}
print("the same", len(pulled_answers))
"""


@pytest.fixture
def hub():
    hub = Hub()
    yield hub
    hub.close()


def run_on_hub(hub: Hub, tmp_path, code: str) -> subprocess.CompletedProcess:
    environment = {k: v for k, v in os.environ.items() if k not in ("HF_HUB_OFFLINE", "HF_ENDPOINT")}
    environment |= {"HF_ENDPOINT": hub.url, "HF_TOKEN": "hf_CANARY", "HF_HUB_DISABLE_XET": "1", "CI": "1"}
    environment |= {"HF_HOME": str(tmp_path / "hf"), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    options = {"env": environment, "cwd": tmp_path, "timeout": 200}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, **options)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["every_save", "checkpoint"])
def test_a_team_is_pushed_and_loaded_from_the_hub(hub, model_folder, tmp_path, strategy):
    output = str(tmp_path / "out")
    questions = [row["prompt"] for row in tiny_dataset(100, seed=1)]
    fields = {"root": str(ROOT), "model": model_folder, "output": output, "questions": questions}
    pushed = run_on_hub(hub, tmp_path, PUSH.format(**fields, strategy=strategy))
    assert pushed.returncode == 0, pushed.stderr[-3000:]
    files = hub.files["user/team"]
    for agent in ("reasoner", "actor"):
        assert {f"{agent}/adapter_model.safetensors", f"{agent}/adapter_config.json"} <= set(files)
    assert {"marft_team.json", "README.md", "tokenizer.json"} <= set(files)
    messages = [message for _, message in hub.commits]
    assert any(message.startswith("Training in progress, step 1") for message in messages)
    assert messages[-1] == "End of training"
    card = files["README.md"].decode()
    assert "openai/gsm8k" in card and 'subfolder="reasoner"' in card and "user/team" in card
    assert "| reward |" in card and "agents/reasoner/reward" not in card and "base_model:" not in card
    assert not [path for path, data in files.items() if b"hf_CANARY" in data]
    assert any(path.startswith("last-checkpoint/actor/") for path in files) == (strategy == "checkpoint")
    answers = ast.literal_eval(pushed.stdout.splitlines()[-1])
    pulled = run_on_hub(hub, tmp_path, PULL.format(**fields, answers=answers))
    assert pulled.returncode == 0, pulled.stderr[-3000:]
    assert pulled.stdout.splitlines()[-1] == "the same 100"


@pytest.mark.slow
def test_a_push_that_fails_is_reported(hub, model_folder, tmp_path):
    hub.fail_commits = True
    fields = {"root": str(ROOT), "model": model_folder, "output": str(tmp_path / "out"), "questions": ["x"]}
    pushed = run_on_hub(hub, tmp_path, PUSH.format(**fields, strategy="every_save"))
    assert pushed.returncode != 0 and "A checkpoint could not be pushed to user/team" in pushed.stderr
    assert (tmp_path / "out" / "checkpoint-2" / "actor" / "adapter_model.safetensors").exists()


@pytest.mark.slow
def test_a_checkout_that_is_not_installed_saves(model_folder, tmp_path, monkeypatch):
    """Clusters run code from `PYTHONPATH`. Without metadata of the package, versions come from its code."""
    installed_version = importlib.metadata.version

    def version_of(name):
        if name == "marft-trl":
            raise importlib.metadata.PackageNotFoundError(name)
        return installed_version(name)

    for module in (importlib.metadata, versions):
        monkeypatch.setattr(module, "version", version_of)
    trainer = team_trainer(model_folder, tmp_path, settings={"max_steps": 1, "save_strategy": "steps"})
    trainer.train()
    trainer.save_model()
    assert TeamManifest.load(tmp_path / "checkpoint-1").versions["marft-trl"] == marft_trl.__version__
    assert f"- marft-trl: {marft_trl.__version__}" in (tmp_path / "README.md").read_text()


def test_a_team_that_cannot_be_saved_raises_before_generation(model_folder, tmp_path, caplog):
    class Undescribed(Sequential):
        def describe(self):
            return {"tool": lambda: None}

    def reward(completions, **kwargs):
        raise InterruptedError("generated")

    def trainer(save_strategy):
        settings = {"save_strategy": save_strategy}
        return team_trainer(model_folder, tmp_path, workflow=Undescribed(), reward_funcs=reward, settings=settings)

    with pytest.raises(CheckpointError, match="was not started, because it could not be saved.*function is not JSON"):
        trainer("steps").train()
    with pytest.raises(InterruptedError, match="generated"):  # nothing is saved there, except on request
        trainer("no").train()
    assert "`save_model()` will fail: TypeError: Object of type function is not JSON" in caplog.text
