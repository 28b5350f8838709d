"""A trained team answers as its trainer does, from a folder and from the Hub."""

import contextlib
import copy
import json
import shutil

from marft_trl import AgentSpec, Sequential, Team, TeamManifest, Workflow, load_adapters
from marft_trl.prompts import team_view
from marft_trl.rollout.runner import EpisodeRunner, RunMode
from marft_trl.tiny import questions, tiny_agents, tiny_model, tiny_tokenizer
from marft_trl.workflows import Debate, EnvironmentLoop, Graph, MixtureOfAgents, Orchestrated, UntilApproved, rebuild

import pytest
import torch
from peft import IA3Config, LoHaConfig, LoraConfig, OFTConfig, PeftModel, VeraConfig
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from .families import MIXTURES, family_base
from .helpers import SIZES, add, lora, moved, moved_by_training, shake, team_trainer, weights
from .test_live import team_folder  # noqa: F401  # a fixture
from .test_tools import tool_tokenizer


QUESTIONS = [row["prompt"] for row in questions(16, seed=1)]
ROOT = "base_model.model.model"
QUICK = {"max_steps": 2, "learning_rate": 2e-2}
BF16 = {"bf16": True, "use_cpu": True}


def ids_of(episodes):
    return [[(turn.agent, turn.prompt_ids, turn.completion_ids) for turn in episode.turns] for episode in episodes]


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"agents": [AgentSpec("first", adapter="both"), AgentSpec("second", adapter="both", system_prompt="x")]},
        {"quantization_config": BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.float32)},
        pytest.param({"peft_config": None}, marks=pytest.mark.slow),
        {"agents": [AgentSpec("a")], "settings": {**QUICK, "share_prefixes": False}},
        pytest.param({"settings": {**QUICK, **BF16}, "peft_config": None}, marks=pytest.mark.slow),
        pytest.param({"anonymous": True, "workflow": Sequential(rounds=2)}, marks=pytest.mark.slow),
    ],
    ids=["own adapters", "shared adapters", "4-bit", "one policy", "lone agent, plain path", "bf16", "anonymous"],
)
def test_a_saved_team_answers_bit_for_bit_as_its_trainer(model_folder, tmp_path, arguments):
    trainer = team_trainer(model_folder, tmp_path, **{"settings": QUICK, **arguments})
    trainer.train()
    trainer.save_model()
    expected = trainer.team.run(QUESTIONS, greedy=True)
    base = None if arguments.get("peft_config", 0) is None else model_folder
    team = Team.from_pretrained(tmp_path, model=base)
    if base is None:
        with pytest.raises(ValueError, match="share one fully trained policy.* Leave `model` out"):
            Team.from_pretrained(tmp_path, model=model_folder)
    episodes = team.run(QUESTIONS, greedy=True)
    assert ids_of(episodes) == ids_of(expected) and len(episodes) == 16
    assert ids_of(team.run(QUESTIONS[:4], seed=1)) == ids_of(trainer.team.run(QUESTIONS[:4], seed=1))
    assert ids_of(team.run(QUESTIONS[:4], seed=1)) != ids_of(team.run(QUESTIONS[:4], seed=2))


def test_the_answers_are_those_of_the_rollouts_of_training(model_folder, tmp_path):
    """Training samples greedily here; stops, lengths and settings of `generate` are the agents' own."""
    agents = [
        AgentSpec("reasoner", system_prompt="Write the steps.", max_completion_length=24, stop="="),
        AgentSpec("actor", system_prompt="Write the answer.", temperature=0.5),
    ]
    settings = {**QUICK, "generation_kwargs": {"do_sample": False, "repetition_penalty": 1.2}}
    trainer = team_trainer(model_folder, tmp_path, agents=agents, settings=settings)
    trainer.train()
    trainer.save_model()
    trainer.model.eval()
    rows = [{"prompt": prompt, "solution": ""} for prompt in QUESTIONS]
    expected = trainer.parts.rollouts.run(rows, training=False).episodes
    episodes = Team.from_pretrained(tmp_path, model=model_folder).run(QUESTIONS)
    assert ids_of(episodes) == ids_of(expected)
    assert any(turn.text.endswith("=") for episode in episodes for turn in episode.turns)


