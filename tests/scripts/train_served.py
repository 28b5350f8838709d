"""Trains a team on turns of a vLLM server, and saves its weights: one process or several."""

import os
import sys

from tests.helpers import moved_by_training, team_trainer

from safetensors.torch import save_file


def main(model, folder, url, staleness):
    world = int(os.environ.get("WORLD_SIZE", 1))
    settings = {
        **({"vllm_mode": "colocate"} if url == "colocate" else {"vllm_server_base_url": url}),
        **{"use_vllm": True, "vllm_max_model_length": 512, "max_completion_length": 24, "use_cpu": True},
        **{"max_staleness": int(staleness), "per_device_train_batch_size": 8 // world, "share_prefixes": False},
        **{"optim": "sgd", "learning_rate": 0.1},  # Adam would amplify the rounding of gradients near 0
    }
    trainer = team_trainer(model, folder, settings=settings)
    assert moved_by_training(trainer)
    if trainer.is_world_process_zero():
        tensors = {name: p.detach().clone() for name, p in trainer.model.named_parameters() if "lora_" in name}
        save_file(tensors, os.path.join(folder, "weights.safetensors"))
        log = trainer.state.log_history[-2]
        assert log["sampling/staleness"] == int(staleness), log


if __name__ == "__main__":
    main(*sys.argv[1:])
