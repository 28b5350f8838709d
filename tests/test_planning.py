"""The plan of a run, printed before the run; and the anonymous ablation."""

import re
import shlex

from marft_trl import AgentSpec, MARFTConfig, Sequential, TeamManifest, Workflow
from marft_trl.extras.engines import vllm_command
from marft_trl.learning.memory import ActivationCost, MemoryPlan, cache_size, count_bytes, head_size, optimizer_size
from marft_trl.rollout.transformers_generator import TransformersGenerator
from marft_trl.seams.generation import TrlEngine
from marft_trl.tiny import tiny_agents, tiny_dataset
from marft_trl.workflows import Debate, Graph, Orchestrated
from marft_trl.workflows.base import alias_names, anonymity, anonymize

import pytest
import torch
from datasets import Dataset, IterableDataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM

from .helpers import collect, moved, team_trainer, varied_reward, weights


# ---- The plan ----


def longest_row(trainer):
    """The row that a plan rehearses."""
    return max(trainer.train_dataset, key=lambda row: len(str(row["prompt"])))


def test_a_plan_names_agents_links_batches_and_observations(model_folder, tmp_path):
    agents = [
        AgentSpec("planner", system_prompt="Plan it.", max_completion_length=8),
        AgentSpec("solver", system_prompt="Solve it.", max_completion_length=4, learning_rate=1e-4),
        AgentSpec("judge", system_prompt="Judge it.", trainable=False, temperature=0.5),
    ]
    settings = {"gradient_accumulation_steps": 2, "steps_per_generation": 4, "num_iterations": 2}
    workflow = Graph({"planner": [], "solver": ["planner"], "judge": ["solver"]})
    trainer = team_trainer(model_folder, tmp_path, agents=agents, workflow=workflow, settings=settings)
    before, state = weights(trainer), torch.get_rng_state()
    plan = trainer.plan()
    assert trainer.parts.runner.keys.state_dict() == {"runs": 0}  # a rehearsal does not change the seeds of a run
    assert state.equal(torch.get_rng_state()) and not moved(before, weights(trainer))
    assert "planner -> solver\n  solver -> judge" in plan and "Workflow: Graph" in plan
    solver = r"solver: adapter solver, [\d,]+ weights, fresh; learning rate 0.0001; temperature 1; up to 4 tokens"
    assert re.search(solver, plan)
    assert re.search(r"judge: .* frozen; temperature 0.5", plan)
    # 8 episodes x 4 slices at once; a step takes 2 slices of 8; the judge's turns are no training rows
    assert "32 episodes are generated at once: 8 prompts x 4 episodes, on 1 process" in plan
    assert "3 turns per episode in the rehearsal: planner 1, solver 1, judge 1" in plan
    assert "16 episodes in an optimizer step: 32 training rows" in plan
    assert "each episode is used 2 times; 2 steps" in plan
    # A batch of 4 slices, each used twice, lasts for 4 steps of 2 slices; 8 + 4 tokens and the maximum for the judge
    longest = 8 + 4 + trainer.args.max_completion_length
    assert f"1 generation batch per 4 optimizer steps, with up to {longest} decoding steps in sequence\n" in plan
    row = max(trainer.train_dataset["prompt"], key=len)
    assert f"the rehearsal takes row {list(trainer.train_dataset['prompt']).index(row)} of `train_dataset`" in plan
    observation_tokens = dict(re.findall(r"Observation of (\w+): (\d+) tokens", plan))
    assert observation_tokens.keys() == {"planner", "solver", "judge"} and f"user: {row}" in plan
    assert "(what solver says)" in plan.partition("Observation of judge")[2]
    assert "(what planner says)" not in plan.partition("Observation of judge")[2]
    rehearsal = trainer.parts.planner.rehearse({"prompt": row, "solution": ""})
    rows = [len(rehearsal.shown[name].ids) for name in ("planner", "solver")]
    made_up = len(trainer.processing_class("(what planner says)")["input_ids"])
    assert f"up to {16 * (rows[0] + 8 + rows[1] + max(8 - made_up, 0) + 4):,} tokens if all" in plan
    assert "TOO LONG" not in plan


