"""Teams of different models: each agent's turns, gradients, files and settings belong to its own base."""

import contextlib
import copy
import dataclasses
import itertools
import json
import math
import shutil
from pathlib import Path
from types import SimpleNamespace

from marft_trl import AgentSpec, Team, load_adapters
from marft_trl.adapters.manifest import MANIFEST_NAME, TeamManifest
from marft_trl.config.presets import PRESETS
from marft_trl.extras.apps import ExternalApp
from marft_trl.extras.commands import UsageError, main
from marft_trl.extras.commands.teams import chosen_bases
from marft_trl.learning.batching import TeamBatcher
from marft_trl.learning.memory import count_bytes, readable
from marft_trl.reporting.model_card import team_card
from marft_trl.rollout.generator import SampledTurn
from marft_trl.seams.models import is_checkpointing
from marft_trl.team import TextDelta, TurnEnded
from marft_trl.tiny import tiny_agents, tiny_dataset
from marft_trl.trainer.bases import check_settings
from tests.families import family_base
from tests.helpers import add, logged_steps, lora, only_slice, shake, team_trainer
from tests.tokenizers_and_templates import tokenizer_of
from tests.vllm_server import fake_servers

import openai
import pytest
import torch
from peft import get_peft_model
from transformers import AutoModelForCausalLM


def agents_on(second, tokenizer, **settings) -> list[AgentSpec]:
    """The tiny team, whose second agent acts with another model."""
    reasoner, actor = tiny_agents()
    return [reasoner, dataclasses.replace(actor, model=second, processing_class=tokenizer, **settings)]


def loaded(folder):
    return AutoModelForCausalLM.from_pretrained(folder)


def adapters(trainer) -> dict[str, torch.Tensor]:
    parts = trainer.parts.updates.trained_parameters()
    return {f"{part}/{name}": value.detach().clone() for part in parts for name, value in parts[part].items()}


def random_start(trainer, source=None) -> None:
    """Random weights of all adapters, or those of another trainer."""
    for name in trainer.policies.names:
        for position, parameter in enumerate(trainer.policies.parameters(name).values()):
            values = None if source is None else list(source.policies.parameters(name).values())[position]
            parameter.data.copy_(torch.randn_like(parameter) * 0.05 if values is None else values.detach())
    trainer.policies.copy_references(copy_all=True)


# ---- Two copies of one model ----


LEARNING = {
    "plain passes": {"share_prefixes": False, "beta": 0.1},
    "entropy": {"entropy_coef": 0.01, "top_entropy_quantile": 0.5},
    "counterfactual": {"credit": "counterfactual", "advantage": "leave_one_out", "scale_rewards": "none"},
    "candidates": {"advantage": "turn", "turn_candidates": 2},
    "old turns": {"num_iterations": 2, "steps_per_generation": 2, "beta": 0.1, "gradient_checkpointing": True},
    "in turn": {"update_order": "sequential", "max_steps": 4},
    "dropout": {"with": lora(lora_dropout=0.3), "share_prefixes": False},
    "critics": {"advantage": "gae", "critic": "per_agent", "num_generations": 1, "critic_sees": "history"},
}


@pytest.mark.parametrize("kind", [*LEARNING, *(pytest.param(name, marks=pytest.mark.slow) for name in PRESETS)])
def test_two_copies_of_a_model_train_as_one(small_model, tokenizer, tmp_path, kind):
    settings = LEARNING.get(kind) or {"preset": kind}
    if kind in PRESETS and "critic" in PRESETS[kind].settings:
        settings = {**settings, "critic": "per_agent"}  # the part of each agent is on its own base
    settings = {"learning_rate": 1e-2, "max_tokens_per_micro_batch": 500, **settings}
    arguments = {"peft_config": settings.pop("with", lora())}
    agents = agents_on(loaded(small_model), tokenizer)
    one = team_trainer(small_model, tmp_path / "one", settings=settings, **arguments)
    two = team_trainer(small_model, tmp_path / "two", settings=settings, agents=agents, **arguments)
    random_start(one)
    random_start(two, one)
    if one.critic is not None:
        for part in one.critic.parts:
            for own, other in zip(
                two.critic.parameters(part).values(), one.critic.parameters(part).values(), strict=True
            ):
                own.data.copy_(other.detach())
    before = adapters(one)
    for trainer in (one, two):
        torch.manual_seed(0)
        trainer.train()
    first, second = adapters(one), adapters(two)
    assert first.keys() == second.keys() and len(two.policies.further) == 1
    assert all(any(not before[n].equal(first[n]) for n in first if n.startswith(f"{part}/")) for part in ("actor",))
    for name in first:
        torch.testing.assert_close(second[name], first[name], rtol=1e-4, atol=1e-6, msg=name)
    for name in ("loss", "grad_norm"):
        values = [[log[name] for log in trainer.state.log_history if name in log] for trainer in (one, two)]
        assert values[0] == pytest.approx(values[1], rel=1e-4, abs=1e-6), name


