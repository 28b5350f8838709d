"""A team on one base: only trained agents change, each by the gradient of its own rows."""

from dataclasses import replace

from marft_trl import AgentSpec, Workflow
from marft_trl.learning.adapter_updates import Schedule
from marft_trl.tiny import tiny_agents, tiny_dataset

import pytest
import torch
from bitsandbytes.functional import has_avx512bf16
from bitsandbytes.nn import Linear4bit
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, TrainerCallback

from .helpers import (
    config,
    logged_steps,
    lora,
    moved,
    moved_by_training,
    only_slice,
    shake,
    team_trainer,
    varied_reward,
    weights,
)


def of(adapter: str, names) -> set[str]:
    return {name for name in names if f".{adapter}." in name}


def test_without_peft_config_all_agents_train_one_policy(model_folder, tmp_path):
    trainer = team_trainer(model_folder, tmp_path, peft_config=None, settings={"beta": 0.1, "max_steps": 2})
    assert moved_by_training(trainer) == set(weights(trainer))
    first = logged_steps(trainer)[0]
    assert first["agents/reasoner/kl"] == first["agents/actor/kl"] == 0.0
    trainer.save_model()
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert not moved(weights(trainer), dict(again.named_parameters()))


EIGHT = [row for row in tiny_dataset(2).to_list() for _ in range(4)]


def gradients_of(trainer, slice_) -> dict:
    trainer.model.zero_grad()
    trainer.compute_loss(trainer.model, slice_).backward()
    return {n: p.grad.clone() for n, p in trainer.model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    ("loss_type", "gradient_checkpointing"),
    [
        ("dapo", True),
        ("grpo", False),
        pytest.param("bnpo", True, marks=pytest.mark.exhaustive),
        pytest.param("dr_grpo", False, marks=pytest.mark.exhaustive),
    ],
)
def test_an_agents_gradient_comes_from_that_agents_rows(model_folder, tmp_path, loss_type, gradient_checkpointing):
    settings = {"loss_type": loss_type, "gradient_checkpointing": gradient_checkpointing, "beta": 0.05}
    team = team_trainer(model_folder, tmp_path, settings={**settings, "max_tokens_per_micro_batch": 150})
    shake(team.model, 0.02)
    slice_ = only_slice(team, EIGHT)
    assert len(list(team.parts.batcher.cut(slice_.rows))) > 2  # uneven micro-batches are part of the test
    team_gradients = gradients_of(team, slice_)
    for index, agent in enumerate(tiny_agents()):
        alone = team_trainer(
            model_folder, tmp_path, agents=[agent], settings={**settings, "max_tokens_per_micro_batch": None}
        )
        own_weights = of(agent.name, dict(team.model.named_parameters()))
        with torch.no_grad():
            for name, parameter in alone.model.named_parameters():
                if name in own_weights:
                    parameter.copy_(team.model.get_parameter(name))
        alone.model.train()
        alone.current_gradient_accumulation_steps = 1
        own_slice = replace(slice_, rows=[row for row in slice_.rows if row.agent == agent.name])
        expected = gradients_of(alone, own_slice)
        assert set(expected) == own_weights and len(own_slice.rows) == 8, index
        for name, gradient in expected.items():
            torch.testing.assert_close(team_gradients[name], gradient, rtol=1e-5, atol=1e-7, msg=name)


def test_gradient_of_a_shared_adapter_comes_from_the_rows_of_all_agents(model_folder, tmp_path):
    agents = [AgentSpec("one", system_prompt="x", adapter="both"), AgentSpec("two", system_prompt="y", adapter="both")]
    shared = team_trainer(model_folder, tmp_path, agents=agents)
    slice_ = only_slice(shared, EIGHT)
    gradients = gradients_of(shared, slice_)
    assert {row.agent for row in slice_.rows} == {"one", "two"} and len(slice_.rows) == 16
    single = team_trainer(model_folder, tmp_path, agents=[AgentSpec("both")], settings={"max_steps": 1})
    single.model.load_state_dict(shared.model.state_dict())
    single.model.train()
    single.current_gradient_accumulation_steps = 1
    single.args.per_device_train_batch_size = 16
    single.schedule = Schedule.from_args(single.args, single.schedule.adapters)
    slice_ = replace(slice_, rows=[replace(row, agent="both") for row in slice_.rows])
    expected = gradients_of(single, slice_)
    assert set(expected) == set(gradients)
    for name, gradient in expected.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-5, atol=1e-7, msg=name)


