"""Recipes: the columns of the datasets, the teams, the grids, and a run of each recipe."""

import functools
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import asdict, fields
from pathlib import Path
from unittest.mock import Mock

from marft_trl import MARFTConfig, TeamManifest
from marft_trl.config.presets import PRESETS
from marft_trl.extras.sandbox import code_reward
from marft_trl.extras.sandbox.jail import JailError
from marft_trl.rewards import math_reward
from marft_trl.runs.run import RunInterrupted
from marft_trl.tiny import tiny_tokenizer
from marft_trl.workflows import rehearse

import pytest
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast
from trl import ModelConfig

from .helpers import eventually
from .test_examples import ROOT, run


RECIPES = ROOT / "examples" / "recipes"


@pytest.fixture
def problems(monkeypatch):
    return load("problems", monkeypatch)


def load(name, monkeypatch):
    monkeypatch.syspath_prepend(str(RECIPES))
    for other in ("problems", "teams", "train"):
        sys.modules.pop(other, None)
    return importlib.import_module(name)


# Rows with the columns of the datasets; the texts are made up.
OF_MATH = {"level": "Level 1", "type": "Algebra"}
MATH = [
    {"problem": "What is $1+1$?", **OF_MATH, "solution": "We get $\\boxed{2}$."},
    {"problem": "Reduce $\\frac24$.", **OF_MATH, "solution": "So \\boxed{\\frac{1}{2}}."},
    {"problem": "No answer.", **OF_MATH, "solution": "It is clear."},
] * 3
GSM8K = [
    {"question": "Ann has 1,000 apples and buys 72. How many?", "answer": "1000+72=<<1000+72=1072>>1072\n#### 1,072"},
    {"question": "How many legs have 2 cats?", "answer": "2*4=8\n#### 8"},
] * 4
DEEPSCALER = [
    {"problem": "Find $x$ with $2x=3$.", "answer": "\\frac{3}{2}", "solution": ""},
    {"problem": "Find the sum.", "answer": "55", "solution": "It is \\boxed{55}."},
    {"problem": "Lost.", "answer": "", "solution": ""},
] * 3


def program(problem, solution, tests, **columns):
    return {"problem": problem, "solutions": [solution], "tests": json.dumps(tests), **columns}


TACO = {"inputs": ["1 2\n", ["3 4", ""]], "outputs": ["3\n", ["7", ""]]}
TACO_CALL = {"fn_name": "add", "inputs": [[1, 2], [3, 4]], "outputs": [[3], [7]]}
PRIME = {"type": "stdin_stdout", "input": "2\n", "output": "4\n"}
PRIME_CALL = {"type": "function_call", "fn_name": "turn", "input": [[1, 2]], "output": [[2, 1]]}
LCB = {"input": '"abc"\n9', "output": "3", "testtype": "functional", "metadata": {"func_name": "count"}}
LCB_STDIN = {"input": "", "output": "yes", "testtype": "stdin", "metadata": {}}
COUNT = "class Solution:\n    def count(self, text: str, most: int) -> int:\n        "
OF_COUNT = {"starter_code": COUNT, "metadata": json.dumps({"func_name": "count"})}
CODE = {
    "taco": program("Add two numbers.", "print(sum(map(int, input().split())))", TACO),
    "taco call": program("Add two numbers in a function.", "def add(a, b): return a + b", TACO_CALL),
    "prime": program("Double a number.", "print(2 * int(input()))", [PRIME]),
    "prime call": program("Reverse a list.", "def turn(x): return x[::-1]", [PRIME_CALL]),
    "lcb": program("Count the characters.", f"{COUNT}return min(len(text), most)", [LCB], **OF_COUNT),
    "lcb in": program("Print yes.", "print('yes')", [LCB_STDIN], starter_code="", metadata="{}"),
}
WRAPPED = {"taco call": True, "prime call": True, "lcb": False}  # whether `[x]` may stand for `x`, in calls


# ---- Problems ----