@pytest.mark.parametrize("critic", ["shared", pytest.param("multi_head", marks=pytest.mark.slow), "frozen"])
def test_a_critic_has_a_part_on_each_base(small_model, model_folder, tokenizer, tmp_path, critic):
    """The bases have different widths. A part learns from the turns of the agents on its base."""
    settings = {"advantage": "gae", "critic": critic, "num_generations": 1, "critic_learning_rate": 1e-2}
    agents = [*agents_on(model_folder, None), AgentSpec("judge", model=model_folder, trainable=False)]
    trainer = team_trainer(small_model, tmp_path, settings=settings, agents=agents)
    before = adapters(trainer)
    trainer.train()
    assert trainer.critic.parts == ["_critic", "_critic-actor"]
    after = adapters(trainer)
    still = {name.split("/")[0] for name in after} - {n.split("/")[0] for n in after if not before[n].equal(after[n])}
    assert not still and "judge" not in {name.split("/")[0] for name in after}
    for trained in (trainer.model, *trainer.policies.further):
        shake(trained, 0.3)
    rows = only_slice(trainer, [row for row in tiny_dataset(4) for _ in range(2)]).rows
    row = next(row for row in rows if row.agent == "actor" and row.critic is not None)
    model = trainer.policies.get_model("actor")
    trainer.policies.activate_adapter("actor" if critic == "frozen" else "_critic-actor")
    with torch.no_grad(), model.disable_adapter() if critic == "frozen" else contextlib.nullcontext():
        ids = torch.cat([row.prompt_ids, row.completion_ids]).unsqueeze(0)
        states = model.get_base_model().model(input_ids=ids).last_hidden_state
        values = trainer.critic.heads["_critic-actor"](states[0, len(row.prompt_ids) - 1 : -1])
    index = [agent.name for agent in agents].index("actor") if critic == "multi_head" else 0
    torch.testing.assert_close(row.old_values, values[:, index], rtol=1e-4, atol=1e-5)


def test_prepare_further_model_as_trl_prepares_its_own(small_model, model_folder, tmp_path):
    settings = {"disable_dropout": True, "gradient_checkpointing": True, "max_steps": 1}
    agents = agents_on(model_folder, None, peft_config=lora(lora_dropout=0.5))
    trainer = team_trainer(small_model, tmp_path, agents=agents, settings=settings)
    (model,) = trainer.policies.further
    assert all(module.p == 0 for module in model.modules() if isinstance(module, torch.nn.Dropout))
    assert is_checkpointing(model) and trainer.policies.find_trained(["actor"]) == "actor"
    trainer.train()
    assert model.training and all(parameter.grad is None for parameter in model.parameters())  # freed after the step
    trainer.model.eval()
    trainer.policies.activate("actor")
    assert not model.training


def test_rows_are_padded_with_a_token_of_their_model(families, small_model, tokenizer, tmp_path):
    """The padding of the first base is no token of the second."""
    first = copy.deepcopy(tokenizer)
    first.pad_token = first.convert_ids_to_tokens(len(first) - 1)
    second = loaded(families["llama3"])
    assert first.pad_token_id >= second.get_input_embeddings().weight.size(0)
    agents = [AgentSpec("left"), AgentSpec("right", model=families["llama3"])]
    arguments = {"agents": agents, "processing_class": first, "settings": {"share_prefixes": False}}
    trainer = team_trainer(small_model, tmp_path, **arguments)
    trainer.train()
    assert trainer.state.global_step == 2


# ---- What moves ----


@pytest.mark.parametrize("frozen", ["reasoner", "actor"])
def test_trained_agents_move_and_frozen_ones_do_not(small_model, model_folder, tmp_path, frozen):
    agents = [dataclasses.replace(agent, trainable=agent.name != frozen) for agent in agents_on(model_folder, None)]
    trainer = team_trainer(small_model, tmp_path, agents=agents)
    models = [trainer.model, *trainer.policies.further]
    before = [{name: value.clone() for name, value in model.state_dict().items()} for model in models]
    trainer.train()
    moved = {
        name
        for model, old in zip(models, before, strict=True)
        for name, value in model.state_dict().items()
        if not old[name].equal(value)
    }
    trained = "actor" if frozen == "reasoner" else "reasoner"
    assert moved and all(f".{trained}." in name for name in moved)


