"""Parts of the trainer, built and tried without one, and without a model."""

import copy
import math
from types import SimpleNamespace

from marft_trl import AgentSpec, Episode, MARFTConfig, Turn
from marft_trl.algorithms.baselines import RunningBaselines
from marft_trl.algorithms.levels import ActionLevel, TokenLevel
from marft_trl.algorithms.rows import Row, Slice
from marft_trl.config.team_setup import RunContext, TeamSetup
from marft_trl.learning.adapter_updates import AdapterUpdates, SequentialFactors
from marft_trl.learning.advantages import BaselineEstimator
from marft_trl.learning.credit import CreditAssigner, OwnReward, own_reward_metrics
from marft_trl.reporting.reporter import Reporter
from marft_trl.rollout.failures import Failures
from marft_trl.rollout.generator import Generator
from marft_trl.rollout.reward_scorer import OwnReturns, RewardReach, TurnRewards
from marft_trl.rollout.rollouts import Rollout, Rollouts
from marft_trl.system.processes import Processes
from marft_trl.system.randomness import UserRandomness
from marft_trl.system.run_metrics import Metrics
from marft_trl.trainer.experience import advantages_by_turn

import pytest
import torch
from accelerate import Accelerator
from torch import nn


AGENTS = [AgentSpec("planner"), AgentSpec("solver", trainable=False)]


class Board(dict):
    """A dictionary of metrics as TRL has it, and whether the run is training."""

    def __init__(self):
        super().__init__(train={}, eval={})
        self.is_training = True
        for mode in self:
            self[mode] = _Lists()

    def metrics(self):
        return Metrics(self, lambda: self.is_training)


class _Lists(dict):
    def __missing__(self, key):
        self[key] = []
        return self[key]


def one_process():
    """One process. An `Accelerator` would forget its state when the next config is made."""
    cpu = torch.device("cpu")
    return Processes(SimpleNamespace(num_processes=1, process_index=0, is_main_process=True, device=cpu))


@pytest.fixture
def processes():
    return one_process()


def config(tmp_path, **settings):
    return MARFTConfig(str(tmp_path), per_device_train_batch_size=4, num_generations=2, use_cpu=True, **settings)


def episode(index, earned=(0.0, 0.0), truncated=False):
    turns = (
        Turn("planner", "a plan", 0, prompt_ids=(5,), completion_ids=(6, 7)),
        Turn("solver", "seven", 1, sees=(0,), prompt_ids=(5, 6), completion_ids=(8,), truncated=truncated),
    )
    return Episode("q", {"prompt": "q"}, index, turns, turns[1], history=turns, asked=((), turns[:1]), earned=earned)


def rollout(rewards, **fields):
    episodes = [episode(index, **fields) for index in range(len(rewards))]
    return Rollout(episodes, torch.tensor(rewards).unsqueeze(1), torch.tensor(rewards))


def rows_of(its):
    return [
        [
            Row(turn.agent, turn.agent, torch.tensor(turn.prompt_ids), torch.tensor(turn.completion_ids), episode=e)
            for turn in one.turns
        ]
        for e, one in enumerate(its.episodes)
    ]


REWARDS = SimpleNamespace(
    names=["right", "environment_reward"], weights=torch.tensor([1.0, 2.0]), functions=[None, None]
)
TRAINED = SimpleNamespace(is_trained=lambda agent: agent == "planner")


def run_of(args, processes, board, settings=None, state=None):
    return RunContext(args, settings, state, board.metrics(), processes)


def team_of(agents=AGENTS, policies=TRAINED, level=None):
    return TeamSetup(agents, None, policies, None, level, {}, {}, None)


def credit_of(args, processes, board, scorer=None, earns=False):
    own = OwnReturns(args.returns, REWARDS, processes)
    return CreditAssigner(run_of(args, processes, board), scorer, REWARDS, own, earns)


@pytest.mark.parametrize(
    ("settings", "rule", "expected"),
    [
        ({}, "equal", [3.0, 3.0]),
        ({"credit": "step_discount", "credit_discount": 0.5}, "step_discount", [1.5, 3.0]),
        # As rewards, what was earned stays with its turn: 3 = 1 (rest) + 2 * 1 (earned by the first)
        ({"credit_kind": "rewards"}, "equal", [2.0, 1.0]),
    ],
)
def test_credit_without_a_trainer(tmp_path, processes, settings, rule, expected):
    credit = credit_of(config(tmp_path, **settings), processes, Board(), earns=True)
    (its,) = credit.assign(rollout([3.0], earned=(1.0, 0.0)), rule)
    assert its.tolist() == expected


