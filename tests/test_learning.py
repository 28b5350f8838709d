"""Credit, critics and schedules inside the trainer: which turns a reward reaches, and which adapters move."""

import math
from collections import Counter

from marft_trl import AgentSpec, Sequential, Workflow
from marft_trl.algorithms.baselines import BASELINES, TurnReturns
from marft_trl.learning.adapter_updates import Schedule
from marft_trl.rollout.generator import SampledTurn
from marft_trl.tiny import tiny_dataset
from marft_trl.workflows import EnvironmentLoop

import pytest
import torch
from transformers import TrainerCallback

from .helpers import by_hand, calling, in_turn, lora, moved, only_slice, plain_logps, team_trainer, weights


NAN = math.nan
TEAM = ["planner", "solver", "judge"]
BY_RETURNS = {"advantage": "gae", "critic": "shared", "num_generations": 1, "normalize_advantages": "none"}
PPO = {**BY_RETURNS, "gae_lambda": 1.0}


def team(**changes):
    return [AgentSpec(name, system_prompt=name, **changes.get(name, {})) for name in TEAM]


class Apart(Workflow):
    async def run(self, episode):
        for name in TEAM:
            await episode.turn(name, sees=[])


def solved(completions, turns, **kwargs):
    """Team reward: 1 if the solver sampled token 7."""
    return [float(7 in episode[1].completion_ids) for episode in turns]


def own(completion_ids, turn, turns, **kwargs):
    """Turn reward: 1 if the turn has token 7. Also checks the arguments `turn` and `turns`."""
    assert all(scored_turn in episode_turns for scored_turn, episode_turns in zip(turn, turns, strict=True))
    assert [list(scored_turn.completion_ids) for scored_turn in turn] == completion_ids
    return [float(7 in ids) for ids in completion_ids]


def canned(trainer):
    """Let the solver sample token 7 in the first episode, and never in a re-run."""

    answered = []

    def generate(agents, prompt_ids, by_reference=False):
        replies = [SampledTurn([5, 2]) for _ in agents]
        if len(set(agents)) == 1 and agents[0] == "solver" and not by_reference and len(agents) == 4 and not answered:
            answered.append(True)  # every later call is a re-run
            replies[0] = SampledTurn([7, 2])
        return replies

    trainer.parts.runner.generator.generate = by_hand(generate)


def arrived(model_folder, folder, workflow=None, agents=None, **settings):
    """The trainer and, for each agent, the advantages of its turns in four episodes of which the first is solved."""
    settings = {"per_device_train_batch_size": 4, "gradient_checkpointing": False, **settings}
    arguments = {"agents": agents or team(), "workflow": workflow, "reward_funcs": solved}
    trainer = team_trainer(model_folder, folder, settings=settings, **arguments)
    canned(trainer)
    if trainer.critic is not None:
        for parameter in trainer.critic.heads.parameters():
            parameter.data.zero_()  # all values are 0
    slice_ = only_slice(trainer, [{"prompt": "x"}] * 4)
    advantages = {name: [] for name in TEAM}
    for row in sorted(slice_.rows, key=lambda row: row.episode):
        if row.is_trained:
            advantages[row.agent].append(torch.as_tensor(row.advantage).mean().item())
    return trainer, slice_, advantages


REWARDED = {name: {"reward_funcs": own} for name in TEAM}
DISCOUNTED_REWARDS = {"credit_kind": "rewards", "gamma": 0.5, "scale_rewards": "none", "num_generations": 4}
DISCOUNTED = {"credit": "step_discount", "credit_discount": 0.5}


