"""How much a GPU has to launch: passes of a step, kernels of a token, and graphs that are used again."""

import sys
from pathlib import Path

from marft_trl import AgentSpec
from marft_trl.config.team_setup import Sampling
from marft_trl.learning.batching import MicroBatcher
from marft_trl.seams.generation import TrlEngine
from marft_trl.seams.lora_layers import DecodingLayers
from marft_trl.shared_prefix import decoding as steps
from marft_trl.shared_prefix.decoding import FixedLayer

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import BitsAndBytesConfig

from .families import FAMILIES, family_model
from .helpers import calling, shake, team_trainer, weights


sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
import launches


def test_passes_do_not_depend_on_how_a_batch_is_split():
    whole, split = (launches.passes_of_a_step(launches.make("duo", *parts)) for parts in ((16, 1), (4, 4)))
    assert split == whole
    assert whole["backward"] == 2  # one for each agent


GAE = {"advantage": "gae", "critic": "shared", "level": "token"}
CASES = [
    {"loss_type": "bnpo", "beta": 0.1, "num_iterations": 2},
    {"steps_per_generation": 1, "entropy_coef": 0.01, "agent_weight": "equal"},  # a step has rows of several batches
    {**GAE, "critic": "per_agent", "beta": 0.1},
]
SLOW_CASES = [
    {"loss_type": "grpo", "num_iterations": 2, "target_kl": 0.02},
    {"loss_type": "dr_grpo", "steps_per_generation": 1, "num_iterations": 2},  # a step has the same rows twice
    {"update_order": "sequential", "steps_per_generation": 2, "loss_type": "dapo"},
    {"top_entropy_quantile": 0.5},
    {**GAE, "steps_per_generation": 1, "num_iterations": 2},
]


@pytest.mark.parametrize(
    "settings", [*CASES, *(pytest.param(case, marks=pytest.mark.slow) for case in SLOW_CASES)], ids=str
)
def test_slices_that_go_through_together_teach_the_same(settings, model_folder, tmp_path, monkeypatch):
    found = []
    for joins in (False, True):
        if not joins:
            monkeypatch.setattr(MicroBatcher, "joins_slices", False)
        common = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "optim": "sgd"}
        common |= {"max_grad_norm": 0.0, "learning_rate": 0.5, "lr_scheduler_type": "constant"}
        rate = {"critic_learning_rate": 0.05} if "critic" in settings else {}
        trainer = team_trainer(model_folder, tmp_path, settings={**common, **rate, **settings})
        before = weights(trainer)
        trainer.train()
        change = {name: its - before[name] for name, its in weights(trainer).items()}
        found.append((change, [entry for entry in trainer.state.log_history if "loss" in entry]))
        monkeypatch.undo()
    (apart, logs), (together, others) = found
    assert max(its.abs().max() for its in apart.values()) > 1e-3
    torch.testing.assert_close(together, apart, atol=2e-5, rtol=1e-3)
    assert len(logs) == len(others) == 2
    for one, other in zip(logs, others, strict=True):
        assert one.keys() == other.keys()
        for name in (name for name in one if "time" not in name and "second" not in name):
            assert other[name] == pytest.approx(one[name], rel=2e-3, abs=1e-5, nan_ok=True), name


def test_a_layer_launches_few_kernels_for_a_token():
    assert len(launches.kernels_of_a_layer()) <= 45


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_for_decoding_compute_what_the_layers_do(family):
    model = family_model(family)
    ids = torch.arange(3, 39).view(4, 9)
    layers = DecodingLayers(lambda: model)
    with torch.no_grad():
        expected = model(input_ids=ids).logits
        with layers.on() as key:
            found = model(input_ids=ids).logits
            with torch.enable_grad():  # as another thread that trains
                trained = model(input_ids=ids).logits
        assert torch.equal(model(input_ids=ids).logits, expected)  # nothing is left behind
        assert torch.equal(trained, expected) and trained.requires_grad
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    assert key is not None


