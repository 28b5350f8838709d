"""Parts of the trainer, tested without a trainer and without a model."""

import copy
import math
from collections import defaultdict
from types import SimpleNamespace

from marft_trl import AgentSpec, Episode, MARFTConfig, Turn
from marft_trl.algorithms.rows import ActionLevel, Row, Slice, TokenLevel
from marft_trl.config.team_setup import RunContext, TeamSetup
from marft_trl.learning.adapter_updates import SequentialFactors
from marft_trl.learning.advantages import BaselineEstimator, OwnReward, own_reward_metrics
from marft_trl.reporting.reporter import Reporter
from marft_trl.rollout.rollouts import Rollout
from marft_trl.system.processes import Processes
from marft_trl.system.randomness import UserRandomness
from marft_trl.system.run_metrics import Metrics
from marft_trl.trainer.batch_maker import advantages_by_turn

import pytest
import torch


AGENTS = [AgentSpec("planner"), AgentSpec("solver", trainable=False)]


class Board(dict):
    """A dictionary of metrics as TRL has it, and whether the run is training."""

    def __init__(self):
        super().__init__(train=defaultdict(list), eval=defaultdict(list))

    def metrics(self):
        return Metrics(self, SimpleNamespace(model=torch.nn.Identity()))


def one_process():
    """One process. An `Accelerator` would forget its state when the next config is made."""
    cpu = torch.device("cpu")
    return Processes(SimpleNamespace(num_processes=1, process_index=0, is_main_process=True, device=cpu))


@pytest.fixture
def processes():
    return one_process()


def config(tmp_path, **settings):
    return MARFTConfig(str(tmp_path), per_device_train_batch_size=4, num_generations=2, use_cpu=True, **settings)


def episode(index):
    plan = Turn("planner", "a plan", 0, prompt_ids=(5,), completion_ids=(6, 7))
    turns = (plan, Turn("solver", "seven", 1, sees=(0,), prompt_ids=(5, 6), completion_ids=(8,)))
    fields = {"history": turns, "asked": ((), turns[:1]), "earned": (0.0, 0.0)}
    return Episode("q", {"prompt": "q"}, index, turns, turns[1], **fields)


def rollout(rewards):
    episodes = [episode(index) for index in range(len(rewards))]
    return Rollout(episodes, torch.tensor(rewards).unsqueeze(1), torch.tensor(rewards))


TRAINED = SimpleNamespace(is_trained=lambda agent: agent == "planner")


def run_of(args, processes, board, settings=None, state=None):
    return RunContext(args, settings, state, board.metrics(), processes)


def team_of(level=None):
    return TeamSetup(AGENTS, None, TRAINED, None, level, {}, {}, None)


def test_own_rewards_are_reported_by_agent_and_function():
    own_rewards = [
        OwnReward("a", (0, "a"), 1.5, {"f": 1.0, "g": 0.5}),
        OwnReward("a", (0, "a"), 2.0, {"f": 2.0, "g": math.nan}),
        OwnReward("a", (1, "a"), 3.0, {"f": 3.0, "g": math.nan}),
        OwnReward("b", (0, "b"), math.nan, {"f": math.nan}),
        OwnReward("c", (1, "c"), -1.0, {"f": -1.0}),
    ]
    metrics = own_reward_metrics(own_rewards, returns=True)
    assert metrics["own_reward"] == (1.5 + 2 + 3 - 1) / 4
    assert metrics["agents/a/rewards/f/mean"] == 2.0 and metrics["agents/a/rewards/f/std"] == 1.0
    assert metrics["agents/a/rewards/g/mean"] == 0.5 and math.isnan(metrics["agents/a/rewards/g/std"])
    assert metrics["agents/a/return"] == (3.5 + 3.0) / 2 and metrics["agents/c/return"] == -1.0
    assert not any("/b/" in name for name in metrics)
    assert not any(name.endswith("/return") for name in own_reward_metrics(own_rewards, returns=False))
    assert own_reward_metrics([], returns=True) == {}


def test_factors_of_joint_actions_by_hand(processes):
    """Two joint actions; the planner's turn in the first became exp(0.5) times as likely, in the second exp(-1)."""
    board, old = Board(), torch.tensor([-1.0, -1.0])
    ids = {"prompt_ids": torch.tensor([5]), "completion_ids": torch.tensor([6, 7]), "old_per_token_logps": old}
    names = ["planner", "solver"] * 2
    rows = [Row(name, name, **ids, episode=number // 2, number=number) for number, name in enumerate(names)]
    moved = {0: old + 0.25, 2: old - 0.5}
    scores = SimpleNamespace(scoring=torch.no_grad, compute_log_probs=lambda rows: [moved[row.number] for row in rows])
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
    tokenizer = SimpleNamespace(batch_decode=lambda ids: [str(token_ids) for token_ids in ids], decode=str)
    rewards = SimpleNamespace(names=["right"], weights=torch.ones(1))
    settings = SimpleNamespace(log_completions=True, num_completions_to_print=None, group_size=lambda training: 2)
    run = run_of(config(tmp_path, credit="removed"), processes, board, settings, state)
    reporter = Reporter(team_of(), run, rewards, lambda agent: tokenizer, UserRandomness(0, torch.device("cpu")))
    advantages, rerun_counts = [[0.5, None], [[0.1, 0.3], None]], {"turns": 2, "tokens": 10, "reruns": 2, "lost": 0}
    # As if another process had lost some re-runs
    processes.gather = lambda gathered: (
        [*gathered, {"reruns": 6, "lost": 2}] if gathered == [rerun_counts] else gathered
    )
    reporter.rollout(rollout([1.0, 0.0]), torch.tensor([0.5, 0.5]), advantages, [], rerun_counts)
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
    single = rollout([1.0])
    turn = single.episodes[0].turns[0]
    twice = Episode("q", {"prompt": "q"}, 0, (turn, copy.copy(turn)), turn)
    ids = torch.tensor(turn.prompt_ids), torch.tensor(turn.completion_ids)
    rows = [Row("planner", "planner", *ids, advantage=advantage) for advantage in (1.0, -1.0)]
    doubled = Rollout([twice], single.rewards_per_func, single.rewards)
    assert advantages_by_turn(doubled, [rows]) == [[1.0, -1.0]] and advantages_by_turn(doubled, [rows[1:]]) == [
        [-1.0, None]
    ]


def test_each_candidate_baseline_has_a_counterpart_in_evaluation(tmp_path, processes):
    for name, like in (("turn", "group"), ("turn_itself", "group"), ("c3", "leave_one_out")):
        run = run_of(config(tmp_path, advantage=name, turn_candidates=2), processes, Board())
        estimator = BaselineEstimator(team_of(), run, None, None)
        assert estimator.baseline(True).name == name and estimator.baseline(False).name == like
        assert estimator.gives_one_advantage_to_all(False) == (like == "group")
        assert not estimator.gives_one_advantage_to_all(True)