def test_running_a_team_leaves_training_as_it_was(model_folder, tmp_path):
    trainer = team_trainer(model_folder, tmp_path)
    trainer.model.train()
    state = torch.get_rng_state()
    assert [trainer.team(QUESTIONS[0]) for _ in range(3)]  # without a seed too
    episodes = trainer.team.run(QUESTIONS[:3], num_samples=2, seed=3, batch_size=4)
    assert torch.equal(state, torch.get_rng_state()) and trainer.model.training
    assert [episode.index for episode in episodes] == list(range(6))
    assert [episode.prompt for episode in episodes] == [QUESTIONS[i] for i in (0, 0, 1, 1, 2, 2)]
    assert isinstance(trainer.team(QUESTIONS[0]), str) and "reasoner, actor" in repr(trainer.team)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"prompts": []}, ValueError, "is empty"),
        ({"prompts": "x"}, TypeError, r"pass `\[prompt\]`"),
        ({"prompts": [{"role": "user", "content": "x"}]}, TypeError, r"pass `\[prompt\]`"),
        ({"prompts": ["x", ""]}, ValueError, "Prompt 1 of 2 is empty"),
        ({"prompts": ["x"], "num_samples": 0}, ValueError, "`num_samples` must be an integer of at least 1, got 0"),
        ({"prompts": ["x"], "batch_size": -1}, ValueError, "`batch_size`"),
    ],
)
def test_prompts_that_cannot_be_run(team_folder, model_folder, arguments, error, message):  # noqa: F811
    with pytest.raises(error, match=message):
        Team.from_pretrained(team_folder, model=model_folder).run(**arguments)


# ---- Arguments that the caller must pass ----


class Redraft(Workflow):
    async def run(self, episode):
        draft = await episode.turn("reasoner")
        await episode.turn("actor", sees=[draft])


def test_an_own_workflow_is_passed(model_folder, tmp_path):
    trainer = team_trainer(model_folder, tmp_path, workflow=Redraft())
    trainer.save_model()
    message = r"workflow `tests.test_team.Redraft` of the team is custom code\. .*`workflow=`"
    with pytest.raises(ValueError, match=message):
        Team.from_pretrained(tmp_path, model=model_folder)
    team = Team.from_pretrained(tmp_path, model=model_folder, workflow=Redraft())
    assert ids_of(team.run(QUESTIONS[:4], greedy=True)) == ids_of(trainer.team.run(QUESTIONS[:4], greedy=True))


def shout(agent, prompt, seen):
    return [*team_view(agent, prompt, seen), {"role": "user", "content": "!"}]


def test_tools_and_views_are_passed_by_name(tmp_path):
    tokenizer = tool_tokenizer()
    model = tiny_model(len(tokenizer))
    agents = [AgentSpec("caller", tools=[add], max_completion_length=8), AgentSpec("loud", view=shout)]
    trainer = team_trainer(copy.deepcopy(model), tmp_path, agents=agents, processing_class=tokenizer)
    trainer.save_model()
    for arguments, message in [
        ({}, "Agent 'loud' was trained with the view `.*shout`. Pass it as .view=.'loud': ..."),
        ({"view": {"loud": shout}}, "'caller' was trained with the tools 'add', but 'add' is not in `tools=`"),
    ]:
        with pytest.raises(ValueError, match=message):
            Team.from_pretrained(tmp_path, model=copy.deepcopy(model), **arguments)
    team = Team.from_pretrained(tmp_path, model=copy.deepcopy(model), view={"loud": shout}, tools=[add])
    expected = trainer.team.run(["What is 1+1?"], greedy=True)
    episodes = team.run(["What is 1+1?"], greedy=True)
    assert ids_of(episodes) == ids_of(expected)
    assert episodes[0].turns[-1].observation[-1]["content"].endswith("!")


class World:
    def __init__(self):
        self.rounds = 0

    def reset(self, prompt, level=0, **row):
        return f"level {level}"

    def step(self, turns):
        self.rounds += 1
        return "go on", 0.0, self.rounds == 2


def test_environments_are_passed(model_folder, tmp_path):
    trainer = team_trainer(model_folder, tmp_path, workflow=EnvironmentLoop(World, horizon=3), reward_funcs=None)
    trainer.save_model()
    message = "needs the environment `World`. Pass its class, or a function .* as `environment_factory=`"
    with pytest.raises(ValueError, match=message):
        Team.from_pretrained(tmp_path, model=model_folder)
    team = Team.from_pretrained(tmp_path, model=model_folder, environment_factory=World)
    (episode,) = team.run([{"prompt": "x", "level": 7}], greedy=True)
    assert len(episode.turns) == 4 and episode.feedback[0].text == "level 7"


