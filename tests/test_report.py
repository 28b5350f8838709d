"""Reports: arms, budgets, skipped arms, resuming, and verdicts about planted teams whose truth is known."""

import csv
import dataclasses
import json
import os
import re
import subprocess
import sys

from marft_trl import AgentSpec, MARFTTrainer, Sequential, Workflow
from marft_trl.episodes.records import Turn
from marft_trl.extras.report import Experiment, cells, load_experiment, report, runner
from marft_trl.extras.report.arms import check_arms, make_arms
from marft_trl.extras.report.comparison import ArmResult, classify, compare, make_verdicts, write_report
from marft_trl.extras.report.experiment import collect_settings, differences
from marft_trl.extras.tasks import game_seeds
from marft_trl.prompts import team_view
from marft_trl.reporting import Interval
from marft_trl.reporting.evaluation import read_samples, write_samples
from marft_trl.rollout.runner import RunMode
from marft_trl.runs.resume import compute_fingerprint
from marft_trl.tiny import exact_answer, tiny_agents, tiny_dataset, tiny_team_model
from marft_trl.workflows import Debate, EnvironmentLoop

import numpy as np
import pytest
from transformers import AutoModelForCausalLM, TrainerCallback, set_seed

from .helpers import config, logged_steps, lora, team_trainer


def make_experiment(model, folder, agents=None, questions=8, **fields):
    settings = {"max_steps": 2, "num_generations_eval": 1, "per_device_eval_batch_size": questions, "logging_steps": 1}
    settings["lr_scheduler_type"] = "constant"
    args = config(folder, **settings | fields.pop("settings", {}))
    return Experiment(
        model=model, agents=agents or tiny_agents(), reward_funcs=exact_answer, train_dataset=tiny_dataset(64),
        eval_dataset=tiny_dataset(questions, seed=1), args=args, peft_config=lora(), **fields,
    )  # fmt: skip


def result_of(folder, run):
    return json.loads((folder / "runs" / run / "result.json").read_text())


def alternating(completions, **columns):
    return [float(number % 2) for number in range(len(completions))]


@pytest.fixture(scope="module")
def reported(model_folder, tmp_path_factory):
    folder = tmp_path_factory.mktemp("reported")
    experiment = make_experiment(model_folder, folder / "unused", settings={"max_steps": 1})
    experiment = experiment.changed(eval_dataset=experiment.train_dataset.select(range(6)), reward_funcs=alternating)
    report(experiment, str(folder), seeds=[0], arms=["untrained"])
    return experiment, folder


SAVE = {"save_strategy": "steps", "save_steps": 1}
SLOW = {"slow": lambda team: team.with_args(learning_rate=1e-9)}


def names_of(arms):
    return [arm.name for arm in arms if arm.skip_reason is None]


# ---- Arms ----


def test_the_arms_of_a_chain(model_folder, tmp_path):
    arms = make_arms(make_experiment(model_folder, tmp_path))
    assert names_of(arms) == [
        *("team", "untrained", "solo", "solo_untrained", "anonymous", "shared"),
        *("frozen:reasoner", "without:reasoner", "emptied:reasoner", "frozen:actor", "without:actor"),
    ]
    (last,) = (arm for arm in arms if arm.skip_reason is not None)
    assert (last.name, last.skip_reason) == ("emptied:actor", "it is the last agent, whose turns no teammate reads")


def test_arms_change_agents_and_options(model_folder, tmp_path):
    experiment = make_experiment(model_folder, tmp_path)
    arms = {arm.name: arm for arm in make_arms(experiment)}
    (solo,) = arms["solo"].change(experiment).agents
    assert solo.max_completion_length == sum(agent.max_completion_length for agent in experiment.agents)
    assert arms["solo"].is_budgeted
    assert experiment.args.max_steps == 2  # the experiment stays as it is
    assert {agent.adapter for agent in arms["shared"].change(experiment).agents} == {"team"}
    assert [agent.trainable for agent in arms["frozen:actor"].change(experiment).agents] == [True, False]
    assert [agent.name for agent in arms["without:reasoner"].change(experiment).agents] == ["actor"]
    assert arms["anonymous"].change(experiment).options == {"anonymous": True}
    sharing = experiment.changed(agents=arms["shared"].change(experiment).agents)
    shared_arms = {arm.name: arm for arm in make_arms(sharing)}
    assert [agent.adapter for agent in shared_arms["own"].change(sharing).agents] == ["reasoner", "actor"]
    frozen = shared_arms["frozen:actor"].change(sharing).agents
    assert [(agent.adapter, agent.trainable) for agent in frozen] == [("team", True), ("actor", False)]