def own_rewards(values):
    return TurnRewards(torch.tensor(values), [{"f": value} if value == value else {} for value in values])


def test_own_rewards_are_reported_by_agent_and_function():
    scored = [
        OwnReward("a", (0, "a"), 1.5, {"f": 1.0, "g": 0.5}),
        OwnReward("a", (0, "a"), 2.0, {"f": 2.0, "g": math.nan}),
        OwnReward("a", (1, "a"), 3.0, {"f": 3.0, "g": math.nan}),
        OwnReward("b", (0, "b"), math.nan, {"f": math.nan}),
        OwnReward("c", (1, "c"), -1.0, {"f": -1.0}),
    ]
    found = own_reward_metrics(scored, returns=True)
    assert found["own_reward"] == (1.5 + 2 + 3 - 1) / 4
    assert found["agents/a/rewards/f/mean"] == 2.0 and found["agents/a/rewards/f/std"] == 1.0
    assert found["agents/a/rewards/g/mean"] == 0.5 and math.isnan(found["agents/a/rewards/g/std"])
    assert found["agents/a/return"] == (3.5 + 3.0) / 2 and found["agents/c/return"] == -1.0
    assert not any("/b/" in name for name in found)
    assert not any(name.endswith("/return") for name in own_reward_metrics(scored, returns=False))
    assert own_reward_metrics([], returns=True) == {}