def test_an_agent_without_a_row_is_not_stepped(model_folder, tmp_path):
    class Once(Workflow):
        async def run(self, episode):
            await episode.turn("reasoner")
            if len(rounds) == 0:
                await episode.turn("actor")

    rounds = []

    def reward(completions, **kwargs):
        rounds.append(1)
        return varied_reward(completions)

    trainer = team_trainer(
        model_folder, tmp_path, workflow=Once(), reward_funcs=reward, settings={"max_steps": 3, "weight_decay": 0.1}
    )
    after = []

    class Snapshots(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            after.append(weights(trainer))

    trainer.add_callback(Snapshots())
    trainer.train()
    assert not of("actor", moved(after[0], after[2]))  # spoke in the first step only: Adam's momentum must not move it
    assert of("reasoner", moved(after[0], after[1]))
    steps = {
        group["adapter"]: {int(trainer.optimizer.state[p]["step"]) for p in group["params"]}
        for group in trainer.optimizer.param_groups
    }
    assert steps == {"actor": {1}, "reasoner": {3}}


def test_learning_rates_are_per_adapter_and_groups_are_named(model_folder, tmp_path):
    agents = [AgentSpec("solver", learning_rate=3e-4), AgentSpec("editor", system_prompt="x")]
    trainer = team_trainer(model_folder, tmp_path, agents=agents)
    trainer.create_optimizer()
    rates = {group["adapter"]: group["lr"] for group in trainer.optimizer.param_groups}
    assert rates == {"editor": 1e-3, "solver": 3e-4}
    assert [group["adapter"] for group in trainer.optimizer.param_groups] == ["editor", "solver"]


def set_gradients(trainer, **values):
    for adapter, value in values.items():
        for parameter in trainer.policies.parameters(adapter).values():
            parameter.grad = torch.full_like(parameter, value)


def test_gradients_are_clipped_per_adapter(model_folder, tmp_path):
    trainer = team_trainer(model_folder, tmp_path, settings={"max_grad_norm": 0.5})

    def norm(adapter):
        return torch.stack([p.grad.norm() for p in trainer.policies.parameters(adapter).values()]).norm().item()

    set_gradients(trainer, reasoner=100.0, actor=1e-5)
    small = norm("actor")
    trainer.parts.updates.clip(trainer.args.max_grad_norm)
    assert norm("reasoner") == pytest.approx(0.5, rel=1e-4)
    assert norm("actor") == pytest.approx(small, rel=1e-4) and 0 < small < 0.5


def test_a_gradient_that_is_not_finite_skips_that_agent_only(model_folder, tmp_path, caplog):
    trainer = team_trainer(model_folder, tmp_path)
    set_gradients(trainer, reasoner=1.0, actor=float("nan"))
    norm = trainer.parts.updates.clip(trainer.args.max_grad_norm)
    assert norm.isfinite()
    assert all(p.grad is None for p in trainer.policies.parameters("actor").values())
    assert all(p.grad is not None for p in trainer.policies.parameters("reasoner").values())
    assert trainer.parts.state.metrics["train"]["agents/actor/skipped_updates"] == [1.0]
    with pytest.raises(FloatingPointError, match="actor"):
        for _ in range(10):
            set_gradients(trainer, actor=float("inf"))
            trainer.parts.updates.clip(trainer.args.max_grad_norm)


def test_kl_is_zero_at_step_zero_for_each_agent(model_folder, tmp_path, tokenizer):
    base = AutoModelForCausalLM.from_pretrained(model_folder)
    model = get_peft_model(base, lora(), adapter_name="reasoner")
    model.add_adapter("actor", lora())
    torch.manual_seed(0)
    shake(model, 0.1, "lora_B.reasoner")  # an agent that starts trained: its reference is not the base
    trainer = team_trainer(model, tmp_path, peft_config=None, processing_class=tokenizer, settings={"beta": 0.1})
    trainer.train()
    logs = logged_steps(trainer)
    assert logs[0]["agents/reasoner/kl"] == logs[0]["agents/actor/kl"] == 0.0
    assert logs[-1]["agents/reasoner/kl"] > 0 and logs[-1]["agents/actor/kl"] > 0


def four_bit(folder):
    settings = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.float32}
    quantization = BitsAndBytesConfig(load_in_4bit=True, **settings)
    return AutoModelForCausalLM.from_pretrained(folder, quantization_config=quantization)