def test_arms_that_a_team_does_not_have(model_folder, tmp_path):
    lone_arms = make_arms(make_experiment(model_folder, tmp_path, agents=tiny_agents()[1:]))
    assert names_of(lone_arms) == ["team", "untrained", "anonymous"]
    half = [tiny_agents()[0], AgentSpec("actor", trainable=False, max_completion_length=6)]
    skip_reasons = {
        arm.name: arm.skip_reason for arm in make_arms(make_experiment(model_folder, tmp_path, agents=half))
    }
    assert (
        skip_reasons["frozen:actor"] == "it is not trained" and skip_reasons["shared"] == "only one agent is trained"
    )
    assert skip_reasons["frozen:reasoner"] == skip_reasons["without:reasoner"] == "no other agent is trained"
    full_arms = make_arms(
        make_experiment(model_folder, tmp_path).changed(peft_config=None, options={"anonymous": "none"})
    )
    skip_reasons = {arm.name: arm.skip_reason for arm in full_arms}
    assert skip_reasons["shared"] == skip_reasons["frozen:actor"] == "there are no adapters"
    assert skip_reasons["anonymous"] == "the team is anonymous"
    assert "frozen:actor" in names_of(make_arms(make_experiment(model_folder, tmp_path), "frozen"))
    with pytest.raises(ValueError, match="Did you mean 'frozen'"):
        make_arms(make_experiment(model_folder, tmp_path), ["frozn"])
    with pytest.raises(ValueError, match="is evaluated in the run of 'solo'. Add 'solo' to `arms`"):
        report(make_experiment(model_folder, tmp_path), str(tmp_path / "out"), arms=["solo_untrained"])


class Pays:
    def reset(self, **row):
        return None

    def step(self, turns):
        return None, 1.0, True


def test_the_solo_agent_and_the_solo_workflow(model_folder, tmp_path):
    experiment = make_experiment(model_folder, tmp_path)
    solo = {arm.name: arm for arm in make_arms(experiment)}["solo"]
    assert solo.change(experiment).workflow is None
    loop = experiment.changed(workflow=EnvironmentLoop(Pays, agents=["reasoner", "actor"]))
    solo_experiment = solo.change(loop)
    assert [agent.name for agent in solo_experiment.agents] == ["actor"]
    assert solo_experiment.workflow.agents is None and loop.workflow.agents == ["reasoner", "actor"]
    custom = experiment.changed(workflow=Planted())
    assert "`solo_workflow`" in {arm.name: arm.skip_reason for arm in make_arms(custom)}["solo"]
    with_solo_workflow = custom.changed(solo_workflow=EnvironmentLoop(Pays))
    assert isinstance(solo.change(with_solo_workflow).workflow, EnvironmentLoop)
    scripted = experiment.changed(agents=[*experiment.agents, AgentSpec("judge", reply=lie)])
    assert scripted.solo_agent().name == "actor"
    chain = experiment.changed(workflow=Sequential(["reasoner", "actor"]))
    without = {arm.name: arm for arm in make_arms(chain)}["without:reasoner"].change(chain)
    assert without.workflow.agents == ["actor"]