def approves(review):
    return "yes" in review.text


@pytest.mark.parametrize(
    "workflow",
    [
        Sequential(["a", "b"], rounds=2),
        Graph({"plan": [], "one": ["plan"], "two": ["one"]}, {"one": "b", "two": "b", "plan": "a"}, answer="two"),
        Debate(["a", "b"], rounds=3, judge="a"),
        MixtureOfAgents([["a", "b"], ["a"]], "b"),
        UntilApproved("a", "b", rounds=2, approves="fine"),
        Orchestrated("a", agents=["b"], max_turns=3, max_tokens=100, fallback="b", penalty=-0.1),
        EnvironmentLoop(World, agents=["a"], horizon=2, side_by_side=True, source="world"),
    ],
    ids=lambda workflow: type(workflow).__name__,
)
def test_built_in_workflows_are_rebuilt(workflow):
    description = json.loads(json.dumps(workflow.describe()))
    rebuilt = rebuild(description, World if isinstance(workflow, EnvironmentLoop) else None)
    assert type(rebuilt) is type(workflow) and rebuilt.describe() == workflow.describe()
    assert vars(rebuilt) | {"functions": ()} == vars(workflow) | {"functions": ()}


def test_lookalikes_of_built_in_workflows_are_not_rebuilt():
    lookalike = type("Sequential", (Sequential,), {"__module__": "mine"})
    with pytest.raises(ValueError, match="`mine.Sequential` of the team is custom code"):
        rebuild(lookalike().describe())
    for workflow in (UntilApproved("a", "b", approves=approves), Debate(["a"], vote=approves)):
        with pytest.raises(ValueError, match="calls the function `approves`"):
            rebuild(workflow.describe())
    with pytest.raises(ValueError, match="cannot be rebuilt from the manifest: `agents` of `Debate` is empty"):
        rebuild({"class": "Debate", "agents": []})


def test_a_custom_class_does_not_replace_a_built_in_workflow():
    lookalike = type("Debate", (Sequential,), {})
    assert type(rebuild({"class": "Debate", "agents": ["a", "b"]})) is Debate is not lookalike


# ---- Untrusted bases and adapters ----


def test_a_local_base_has_to_be_passed_and_another_is_named(team_folder, model_folder, tmp_path, tokenizer, caplog):  # noqa: F811
    with pytest.raises(ValueError, match="trained on the local base 'warm-model'. Pass .* as `model=`"):
        Team.from_pretrained(team_folder)
    caplog.clear()
    Team.from_pretrained(team_folder, model=model_folder)
    assert "differ" not in caplog.text
    wider = tiny_model(len(tokenizer), hidden_size=64, intermediate_size=96)
    message = (
        r"'(reasoner|actor)' is for another base: its weights for 'model.layers.0.*with 192 inputs, but the layer "
    )
    message += "of this base has 96. The team was trained on 'warm-model'"
    with pytest.raises(ValueError, match=f"(?s){message}"):
        load_adapters(wider, team_folder)
    assert not isinstance(wider, PeftModel) and not any("lora" in name for name, _ in wider.named_parameters())
    deep = tiny_model(len(tokenizer), **{**SIZES, "num_hidden_layers": 2})
    team_trainer(deep, tmp_path / "deep", processing_class=tokenizer).save_model()
    with pytest.raises(ValueError, match=r"weights for the layer 'model.layers.1.*' ?, which this base does not have"):
        load_adapters(tiny_model(len(tokenizer), **SIZES), tmp_path / "deep")
    Team.from_pretrained(team_folder, model=tiny_model(len(tokenizer), **SIZES, rms_norm_eps=1e-3))
    assert "The base differs from what the team was trained with ('warm-model')" in caplog.text