def bfloat16_model(tokens=300):
    """With three adapters that do something, and logits of a trained model's size."""
    torch.manual_seed(0)
    base = launches.tiny_model(tokens, num_hidden_layers=3).to(torch.bfloat16)
    base.model.norm.weight.data *= 4
    # As PEFT does it, adapters stay in float32
    model = get_peft_model(base, LoraConfig(r=8, lora_alpha=12, target_modules="all-linear"), adapter_name="one")
    for name in ("two", "dora"):
        kind = {"use_dora": True} if name == "dora" else {}
        model.add_adapter(name, LoraConfig(r=4, lora_alpha=20, target_modules=["q_proj", "v_proj", "up_proj"], **kind))
    shake(model, 0.02)
    return model.eval()


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("adapter", ["one", "two"])
def test_log_probabilities_of_a_half_precision_base_have_no_bias(adapter, autocast):
    """Against a scoring pass: the ordinary layers are as far from it as those for decoding."""
    model = bfloat16_model()
    model.set_adapter(adapter)
    ids = torch.randint(300, (32, 40), generator=torch.Generator().manual_seed(0))
    layers, found = DecodingLayers(lambda: model), {}

    def logps(model):
        logits = model(input_ids=ids[:, :-1]).logits.float()
        return logits.log_softmax(-1).gather(2, ids[:, 1:, None]).squeeze(2)

    with torch.no_grad():
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            found["ordinary"] = logps(model)
            with layers.on():
                found["decoding"] = logps(model)
                norms = [module for name, module in model.named_modules() if name.endswith("input_layernorm")]
                dtypes = {norm(torch.ones(1, 128, dtype=torch.bfloat16)).dtype for norm in norms}
        assert dtypes == {torch.bfloat16}
        exact = logps(model.float())
    assert exact.std() > 0.1
    gaps = {name: its - exact for name, its in found.items()}
    assert gaps["decoding"].std() < 1.2 * gaps["ordinary"].std() < 0.02
    assert (found["decoding"] - found["ordinary"]).std() < 0.015
    for gap in gaps.values():
        assert gap.mean().abs() < 4 * gap.std() / gap.numel() ** 0.5


def test_layers_that_cannot_be_computed_otherwise_stay():
    model = bfloat16_model()
    ids, layers = torch.arange(20).view(2, 10), DecodingLayers(lambda: model)
    model.set_adapter("dora")
    with torch.no_grad():
        expected = model(input_ids=ids).logits
        with layers.on() as key:
            assert key is None
            torch.testing.assert_close(model(input_ids=ids).logits, expected, atol=0.05, rtol=0.05)
        with model.disable_adapter(), layers.on() as without:
            assert without is not None and without[0] == ""
            model.get_base_model().model.layers[0].mlp.up_proj.weight.data = torch.ones(384, 128).bfloat16()
        with model.disable_adapter(), layers.on() as other:
            assert other != without  # a graph of weights that are elsewhere is not used again
        model.add_adapter("three", LoraConfig(r=4, target_modules=["q_proj", "embed_tokens"]))
        model.set_adapter("three")
        with layers.on() as key:  # an adapter of embeddings has no graph that another could replay
            assert key is None


def test_a_batch_that_does_not_fit_leaves_room_for_a_smaller_one(model_folder, tmp_path, monkeypatch):
    answers, begin = greedy(static_team(model_folder, tmp_path)), FixedLayer._begin

    def full(layer, keys, values):
        if layer._most > 4:
            raise torch.OutOfMemoryError("out of memory.")
        begin(layer, keys, values)

    monkeypatch.setattr(FixedLayer, "_begin", full)
    with pytest.raises(torch.OutOfMemoryError):
        answers(["ann"] * 8, [[5, 6, 7]] * 8)
    assert len(answers(["ann"] * 4, [[5, 6, 7]] * 4)) == 4


@pytest.mark.parametrize("settings", [{}, {"advantage": "gae", "critic": "shared"}], ids=str)
def test_a_step_that_was_left_is_forgotten(settings, model_folder, tmp_path):
    """Its slices would be trained on in the next one."""
    calls, slices = [], []

    def reward(completions, **kwargs):
        calls.append(1)
        if len(calls) == 2:  # in the second half of the step
            raise KeyboardInterrupt
        return [float(index % 3) for index in range(len(completions))]

    common = {"gradient_accumulation_steps": 2, "steps_per_generation": 1, "max_steps": 1}
    trainer = team_trainer(model_folder, tmp_path, settings=common | settings, reward_funcs=reward)
    guard = trainer.parts.loss.out_of_memory.guard

    def noting(work, rows, *args):
        slices.append(len(rows))
        return guard(work, rows, *args)

    trainer.parts.loss.out_of_memory.guard = noting
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    trainer.train()
    # Two slices of eight episodes with a row of each agent; without a critic, those with a signal
    assert len(slices) == 1 and slices[0] <= 32 and (not settings or slices == [32])


