"""What is saved, loaded again, resumed and pushed."""

import ast
import copy
import importlib.metadata
import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import marft_trl
from marft_trl import AgentSpec, Sequential, TeamManifest
from marft_trl.adapters.lora import load_adapter_weights
from marft_trl.algorithms.rows import Row, Slice
from marft_trl.runs import run_folder as commits
from marft_trl.runs.checkpoints import load_rollouts, save_rollouts
from marft_trl.runs.run_folder import CheckpointError
from marft_trl.seams import libraries as versions
from marft_trl.tiny import exact_answer, tiny_agents, tiny_dataset

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from .helpers import StopAt, began_at, config, moved, team_trainer, weights
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
        assert len(tensors) == len(trainer.policies.parameters(name))  # its own tensors and no other's
        alone = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model_folder), tmp_path, subfolder=name)
        theirs = {n.replace(".default.", f".{name}."): p for n, p in alone.named_parameters() if "lora_" in n}
        mine = trainer.policies.parameters(name)
        assert theirs.keys() == mine.keys() and all(torch.equal(theirs[n], mine[n]) for n in mine)
    assert not (tmp_path / "adapter_model.safetensors").exists()


def test_the_manifest_says_who_is_in_the_team(model_folder, tmp_path):
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
    assert "vllm serve" in card and 'subfolder="reasoner"' in card and "marft_trl" in card
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
        (lambda data: data.update(format=3), "format 3"),
        (lambda data: data.update(base=[1]), "is damaged: TypeError"),
        (lambda data: data["inference"].update(generation=[1]), "is damaged: TypeError"),
        (lambda data: data.update(adapters=None), "is damaged: TypeError"),
        (lambda data: data["adapters"].pop("actor"), "is damaged: KeyError"),
        (lambda data: data.update(workflow="Sequential"), "is damaged: TypeError"),
        (lambda data: data.pop("agents"), "is damaged: KeyError"),
        (lambda data: data["adapters"]["actor"].update(folder="../actor"), "has '../actor' as the folder of"),
        (lambda data: data["adapters"].update({"../x": {"folder": "../x"}}), "cannot be the name of an adapter"),
        (lambda data: data["agents"][0].update(name="/tmp/x"), "cannot be the name of an agent"),
        (lambda data: data["agents"][0].update(rank=3), "is damaged: TypeError"),
        (lambda data: data["agents"][0].update(temperature=10**400), "`temperature`"),
        (lambda data: data["agents"][0].update(peft_config={"r": 1}), "is damaged: TypeError"),
        (lambda data: data["inference"].update(workflow_timeout=float("nan")), "'workflow_timeout' is nan"),
        (lambda data: data["inference"].update(tool_limits={"bogus": 1}), "is damaged: TypeError"),
        (lambda data: data["inference"].update(tool_limits={"calls": "x"}), "'tool_limits' has 'x'"),
        (lambda data: data["inference"].update(context_overflow="zz"), "'context_overflow' is 'zz'"),
        (lambda data: data["inference"].update(chat_template_kwargs={"tokenize": False}), "kwargs' has 'tokenize'"),
        (
            lambda data: data["inference"]["sampling"]["actor"].update(max_completion_length=None),
            "'max_completion_length' None",
        ),
        (lambda data: data["inference"]["sampling"]["actor"].update(top_p="x"), "is damaged: TypeError"),
        (lambda data: data["inference"].update(tools={"x": 3}), "is damaged: TypeError"),
        (lambda data: data["inference"].update(mixed_precision=["bf16"]), "is damaged: TypeError"),
        (lambda data: data["inference"].update(workflow_timeout="soon"), "is damaged: TypeError"),
        (lambda data: data["inference"].update(share_prefixes=3), "is damaged: TypeError"),
        (lambda data: data["inference"].update(sampling={"actor": 3}), "is damaged: TypeError"),
        (lambda data: data["base"].update(dtype=3), "is damaged: TypeError"),
        (lambda data: data["base"].update(quantization=[1]), "is damaged: TypeError"),
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