@pytest.mark.parametrize(
    ("source", "rows", "answers"),
    [
        ("math", MATH, ["2", "\\frac{1}{2}"]),
        ("gsm8k", GSM8K, ["1072", "8"]),
        ("deepscaler", DEEPSCALER, ["\\frac{3}{2}", "55"]),
    ],
)
def test_mathematics_becomes_prompts_and_solutions(problems, tmp_path, capsys, source, rows, answers):
    pytest.importorskip("math_verify")
    dataset = problems.load_problems(source, [write(tmp_path, rows)])
    assert dataset.column_names == ["prompt", "solution"]
    assert dataset["solution"][:2] == answers
    ((message,),) = dataset["prompt"][:1]
    assert message["role"] == "user" and message["content"].endswith("Put the final answer in \\boxed{}.")
    assert f"{len(rows) - len(dataset)} rows without an answer" in capsys.readouterr().out
    assert len(dataset) == len([row for row in rows if "clear" not in str(row) and "Lost" not in str(row)])
    assert math_reward([f"so \\boxed{{{answer}}}" for answer in answers], answers) == [1.0, 1.0]


@pytest.mark.skipif(sys.platform != "linux", reason="the fence is kept by the Linux kernel")
@pytest.mark.parametrize("name", CODE)
def test_programs_become_tests_that_their_solutions_pass(problems, name):
    row = CODE[name]
    problem = problems.read_deepcoder(row)
    solution, wrong = f"```python\n{row['solutions'][0]}\n```", "```python\nprint(17)\ndef add(a, b): return 0\n```"
    assert code_reward([solution, wrong], [problem["tests"]] * 2) == [1.0, 0.0]
    text = problem["prompt"][0]["content"]
    assert ("standard input" in text) == (name in ("taco", "prime", "lcb in"))
    assert ("Begin with this code" in text) == (name == "lcb")
    assert json.loads(problem["tests"]).get("wrapped") == WRAPPED.get(name)


NO_TESTS = [None, "", "not json", "[]", "[1]", "{}", {"inputs": ["a"], "outputs": []}, [{"output": "a"}]]
BAD_CALL = [{"type": "function_call", "fn_name": "f", "input": "not json", "output": "1"}]


@pytest.mark.parametrize("tests", [*NO_TESTS, BAD_CALL], ids=str)
def test_rows_without_usable_tests_are_left_out(problems, tests):
    text = tests if isinstance(tests, str) or tests is None else json.dumps(tests)
    assert problems.read_deepcoder({"problem": "x", "tests": text}) is None


def test_the_longest_tests_are_kept(problems):
    tests = {"inputs": ["1" * length for length in range(1, 40)], "outputs": [str(length) for length in range(1, 40)]}
    longest = problems.as_tests(tests, most=3)
    assert longest["outputs"] == ["39", "38", "37"]


def test_a_source_without_a_usable_row_is_refused(problems, tmp_path):
    with pytest.raises(ValueError, match="None of the 1 rows of 'deepscaler'"):
        problems.load_problems("deepscaler", [write(tmp_path, [{"problem": "x", "answer": "", "solution": ""}])])


def test_files_of_problems_as_trl_has_them_are_taken(problems, tmp_path):
    ready = [{"prompt": "1+1?", "solution": "2"}, {"prompt": [{"role": "user", "content": "x"}], "solution": "3"}]
    for row, source in [(ready[0], "gsm8k"), (ready[1], "deepscaler"), (ready[0], "math")]:
        (problem,) = problems.load_problems(source, [write(tmp_path, [row])])
        content = row["prompt"] if isinstance(row["prompt"], str) else row["prompt"][0]["content"]
        assert problem["prompt"] == [{"role": "user", "content": content}]
        assert problem["solution"] == row["solution"]
    tests = {"inputs": ["1"], "outputs": ["2"]}
    (problem,) = problems.load_problems("deepcoder", [write(tmp_path, [{"prompt": "x", "tests": tests}])])
    assert json.loads(problem["tests"]) == tests
    with pytest.raises(ValueError, match="lacks the columns .* and is no file of prompt and solution either"):
        problems.load_problems("gsm8k", [write(tmp_path, [{"prompt": "x"}])])