def test_invalid_arguments_raise_before_the_first_run(model_folder, tmp_path):
    experiment, out = make_experiment(model_folder, tmp_path / "unused"), tmp_path / "out"
    wrong = experiment.changed(workflow=Sequential(["reasoner", "author"]))
    for call, message in (
        (lambda: report(wrong, str(out)), "The arm 'team' cannot run: .*'author'"),
        (lambda: report(experiment, str(out), seeds=[0, 0]), "`seeds` must be distinct integers"),
        (lambda: report(experiment, str(out), seeds=3), "`seeds`"),
        (lambda: report(experiment, str(out), margin=-1.0), "`margin`"),
        (lambda: report(experiment, str(out), workers=0), "`workers`"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    assert not out.exists()


# ---- Runs ----


@pytest.mark.slow
def test_a_whole_report(model_folder, tmp_path, capsys):
    experiment = make_experiment(model_folder, tmp_path / "unused", settings={"max_steps": 1})
    out = tmp_path / "out"
    arms = ["untrained", "solo", "solo_untrained", "emptied", "frozen:actor"]
    comparison = report(experiment, str(out), seeds=[0, 1], arms=arms)
    output = capsys.readouterr().out
    # One per run, one before training for untrained arms, and one with empty messages of the reasoner
    assert "Report: 6 of 6 training runs to do and 12 evaluations of" in output
    assert "about" in output.partition("run 2 of 6")[2]
    runs = {folder.name for folder in (out / "runs").iterdir()}
    assert runs == {f"{arm}-{seed}" for arm in ("team", "solo", "frozen-actor") for seed in (0, 1)}
    for seed in (0, 1):
        team, solo = (result_of(out, f"{arm}-{seed}") for arm in ("team", "solo"))
        longest = 8 * experiment.solo_agent().max_completion_length
        assert team["tokens"] <= solo["tokens"] < team["tokens"] + longest and team["steps"] == 1
        sets = {row["set"] for row in read_samples(out / "runs" / f"team-{seed}" / "evaluations.jsonl")}
        assert sets == {"start", "end", "emptied:reasoner"}
    assert comparison["team"].accuracy.seeds == 2 and comparison["team"].accuracy.questions == 8
    assert comparison["team"].tokens == np.mean([result_of(out, f"team-{seed}")["tokens"] for seed in (0, 1)])
    page = (out / "report.md").read_text()
    assert "| the team, trained |" in page and "points" in page and "2 seeds" in page
    assert "what actor says is emptied (it is the last agent" in page
    with open(out / "report.csv") as table:
        rows = {row["arm"]: row for row in csv.DictReader(table)}
    assert float(rows["solo"]["difference"]) == pytest.approx(100 * comparison["solo"].difference.mean)
    assert (out / "report.png").stat().st_size > 10_000
    modified_at = {file: file.stat().st_mtime_ns for file in (out / "runs").rglob("*.jsonl")}
    again = report(experiment, str(out), seeds=[0, 1], arms=arms)
    assert again.verdicts == comparison.verdicts
    assert all(file.stat().st_mtime_ns == modified for file, modified in modified_at.items())


@pytest.mark.slow
def test_custom_arms(model_folder, tmp_path):
    """Variants train with as many tokens as the team, or for a `max_steps` of their own."""
    variants = {**SLOW, "twice as long": lambda team: team.with_args(max_steps=2)}
    experiment = make_experiment(model_folder, tmp_path / "unused", variants=variants, settings={"max_steps": 1})
    comparison = report(experiment, str(tmp_path), seeds=[0], arms=[*variants])
    team, slow, long = (result_of(tmp_path, f"{arm}-0") for arm in ("team", *variants))
    assert team["tokens"] <= slow["tokens"] < team["tokens"] + 8 * 20 and (team["steps"], long["steps"]) == (1, 2)
    assert any(re.match(r"The team.* slow(\.| \()", verdict) for verdict in comparison.verdicts)
    assert "| twice as long |" in (tmp_path / "report.md").read_text()
    slower = experiment.changed(variants={**variants, "slow": lambda team: team.with_args(learning_rate=1e-8)})
    with pytest.raises(ValueError, match="belongs to a different experiment: args.learning_rate was 1e-09, is 1e-08"):
        report(slower, str(tmp_path), seeds=[0], arms=[*variants])


@pytest.mark.slow
def test_a_budget_ends_with_a_batch_that_is_used_up(model_folder, tmp_path):
    """With two updates per batch, a variant with the team's settings makes as many updates as the team."""
    variants = {"the same": lambda team: team.with_args(max_tool_calls=15)}
    settings = {"num_iterations": 2, "max_steps": 4}
    experiment = make_experiment(model_folder, tmp_path / "unused", settings=settings, variants=variants)
    report(experiment, str(tmp_path), seeds=[0], arms=["the same"])
    team, same = (result_of(tmp_path, f"{arm}-0") for arm in ("team", "the same"))
    assert (team["steps"], team["tokens"]) == (same["steps"], same["tokens"]) and same["budget"] == team["tokens"]
    (tmp_path / "runs" / "team-0" / "result.json").write_text(json.dumps({**team, "tokens": 9}))
    with pytest.raises(ValueError, match=r"budget of [\d,]+ tokens, but the team with the same seed generated 9"):
        report(experiment, str(tmp_path), seeds=[0], arms=["the same"])


def test_views_and_functions_of_agents_are_recorded(model_folder, tmp_path):
    def settings_of(view):
        experiment = make_experiment(
            model_folder, tmp_path, agents=[AgentSpec("reasoner", view=view), *tiny_agents()[1:]]
        )
        return collect_settings(experiment)

    assert settings_of(team_view) == settings_of(team_view) and differences(
        settings_of(team_view), settings_of(believing)
    )


def test_replies_of_functions_are_not_counted_as_generated_tokens(model_folder, tmp_path):
    """Only tokens of agents with a model count, not those of a `reply` function."""
    agents = [AgentSpec("reasoner", max_completion_length=5), AgentSpec("echo", reply=lie)]
    trainer = team_trainer(model_folder, tmp_path, agents=agents)
    trainer.train()
    lengths = sum(step["agents/reasoner/completions/mean_length"] for step in logged_steps(trainer))
    episodes = trainer.args.per_device_train_batch_size
    assert trainer.parts.reporter.generated_tokens == round(lengths * episodes) > 0


@pytest.mark.parametrize(
    ("name", "change", "error"),
    [
        ("frozen:me", lambda team: team, "'frozen:me'"),
        ("solo", lambda team: team, "must not have names of other arms, got solo"),
        ("frozen-actor", lambda team: team, "must not have names of other arms, got frozen-actor"),
        ("mine", lambda team: None, "'mine' must return an `Experiment`.*got NoneType"),
        ("mine", lambda team: team.changed(name="another"), "'mine' changes no recorded setting"),
        ("mine", lambda team: team.with_args(lr_scheduler_type="linear"), "'mine' must not decay.*`max_steps` that"),
        ("mine", lambda team: team.changed(eval_dataset=tiny_dataset(8, seed=2)), r"settings \(eval_dataset\)"),
        ("mine", lambda team: team.with_args(eval_sampling={"top_k": 1}), r"settings \(args.eval_sampling\)"),
        ("mine", lambda team: team.with_args(learning_rat=1.0), "no setting `learning_rat`. Did you mean 'learning_r"),
        ("mine", lambda team: team.with_args(preset="rloo"), "cannot set `preset`, because"),
        ("mine", lambda team: team.with_args(num_generations=2), "cannot set `num_generations`, because"),
    ],
)
def test_invalid_custom_arms_raise(model_folder, tmp_path, name, change, error):
    experiment = make_experiment(model_folder, tmp_path / "unused")
    with pytest.raises((TypeError, ValueError), match=error):
        report(experiment.changed(variants={name: change}), str(tmp_path), arms=[name])


def test_evaluations_of_a_report_take_no_pass_for_a_loss(model_folder, tmp_path, monkeypatch):
    trainer, metrics = make_experiment(model_folder, tmp_path).trainer(), []
    evaluate = MARFTTrainer.evaluate
    monkeypatch.setattr(MARFTTrainer, "evaluate", lambda self, **options: metrics.append(evaluate(self, **options)))
    cells._evaluate(trainer, "start")
    set_seed(trainer.args.seed)
    trainer.evaluate(metric_key_prefix="start")
    assert "start_loss" not in metrics[0] and "start_loss" in metrics[1]
    assert metrics[0]["start_reward"] == metrics[1]["start_reward"]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"per_device_train_batch_size": 32, "num_generations_eval": 6}, 30),  # whole questions
        ({"per_device_train_batch_size": 4, "per_device_eval_batch_size": 48}, 48),
    ],
)
def test_evaluations_of_a_report_are_as_large_as_generation(model_folder, tmp_path, monkeypatch, settings, expected):
    experiment = make_experiment(
        model_folder, tmp_path / "unused", settings={"per_device_eval_batch_size": 1, **settings}
    )
    monkeypatch.setattr(Experiment, "trainer", lambda experiment: sys.exit(experiment.args.per_device_eval_batch_size))
    with pytest.raises(SystemExit) as caught:
        cells.run_cell(experiment, cells.Cell("team", 0, tmp_path / "team-0"))
    assert caught.value.code == expected


