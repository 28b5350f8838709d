"""Output of a run on the terminal: one short line for each log."""

from marft_trl.reporting.progress import LogLine, TeamPrinterCallback, TeamProgressCallback
from marft_trl.tiny import tiny_dataset

import pytest
from transformers import PrinterCallback, ProgressCallback, TrainerCallback

from .helpers import team_trainer


def test_a_line_has_step_reward_change_seconds_and_each_agent():
    line = LogLine(["planner", "solver"])
    agents = {"agents/planner/kl": 0.0123, "agents/planner/completions/mean_length": 12.4, "agents/solver/kl": 0.0}
    logs = {"reward": 0.5, "step_time": 3.14, "loss": 0.1, "agents/planner/reward": 0.5, "agents/solver/reward": 0.5}
    assert line({**logs, **agents}, 3, 100) == (
        "step   3/100  reward 0.500  3.1 s  planner: kl 0.012, length 12  solver: kl 0"
    )
    agent_rewards = {"agents/planner/reward": 0.25, "agents/solver/reward": 0.75}
    assert line({"reward": 0.75, **agent_rewards}, 4, 100) == (
        "step   4/100  reward 0.750 (+0.250)  planner: reward 0.250  solver: reward 0.750"
    )
    assert line({"reward": None}, 5, 100) == "step   5/100  reward -"
    assert line({"reward": 0.5}, 6, 100) == "step   6/100  reward 0.500 (-0.250)"
    assert line({"eval_reward": 0.4, "eval_loss": 0.25, "eval_rewards/f/mean": 1}, 6, 100) == (
        "step   6/100  eval  reward 0.400  loss 0.25"
    )
    functions = {"reward": 0.4, "rewards/right/mean": 0.3, "rewards/form/mean": 1.0, "rewards/form/std": 0.0}
    scored = {"agents/planner/rewards/steps/mean": 0.5, "agents/solver/rewards/steps/mean": float("nan")}
    assert line({**functions, **scored}, 7, 100) == (
        "step   7/100  reward 0.400 (-0.100)  right 0.300  form 1.000  planner: steps 0.500"
    )
    returns = {"agents/planner/return": 0.25, "agents/solver/return": -0.25, "agents/planner/win_rate/solver": 0.625}
    assert line({"reward": 0.0, **agent_rewards, **returns, "agents/planner/win_rate/solver/copy_1": 1.0}, 7, 100) == (
        "step   7/100  reward 0.000 (-0.400)  planner: return 0.250, wins 62%  solver: return -0.250"
    )
    line({"reward": 0.4}, 7, 100)
    four = {f"rewards/{name}/mean": 1.0 for name in "abcd"}
    assert line({"reward": 0.4, **four}, 7, 100) == "step   7/100  reward 0.400 (+0.000)"
    assert line({"eval_hard_reward": 0.1}, 6, 100) == "step   6/100  eval hard  reward 0.100"
    assert line({"eval_reward": 0.4}, 0, 0) == "eval  reward 0.400 (+0.000)"
    assert line({"train_runtime": 61.2, "train_loss": 1.0}, 6, 100) == "step   6/100  done in 61 s"
    assert line({"something": 1}, 6, 100) is None


@pytest.mark.parametrize(("disable_tqdm", "rich"), [(True, False), pytest.param(False, True, marks=pytest.mark.slow)])
def test_a_run_prints_a_line_a_log_and_keeps_all_metrics(
    model_folder, tmp_path, capfd, monkeypatch, disable_tqdm, rich
):
    monkeypatch.setattr("marft_trl.reporting.progress.is_rich_available", lambda: rich)
    settings = {"eval_strategy": "steps", "eval_steps": 1, "num_generations_eval": 1, "beta": 0.1}
    settings |= {"disable_tqdm": disable_tqdm, "log_completions": True, "num_completions_to_print": 1}
    trainer = team_trainer(model_folder, tmp_path, eval_dataset=tiny_dataset(4, seed=1), settings=settings)
    capfd.readouterr()
    trainer.train()
    printed = [line.strip() for line in capfd.readouterr().out.splitlines()]
    lines = [line for line in printed if line.startswith("step ") and "  " in line]
    assert [line.split("  ")[0] for line in lines] == ["step 1/2", "step 1/2", "step 2/2", "step 2/2", "step 2/2"]
    assert all("reasoner: " in line and "kl " in line for line in lines[:1])
    assert max(map(len, lines)) < 119 and not any("{'" in line for line in printed)
    assert "Training reasoner, actor on 1 process (cpu)" in printed
    for step in (1, 2):  # a transcript of training, one of evaluation
        assert len([line for line in printed if f"step {step}, episode 0" in line]) == 2
    assert "clip_ratio/region_mean" in trainer.state.log_history[0]


def test_callbacks_of_the_user_stay(model_folder, tmp_path):
    class Own(ProgressCallback):
        pass

    trainer = team_trainer(model_folder, tmp_path, callbacks=[Own(), TrainerCallback()])
    kinds = [type(callback) for callback in trainer.callback_handler.callbacks]
    assert Own in kinds and TeamPrinterCallback in kinds and PrinterCallback not in kinds
    trainer = team_trainer(model_folder, tmp_path, settings={"disable_tqdm": False})
    kinds = [type(callback) for callback in trainer.callback_handler.callbacks]
    assert TeamProgressCallback in kinds and ProgressCallback not in kinds


def test_training_without_adapters_logs_one_warning(model_folder, tmp_path, caplog):
    team_trainer(model_folder, tmp_path, peft_config=None)
    warnings = [record for record in caplog.records if "agents share ONE policy" in record.message]
    assert len(warnings) == 1 and warnings[0].levelname == "WARNING"
    caplog.clear()
    team_trainer(model_folder, tmp_path)
    assert "ONE policy" not in caplog.text
