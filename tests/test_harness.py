# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""The coding harness of `examples/harness.py`: requests and training data."""

import asyncio
import importlib
import json
import random
from pathlib import Path
from types import SimpleNamespace

from marft_trl import AgentSpec, Team
from marft_trl.extras.apps import BySystemPrompt, ExternalApp
from marft_trl.reporting.transcripts import format_episode
from marft_trl.tiny import tiny_model

import pytest

from .helpers import team_trainer
from .test_tools import TRL_GENERATION


pytest.importorskip("anthropic")


@pytest.fixture
def harness(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "examples"))
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "examples" / "applications"))
    return importlib.import_module("harness")


def trainer_of(harness, model, tokenizer, folder, rows, app=None):
    rule = BySystemPrompt({harness.CODER: "coder", harness.SEARCHER: "searcher"})
    answer = "coder" if app is None else "searcher"
    workflow = ExternalApp(app or harness.app, answer=answer, tools=True, agent_of=rule)
    arguments = {"agents": [AgentSpec("coder"), AgentSpec("searcher")], "reward_funcs": harness.right}
    arguments |= {"processing_class": tokenizer, "train_dataset": rows, "settings": {"max_completion_length": 64}}
    return team_trainer(model, folder, workflow=workflow, **arguments)


@pytest.mark.slow
def test_the_model_is_taught_the_requests_of_the_harness(harness, monkeypatch, tmp_path):
    """The demonstrations contain the prompt of every request of the harness."""
    monkeypatch.setattr(harness, "SLIPS", 0)
    tokenizer, rows = harness.tokenizer(), harness.puzzles(2, seed=0)
    turns = [turn for row in rows for turn in harness.turns_of(row, tokenizer, random.Random(0))]
    taught = {tuple(prompt): completion for prompt, completion in turns}
    trainer = trainer_of(harness, tiny_model(len(tokenizer)), tokenizer, tmp_path, rows)
    setattr(trainer, TRL_GENERATION, lambda ids, *_, **__: ([taught[tuple(prompt)] for prompt in ids], None))
    for episode in trainer.team.run(list(rows)):
        assert episode.answer.text == episode.row["solution"]
        assert [turn.agent for turn in episode.turns] == ["coder", "searcher", "searcher", "coder", "coder"]
        assert len({turn.lineage for turn in episode.turns}) == 2
        assert all(f"lineage {number}" in format_episode(episode) for number in range(2))
    assert asyncio.run(harness.on_the_served_team(trainer.team, list(rows))) == 1.0


def test_a_call_whose_name_could_not_be_sent_back_is_a_text(harness, tmp_path):
    """Otherwise the harness sends it back, the API refuses it, and the text of an agent ends the run."""
    tokenizer, rows = harness.tokenizer(), harness.puzzles(2, seed=0)
    reply = '<tool_call>\n{"name": "", "arguments": {"query": "pens"}}\n</tool_call>'
    trainer = trainer_of(harness, tiny_model(len(tokenizer)), tokenizer, tmp_path, rows)
    ids = [*tokenizer(reply)["input_ids"], tokenizer.eos_token_id]
    setattr(trainer, TRL_GENERATION, lambda prompts, *_, **__: ([ids for _ in prompts], None))
    episode = trainer.team.run(list(rows))[0]
    (turn,) = episode.turns
    assert turn.agent == "coder" and turn.tool_calls and reply in turn.raw_text


def test_sub_agents_that_make_the_same_call_at_once_keep_their_conversations(harness, tmp_path):
    """Two searches with the same prompt call the same tool, and get different results: ids tell them apart."""
    tokenizer, rows = harness.tokenizer(), harness.puzzles(2, seed=0)
    call = tokenizer('<tool_call>\n{"name": "read", "arguments": {"path": "pens"}}\n</tool_call>')["input_ids"]
    results = []

    async def app(row, endpoint):
        async with harness.AsyncAnthropic(base_url=endpoint.root_url, api_key=endpoint.api_key) as client:
            searches = [harness.Harness(client, {"pens": count}) for count in "12"]
            results.append(await asyncio.gather(*(search.search("pens") for search in searches)))

    def generate(prompts, *_, **__):
        completions = []
        for text in map(tokenizer.decode, prompts):
            count = "1" if "1" in text.rpartition("tool")[2] else "2"
            completions.append(
                [*(tokenizer(count)["input_ids"] if "tool_call" in text else call), tokenizer.eos_token_id]
            )
        return completions, None

    trainer = trainer_of(harness, tiny_model(len(tokenizer)), tokenizer, tmp_path, rows, app=app)
    setattr(trainer, TRL_GENERATION, generate)
    for episode in trainer.team.run(list(rows)):
        lineages = {turn.lineage for turn in episode.turns}
        texts = [[turn.text for turn in episode.turns if turn.lineage == lineage] for lineage in lineages]
        assert [len(answers) for answers in texts] == [2, 2] and {answers[1] for answers in texts} == {"1", "2"}
    assert results == [["1", "2"]] * 2


def test_held_out_sums_are_not_trained_on(harness):
    questions = harness.puzzles(2000, 0), harness.puzzles(500, 1000, held_out=True)
    trained, held_out = ({tuple(json.loads(row["parts"])[1:]) for row in rows} for rows in questions)
    assert len(held_out) > 10 and not trained & held_out


def test_wrong_calls_are_answered(harness):
    program = harness.Harness(client=None, files={"pens": "3"})

    for name, arguments, expected in (
        ("run", {"code": "print(1)"}, "There is no tool run."),
        ("read", {}, "Needed: ['path']."),
        ("read", {"path": "pens"}, "3"),
        ("read", {"path": "../pens"}, "no file"),
    ):
        block = SimpleNamespace(id="1", name=name, input=arguments)
        assert asyncio.run(program.call(block, [harness.READ]))["content"] == expected


@pytest.mark.slow
def test_the_harness_trains_and_runs_on_the_served_team(harness, tmp_path, monkeypatch, capsys):
    """One step with a model that is barely trained; the guide has the gain over three seeds."""
    options = ["--max_steps", "1", "--teaching_steps", "2", "--questions", "2", "--output_dir", str(tmp_path)]
    monkeypatch.setattr("sys.argv", ["harness.py", *options])
    harness.main()
    output = capsys.readouterr().out
    assert "the same harness on the served team: 0.0%" in output
    assert [agent.name for agent in Team.from_pretrained(tmp_path / "seed-0", tmp_path / "base").agents]