class Tape(TorchDispatchMode):
    """In place of a graph of CUDA: the operations of a function, on the memory that it was captured with."""

    def __init__(self):
        super().__init__()
        self.taken = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if "_local_scalar_dense" in str(function):
            raise RuntimeError("operation not permitted when stream is capturing")
        result = function(*args, **(kwargs or {}))
        self.taken.append((function, args, kwargs or {}, result))
        return result


def on_tape(run, pool=None):
    with Tape() as tape:
        result = run()

    def replay():
        for function, args, kwargs, then in tape.taken:
            if function.is_view:
                continue
            for old, new in zip(tree_leaves(then), tree_leaves(function(*args, **kwargs)), strict=True):
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)
        return result

    return replay


@pytest.fixture
def tapes(monkeypatch):
    made = []
    monkeypatch.setattr(steps, "find_capture_obstacle", lambda model: None)
    monkeypatch.setattr(steps, "captured", lambda *args, **kwargs: made.append(on_tape(*args, **kwargs)) or made[-1])
    return made


def static_team(model, folder):
    settings = {"cache_implementation": "static", "max_completion_length": 20, "num_iterations": 2}
    return team_trainer(model, folder, agents=[AgentSpec("ann"), AgentSpec("ben")], settings=settings)


def greedy(trainer):
    generate = trainer.parts.runner.generator.generate
    return calling(lambda *args, **kwargs: generate(*args, greedy=True, **kwargs))


def test_graphs_are_used_again_after_the_adapters_have_changed(model_folder, tmp_path, tapes, monkeypatch):
    """Each agent says what it says without graphs, by its present weights, its reference, and with fewer rows."""
    trainer = static_team(model_folder, tmp_path)
    generator, answers = trainer.parts.runner.generator, greedy(trainer)
    prompts, counts, seen = [[5, 6, 7 + row % 3, 8][row % 2 :] for row in range(20)], [], set()
    for turn in range(3):
        shake(trainer.model, 0.2, "lora_")
        for agent in ("ann", "ben"):
            for options in ({}, {"by_reference": True}):
                with monkeypatch.context() as patch:
                    patch.setattr(generator, "keeps_shapes", lambda *args: False)
                    expected = answers([agent] * 20, prompts, **options)
                found = answers([agent] * 20, prompts, **options)
                assert [one.ids for one in found] == [one.ids for one in expected], (turn, agent, options)
                for one, other in zip(found, expected, strict=True):
                    if one.logps is not None:
                        assert one.logps == pytest.approx(other.logps, abs=1e-3)
                seen.add(str([one.ids for one in found]))
        counts.append(len(tapes))
    # The two agents and the base, with all rows and with two smaller numbers of rows
    assert len(seen) > 6 and counts[0] >= 3 and counts[-1] <= 9
    generator.drop_cache()
    answers(["ann"] * 20, prompts)
    assert len(tapes) > counts[-1]


def test_a_graph_of_other_weights_is_not_used(tapes, caplog):
    """Whatever moves weights: the first step of a call is compared with one that was not captured."""
    model = family_model("qwen3")
    store, taken = steps.StepStore(), []
    for _ in range(2):
        fixed = store.start(model, torch.ones(4, 30, dtype=torch.long), torch.full((4,), 1), key="the same")
        fixed.begin(0)
        with torch.no_grad():
            taken.append([fixed.logits(torch.full((4, 1), 7)).clone() for _ in range(8)])
        for parameter in model.parameters():
            parameter.data = parameter.data * 1.5  # at another address
    assert len(tapes) == 1 and taken
    assert "without CUDA graphs: ValueError: the logits of the graph differ" in caplog.text
    assert not torch.equal(taken[0][0], taken[1][0])


def test_memory_is_kept_for_all_that_fits_and_not_for_ever():
    model, store = family_model("qwen3"), steps.StepStore()

    def started(rows, size):
        return store.start(model, torch.ones(rows, size, dtype=torch.long), torch.ones(rows, dtype=torch.long), "key")

    first = started(4, 200)
    assert (first.rows, first.size) == (4, 256)
    assert started(4, 190) is first and started(2, 130) is first  # fewer rows take the first places
    second = started(8, 150)
    assert (second.rows, second.size) == (8, 256) and started(4, 200) is second
    third = started(4, 20)
    assert (third.rows, third.size) == (4, 64)  # a room several times as large costs time
    store.clear()
    assert started(4, 20) is not third


