"""Agents of a loaded team: extracted as plain models, saved, pushed, and trained further."""

from marft_trl import AgentSpec, Team, TeamManifest
from marft_trl.adapters import files
from marft_trl.tiny import questions

import pytest
import torch
from peft import PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, PreTrainedModel
from trl import SFTConfig, SFTTrainer

from .helpers import ended, lora, moved_by_training, shake, team_trainer
from .test_persistence import hub, run_on_hub  # noqa: F401  # a fixture


FOUR_BIT = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.float32)
QUESTIONS = [row["prompt"] for row in questions(12, seed=2)]


@pytest.fixture(scope="session")
def team_folder(built_once, model_folder):
    def build(folder):
        agents = [AgentSpec("reasoner", system_prompt="Write the steps."), AgentSpec("actor", temperature=0.7)]
        settings = {"max_steps": 2, "learning_rate": 2e-2, "max_completion_length": 12}
        trainer = team_trainer(model_folder, folder, agents=agents, settings=settings)
        trainer.train()
        for name, parameter in trainer.model.named_parameters():
            if "lora_B" in name:  # so that every turn tells which adapter speaks
                parameter.data *= 30
        trainer.save_model()

    return built_once("members-team", build)


@pytest.fixture
def load(team_folder, model_folder):
    return lambda folder=team_folder, **settings: Team.from_pretrained(folder, model=model_folder, **settings)


def ids_of(team):
    return [[turn.completion_ids for turn in episode.turns] for episode in team.run(QUESTIONS, greedy=True)]


@pytest.fixture(scope="module")
def before(team_folder, model_folder):
    return ids_of(Team.from_pretrained(team_folder, model=model_folder))


def continuation(model, turn):
    """The tokens that a plain model generates from the prompt of a turn."""
    settings = {"do_sample": False, "max_new_tokens": 12, "eos_token_id": 2, "pad_token_id": 0}
    sequences = model.generate(input_ids=torch.tensor([turn.prompt_ids]), **settings)
    return tuple(sequences[0, len(turn.prompt_ids) :].tolist())


@pytest.mark.slow
def test_adapters_make_a_difference_here(load, before):
    """Otherwise no test in this file would notice a wrong adapter."""
    team = load()
    shake(team.model, 0.0, "lora_B.actor")
    assert sum(new[1] != old[1] for new, old in zip(ids_of(team), before, strict=True)) > len(QUESTIONS) // 2


@pytest.mark.parametrize("quantized", [False, True])
def test_an_agent_is_a_plain_model_with_that_agents_adapter(load, quantized):
    team = load(quantization_config=FOUR_BIT if quantized else None)
    before, (episode, *_) = ids_of(team), team.run(QUESTIONS[:1], greedy=True)
    base = {id(p) for p in team.model.get_base_model().parameters()}
    for turn in episode.turns:
        model = team[turn.agent]
        assert isinstance(model, PeftModel) and list(model.peft_config) == [turn.agent] == [model.active_adapter]
        assert continuation(model, turn) == turn.completion_ids
        copied = [p for p in model.parameters() if id(p) not in base]
        assert len(copied) == sum("lora_" in name for name, _ in model.named_parameters())  # the base is shared
        for parameter in copied:
            parameter.data.zero_()
        with pytest.raises(RuntimeError, match=r"`team.merge\(agent\)`, which returns a merged copy"):
            model.merge_and_unload()
    assert ids_of(team) == before
    with pytest.raises(ValueError, match="Did you mean 'actor'"):
        team["actr"]


@pytest.mark.parametrize("quantized", [False, True])
def test_a_merged_agent_needs_no_peft_and_leaves_the_team_alone(load, quantized, tmp_path):
    """Merged weights of a 4-bit base are not rounded to 4 bits again, in which the adapter would be lost."""
    team = load(quantization_config=FOUR_BIT if quantized else None)
    before, (episode, *_) = ids_of(team), team.run(QUESTIONS[:1], greedy=True)
    for turn in episode.turns:
        model = team.merge(turn.agent)
        assert isinstance(model, PreTrainedModel) and not any("lora" in name for name, _ in model.named_parameters())
        ids = torch.tensor([turn.prompt_ids])
        with torch.no_grad():
            assert torch.allclose(model(ids).logits, team[turn.agent](ids).logits, atol=1e-4)
        assert continuation(model, turn) == turn.completion_ids
    model.save_pretrained(tmp_path)
    assert continuation(AutoModelForCausalLM.from_pretrained(tmp_path), turn) == turn.completion_ids
    assert ids_of(team) == before


def test_a_base_whose_4_bit_weights_were_repacked_is_not_merged(load):
    team = load(quantization_config=FOUR_BIT)
    state = next(p.quant_state for p in team.model.parameters() if getattr(p, "quant_state", None) is not None)
    state.packing_format_for_cpu = True  # as bitsandbytes does with AVX512-BF16
    with pytest.raises(ValueError, match="repacked its weights, which can no longer be merged. Load the base again"):
        team.merge("actor")


