"""Steps that do not fit into memory: taken again from their start in smaller micro-batches, with the same result."""

from marft_trl.learning import losses as out_of_memory
from marft_trl.learning.losses import TeamLoss
from marft_trl.system.run_metrics import StepMetrics

import pytest
import torch

from .helpers import lora, moved, team_trainer, weights


class Full:
    """A device whose memory is full: the first passes of a step with more than so many tokens fail."""

    def __init__(self, trainer, at_backward: int, failures: int):
        self.at, self.left, self.passes = at_backward, failures, 0
        self._backward = trainer.accelerator.backward
        trainer.accelerator.backward = self

    def __call__(self, loss, **kwargs):
        self.passes += loss.grad_fn is not None
        if self.passes >= self.at and self.left:
            self.left -= 1
            loss.grad_fn and loss.backward(retain_graph=True)  # what an earlier part of the pass has added
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        self._backward(loss, **kwargs)


SETTINGS = {
    "beta": 0.1,
    "max_steps": 3,
    "max_tokens_per_micro_batch": 2000,
    "gradient_checkpointing": False,
    "logging_steps": 1,
}


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"gradient_accumulation_steps": 2},  # gradients of the first micro-step are there already
        pytest.param({"advantage": "gae", "critic": "shared"}, marks=pytest.mark.slow),
        pytest.param({"loss_type": "grpo", "num_iterations": 2}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_step_that_does_not_fit_is_taken_again_with_the_same_result(
    model_folder, tmp_path, caplog, monkeypatch, settings
):
    counted, join = [], StepMetrics.join

    def noting(self, names, processes):
        rows = {agent: sum(weight for _, weight in its) for (agent, name), its in self._values.items() if name == "kl"}
        counted.append(rows)
        return join(self, names, processes)

    monkeypatch.setattr(StepMetrics, "join", noting)

    def run(at=None):
        counted.clear()
        config = lora(lora_dropout=0.0)
        trainer = team_trainer(model_folder, tmp_path, settings={**SETTINGS, **settings}, peft_config=config)
        full = Full(trainer, at, 1) if at else None
        before = weights(trainer)
        trainer.train()
        logs = [
            {name: value for name, value in entry.items() if "time" not in name and "per_second" not in name}
            for entry in trainer.state.log_history
            if "loss" in entry
        ]
        return trainer, logs, weights(trainer), moved(before, weights(trainer)), (full, list(counted))

    _, logs, plain, has_moved, (_, rows) = run()
    with caplog.at_level("WARNING"):
        trainer, again, smaller, _, (full, rows_again) = run(at=4)
    assert has_moved and not full.left and rows == rows_again and any(rows)
    said = [one for one in caplog.messages if "is retried" in one]
    assert len(said) == 1 and "ran out of memory (CUDA out of memory)" in said[0]
    limit = trainer.parts.batcher.max_tokens
    assert limit < SETTINGS["max_tokens_per_micro_batch"] and f"at most {limit:,} tokens" in said[0]
    for name, weight in plain.items():
        torch.testing.assert_close(smaller[name], weight, rtol=0, atol=2e-6, msg=name)
    for one, other in zip(logs, again, strict=True):  # nothing is counted twice
        names = [name for name in one if "grad_norm" in name or "entropy" in name or "value_loss" in name]
        assert names and all(one[name] == pytest.approx(other[name], rel=1e-3, abs=1e-6) for name in names)


def test_a_step_is_taken_again_with_the_same_random_numbers(model_folder, tmp_path, monkeypatch):
    drawn, parts = [], TeamLoss._loss_terms

    def noting(*args):
        drawn.append(torch.rand(()).item())
        return parts(*args)

    monkeypatch.setattr(TeamLoss, "_loss_terms", noting)

    def draws(failures):
        trainer = team_trainer(model_folder, tmp_path, settings={**SETTINGS, "max_steps": 1})
        full = Full(trainer, 1, failures)
        drawn.clear()
        trainer.train()
        return full, list(drawn)

    _, once = draws(0)
    full, twice = draws(1)
    assert not full.left and twice == once * 2


def test_gradients_are_checkpointed_where_a_single_row_does_not_fit(model_folder, tmp_path, caplog):
    settings = {**SETTINGS, "gradient_checkpointing": None, "max_tokens_per_micro_batch": 1}
    trainer = team_trainer(model_folder, tmp_path, settings=settings)
    Full(trainer, 2, 1)
    with caplog.at_level("WARNING"):
        trainer.train()
    assert trainer.parts.batcher.is_checkpointing and "from now on, gradients are checkpointed" in caplog.text


def test_a_second_failure_ends_the_run_with_the_plan(model_folder, tmp_path, monkeypatch):
    trainer = team_trainer(model_folder, tmp_path, settings=SETTINGS)
    Full(trainer, 2, 2)
    with pytest.raises(RuntimeError, match=r"(?s)Step 1 ran out of memory again .*\nactivations .*\nat once"):
        trainer.train()
    trainer = team_trainer(model_folder, tmp_path, settings=SETTINGS)
    Full(trainer, 2, 1)
    monkeypatch.setattr(type(trainer.parts.processes), "is_base_sharded", True)
    with pytest.raises(RuntimeError, match="cannot be retried: other processes take part"):
        trainer.train()


@pytest.mark.parametrize("checkpointing", [True, False])
def test_the_limit_that_has_fitted_is_kept(model_folder, tmp_path, checkpointing):
    settings = {**SETTINGS, "gradient_checkpointing": checkpointing}
    trainer = team_trainer(model_folder, tmp_path, settings=settings)
    Full(trainer, 2, 1)
    limits, fit = [], trainer.parts.batcher.fit

    def noting(rows):
        fit(rows)
        limits.append(trainer.parts.batcher.max_tokens)

    trainer.parts.batcher.fit = noting
    trainer.train()
    first, *others = limits
    assert first == 2000 and len(others) >= 1 and set(others) == {trainer.parts.batcher.max_tokens} != {2000}


def test_why_a_step_cannot_be_taken_again_is_said(model_folder, tmp_path, monkeypatch):
    settings = {**SETTINGS, "max_tokens_per_micro_batch": 1}
    trainer = team_trainer(model_folder, tmp_path, settings=settings)
    Full(trainer, 2, 1)
    with pytest.raises(RuntimeError, match="and cannot be retried: a single row is too long"):
        trainer.train()
    monkeypatch.setattr(out_of_memory, "_MAX_GRADIENT_COPY_BYTES", 1)
    # Slices that have passes of their own, as those of GRPOTrainer
    settings = {**SETTINGS, "gradient_accumulation_steps": 2, "share_prefixes": False}
    trainer = team_trainer(model_folder, tmp_path, settings=settings)
    Full(trainer, 4, 1)
    with pytest.raises(RuntimeError, match="gradients of earlier micro-steps are too large"):
        trainer.train()