@pytest.mark.parametrize(
    ("settings", "workflow", "expected", "level"),
    in_turn(
        [
            # advantages of the planner, the solver and the judge of the solved episode
            ({**PPO, "gamma": 0.5}, None, (0.25, 0.5, 1)),
            ({**PPO, "gamma": 0.5}, Apart, (1, 1, 1)),
            ({**PPO, **DISCOUNTED}, None, (1.75, 1.5, 1)),
            ({**BY_RETURNS, **DISCOUNTED, "credit_kind": "returns"}, None, (0.25, 0.5, 1)),
            ({**PPO, "credit": "per_step"}, None, (1, 1, 0)),
            ({**BY_RETURNS, "credit": "per_step", "credit_kind": "returns"}, None, (0, 1, 0)),
            ({**PPO, "credit": "per_step", "own_reward_weight": 0.25}, None, (1, 1, 0.75)),
            ({**BY_RETURNS, "credit": "counterfactual"}, Apart, (0, 1, 0)),
            ({**BY_RETURNS, "credit": "counterfactual"}, None, (1, 1, 0)),
            ({"advantage": "none", **DISCOUNTED}, None, (0.25, 0.5, 1)),
            ({"advantage": "none", **DISCOUNTED, "credit_kind": "rewards"}, None, (1.75, 1.5, 1)),
            ({"advantage": "none", "credit": "per_step", "credit_kind": "rewards"}, None, (1, 1, 0)),
            # the mean of the other episodes counts each once: 0 for the solved one, whose own mean is 1/3
            ({"advantage": "leave_one_out", "credit": "per_step"}, Apart, (0, 1, 0)),
            ({"advantage": "agent", "scale_rewards": "none", "credit": "per_step"}, None, (0, 0.75, 0)),
            # discounted without a critic: less the mean of the agent, and less that of all
            ({"advantage": "agent", **DISCOUNTED_REWARDS}, None, (0.25 * 0.75, 0.5 * 0.75, 0.75)),
            ({"advantage": "group", **DISCOUNTED_REWARDS}, None, (0.25 - 1.75 / 12, 0.5 - 1.75 / 12, 1 - 1.75 / 12)),
        ],
        "token",
        "action",
    ),
    ids=str,
)
def test_a_reward_arrives_at_the_turns_it_should(model_folder, tmp_path, settings, workflow, expected, level):
    agents = team(**REWARDED) if settings.get("credit") == "per_step" else team()
    run = workflow() if workflow is not None else None
    trainer, slice_, advantages = arrived(model_folder, tmp_path, run, agents, level=level, **settings)
    assert tuple(advantages[name][0] for name in TEAM) == pytest.approx(expected, abs=1e-5)
    if settings.get("credit") == "per_step":  # own rewards are reported once
        names = ("own_reward", "agents/solver/rewards/own/mean", "agents/solver/return")
        logged = [trainer.parts.state.metrics["train"][name] for name in names]
        assert logged == [[pytest.approx(1 / 12)], [0.25], [0.25]]
    trainer.model.zero_grad()
    trainer.compute_loss(trainer.model, slice_).backward()
    for name in TEAM:
        gradients = [p.grad for p in trainer.policies.parameters(name).values() if p.grad is not None]
        has_gradient = any(gradient.any() for gradient in gradients)
        assert has_gradient == any(abs(advantage) > 1e-6 for advantage in advantages[name]), name


def test_unscored_turns_have_no_advantage_and_teach_the_critic_nothing(model_folder, tmp_path):
    unscored = {"reward_funcs": lambda completion_ids, **_: [None] * len(completion_ids)}
    agents = team(**dict.fromkeys(TEAM, unscored))
    settings = {**BY_RETURNS, "credit": "per_step", "credit_kind": "returns", "normalize_advantages": "batch"}
    _, slice_, advantages = arrived(model_folder, tmp_path, agents=agents, **settings)
    assert advantages == dict.fromkeys(TEAM, [0.0] * 4)
    assert slice_.value_targets == {"_critic": 0} and "_critic" not in slice_.adapters


def test_advantages_are_standardized_over_what_the_loss_counts(model_folder, tmp_path):
    for how in ("batch", "agent"):
        settings = {**PPO, "gamma": 0.5, "normalize_advantages": how}
        _, slice_, _ = arrived(model_folder, tmp_path, agents=team(judge={"trainable": False}), **settings)
        rows = [row for row in slice_.rows if row.is_trained]
        assert len(slice_.rows) == 12 and len(rows) == 8  # the judge's turns are rows for the critic alone
        for agent in TEAM[:2] if how == "agent" else [None]:
            flat = torch.cat([row.advantage for row in rows if agent in (None, row.agent)])
            assert flat.mean().item() == pytest.approx(0, abs=1e-6)
            assert flat.std(correction=0).item() == pytest.approx(1, abs=1e-5)