@pytest.mark.slow
def test_a_plan_has_the_number_of_steps_and_warns_of_single_prompts(small_model, tmp_path):
    settings = {"max_steps": -1, "num_train_epochs": 1.5, "num_iterations": 2, "gradient_accumulation_steps": 3}
    settings |= {"steps_per_generation": 2, "max_completion_length": 2, "logging_steps": 100}
    trainer = team_trainer(small_model, tmp_path, settings=settings, train_dataset=tiny_dataset(18))
    plan = trainer.plan()
    trainer.train()  # 4 batches of 4 prompts, each in 4 slices, 3 slices a step: 6 steps an epoch
    assert trainer.state.global_step == 9 and "1.5 epochs, which are 9 steps" in plan and "ONE PROMPT" not in plan
    settings = {"max_steps": -1, "num_train_epochs": 1, "update_order": "sequential", "max_completion_length": 2}
    trainer = team_trainer(small_model, tmp_path / "other", settings=settings, train_dataset=tiny_dataset(8))
    plan = trainer.plan()
    trainer.train()  # 4 batches, on which each of two agents takes a step
    assert trainer.state.global_step == 8 and "1 epoch, which is 8 steps" in plan
    alone = {"per_device_train_batch_size": 4}
    assert "ONE PROMPT per step: increase" in team_trainer(small_model, tmp_path, settings=alone).plan()


def test_agents_not_reached_in_the_rehearsal_are_shown_alone(model_folder, tmp_path):
    trainer = team_trainer(model_folder, tmp_path, workflow=Orchestrated("reasoner"))
    plan = trainer.plan()
    assert "Observation of actor" in plan
    assert "(not reached in the rehearsal)" in plan.partition("Observation of actor")[2]


def test_a_plan_reckons_with_turns_as_long_as_they_may_be(model_folder, tmp_path):
    trainer = team_trainer(model_folder, tmp_path, settings={"max_completion_length": 100}, agents=TEAM)
    (_, alone, _), (_, second, _), (_, third, _) = trainer.parts.planner.rehearse(longest_row(trainer)).prompts
    assert second > alone + 90 and third > second + 90
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    model.config.max_position_embeddings = third + 50
    trainer = team_trainer(model, tmp_path, settings={"max_completion_length": 100}, agents=TEAM)
    assert f"an observation and a turn of judge may have {third + 100:,} tokens" in trainer.plan()


def test_workflows_that_read_the_row_have_links_too(model_folder, tmp_path):
    class ReadsTheRow(Workflow):
        async def run(self, episode):
            first = await episode.turn("reasoner" if episode.row["solution"] else "actor")
            await episode.turn("actor", sees=[first])

    trainer = team_trainer(model_folder, tmp_path, workflow=ReadsTheRow())
    assert trainer.workflow.links(["reasoner", "actor"]) == []
    assert "reasoner -> actor" in trainer.plan()
    assert "n0 --> n1" in str(trainer.parts.files.card([], "team"))


def test_a_workflow_that_waits_for_words_is_planned_too(model_folder, tmp_path):
    class Endless(Workflow):
        async def run(self, episode):
            while "OK" not in (await episode.turn("reasoner", sees=[])).text:
                pass

    assert "64 turns per episode" in team_trainer(model_folder, tmp_path, workflow=Endless()).plan()


def test_memory_is_counted_where_it_can_be(model_folder, tmp_path):
    trainer = team_trainer(model_folder, tmp_path, settings={"advantage": "gae", "critic": "shared"})
    memory = trainer.memory_plan()
    base = sum(p.numel() for name, p in trainer.model.named_parameters() if "lora" not in name)
    adapters = sum(p.numel() for name in ("reasoner", "actor") for p in trainer.policies.parameters(name).values())
    critic = sum(p.numel() for p in trainer.critic.parameters("_critic").values())
    buffers = sum(b.numel() * b.element_size() for b in trainer.model.buffers())
    assert memory.base == 4 * base + buffers
    assert (memory.adapters, memory.critic) == (4 * adapters, 4 * critic)
    assert memory.gradients == 4 * (adapters + critic) and memory.optimizer == 8 * (adapters + critic)
    assert "base" in str(memory) and "at once" in str(memory)


