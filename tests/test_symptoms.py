"""
A team that does not learn: each test produces the fault of a row of the guide's table and checks for the symptom.
Where it is not obvious, a team without the fault does not have the symptom.
"""

import re
from pathlib import Path

from marft_trl import AgentSpec
from marft_trl.prompts import team_view
from marft_trl.reporting.evaluation import read_samples
from marft_trl.tiny import exact_answer, tiny_agents, tiny_dataset, tiny_team_model
from marft_trl.workflows import UntilApproved

import pytest
from transformers import set_seed

from .helpers import lora, team_trainer, varied_reward


PAGE = Path(__file__).parents[1] / "docs" / "guide" / "watch_and_debug.md"
SYMPTOMS = {}
REASONER, ACTOR = tiny_agents()


def symptom(name):
    """Register a test for the row of the table that begins with `name`."""

    def register(test):
        SYMPTOMS[name] = test
        return test

    return register


def trained(model, folder, reward=exact_answer, steps=10, agents=None, workflow=None, rows=500, **settings):
    """A trained team of the quickstart's model, with all of its logs."""
    defaults = {"max_steps": steps, "per_device_train_batch_size": 32, "num_generations": 8, "learning_rate": 1.5e-3}
    defaults |= {"num_generations_eval": 1, "per_device_eval_batch_size": 64, "lr_scheduler_type": "constant"}
    team = {"agents": agents or tiny_agents(), "workflow": workflow, "reward_funcs": reward, "peft_config": lora(16)}
    data = {"train_dataset": tiny_dataset(rows), "eval_dataset": tiny_dataset(64, seed=1)}
    trainer = team_trainer(model, folder, **team, **data, settings=defaults | settings)
    trainer.train()
    return trainer


@pytest.fixture(scope="module")
def taught_model():
    """The quickstart's model, which learns in a few steps."""
    return tiny_team_model()


def logged(trainer, name):
    return [log[name] for log in trainer.state.log_history if name in log]


def test_every_row_of_the_table_is_produced():
    section = PAGE.read_text(encoding="utf-8").partition("## A team that does not learn")[2].partition("\n\n###")[0]
    rows = re.findall(r"^\| ([^|]+?) \|", section, re.MULTILINE)[1:]  # without the head
    assert rows == [*SYMPTOMS]


def never(completions, **kwargs):
    return [0.0] * len(completions)


@pytest.mark.slow
@symptom("the reward stays 0")
def test_no_episode_is_ever_right(model_folder, tmp_path, caplog):
    trainer = trained(model_folder, tmp_path, never, per_device_train_batch_size=8)
    assert {*logged(trainer, "reward")} == {0.0} and caplog.text.count("THE REWARDS GIVE NO SIGNAL") == 1


def of_the_question(prompts, **kwargs):
    """A reward that differs between questions, and not between the episodes of one."""
    return [float(len(str(prompt)) % 3) for prompt in prompts]


@pytest.mark.slow
@symptom("all episodes of a prompt get the same reward")
def test_nothing_to_compare(model_folder, tmp_path, caplog):
    trainer = trained(model_folder, tmp_path, of_the_question, per_device_train_batch_size=8)
    assert len({*logged(trainer, "reward")}) > 1 and {*logged(trainer, "frac_reward_zero_std")} == {1.0}
    assert caplog.text.count("THE REWARDS GIVE NO SIGNAL") == 1


@pytest.mark.slow
@symptom("turns end in the middle of a word")
def test_turns_are_cut(model_folder, tmp_path):
    short = AgentSpec("reasoner", system_prompt=REASONER.system_prompt, max_completion_length=2)
    for agent, share in ((short, 0.9), (REASONER, 0.0)):
        trainer = trained(model_folder, tmp_path / str(share), steps=2, agents=[agent, ACTOR])
        assert (min(logged(trainer, "agents/reasoner/completions/clipped_ratio")) > 0.8) == bool(share)


@symptom("agents forget earlier turns")
def test_prompts_are_cut(model_folder, tmp_path):
    agents = [REASONER, ACTOR, AgentSpec("last", max_completion_length=6)]
    settings = {"context_overflow": "drop_oldest_turn", "max_steps": 1}
    trainer = team_trainer(model_folder, tmp_path, agents=agents, settings=settings)
    longest = max(len(trainer.processing_class(row["prompt"]).input_ids) for row in trainer.train_dataset)
    trainer.parts.runner.prompts.window_size = longest + 40
    trainer.train()
    assert logged(trainer, "context/dropped_turns")[0] > 0


