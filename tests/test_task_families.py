"""Every family of reasoning-gym and every game of TextArena plays three episodes with a team of one and of two."""

import contextlib
import io
import random

from marft_trl import AgentSpec, Team
from marft_trl.extras.tasks import TextArena, game_seeds, reasoning_gym, reasoning_gym_reward
from marft_trl.extras.tasks.textarena import _Game

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from .helpers import team_trainer
from .tokenizers_and_templates import tokenizer_of


gym = pytest.importorskip("reasoning_gym", reason="the extra `tasks` is not installed")
arena = pytest.importorskip("textarena", reason="the extra `tasks` is not installed")
TEAMS = (["solver"], ["planner", "solver"])
# Games of TextArena 0.7.4 that raise errors of their own, or end with a text as reward
FAULTY = {"CharacterConclave-v0", "Countdown-v0", "Cryptarithm-v0", "Slitherlink-v0", "ThreeCardMonte-v0"}
# Games that look for the next player without end when all are out
ENDLESS = {"MarketEntryGame-v0", "PublicGoodsGame-v0"}
# Words of several games: some are moves, and most are not, which ends many games
MOVES = ["[0]", "[1]", "[4]", "[2 3]", "[0 1]", "[up]", "[a1 a2]", "yes", "[pass]", "[bid 1]", "hello", "[fold]"]
MOVES += ["[call]", "[c]", "[Done]", "[submit]", "[stand]", "[roll]"]
FAMILIES = sorted(set(gym.factory.DATASETS) - {"composite"})


@pytest.fixture(scope="module")
def wide_model(tmp_path_factory):
    """An untrained model with a window for long rules and tables."""
    folder, tokenizer = tmp_path_factory.mktemp("wide"), tokenizer_of("byte_level", "qwen2_5")
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=1 << 17, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def team_of(model, folder, names, workflow=None, **arguments) -> Team:
    agents = [AgentSpec(name, max_completion_length=4) for name in names]
    return team_trainer(model, folder, agents=agents, workflow=workflow, **arguments).team


@pytest.mark.slow
@pytest.mark.parametrize("names", TEAMS, ids=["one", "two"])
def test_every_family_of_reasoning_gym(wide_model, tmp_path, names):
    team = team_of(wide_model, tmp_path, names)
    fails, right = {}, []
    for family in FAMILIES:
        try:
            rows = reasoning_gym(family, size=3).to_list()
            episodes = team.run(rows)
            assert [len(episode.turns) for episode in episodes] == [len(names)] * 3
            columns = {name: [row[name] for row in rows] for name in ("family", "entry")}
            scores = reasoning_gym_reward([episode.answer.text for episode in episodes], **columns)
            assert all(0 <= score <= 1 for score in scores)
            if reasoning_gym_reward([row["answer"] for row in rows], **columns) == [1.0] * 3:
                right.append(family)
        except Exception as error:
            fails[family] = f"{type(error).__name__}: {error}"[:200]
    assert len(FAMILIES) - len(fails) >= 98 and len(right) >= 98, (fails, sorted(set(FAMILIES) - set(right)))


def games() -> dict[str, int | str]:
    """Players of each game that loads here, or why it does not."""
    players_by_game: dict[str, int | str] = {}
    with contextlib.redirect_stdout(io.StringIO()):  # of a package that looks for its data in the network
        for name in sorted(game for game in arena.envs.registration.ENV_REGISTRY if game.endswith("-v0")):
            for players in (1, 2, 3, 4, 5, 6):
                try:
                    TextArena(name, [f"player{index}" for index in range(players)])
                except ValueError as error:
                    players_by_game[name] = str(error)
                else:
                    players_by_game[name] = players
                    break
    return players_by_game


@pytest.mark.slow
def test_games_end_with_rewards():
    """Each game that loads, with random moves: nearly all end within 60 of them, with numbers."""
    with contextlib.redirect_stdout(io.StringIO()):
        players = games()
        results, fails = {}, set()
        for name, count in players.items():
            for seed in range(int(isinstance(count, int) and name not in ENDLESS)):
                try:
                    game, draw = _Game(name, count, {}, seed), random.Random(seed)
                    for _ in range(60):
                        game.observe()
                        if game.step(draw.choice(MOVES)):
                            results.setdefault(name, []).append(game.rewards())
                            break
                except Exception:
                    fails.add(name)
    assert fails == FAULTY
    finished_games = [name for name, game_rewards in results.items() if name not in fails]
    assert len(finished_games) >= 64, sorted(set(players) - set(finished_games))
    for name in finished_games:
        assert all(set(range(players[name])) <= set(rewards) for rewards in results[name]), (name, results[name])


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("names", TEAMS, ids=["one", "two"])
def test_every_game_of_textarena_that_loads(wide_model, tmp_path, names):
    players, fails = games(), {}
    for game, count in players.items():
        if isinstance(count, str) or game in ENDLESS:
            continue
        seats = [names] if count == 1 else [names[index % len(names)] for index in range(count)]
        try:
            workflow = TextArena(game, seats, max_moves=6)
            team = team_of(wide_model, tmp_path, names, workflow, reward_funcs=None, train_dataset=game_seeds(8))
            episodes = team.run(game_seeds(3).to_list())
            assert all(episode.turns for episode in episodes)
        except Exception as error:
            fails[game] = f"{type(error).__name__}: {error}"[:200]
    loaded = [game for game, count in players.items() if isinstance(count, int)]
    assert len(loaded) >= 60 and set(fails) <= FAULTY, (players, fails)