@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_fully_trained_weights_for_each_agent(small_model, model_folder, tmp_path, beta):
    """Both models move, and are saved and loaded whole. The reference of each is its own start."""
    settings = {"beta": beta, "learning_rate": 1e-2}
    agents = agents_on(model_folder, None)
    trainer = team_trainer(small_model, tmp_path, agents=agents, peft_config=None, settings=settings)
    assert trainer.policies.names == ["actor", "policy"]
    before = adapters(trainer)
    assert len(before) == len(dict(trainer.model.named_parameters())) + len(
        dict(loaded(model_folder).named_parameters())
    )
    trainer.train()
    after = adapters(trainer)
    assert {name.split("/")[0] for name in after if not before[name].equal(after[name])} == {"actor", "policy"}
    if beta:
        kls = [
            [log[f"agents/{agent.name}/kl"] for log in trainer.state.log_history if "loss" in log] for agent in agents
        ]
        assert all(abs(kl[0]) < 1e-5 < kl[1] for kl in kls)
    expected = trainer.team("1 + 2 =", greedy=True)
    trainer.save_model(tmp_path / "saved")
    team = Team.from_pretrained(tmp_path / "saved")
    assert team("1 + 2 =", greedy=True) == expected
    manifest = TeamManifest.load(tmp_path / "saved")
    assert not manifest.adapters and manifest.further_bases[0].folder == "actor"
    for name, value in team["actor"].state_dict().items():
        assert value.equal(trainer.policies.further[0].state_dict()[name])


def test_agents_that_name_the_same_model_share_one_base(small_model, model_folder, tmp_path):
    reasoner, actor = tiny_agents()
    agents = [
        reasoner,
        dataclasses.replace(actor, model=model_folder),
        AgentSpec("checker", model=model_folder),
        AgentSpec("judge", model=small_model),  # that of the trainer
        AgentSpec("copy", model=model_folder, model_init_kwargs={"dtype": "bfloat16"}),
    ]
    policies = team_trainer(small_model, tmp_path, agents=agents).policies
    models = {agent.name: policies.get_model(agent.name) for agent in agents}
    assert models["actor"] is models["checker"] is not models["copy"] and models["judge"] is models["reasoner"]
    assert models["copy"].dtype == torch.bfloat16 and len(policies.further) == 2


# ---- Different tokenizers, templates and end tokens ----


@pytest.fixture(scope="module")
def families(built_once):
    """Folders of a tiny Qwen 3 and a tiny Llama 3 with their tokenizers and templates."""

    def build(kind, family, config, end):
        def save(folder):
            tokenizer = tokenizer_of(kind, family)
            model = family_base(config, vocabulary=len(tokenizer) + 8)
            model.config.max_position_embeddings = 1024
            model.generation_config.eos_token_id = tokenizer.convert_tokens_to_ids(end)
            model.save_pretrained(folder)
            tokenizer.save_pretrained(folder)

        return built_once(f"family-{family}", save)

    return {
        "qwen3": build("byte_level", "qwen3", "qwen3", "<|im_end|>"),
        "llama3": build("metaspace", "llama3", "llama", "<|eot_id|>"),
    }


def say(trainer, texts) -> None:
    """Let agents write texts, each with its number, in the tokens of their own model."""
    counts = itertools.count()

    async def generate(observed, **options):
        turns = []
        for observation in observed:
            tokenizer = trainer.parts.runner.prompts.for_agent(observation.agent).tokenizer
            ids = tokenizer(f"{texts[observation.agent]} {next(counts) % 5}", add_special_tokens=False)["input_ids"]
            turns.append(SampledTurn([*ids, tokenizer.eos_token_id]))
        return turns

    trainer.parts.runner.generator.generate = generate