def test_an_adapter_of_a_tied_embedding_is_merged_into_the_embedding_alone(model_folder):
    base = AutoModelForCausalLM.from_pretrained(model_folder)
    model, ids = (
        get_peft_model(base, lora(target_modules=["embed_tokens"]), adapter_name="one"),
        torch.tensor([[5, 6]]),
    )
    torch.nn.init.normal_(next(p for name, p in model.named_parameters() if "lora_embedding_A" in name))
    with torch.no_grad():
        found = files.merged(model, "one")(ids).logits
        assert torch.allclose(found, model(ids).logits, atol=1e-4)
        with model.disable_adapter():
            assert not torch.allclose(found, model(ids).logits, atol=0.1)


def test_saving_and_loading_keeps_every_answer(load, before, model_folder, tmp_path):
    load().save_pretrained(tmp_path / "again")
    assert ids_of(load(tmp_path / "again")) == before
    saved = TeamManifest.load(tmp_path / "again")
    assert saved.inference.sampling["actor"]["temperature"] == 0.7 and set(saved.adapters) == {"reasoner", "actor"}
    team = team_trainer(model_folder, tmp_path / "run").team
    with pytest.raises(RuntimeError, match=r"`trainer.save_model\(\)`"):
        team.save_pretrained(tmp_path)
    assert isinstance(team["actor"], PeftModel)
    with pytest.raises(ValueError, match="The team has no agent 'acter'.* Did you mean 'actor'"):
        team.merge("acter")


def test_a_team_is_trained_from_adapters(load, model_folder, team_folder, tmp_path):
    """With an agent whose adapter `SFTTrainer` has warmed up on episodes of the team."""
    team = load()
    episodes = ended(team.run(QUESTIONS, num_samples=2, seed=0))
    rewards = [float(index) for index in range(len(episodes))]
    args = SFTConfig(str(tmp_path / "sft"), max_steps=2, report_to=[], use_cpu=True, learning_rate=1e-2)
    data = team.to_dataset(episodes, agent="actor", rewards=rewards, best=1)
    options = {"processing_class": AutoTokenizer.from_pretrained(model_folder), "peft_config": lora()}
    sft = SFTTrainer(AutoModelForCausalLM.from_pretrained(model_folder), args, train_dataset=data, **options)
    sft.train()
    sft.save_model(str(tmp_path / "warm"))
    base = AutoModelForCausalLM.from_pretrained(model_folder)
    loaded = PeftModel.from_pretrained(base, f"{team_folder}/reasoner", adapter_name="reasoner")
    loaded.load_adapter(tmp_path / "warm", "solver")
    settings = {"max_steps": 1, "learning_rate": 1e-2, "max_completion_length": 12}
    agents = [team.agents[0], AgentSpec("solver"), AgentSpec("checker")]
    options = {"agents": agents, "processing_class": options["processing_class"], "peft_config": lora()}
    trainer = team_trainer(loaded, tmp_path / "run", settings=settings, **options)
    for folder, name in ((f"{team_folder}/reasoner", "reasoner"), (tmp_path / "warm", "solver")):
        saved = load_file(f"{folder}/adapter_model.safetensors")
        weights = {key.replace(f".{name}.", "."): w for key, w in trainer.policies.parameters(name).items()}
        assert weights.keys() == saved.keys() and all(torch.equal(weights[key], saved[key]) for key in saved)
    assert {name.split(".")[-2] for name in moved_by_training(trainer)} >= {"reasoner", "solver", "checker"}


@pytest.mark.slow
def test_a_loaded_team_is_pushed_and_pulled(hub, team_folder, model_folder, tmp_path):  # noqa: F811
    """Also over a team with other agents, whose adapters are gone then."""
    others = [AgentSpec("reasoner"), AgentSpec("solver")]
    team_trainer(model_folder, tmp_path / "other", agents=others).save_model()
    code = f"""
from marft_trl import Team
load = lambda name: Team.from_pretrained(name, model={model_folder!r})
ids = lambda team: [[turn.completion_ids for turn in result.turns] for result in team.run({QUESTIONS!r}, greedy=True)]
team = load({team_folder!r})
expected = ids(team)
team.push_to_hub("user/duo", private=True)
assert ids(load("user/duo")) == expected
other = load({str(tmp_path / "other")!r})
other.push_to_hub("user/duo", commit_message="Another team")
assert ids(load("user/duo")) == ids(other)
"""
    process = run_on_hub(hub, tmp_path, code)
    assert process.returncode == 0, process.stderr[-3000:]
    assert [message for _, message in hub.commits] == ["Upload team", "Another team"]
    assert {name.split("/")[0] for name in hub.files["user/duo"] if "adapter" in name} == {"reasoner", "solver"}
    assert "# duo" in hub.files["user/duo"]["README.md"].decode()