def test_no_shipped_setting_cuts_answers_of_its_problems_off():
    for path in [*RECIPES.glob("*.yaml"), ROOT / "examples" / "math_duo.yaml"]:
        assert yaml.safe_load(path.read_text())["max_completion_length"] >= 1024, path


def write(folder, rows):
    path = folder / "problems.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


# ---- Teams ----


def test_teams_of_every_size(monkeypatch):
    teams = load("teams", monkeypatch)
    for profile, sizes in teams.ROLES.items():
        for count in sizes:
            agents = teams.make_team(profile, count, outcome=math_reward)
            assert len(agents) == count and all(agent.reward_funcs for agent in agents)
            roles = [f"the {agent.name} of" if "_" not in agent.name else "a solver of" for agent in agents]
            assert all(role in agent.system_prompt for role, agent in zip(roles, agents, strict=True))
            assert not any(agent.reward_funcs for agent in teams.make_team(profile, count))
    assert {agent.adapter for agent in teams.make_team("math", 3, shared_adapter=True)} == {"team"}
    with pytest.raises(ValueError, match="`num_agents` must be one of 1, 2, 3, 4, got 5"):
        teams.make_team("math", 5)


def test_a_vote_counts_answers_and_a_review_can_approve(monkeypatch):
    teams = load("teams", monkeypatch)
    replies = {"solver_1": "I get \\boxed{5}.", "solver_2": "It is \\boxed{4}.", "solver_3": "So \\boxed{4}"}
    roles = [agent.name for agent in teams.make_team("vote", 3)]
    no_votes = {"solver_1": "So \\boxed{}.", "solver_2": "\\boxed{ }"}
    for change, winner in (({}, 2), ({"solver_2": "It is \\boxed{ 4 }."}, 2), (no_votes, 3)):
        replies.update(change)
        episode = rehearse(teams.make_workflow("voting", "vote", 3), roles, lambda agent, seen: replies[agent])
        assert episode.answer.agent == f"solver_{winner}"
    assert teams.vote_of("gym")("It is <answer>3 4</answer>.") == "3 4" and teams.vote_of("code") is None

    writer, evaluator = teams.make_team("review", 2)
    assert "APPROVED" in evaluator.system_prompt and "answer" in writer.system_prompt
    texts = iter(["\\boxed{3}", "It is 4.", "\\boxed{4}", "APPROVED"])
    review = teams.make_workflow("evaluated", "review", 2)
    episode = rehearse(review, ["writer", "evaluator"], lambda agent, seen: next(texts))
    assert episode.answer.text == "\\boxed{4}" and len(episode.turns) == 4
    for name, needed in teams.NEEDED.items():
        with pytest.raises(ValueError, match=f"needs the team `profile={needed}`, got 'math'"):
            teams.make_workflow(name, "math", 2)
    with pytest.raises(ValueError, match="needs `workflow=evaluated`, got 'chain'"):
        teams.make_workflow("chain", "review", 2)
    assert teams.make_workflow("chain", "review", 1) is None


# ---- Runs ----


TINY = [
    *("--lora_r", "4", "--max_steps", "2", "--per_device_train_batch_size", "4", "--per_device_eval_batch_size", "4"),
    *("--max_completion_length", "8", "--logging_steps", "1", "--report_to", "none", "--eval_size", "2"),
    *("--gradient_accumulation_steps", "1", "--save_strategy", "no", "--num_generations_eval", "1"),
    *("--output_dir", "out", "--steps_per_generation", "1"),
]
ROWS = {"math": MATH, "gsm8k": GSM8K, "deepscaler": DEEPSCALER, "deepcoder": [CODE["taco"], CODE["taco call"]] * 4}
ANONYMOUS = ["--anonymous", "numbered"]
GRID = [
    ("math_duo", []),
    ("gsm8k_duo", ["--num_agents", "4"]),
    ("deepscaler", ["--num_agents", "3", "--critic", "per_agent", *ANONYMOUS, "--shared_adapter", "false"]),
    ("deepcoder", ["--num_agents", "4", "--critic", "multi_head", "--credit", "per_step", "--code_timeout", "2"]),
]