def test_two_families_by_hand(families, tmp_path):
    """Turns cross as text, in the template and the tokens of the reader, and are scored by their own model."""
    settings = {"beta": 0.1, "num_iterations": 2, "temperature": 0.7}
    planner = AgentSpec("planner", system_prompt="Plan.", max_completion_length=40)
    agents = [planner, AgentSpec("solver", "Solve.", model=families["llama3"])]
    data = tiny_dataset(8)
    trainer = team_trainer(families["qwen3"], tmp_path, agents=agents, settings=settings, train_dataset=data)
    tokenizers = {name: trainer.parts.runner.prompts.for_agent(name).tokenizer for name in ("planner", "solver")}
    assert len(tokenizers["planner"]) != len(tokenizers["solver"])
    ends = {name: trainer.parts.runner.generator.settings(name)["eos_token_id"] for name in tokenizers}
    named = {"planner": "<|im_end|>", "solver": "<|eot_id|>"}
    assert all(tokenizers[name].convert_tokens_to_ids(end) in ends[name] for name, end in named.items())
    for model in (trainer.model, *trainer.policies.further):
        shake(model, 0.2)
    generate = trainer.parts.runner.generator.generate
    say(trainer, {"planner": "the answer is", "solver": "not"})
    slice_ = only_slice(trainer, [row for row in data.select(range(2)) for _ in range(4)])
    assert {row.agent for row in slice_.rows} == {"planner", "solver"}
    turns = {}
    for row in sorted(slice_.rows, key=lambda row: row.agent):
        model, tokenizer = trainer.policies.get_model(row.agent), tokenizers[row.agent]
        messages = [
            {"role": "system", "content": "Plan." if row.agent == "planner" else "Solve."},
            {"role": "user", "content": data[row.episode // 4]["prompt"]},
        ]
        ids = row.completion_ids.tolist()
        if row.agent == "planner":
            turns[row.episode] = tokenizer.decode(ids, skip_special_tokens=True)
        else:
            messages[1]["content"] += f"\n\n[planner]\n{turns[row.episode]}"
        rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        assert tokenizer.decode(row.prompt_ids) == rendered
        whole = torch.tensor([[*row.prompt_ids.tolist(), *ids]])
        trainer.policies.activate(row.agent)
        logits = model(input_ids=whole).logits[0, len(row.prompt_ids) - 1 : -1].float() / 0.7
        by_hand = logits.log_softmax(-1).gather(1, row.completion_ids.unsqueeze(1)).squeeze(1)
        torch.testing.assert_close(row.old_per_token_logps, by_hand, rtol=1e-5, atol=1e-5)
        with model.disable_adapter():  # nothing was trained before: the reference is the base
            logits = model(input_ids=whole).logits[0, len(row.prompt_ids) - 1 : -1].float() / 0.7
        by_hand = logits.log_softmax(-1).gather(1, row.completion_ids.unsqueeze(1)).squeeze(1)
        torch.testing.assert_close(row.ref_per_token_logps, by_hand, rtol=1e-5, atol=1e-5)
    trainer.parts.runner.generator.generate = generate
    # The plan counts the planner's text in tokens of the solver
    solver = tokenizers["solver"]
    rehearsal = trainer.parts.planner.rehearse(data[0])
    shown, made_up = rehearsal.shown["solver"], solver("(what planner says)", add_special_tokens=False)["input_ids"]
    assert len(made_up) != len(tokenizers["planner"]("(what planner says)")["input_ids"])
    (planned,) = [length for agent, length, _ in rehearsal.prompts if agent == "solver"]
    assert planned == len(shown.ids) - len(made_up) + 40
    trainer.train()
    trainer.save_model()
    folders = dict(zip(("planner", "solver"), (families["qwen3"], families["llama3"]), strict=True))
    team = Team.from_pretrained(tmp_path, model=folders)
    assert all(team._runner.generator.settings(name)["eos_token_id"] == end for name, end in ends.items())
    assert team("1 + 2 =", greedy=True) == trainer.team("1 + 2 =", greedy=True)


def test_slices_are_joined_if_every_base_joins_them():
    class Batcher:
        def __init__(self, joins_slices):
            self.joins_slices = joins_slices

    both, one = {"left": Batcher(True), "right": Batcher(True)}, {"left": Batcher(True), "right": Batcher(False)}
    assert TeamBatcher(both).joins_slices and not TeamBatcher(one).joins_slices


async def relay(row, endpoint):
    """An application that shows a model what another one has written, as its own earlier turn."""
    async with openai.AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key) as client:
        messages = [{"role": "user", "content": row["prompt"]}]
        for agent in ("planner", "solver", "planner"):
            reply = (await client.chat.completions.create(model=agent, messages=messages)).choices[0].message
            messages += [{"role": "assistant", "content": reply.content}, {"role": "user", "content": "Go on."}]


def test_turns_of_another_model_in_a_conversation_are_text(families, tmp_path):
    agents = [AgentSpec("planner"), AgentSpec("solver", model=families["llama3"])]
    arguments = {"agents": agents, "workflow": ExternalApp(relay), "train_dataset": tiny_dataset(8)}
    trainer = team_trainer(families["qwen3"], tmp_path, **arguments)
    generate = trainer.parts.runner.generator.generate
    say(trainer, {"planner": "the answer is", "solver": "not"})
    (episode,) = trainer.team.run(["1 + 2 ="], seed=1)
    trainer.parts.runner.generator.generate = generate
    first, second, third = episode.turns
    tokenizers = {name: trainer.parts.runner.prompts.for_agent(name).tokenizer for name in ("planner", "solver")}
    assert tokenizers["solver"].decode(second.prompt_ids).count(first.raw_text) == 1
    assert len(second.prompt_ids) and max(second.prompt_ids) < len(tokenizers["solver"])
    # The planner keeps its own tokens, and reads those of the solver as text
    text = str(third.prompt_ids)[1:-1]
    assert (
        str(first.completion_ids[:-1])[1:-1] in text
        and tokenizers["planner"].decode(third.prompt_ids).count(second.raw_text) == 1
    )
    trainer.train()


def test_tools_on_one_of_two_bases(families, tmp_path):
    """Only the template of an agent with tools has to support them."""
    agents = [AgentSpec("planner", tools=[add]), AgentSpec("solver", model=families["llama3"])]
    trainer = team_trainer(families["qwen3"], tmp_path, agents=agents)
    tokenizer = trainer.processing_class
    call = tokenizer('<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>')["input_ids"]
    generators = trainer.parts.runner.generator
    generate, calls = generators.generate, []

    async def with_call(observed, **options):
        turns = await generate(observed, **options)
        if observed[0].agent == "planner" and not calls:
            calls.append(observed)
            turns = [turn._replace(ids=[*call, tokenizer.eos_token_id], logps=None) for turn in turns]
        return turns

    generators.generate = with_call
    (episode,) = trainer.team.run(["1 + 2 ="], seed=1)
    assert [turn.agent for turn in episode.turns] == ["planner", "planner", "solver"]
    assert "3" in tokenizer.decode(episode.turns[1].prompt_ids)[-80:]


# ---- Files ----


@pytest.fixture(scope="module")
def saved(small_model, model_folder, tmp_path_factory):
    """A trained team, its folder and its greedy answer."""
    folder = tmp_path_factory.mktemp("several") / "team"
    trainer = team_trainer(small_model, folder, agents=agents_on(model_folder, None), settings={"learning_rate": 1e-1})
    trainer.train()
    trainer.save_model()
    return trainer, folder, trainer.team("1 + 2 =", greedy=True)


def models_of(folder, small_model, model_folder):
    names = [base.name for base in TeamManifest.load(folder).bases]
    return dict(zip(names, (small_model, model_folder), strict=True))


def test_a_saved_team_answers_as_in_training(saved, small_model, model_folder, tmp_path):
    trainer, folder, answer = saved
    data = json.loads((folder / MANIFEST_NAME).read_text())
    assert data["format"] == 3 and [base["agents"] for base in data["further_bases"]] == [["actor"]]
    models = models_of(folder, small_model, model_folder)
    team = Team.from_pretrained(folder, model=models)
    for agent in ("reasoner", "actor"):
        settings = [item._runner.generator.settings(agent) for item in (team, trainer.team)]
        assert settings[0]["eos_token_id"] == settings[1]["eos_token_id"] == [2]
    assert team("1 + 2 =", greedy=True) == answer
    team.save_pretrained(tmp_path / "again")
    shutil.copytree(tmp_path / "again", tmp_path / "moved")
    again = Team.from_pretrained(tmp_path / "moved", model=models)
    assert again("1 + 2 =", greedy=True) == answer
    own = trainer.policies.parameters("actor")
    alone = dict(again["actor"].named_parameters())
    assert all(alone[name].equal(parameter) for name, parameter in own.items())
    # One agent by PEFT alone, as the card says
    model = load_adapters(loaded(model_folder), folder, agent="actor")
    assert all(dict(model.named_parameters())[name].equal(parameter) for name, parameter in own.items())
    card = (folder / "README.md").read_text()
    assert 'subfolder="reasoner"' in card and 'subfolder="actor"' in card


def test_a_card_names_the_bases_if_all_are_on_the_hub(saved):
    manifest = TeamManifest.load(saved[1])
    (further,) = manifest.further_bases
    first_on_hub = dataclasses.replace(manifest, base=dataclasses.replace(manifest.base, name="me/a", is_local=False))
    further = dataclasses.replace(further, name="me/b", is_local=False)
    both_on_hub = dataclasses.replace(first_on_hub, further_bases=[further])
    card = team_card(both_on_hub, "team")
    assert card.data.base_model == ["me/a", "me/b"]
    assert "on\n[me/a](https://huggingface.co/me/a) and [me/b](https://huggingface.co/me/b)" in card.text
    partial = team_card(first_on_hub, "team")
    assert partial.data.base_model == "me/a" and "[me/a](" not in partial.text


def test_bases_of_the_same_name_are_chosen_by_agent(small_model, model_folder, tmp_path):
    for source, place in ((small_model, "one"), (model_folder, "two")):
        shutil.copytree(source, tmp_path / place / "final")
    folders = [str(tmp_path / place / "final") for place in ("one", "two")]
    trainer = team_trainer(folders[0], tmp_path / "team", agents=agents_on(folders[1], None))
    trainer.save_model()
    with pytest.raises(ValueError, match="'final', which is the name of several bases"):
        Team.from_pretrained(tmp_path / "team", model={"final": folders[0]})
    team = Team.from_pretrained(tmp_path / "team", model=dict(zip(("reasoner", "actor"), folders, strict=True)))
    assert team("1 + 2 =", greedy=True) == trainer.team("1 + 2 =", greedy=True)


def test_a_loaded_team_with_a_function_and_several_bases(small_model, model_folder, tmp_path):
    agents = [AgentSpec("human", reply=lambda messages: "seven"), *agents_on(model_folder, None)]
    trainer = team_trainer(small_model, tmp_path, agents=agents)
    trainer.save_model()
    models = {"reasoner": small_model, "actor": model_folder}
    team = Team.from_pretrained(tmp_path, model=models, replies={"human": lambda messages: "seven"})
    assert team("1 + 2 =", greedy=True) == trainer.team("1 + 2 =", greedy=True)


def test_a_function_replaces_a_base_that_is_not_loaded(saved, small_model, tmp_path):
    _, folder, _ = saved
    team = Team.from_pretrained(folder, model=small_model, replies={"actor": lambda messages: "seven"})
    assert team("1 + 2 =") == "seven" and len(team.run(["1 + 2 ="] * 2)) == 2
    with pytest.raises(ValueError, match="`replies` replace all agents of a base"):
        team.save_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda base: base.update(agents=["reasoner", "actor"]), "no agent has a policy on the first base"),
        (lambda base: base.update(agents=["actor", "stranger"]), "'stranger'"),
        (lambda base: base.update(folder="../reasoner"), "the folder of a base"),
        (lambda base: base.update(folder="reasoner"), "agents of another base"),
        (lambda base: base.update(is_trained=True), "unknown field 'is_trained'"),
        (lambda base: base.update(is_local=False, name="../x y"), "not a valid Hub id"),
    ],
)
def test_a_manifest_that_lies_about_bases_is_refused(saved, tmp_path, change, message):
    _, folder, _ = saved
    shutil.copytree(folder, tmp_path / "team")
    data = json.loads((folder / MANIFEST_NAME).read_text())
    change(data["further_bases"][0])
    (tmp_path / "team" / MANIFEST_NAME).write_text(json.dumps(data))
    with pytest.raises(ValueError, match=message):
        TeamManifest.load(tmp_path / "team")


