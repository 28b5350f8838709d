"""Teams that train on turns of a server without a model: failures, checkpoints and what runs beside training."""

import math
import random
import threading

import pytest
from transformers import TrainerCallback

from marft_trl import Workflow
from marft_trl.engine.replicas import EngineDownError

from .helpers import StopAt, began_at, moved, team_trainer, weights
from .vllm_server import as_text, fake_servers, turn


@pytest.fixture
def server(tokenizer):
    with fake_servers() as (one,):
        # As an untrained model: all tokens are about as likely, and more so at a high temperature
        flat = -math.log(len(tokenizer))
        one.logps = lambda adapter, ids, temperature: {5: flat if temperature > 1 else flat + 0.5}
        one.fault = lambda body: as_text(turn({**body, "model": ""}))  # names of adapters are other ones in each run
        yield one


def served(model, folder, server, *, settings=None, **arguments):
    given = {
        "use_vllm": True,
        "vllm_server_base_url": server.url,
        "vllm_server_timeout": 2.0,
        "fidelity_tolerance": 1e9,  # its tokens are no model's
        "vllm_importance_sampling_mode": "token_truncate",
        "max_steps": 4,
        "save_strategy": "steps",
        "save_steps": 50,
    }
    return team_trainer(model, folder, settings={**given, **(settings or {})}, **arguments)


class Drawing(Workflow):
    """Two turns, and a reward that is drawn between them."""

    earns = True

    def __init__(self, log):
        self._log = log

    async def run(self, episode):
        await episode.turn("reasoner")
        drawn = random.random()
        self._log.append(drawn)
        turn = await episode.turn("actor")
        episode.earn(turn, drawn)


def test_a_server_that_stays_away_ends_the_run_after_a_checkpoint_of_the_last_step(model_folder, tmp_path, server):
    """And the run that goes on from it is the one whose server stayed."""
    whole = served(model_folder, tmp_path / "whole", server)
    whole.train()

    class Dies(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 2:
                server.stop()

    cut = served(model_folder, tmp_path / "cut", server, callbacks=[Dies()])
    try:
        with pytest.raises(EngineDownError, match=f"No vLLM server has worked for 2 seconds.*{server.url}") as error:
            cut.train()
    finally:
        server.start()
    assert any("checkpoint-2" in note for note in getattr(error.value, "__notes__", ["checkpoint-2"]))
    again = served(model_folder, tmp_path / "cut", server)
    again.train(resume_from_checkpoint=True)
    assert began_at(again) == 2 and not moved(weights(whole), weights(again))


@pytest.mark.parametrize("staleness", [0, 1])
def test_checkpoints_change_nothing_while_rollouts_go_on(model_folder, tmp_path, server, staleness):
    """Random states of users' code are saved and put back while episodes of the next batch draw from their own."""
    server.delay = lambda body: 0.005 * (body["seed"] % 7)

    def train(name, **settings):
        log = []
        given = {"max_staleness": staleness, **settings}
        trainer = served(model_folder, tmp_path / name, server, settings=given, workflow=Drawing(log))
        trainer.train()
        return weights(trainer), log

    plain, drawn = train("plain")
    saved, drawn_too = train("saved", save_steps=1)
    assert set(drawn) <= set(drawn_too) and len(set(drawn)) > 32  # a checkpoint rehearses the workflow
    assert not moved(plain, saved)


def test_a_run_that_ends_early_leaves_no_thread_and_no_adapter(model_folder, tmp_path, server):
    server.delay = lambda body: 0.02
    trainer = served(model_folder, tmp_path, server, settings={"max_staleness": 2}, callbacks=[StopAt(1)])
    trainer.train()
    assert not [thread for thread in threading.enumerate() if thread.name == "marft-rollouts"]
    assert not server.loaded