def test_candidates_are_compared_with_one_another(model_folder, tmp_path):
    settings = {"advantage": "turn", "turn_candidates": 2, "num_generations": 1, "scale_rewards": "none"}
    settings |= {"per_device_train_batch_size": 4, "gradient_checkpointing": False}
    agents, calls = team(judge={"trainable": False}), []
    trainer = team_trainer(model_folder, tmp_path, agents=agents, reward_funcs=solved, settings=settings)

    def generate(agents, prompt_ids):
        calls.append((agents[0], len(agents)))
        # the second candidate of the solver is right, so the episode goes on from it
        right = agents[0] == "solver" and len(calls) > 3
        return [SampledTurn([7, 2] if right and index % 2 else [5, 2]) for index in range(len(agents))]

    trainer.parts.runner.generator.generate = by_hand(generate)
    slice_ = only_slice(trainer, [{"prompt": "x"}] * 4)
    # two planners each, completed; two solvers each, completed; one judge, who is frozen
    assert calls == [("planner", 8), ("solver", 8), ("judge", 8), ("solver", 8), ("judge", 8), ("judge", 4)]
    assert len(slice_.rows) == 16
    of_solver = [row.advantage for row in slice_.rows if row.agent == "solver"]
    assert sorted(of_solver) == [-0.5] * 4 + [0.5] * 4
    assert {row.advantage for row in slice_.rows if row.agent == "planner"} == {0.0}
    assert trainer.parts.state.metrics["train"]["reward"] == [1.0]
    assert trainer.parts.state.metrics["train"]["branches/turns"] == [4 * (1 + 2 + 2 + 1 + 2)]


class Dice(Workflow):
    """Show each roll to the player. A re-run that rolls another number shows another observation."""

    def __init__(self):
        self.rolls = ""

    async def run(self, episode):
        for _ in range(2):
            roll, self.rolls = self.rolls[:1] or "0", self.rolls[1:]
            episode.observe(roll)
            await episode.turn("player")


def dice(model_folder, tmp_path, rolls, lengths, **settings):
    """Advantages of a batch whose turns have `lengths` tokens, in order. The reward counts all tokens."""

    def tokens(completions, turns, **kwargs):
        return [float(sum(len(turn.completion_ids) for turn in episode)) for episode in turns]

    workflow = Dice()
    settings |= {"num_generations": 1, "gradient_checkpointing": False}
    arguments = {"agents": [AgentSpec("player")], "workflow": workflow, "reward_funcs": tokens}
    trainer = team_trainer(model_folder, tmp_path, settings=settings, **arguments)
    workflow.rolls, remaining_lengths = rolls, [int(length) for length in lengths]

    generate = by_hand(lambda agents, prompt_ids: [SampledTurn([5] * remaining_lengths.pop(0)) for _ in agents])
    trainer.parts.runner.generator.generate = generate
    slice_ = only_slice(trainer, [{"prompt": "x"}] * trainer.args.per_device_train_batch_size)
    assert not workflow.rolls and not remaining_lengths
    rows = sorted(slice_.rows, key=lambda row: row.number)
    return [row.advantage for row in rows], trainer.parts.state.metrics["train"]["rerun/lost"]


def test_a_rerun_that_lost_the_turn_gives_no_advantage(model_folder, tmp_path, caplog):
    """Two episodes of 2 + 3 tokens. Each turn has a re-run without it; those of the second roll other numbers."""
    settings = {"advantage": "none", "credit": "removed", "per_device_train_batch_size": 2}
    rolls = "12" + "34" + "1199" + "7344"  # what comes after the removed first turn is another one anyway: 7
    lengths = "22" + "33" + "44" + "161"
    advantages, lost = dice(model_folder, tmp_path, rolls, lengths, **settings)
    assert advantages == [5.0 - 1.0, 5.0 - 2.0, 0.0, 0.0] and lost == [0.5]
    assert caplog.text.count("2 of 4 re-runs of `credit='removed'` do not contain the turn") == 1