@pytest.mark.parametrize("beta", [0.0, 0.01])
def test_a_plan_counts_the_reference_of_a_base_that_is_trained_itself(model_folder, tmp_path, beta):
    trainer = team_trainer(model_folder, tmp_path, settings={"beta": beta}, peft_config=None)
    models = [trainer.model] if trainer.ref_model is None else [trainer.model, trainer.ref_model]
    held = [tensor for model in models for tensor in (*model.parameters(), *model.buffers())]
    assert len(models) == 1 + (beta > 0)
    assert trainer.memory_plan().base == sum(tensor.numel() * tensor.element_size() for tensor in held)
    adapted = team_trainer(model_folder, tmp_path, settings={"beta": beta}).memory_plan()
    assert adapted.base == sum(p.numel() * 4 for p in models[0].parameters()) + sum(
        buffer.numel() * buffer.element_size() for buffer in models[0].buffers()
    )


def count_rows(monkeypatch, generator):
    sizes, generate = [], generator.generate

    def counted(self, rows, *args, **options):
        sizes.append(len(rows))
        return generate(self, rows, *args, **options)

    monkeypatch.setattr(generator, "generate", counted)
    return sizes


CANDIDATES = {
    "group": ({}, 1),
    "turn": ({"advantage": "turn", "turn_candidates": 3, "num_generations": 1}, 3),
    "itself": ({"advantage": "turn_itself", "turn_candidates": 3, "num_generations": 1, "candidate_samples": 1}, 3),
    "c3": ({"advantage": "c3", "turn_candidates": 3, "candidate_samples": 2, "num_generations": 1}, 6),
    "removed": ({"credit": "removed"}, 1),
}  # fmt: skip


@pytest.mark.parametrize("name", CANDIDATES)
def test_a_plan_counts_candidates_and_re_runs(model_folder, tmp_path, monkeypatch, name):
    """Compared with the largest number of turns that are generated at once, and with the rows of training."""
    settings, times = CANDIDATES[name]
    trainer, rows = team_trainer(model_folder, tmp_path, settings={**settings, "max_steps": 1}), []
    sizes = count_rows(monkeypatch, TransformersGenerator)
    fit = trainer.parts.batcher.fit
    monkeypatch.setattr(
        trainer.parts.batcher, "fit", lambda batch_rows: (rows.append(len(batch_rows)), fit(batch_rows))[1]
    )
    episodes = trainer.args.per_device_train_batch_size * trainer.args.steps_per_generation
    planned = re.search(r"optimizer step: ([\d,]+) training rows", trainer.plan())[1]
    new = {agent.name: agent.max_completion_length or trainer.args.max_completion_length for agent in trainer.agents}
    prompts = trainer.parts.planner.rehearse(longest_row(trainer)).prompts
    alone = cache_size(
        trainer.model.config, episodes, max(length + new[agent_name] for agent_name, length, _ in prompts), 4
    )
    cache = trainer.memory_plan().cache
    trainer.train()
    assert cache == times * alone and max(sizes) == times * episodes
    assert rows == [int(planned)]


@pytest.mark.parametrize(("is_shared", "episodes", "times"), [(True, 4, 3), (False, 4, 3), (False, 32, 1)])
def test_a_plan_counts_turns_at_the_same_time(model_folder, tmp_path, monkeypatch, is_shared, episodes, times):
    """Three debaters take turns at once: in one pass if they share an adapter or if there are few rows."""
    names = ["one", "two", "three"]
    agents = [AgentSpec(name, adapter="one" if is_shared else None) for name in names]
    settings = {"per_device_train_batch_size": episodes, "steps_per_generation": 1, "max_steps": 1}
    workflow = Debate(names, rounds=1)
    trainer = team_trainer(model_folder, tmp_path, agents=agents, workflow=workflow, settings=settings)
    sizes = count_rows(monkeypatch, TrlEngine)
    prompts = trainer.parts.planner.rehearse(longest_row(trainer)).prompts
    longest = max(length for _, length, _ in prompts) + trainer.args.max_completion_length
    assert trainer.memory_plan().cache == cache_size(trainer.model.config, times * episodes, longest, 4)
    trainer.train()
    assert max(sizes) == times * episodes