def command(recipe, model_folder, folder, *options):
    settings = yaml.safe_load((RECIPES / f"{recipe}.yaml").read_text())
    file = write(folder, ROWS[settings["problems"]])
    arguments = ["--config", str(RECIPES / f"{recipe}.yaml"), "--model_name_or_path", model_folder, *TINY]
    return [str(RECIPES / "train.py"), *arguments, "--problem_files", file, *options]


@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "options"), GRID, ids=[name for name, _ in GRID])
def test_every_recipe_runs(model_folder, tmp_path, recipe, options):
    output = run(command(recipe, model_folder, tmp_path, *options), tmp_path)
    assert "done in" in output and "eval_reward" in output
    agents = TeamManifest.load(tmp_path / "out").agents
    assert len(agents) == int(dict(zip(options[::2], options[1::2], strict=True)).get("--num_agents", 2))


@pytest.mark.slow
def test_a_dry_run_prints_the_plan(model_folder, tmp_path):
    options = ["--num_agents", "3", "--anonymous", "none", "--dry_run", "true"]
    output = run(command("deepscaler", model_folder, tmp_path, *options), tmp_path)
    assert "planner -> solver\n  solver -> verifier" in output
    assert "3 turns per episode in the rehearsal: planner 1, solver 1, verifier 1" in output
    assert "4 episodes in an optimizer step: 12 training rows" in output
    assert "[agent_1]\n" in output.replace("    ", "").replace("  ", "") and "You are" not in output
    assert "done in" not in output and not (tmp_path / "out" / "planner").exists()


PUBLISHED = {"lora_r": 32, "lora_alpha": 16, "beta": 0.1, "learning_rate": 5e-6, "critic_learning_rate": 5e-6}
PUBLISHED |= {"shared_adapter": True, "credit": "equal"}
PUBLISHED |= {"num_train_epochs": 50, "lr_scheduler_kwargs": {"min_lr_rate": 0.05}}


def test_the_published_settings_are_in_the_files():
    for name in ("math_duo", "gsm8k_duo"):
        settings = yaml.safe_load((RECIPES / f"{name}.yaml").read_text())
        assert settings["preset"] == "marft-a" and PRESETS["marft-a"].settings["num_iterations"] == 5
        assert (settings["lora_r"], settings["lora_alpha"]) == (8, 16)
        assert settings["steps_per_generation"] == 4  # mini-batches
    for name in ("deepscaler", "deepcoder"):
        settings = yaml.safe_load((RECIPES / f"{name}.yaml").read_text())
        assert settings == {**settings, **PUBLISHED}
        assert settings["per_device_train_batch_size"] * settings["gradient_accumulation_steps"] == 256
        assert settings["max_completion_length"] == {"deepscaler": 8192, "deepcoder": 9216}[name]


# ---- Grids ----


@pytest.fixture
def grid(monkeypatch):
    for module in ("grids", "grid"):
        sys.modules.pop(module, None)
    return load("grid", monkeypatch)


def test_cells_have_unique_names_and_known_settings(grid, monkeypatch):
    monkeypatch.setattr(grid.yaml, "safe_load", functools.cache(grid.yaml.safe_load))  # `settings_of` copies it
    cells = grid.cells_of(grid.GRIDS)
    assert len(cells) == sum(len(make()) for make in grid.GRIDS.values()) == 554
    kinds = [cell["kind"] for cell in grid.cells_of(["marft"], "*/math_duo-num_agents_2-*").values()]
    assert kinds == ["untrained", "ppo-a", "ppo-t", "marft-a", "marft-t"]
    train = importlib.import_module("train")
    names = {field.name for kind in (MARFTConfig, ModelConfig, train.RecipeArguments) for field in fields(kind)}
    for cell in cells.values():
        assert (RECIPES / f"{cell['recipe']}.yaml").exists()
        assert set(cell) - {"recipe", "kind"} <= names, cell
        settings = grid.settings_of(cell)
        roles = importlib.import_module("teams")
        workflow = settings.get("workflow", "chain")
        roles.make_workflow(workflow, settings["profile"], settings["num_agents"])  # or it raises
        # Agents of a window of 32,768 tokens; the others have 128k, or turns of at most 5,120 tokens
        if settings["model_name_or_path"] == "Qwen/Qwen2.5-3B-Instruct":
            turns = settings["num_agents"] * (2 if workflow == "orchestrated" else 1)
            assert turns * settings["max_completion_length"] <= 30_000, cell


