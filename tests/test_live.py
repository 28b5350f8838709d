"""Concurrent questions: answers do not depend on other requests, and turns end when nobody waits for them."""

import asyncio
import contextlib
import inspect
import json
import shutil
import threading

from marft_trl import AgentSpec, Sequential, Team, Workflow
from marft_trl.rollout import transformers_generator
from marft_trl.rollout.generator import LiveRows, LiveTurn
from marft_trl.rollout.turn_reader import StopStringCriterion, StopStrings
from marft_trl.shared_prefix.decoding import decode
from marft_trl.team import Answer, TextDelta, TurnEnded, TurnStarted, saved_team
from marft_trl.team.events import GrowingText
from marft_trl.tiny import questions, tiny_agents

import pytest
import torch

from .helpers import moved, team_trainer, weights
from .namesakes import LENGTHS, NAMES, said_by, save_namesakes


QUESTIONS = [row["prompt"] for row in questions(6, seed=1)]


class Both(Workflow):
    async def run(self, episode):
        first, _ = await asyncio.gather(episode.turn("reasoner", sees=[]), episode.turn("actor", sees=[]))
        await episode.turn("clerk")
        episode.answer = first


@pytest.fixture(scope="session")
def namesakes(built_once, model_folder):
    return built_once("namesakes", lambda folder: save_namesakes(model_folder, folder))


@pytest.fixture(scope="session")
def team_folder(built_once, model_folder):
    def build(folder):
        trainer = team_trainer(model_folder, folder, settings={"max_steps": 2, "learning_rate": 2e-2})
        trainer.train()
        trainer.save_model()

    return built_once("live-team", build)


@pytest.fixture(scope="module")
def team(team_folder, model_folder):
    return Team.from_pretrained(team_folder, model=model_folder)


def texts(episodes):
    return [[turn.text for turn in episode.turns] for episode in episodes]


async def together(team, **settings):
    episode_lists = await asyncio.gather(*[team.arun([question], **settings) for question in QUESTIONS])
    return [episode for episodes in episode_lists for episode in episodes]


def test_greedy_answers_are_the_same_alone_in_a_list_and_at_the_same_time(team):
    assert inspect.iscoroutinefunction(Team.arun)  # which frameworks look at
    alone = [team(question, greedy=True) for question in QUESTIONS]
    listed = team.run(QUESTIONS, greedy=True)
    assert [episode.answer.text for episode in listed] == alone
    assert texts(asyncio.run(together(team, greedy=True))) == texts(listed)
    assert texts(asyncio.run(team.arun(QUESTIONS, greedy=True))) == texts(listed)


def test_the_team_of_a_trainer_answers_while_it_is_not_training(model_folder, tmp_path):
    """Training afterwards is unaffected."""
    ended = []
    for is_asked in (False, True):
        settings = {"max_steps": 1, "learning_rate": 2e-2}
        trainer = team_trainer(model_folder, tmp_path / str(is_asked), settings=settings)
        if is_asked:
            expected = [episode.answer.text for episode in trainer.team.run(QUESTIONS[:2], greedy=True)]
            episodes = asyncio.run(trainer.team.arun(QUESTIONS[:2], greedy=True))
            assert [episode.answer.text for episode in episodes] == expected
            *_, answer = trainer.team.stream(QUESTIONS[0], greedy=True)
            assert answer.text == expected[0] and asyncio.run(trainer.team.arun(QUESTIONS[:2], seed=1))
        trainer.train()
        ended.append(weights(trainer))
    assert not moved(*ended)


@pytest.mark.parametrize("share", [True, False])
def test_answers_depend_on_the_seed_and_not_on_other_requests(team_folder, model_folder, tmp_path, share):
    """Also next to other temperatures, with a seeded torch, in our decoding loop and in that of transformers."""
    shutil.copytree(team_folder, tmp_path / "team")
    manifest = json.loads((tmp_path / "team" / "marft_team.json").read_text())
    manifest["inference"]["share_prefixes"] = share
    (tmp_path / "team" / "marft_team.json").write_text(json.dumps(manifest))
    team = Team.from_pretrained(tmp_path / "team", model=model_folder)
    alone = texts(asyncio.run(team.arun(QUESTIONS[:1], seed=3)))

    async def beside():
        torch.manual_seed(0)
        others = [team.arun([question], sampling={"temperature": 0.5}) for question in QUESTIONS[1:3]]
        *_, seeded = await asyncio.gather(team.arun(QUESTIONS[3:]), *others, team.arun(QUESTIONS[:1], seed=3))
        return texts(seeded)

    assert asyncio.run(beside()) == alone
    assert len({str(texts(asyncio.run(team.arun(QUESTIONS[:1], seed=seed)))) for seed in range(3)}) > 1


@pytest.mark.parametrize("is_async", [False, True])
def test_stream_events_match_the_episode(model_folder, tmp_path, is_async):
    agents = [*tiny_agents(), AgentSpec("clerk", reply=lambda messages: "noted: 1 + 1")]
    team = team_trainer(model_folder, tmp_path, agents=agents, workflow=Both()).team

    async def listen():
        return [event async for event in team.astream(QUESTIONS[0], greedy=True)]

    *events, answer = asyncio.run(listen()) if is_async else team.stream(QUESTIONS[0], greedy=True)
    (episode,) = team.run(QUESTIONS[:1], greedy=True)
    assert isinstance(answer, Answer) and answer.text == episode.answer.text == episode.turns[0].text
    assert texts([answer.episode]) == texts([episode])
    for number, turn in enumerate(episode.turns):
        group = [event for event in events if event.turn == number]
        assert {event.agent for event in group} == {turn.agent}
        assert isinstance(group[0], TurnStarted) and isinstance(group[-1], TurnEnded) and group[-1].text == turn.text
        assert "".join(event.text for event in group if isinstance(event, TextDelta)) == turn.text
    assert sum(isinstance(event, TextDelta) for event in events) > 4  # streamed token by token


