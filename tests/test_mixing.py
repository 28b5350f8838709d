"""Rows of several agents in one pass: the gradients are those of separate passes."""

import contextlib
import dataclasses

from marft_trl import AgentSpec
from marft_trl.algorithms.rows import MicroBatch, Row
from marft_trl.learning.losses import MixedPass
from marft_trl.seams.lora_layers import MixedLora
from marft_trl.tiny import tiny_model
from marft_trl.workflows import Debate

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import BitsAndBytesConfig

from .helpers import calling, lora, moved, moved_by_training, only_slice, plain_logps, shake, team_trainer, weights


NAMES = ["one", "two", "three", "four", "five"]
OTHERS = {
    "two": LoraConfig(r=2, lora_alpha=8, target_modules=["q_proj", "v_proj"]),
    "three": LoraConfig(r=8, lora_alpha=8, target_modules="all-linear", use_rslora=True),
    "four": LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", rank_pattern={"q_proj": 6}),
}


def agents(names=NAMES, configs=None, **more):
    own = {name: {"peft_config": (configs or {}).get(name), **more.get(name, {})} for name in names}
    return [AgentSpec(n, system_prompt=f"You are {n}.", max_completion_length=6, **its) for n, its in own.items()]


def make(model, folder, team=None, workflow=None, **settings):
    settings = {"gradient_checkpointing": False, "mixed_passes": True, **settings}
    given = {"agents": team or agents(configs=OTHERS), "workflow": workflow}
    trainer = team_trainer(model, folder, settings=settings, **given)
    torch.manual_seed(3)
    shake(trainer.model, 0.3)
    return trainer


def sliced(trainer):
    return only_slice(trainer, [trainer.train_dataset[i // 4] for i in range(8)])


def gradients(trainer, slice_):
    trainer.model.zero_grad()
    loss = trainer.compute_loss(trainer.model, slice_)
    loss.backward()
    found = {n: p.grad.clone() for n, p in trainer.model.named_parameters() if p.grad is not None}
    return loss.item(), found


def passes(trainer):
    counted = []
    backbone = trainer.accelerator.unwrap_model(trainer.model).get_base_model().base_model
    backbone.register_forward_pre_hook(lambda *_: counted.append(1) if torch.is_grad_enabled() else None)
    return counted


def assert_same(one, other):
    assert one.keys() == other.keys() and one
    for name, value in other.items():
        assert (one[name] - value).norm() <= 1e-5 * value.norm() + 1e-9, name


def assert_same_when_apart(trainer, slice_):
    _, mixed = gradients(trainer, slice_)
    kept, trainer.parts.loss.mixing = trainer.parts.loss.mixing, None
    assert_same(mixed, gradients(trainer, slice_)[1])
    trainer.parts.loss.mixing = kept


LONGER = [{"level": "action"}, {"loss_type": "dr_grpo", "temperature": 0.7}]
LONGER += [{"max_tokens_per_micro_batch": 900}, {"agent_weight": "equal"}]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"loss_type": "grpo", "entropy_coef": 0.02, "beta": 0.1},
        *(pytest.param(its, marks=pytest.mark.slow) for its in LONGER),
    ],
    ids=str,
)
def test_gradients_are_those_of_separate_passes(model_folder, tmp_path, settings):
    """Ranks, targets and scalings differ; one agent samples at a temperature of its own."""
    team = agents(configs=OTHERS, five={"temperature": 1.5})
    trainer = make(model_folder, tmp_path, team, **settings)
    counted, slice_ = passes(trainer), sliced(trainer)
    counted.clear()
    loss, mixed = gradients(trainer, slice_)
    few = len(counted)
    trainer.parts.loss.mixing = None
    counted.clear()
    plain_loss, plain = gradients(trainer, slice_)
    assert few < len(counted) and loss == pytest.approx(plain_loss, rel=1e-5, abs=1e-7)
    assert_same(mixed, plain)
    assert all(any(f".{name}." in key for key in mixed) for name in NAMES)