def test_missing_and_wrong_bases_are_named(saved, small_model, model_folder):
    _, folder, _ = saved
    first, second = models_of(folder, small_model, model_folder)
    with pytest.raises(ValueError, match=f"local base '{first}' and '{second}'.*{{'reasoner': ..., 'actor': ...}}"):
        Team.from_pretrained(folder)
    with pytest.raises(ValueError, match="same loaded model for several bases"):
        Team.from_pretrained(folder, model=dict.fromkeys(("reasoner", "actor"), loaded(small_model)))
    with pytest.raises(ValueError, match="`agent` must be an agent on this base, one of 'reasoner'"):
        load_adapters(loaded(small_model), folder)
    with pytest.raises(ValueError, match="`model=` has 'other', which is no base of the team"):
        Team.from_pretrained(folder, model={"other": small_model})
    with pytest.raises(ValueError, match="for another base"):
        Team.from_pretrained(folder, model={first: model_folder, second: small_model})


# ---- Resume ----


PPO = {"advantage": "gae", "critic": "shared", "num_generations": 1}


@pytest.mark.parametrize("settings", [pytest.param({}, marks=pytest.mark.slow), PPO])
def test_killed_and_resumed_equals_uninterrupted(small_model, model_folder, tmp_path, settings):
    """In the middle of a generation batch, with a critic on each base."""
    settings = {"max_steps": 4, "steps_per_generation": 2, "num_iterations": 2, "save_strategy": "steps", **settings}
    settings |= {"save_steps": 1, "learning_rate": 1e-2}
    agents = agents_on(model_folder, None)
    whole = team_trainer(small_model, tmp_path / "whole", agents=agents, settings=settings)
    whole.train()
    for step in (1, 3):
        again = team_trainer(small_model, tmp_path / f"again-{step}", agents=agents, settings=settings)
        again.train(resume_from_checkpoint=str(tmp_path / "whole" / f"checkpoint-{step}"))
        expected, found = adapters(whole), adapters(again)
        assert all(found[name].equal(value) for name, value in expected.items())
        names = ("step", "loss", "grad_norm")
        expected, found = ([[log[name] for name in names] for log in logged_steps(t)] for t in (whole, again))
        assert found[step:] == expected[step:]