def test_own_rewards_are_mixed_in_and_reported_once(tmp_path, processes):
    board = Board()
    args = config(tmp_path, credit="per_step", own_reward_weight=0.25)
    scorer = SimpleNamespace(of_turns=lambda episodes, turns: own_rewards([4.0, math.nan] * (len(turns) // 2)))
    credit = credit_of(args, processes, board, scorer)
    (its,) = credit.assign(rollout([2.0]), "per_step")
    assert its[0] == 0.25 * 4 + 0.75 * 2 and its[1].isnan()
    (own,) = credit.take_own_rewards()
    assert own == [{"f": 4.0}, {}] and credit.take_own_rewards() == []
    (agent,) = {turn.agent for turn in rollout([2.0]).episodes[0].turns[:1]}
    told = {"own_reward": [4.0], f"agents/{agent}/rewards/f/mean": [4.0], f"agents/{agent}/return": [4.0]}
    assert told.items() <= board["train"].items()


def estimator(args, processes, board):
    credit = credit_of(args, processes, board)
    settings = SimpleNamespace(
        scale_rewards=args.scale_rewards,
        multi_objective_aggregation="sum_then_normalize",
        group_size=lambda training: 2 if training else 1,
    )
    running = RunningBaselines(args.rae_decay)
    return BaselineEstimator(team_of(), run_of(args, processes, board, settings), credit, REWARDS, running)


def test_one_advantage_for_all_turns_of_an_episode(tmp_path, processes):
    board, args = Board(), config(tmp_path, scale_rewards="none")
    its, baseline = rollout([1.0, 0.0, 0.5, 0.5]), estimator(args, processes, board)
    assert [[turn.agent for turn in turns] for turns in baseline.turns(its, True)] == [["planner"]] * 4
    rows, std, credited, _ = baseline.estimate(its, rows_of(its), training=True)
    assert [[row.advantage for row in mine] for mine in rows] == [[0.5] * 2, [-0.5] * 2, [0.0] * 2, [0.0] * 2]
    assert std[0] > 0 and std[2] == 0 and credited == {"planner", "solver"}
    assert all(row.advantage == 0.0 for mine in rows_of(its) for row in mine)  # the rows that went in stay


def test_candidates_are_compared_in_training_alone(tmp_path, processes):
    args = config(tmp_path, advantage="turn", turn_candidates=2)
    baseline = estimator(args, processes, Board())
    assert baseline.baseline(True).name == "turn" and baseline.baseline(False).name == "group"
    assert baseline.gives_one_advantage_to_all(False) and not baseline.gives_one_advantage_to_all(True)


def test_factors_of_joint_actions_by_hand(processes):
    """Two joint actions; the planner's turn in the first became exp(0.5) times as likely, in the second exp(-1)."""
    board, old = Board(), torch.tensor([-1.0, -1.0])
    rows = [
        Row(
            agent, agent, torch.tensor([5]), torch.tensor([6, 7]), old_per_token_logps=old, episode=e, number=2 * e + i
        )
        for e in range(2)
        for i, agent in enumerate(("planner", "solver"))
    ]
    moved = {0: old + 0.25, 2: old - 0.5}
    scores = SimpleNamespace(
        scoring=lambda: torch.no_grad(), of_policy=lambda rows: [moved[row.number] for row in rows]
    )
    for level, divisor in ((TokenLevel(), 1), (ActionLevel("token"), 2)):
        run = run_of(SimpleNamespace(sequential_clip=None), processes, board)
        factors = SequentialFactors(team_of(level=level), run, scores)
        (slice_,) = factors.after_update([Slice(rows)], "planner")
        first, second = math.exp(0.5 / divisor), math.exp(-1.0 / divisor)
        assert [row.factor for row in slice_.rows] == pytest.approx([first, first, second, second])
        (again,) = factors.after_update([slice_], "planner")
        assert again.rows[0].log_factor == pytest.approx(1.0 / divisor)
    assert [row.factor for row in rows] == [1.0] * 4 and factors.after_update([Slice(rows)], None)[0].rows is rows
    run = run_of(SimpleNamespace(sequential_clip=0.1), processes, board)
    clipped = SequentialFactors(team_of(level=TokenLevel()), run, scores)
    assert clipped.after_update([Slice(rows)], "planner")[0].rows[2].factor == pytest.approx(0.9)
    assert board["train"]["sequential_factor/mean"][0] == pytest.approx((math.exp(0.5) + math.exp(-1)) / 2)


class TwoLayers:
    """Policies of two agents, each with a layer of its own."""

    trained = ["one", "two"]

    def __init__(self):
        self.layers = {name: nn.Linear(2, 2) for name in self.trained}

    def parameters(self, adapter):
        return dict(self.layers[adapter].named_parameters())

    def adapter_of(self, agent):
        return agent

    def agents_of(self, adapter):
        return [adapter] if adapter in self.trained else []


def test_updates_of_plain_layers(tmp_path):
    args = config(tmp_path, target_kl=0.1, num_iterations=2)
    accelerator, board, policies = Accelerator(cpu=True), Board(), TwoLayers()
    state = SimpleNamespace(entropy_coef=0.0, optimizer_step=0)
    agents = [AgentSpec("one", learning_rate=0.5), AgentSpec("two")]
    team, run = team_of(agents, policies), run_of(args, Processes(accelerator), board, state=state)
    updates = AdapterUpdates(team, run, accelerator)
    optimizer = torch.optim.SGD([p for layer in policies.layers.values() for p in layer.parameters()], lr=0.1)
    updates.split_groups(optimizer, is_ours=True)
    assert [(group["adapter"], group["lr"]) for group in optimizer.param_groups] == [("one", 0.5), ("two", 0.1)]
    with updates.micro_step(nn.Identity()):
        for layer in policies.layers.values():
            layer(torch.ones(2)).sum().backward()
    updates.divergence.add("one", torch.tensor([2.0]), torch.tensor([1.0]))
    updates.divergence.add("two", torch.tensor([0.01]), torch.tensor([1.0]))
    updates.finish(is_update=True)
    assert policies.layers["one"].weight.grad is None and policies.layers["two"].weight.grad is not None
    assert board["train"]["agents/one/stopped_updates"] == [1.0]
    assert updates.clip(0.5).item() > 0.5 and board["train"]["agents/two/grad_norm"][0] > 0.5
    assert torch.stack([p.grad.norm() for p in policies.layers["two"].parameters()]).norm().item() <= 0.5 + 1e-4
    policies.layers["two"].weight.grad.fill_(math.inf)
    updates.clip(0.5)
    assert updates.state_dict()["skipped_in_a_row"] == {"two": 1}
    again = AdapterUpdates(team, run, accelerator)
    again.load_state_dict(copy.deepcopy(updates.state_dict()))
    assert again.state_dict() == updates.state_dict()


def rollouts(args, processes, board, per_func, counts=None):
    one = episode(0)
    if counts:
        one = Episode("q", one.row, 0, one.turns, one.answer, earned=one.earned, counts=counts)
    runner = SimpleNamespace(dropped_turns=3, uses_tools=False, generator=Generator())
    runner.run = lambda rows, *_, **__: [one] * len(rows)
    scorer = SimpleNamespace(
        of_batch=lambda episodes: torch.tensor([per_func] * len(episodes)), of_team=lambda scores: scores.sum(dim=1)
    )
    workflow = SimpleNamespace(earns=False)
    reach = RewardReach(["planner"])
    own, run = OwnReturns(args.returns, REWARDS, processes), run_of(args, processes, board)
    return Rollouts(run, runner, workflow, scorer, REWARDS, own, reach, Failures())


def test_rollouts_report_counts_and_stop_at_unscored_batches(tmp_path, processes):
    board, rows = Board(), [{"prompt": "q"}] * 2
    args = config(tmp_path, max_unscored_batches=2)
    counted = rollouts(args, processes, board, [1.0, 0.5], counts={"rounds": 3})
    its = counted.run(rows, training=True)
    assert its.rewards.tolist() == [1.5, 1.5] and its.local_rewards == [1.5, 1.5]
    assert board["train"]["workflow/rounds"] == [3.0] and board["train"]["context/dropped_turns"] == [0.0]
    silent = rollouts(args, processes, board, [math.nan, math.nan])
    silent.run(rows, training=True)
    silent.run(rows, training=False)  # an evaluation says nothing of training
    state = silent.state_dict()
    resumed = rollouts(args, processes, board, [math.nan, math.nan])
    resumed.load_state_dict(state)
    with pytest.raises(ValueError, match=r"returned None for all 2 episodes of 2 generation batches"):
        resumed.run(rows, training=True)


def test_a_report_without_a_model(tmp_path, processes, caplog):
    board, tables = Board(), []
    state = SimpleNamespace(
        num_tokens_seen=0,
        optimizer_step=4,
        count_tokens=lambda count: setattr(state, "num_tokens_seen", state.num_tokens_seen + count),
        take_user_metrics=lambda: {"style": [1.0, 2.0]},
        take_user_columns=lambda: {"hint": ["a", "b"]},
        fill_table=lambda *columns, **more: tables.append((columns, more)),
    )
    tokenizer = SimpleNamespace(batch_decode=lambda ids: [str(one) for one in ids], decode=str)
    rewards = SimpleNamespace(names=["right"], weights=torch.ones(1))
    settings = SimpleNamespace(log_completions=True, num_completions_to_print=None, group_size=lambda training: 2)
    run = run_of(config(tmp_path, credit="removed"), processes, board, settings, state)
    reporter = Reporter(team_of(), run, rewards, tokenizer, UserRandomness(0, torch.device("cpu")))
    advantages, others = [[0.5, None], [[0.1, 0.3], None]], {"turns": 2, "tokens": 10, "reruns": 2, "lost": 0}
    # As if another process had lost some re-runs
    processes.gather = lambda its: [*its, {"reruns": 6, "lost": 2}] if its == [others] else its
    reporter.rollout(rollout([1.0, 0.0]), torch.tensor([0.5, 0.5]), advantages, [], others)
    train = board["train"]
    assert train["rerun/lost"] == [0.25]
    assert caplog.text.count("2 of 8 re-runs of `credit='removed'` do not contain the turn") == 1
    assert train["reward"] == [0.5] and train["style"] == [1.5] and train["branches/tokens"] == [10.0]
    assert train["agents/planner/completions/mean_length"] == [2.0] and train["agents/solver/turns"] == [1.0]
    assert state.num_tokens_seen == 2 * (1 + 2 + 2 + 1) + 10 and train["num_tokens"] == [state.num_tokens_seen]
    reporter.before_log()
    (_, completions, means), more = tables[-1]
    assert completions == ["a plan", "seven"] * 2 and means == [0.5, None, pytest.approx(0.2), None]
    assert more["extra"]["hint"] == ["a", "a", "b", "b"] and more["rewards"]["right"] == [1.0, 1.0, 0.0, 0.0]
    assert (tmp_path / "completions" / "transcripts_00004.html").exists()


def test_equal_turns_have_advantages_of_their_own():
    one = rollout([1.0])
    turn = one.episodes[0].turns[0]
    twice = Episode("q", {"prompt": "q"}, 0, (turn, copy.copy(turn)), turn)
    rows = [
        Row("planner", "planner", torch.tensor(turn.prompt_ids), torch.tensor(turn.completion_ids), advantage=value)
        for value in (1.0, -1.0)
    ]
    its = Rollout([twice], one.rewards_per_func, one.rewards)
    assert advantages_by_turn(its, [rows]) == [[1.0, -1.0]] and advantages_by_turn(its, [rows[1:]]) == [[-1.0, None]]