@pytest.mark.slow
def test_metrics_are_those_of_separate_passes(model_folder, tmp_path):
    logs = []
    for mixed in (True, False):
        trainer = make(model_folder, tmp_path / str(mixed), mixed_passes=mixed, num_iterations=2, entropy_coef=0.01)
        trainer.train()
        logs.append([entry for entry in trainer.state.log_history if "loss" in entry])
    for mine, theirs in zip(*logs, strict=True):
        for name, value in theirs.items():
            if "time" not in name and "second" not in name:
                assert mine[name] == pytest.approx(value, rel=1e-3, abs=1e-5), name


def test_frozen_agents_and_the_base_stay_as_they_are(model_folder, tmp_path):
    team = agents(three={"trainable": False})
    trainer = make(model_folder, tmp_path, team, max_steps=1)
    assert {name.split(".")[-2] for name in moved_by_training(trainer)} == set(NAMES) - {"three"}


def test_agents_of_one_adapter_have_passes_of_their_own(model_folder, tmp_path):
    """So that the gradient of each of them can be told apart."""
    both = [AgentSpec(name, adapter="team", max_completion_length=6) for name in ("left", "right")]
    team = [*agents(["one", "two"]), *both]
    workflow = Debate(["one", "two", "left", "right"], rounds=1)  # rows of one length
    trainer = make(model_folder, tmp_path, team, workflow, max_steps=1)
    slice_ = sliced(trainer)
    counted = passes(trainer)
    gradients(trainer, slice_)
    assert len(counted) in (2, 3, 4)  # two groups, each of one or two passes
    assert_same_when_apart(trainer, slice_)
    trainer.train()
    (entry,) = (entry for entry in trainer.state.log_history if "agents/left/grad_share" in entry)
    assert sum(entry[f"agents/{name}/grad_share"] for name in ("one", "two", "left", "right")) == pytest.approx(1)


def test_no_prefix_is_shared_between_adapters(model_folder, tmp_path):
    """All agents see the very same tokens."""
    team = [AgentSpec(name, max_completion_length=6) for name in NAMES]
    trainer = make(model_folder, tmp_path, team, Debate(NAMES, rounds=1))
    slice_ = sliced(trainer)
    assert len({tuple(row.prompt_ids.tolist()) for row in slice_.rows}) == 2
    assert_same_when_apart(trainer, slice_)


def test_dropout_is_applied(model_folder, tmp_path):
    configs = dict.fromkeys(NAMES, lora(4, lora_dropout=0.5))
    trainer = make(model_folder, tmp_path, agents(configs=configs))
    slice_ = sliced(trainer)
    name = next(name for name in weights(trainer) if "lora_A.one" in name)
    assert len({gradients(trainer, slice_)[1][name].norm().item() for _ in range(2)}) == 2


def test_a_4_bit_base(small_model, tmp_path):
    four = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.float32)
    settings = {"model_init_kwargs": {"quantization_config": four}}
    trainer = make(small_model, tmp_path, agents(configs={"two": OTHERS["two"]}), **settings)
    for parameter in trainer.policies.all_parameters():
        # TRL puts adapters of such a base into bfloat16, whose sums depend on their order
        parameter.data = parameter.data.float()
    assert_same_when_apart(trainer, sliced(trainer))


def shaped(adapter, rows, prompt, completion):
    """A micro-batch of rows of these lengths, which have nothing in common."""
    ids = [torch.full((prompt,), number) for number in range(rows)]
    row = Row(agent=adapter, adapter=adapter, prompt_ids=ids[0], completion_ids=torch.zeros(completion).long())
    return MicroBatch(adapter, [dataclasses.replace(row, prompt_ids=its) for its in ids])


class Bounds:
    max_tokens, is_checkpointing = 4096, False


def joined(batches, always=False, **bounds):
    found = MixedPass(None, type("", (Bounds,), bounds)(), always).plan(batches)
    return sorted(len(group) for group in found)