def test_sizes_by_hand():
    class Config:
        hidden_size, num_hidden_layers, num_attention_heads, num_key_value_heads, head_dim = 8, 2, 4, 2, 2
        intermediate_size, vocab_size = 16, 100

    tensor = torch.zeros(3, 5)
    assert count_bytes([tensor, tensor]) == 60
    assert optimizer_size([tensor], "adamw_torch") == 120 and optimizer_size([tensor], "paged_adamw_8bit") == 30
    assert optimizer_size([tensor], "sgd") == 0
    # keys and values x 2 layers x 3 rows x 10 tokens x 2 heads x 2 numbers x 4 bytes
    assert cache_size(Config, 3, 10, 4) == 2 * 2 * 3 * 10 * 2 * 2 * 4
    cost = ActivationCost(per_token=100.0, per_repeat=10.0, per_checkpointed=7.0)
    assert cost.size(5, 3, False) == 530 and cost.size(5, 3, True) == 65
    # memory of the head: positions x columns x 4 bytes x 6 copies without Triton, 2 with it
    assert head_size(100, 50, torch.device("cpu")) == 50 * 100 * 4 * 6
    assert head_size(2**15, 10**6, torch.device("cpu")) == 2**7 * 2**15 * 4 * 6
    assert head_size(2**17, 10**6, torch.device("cuda")) == 2**12 * 2**15 * 4 * 2
    assert MemoryPlan(1, 2, 3, 4, 5, 6, 20, 4).total == 1 + 2 + 3 + 5 + 24


# ---- Anonymous ----


TEAM = [
    AgentSpec("planner", system_prompt="You plan.", description="plans"),
    AgentSpec("solver", system_prompt="You solve."),
    AgentSpec("judge"),
]


def test_anonymous_agents_have_generic_prompts_and_keep_the_rest():
    numbered = anonymize(TEAM, "numbered")
    assert [agent.name for agent in numbered] == ["planner", "solver", "judge"]
    assert numbered[1].system_prompt == "You are agent 2 of 3 that solve the task together."
    assert [agent.system_prompt for agent in anonymize(TEAM, "none")] == [None] * 3
    assert anonymize(TEAM, "none", {"judge": "Decide."})[2].system_prompt == "Decide."
    assert [anonymity(setting) for setting in (False, True, "numbered", "none")] == [
        None,
        "numbered",
        "numbered",
        "none",
    ]
    with pytest.raises(ValueError, match=r"must be False, True, 'numbered' or 'none'; got 'number'. Did you mean"):
        anonymity("number")


@pytest.mark.parametrize(("kind", "first"), [(True, "agent 1 of 2"), ("none", None)])
def test_nothing_that_an_anonymous_team_is_shown_names_a_role(model_folder, tmp_path, kind, first):
    arguments = {"anonymous": kind, "workflow": Sequential(rounds=2), "settings": {"max_steps": 1}}
    trainer = team_trainer(model_folder, tmp_path, **arguments)
    observations = trainer.parts.planner.rehearse({"prompt": "How many?"}).shown
    texts = {name: trainer.processing_class.decode(observation.ids) for name, observation in observations.items()}
    for text in texts.values():
        assert not any(word in text for word in ("reasoner", "actor", "Write the"))
    assert "[agent_1]" in texts["actor"] and ("system" in texts["reasoner"]) == (first is not None)
    assert first is None or first in texts["reasoner"]
    trainer.train()
    assert any("agents/reasoner/reward" in log for log in trainer.state.log_history)
    trainer.save_model()
    assert TeamManifest.load(tmp_path).anonymous == trainer.anonymous == ("numbered" if kind is True else kind)
    with pytest.raises(ValueError, match="was written with `anonymous='n.*'`, but the trainer has `anonymous=False`"):
        team_trainer(model_folder, tmp_path / "named").parts.checkpoints.load_weights(tmp_path)


def test_an_anonymous_orchestrator_calls_numbers(model_folder, tmp_path):
    team = {"agents": [AgentSpec("boss"), *tiny_agents()], "workflow": Orchestrated("boss"), "anonymous": "none"}
    trainer = team_trainer(model_folder, tmp_path, **team)
    prompt = trainer.agents[0].system_prompt
    assert "- agent_2\n- agent_3" in prompt and "reasoner" not in prompt
    assert [agent.system_prompt for agent in trainer.agents[1:]] == [None, None]

    def answer(requests):
        replies = ["<call>agent_3</call>", "seven", "<call>actor</call>"]
        return [request.make_turn(replies[len(request.episode.turns)]) for request in requests]

    names, aliases = [agent.name for agent in trainer.agents], alias_names(trainer.agents)
    (episode,) = collect(trainer.workflow, [{"prompt": "q"}], names, answer, aliases=aliases)
    assert [turn.agent for turn in episode.turns] == ["boss", "actor", "boss"]
    assert episode.counts == {"routing/unknown_agent": 1}  # the real name is not an alias


