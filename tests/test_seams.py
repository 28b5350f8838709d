"""What we override, call or rely on in TRL and transformers: the next version is one red test and not a mystery."""

import inspect

import pytest
import transformers
import trl
from transformers import Trainer
from trl import GRPOTrainer

from marft_trl import MARFTTrainer


PARAMETERS = {
    (GRPOTrainer, "_prepare_inputs"): ["self", "generation_batch"],
    (GRPOTrainer, "_generate_and_score_completions"): ["self", "inputs"],
    (GRPOTrainer, "_generate_single_turn"): [
        *("self", "prompt_ids", "images", "multimodal_fields", "num_generations", "has_tool_images"),
    ],
    (GRPOTrainer, "_tokenize_prompts"): ["self", "prompts"],
    (GRPOTrainer, "_calculate_rewards"): ["self", "inputs", "prompts", "completions", "completion_ids_list"],
    (GRPOTrainer, "_compute_loss"): ["self", "model", "inputs"],
    (GRPOTrainer, "compute_loss"): ["self", "model", "inputs", "return_outputs", "num_items_in_batch"],
    (GRPOTrainer, "training_step"): ["self", "model", "inputs", "num_items_in_batch"],
    (GRPOTrainer, "prediction_step"): ["self", "model", "inputs", "prediction_loss_only", "ignore_keys"],
    (GRPOTrainer, "log"): ["self", "logs", "start_time"],
    (GRPOTrainer, "_get_train_sampler"): ["self", "dataset"],
    (GRPOTrainer, "_load_optimizer_and_scheduler"): ["self", "checkpoint"],
    (GRPOTrainer, "create_model_card"): ["self", "model_name", "dataset_name", "tags"],
    (Trainer, "create_optimizer"): ["self", "model"],
    (Trainer, "_clip_grad_norm"): ["self", "model"],
    (Trainer, "_get_grad_norm"): ["self", "model", "grad_norm"],
    (Trainer, "_save"): ["self", "output_dir", "state_dict"],
    (Trainer, "_save_rng_state"): ["self", "output_dir"],
    (Trainer, "_load_from_checkpoint"): ["self", "resume_from_checkpoint", "model"],
    (Trainer, "_load_best_model"): ["self"],
    (Trainer, "_push_from_checkpoint"): ["self", "checkpoint_folder"],
    (Trainer, "_finish_current_push"): ["self"],
}


@pytest.mark.parametrize(("owner", "name"), PARAMETERS, ids=lambda value: getattr(value, "__name__", value))
def test_the_method_has_the_parameters_we_know(owner, name):
    assert list(inspect.signature(getattr(owner, name)).parameters) == PARAMETERS[owner, name]


def test_versions_are_those_that_were_read():
    assert trl.__version__.startswith("1.16.") and transformers.__version__.startswith("5.23.")


def test_shared_arguments_have_the_names_and_the_order_of_grpo_trainer():
    theirs = list(inspect.signature(GRPOTrainer.__init__).parameters)
    ours = list(inspect.signature(MARFTTrainer.__init__).parameters)
    assert ours[: len(theirs)] == theirs
    assert ours[len(theirs) :] == ["agents", "workflow", "critic_peft_config", "view", "eval_metrics", "anonymous"]


def test_the_loss_gathers_only_through_what_is_made_local():
    """Inside a micro-batch no collective may run. These are all that TRL's loss has, or is refused."""
    source = inspect.getsource(GRPOTrainer._compute_loss) + inspect.getsource(GRPOTrainer.get_high_entropy_mask)
    called = set()
    for part in source.split("self.accelerator.")[1:]:
        called.add(part.split("(")[0].split(")")[0].split()[0].rstrip(":,"))
    assert called <= {
        *("gather", "gather_for_metrics", "reduce", "pad_across_processes"),
        *("num_processes", "sync_gradients"),
    }


def test_the_metrics_of_the_loss_are_the_ones_we_join():
    source = inspect.getsource(GRPOTrainer._compute_loss)
    names = {part.split('"')[0] for part in source.split('self._metrics[mode]["')[1:]}
    assert names == {
        *("policy_loss", "entropy_coef", "aux_loss", "kl", "entropy", "cispo_clip_ratio", "vespo/phi_seq_mean"),
        *(f"clip_ratio/{figure}" for figure in ("low_mean", "high_mean", "region_mean", "low_min", "high_max")),
    }