@contextlib.contextmanager
def unchanged(base):
    """The base has the same tensors after a refusal."""
    before = {name: tensor.clone() for name, tensor in base.state_dict().items()}
    yield
    after = base.state_dict()
    assert after.keys() == before.keys() and all(torch.equal(after[name], before[name]) for name in before)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"init_lora_weights": "pissa"}, "changes the weights of the base"),
        ({"init_lora_weights": "loftq"}, "changes the weights of the base|cannot be read: ImportError"),
        ({"r": "many"}, "cannot be read|must be"),
        ({"rank_pattern": ["q_proj"]}, "cannot be read"),
        ({"bias": "all"}, "trains biases of the base"),
        ({"layer_replication": [[0, 2], [1, 2]]}, "changes the layers of the base"),
        ({"modules_to_save": ["lm_head"]}, "copies whole modules"),
        ({"peft_type": "PREFIX_TUNING", "num_virtual_tokens": 3}, "prompt learning"),
        ({"peft_type": "LOHA"}, "cannot be read|support only LoRA"),
        ({"lora_alpha": float("nan")}, "`lora_alpha` of agent 'actor' must be a finite number"),
        ({"alpha_pattern": {"q_proj": float("inf")}}, "`lora_alpha` of agent 'actor' must be a finite number"),
        ({"trainable_token_indices": [1]}, "targets parameters of the base"),
        ({"target_parameters": ["weight"]}, "targets parameters of the base"),
    ],
    ids=str,
)
def test_an_untrusted_adapter_never_changes_the_base(team_folder, model_folder, tmp_path, change, message):  # noqa: F811
    shutil.copytree(team_folder, tmp_path, dirs_exist_ok=True)
    path = tmp_path / "actor" / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    base = AutoModelForCausalLM.from_pretrained(model_folder)
    for load in (load_adapters, lambda base, folder: Team.from_pretrained(folder, model=base)):
        with unchanged(base), pytest.raises(ValueError, match=message):
            load(base, tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.update({f"{ROOT}.embed_tokens.weight": torch.zeros(398, 128)}), "not part of a LoRA"),
        (lambda t: t.update({"junk.weight": torch.zeros(1)}), "not part of a LoRA"),
        (lambda t: t.pop(next(key for key in t if "lora_B" in key)), "lacks a LoRA matrix of"),
        (lambda t: t.clear(), "has no LoRA"),
        (
            lambda t: t.update(
                {key: torch.zeros(9, *tensor.shape[1:]) for key, tensor in t.items() if "lora_A" in key}
            ),
            "has the rank 9 .* but its config has .4.",
        ),
        (lambda t: next(iter(t.values())).view(-1)[0].fill_(float("nan")), "has values in .*not finite"),
        (lambda t: next(iter(t.values())).view(-1)[0].fill_(float("-inf")), "has values in .*not finite"),
        (lambda t: next(iter(t.values())).view(-1)[0].fill_(1e38), "has values in .*above"),
        (lambda t: t.update({next(iter(t)): next(iter(t.values())).half()}), "the same floating-point dtype"),
        (
            lambda t: t.update({key: tensor.to(torch.int32) for key, tensor in t.items()}),
            "the same floating-point dtype",
        ),
    ],
    ids=["embedding", "junk", "half", "empty", "rank", "nan", "inf", "1e38", "mixed", "integers"],
)
def test_untrusted_tensors_must_belong_to_a_lora(team_folder, model_folder, tmp_path, change, message):  # noqa: F811
    """Also in the second adapter, when the first could already be on the base."""
    shutil.copytree(team_folder, tmp_path, dirs_exist_ok=True)
    for name in ("reasoner", "actor"):
        path = tmp_path / name / "adapter_model.safetensors"
        tensors = load_file(path)
        saved = dict(tensors)
        change(tensors)
        save_file(tensors, path)
        base = AutoModelForCausalLM.from_pretrained(model_folder)
        with unchanged(base), pytest.raises(ValueError, match=f"agent '{name}' .*{message}"):
            load_adapters(base, tmp_path)
        save_file(saved, path)


def test_paths_without_a_team_raise(tmp_path):
    for name in (tmp_path, tmp_path / "none", "./none", "a/b/c"):
        with pytest.raises(FileNotFoundError):
            Team.from_pretrained(name)


# ---- The manifest stores resolved settings ----


