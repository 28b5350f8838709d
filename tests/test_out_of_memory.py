"""Steps that run out of memory are repeated from the start in smaller micro-batches, with the same result."""

from marft_trl.learning import losses
from marft_trl.learning.losses import TeamLoss
from marft_trl.system.processes import Processes
from marft_trl.system.run_metrics import StepMetrics

import pytest
import torch

from .helpers import logged_steps, lora, moved_by_training, team_trainer, weights


class Full:
    """A device whose memory is full: from backward pass `at_backward` on, `failures` passes fail."""

    def __init__(self, trainer, at_backward: int, failures: int):
        self.at, self.left, self.passes = at_backward, failures, 0
        self._backward = trainer.accelerator.backward
        trainer.accelerator.backward = self

    def __call__(self, loss, **kwargs):
        self.passes += loss.grad_fn is not None
        if self.passes >= self.at and self.left:
            self.left -= 1
            loss.grad_fn and loss.backward(retain_graph=True)  # gradients that the pass added before it failed
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        self._backward(loss, **kwargs)


SETTINGS = {"beta": 0.1, "max_steps": 3, "max_tokens_per_micro_batch": 2000, "gradient_checkpointing": False}


def failing(model, folder, at_backward, failures=1, **settings):
    trainer = team_trainer(model, folder, settings=SETTINGS | settings, peft_config=lora(lora_dropout=0.0))
    return trainer, Full(trainer, at_backward, failures)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        # with gradients of the first micro-step
        pytest.param({"gradient_accumulation_steps": 2}, marks=pytest.mark.slow),
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
        rows = {
            agent: sum(weight for _, weight in values)
            for (agent, name), values in self._values.items()
            if name == "kl"
        }
        counted.append(rows)
        return join(self, names, processes)

    monkeypatch.setattr(StepMetrics, "join", noting)

    def run(at, failures):
        counted.clear()
        trainer, full = failing(model_folder, tmp_path, at, failures, **settings)
        has_moved = moved_by_training(trainer)
        return trainer, logged_steps(trainer), weights(trainer), has_moved, (full, list(counted))

    _, logs, plain, has_moved, (_, rows) = run(4, failures=0)
    with caplog.at_level("WARNING"):
        trainer, again, smaller, _, (full, rows_again) = run(4, failures=1)
    assert has_moved and not full.left and rows == rows_again and any(rows)
    retry_warnings = [message for message in caplog.messages if "is retried" in message]
    assert len(retry_warnings) == 1 and "ran out of memory (CUDA out of memory)" in retry_warnings[0]
    limit = trainer.parts.batcher.max_tokens
    assert limit < SETTINGS["max_tokens_per_micro_batch"] and f"at most {limit:,} tokens" in retry_warnings[0]
    for name, weight in plain.items():
        torch.testing.assert_close(smaller[name], weight, rtol=0, atol=2e-6, msg=name)
    for log, log_again in zip(logs, again, strict=True):  # nothing is counted twice
        names = [name for name in log if "grad_norm" in name or "entropy" in name or "value_loss" in name]
        assert names and all(log[name] == pytest.approx(log_again[name], rel=1e-3, abs=1e-6) for name in names)


def test_a_step_is_taken_again_with_the_same_random_numbers(model_folder, tmp_path, monkeypatch):
    drawn, parts = [], TeamLoss._losses

    def noting(*args):
        drawn.append(torch.rand(()).item())
        return parts(*args)

    monkeypatch.setattr(TeamLoss, "_losses", noting)

    def draws(failures):
        trainer, full = failing(model_folder, tmp_path, 1, failures, max_steps=1)
        drawn.clear()
        trainer.train()
        return full, list(drawn)

    _, once = draws(0)
    full, twice = draws(1)
    assert not full.left and twice == once * 2


@pytest.mark.slow
def test_gradients_are_checkpointed_where_a_single_row_does_not_fit(model_folder, tmp_path, caplog):
    settings = {"gradient_checkpointing": None, "max_tokens_per_micro_batch": 1}
    trainer, _ = failing(model_folder, tmp_path, 2, **settings)
    with caplog.at_level("WARNING"):
        trainer.train()
    assert trainer.parts.passes.is_checkpointing and "from now on, gradients are checkpointed" in caplog.text


def test_a_second_failure_ends_the_run_with_the_plan(model_folder, tmp_path):
    trainer, _ = failing(model_folder, tmp_path, 2, failures=2)
    with pytest.raises(RuntimeError, match=r"(?s)Step 1 ran out of memory again .*\nactivations .*\nat once"):
        trainer.train()


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [True, False])
def test_the_limit_that_has_fitted_is_kept(model_folder, tmp_path, checkpointing):
    trainer, _ = failing(model_folder, tmp_path, 2, gradient_checkpointing=checkpointing)
    limits, fit = [], trainer.parts.batcher.fit

    def noting(rows):
        fit(rows)
        limits.append(trainer.parts.batcher.max_tokens)

    trainer.parts.batcher.fit = noting
    trainer.train()
    first, *others = limits
    assert first == 2000 and len(others) >= 1 and set(others) == {trainer.parts.batcher.max_tokens} != {2000}


def test_the_reason_why_a_step_cannot_be_retried_is_raised(model_folder, tmp_path, monkeypatch):
    # Several micro-steps with separate passes, as in GRPOTrainer
    slices = {"gradient_accumulation_steps": 2, "share_prefixes": False}
    for at, settings, patched, message in (
        (2, {"max_tokens_per_micro_batch": 1}, None, "and cannot be retried: a single row is too long"),
        (2, {}, (Processes, "is_base_sharded", True), "cannot be retried: other processes take part"),
        (4, slices, (losses, "_MAX_GRADIENT_COPY_BYTES", 1), "gradients of earlier micro-steps are too large"),
    ):
        trainer, _ = failing(model_folder, tmp_path, at, **settings)
        with monkeypatch.context() as patch, pytest.raises(RuntimeError, match=message):
            if patched:
                patch.setattr(*patched)
            trainer.train()
