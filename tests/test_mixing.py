"""Turns of several agents decoded in one batch have the same tokens as under each adapter alone."""

import contextlib

from marft_trl import AgentSpec
from marft_trl.seams.lora_layers import MixedLora
from marft_trl.tiny import tiny_model
from marft_trl.workflows import Debate

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from .helpers import calling, lora, only_slice, plain_logps, shake, team_trainer


NAMES = ["one", "two", "three", "four", "five"]
OTHERS = {
    "two": LoraConfig(r=2, lora_alpha=8, target_modules=["q_proj", "v_proj"]),
    "three": LoraConfig(r=8, lora_alpha=8, target_modules="all-linear", use_rslora=True),
    "four": LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", rank_pattern={"q_proj": 6}),
}


AGENTS = [
    AgentSpec(name, system_prompt=f"You are {name}.", max_completion_length=6, peft_config=OTHERS.get(name))
    for name in NAMES
]


def make(model, folder, workflow=None, **settings):
    trainer = team_trainer(model, folder, settings=settings, agents=AGENTS, workflow=workflow)
    torch.manual_seed(3)
    shake(trainer.model, 0.3)
    return trainer


def with_other_adapter(config):
    model = get_peft_model(tiny_model(32), lora(), adapter_name="one")
    model.add_adapter("two", config)
    return model


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (lora(4, use_dora=True), "the adapters use a variant of LoRA, such as DoRA"),
        (lora(4, lora_dropout=0.5), "the adapters have different dropout rates"),
        (lora(4, lora_bias=True), "the adapters have biases or are merged"),
    ],
)
def test_loras_of_other_kinds_are_not_mixed(config, reason):
    assert MixedLora.find_obstacle(with_other_adapter(config), ["one", "two"]) == reason


def test_other_passes_in_between_are_an_error():
    """Without the row assignment of its pass, a layer would apply the matrices of other agents."""
    model = with_other_adapter(lora())
    mixed = MixedLora(model)
    with mixed.on():
        mixed.use(["one", "two"])
        with pytest.raises(RuntimeError, match="does not fit the rows of the mixed pass"):
            model(input_ids=torch.zeros(3, 4, dtype=torch.long))
    assert isinstance(model(input_ids=torch.zeros(3, 4, dtype=torch.long)).logits, torch.Tensor)
    assert not any("forward" in vars(module) for module in model.modules() if isinstance(module, nn.Module))


def test_modules_that_are_trained_as_a_whole_are_not_mixed():
    model = get_peft_model(tiny_model(32), lora(modules_to_save=["lm_head"]), adapter_name="one")
    assert MixedLora.find_obstacle(model, ["one"]) == "the adapters have `modules_to_save` or trainable tokens"
    plain = get_peft_model(tiny_model(32), lora(), adapter_name="one")
    assert MixedLora.find_obstacle(plain, ["one"]) is None
    layer = next(module for module in plain.modules() if hasattr(module, "lora_A"))
    layer.forward = layer.forward  # as accelerate's hooks do
    assert MixedLora.find_obstacle(plain, ["one"]) == "another library has hooked the layers"
    assert MixedLora.find_obstacle(tiny_model(32), ["one"]) == "the adapters are not LoRA adapters"


@contextlib.contextmanager
def watched():
    used, inner = [], MixedLora.use

    def noting(self, names):
        used.append(list(names))
        return inner(self, names)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MixedLora, "use", noting)
        yield used


def greedy_turns(trainer):
    generator = trainer.parts.runner.generator
    prompts = trainer.processing_class(["What is 3?", "Say 7", "Count", "What is 3? And more words here"])["input_ids"]
    requests = [(name, ids) for ids in prompts for name in NAMES][:-3]  # agents have different numbers of rows
    return calling(generator.generate)([name for name, _ in requests], [ids for _, ids in requests], greedy=True)


def test_turns_of_several_agents_are_decoded_together(model_folder, tmp_path, monkeypatch):
    """Greedy decoding: the same tokens as under each adapter alone, with rows that end at different times."""
    turn_ids = {}
    for mixed in (True, False):
        if not mixed:
            monkeypatch.setattr(MixedLora, "find_obstacle", lambda model, adapters: "switched off")
        trainer = make(model_folder, tmp_path / str(mixed), max_completion_length=12)
        with watched() as used:
            turn_ids[mixed] = [turn.ids for turn in greedy_turns(trainer)]
        assert bool(used) == mixed
    assert turn_ids[True] == turn_ids[False] and len({tuple(ids) for ids in turn_ids[True]}) > 4


def test_recorded_log_probs_equal_scored_log_probs(model_folder, tmp_path):
    """Log-probabilities of turns that were decoded together, against plain passes under each adapter."""
    trainer = make(model_folder, tmp_path, workflow=Debate(NAMES, rounds=1), num_iterations=2)
    with watched() as used:
        slice_ = only_slice(trainer, [trainer.train_dataset[i // 4] for i in range(8)])
    assert any(set(names) == set(NAMES) for names in used)
    for row in slice_.rows:
        expected = plain_logps(trainer, row).detach()
        torch.testing.assert_close(row.old_per_token_logps, expected, rtol=1e-4, atol=1e-5)


def test_many_rows_of_an_agent_are_decoded_alone(model_folder, tmp_path):
    trainer = make(model_folder, tmp_path)
    with watched() as used:
        calling(trainer.parts.runner.generator.generate)(["one", "two"] * 17, [[5, 6, 7]] * 34)
    assert not used


def test_rows_of_agents_in_any_order_and_number():
    """The three ways of multiplying, against each adapter alone."""
    torch.manual_seed(0)
    # float64, so that rounding is no difference
    model = get_peft_model(tiny_model(32).double(), lora(4), adapter_name="one", autocast_adapter_dtype=False)
    model.add_adapter("two", lora(2))
    model.add_adapter("three", LoraConfig(r=3, target_modules=["q_proj"]))
    shake(model.double(), 0.5)
    mixed, backbone = MixedLora(model), model.get_base_model().base_model
    for names in (["one", "one", "two", "two"], ["two", "one", "one", "three", "two"], ["three", "one"], ["two"] * 3):
        for length in (1, 2, 7):
            ids = torch.randint(3, 32, (len(names), length))
            with mixed.on(), torch.no_grad():
                mixed.use(names)
                hidden_states = backbone(input_ids=ids, use_cache=False).last_hidden_state
            for row, name in enumerate(names):
                model.set_adapter(name)
                with torch.no_grad():
                    alone = backbone(input_ids=ids[row : row + 1], use_cache=False).last_hidden_state
                torch.testing.assert_close(hidden_states[row : row + 1], alone, rtol=1e-9, atol=1e-9)