def test_closing_a_stream_ends_the_turn(namesakes):
    """The model is free for the next question at once, and nothing of the first question continues."""
    alone = Sequential([NAMES[-1]])
    team = Team.from_pretrained(f"{namesakes}/team", model=f"{namesakes}/base", workflow=alone)
    slow, steps = threading.Event(), []
    model = team.model.get_base_model()
    forward = model.forward

    def slowly(*args, **kwargs):
        steps.append(1)
        slow.wait(0.05)
        return forward(*args, **kwargs)

    def close():
        events = team.stream(QUESTIONS[0])
        assert isinstance(next(events), TurnStarted) and isinstance(next(events), TextDelta)
        events.close()

    async def cancel():
        task = asyncio.ensure_future(team.arun([QUESTIONS[0]]))
        await asyncio.sleep(0.12)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    model.forward = slowly
    for leave in (close, lambda: asyncio.run(cancel())):
        leave()
        slow.set()
        del steps[:]
        assert team(QUESTIONS[1], greedy=True) == said_by(NAMES[-1])
        whole = LENGTHS[NAMES[-1]] + 1  # steps of decoding, and the pass over the prompt
        assert len(steps) <= whole + 2  # a cancelled turn takes at most one more step
        slow.clear()


def test_rows_that_are_given_up_or_at_their_limit_leave_the_batch():
    first, second = [], []

    async def looked():
        turns = [LiveTurn(0, None, first.extend), LiveTurn(0, 2, second.extend), LiveTurn(0), LiveTurn(0)]
        rows = LiveRows(turns, end_token_ids=[9], longest=8, samples=True, device=torch.device("cpu"))
        assert rows.limits == [8, 2, 8, 8] and rows.draws.shape == (4, 8)
        assert torch.equal(rows.draws[0], rows.draws[1])  # of their seeds
        assert rows.look([0, 1, 2, 3], [[1], [2], [3], [4]], [False, False, False, True]) == [False] * 3 + [True]
        turns[2].is_gone = True
        # Some steps at once, as on a GPU: what follows an end or a limit is padding
        assert rows.look([0, 1, 2], [[9, 0, 0], [5, 6, 7], [3, 3, 3]], [False] * 3) == [True] * 3
        await asyncio.sleep(0)

    asyncio.run(looked())
    assert first == [1, 9] and second == [2, 5]


def test_the_loop_of_transformers_is_watched_too(tokenizer):
    """Rows that have ended at a stop text get padding, which is not streamed."""

    ids, streamed, done, prompt = [*tokenizer("12=")["input_ids"]], [], [], [5, 5]

    async def heard():
        turn = LiveTurn(0, None, streamed.extend)
        rows = LiveRows([turn], end_token_ids=[], longest=8, samples=False, device=torch.device("cpu"))
        rows.other = StopStringCriterion(StopStrings(tokenizer, ["="]))
        for token in [*ids, 0, 0]:
            prompt.append(token)
            done.append(bool(rows(torch.tensor([prompt]), None)[0]))
        await asyncio.sleep(0)

    asyncio.run(heard())
    assert streamed == ids and done == [False] * (len(ids) - 1) + [True] * 3


def test_text_grows_by_whole_characters(tokenizer):
    text = "naïve 漢字 \N{SNOWMAN} 1+1=2 \N{FAMILY}!"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    growing = GrowingText(tokenizer)
    parts = [growing.add([token_id]) for token_id in ids]
    assert "".join(parts) == growing.text == tokenizer.decode(ids, skip_special_tokens=True)
    assert not any("\N{REPLACEMENT CHARACTER}" in part for part in parts)
    assert growing.get_rest(growing.text + "!") == "!" and growing.get_rest("another") == ""


def test_failures_are_raised_to_the_caller(team):
    for ask in (lambda question: asyncio.run(team.arun([question])), lambda question: list(team.stream(question))):
        with pytest.raises(ValueError, match="window"):
            ask("1 + " * 20_000)
    with pytest.raises(TypeError, match=r"`team.stream\(question\)` answers one question"):
        team.stream(["one", "two"])
    assert asyncio.run(team.arun(QUESTIONS[:1], greedy=True))[0].answer.text  # and others go on


def test_concurrent_turns_fit_into_memory(team, monkeypatch):
    expected = texts(team.run(QUESTIONS, greedy=True, batch_size=len(QUESTIONS)))
    sizes, original = [], decode
    monkeypatch.setattr(saved_team, "free_memory", lambda device: 500_000)
    fits = saved_team.max_concurrent_turns(team.model, 60)
    assert 1 < fits < 12 and saved_team.max_concurrent_turns(team.model, 10**9) >= 1

    def counting_decode(model, input_ids, **kwargs):
        sizes.append(len(input_ids))
        return original(model, input_ids, **kwargs)

    monkeypatch.setattr(transformers_generator, "decode", counting_decode)
    assert texts(team.run(QUESTIONS, greedy=True)) == expected
    assert 1 < max(sizes) <= fits
    sizes.clear()
    assert texts(asyncio.run(together(team, greedy=True))) == expected
    assert 1 < max(sizes) <= fits