def test_a_saved_team_goes_on_in_a_new_model(model_folder, tmp_path, tokenizer):
    trainer = team_trainer(
        model_folder, tmp_path / "one", eval_dataset=tiny_dataset(8, seed=1), reward_funcs=exact_answer
    )
    trainer.train()
    trainer.save_model()
    base = AutoModelForCausalLM.from_pretrained(model_folder)
    model = PeftModel.from_pretrained(base, tmp_path / "one", subfolder="reasoner", adapter_name="reasoner")
    model.load_adapter(str(tmp_path / "one"), "actor", subfolder="actor")
    again = team_trainer(model, tmp_path / "two", peft_config=None, processing_class=tokenizer)
    assert weights(again).keys() == weights(trainer).keys()
    assert not moved(weights(trainer), weights(again))
    before = weights(again)
    again.train()
    assert {n.split(".lora_")[1].split(".")[1] for n in moved(before, weights(again))} == {"reasoner", "actor"}


def test_weights_of_another_shape_are_not_loaded(model_folder, tmp_path):
    trainer = team_trainer(model_folder, tmp_path)
    trainer.save_model()
    (tmp_path / "actor" / "adapter_model.safetensors").write_bytes(
        (tmp_path / "reasoner" / "adapter_model.safetensors").read_bytes()
    )
    load_adapter_weights(trainer.model, "actor", tmp_path / "actor")  # the same tensors: fine
    from safetensors.torch import save_file

    tensors = load_file(tmp_path / "actor" / "adapter_model.safetensors")
    tensors.popitem()
    save_file(tensors, tmp_path / "actor" / "adapter_model.safetensors")
    with pytest.raises(ValueError, match="do not fit the adapter 'actor': missing"):
        load_adapter_weights(trainer.model, "actor", tmp_path / "actor")


RESUME = {
    "max_steps": 6,
    "save_strategy": "steps",
    "save_steps": 1,
    "per_device_train_batch_size": 4,
    "beta": 0.05,
    "num_train_epochs": 100,
}


PPO = {"advantage": "gae", "num_generations": 1, "critic_learning_rate": 1e-2}


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, marks=pytest.mark.slow),
        pytest.param({"num_iterations": 2, "steps_per_generation": 2}, marks=pytest.mark.slow),
        {"gradient_accumulation_steps": 2, "steps_per_generation": 4, "num_iterations": 2},
        pytest.param(
            {**PPO, "critic": "shared", "update_order": "sequential", "num_iterations": 2}, marks=pytest.mark.slow
        ),
        pytest.param(
            {**PPO, "critic": "frozen", "level": "action", "num_iterations": 3, "target_kl": 0.5},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"use_adaptive_entropy": True, "entropy_target": 0.4, "update_order": "resampled"}, marks=pytest.mark.slow
        ),
    ],
    ids=str,
)
@pytest.mark.parametrize("at", [2, *(pytest.param(step, marks=pytest.mark.slow) for step in (1, 5))])
def test_a_resumed_run_ends_with_the_same_bits(model_folder, tmp_path, settings, at):
    prompts = 4 if "critic" in settings else 3
    agents = [AgentSpec("solver", max_completion_length=4), AgentSpec("solver_2", system_prompt="x")]  # begin alike

    def trainer(folder, callbacks=None):
        return team_trainer(
            model_folder, tmp_path / folder, agents=agents, callbacks=callbacks,
            train_dataset=tiny_dataset(max(prompts, settings.get("steps_per_generation", 1) + 1)),
            settings={**RESUME, **settings},
        )  # fmt: skip

    whole = trainer("whole")
    whole.train()
    trainer("cut", callbacks=[StopAt(at)]).train()
    resumed = trainer("cut")
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 6 and int(resumed.state.epoch) >= 1  # past the first epoch, where order counts
    assert not moved(weights(whole), weights(resumed))
    if "update_order" not in settings:  # where one agent alone may be updated after the cut
        for name in ("solver", "solver_2"):
            last = load_file(tmp_path / "cut" / f"checkpoint-{at}" / name / "adapter_model.safetensors")
            now = resumed.policies.parameters(name)
            assert not any(torch.equal(last[its.replace(f".{name}.", ".")], now[its]) for its in now)
    if whole.critic is not None:
        heads = zip(whole.critic.heads.parameters(), resumed.critic.heads.parameters(), strict=True)
        assert all(torch.equal(mine, theirs) for mine, theirs in heads)
    for group, other in zip(whole.optimizer.param_groups, resumed.optimizer.param_groups, strict=True):
        for mine, theirs in zip(group["params"], other["params"], strict=True):
            if mine not in whole.optimizer.state:  # an adapter whose turn has not come yet
                assert theirs not in resumed.optimizer.state
                continue
            assert torch.equal(whole.optimizer.state[mine]["exp_avg"], resumed.optimizer.state[theirs]["exp_avg"])