def test_a_4_bit_base_trains_two_agents_and_scores_as_it_was_loaded_on_every_cpu(model_folder, tmp_path, tokenizer):
    """On CPUs with AVX512-BF16, bitsandbytes repacks layers in `eval()`. On others, only the flag can be checked."""
    ids = torch.tensor([[5, 6, 7, 8, 9]])
    loaded = four_bit(model_folder).train()  # where nothing is repacked
    with torch.no_grad():
        expected = loaded(ids).logits
    base = four_bit(model_folder)
    layers = [module for module in base.modules() if isinstance(module, Linear4bit)]
    assert layers
    for layer in layers:
        layer.support_avx512bf16_for_cpu = has_avx512bf16()
    packed = [layer.weight.data.clone() for layer in layers]
    settings = {"max_steps": 1, "beta": 0.1}
    trainer = team_trainer(base, tmp_path, processing_class=tokenizer, settings=settings)
    assert not any(layer.support_avx512bf16_for_cpu for layer in layers)
    adapters = [p for agent in ("reasoner", "actor") for p in trainer.policies.parameters(agent).values()]
    assert {p.dtype for p in adapters} == {torch.float32}  # TRL rounds them to bfloat16, where small updates are lost
    assert not all(torch.equal(p, p.bfloat16().float()) for p in adapters)
    changed = moved_by_training(trainer)
    assert of("reasoner", changed) and of("actor", changed) and all("lora_" in name for name in changed)
    model = trainer.accelerator.unwrap_model(trainer.model)
    for mode in (model.eval, model.train):
        mode()
        with torch.no_grad(), trainer.policies.base():
            assert torch.equal(model(input_ids=ids).logits, expected)
    assert all(torch.equal(layer.weight.data, data) for layer, data in zip(layers, packed, strict=True))
    assert {layer.weight.quant_state.dtype for layer in layers} == {torch.float32}


PPO = {"advantage": "gae", "critic": "shared", "num_generations": 1}


@pytest.mark.parametrize(
    ("frozen", "settings"),
    [
        (("first",), {**PPO, "gradient_checkpointing": False}),
        (("first", "second"), {"beta": 0.1, "gradient_checkpointing": False}),
        (("third",), {}),
        *(
            pytest.param(frozen, settings, marks=pytest.mark.exhaustive)
            for frozen in (("first",), ("second",), ("third",), ("first", "second"), ("second", "third"))
            for settings in ({}, PPO)
        ),
    ],
    ids=str,
)
def test_every_trained_agent_moves_and_nothing_else(model_folder, tmp_path, frozen, settings):
    names = ("first", "second", "third")
    agents = [AgentSpec(name, system_prompt=name, trainable=name not in frozen) for name in names]
    trainer = team_trainer(model_folder, tmp_path, agents=agents, settings={"max_steps": 1, **settings})
    assert trainer.memory_plan().activations > 0
    changed = moved_by_training(trainer)
    lora_b = {name for name in weights(trainer) if "lora_B" in name}
    assert not {name for name in changed if "lora_" not in name}
    for name in names:
        # lora_A has no gradient while lora_B is 0: after one step B has moved
        assert of(name, changed) >= of(name, lora_b) if name not in frozen else not of(name, changed), name


