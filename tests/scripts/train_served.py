"""Trains a team on turns of a vLLM server, and saves its weights: one process or several."""

import os
import sys

from tests.helpers import moved, team_trainer, weights

from safetensors.torch import save_file


def main(model, folder, url, staleness):
    world = int(os.environ.get("WORLD_SIZE", 1))
    settings = {
        "use_vllm": True,
        **({"vllm_mode": "colocate"} if url == "colocate" else {"vllm_server_base_url": url}),
        "vllm_max_model_length": 512,
        "max_staleness": int(staleness),
        "per_device_train_batch_size": 8 // world,
        "use_cpu": True,
        "max_completion_length": 24,
        "share_prefixes": False,
        **{"optim": "sgd", "learning_rate": 0.1},  # Adam would amplify the rounding of gradients near 0
    }
    trainer = team_trainer(model, folder, settings=settings)
    start = weights(trainer)
    trainer.train()
    assert moved(start, weights(trainer))
    if trainer.is_world_process_zero():
        found = {name: p.detach().clone() for name, p in trainer.model.named_parameters() if "lora_" in name}
        save_file(found, os.path.join(folder, "weights.safetensors"))
        log = trainer.state.log_history[-2]
        assert log["sampling/staleness"] == int(staleness), log


if __name__ == "__main__":
    main(*sys.argv[1:])