@pytest.mark.parametrize("cut", ["missing", pytest.param("half", marks=pytest.mark.slow)])
@pytest.mark.slow
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
    stateful = whole.parts.checkpoints.stateful
    names = {"user_randomness", "rollouts", "reach", "updates", "health", "users", "runner", "own_returns"}
    assert set(stateful) == names | {"reporter"}  # a feature that is off has no state
    for name, owner in stateful.items():
        assert owner.state_dict() == resumed.parts.checkpoints.stateful[name].state_dict(), name
    assert len(load_file(tmp_path / "cut" / "checkpoint-3" / "actor" / "adapter_model.safetensors")) > 0
    for folder in (tmp_path / "cut").glob("checkpoint-*"):
        (folder / "trainer_state.json").unlink()
    anew = team_trainer(model_folder, tmp_path / "cut", settings=settings)
    anew.train(resume_from_checkpoint=True)  # nobody has to delete anything
    assert began_at(anew) == 0 and not moved(weights(whole), weights(anew))


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
    settings = {**RESUME, "max_steps": 1}
    team_trainer(model_folder, tmp_path, settings=settings).train()
    three = [*tiny_agents(), AgentSpec("checker")]
    trainer = team_trainer(model_folder, tmp_path, agents=three, settings=settings)
    with pytest.raises(ValueError, match=r"has the agents and adapters .*'reasoner'.*but the team has .*'checker'"):
        trainer.train(resume_from_checkpoint=True)
    frozen = [tiny_agents()[0], AgentSpec("actor", trainable=False)]
    trainer = team_trainer(model_folder, tmp_path, agents=frozen, settings={**settings, "max_steps": 3})
    with pytest.raises(ValueError, match=r"adapters\.actor\.trained +True +False"):
        trainer.train(resume_from_checkpoint=True)
    folder = tmp_path / "checkpoint-1"
    path = folder / "marft_rollouts_0.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "world_size": 2}))
    written = commits.read_commit(folder)
    two = {**written.settings, "processes": {"count": 2}}
    commits.commit(folder, written.run, 1, two)
    trainer = team_trainer(model_folder, tmp_path, settings={**settings, "max_steps": 2})
    with pytest.raises(ValueError, match=r"(?s)processes\.count +2 +1.*'processes': random states"):
        trainer.train(resume_from_checkpoint=True)
    commits.commit(folder, written.run, 1, {**two, "processes": {"count": 1}})
    trainer = team_trainer(model_folder, tmp_path, settings={**settings, "max_steps": 2})
    with pytest.raises(ValueError, match="written by 2 processes, but there are 1"):
        trainer.train(resume_from_checkpoint=True)


def test_agents_in_another_order_find_their_own_optimizer_state(model_folder, tmp_path):
    workflow = Sequential(["reasoner", "actor"])
    settings = {**RESUME, "max_steps": 3}
    whole = team_trainer(model_folder, tmp_path / "whole", workflow=workflow, settings=settings)
    whole.train()
    team_trainer(model_folder, tmp_path / "cut", workflow=workflow, settings=settings, callbacks=[StopAt(2)]).train()
    turned = team_trainer(
        model_folder, tmp_path / "cut", workflow=workflow, agents=tiny_agents()[::-1],
        settings={**settings, "resume_changes": {"accept": ["workflow"]}},
    )  # fmt: skip
    turned.train(resume_from_checkpoint=True)
    after, expected = weights(turned), weights(whole)
    assert after.keys() == expected.keys() and not moved(expected, after)