def test_a_candidate_that_its_episode_does_not_hold_is_compared_with_none(model_folder, tmp_path):
    """Three candidates for each turn, of 1, 2 and 3 tokens; of each three completions one rolls differently."""
    settings = {"advantage": "c3", "turn_candidates": 3, "per_device_train_batch_size": 1}
    rolls = "1" + "119" + "555" + "3" + "111" + "338"
    lengths = "123" + "7" + "444" + "123" + "7"
    advantages, lost = dice(model_folder, tmp_path, rolls, lengths, **settings)
    assert advantages == [-1.0, 1.0, 0.0] * 2 and lost == [1 / 3]


def test_a_horizon_adds_the_value_of_the_next_turn(model_folder, tmp_path):
    class Cut(Workflow):
        async def run(self, episode):
            await episode.turn("planner")
            episode.cut("solver")

    settings = {**PPO, "level": "action", "gamma": 0.5, "per_device_train_batch_size": 4}
    arguments = {"agents": team()[:2], "workflow": Cut(), "reward_funcs": lambda turns, **_: [0.0] * len(turns)}
    trainer = team_trainer(model_folder, tmp_path, settings=settings, **arguments)
    for parameter in trainer.critic.heads.parameters():
        parameter.data.zero_()
    trainer.critic.heads["_critic"].bias.data.fill_(2.0)  # every value is 2
    slice_ = only_slice(trainer, tiny_dataset(4).to_list())
    assert [row.advantage for row in slice_.rows] == pytest.approx([0.5 * 2 - 2] * 4)