def test_stop_texts_end_generation_at_the_next_look(model_folder, tmp_path, tokenizer, monkeypatch):
    """Not at the largest length: a stop text that the first token completes ends all rows after eight steps."""
    taken, logits = [], steps.FixedSteps.logits
    monkeypatch.setattr(steps.FixedSteps, "logits", lambda its, tokens: (taken.append(1), logits(its, tokens))[1])
    settings = {"cache_implementation": "static", "max_completion_length": 30}
    settings["generation_kwargs"] = {"min_new_tokens": 30}
    everything = [chr(code) for code in range(32, 127)]
    trainer = team_trainer(model_folder, tmp_path, agents=[AgentSpec("ann", stop=everything)], settings=settings)
    greedy(trainer)(["ann"] * 3, [tokenizer("1 + 2")["input_ids"]] * 3)
    assert len(taken) in (8, 16)


def test_a_plan_has_what_captured_decoding_keeps(model_folder, tmp_path, monkeypatch):
    trainer = team_trainer(model_folder, tmp_path)
    plain = trainer.memory_plan()
    monkeypatch.setattr(type(trainer.parts.runner.generator), "keeps_cache", True)
    plan = trainer.memory_plan()
    assert plan.cache == plain.kept == 0 and plan.kept > plain.cache > 0
    most = max(plan.gradients + plan.activations, plan.prefill)
    assert plan.total == plan.base + plan.adapters + plan.optimizer + plan.kept + most


def test_stop_texts_end_turns_of_fixed_steps(model_folder, tmp_path, tokenizer):
    """They are looked for every eighth step, and what follows them is cut off, with its log-probabilities."""
    found = []
    for kind in ("dynamic", "static"):
        agents = [AgentSpec("ann", stop=["1", "+", "3"])]
        settings = {"cache_implementation": kind, "max_completion_length": 30, "num_iterations": 2}
        trainer = team_trainer(model_folder, tmp_path, agents=agents, settings=settings)
        prompts = [tokenizer(f"{row} + {row + 3}")["input_ids"] for row in range(12)]
        found.append(greedy(trainer)(["ann"] * 12, prompts))
    assert [one.ids for one in found[0]] == [one.ids for one in found[1]]
    assert any("1" in tokenizer.decode(one.ids) for one in found[1])


@pytest.mark.parametrize(("kind", "line"), [(None, "replays CUDA"), ("dynamic", "does not use CUDA graphs: `cache_")])
def test_where_steps_are_captured(model_folder, tmp_path, monkeypatch, caplog, kind, line):
    trainer = static_team(model_folder, tmp_path)
    generator, sampling = trainer.parts.runner.generator, Sampling.from_agent(AgentSpec("ann"), trainer.args)
    settings = {"cache_implementation": kind}
    assert not generator.keeps_shapes(settings, sampling, None)
    on_gpu = {"device": torch.device("cuda"), "__getattr__": lambda self, name: getattr(trainer.model, name)}
    monkeypatch.setattr(TrlEngine, "model", type("OnGPU", (), on_gpu)())
    with caplog.at_level("INFO", logger="marft_trl"):
        assert generator.keeps_shapes(settings, sampling, None) == (kind is None)
    assert line in caplog.text


def test_steps_of_a_base_in_4_bits_are_captured(model_folder, tmp_path, tapes, caplog):
    four = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)
    found = []
    for kind in ("dynamic", "static"):
        settings = {"cache_implementation": kind, "model_init_kwargs": {"quantization_config": four}}
        trainer = team_trainer(model_folder, tmp_path, settings=settings | {"max_completion_length": 20})
        torch.manual_seed(0)
        shake(trainer.model, 0.2)
        answers, prompts = greedy(trainer), [[5, 6, 7 + row % 3, 8][row % 2 :] for row in range(10)]
        names = ("reasoner", "actor", "reasoner")
        found.append([[one.ids for one in answers([name] * 10, prompts)] for name in names])
    assert found[0] == found[1] and found[0][0] != found[0][1]
    assert tapes and "without CUDA graphs" not in caplog.text