def test_the_best_model_is_loaded_for_all_agents(model_folder, tmp_path):
    settings = {
        **RESUME, "max_steps": 2, "eval_strategy": "steps", "eval_steps": 1, "load_best_model_at_end": True,
        "metric_for_best_model": "reward", "greater_is_better": True, "per_device_eval_batch_size": 4,
    }  # fmt: skip

    def falling(completions, trainer_state, **kwargs):
        return [i - 10.0 * trainer_state.global_step for i in range(len(completions))]

    trainer = team_trainer(
        model_folder, tmp_path, settings=settings, reward_funcs=falling, eval_dataset=tiny_dataset(2, seed=1)
    )
    trainer.train()
    assert trainer.state.best_model_checkpoint.endswith("checkpoint-1")
    for agent in ("reasoner", "actor"):
        best = load_file(tmp_path / "checkpoint-1" / agent / "adapter_model.safetensors")
        now = trainer.policies.parameters(agent)
        assert all(torch.equal(best[name.replace(f".{agent}.", ".")], now[name]) for name in now)


def test_no_token_in_any_file(model_folder, tmp_path):
    settings = {**RESUME, "max_steps": 1, "hub_token": "hf_CANARY", "model_init_kwargs": {"token": "hf_CANARY"}}
    trainer = team_trainer(model_folder, tmp_path, settings=settings)
    trainer.train()
    trainer.save_model()
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) > 20 and (tmp_path / "training_args.bin") in files
    assert not [path for path in files if b"hf_CANARY" in path.read_bytes()]


def test_a_copy_of_the_arguments_keeps_the_token(tmp_path):
    args = config(tmp_path, hub_token="hf_CANARY", model_init_kwargs={"token": "hf_CANARY", "dtype": "float32"})
    assert copy.copy(args).hub_token == copy.deepcopy(args).hub_token == "hf_CANARY"
    assert copy.deepcopy(args).model_init_kwargs == {"token": "hf_CANARY", "dtype": "float32"}
    assert "hf_CANARY" not in args.to_json_string()  # what trackers are given
    assert args.to_dict()["model_init_kwargs"] == {"dtype": "float32"}


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
    team = {"agents": [*tiny_agents(), AgentSpec("rival", copy_of="actor")]}
    if "collapse" in features:
        team["eval_dataset"] = tiny_dataset(4)
    trainer, other = (
        team_trainer(model_folder, tmp_path, reward_funcs=Curriculum(), settings=settings, **team) for _ in range(2)
    )
    stateful = trainer.parts.checkpoints.stateful
    optional = {"sequential", "running_baselines", "value_scale", "dynamic_sampling", "collapse"}
    assert set(stateful) == {"copies", "user_randomness", *STATES} - optional | features
    for name in stateful.keys() & STATES.keys():
        stateful[name].load_state_dict(STATES[name])
    stateful["copies"].take(20)
    with stateful["user_randomness"].user_states():
        torch.rand(3)
    trainer.parts.checkpoints.save(tmp_path)
    before = {name: owner.state_dict() for name, owner in other.parts.checkpoints.stateful.items()}
    other.parts.checkpoints.load(tmp_path)
    for name, owner in stateful.items():
        assert owner.state_dict() == other.parts.checkpoints.stateful[name].state_dict() != before[name], name


def test_rows_of_a_checkpoint_are_those_that_were_saved(tmp_path):
    rows = [
        Row("a", "a", torch.tensor([5]), torch.tensor([6]), joint_action=index, number=index + 7, advantage=0.5)
        for index in range(3)
    ]
    save_rollouts(tmp_path, 0, 1, 4, [Slice(rows[:2], tokens={"a": 2}), Slice(rows[2:])], {"x": 1})
    step, (first, second), extra = load_rollouts(tmp_path, 0, 1)
    assert (step, extra) == (4, {"x": 1}) and first.tokens == {"a": 2} and first.adapters == frozenset()
    assert [row.number for row in (*first.rows, *second.rows)] == [7, 8, 9]
    loaded = [*first.rows, *second.rows]
    assert [row.joint_action for row in loaded] == [0, 1, 2]
    assert all(row.completion_ids.equal(torch.tensor([6])) and row.advantage == 0.5 for row in loaded)


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
print([[turn.completion_ids for turn in its.turns] for its in trainer.team.run({questions!r}, greedy=True)])
"""

PULL = """
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM
from safetensors.torch import load_file
base = AutoModelForCausalLM.from_pretrained({model!r})
model = PeftModel.from_pretrained(base, "user/team", subfolder="actor")
mine = load_file({output!r} + "/actor/adapter_model.safetensors")
theirs = {{n.replace(".default.", "."): p for n, p in model.named_parameters() if "lora_" in n}}
assert mine.keys() == theirs.keys() and all(torch.equal(mine[n], theirs[n]) for n in mine)
from marft_trl import Team, load_adapters
loaded = load_adapters(AutoModelForCausalLM.from_pretrained({model!r}), "user/team")
assert sorted(loaded.peft_config) == ["actor", "reasoner"]
questions = {questions!r}
def answers(team):
    return [[turn.completion_ids for turn in its.turns] for its in team.run(questions, greedy=True)]