def test_lengths_follow_the_number_of_agents(grid):
    from grids import length_of

    assert [length_of("deepscaler", count)["max_completion_length"] for count in (2, 3, 4)] == [12288, 8192, 6144]
    assert [length_of("deepcoder", count)["max_completion_length"] for count in (3, 4)] == [9216, 6912]
    assert length_of("deepcoder", 3, turns=6)["max_completion_length"] == 5000 and length_of("math_duo", 2) == {}
    for recipe in ("deepscaler", "deepcoder", "codeforces"):  # the recipes are those of 3 agents
        assert length_of(recipe, 3).items() <= grid.settings_of({"recipe": recipe}).items()


def test_no_two_cells_of_the_first_paper_are_the_same(grid, tmp_path):
    """Settings that a preset already implies do not distinguish two cells."""
    resolved_cells = []
    for cell in grid.cells_of(["marft"]).values():
        preset = {name: value for name, value in cell.items() if name in ("preset", "agent_iteration_interval")}
        resolved = asdict(MARFTConfig(str(tmp_path), use_cpu=True, **preset)) if preset else {}
        named = [cell["recipe"], cell["num_agents"], cell.get("train", True)]
        resolved_cells.append(json.dumps([named, resolved], default=str, sort_keys=True))
    assert len(resolved_cells) == len({*resolved_cells}) == 16


def test_failed_cells_are_repeated_and_other_options_refused(grid, monkeypatch, tmp_path, capsys):
    train, options_of_runs = importlib.import_module("train"), []

    def run(options, resume):
        assert resume  # from the last checkpoint of the cell
        options_of_runs.append(options)
        if "magrpo" in options and len(options_of_runs) < 7:
            raise ValueError("no | luck")
        return {"eval_reward": 0.25}

    monkeypatch.setattr(train, "main", run)

    def grid_of_c3(*further, cells="*"):
        command = ["grid.py", "--grids", "c3", "--cells", cells, "--problems_dir", str(RECIPES / "samples")]
        command += ["--output_dir", str(tmp_path), "--", "--model_name_or_path", str(tmp_path), *further]
        monkeypatch.setattr(sys, "argv", command)
        with pytest.raises(SystemExit) as end:
            grid.main()
        return end.value.code, capsys.readouterr().out

    code, output = grid_of_c3("--max_steps", "3")
    assert code and "4 of 6 cells are done" in output and "magrpo: ValueError: no | luck" in output
    assert (tmp_path / "grid.md").read_text().count("ValueError: no / luck") == 2
    for cells in ("*", "*math-mappo"):  # the rest, then a part, with the results of the others
        code, output = grid_of_c3("--max_steps", "3", cells=cells)
        assert not code and "6 of 6 cells are done" in output and len(options_of_runs) == 8
    assert (tmp_path / "grid.csv").read_text().count(",ok,") == 6
    assert grid_of_c3("--max_steps", "3", cells="nothing")[0] == 2
    code, _ = grid_of_c3("--max_steps", "4")
    assert "further options was ['--model_name_or_path'" in code and "Set another --output_dir" in code
    # Old results of other settings are refused even where the cell is left out
    monkeypatch.setattr(grid.importlib.util, "find_spec", lambda name: None)
    assert "is the run of other settings" in grid_of_c3("--max_steps", "4")[0]
    monkeypatch.undo()
    monkeypatch.setattr(train, "main", run)
    original = grid.settings_of
    monkeypatch.setattr(grid, "settings_of", lambda cell, further=(): original(cell, further) | {"eval_k": [3]})
    assert "is the run of other settings: eval_k was [1], is [3]. Set" in grid_of_c3("--max_steps", "3")[0]
    monkeypatch.setattr(grid, "settings_of", original)
    for file in tmp_path.rglob("result.json"):  # as if they were killed, all but one before a checkpoint
        file.unlink()
    cell = next(tmp_path.rglob("settings.json")).parent
    (cell / "team" / "checkpoint-1").mkdir(parents=True)
    assert f"{cell} is the run of other settings" in grid_of_c3("--max_steps", "4")[0]
    shutil.rmtree(cell)
    assert not grid_of_c3("--max_steps", "4")[0] and len(options_of_runs) == 14