def killed_after(step, monkeypatch, call):
    train = MARFTTrainer.train

    class Kill(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == step:
                raise KeyboardInterrupt

    def killed(trainer, **options):
        trainer.add_callback(Kill())
        return train(trainer, **options)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(MARFTTrainer, "train", killed)
        call()


@pytest.mark.slow
def test_a_run_that_was_killed_goes_on(model_folder, tmp_path, monkeypatch):
    """A resumed run has the results and samples of an uninterrupted run, and skips an incomplete checkpoint."""
    experiment = make_experiment(model_folder, tmp_path / "unused", settings={**SAVE, "max_steps": 3}, variants=SLOW)
    report(experiment, str(tmp_path / "whole"), seeds=[3], arms=["untrained", "slow"])
    killed_after(
        3, monkeypatch, lambda: report(experiment, str(tmp_path / "cut"), seeds=[3], arms=["untrained", "slow"])
    )
    (tmp_path / "cut" / "runs" / "team-3" / "checkpoint-2" / "marft_commit.json").unlink()
    report(experiment, str(tmp_path / "cut"), seeds=[3], arms=["untrained", "slow"])
    for run in ("team-3", "slow-3"):
        whole, cut = (result_of(tmp_path / name, run) for name in ("whole", "cut"))
        assert {**whole, "seconds": 0} == {**cut, "seconds": 0} and cut["steps"] == 3
        files = [tmp_path / name / "runs" / run / "evaluations.jsonl" for name in ("whole", "cut")]
        assert read_samples(files[0]) == read_samples(files[1])
    clock = tmp_path / "cut" / "runs" / "team-3" / "seconds.json"
    before, seconds = json.loads(clock.read_text()), result_of(tmp_path / "cut", "team-3")["seconds"]
    assert set(before) == {"3"} and 0 < before["3"] <= seconds + 0.1
    assert not list((tmp_path / "cut").rglob("checkpoint-*"))


@pytest.mark.slow
def test_a_run_that_was_killed_does_not_go_on_as_another(model_folder, tmp_path, monkeypatch):
    """Changes are refused even where training would not notice. A run that starts over deletes the old budget."""
    experiment = make_experiment(model_folder, tmp_path / "unused", settings={**SAVE, "max_steps": 3})
    killed_after(2, monkeypatch, lambda: report(experiment, str(tmp_path), seeds=[0], arms=["untrained"]))
    folder = tmp_path / "runs" / "team-0"
    assert not (folder / "result.json").exists()
    for change in ({"eval_sampling": {"temperature": 0.1}}, {"learning_rate": 0.5}):
        with pytest.raises(ValueError, match=f"belongs to a different experiment: args.{next(iter(change))} was"):
            report(experiment.with_args(**change), str(tmp_path), seeds=[0], arms=["untrained"])
    with pytest.raises(ValueError, match="belongs to a different experiment"):  # in a separate process, too
        cells.Cell("team", 0, folder).begin({"args.learning_rate": 0.5})
    (folder / "settings.json").unlink()
    with pytest.raises(ValueError, match="team-0 contains a run without settings.json"):
        report(experiment, str(tmp_path), seeds=[0], arms=["untrained"])
    cell = cells.Cell("solo", 0, tmp_path / "solo")
    cell.folder.mkdir()
    (cell.folder / "budget.json").write_text("7")
    assert cell.begin({"a": 1}) is False and not (cell.folder / "budget.json").exists()
    assert cell.begin({"a": 2}) is False  # a run that left no files may start again with other settings


@pytest.mark.slow
def test_one_agent_ends_with_its_budget_also_if_it_was_killed_then(model_folder, tmp_path, monkeypatch):
    """Killed in the last evaluation, after a checkpoint of the last step: the budget is not spent twice."""
    experiment = make_experiment(model_folder, tmp_path / "unused", settings=SAVE)  # two steps
    report(experiment, str(tmp_path / "whole"), seeds=[0], arms=["solo"])
    evaluate = cells._evaluate

    def killed(trainer, name):
        if name == "end" and len(trainer.agents) == 1:
            raise KeyboardInterrupt
        evaluate(trainer, name)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(cells, "_evaluate", killed)
        report(experiment, str(tmp_path / "cut"), seeds=[0], arms=["solo"])
    (tmp_path / "cut" / "runs" / "solo-0" / "checkpoint-1").rename(tmp_path / "kept")
    report(experiment, str(tmp_path / "cut"), seeds=[0], arms=["solo"])
    results = [result_of(tmp_path / name, "solo-0") for name in ("whole", "cut")]
    assert all(results[0][key] == results[1][key] for key in ("tokens", "steps", "curve"))
    files = [tmp_path / name / "runs" / "solo-0" / "evaluations.jsonl" for name in ("whole", "cut")]
    assert read_samples(files[0]) == read_samples(files[1])


def test_an_arm_that_fails_does_not_lose_the_others(model_folder, tmp_path, monkeypatch):
    run = runner.run_cell

    def failing(arm_experiment, cell, emptied=()):
        if cell.arm == "anonymous":
            raise OSError("no room")
        run(arm_experiment, cell, emptied)

    monkeypatch.setattr(runner, "run_cell", failing)
    experiment = make_experiment(model_folder, tmp_path / "unused", settings={"max_steps": 1})
    experiment = experiment.changed(reward_funcs=lambda completions, **columns: [0.0] * len(completions))
    with pytest.raises(RuntimeError, match=r"without anonymous, whose runs failed(.|\n)*OSError: no room"):
        report(experiment, str(tmp_path), seeds=[0], arms=["untrained", "anonymous"])
    page = (tmp_path / "report.md").read_text()
    assert "| the team, untrained |" in page and "no names and no roles (its run failed)" in page
    assert result_of(tmp_path, "team-0")["rewards_differ"] is False


def test_games_are_the_same_if_their_seeds_are(model_folder, tmp_path):
    experiment = make_experiment(model_folder, tmp_path / "unused")
    games = experiment.changed(train_dataset=game_seeds(20), eval_dataset=game_seeds(5))
    assert games.questions_in_both() == 5
    assert games.changed(train_dataset=game_seeds(20, seed=5)).questions_in_both() == 0


def test_an_agent_is_frozen_whose_adapter_others_share(model_folder, tmp_path):
    experiment = make_experiment(model_folder, tmp_path)
    shared = experiment.changed(
        agents=[experiment.agents[0], dataclasses.replace(experiment.agents[1], adapter="reasoner")]
    )
    check_arms(shared, make_arms(shared))
    (arm,) = make_arms(shared, ["frozen:reasoner"])[1:]
    agents = arm.change(shared).agents
    assert [agent.adapter for agent in agents] == ["reasoner-frozen", "reasoner"]
    assert [agent.trainable for agent in agents] == [False, True]


@pytest.mark.slow
def test_questions_in_both_sets_log_a_warning(reported, caplog):
    experiment, folder = reported
    with caplog.at_level("WARNING"):
        comparison = report(experiment, str(folder), seeds=[0], arms=["untrained"])
    assert comparison.questions_in_both == 6
    assert "6 of the 6 evaluation questions are also training questions" in caplog.text
    assert "6 of the 6 questions are also training questions" in (folder / "report.md").read_text()


def test_arms_of_agents_with_different_models(small_model, model_folder, tmp_path):
    """Without an agent on the first model, an arm trains on the model that is left."""
    experiment = make_experiment(small_model, tmp_path)
    reasoner, actor = experiment.agents
    experiment = experiment.changed(agents=[reasoner, dataclasses.replace(actor, model=model_folder)])
    arms = {arm.name: arm for arm in make_arms(experiment)}
    assert arms["shared"].skip_reason == "the agents have different models"
    for name in ("solo", "without:reasoner"):
        trainer = arms[name].changed(experiment).trainer()
        assert trainer.model.name_or_path == model_folder and not trainer.policies.further
    loaded = AutoModelForCausalLM.from_pretrained(model_folder)
    with pytest.raises(TypeError, match="`model` of agent 'actor' in an `Experiment`"):
        experiment.changed(agents=[reasoner, dataclasses.replace(actor, model=loaded)])


def test_the_warm_up_of_one_agent_is_that_of_the_team(model_folder, tmp_path):
    for warmup, steps in ((3, 3), (0.25, 8), (0, 0)):
        experiment = make_experiment(model_folder, tmp_path, settings={"warmup_steps": warmup, "max_steps": -1})
        args = cells._without_end(experiment, 30, None).args
        assert (args.max_steps, args.warmup_steps) == (3000, steps)
        assert args.lr_scheduler_type == ("constant_with_warmup" if steps else "constant")


def test_runs_of_another_experiment_are_not_compared(reported):
    experiment, out = reported[0], str(reported[1])
    shorter = [dataclasses.replace(experiment.agents[0], max_completion_length=3), experiment.agents[1]]
    changes = {
        "args.learning_rate was": experiment.with_args(learning_rate=0.5),
        "eval_dataset was": experiment.changed(eval_dataset=tiny_dataset(8, seed=5)),
        "reward_funcs was": experiment.changed(reward_funcs=lambda completions, **columns: [0.0] * len(completions)),
        "options.anonymous was None, is 'numbered'": experiment.changed(options={"anonymous": "numbered"}),
        "workflow was None": experiment.changed(workflow=Sequential()),
        "reasoner.max_completion_length was": experiment.changed(agents=shorter),
    }
    for message, other in changes.items():
        with pytest.raises(cells.OtherExperimentError, match=f"belongs to a different experiment: {message}"):
            report(other, out, seeds=[0], arms=["untrained"])
    report(experiment.with_args(logging_steps=7), out, seeds=[0], arms=["untrained"])  # changes no result
    with pytest.raises(ValueError, match="was not evaluated with empty messages of reasoner"):
        report(experiment, out, seeds=[0], arms=["emptied:reasoner"])


def test_a_rate_that_decays_cannot_be_compared_at_equal_tokens(model_folder, tmp_path):
    experiment = make_experiment(model_folder, tmp_path, settings={"lr_scheduler_type": "cosine"})
    with pytest.raises(ValueError, match="`lr_scheduler_type` of the experiment must not decay, got 'cosine'"):
        report(experiment, str(tmp_path / "out"), arms=["solo"])


TASK = """
from marft_trl.tiny import exact_answer, tiny_agents, tiny_dataset
from marft_trl.extras.report import Experiment
from tests.helpers import config, lora

def make(model, folder):
    settings = {"max_steps": 1, "num_generations_eval": 1, "lr_scheduler_type": "constant"}
    args = config(folder, **settings, per_device_eval_batch_size=4)
    return Experiment(model, tiny_agents(), exact_answer, tiny_dataset(64), tiny_dataset(4, seed=1), args, lora())

def wrong():
    return None
"""


@pytest.mark.slow
def test_the_command_with_runs_side_by_side(model_folder, tmp_path):
    task = tmp_path / "task.py"
    task.write_text(TASK)
    settings = {"model": model_folder, "folder": str(tmp_path / "unused")}
    file = tmp_path / "report.yaml"
    arguments = {"experiment": f"{task}:make", "settings": settings, "seeds": [0], "arms": ["untrained", "solo"]}
    file.write_text(json.dumps({**arguments, "workers": 2, "output_dir": str(tmp_path / "out")}))
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    command = [sys.executable, "-W", "ignore", "-m", "marft_trl.extras.report", "--config", str(file)]
    environment = {**os.environ, "PYTHONPATH": root}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "| one agent, trained with as many generated tokens |" in done.stdout
    log = tmp_path / "out" / "runs" / "solo-0" / "log.txt"
    assert f"Report: run 2 of 2, solo with seed 0: {log}\n" in done.stdout and log.exists()


def test_experiments_that_cannot_be_made(model_folder, tmp_path):
    task = tmp_path / "task.py"
    task.write_text(TASK)
    for address, message in (
        (f"{task}:mak", "Did you mean 'make'"),
        (f"{task}:wrong", "must return an `Experiment`"),
        (f"{tmp_path}/none.py:make", "There is no file"),
        ("task", "file.py:function"),
        (f"{task}:make", "returns the `Experiment`, cannot be called.*missing .* 'model'"),
    ):
        with pytest.raises(ValueError, match=message):
            load_experiment(address)
    (tmp_path / "beside_the_task.py").write_text(TASK)
    (tmp_path / "imports.py").write_text("from beside_the_task import make\n")
    workflow_file = tmp_path / "flow.py"
    workflow_file.write_text(
        "from marft_trl import Workflow\nfrom task import make as task\n\n\nclass Own(Workflow):\n"
        "    async def run(self, episode):\n        await episode.turn('reasoner')\n\n\n"
        "def make(**settings):\n    return task(**settings).changed(workflow=Own())\n"
    )
    fingerprints, settings = [], {"model": model_folder, "folder": str(tmp_path)}
    for agent in ("reasoner", "actor"):
        workflow_file.write_text(workflow_file.read_text().replace("reasoner", agent))
        workflow = load_experiment(f"{workflow_file}:make", settings).workflow
        assert workflow.named_agents() == [agent]
        fingerprints.append(compute_fingerprint(workflow))
    assert len({*fingerprints}) == 2 and all(fingerprint.startswith("Own (") for fingerprint in fingerprints)
    assert load_experiment(f"{tmp_path}/imports.py:make", settings).agents
    with pytest.raises(ValueError, match="workers"):
        report(make_experiment(model_folder, tmp_path), str(tmp_path / "out"), workers=2)
    with pytest.raises(ValueError, match="a `Dataset` with at least one row"):
        make_experiment(model_folder, tmp_path).changed(eval_dataset=tiny_dataset(4).select([]))


def test_an_agent_that_is_silent_is_so_for_all(model_folder, tmp_path):
    """Teammates, votes and answers see no text of a silent agent, whether a model or a function wrote it."""
    agents = [*tiny_agents(), AgentSpec("judge", reply=lie)]
    workflow = Debate(["reasoner", "judge"], judge="actor")
    trainer = team_trainer(model_folder, tmp_path, agents=agents, workflow=workflow)
    episode_runner, row = trainer.parts.runner, trainer.train_dataset[0]
    for silent in ("reasoner", "judge"):
        (episode,) = episode_runner.changed(RunMode(silent=frozenset([silent]))).run([row])
        for turn in episode.turns:
            assert (turn.text == turn.raw_text == "") == (turn.agent == silent) and turn.completion_ids
        prompt = str(episode.turns[-1].observation)
        assert ("1+1=9" in prompt) == (silent != "judge")
    (episode,) = episode_runner.run([row])
    assert all(turn.text for turn in episode.turns)
    (episode,) = episode_runner.changed(RunMode(silent=frozenset(["actor"]))).run([row])
    assert episode.answer.text == ""


# ---- Verdicts ----


def test_differences_are_classified_by_their_interval():
    clear = {(0.03, 0.2): "better", (-0.2, -0.03): "worse", (-0.01, 0.01): "same", (0.001, 0.01): "same"}
    for (low, high), kind in {**clear, (-0.01, 0.1): "open"}.items():
        assert classify(Interval((low + high) / 2, low, high, 3, 100), margin=0.02) == kind


@pytest.fixture(scope="module")
def arms(model_folder, tmp_path_factory):
    return {arm.name: arm for arm in make_arms(make_experiment(model_folder, tmp_path_factory.mktemp("arms")))}


def test_a_verdict_names_a_single_agent_with_fewer_tokens(arms):
    for tokens, count in ((100, 0), (120, 0), (99, 1)):
        results = {name: ArmResult(arms["team"], tokens=spent) for name, spent in (("team", 100), ("solo", tokens))}
        verdicts = make_verdicts(results, ["reasoner", "actor"], 0.02)
        assert len(verdicts) == count and all(
            "The single agent generated 99 tokens" in verdict for verdict in verdicts
        )


def result(arm, mean, rewards):
    accuracy, difference = Interval(mean, mean, mean, 3, 100), Interval(0.35, 0.3, 0.4, 3, 100)
    return ArmResult(arm, accuracy, difference, curves=[list(enumerate(rewards))])


def test_a_verdict_names_a_single_agent_that_is_almost_never_right(arms):
    for mean, words in ((0.002, "was right in only 0.2 % of the episodes"), (0.2, "")):
        results = {"team": result(arms["team"], 0.5, [0.1, 0.5]), "solo": result(arms["solo"], mean, [0.0, 0.001])}
        (verdict,) = make_verdicts(results, [], 0.02)
        assert words in verdict and ("But" in verdict) == bool(words)


def test_a_reward_that_no_episode_is_right_by_is_named(arms):
    """Bonuses and penalties keep every reward below the threshold of a right answer."""
    for mean, rewards, count in ((0.0, [0.4, 0.8], 1), (0.0, [0.0, 0.0], 0), (0.1, [0.4, 0.8], 0)):
        verdicts = make_verdicts({"team": result(arms["team"], mean, rewards)}, [], 0.02)
        assert sum("NO EPISODE COUNTS AS RIGHT" in verdict for verdict in verdicts) == count


@pytest.mark.slow
def test_the_card_of_a_team_has_the_report_once(reported):
    experiment, folder = reported
    card = folder / "runs" / "team-0" / "README.md"
    for _ in range(2):
        text = card.read_text()
        assert text.count("## Is the team worth it?") == 1 and "| the team, untrained |" in text
        write_report(report(experiment, str(folder), seeds=[0], arms=["untrained"]), folder)
    assert result_of(folder, "team-0")["rewards_differ"] is True


# ---- Planted teams ----


@pytest.mark.slow
def test_simulated_reports_cover_the_true_difference(model_folder, tmp_path):
    """Intervals and verdicts of 40 reports of 3 seeds and 50 questions, whose true difference is 0.15."""
    experiment = make_experiment(model_folder, tmp_path / "unused")
    arms = make_arms(experiment, ["solo"])
    draws, covered, verdicts, widths = np.random.default_rng(1), 0, [], []
    for number in range(40):
        difficulty = draws.normal(0, 0.15, 50)
        for arm, mean in (("team", 0.6), ("solo", 0.45)):
            for seed in range(3):
                folder = tmp_path / str(number) / f"{arm}-{seed}"
                right = draws.random(50) < (mean + difficulty + draws.normal(0, 0.06)).clip(0, 1)
                rows = [{"question": f"{q:03}", "sample": 0, "right": float(hit)} for q, hit in enumerate(right)]
                write_samples(folder, rows, "end", number, seed)
                (folder / "result.json").write_text(json.dumps({"tokens": 1, "seconds": 1, "curve": []}))
        comparison = compare(experiment, arms, tmp_path / str(number), (0, 1, 2), margin=0.02)
        difference = comparison["solo"].difference
        covered += difference.low <= 0.15 <= difference.high
        widths.append(difference.high - difference.low)
        verdicts += comparison.verdicts
    assert covered >= 36 and np.median(widths) < 0.6
    assert len(verdicts) == 40 and not any("as good as" in verdict or "is worse" in verdict for verdict in verdicts)
    assert any("is better than" in verdict for verdict in verdicts)


class Planted(Workflow):
    """The other agents ignore the poet. The message of the meddler replaces the reasoner's steps."""

    async def run(self, episode):
        steps = await episode.turn("reasoner")
        poem = await episode.turn("poet", sees=[])
        other = await episode.turn("meddler", sees=[])
        episode.answer = await episode.turn("actor", sees=[steps, poem, other])


def believing(agent, prompt, seen):
    """A view that shows the meddler's message as the reasoner's steps."""
    turns = {turn.agent: turn for turn in seen if isinstance(turn, Turn)}
    meddler = turns.get("meddler")
    if meddler is not None:
        text = meddler.raw_text or turns["reasoner"].raw_text
        seen = [dataclasses.replace(turns["reasoner"], raw_text=text)]
    return team_view(agent, prompt, seen)


def lie(messages):
    return "1+1=9"


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_planted_agents_are_found(tmp_path, seed):
    reasoner, actor = tiny_agents()
    poet = AgentSpec("poet", trainable=False, max_completion_length=4)
    experiment = make_experiment(
        tiny_team_model(), tmp_path / "unused", agents=[reasoner, poet, AgentSpec("meddler", reply=lie), actor],
        questions=200, workflow=Planted(), options={"view": believing}, settings={"max_steps": 1, "seed": seed},
    )  # fmt: skip
    comparison = report(experiment, str(tmp_path), seeds=[seed], arms=["emptied:poet", "emptied:meddler"])
    verdicts = [verdict for verdict in comparison.verdicts if verdict.startswith("What ")]
    assert verdicts[0].startswith("What poet says is useless"), comparison.verdicts
    assert verdicts[1].startswith("What meddler says is harmful"), comparison.verdicts


@pytest.mark.slow
def test_the_reasoner_of_the_embedded_team_is_useful(tmp_path):
    """Without the reasoner's steps, the actor has nothing to read the answer from."""
    experiment = make_experiment(tiny_team_model(), tmp_path / "unused", questions=200, settings={"max_steps": 1})
    comparison = report(experiment, str(tmp_path), seeds=[0], arms=["emptied:reasoner"])
    assert comparison["emptied:reasoner"].accuracy.mean <= 0.03 and comparison["team"].accuracy.mean > 0.3
    assert any(verdict.startswith("What reasoner says is useful") for verdict in comparison.verdicts)


def test_fields_that_another_version_did_not_record_are_no_difference():
    saved = {"args.learning_rate": 0.1, "args.ddp_timeout": 1800, "model": "a", "agents": ["x"]}
    present = {"args.learning_rate": 0.2, "args.show_reasoning": False, "model": "a", "solo": 1}
    assert differences(saved, present) == [
        "agents was ['x'], is None", "args.learning_rate was 0.1, is 0.2", "solo was None, is 1",
    ]  # fmt: skip