def test_a_plan_counts_prefill_activations_and_gradient_buckets(model_folder, tmp_path, monkeypatch):
    trainer = team_trainer(model_folder, tmp_path)
    alone = trainer.memory_plan()
    monkeypatch.setattr("marft_trl.reporting.plan.PREFILL_TOKENS", 10)
    monkeypatch.setattr(type(trainer.parts.processes), "count", 2)
    both = trainer.memory_plan()
    per_token = trainer.parts.batcher.measure(64).per_token / trainer.model.config.num_hidden_layers
    assert both.prefill == pytest.approx(10 * per_token, rel=0.5) and alone.prefill > 5 * both.prefill
    assert both.gradients == 2 * alone.gradients


def test_a_plan_does_not_change_the_mode_of_modules(model_folder, tmp_path):
    trainer = team_trainer(model_folder, tmp_path)
    before = [module.training for module in trainer.model.modules()]
    assert True in before and False in before  # a loaded base is in eval mode, the PEFT wrapper in train mode
    trainer.plan()
    assert [module.training for module in trainer.model.modules()] == before


def test_a_plan_of_a_stream_names_the_unknowns(model_folder, tmp_path):
    class OneTurn(Workflow):
        async def run(self, episode):
            await episode.turn("actor")

    read = []

    def rows():
        read.append(1)
        yield {"prompt": "What is 1+1?"}

    arguments = {"train_dataset": IterableDataset.from_generator(rows), "reward_funcs": varied_reward}
    trainer = team_trainer(model_folder, tmp_path, workflow=OneTurn(), **arguments)
    plan = trainer.plan()
    assert "takes the first row of the stream, and others may be longer, with" in plan
    assert "Other turns may be taken where texts decide." in plan
    assert trainer.plan() == plan and read == [1]
    assert "Other turns" not in team_trainer(model_folder, tmp_path).plan()


def test_a_plan_is_of_the_data_set_that_the_trainer_has_now(small_model, tmp_path):
    trainer = team_trainer(small_model, tmp_path)
    trainer.plan()
    trainer.train_dataset = Dataset.from_dict({"prompt": ["x"] * 8 + ["longer"], "solution": ["1"] * 9})
    assert "the rehearsal takes row 8 of `train_dataset`" in trainer.plan()


@pytest.mark.parametrize(("share", "slices"), [(True, 2), (False, 1)])
def test_a_plan_counts_the_rows_of_joined_slices(model_folder, tmp_path, share, slices):
    settings = {"gradient_accumulation_steps": 2, "steps_per_generation": 2, "share_prefixes": share}
    trainer = team_trainer(model_folder, tmp_path, settings=settings)
    rows = trainer.args.per_device_train_batch_size * slices
    assert f"micro-batches of at most {rows} rows" in trainer.plan()


def test_the_command_sets_the_limits_that_a_team_needs():
    agents = [AgentSpec("a", peft_config=LoraConfig(r=16)), AgentSpec("b"), AgentSpec("c", adapter="b")]
    more = {"port": 9000, "extra": ["--tensor-parallel-size", "2"]}
    command = vllm_command("org/base model", agents, MARFTConfig(use_vllm=True), **more)
    assert command.startswith("VLLM_ALLOW_RUNTIME_LORA_UPDATING=True python -m vllm.entrypoints.openai.api_server ")
    flags = shlex.split(command)
    for flag, value in {
        **{"--model": "org/base model", "--port": "9000", "--max-loras": "3", "--max-cpu-loras": "6"},
        **{"--max-lora-rank": "16", "--logprobs-mode": "processed_logprobs", "--tensor-parallel-size": "2"},
    }.items():
        assert flags[flags.index(flag) + 1] == value
    assert "--enable-lora" in flags and "--enforce-eager" not in flags
    stale = shlex.split(vllm_command("m", agents, MARFTConfig(use_vllm=True, max_staleness=2)))
    assert stale[stale.index("--max-loras") + 1] == "7"  # two adapters in three versions each, and the base
    assert re.search("--enforce-eager", vllm_command("m", agents, device="cpu"))
    others = shlex.split(vllm_command("m", [*agents, AgentSpec("d", reply=lambda messages: "")]))
    assert others[others.index("--max-loras") + 1] == "3"  # two adapters and the base