def test_the_manifest_stores_resolved_settings(model_folder, tmp_path):
    settings = {"temperature": 0.7, "top_k": 5, "max_completion_length": 11, "generation_kwargs": {"top_p": 0.8}}
    trainer = team_trainer(model_folder, tmp_path, settings=settings, agents=[AgentSpec("a", top_k=3), AgentSpec("b")])
    trainer.save_model()
    manifest = TeamManifest.load(tmp_path)
    expected = {"temperature": 0.7, "top_k": 3, "top_p": 0.8, "min_p": None, "max_completion_length": 11}
    assert manifest.inference.sampling == {"a": expected, "b": {**expected, "top_k": 5}}
    assert manifest.agents == trainer.agents  # as passed, so that training can continue with other settings
    assert manifest.base.name == "warm-model" and manifest.base.is_local and manifest.base_model is None
    assert manifest.base.dtype == "float32" and manifest.inference.generation["do_sample"] is True
    assert len({manifest.base.config_hash, manifest.base.tokenizer_hash, manifest.base.chat_template_hash}) == 3
    assert all(len(getattr(manifest.base, f"{part}_hash")) == 64 for part in ("config", "tokenizer", "chat_template"))
    assert manifest == TeamManifest(**{**vars(trainer.manifest()), "versions": manifest.versions})


@pytest.mark.parametrize(
    "settings", [{"top_k": None}, {"generation_kwargs": {"do_sample": False, "temperature": 0.0}}], ids=str
)
def test_settings_that_no_agent_could_have_are_kept(model_folder, tmp_path, settings):
    trainer = team_trainer(model_folder, tmp_path, settings={**QUICK, **settings})
    trainer.save_model()
    episodes = Team.from_pretrained(tmp_path, model=model_folder).run(QUESTIONS[:5], seed=4)
    assert ids_of(episodes) == ids_of(trainer.team.run(QUESTIONS[:5], seed=4))


def test_samples_of_servers_depend_on_the_seed_alone(model_folder, tmp_path, monkeypatch):
    """Seeds for servers are derived from the key of a run."""
    keys, inner = [], EpisodeRunner.collect

    async def collect(runner, rows, key, *more):
        keys.append(key)
        return await inner(runner, rows, key, *more)

    monkeypatch.setattr(EpisodeRunner, "collect", collect)
    trainer = team_trainer(model_folder, tmp_path)
    for seed in (3, 3, 4):
        trainer.team.run(QUESTIONS[:1], seed=seed)
    assert keys[0] == keys[1] != keys[2] and trainer.parts.runner.keys.state_dict() == {"runs": 0}


# ---- A team grows ----


def test_a_new_agent_joins_a_loaded_team(model_folder, tmp_path, tokenizer):
    team_trainer(model_folder, tmp_path / "one", settings=QUICK).save_model()
    loaded = load_adapters(AutoModelForCausalLM.from_pretrained(model_folder), tmp_path / "one")
    agents = [*tiny_agents(), AgentSpec("checker", system_prompt="Check.")]
    arguments = {"agents": agents, "peft_config": lora(2), "processing_class": tokenizer, "settings": QUICK}
    trainer = team_trainer(loaded, tmp_path / "two", **arguments)
    ranks = {
        name: {p.shape[0] for n, p in trainer.policies.parameters(name).items() if "lora_A" in n}
        for name in ("reasoner", "actor", "checker")
    }
    assert ranks == {"reasoner": {4}, "actor": {4}, "checker": {2}}
    trainer.train()
    trainer.save_model()
    assert len(Team.from_pretrained(tmp_path / "two", model=model_folder).run(["x"])[0].turns) == 3


@pytest.mark.parametrize(
    ("agents", "peft_config", "message"),
    [
        (tiny_agents(), lora(2), "but no agent is new"),
        ([AgentSpec("reasoner", peft_config=lora(2)), AgentSpec("actor")], None, "already has its adapter 'reasoner'"),
        ([*tiny_agents(), AgentSpec("checker")], None, "Pass `peft_config=LoraConfig"),
    ],
)
def test_configs_that_a_loaded_team_rejects(model_folder, team_folder, tmp_path, agents, peft_config, message):  # noqa: F811
    loaded = load_adapters(AutoModelForCausalLM.from_pretrained(model_folder), team_folder)
    with pytest.raises(ValueError, match=message):
        team_trainer(loaded, tmp_path, agents=agents, peft_config=peft_config, processing_class=tiny_tokenizer())


@pytest.mark.slow
def test_names_that_are_parts_of_a_prefix_are_saved_and_loaded(model_folder, tmp_path, recwarn):
    names = ("a", "l", "lora", "base", "r", "ora")
    agents = [AgentSpec(name, system_prompt=name) for name in names]
    trainer = team_trainer(model_folder, tmp_path, agents=agents, settings=QUICK)
    trainer.train()
    trainer.save_model()
    assert not [warning for warning in recwarn if "should not be contained in the prefix" in str(warning.message)]
    loaded = load_adapters(AutoModelForCausalLM.from_pretrained(model_folder), tmp_path)
    assert_same_adapters(trainer, loaded, names)


