"""The examples run as their docstrings say."""

import importlib
import itertools
import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from marft_trl import TeamManifest, Turn, load_adapters
from marft_trl.extras.apps import ExternalApp
from marft_trl.reporting.transcripts import format_turns
from marft_trl.tiny import _demonstrations, questions, tiny_model, tiny_tokenizer, warm_up

import pandas as pd
import pytest
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from .helpers import SIZES, moved_by_training, pooled, team_trainer
from .test_distributed import launch


ROOT = Path(__file__).parent.parent
SAMPLE = ROOT / "tests" / "data" / "gsm8k_sample.jsonl"
MATH_DUO = [
    *("--use_peft", "true", "--lora_r", "4", "--max_steps", "2", "--num_generations", "4"),
    *("--per_device_train_batch_size", "4", "--per_device_eval_batch_size", "8", "--max_completion_length", "8"),
    *("--logging_steps", "1", "--eval_size", "4", "--lora_target_modules", "q_proj", "v_proj", "--report_to", "none"),
    *("--num_generations_eval", "2", "--log_completions", "true"),
]


def run(command, tmp_path, timeout=280):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(tmp_path)}
    options = {"cwd": tmp_path, "env": environment, "timeout": timeout, "capture_output": True, "text": True}
    done = subprocess.run([sys.executable, "-W", "ignore", *command], **options)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def run_example(name, tmp_path, *arguments, before="", model=None):
    """Run the `main` of an example after the code `before`, with `model` instead of the embedded model."""
    code = f"import sys, marft_trl.tiny\nsys.path.insert(0, {str(ROOT / 'examples')!r})\n"
    code += f"marft_trl.tiny.tiny_team_model = lambda steps: {model!r}\n" if model else ""
    code += f"import {name} as example\n{before}\nexample.main()\n"
    return run(["-c", code, *arguments], tmp_path)