def test_an_interrupted_grid_starts_no_further_cell(grid, monkeypatch, tmp_path):
    stopped = Mock(side_effect=RunInterrupted(signal.SIGTERM, "Training was stopped"))
    monkeypatch.setattr(importlib.import_module("train"), "main", stopped)
    command = ["grid.py", "--grids", "c3", "--problems_dir", str(RECIPES / "samples"), "--output_dir", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", [*command, "--", "--model_name_or_path", str(tmp_path)])
    with pytest.raises(RunInterrupted):
        grid.main()
    assert len([*tmp_path.rglob("settings.json")]) == 1 and not [*tmp_path.rglob("result.json")]


def test_problems_of_all_cells_come_from_the_folder(grid, tmp_path):
    cell, files = {"recipe": "math_duo"}, RECIPES / "samples"
    for further, name in (([], "math"), (["--problems", "gsm8k"], "gsm8k")):
        changes = grid.changes_of(cell, tmp_path, further, files=files)
        assert Path(changes["problem_files"]).stem == name
    (tmp_path / "math.jsonl").write_text("{}")
    records = [grid.record_of(cell, grid.changes_of(cell, tmp_path, [], files=tmp_path), []) for _ in "ab"]
    (tmp_path / "math.jsonl").write_text("[]")
    records.append(grid.record_of(cell, grid.changes_of(cell, tmp_path, [], files=tmp_path), []))
    assert records[0] == records[1] != records[2]


def test_incomplete_tiny_models_are_rewritten(grid, tmp_path, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(PreTrainedTokenizerFast, "save_pretrained", Mock(side_effect=OSError("no space left")))
        with pytest.raises(OSError, match="no space"):
            grid.tiny(tmp_path / "out" / "tiny")
    for _ in "ab":
        folder = grid.tiny(tmp_path / "out" / "tiny")
    assert AutoModelForCausalLM.from_pretrained(folder)
    assert AutoTokenizer.from_pretrained(folder).get_vocab() == tiny_tokenizer().get_vocab()


def test_programs_have_time_to_run(monkeypatch):
    """A batch of programs that all hang is no reason to end a run."""
    train = load("train", monkeypatch)
    for name, seconds in (("deepcoder", 600), ("codeforces", 160)):
        recipe, args, _ = train.parse(["--config", str(RECIPES / f"{name}.yaml"), "--use_cpu", "true"])
        assert train.seconds_of_program(recipe.code_timeout) == seconds
        assert train.seconds_of_programs(args, recipe.code_timeout) == 8 * seconds + 60  # 32 programs, 4 at once
    for path in RECIPES.glob("*.yaml"):
        settings = yaml.safe_load(path.read_text())
        if settings.get("num_train_epochs", 1) >= 50:  # steps of an hour
            assert settings["save_steps"] <= 10, path


@pytest.mark.slow
def test_grids_skip_cells_that_the_machine_cannot_run(grid, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(grid.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(sys, "argv", ["grid.py", "--output_dir", str(tmp_path)])
    with pytest.raises(SystemExit) as end:
        grid.main()
    assert not end.value.code and "0 of 554 cells are done" in capsys.readouterr().out
    table = (tmp_path / "grid.md").read_text()
    for reason in ("math-verify is not installed", "reasoning-gym is not installed", "programs need Linux"):
        assert f"left out: {reason}" in table
    monkeypatch.undo()
    monkeypatch.setattr(grid, "HF_HUB_OFFLINE", True)
    cell, local = {"recipe": "math_duo"}, ["--model_name_or_path", str(tmp_path)]
    assert "no hub for DigitalLearningGmbH/MATH-lighteval" in grid.Runner(tmp_path, local).left_out(cell)
    samples = RECIPES / "samples"
    assert "no hub for Qwen/Qwen2.5-Coder-3B-Instruct" in grid.Runner(tmp_path, [], files=samples).left_out(cell)
    assert grid.Runner(tmp_path, local, files=samples).left_out(cell) is None
    assert grid.Runner(tmp_path, local, files=tmp_path).left_out({"recipe": "planning"}) is None
    assert grid.Runner(tmp_path, [], dry_model="tiny").left_out(cell) is None


def test_a_hub_or_a_fence_that_fails_leaves_cells_out(grid, monkeypatch, tmp_path):
    monkeypatch.setattr(grid, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(grid.HfApi, "repo_info", Mock(side_effect=ConnectionError("no route")))
    runner = grid.Runner(tmp_path, [])
    assert "(ConnectionError) and no --problems_dir" in runner.left_out({"recipe": "math_duo"})
    monkeypatch.setattr(grid, "try_to_load_from_cache", lambda name, file, repo_type: "a file")
    grid.is_out_of_reach.cache_clear()
    assert runner.left_out({"recipe": "math_duo"}) is None
    further = ["--model_name_or_path", "/no", "--problems=countdown", f"--model_name_or_path={tmp_path}"]
    expected = {"model_name_or_path": str(tmp_path), "problems": "countdown"}
    assert grid.sources_of([*further, "--max_steps", "3"]) == expected
    assert grid.lacks_a_fence() is None or sys.platform != "linux"
    grid.lacks_a_fence.cache_clear()
    lacks = Mock(side_effect=JailError("the machine lacks seccomp"))
    monkeypatch.setattr("marft_trl.extras.sandbox.code_reward", lacks)
    assert runner.left_out({"recipe": "deepcoder"}) == "programs cannot be fenced in: the machine lacks seccomp"


def test_codeforces_becomes_programs(problems):
    rows = [json.loads(line) for line in (RECIPES / "samples" / "codeforces.jsonl").read_text().splitlines()]
    problem = problems.read_codeforces(rows[0])
    text = problem["prompt"][0]["content"]
    assert "Add 1 to it" in text and "Input\nOne line" in text and "Output:\n2" in text and "```python" in text
    program = "```python\nprint(int(input()) + 1)\n```"
    assert code_reward([program], [problem["tests"]]) == [1.0]
    assert problems.read_codeforces({"description": "x", "official_tests": []}) is None
    # Several right answers, and programs that read files
    assert problems.read_codeforces({**rows[0], "generated_checker": "def check(): ..."}) is None
    assert problems.read_codeforces({**rows[0], "input_mode": "file"}) is None
    assert problems.read_codeforces({**rows[0], "generated_checker": None, "input_mode": "stdio"}) is not None


@pytest.mark.slow
def test_a_grid_that_was_interrupted_goes_on(tmp_path):
    """Kill a dry run of two small grids and repeat it: finished cells are kept, and the table is complete."""
    command = [
        *(sys.executable, "-W", "ignore", str(RECIPES / "grid.py"), "--grids", "c3", "solver-judge", "--dry_run"),
        *("--output_dir", str(tmp_path / "out"), "--workers", "2"),
    ]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert eventually(lambda: len([*tmp_path.rglob("result.json")]) >= 3, seconds=240)
    done = sorted(tmp_path.rglob("result.json"))
    os.killpg(process.pid, signal.SIGKILL)
    before = {file: file.stat().st_mtime_ns for file in done}
    assert 3 <= len(before) < 11
    rerun = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert rerun.returncode == 0 and "11 of 11 cells are done" in rerun.stdout, rerun.stdout + rerun.stderr[-1000:]
    assert all(file.stat().st_mtime_ns == then for file, then in before.items())
    table = (tmp_path / "out" / "grid.md").read_text()
    assert table.count("| ok |") == 11