pulled = answers(Team.from_pretrained("user/team", model={model!r}))
assert pulled == answers(Team.from_pretrained({output!r}, model={model!r})) == {answers!r}
print("the same", len(pulled))
"""


@pytest.fixture
def hub():
    hub = Hub()
    yield hub
    hub.close()


def run_on_hub(hub: Hub, tmp_path, code: str) -> subprocess.CompletedProcess:
    environment = {k: v for k, v in os.environ.items() if k not in ("HF_HUB_OFFLINE", "HF_ENDPOINT")}
    environment |= {
        "HF_ENDPOINT": hub.url, "HF_TOKEN": "hf_CANARY", "HF_HUB_DISABLE_XET": "1", "HF_HOME": str(tmp_path / "hf"),
        "HF_HUB_DISABLE_TELEMETRY": "1", "CI": "1", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=200
    )


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["every_save", "checkpoint"])
def test_a_team_is_pushed_and_loaded_from_the_hub(hub, model_folder, tmp_path, strategy):
    output = str(tmp_path / "out")
    questions = [row["prompt"] for row in tiny_dataset(100, seed=1)]
    given = {"root": str(ROOT), "model": model_folder, "output": output, "questions": questions}
    pushed = run_on_hub(hub, tmp_path, PUSH.format(**given, strategy=strategy))
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
    pulled = run_on_hub(hub, tmp_path, PULL.format(**given, answers=answers))
    assert pulled.returncode == 0, pulled.stderr[-3000:]
    assert pulled.stdout.splitlines()[-1] == "the same 100"


@pytest.mark.slow
def test_a_push_that_fails_is_reported(hub, model_folder, tmp_path):
    hub.fail_commits = True
    given = {"root": str(ROOT), "model": model_folder, "output": str(tmp_path / "out"), "questions": ["x"]}
    code = PUSH.format(**given, strategy="every_save")
    pushed = run_on_hub(hub, tmp_path, code)
    assert pushed.returncode != 0 and "A checkpoint could not be pushed to user/team" in pushed.stderr
    assert (tmp_path / "out" / "checkpoint-2" / "actor" / "adapter_model.safetensors").exists()


def test_a_checkout_that_is_not_installed_saves(model_folder, tmp_path, monkeypatch):
    """Clusters run code from `PYTHONPATH`. Without metadata of the package, versions come from its code."""
    found = importlib.metadata.version

    def version_of(name):
        if name == "marft-trl":
            raise importlib.metadata.PackageNotFoundError(name)
        return found(name)

    for module in (importlib.metadata, versions):
        monkeypatch.setattr(module, "version", version_of)
    trainer = team_trainer(model_folder, tmp_path, settings={"max_steps": 1, "save_strategy": "steps"})
    trainer.train()
    trainer.save_model()
    assert TeamManifest.load(tmp_path / "checkpoint-1").versions["marft-trl"] == marft_trl.__version__
    assert f"- marft-trl: {marft_trl.__version__}" in (tmp_path / "README.md").read_text()


def test_what_cannot_be_saved_is_known_before_anything_is_generated(model_folder, tmp_path, caplog):
    class Undescribed(Sequential):
        def describe(self):
            return {"class": "Undescribed", "tool": lambda: None}

    def reward(completions, **kwargs):
        raise InterruptedError("generated")

    def trainer(save_strategy):
        settings = {"save_strategy": save_strategy}
        return team_trainer(model_folder, tmp_path, workflow=Undescribed(), reward_funcs=reward, settings=settings)

    with pytest.raises(CheckpointError, match="was not started, because it could not be saved.*function is not JSON"):
        trainer("steps").train()
    with pytest.raises(InterruptedError, match="generated"):  # nothing will be saved there, unless it is asked for
        trainer("no").train()
    assert "`save_model()` will fail: TypeError: Object of type function is not JSON" in caplog.text