def test_agents_score_and_sample_at_their_own_temperature(model_folder, tmp_path):
    agents = [AgentSpec("cold", temperature=0.25, system_prompt="x"), AgentSpec("warm", system_prompt="x")]
    trainer = team_trainer(model_folder, tmp_path, agents=agents)
    trainer.model.eval()
    ids = torch.tensor([[7, 8, 9, 10, 11, 12]])
    logits = trainer.model(input_ids=ids).logits[:, 2:-1]
    for agent, temperature in (("cold", 0.25), ("warm", 1.0)):
        trainer.parts.log_probs.activate(agent)
        logps, _, _ = trainer.parts.log_probs.for_trl(trainer.model, ids, torch.ones_like(ids), 3)
        expected_logps = torch.log_softmax(logits / temperature, -1).gather(-1, ids[:, 3:, None]).squeeze(-1)
        torch.testing.assert_close(logps, expected_logps, rtol=1e-4, atol=1e-5)
    assert trainer.parts.runner.generator.settings("cold")["temperature"] == 0.25


def test_an_adapter_with_another_rank_and_other_targets(model_folder, tmp_path):
    agents = [
        AgentSpec("solver", peft_config=LoraConfig(r=2, target_modules=["q_proj"])),
        AgentSpec("solver_2", system_prompt="x"),
    ]
    trainer = team_trainer(model_folder, tmp_path, agents=agents, settings={"max_steps": 1})
    for name, rank in (("solver", 2), ("solver_2", 4)):
        assert {p.shape[0] for n, p in trainer.policies.parameters(name).items() if "lora_A" in n} == {rank}
    changed = moved_by_training(trainer)
    assert of("solver", changed) and of("solver_2", changed)


def test_agent_baseline_and_every_reward_form(model_folder, tmp_path):
    class Scorer:
        def __call__(self, completions, turns, **kwargs):
            assert all([turn.agent for turn in episode] == ["reasoner", "actor"] for episode in turns)
            assert all(c == e[-1].text for c, e in zip(completions, turns, strict=True))
            return [None if i % 3 == 0 else len(c) / 10 for i, c in enumerate(completions)]

    async def later(prompts, completions, log_metric, log_extra, trainer_state, **kwargs):
        log_metric("seen", float(len(prompts)))
        log_extra("shout", [c.upper() for c in completions])
        return varied_reward(completions)

    args = config(tmp_path, advantage="agent", reward_weights=[1.0, 0.5], log_completions=True, max_steps=2)
    trainer = team_trainer(model_folder, tmp_path, reward_funcs=[Scorer(), later], args=args)
    assert moved_by_training(trainer)
    entry = logged_steps(trainer)[0]
    assert entry["seen"] == 8.0 and "rewards/Scorer/mean" in entry and "rewards/later/std" in entry


@pytest.mark.parametrize("advantage", ["group", "agent"])
def test_rows_carry_the_advantage_of_the_chosen_baseline(model_folder, tmp_path, advantage):
    class EveryOther(Workflow):
        async def run(self, episode):
            await episode.turn("reasoner")
            if episode.index % 2:
                await episode.turn("actor")

    def rising(completions, **kwargs):
        return [float(index) for index in range(len(completions))]

    settings = {"advantage": advantage, "scale_rewards": "none", "per_device_train_batch_size": 4}
    trainer = team_trainer(model_folder, tmp_path, workflow=EveryOther(), reward_funcs=rising, settings=settings)
    slice_ = only_slice(trainer, EIGHT[:4])  # one group, rewards 0 1 2 3; the actor spoke in the episodes of 1 and 3
    gains = {name: sorted(row.advantage for row in slice_.rows if row.agent == name) for name in ("reasoner", "actor")}
    actor = [-1.0, 1.0] if advantage == "agent" else [-0.5, 1.5]
    assert gains == {"reasoner": [-1.5, -0.5, 0.5, 1.5], "actor": actor}