def deaf(agent, prompt, seen):
    return team_view(agent, prompt, [])


@symptom("the solver ignores the planner")
@pytest.mark.parametrize("view", [pytest.param(deaf, marks=pytest.mark.slow), None])
def test_a_message_that_nobody_reads(model_folder, tmp_path, view):
    actor = AgentSpec("actor", system_prompt=ACTOR.system_prompt, max_completion_length=6, view=view)
    trainer = trained(model_folder, tmp_path, steps=1, agents=[REASONER, actor], eval_k=[1])
    set_seed(0)
    trainer.evaluate(metric_key_prefix="normal")
    set_seed(0)
    with trainer.parts.evaluations.silence_agents("reasoner"):
        trainer.evaluate(metric_key_prefix="emptied")
    samples = read_samples(tmp_path / "evaluations.jsonl")
    answers = {name: [sample["vote"] for sample in samples if sample["set"] == name] for name in ("normal", "emptied")}
    assert len(answers["emptied"]) == 64
    assert (answers["normal"] == answers["emptied"]) == (view is deaf)


@symptom("the reward falls, at once or after it has risen")
@pytest.mark.slow
def test_a_rate_that_is_too_high(taught_model, tmp_path):
    rewards, clipped = {}, {}
    for rate in (1.5e-3, 3e-2):
        trainer = trained(taught_model, tmp_path / str(rate), steps=16, learning_rate=rate, num_iterations=2)
        rewards[rate], clipped[rate] = logged(trainer, "reward"), logged(trainer, "clip_ratio/region_mean")
    assert max(rewards[3e-2][-4:]) < 0.2 < rewards[3e-2][0] and min(rewards[1.5e-3]) > 0.2
    assert clipped[3e-2][1] > 2 * clipped[1.5e-3][1]


@symptom("the policy does not move")
@pytest.mark.slow
def test_a_rate_that_is_too_low(model_folder, tmp_path):
    far = {}
    for rate in (1.5e-3, 1e-8):
        trainer = trained(model_folder, tmp_path / str(rate), varied_reward, 8, learning_rate=rate, beta=1e-4)
        assert min(logged(trainer, "grad_norm")) > 0.01
        far[rate] = logged(trainer, "kl")[-1]
    assert abs(far[1e-8]) < 1e-5 and far[1.5e-3] > 100 * abs(far[1e-8])


def sevens(completions, **kwargs):
    """A reward that can be earned without solving the task."""
    return [min(str(completion).count("7"), 5) / 5 for completion in completions]


@symptom("the reward rises while the texts get worse")
@pytest.mark.slow
def test_a_reward_that_is_hacked(taught_model, tmp_path):
    settings = {"reward_weights": [1.0, 0.0], "learning_rate": 5e-3}
    trainer = trained(taught_model, tmp_path, [sevens, exact_answer], steps=15, **settings)
    rewards, right = logged(trainer, "reward"), logged(trainer, "rewards/exact_answer/mean")
    assert rewards[-1] > rewards[0] + 0.5 and right[-1] < right[0] - 0.2


@symptom("a reviewer approves everything")
@pytest.mark.parametrize(("says", "drafts"), [("APPROVED", 1.0), ("No.", 3.0)])
def test_a_reviewer_that_always_says_yes(model_folder, tmp_path, says, drafts):
    trainer = trained(
        model_folder, tmp_path, steps=1, agents=[REASONER, AgentSpec("reviewer", reply=lambda messages: says)],
        workflow=UntilApproved("reasoner", "reviewer", rounds=2), per_device_train_batch_size=8,
    )  # fmt: skip
    assert {*logged(trainer, "agents/reasoner/turns")} == {drafts}
    assert max(logged(trainer, "reward")) < 1.0


@symptom("evaluation is far below training")
@pytest.mark.slow
def test_learned_by_heart(taught_model, tmp_path):
    trainer = trained(taught_model, tmp_path, steps=25, rows=4, learning_rate=5e-3)
    best = max(logged(trainer, "reward"))
    assert best > 0.8 and trainer.evaluate()["eval_reward"] < best - 0.3