def steps_of(trainer) -> list[set[str]]:
    history, latest = [], weights(trainer)

    class Watch(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            now = weights(trainer)
            names, parts = moved(latest, now), trainer.parts.updates.trained_parameters()
            history.append({part for part in parts if any(f".{part}." in name for name in names)})
            latest.update(now)

    trainer.add_callback(Watch())
    trainer.train()
    return history


def rollouts_of(trainer) -> list[int]:
    steps, run = [], trainer.parts.rollouts.run

    def noting(*args, **kwargs):
        steps.append(trainer.state.global_step)
        return run(*args, **kwargs)

    trainer.parts.rollouts.run = noting
    return steps


def test_under_an_interval_one_agent_moves_at_a_time(model_folder, tmp_path):
    settings = {"agent_iteration_interval": 2, "max_steps": 5, "lr_scheduler_type": "constant", "weight_decay": 0.1}
    history = steps_of(team_trainer(model_folder, tmp_path, settings=settings))
    assert history == [{"reasoner"}, {"reasoner"}, {"actor"}, {"actor"}, {"reasoner"}]


def test_resampled_updates_have_new_episodes_for_every_agent(model_folder, tmp_path):
    settings = {"update_order": "resampled", "num_iterations": 2, "max_steps": 6, "lr_scheduler_type": "constant"}
    trainer = team_trainer(model_folder, tmp_path, settings=settings)
    rollouts = rollouts_of(trainer)
    assert steps_of(trainer) == [{"reasoner"}] * 2 + [{"actor"}] * 2 + [{"reasoner"}] * 2
    assert rollouts == [0, 2, 4]


SEQUENTIAL = {**PPO, "update_order": "sequential", "lr_scheduler_type": "constant"}


def test_sequential_updates_multiply_by_the_ratios_of_agents_before(model_folder, tmp_path):
    settings = {**SEQUENTIAL, "num_iterations": 2, "max_steps": 8, "learning_rate": 1e-2, "sequential_clip": None}
    trainer = team_trainer(model_folder, tmp_path, settings=settings)
    rollouts, factors, after_update = rollouts_of(trainer), [], trainer.parts.sequential.after_update

    def watched(slices, adapter):
        if adapter is None:
            return after_update(slices, adapter)
        rows = [row for slice_ in slices for row in slice_.rows]
        expected = {}
        for row in (row for row in rows if row.adapter == adapter):
            change = (plain_logps(trainer, row) - row.old_per_token_logps).sum().item()
            expected[row.episode] = expected.get(row.episode, 0.0) + change
        slices = after_update(slices, adapter)
        for row in (row for slice_ in slices for row in slice_.rows):
            assert row.factor == pytest.approx(math.exp(expected[row.episode]), rel=1e-3)
            factors.append(row.factor)
        return slices

    trainer.parts.sequential.after_update = watched
    history = steps_of(trainer)
    assert rollouts == [0, 4]  # one generation batch for both agents
    agents = [step - {"_critic"} for step in history]
    assert all(agents[i] == agents[i + 1] for i in (0, 2, 4, 6))  # both iterations belong to one agent
    assert sorted(map(sorted, (agents[0], agents[2]))) == [["actor"], ["reasoner"]]
    assert ["_critic" in step for step in history] == [True, True, False, False] * 2
    assert max(abs(factor - 1) for factor in factors) > 1e-3


def test_a_factor_covers_one_joint_action(model_folder, tmp_path, clip=0.1):
    """Two rounds of an environment are two joint actions. The ratio of one round is not in the factor of the other."""

    class TwoRounds:
        def reset(self, **row):
            self.rounds = 0

        def step(self, turns):
            self.rounds += 1
            return "go on", 1.0, self.rounds == 2

    settings = {**SEQUENTIAL, "sequential_clip": clip, "learning_rate": 5e-2, "per_device_train_batch_size": 4}
    workflow = EnvironmentLoop(TwoRounds, horizon=2)
    trainer = team_trainer(model_folder, tmp_path, workflow=workflow, reward_funcs=None, settings=settings)
    after_update, factors, by_action = trainer.parts.sequential.after_update, [], {}

    def watched(slices, adapter):
        if adapter is None:
            return after_update(slices, adapter)
        rows = [row for slice_ in slices for row in slice_.rows]
        with torch.no_grad():
            present = trainer.parts.log_probs.compute_log_probs(rows)
        change = {
            (row.episode, row.joint_action): (now - row.old_per_token_logps).sum().item()
            for row, now in zip(rows, present, strict=True)
            if row.adapter == adapter
        }
        slices = after_update(slices, adapter)
        assert {row.joint_action for row in rows} == {0, 1} and len(change) == 8
        for row in (row for slice_ in slices for row in slice_.rows):
            factor = math.exp(change[row.episode, row.joint_action])
            assert row.factor == pytest.approx(min(max(factor, 1 - clip), 1 + clip), rel=1e-3)
            by_action[row.episode, row.joint_action] = (row.factor, factor)
        factors.extend(by_action.values())
        return slices

    trainer.parts.sequential.after_update = watched
    trainer.train()
    clipped, raw = (torch.tensor(column) for column in zip(*factors, strict=True))
    assert len(set(raw.tolist())) > 1
    log = next(entry for entry in trainer.state.log_history if "sequential_factor/effective_share" in entry)
    share = log["sequential_factor/effective_share"]  # before they are clipped
    assert share == pytest.approx((raw.mean() ** 2 / (raw**2).mean()).item(), rel=1e-3)
    assert log["sequential_factor/mean"] == pytest.approx(clipped.mean().item(), rel=1e-3)


def test_factors_that_leave_few_episodes_log_one_warning(model_folder, tmp_path, caplog):
    settings = {**SEQUENTIAL, "max_steps": 4, "learning_rate": 0.1, "max_grad_norm": 100.0}  # far too large
    trainer = team_trainer(model_folder, tmp_path, settings=settings)
    trainer.train()
    logs = [log for log in trainer.state.log_history if "sequential_factor/effective_share" in log]
    assert min(log["sequential_factor/effective_share"] for log in logs) < 0.5
    assert max(abs(log["sequential_factor/mean"] - 1) for log in logs) <= 0.5  # clipped
    assert caplog.text.count("have an effective sample size of") == 1


def test_an_agent_that_moved_too_far_is_left_out_of_the_update(model_folder, tmp_path):
    settings = {"num_iterations": 3, "max_steps": 3, "target_kl": 1e-4, "lr_scheduler_type": "constant"}
    agents = [AgentSpec("reasoner", system_prompt="x", learning_rate=5e-2), AgentSpec("actor", learning_rate=1e-6)]
    trainer = team_trainer(model_folder, tmp_path, agents=agents, settings={**settings, **PPO})
    history = steps_of(trainer)
    assert history[0] == {"reasoner", "actor", "_critic"}
    assert history[1] == history[2] == {"actor", "_critic"}
    logs = [log for log in trainer.state.log_history if "loss" in log]
    assert [log["agents/reasoner/stopped_updates"] for log in logs] == [0.0, 1.0, 1.0]
    assert [log["agents/actor/stopped_updates"] for log in logs] == [0.0, 0.0, 0.0]
    assert logs[1]["agents/reasoner/approx_kl"] > 1e-4 > logs[1]["agents/actor/approx_kl"] >= 0


def test_each_adapter_has_a_separate_entropy_controller(model_folder, tmp_path):
    settings = {"use_adaptive_entropy": True, "entropy_target": 0.35, "max_steps": 3, "learning_rate": 1e-9}
    trainer = team_trainer(model_folder, tmp_path, settings={**settings, "entropy_coef": 0.01})
    trainer.train()
    logs = [log for log in trainer.state.log_history if "loss" in log]
    for name in ("reasoner", "actor"):
        coefficient = 0.01
        for log in logs:
            is_low = log[f"agents/{name}/entropy"] <= 0.35
            coefficient = max(coefficient + (0.005 if is_low else -0.005), 0.0)
            assert log[f"agents/{name}/entropy_coef"] == pytest.approx(coefficient)


IN_ORDER, PISSA = {"update_order": "sequential"}, lora(init_lora_weights="pissa")
LACKING = AgentSpec("solver", reward_funcs=lambda missing, **_: [])
NEEDS = [
    ({"settings": PPO, "peft_config": None}, "`critic='shared'` needs a frozen base"),
    ({"settings": {"credit": "counterfactual"}, "peft_config": None}, "`credit='counterfactual'` needs a frozen base"),
    ({"settings": {"credit": "per_step"}}, "no function scores the turns of agent 'reasoner'"),
    ({"agents": [team(**REWARDED)[1]]}, "`reward_funcs` of agent 'solver' .* `credit='equal'` does not use"),
    ({"critic_peft_config": lora()}, "`critic_peft_config` was passed, but `critic=None`"),
    ({"settings": PPO, "critic_peft_config": PISSA}, "weights='pissa'` of agent 'critic' changes the weights"),
    ({"settings": IN_ORDER, "train_dataset": tiny_dataset(64).to_iterable_dataset()}, "streamed `train_dataset`"),
    ({"settings": IN_ORDER, "agents": [AgentSpec("solver")]}, "sequential'` trains agents in turn, but only"),
    ({"settings": {"credit": "per_step"}, "agents": [LACKING]}, r"needs \['missing'\]"),
]


def test_missing_adapters_and_reward_functions_raise(model_folder, tmp_path):
    for arguments, message in NEEDS:
        with pytest.raises(ValueError, match=message):
            team_trainer(model_folder, tmp_path, **arguments)
    with pytest.raises(TypeError, match="`reward_funcs` of agent 'solver' must be a function"):
        AgentSpec("solver", reward_funcs="a/model")


def samples_of(rows, group_size, num_agents):
    episodes, agents, nodes, returns = zip(*rows, strict=True)
    indices = (torch.tensor(column) for column in (episodes, agents, nodes))
    return TurnReturns(*indices, torch.tensor(returns), group_size, num_agents)


@pytest.mark.parametrize(
    ("advantage", "expected"),
    [
        # Two prompts; the first has episodes of one, three and one turns, the second episodes of one turn each.
        ("leave_one_out", [0.75, -0.75, -0.75, -0.75, 0.0, 0.0, 0.0, 0.0]),
        ("group", [0.5, -0.5, -0.5, -0.5, 0.0, 0.0, 0.0, 0.0]),
        # mean 0.75, and a standard deviation of the six rewards of sqrt(0.175)
        ("batch", [a / (0.175**0.5 + 1e-4) for a in (0.25, -0.75, -0.75, -0.75, -0.25, 0.25, 0.25, 0.25)]),
    ],
)
def test_every_episode_counts_once_in_a_baseline_whatever_its_turns(advantage, expected):
    returns = [1.0, 0.0, 0.0, 0.0, 0.5, 1.0, 1.0, 1.0]
    episodes = [0, 1, 1, 1, 2, 3, 4, 5]
    samples = [(episode, 0, node, worth) for node, (episode, worth) in enumerate(zip(episodes, returns, strict=True))]
    advantages = BASELINES[advantage].function(samples_of(samples, group_size=3, num_agents=1), "none")
    torch.testing.assert_close(advantages, torch.tensor(expected))


@pytest.mark.parametrize("advantage", ["group", "agent", "leave_one_out", "batch"])
def test_turns_that_nothing_scored_take_no_weight_from_their_episode(advantage):
    # Two episodes of a prompt; each has a turn of "reasoner", scored, and two of "actor", frozen and unscored
    samples = [(e, a, n, r) for e, r in ((0, 1.0), (1, 0.0)) for n, (a, r) in enumerate([(0, r), (1, NAN), (1, NAN)])]
    advantages = BASELINES[advantage].function(samples_of(samples, group_size=2, num_agents=2), "group")
    large = 1.0 if advantage == "leave_one_out" else 0.5 / (0.5**0.5 + 1e-4)
    torch.testing.assert_close(advantages, torch.tensor([large, 0, 0, -large, 0, 0]))


def test_the_turn_in_question_is_sampled_from_the_reference(model_folder, tmp_path):
    settings = {**BY_RETURNS, "credit": "counterfactual", "counterfactual_samples": 2, "max_completion_length": 6}
    trainer = team_trainer(model_folder, tmp_path, agents=team(), reward_funcs=solved, settings=settings)
    generate, requests = calling(trainer.parts.runner.generator.generate), []

    def spy(agents, prompt_ids, by_reference=False):
        requests.extend((agent, by_reference) for agent in agents)
        return generate(agents, prompt_ids, by_reference=by_reference)

    trainer.parts.runner.generator.generate = by_hand(spy)
    only_slice(trainer, [{"prompt": "x"}] * 8)
    by_reference = Counter(agent for agent, by_reference in requests if by_reference)
    assert by_reference == dict.fromkeys(TEAM, 8 * 2)
    # Besides the episodes: the judge after another planner and another solver, the solver after another planner
    others = Counter(agent for agent, by_reference in requests if not by_reference)
    assert others == {"planner": 8, "solver": 8 + 8 * 2, "judge": 8 + 8 * 4}

    def solvers(**options):
        torch.manual_seed(0)
        return generate(["solver"] * 8, [list(trainer.processing_class("How many?")["input_ids"])] * 8, **options)

    start = solvers()
    for parameter in trainer.policies.parameters("solver").values():
        parameter.data.normal_()
    assert solvers(by_reference=True) == start != solvers()


def test_rewards_of_turns_get_the_turn_that_answers(model_folder, tmp_path):
    class PlannerAnswers(Sequential):
        async def run(self, episode):
            await super().run(episode)
            episode.answer = episode.turns[0]

    scored = []

    def note(completions, turn, answer_turn, turns, **columns):
        scored.extend(zip(turn, answer_turn, turns, strict=True))
        return [0.0] * len(completions)

    agents = team(**{name: {"reward_funcs": note} for name in TEAM})
    arrived(model_folder, tmp_path, PlannerAnswers(), agents, **BY_RETURNS, credit="per_step")
    assert len(scored) == 12 and all(answer is turns[0] and turn in turns for turn, answer, turns in scored)


def test_in_sequential_updates_every_agent_learns_once_from_each_generation_batch():
    schedule, orders = Schedule(("a", "b", "c"), phase=2, order="sequential"), set()
    for first in range(0, 120, 6):
        learning = [schedule.learning(step, step) for step in range(first, first + 6)]
        order = [name for (name,) in learning[::2]]
        assert learning[::2] == learning[1::2] and sorted(order) == ["a", "b", "c"]
        updated = [schedule.just_updated(step) for step in range(first, first + 6)]
        assert updated == [None, None, order[0], None, order[1], None]
        orders.add(tuple(order))
    assert len(orders) > 1  # drawn again for each batch