def test_counts_decide_which_micro_batches_share_a_pass():
    """512 tokens of a micro-batch, a quarter of padding, the bound of tokens: by hand, and without a clock."""
    small = [shaped(name, 4, 100, 29) for name in NAMES]  # 4 rows of 128 tokens, the last of which is not read
    assert joined(small) == [5]
    large = [shaped(name, 4, 101, 29) for name in NAMES]  # 516 tokens each
    assert joined(large) == [1] * 5 and joined(large, always=True) == [5]
    assert joined(small, max_tokens=4 * 512) == [1, 4]
    assert joined(small, is_checkpointing=True) == [1] * 5
    uneven = [shaped("one", 4, 59, 2), shaped("two", 4, 99, 2)]  # 800 tokens in place of 640: a quarter more
    assert joined(uneven) == [2] and joined([shaped("one", 4, 58, 2), uneven[1]]) == [1, 1]
    assert joined([small[0], shaped("one", 4, 100, 29)]) == [1, 1]  # rows of one adapter are cut by their own bound


def test_a_large_team_of_small_turns_shares_passes_by_default(model_folder, tmp_path):
    """And trains what it trains where passes are always shared, to the bit."""
    ends = []
    for place, mixed in enumerate((None, True)):
        folder, debate = tmp_path / str(place), Debate(NAMES, rounds=1)
        trainer = make(model_folder, folder, agents(), debate, mixed_passes=mixed, num_iterations=2)
        trainer.train()
        ends.append(weights(trainer))
    assert not moved(*ends)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"team": agents(["solo"])}, "number of trained adapters is 1"),
        ({"gradient_checkpointing": True}, "gradient checkpointing is on"),
        ({"share_prefixes": False}, "forward passes of `GRPOTrainer`"),
        ({"team": agents(configs={"two": lora(4, use_dora=True)})}, "a variant of LoRA"),
        ({"team": agents(configs={"two": lora(4, lora_dropout=0.5)})}, "the adapters have different dropout rates"),
        ({"team": agents(configs={"two": lora(4, lora_bias=True)})}, "adapters have biases"),
    ],
    ids=str,
)
def test_what_cannot_be_mixed_is_said(model_folder, tmp_path, settings, message):
    with pytest.raises(ValueError, match=f"`mixed_passes=True` cannot be used.*{message}"):
        make(model_folder, tmp_path, **settings)


@pytest.mark.parametrize(
    "settings",
    [{"team": agents(["one", "two", "three"])}, {"mixed_passes": False}, {"gradient_checkpointing": True}],
    ids=str,
)
def test_where_passes_are_not_mixed(model_folder, tmp_path, settings):
    trainer = make(model_folder, tmp_path, **{"mixed_passes": None, **settings}, max_steps=1)
    assert trainer.parts.loss.mixing is None


def test_other_passes_in_between_are_an_error():
    """A layer that is not given the rows of its pass would multiply them with the matrices of others."""
    model = get_peft_model(tiny_model(32), lora(), adapter_name="one")
    model.add_adapter("two", lora())
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
    asked = [(name, ids) for ids in prompts for name in NAMES][:-3]  # not equally many rows of each
    return calling(generator.generate)([name for name, _ in asked], [ids for _, ids in asked], greedy=True)


def test_turns_of_several_agents_are_decoded_together(model_folder, tmp_path):
    """Greedy decoding: the same tokens as under each adapter alone, with rows that end at different times."""
    found = {}
    for mixed in (True, False):
        trainer = make(model_folder, tmp_path / str(mixed), mixed_passes=mixed, max_completion_length=12)
        with watched() as used:
            found[mixed] = [one.ids for one in greedy_turns(trainer)]
        assert bool(used) == mixed
    assert found[True] == found[False] and len({tuple(ids) for ids in found[True]}) > 4


def test_what_generation_records_is_what_is_scored(model_folder, tmp_path):
    """Log-probabilities of turns that were decoded together, against plain passes under each adapter."""
    settings = {"num_iterations": 2, "mixed_passes": None}
    trainer = make(model_folder, tmp_path, workflow=Debate(NAMES, rounds=1), **settings)
    with watched() as used:
        slice_ = sliced(trainer)
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
                found = backbone(input_ids=ids, use_cache=False).last_hidden_state
            for row, name in enumerate(names):
                model.set_adapter(name)
                with torch.no_grad():
                    alone = backbone(input_ids=ids[row : row + 1], use_cache=False).last_hidden_state
                torch.testing.assert_close(found[row : row + 1], alone, rtol=1e-9, atol=1e-9)
