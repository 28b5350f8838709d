# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""The coding harness of `examples/harness.py`: what it asks, and what its agents learn from."""

import asyncio
import importlib
import json
import random
from pathlib import Path
from types import SimpleNamespace

from marft_trl import AgentSpec, Team
from marft_trl.extras.apps import BySystemPrompt, ExternalApp
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


def trainer_of(harness, model, tokenizer, folder, rows, **settings):
    return team_trainer(
        model,
        folder,
        processing_class=tokenizer,
        agents=[AgentSpec("coder"), AgentSpec("searcher")],
        workflow=ExternalApp(
            harness.app,
            answer="coder",
            tools=True,
            agent_of=BySystemPrompt({harness.CODER: "coder", harness.SEARCHER: "searcher"}),
        ),
        reward_funcs=harness.right,
        train_dataset=rows,
        settings={"max_completion_length": 64, **settings},
    )


def test_the_model_is_taught_what_the_harness_will_ask(harness, monkeypatch, tmp_path):
    """
    Turns are looked up in the demonstrations by their prompts, token by token, so all of the harness's requests are
    there. Its agents then solve every puzzle, and the coder's two requests after the first are in one lineage.
    """
    monkeypatch.setattr(harness, "SLIPS", 0)
    tokenizer, rows = harness.tokenizer(), harness.puzzles(2, seed=0)
    taught = {
        tuple(prompt): completion
        for row in rows
        for prompt, completion in harness.turns_of(row, tokenizer, random.Random(0))
    }
    trainer = trainer_of(harness, tiny_model(len(tokenizer)), tokenizer, tmp_path, rows)
    setattr(trainer, TRL_GENERATION, lambda ids, *_, **__: ([taught[tuple(prompt)] for prompt in ids], None))
    for episode in trainer.team.run(list(rows)):
        assert episode.answer.text == episode.row["solution"]
        assert [turn.agent for turn in episode.turns] == ["coder", "searcher", "searcher", "coder", "coder"]
        assert len({turn.lineage for turn in episode.turns}) == 2


def test_a_call_whose_name_could_not_be_sent_back_is_a_text(harness, tmp_path):
    """Otherwise the harness sends it back, is refused, and the run ends for what an agent wrote."""
    tokenizer, rows = harness.tokenizer(), harness.puzzles(2, seed=0)
    said = '<tool_call>\n{"name": "", "arguments": {"query": "pens"}}\n</tool_call>'
    trainer = trainer_of(harness, tiny_model(len(tokenizer)), tokenizer, tmp_path, rows)
    ids = [*tokenizer(said)["input_ids"], tokenizer.eos_token_id]
    setattr(trainer, TRL_GENERATION, lambda prompts, *_, **__: ([ids for _ in prompts], None))
    episode = trainer.team.run(list(rows))[0]
    (turn,) = episode.turns
    assert turn.agent == "coder" and turn.tool_calls and said in turn.raw_text


def test_held_out_sums_are_not_trained_on(harness):
    def sums(rows):
        return {tuple(json.loads(row["parts"])[1:]) for row in rows}

    trained, held_out = sums(harness.puzzles(2000, 0)), sums(harness.puzzles(500, 1000, held_out=True))
    assert len(held_out) > 10 and not trained & held_out


def test_wrong_calls_are_answered(harness):
    """A tool of another agent, a missing argument, a program that fails, and a file that is not there."""
    program = harness.Harness(client=None, files={"pens": "3"})

    def result(name, arguments, tools):
        block = SimpleNamespace(id="1", name=name, input=arguments)
        return asyncio.run(program.call(block, tools))["content"]

    assert result("run", {"code": "print(1)"}, [harness.READ]) == "There is no tool run."
    assert result("read", {}, [harness.READ]) == "Needed: ['path']."
    assert result("read", {"path": "pens"}, [harness.READ]) == "3"
    assert result("read", {"path": "../pens"}, [harness.READ]) == "no file"


@pytest.mark.slow
def test_the_harness_trains_and_runs_on_the_served_team(harness, tmp_path, monkeypatch, capsys):
    """A model that is hardly taught, for a step; the gain over three seeds is on the page of evidence."""
    options = ["--max_steps", "1", "--teaching_steps", "2", "--questions", "2", "--output_dir", str(tmp_path)]
    monkeypatch.setattr("sys.argv", ["harness.py", *options])
    harness.main()
    output = capsys.readouterr().out
    assert "the same harness on the served team: 0.0%" in output
    assert [agent.name for agent in Team.from_pretrained(tmp_path / "seed-0", tmp_path / "base").agents]