def assert_same_adapters(trainer, loaded, names):
    for name in names:
        trained, loaded_weights = trainer.policies.parameters(name), dict(loaded.named_parameters())
        assert trained and all(torch.equal(trained[n], loaded_weights[n]) for n in trained)


@pytest.mark.parametrize(
    ("peft_config", "setting"),
    [
        (IA3Config(target_modules=["q_proj"], feedforward_modules=[]), "IA3Config"),
        (LoHaConfig(target_modules=["q_proj"]), "LoHaConfig"),
        (VeraConfig(target_modules=["q_proj"]), "VeraConfig"),
        (OFTConfig(target_modules=["q_proj"]), "OFTConfig"),
        (LoraConfig(target_modules=["q_proj"], target_parameters=["norm.weight"]), "`target_parameters`"),
        (LoraConfig(target_modules=["q_proj"], trainable_token_indices=[1]), "`trainable_token_indices`"),
        (LoraConfig(target_modules=["q_proj"], init_lora_weights="pissa"), "`init_lora_weights='pissa'`"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.parametrize("alone", [True, False])
def test_adapters_that_could_not_be_loaded_are_not_trained(model_folder, tmp_path, peft_config, setting, alone):
    agents = [AgentSpec("solo")] if alone else [AgentSpec("a"), AgentSpec("b", peft_config=peft_config)]
    with pytest.raises(ValueError, match=setting):
        team_trainer(model_folder, tmp_path, agents=agents, peft_config=peft_config)


@pytest.mark.slow
@pytest.mark.parametrize("family", MIXTURES)
def test_a_team_on_a_mixture_of_experts_makes_the_whole_round_trip(tokenizer, tmp_path, family):
    """Train on all linear layers, save, load, run and train again: PEFT rewrites the config of such adapters."""
    arguments = {"processing_class": tokenizer, "settings": {"max_steps": 1}}
    trainer = team_trainer(family_base(family, len(tokenizer)), tmp_path, **arguments)
    trainer.train()
    shake(trainer.model, 0.1, "lora_")
    trainer.save_model()
    loaded = load_adapters(family_base(family, len(tokenizer)), tmp_path)
    assert_same_adapters(trainer, loaded, ("reasoner", "actor"))
    team = Team.from_pretrained(tmp_path, model=family_base(family, len(tokenizer)))
    assert [turn.agent for turn in team.run(["How many?"])[0].turns] == ["reasoner", "actor"]
    team_trainer(loaded, tmp_path / "on", peft_config=None, **arguments).train()


@pytest.mark.slow
@pytest.mark.parametrize("share", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_lora_on_the_embeddings_makes_the_whole_round_trip(model_folder, tmp_path, share):
    """Trained, saved, resumed, loaded, published: the files contain no weights of the base."""
    config = LoraConfig(r=4, lora_alpha=8, target_modules=["embed_tokens", "q_proj"])
    settings = {"learning_rate": 1e-2, "beta": 0.1, "share_prefixes": share, "save_strategy": "steps", "save_steps": 1}

    def make(folder, steps):
        return team_trainer(model_folder, folder, peft_config=config, settings={**settings, "max_steps": steps})

    whole = make(tmp_path / "whole", 2)
    assert any("lora_embedding_B" in name for name in moved_by_training(whole))
    make(tmp_path / "cut", 1).train()
    again = make(tmp_path / "cut", 2)
    again.train(resume_from_checkpoint=True)
    assert not moved(weights(whole), weights(again))
    whole.save_model(str(tmp_path / "team"))
    names = load_file(tmp_path / "team" / "reasoner" / "adapter_model.safetensors")
    assert names and all("lora_" in name for name in names)
    team = Team.from_pretrained(tmp_path / "team", model=model_folder)
    rows = [{"prompt": "3+4"}] * 4
    completions = [turn.completion_ids for episode in team.run(rows, greedy=True) for turn in episode.turns]
    runner = whole.parts.runner.changed(RunMode({"greedy": True}))
    assert completions == [
        turn.completion_ids for episode in runner.run(rows, runner.answer) for turn in episode.turns
    ]
    loaded = load_adapters(AutoModelForCausalLM.from_pretrained(model_folder), tmp_path / "team")
    assert not moved(weights(whole), weights(team_trainer(loaded, tmp_path / "more", peft_config=None)))