# What the quick form of each example prints
QUICK = {
    "harness": r"the same harness on the served team: [\d.]+%",
    "kuhn": r"step   0: exploitability 0\.\d+, of the average 0\.\d+; legal",
    "look_and_solve": r"with a silenced looker +[\d.]+%, and 1 of 24 by chance\n(.*\n)+the saved team answers",
    "mcp_tools": r"the saved team on 12 \* 13: ",
    "math_duo": r"step 2/2  eval .*reasoner: ",
    "play": r"reward of 40 episodes: -?[\d.]+ before, -?[\d.]+ after training",
    "ppo_team": r"step 4/4",
    "preemptible": r"reasoner: \w{16}\nactor: \w{16}\n$",
    "quickstart": r"40 held-out questions",
    "real": r"chain_sum( +[\d.]+ \[[\d.]+, [\d.]+\]){4} +[\d.]+",
    "self_play": r"winnable games of 40 not lost to a perfect player: [\d.]+% before, [\d.]+% after",
    "train_application": r"plain, seed 0, team: right answers +[\d.]+ % -> ",
    "two_models": r"actor: base small-base(.*\n)+the saved team answers",
    "warm_up": r"rejection sampling: \d+ of 32 episodes are right",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", QUICK)
def test_each_example_runs_quickly(name, tmp_path):
    """Everything in a few steps. The saved team that it names loads onto the base that it names."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    output = run([str(ROOT / "examples" / f"{name}.py"), "--quick"], tmp_path)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(f"{name}: {after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime:.0f} s of CPU")
    assert re.search(QUICK[name], output), output[-2000:]
    assert (tmp_path / "marft_trl" / "smollm2").exists() == (name == "kuhn")  # the others need no pretrained model
    places = re.search(r"^saved team: (\S+) \(base: ([^,\s)]+)", output, re.MULTILINE).groups()
    folder, base = (tmp_path / place for place in places)
    agent = next(agent.name for agent in TeamManifest.load(folder).agents if agent.adapter is not None)
    model = (AutoModelForImageTextToText if name == "look_and_solve" else AutoModelForCausalLM).from_pretrained(base)
    assert load_adapters(model, folder, agent=agent).peft_config
    if name == "quickstart":
        assert_report(output, folder)


@pytest.mark.slow
@pytest.mark.parametrize("opponent", ["copies", "perfect"])
def test_self_play_against_others_runs_quickly(tmp_path, opponent):
    script = str(ROOT / "examples" / "self_play.py")
    assert re.search(QUICK["self_play"], run([script, "--quick", "--opponent", opponent], tmp_path))


def test_math_duo_names_a_file_that_is_too_small(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    math_duo = importlib.import_module("math_duo")
    file = tmp_path / "problems.jsonl"
    for rows, error in ((0, r"problems.jsonl` is empty"), (3, r"`--eval_size 100` leaves nothing .* 3 problems")):
        file.write_text('{"prompt": "1 + 1?", "solution": "2"}\n' * rows)
        with pytest.raises(ValueError, match=error):
            math_duo.load_problems(math_duo.ScriptArguments(dataset_file=str(file)))


def test_the_list_of_examples_is_complete():
    """Each script that has a quick form, with what it shows and its running times."""
    scripts = {file.stem for file in (ROOT / "examples").glob("*.py") if "--quick" in file.read_text()}
    assert scripts == set(QUICK)
    rows = re.findall(
        r"^\| \[`(\w+)\.py`\]\((\w+)\.py\) \|", (ROOT / "examples" / "README.md").read_text(), re.MULTILINE
    )
    assert sorted(rows) == [(name, name) for name in sorted(QUICK)]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_math_duo_on_real_records(model_folder, tmp_path, kind):
    data = SAMPLE
    if kind == "parquet":
        data = tmp_path / "problems.parquet"
        pd.read_json(SAMPLE, lines=True).to_parquet(data)
    (tmp_path / "duo.yaml").write_text(
        "learning_rate: 1e-3\nmax_steps: 1\nagents:\n"
        "- {name: planner, system_prompt: Plan., max_completion_length: 4}\n"
        "- {name: solver, system_prompt: Solve.}\n"
    )
    arguments = ["--model_name_or_path", model_folder, "--dataset_file", str(data), "--output_dir", "out", *MATH_DUO]
    output = run([str(ROOT / "examples" / "math_duo.py"), "--config", "duo.yaml", *arguments], tmp_path)
    assert "eval_reward" in output and "planner (sees the prompt" in output
    manifest = TeamManifest.load(tmp_path / "out")
    assert [agent.name for agent in manifest.agents] == ["planner", "solver"]
    assert [agent.max_completion_length for agent in manifest.agents] == [4, None]
    assert len(load_file(tmp_path / "out" / "solver" / "adapter_model.safetensors")) > 0
    assert "eval_agents/solver/reward" in json.loads((tmp_path / "out" / "eval_results.json").read_text())
    table = pd.read_parquet(tmp_path / "out" / "completions" / "completions_00002.parquet")  # the command line wins
    assert list(table["agent"]) == ["planner", "solver"] * (4 + 8)
    assert list(table["mode"]) == ["train"] * 8 + ["eval"] * 16
    assert {"step", "prompt", "completion", "advantage", "episode", "turn", "sees", "accuracy_reward"} <= set(table)


@pytest.mark.slow
@pytest.mark.distributed
def test_math_duo_on_two_processes(model_folder, tmp_path):
    arguments = ["--model_name_or_path", model_folder, "--dataset_file", str(SAMPLE), "--use_cpu", "true"]
    arguments += ["--output_dir", str(tmp_path / "out"), *MATH_DUO]
    launch(2, str(ROOT / "examples" / "math_duo.py"), *arguments, timeout=280)
    assert (tmp_path / "out" / "actor" / "adapter_model.safetensors").exists()
    table = pd.read_parquet(tmp_path / "out" / "completions" / "completions_00002.parquet")
    assert sorted(table["episode"][table["mode"] == "train"].unique()) == list(range(8))  # of both processes


def logged(folder, step) -> set[str]:
    """Names of all metrics that a run in `out` has logged up to a checkpoint."""
    state = json.loads((folder / "out" / f"checkpoint-{step}" / "trainer_state.json").read_text())
    return {name for log in state["log_history"] for name in log}


def run_ppo_team(model_folder, tmp_path, steps, *further):
    arguments = ["--model_name_or_path", model_folder, "--dataset_file", str(SAMPLE), "--output_dir", "out"]
    arguments += ["--max_completion_length", "8", "--max_steps", str(steps), "--logging_steps", "1", "--lora_r", "4"]
    arguments += ["--report_to", "none", "--save_strategy", "steps", "--save_steps", str(steps), *further]
    return run([str(ROOT / "examples" / "ppo_team.py"), *arguments], tmp_path)


@pytest.mark.slow
def test_ppo_team_on_real_records(model_folder, tmp_path):
    further = ["--per_device_train_batch_size", "4", "--critic_warmup_steps", "2", "--critic", "multi_head"]
    output = run_ppo_team(model_folder, tmp_path, 4, *further)
    assert "step 4/4" in output and "planner: " in output
    assert {"critic/explained_variance", "own_reward", "agents/planner/approx_kl"} <= logged(tmp_path, 4)
    heads = load_file(tmp_path / "out" / "_critic" / "value_heads.safetensors")
    assert heads["_critic.weight"].shape == (3, SIZES["hidden_size"])  # the command line wins over the script
    assert (tmp_path / "out" / "_critic" / "adapter_model.safetensors").exists()
    assert [agent.name for agent in TeamManifest.load(tmp_path / "out").agents] == ["planner", "solver", "verifier"]


@pytest.mark.slow
def test_a_preset_takes_the_place_of_the_settings_of_ppo_team(model_folder, tmp_path):
    output = run_ppo_team(model_folder, tmp_path, 1, "--preset", "rloo")
    metrics = logged(tmp_path, 1)
    assert "step 1/1  reward " in output and "reward" in metrics
    assert not any(name.startswith("critic/") or name == "own_reward" for name in metrics)
    assert not (tmp_path / "out" / "_critic").exists()


@pytest.mark.slow
def test_the_same_application_is_trained_on_four_clients(model_folder, tmp_path):
    """They send the same messages through three APIs, so all four runs are the same."""
    options, results = ("--max_steps", "2", "--questions", "8"), []
    for app in ("plain", "langgraph", "agents_sdk", "anthropic"):
        output = run_example("train_application", tmp_path, "--app", app, *options, model=model_folder)
        lines = [line for line in output.splitlines() if "reward" in line or "%" in line]
        results.append([re.sub(r"\d+\.\d s|^\w+, ", "", line) for line in lines])
    assert len(results[0]) >= 5 and "team: right answers" in results[0][-3]
    assert results == [results[0]] * 4


@pytest.mark.slow
@pytest.mark.parametrize("script", ["plain", "on_langgraph", "on_agents_sdk"])
def test_an_application_runs_as_a_program_unmodified(script, model_folder, tmp_path):
    command = f"{sys.executable} {ROOT / 'examples' / 'applications' / script}.py -- {{prompt}}"
    trainer = team_trainer(model_folder, tmp_path, workflow=ExternalApp(command), settings={"max_steps": 1})
    (episode,) = trainer.team.run(["1 + 1 = ?"])
    assert [turn.agent for turn in episode.turns] == ["reasoner", "actor"] and episode.environment.status == 0
    assert episode.environment.output.strip() == episode.turns[1].text.strip()
    assert {name.split(".")[-2] for name in moved_by_training(trainer)} == {"reasoner", "actor"}


def assert_report(output: str, folder: Path) -> tuple[float, float]:
    """Check that a report is complete, and return the team's figures before and after training."""
    share = r"(\d+\.\d) % \( *(\d+\.\d) - *(\d+\.\d)\)"
    rows = re.findall(rf"^(.+?) +{share} +{share}$", output, re.MULTILINE)
    assert [row[0] for row in rows] == [
        *("the team's answer is right", "the reasoner's steps are right", "the actor repeats their result"),
        "right without the reasoner's message",
    ]
    for row in rows:
        assert float(row[2]) <= float(row[1]) <= float(row[3])
    before, after = float(rows[0][1]), float(rows[0][4])
    assert output.count("reasoner (sees the prompt") == 2
    assert float(re.search(r"in a new model: (\S+) %", output)[1]) == after
    assert (folder / "learning_curve.png").read_bytes().startswith(b"\x89PNG")
    assert (folder / "learning_curve.csv").read_text().startswith("step,reward,")
    assert len((ROOT / "examples" / "quickstart.py").read_text().splitlines()) <= 155
    assert {agent.name for agent in TeamManifest.load(folder).agents} == {"reasoner", "actor"}
    return before, after


@pytest.mark.exhaustive
@pytest.mark.timeout(3000)
def test_quickstart_improves_the_team_over_five_seeds(tmp_path):
    script = str(ROOT / "examples" / "quickstart.py")
    build = "from marft_trl.tiny import tiny_team_model; tiny_team_model()"
    run(["-c", build], tmp_path)

    def train(seed):
        output = run([script, "--seed", str(seed), "--output_dir", f"seed{seed}"], tmp_path, timeout=1500)
        return assert_report(output, tmp_path / f"seed{seed}")

    with ThreadPoolExecutor(2) as pool:
        figures = list(pool.map(train, range(5)))
    print("before, after:", figures)
    mean, distance = pooled([after - before for before, after in figures])
    assert mean >= 15 and distance > 3, figures


@pytest.mark.slow
@pytest.mark.parametrize("world", ["guess", "store"])
def test_teams_play_in_the_worlds(tmp_path, world):
    options = ["--world", world, "--max_steps", "1", "--teaching_steps", "5", "--output_dir", "out"]
    output = run([str(ROOT / "examples" / "play.py"), *options], tmp_path)
    assert re.search(r"reward of 400 episodes: -?[\d.]+ before, -?[\d.]+ after training", output)
    names = {"guess": ["guesser"], "store": ["boss", "left", "right"]}[world]
    assert [agent.name for agent in TeamManifest.load(tmp_path / "out").agents] == names


def test_the_store_pays_once_for_each_number(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    store = importlib.import_module("worlds").Store()
    store.reset(apples=3, pears=5)

    def act(left, right):
        return store.step([Turn("left", left, 0), Turn("right", right, 1)])

    assert act("5", "3") == ("left wrong, right wrong", {"left": 0.0, "right": 0.0}, False)
    assert act("3", "3") == ("left done, right wrong", {"left": 0.5, "right": 0.0}, False)
    assert act("3", "None") == ("left done, right wrong", {"left": 0.0, "right": 0.0}, False)
    assert act("9", " 5") == ("left done, right done", {"left": 0.0, "right": 0.5}, True)


def test_teaching_masks_padding_alone():
    """Also if a tokenizer pads with the token that ends messages, as that of SmolLM2."""
    tokenizer, masks = tiny_tokenizer(), []
    tokenizer.pad_token = tokenizer.eos_token
    model, end = tiny_model(len(tokenizer)), tokenizer.eos_token_id
    model.register_forward_pre_hook(lambda _, args, kwargs: masks.append(kwargs["attention_mask"]), with_kwargs=True)
    warm_up(model, tokenizer, steps=1, batch_size=2, rows=iter([([end, 5], [6, end]), ([5], [end])]))
    assert masks[0].tolist() == [[1, 1, 1, 1], [1, 1, 0, 0]]


def test_the_rules_of_nim(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    nim = importlib.import_module("self_play")
    game = nim.Nim()
    assert game.reset(stones=5, first="rival") == "5 stones" and game.whose_turn() == "rival"
    assert game.step([Turn("rival", " 3", 0)]) == ("2 stones", 0.0, False) and game.whose_turn() == "player"
    assert game.step([Turn("player", "3", 1)]) == ("Not a move", {"player": -1.0, "rival": 0.0}, True)
    assert game.step([Turn("player", "2", 1)]) == ("The end", {"player": 1.0, "rival": -1.0}, True)
    say = lambda stones: nim.perfect([{"content": f"9 stones\n[environment]\n{stones} stones"}])  # noqa: E731
    assert [say(stones) for stones in (1, 2, 3, 5, 6, 7, 9)] == ["1", "2", "3", "1", "2", "3", "1"]
    assert say(4) in ("1", "2", "3")
    assert all(row["first"] == "rival" for row in nim.games(50, 0, True) if row["stones"] == 8)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("opponent", ["self", pytest.param("copies", marks=pytest.mark.exhaustive)])
def test_self_play_learns(monkeypatch, tmp_path, opponent):
    """One seed; `benchmarks/learning/nim.py` has more."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    nim = importlib.import_module("self_play")
    model, tokenizer = nim.taught_model(seed=0)
    model.save_pretrained(tmp_path / "base")
    trainer = nim.make_trainer(model, tokenizer, tmp_path / "out", opponent, 0, 40, disable_tqdm=True)

    def share():
        trainer.save_model(str(tmp_path / "team"))
        return nim.share_not_lost(tmp_path / "team", tmp_path / "base", tokenizer, greedy=False)

    before = share()
    trainer.train()
    after = share()
    print(opponent, before, after)
    assert after >= 0.85 and after - before >= 0.2


@pytest.mark.slow
def test_the_tiny_model_is_warmed_up_on_training_questions(tokenizer):
    numbers = re.compile(r"has (\d+) \w+, \w+ (\d+) and \w+ (\d+)")
    prompts = [tokenizer.decode(prompt) for prompt, _ in itertools.islice(_demonstrations(tokenizer, seed=0), 1024)]
    trained = {numbers.search(prompt).groups() for prompt in prompts}
    held_out = {numbers.search(row["prompt"]).groups() for row in questions(20_000, seed=1)}
    assert len(trained) > 100 and trained.isdisjoint(held_out)


@pytest.mark.slow
def test_evaluation_questions_of_the_pretrained_duo_are_not_trained_on(monkeypatch, model_folder):
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    monkeypatch.setattr("torch.set_float32_matmul_precision", lambda precision: None)
    real = importlib.import_module("real")
    monkeypatch.setattr(real, "smollm2", lambda: model_folder)  # the module may have been loaded before
    assert real.letters([{"content": "3 + 5"}]) == real.letters([{"content": "5 + 3"}])
    for family in real.FAMILIES:
        experiment = real.make(family)
        datasets = experiment.eval_dataset, experiment.train_dataset
        evaluated, trained = ({*map(real.letters, dataset["prompt"])} for dataset in datasets)
        assert not evaluated & trained and experiment.questions_in_both() == 0
        assert len({prompt[0]["content"] for prompt in experiment.eval_dataset["prompt"]}) == 64
        rows = experiment.eval_dataset.select(range(8))
        right = [[{"content": f"I say {answer}."}] for answer in rows["answer"]]
        scores = real.number_is_right(right, family=rows["family"], entry=rows["entry"])
        assert scores == [1.0] * 8
    assert real.constant_accuracy(["1", "2", "1", "3"]) == 0.5


def test_transcript_of_a_message_prompt():
    assert "user: How many?" in format_turns([{"role": "user", "content": "How many?"}], [])


@pytest.mark.slow
def test_a_preemptible_run_ends_with_the_same_bits(model_folder, tmp_path):
    """Stopped by a signal and killed; the same command each time."""
    script = [str(ROOT / "examples" / "preemptible.py"), "--model", model_folder, "--max_steps", "24"]
    whole = run([*script, "--output_dir", "whole"], tmp_path)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", *script, "--output_dir", "cut"]
    for number, code, after in ((signal.SIGTERM, 143, 5), (signal.SIGKILL, -9, 10)):
        with subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.DEVNULL) as life:
            while not (tmp_path / "cut" / f"checkpoint-{after}" / "marft_commit.json").exists():
                assert life.poll() is None
                time.sleep(0.02)
            life.send_signal(number)
            assert life.wait() == code
    again = run([*script, "--output_dir", "cut"], tmp_path)
    assert again.splitlines()[-2:] == whole.splitlines()[-2:] and "reasoner: " in again