@pytest.mark.parametrize("second", [None, pytest.param(lora(), marks=pytest.mark.slow)])
def test_fully_trained_bases_are_resumed_and_the_best_restored(small_model, model_folder, tmp_path, second):
    settings = {"max_steps": 3, "save_strategy": "steps", "save_steps": 1, "beta": 0.1, "sync_ref_model": True}
    settings |= {"ref_model_sync_steps": 1, "eval_strategy": "steps", "eval_steps": 1, "load_best_model_at_end": True}
    settings |= {"metric_for_best_model": "eval_reward", "greater_is_better": True, "per_device_eval_batch_size": 8}
    arguments = {"agents": agents_on(model_folder, None, peft_config=second), "peft_config": None}
    arguments |= {"settings": settings, "eval_dataset": tiny_dataset(2, seed=1)}
    whole = team_trainer(small_model, tmp_path / "whole", **arguments)
    whole.train()
    again = team_trainer(small_model, tmp_path / "again", **arguments)
    again.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-1"))
    expected, found = adapters(whole), adapters(again)
    assert len(expected) > 4 and all(found[name].equal(value) for name, value in expected.items())


def test_an_agent_that_moved_to_another_base_is_not_resumed(small_model, model_folder, tmp_path):
    settings = {"save_strategy": "steps", "save_steps": 1, "max_steps": 1}
    agents = [*agents_on(model_folder, None), AgentSpec("third", model=model_folder)]
    team_trainer(small_model, tmp_path, agents=agents, settings=settings).train()
    agents[2] = AgentSpec("third", model=small_model)
    with pytest.raises(ValueError, match=r"(?s)base\.further\.actor\.agents"):
        team_trainer(small_model, tmp_path, agents=agents, settings=settings).train(resume_from_checkpoint=True)


def test_a_changed_base_is_not_resumed(small_model, model_folder, deep_folder, tmp_path):
    settings = {"save_strategy": "steps", "save_steps": 1, "max_steps": 1}
    team_trainer(small_model, tmp_path, agents=agents_on(model_folder, None), settings=settings).train()
    other = team_trainer(small_model, tmp_path, agents=agents_on(deep_folder, None), settings=settings)
    with pytest.raises(ValueError, match=r"(?s)base\.further\.actor\.config"):
        other.train(resume_from_checkpoint=True)


# ---- Before anything is loaded ----


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"torch_compile": True}, "`torch_compile=True` compiles one base"),
        ({"cast_lm_head_to_fp32": True}, "casts the head of one base"),
        ({"use_vllm": True, "vllm_mode": "colocate"}, "needs servers of each model"),
        ({"use_vllm": True, "vllm_mode": "server"}, "needs servers of each model"),
    ],
)
def test_settings_for_one_base_are_refused_before_loading(tmp_path, settings, message):
    agents = [AgentSpec("left"), AgentSpec("right", model="no/such-model")]
    with pytest.raises(ValueError, match=f"'right'.*{message}"):
        team_trainer("no/such-first", tmp_path, agents=agents, settings=settings)


@pytest.mark.parametrize(
    ("agents", "error", "message"),
    [
        ([{"model": 3}], TypeError, "`model` of agent 'left' must be the name"),
        ([{"model": "no such"}], FileNotFoundError, "neither a folder"),
        ([{"model": "a/b"}, {"model": "c/d"}], ValueError, "No agent acts with the trainer's"),
        (
            [{}, {"model": "a/b", "adapter": "left"}],
            ValueError,
            "share the adapter 'left' but differ in `model`",
        ),
        (
            [
                {},
                {"model": "a/b", "adapter": "x"},
                {"model": "a/b", "adapter": "x", "model_init_kwargs": {"dtype": "bfloat16"}},
            ],
            ValueError,
            "share the adapter 'x' but differ in `model_init_kwargs`",
        ),
        ([{"processing_class": object()}], ValueError, "sets `processing_class` without `model`"),
        ([{"model": object(), "model_init_kwargs": {}}], ValueError, "its `model` is already loaded"),
        ([{"model": "a/b", "reply": str}], ValueError, "`model` would have no effect"),
        (
            [{}, {"model": "a/b", "processing_class": object()}, {"model": "a/b"}],
            ValueError,
            "'third' acts with the same model as agent 'right', but has another `processing_class`",
        ),
    ],
)
def test_models_of_agents_that_cannot_work(small_model, tmp_path, agents, error, message):
    names = ("left", "right", "third")
    with pytest.raises(error, match=message):
        specs = [AgentSpec(name, **settings) for name, settings in zip(names, agents, strict=False)]
        team_trainer(small_model, tmp_path, agents=specs)


def test_an_adapter_that_does_not_fit_its_base_is_named(families, small_model, tmp_path):
    agents = [
        AgentSpec("left"),
        AgentSpec("right", model=families["llama3"], peft_config=lora(target_modules="c_attn")),
    ]
    with pytest.raises(ValueError, match="adapters of 'right' cannot be added to .*AgentSpec\\(peft_config"):
        team_trainer(small_model, tmp_path, agents=agents)


def test_the_name_of_a_fully_trained_base_is_taken(small_model, model_folder, tmp_path):
    agents = [AgentSpec("left"), AgentSpec("policy", model=model_folder)]
    with pytest.raises(ValueError, match="An adapter is named 'policy'"):
        team_trainer(small_model, tmp_path, agents=agents, peft_config=None)


def test_a_tokenizer_for_the_model_of_the_trainer_is_refused(small_model, tokenizer, tmp_path):
    agents = [AgentSpec("left"), AgentSpec("right", model=Path(small_model), processing_class=tokenizer)]
    with pytest.raises(ValueError, match="'right' acts with the same model as the trainer"):
        team_trainer(Path(small_model), tmp_path, agents=agents)


def test_several_processes_need_a_trained_agent_on_the_first_base():
    args = SimpleNamespace(world_size=2)
    groups = [[AgentSpec("left", trainable=False)], [AgentSpec("right", model="a/b")]]
    with pytest.raises(ValueError, match="Pass the model of a trained agent as `model`, and that of 'left'"):
        check_settings(args, groups, None)


def test_adapters_of_a_loaded_model_are_trained_further(small_model, model_folder, tokenizer, tmp_path):
    """The config of the trainer is for the other base."""
    start = get_peft_model(loaded(model_folder), lora())
    shake(start, 0.05)
    weights = {name: value.clone() for name, value in start.state_dict().items() if "lora" in name}
    trainer = team_trainer(small_model, tmp_path, agents=agents_on(start, tokenizer))
    copies = trainer.policies.parameters("actor")
    assert all(weights[name.replace(".actor", ".default")].equal(value) for name, value in copies.items())


def test_generation_kwargs_hold_for_every_base(small_model, model_folder, tmp_path):
    settings = {"generation_kwargs": {"temperature": 0.5, "top_p": 0.9}, "temperature": 0.7}
    agents = [*agents_on(model_folder, None), AgentSpec("own", model=model_folder, temperature=0.3)]
    generator = team_trainer(small_model, tmp_path, agents=agents, settings=settings).parts.runner.generator
    found = {agent.name: generator.settings(agent.name) for agent in agents}
    assert [found[name]["temperature"] for name in ("reasoner", "actor", "own")] == [0.5, 0.5, 0.3]
    assert all(values["top_p"] == 0.9 for values in found.values())


# ---- The plan ----


def test_the_plan_names_the_base_of_each_agent(small_model, model_folder, tmp_path):
    trainer = team_trainer(small_model, tmp_path, agents=agents_on(model_folder, None))
    plan, memory = trainer.plan(), trainer.memory_plan()
    assert "reasoner: base small-model" in plan and "actor: base warm-model" in plan
    bases = [loaded(folder) for folder in (small_model, model_folder)]
    sizes = [readable(count_bytes([*base.parameters(), *base.buffers()])) for base in bases]
    assert f"of the base of reasoner: {sizes[0]}" in plan and f"of the base of actor: {sizes[1]}" in plan
    weights = [sum(p.numel() for p in loaded(folder).parameters()) * 4 for folder in (small_model, model_folder)]
    assert memory.base >= sum(weights)
    alone = team_trainer(model_folder, tmp_path).memory_plan()
    assert memory.base < alone.base + 1.1 * weights[0] and memory.activations >= alone.activations * 0.5


# ---- Servers ----


@pytest.mark.parametrize("ahead", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_each_model_has_its_own_servers(small_model, model_folder, tokenizer, tmp_path, ahead):
    """Also with episodes that are sampled ahead, from older adapters of both."""
    with fake_servers(2) as servers:
        flat = -math.log(len(tokenizer))
        for server in servers:
            server.logps = lambda adapter, ids, temperature: {5: flat if temperature > 1 else flat + 0.5}
        addresses = {small_model: servers[0].url, model_folder: [servers[1].url]}
        settings = {"use_vllm": True, "vllm_server_base_url": addresses, "fidelity_tolerance": 1e9, "max_steps": 3}
        settings |= {"max_staleness": ahead, "vllm_importance_sampling_mode": "token_truncate"}
        trainer = team_trainer(small_model, tmp_path, agents=agents_on(model_folder, None), settings=settings)
        before = adapters(trainer)
        trainer.train()
        after = adapters(trainer)
        assert {name.split("/")[0] for name in after if not before[name].equal(after[name])} == {"reasoner", "actor"}
        for server, agent in zip(servers, ("reasoner", "actor"), strict=True):
            assert server.requests and all(f"-{agent}-" in request["model"] for request in server.requests)
        steps = [log for log in trainer.state.log_history if "loss" in log]
        assert all("sampling/staleness" in log for log in steps)


def test_a_model_without_servers_is_named(small_model, model_folder, tmp_path):
    with fake_servers() as (server,):
        settings = {"use_vllm": True, "vllm_server_base_url": {small_model: server.url, "other": server.url}}
        with pytest.raises(ValueError, match=f"has no servers for the model '{model_folder}', only for"):
            team_trainer(small_model, tmp_path, agents=agents_on(model_folder, None), settings=settings)


# ---- In use ----


def test_a_team_of_two_families_streams_the_text_of_each(families, tmp_path):
    agents = [AgentSpec("planner"), AgentSpec("solver", model=families["llama3"])]
    team = team_trainer(families["qwen3"], tmp_path, agents=agents).team
    texts = {}
    for event in team.stream("1 + 2 =", seed=0):
        if isinstance(event, TextDelta):
            texts[event.agent] = texts.get(event.agent, "") + event.text
        elif isinstance(event, TurnEnded):
            assert texts.get(event.agent, "") == event.text
    assert event.episode.turns[1].text == texts["solver"]


def test_a_command_takes_the_folder_of_each_base(saved, small_model, model_folder, capsys):
    _, folder, _ = saved
    models = models_of(folder, small_model, model_folder)
    flags = [flag for name, path in models.items() for flag in ("--model", f"{name}={path}")]
    main(["vllm-command", str(folder), *flags])
    lines = [line for line in capsys.readouterr().out.splitlines() if "serve" in line]
    assert len(lines) == 2 and small_model in lines[0] and model_folder in lines[1]
    assert chosen_bases([flag for flag in flags if "=" in flag]) == models
    with pytest.raises(UsageError, match="NAME=FOLDER"):
        chosen_bases([small_model, f"x={model_folder}"])
