"""The fast generation against that of transformers: the same tokens, and the same distribution."""

import functools
import random
import weakref
from types import SimpleNamespace

from marft_trl import AgentSpec
from marft_trl.seams.generation import GraphMemory, captured, find_capture_obstacle, masks_what_comes_later
from marft_trl.shared_prefix import decoding, forward
from marft_trl.shared_prefix.decoding import PreallocatedLayer, Recorder, can_decode, decode

import pytest
import torch
from accelerate import PartialState
from transformers import AutoModelForCausalLM, GenerationConfig

from .families import FAMILIES, VOCABULARY, family_model, ragged_rows
from .helpers import calling, chi_square_deviation, in_turn, sampling_deviation, team_trainer


ENDS = list(range(3, 14))
COMMON = {"pad_token_id": 0, "top_k": 0}


def generate(model, prompts, fast=True, recorder=None, is_fixed=False, padding=0, **settings):
    ids, mask = forward.padded(prompts, "cpu", side="left")
    ids, mask = (torch.nn.functional.pad(tensor, (padding, 0)) for tensor in (ids, mask))
    config = GenerationConfig(**{**COMMON, "eos_token_id": ENDS, "max_new_tokens": 20, **settings})
    assert can_decode(config)
    options = {"custom_generate": functools.partial(decode, recorder=recorder, is_fixed=is_fixed)} if fast else {}
    with torch.no_grad():
        tokens = model.generate(input_ids=ids, attention_mask=mask, generation_config=config, **options)
    return tokens[:, ids.size(1) :]


def noted_sizes(model):
    """The rows and columns of each pass."""
    sizes = []
    model.get_base_model().model.layers[0].register_forward_hook(lambda *args: sizes.append(tuple(args[2].shape[:2])))
    return sizes


@pytest.mark.parametrize(("family", "others_words"), in_turn([(family,) for family in FAMILIES], False, True))
def test_greedy_tokens_are_those_of_transformers(family, others_words):
    model = family_model(family)
    prompts, _ = ragged_rows(int(others_words), others_words)
    penalized = {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2, "min_new_tokens": 4}
    for settings in ({}, penalized) if others_words else ({},):
        expected = generate(model, prompts, fast=False, do_sample=False, **settings)
        assert generate(model, prompts, do_sample=False, **settings).tolist() == expected.tolist()
        fixed = generate(model, prompts, is_fixed=True, do_sample=False, **settings)
        assert fixed[:, : expected.size(1)].tolist() == expected.tolist() and not fixed[:, expected.size(1) :].any()


@pytest.mark.parametrize("prompts", [[[5]], [[5], [5]], [[5], [6, 7, 8]], [[5, 6, 7]] * 3, [[5, 6], [5, 6, 9]]])
def test_short_and_equal_prompts(prompts):
    model = family_model("qwen3")
    expected = generate(model, prompts, fast=False, do_sample=False)
    for is_fixed in (False, True):
        tokens = generate(model, prompts, is_fixed=is_fixed, do_sample=False)
        assert tokens[:, : expected.size(1)].tolist() == expected.tolist()


@pytest.mark.parametrize("others_words", [False, True], ids=["one_prompt", "others_words"])
def test_padding_in_front_of_all_rows_changes_nothing(others_words):
    """As `pad_to_multiple_of` puts it there."""
    model = family_model("qwen3")
    prompts, _ = ragged_rows(int(others_words), others_words)
    tokens = generate(model, prompts, padding=5, do_sample=False)
    assert tokens.tolist() == generate(model, prompts, fast=False, do_sample=False).tolist()


def test_logits_that_are_not_numbers_are_reported():
    model = family_model("qwen3")
    model.get_base_model().lm_head.weight.data.fill_(torch.nan)
    with pytest.raises(ValueError, match="diverged"):
        generate(model, [[5, 6, 7]] * 2, do_sample=True)


def test_a_common_beginning_goes_through_the_model_once():
    model = family_model("qwen3")
    sizes = noted_sizes(model)
    generate(model, [list(range(20, 50))] * 8, do_sample=False, max_new_tokens=1)
    assert sizes == [(1, 29), (8, 1)]


def test_finished_rows_leave_the_batch():
    model = family_model("llama")
    sizes = noted_sizes(model)
    torch.manual_seed(0)
    tokens = generate(model, [[5, 6, 7, 8, 20 + index] for index in range(32)], do_sample=True, max_new_tokens=60)
    steps = [rows for rows, _ in sizes[-tokens.size(1) :]]
    has_ended = torch.isin(tokens, torch.tensor(ENDS))
    useful = [(~has_ended[:, :step].any(dim=1)).sum().item() for step in range(tokens.size(1))]
    assert steps == useful and steps[0] == 32 and steps[-1] < 10


@pytest.mark.parametrize("settings", [{}, {"repetition_penalty": 1.3}], ids=str)
def test_rows_that_move_to_finished_places_give_the_same_tokens(settings):
    model, draw = family_model("qwen3"), random.Random(0)
    prompts = [[draw.randrange(20, VOCABULARY) for _ in range(draw.randint(1, 9))] for _ in range(40)]
    settings = {"do_sample": False, "max_new_tokens": 60, "eos_token_id": list(range(3, 9)), **settings}
    expected = generate(model, prompts, fast=False, **settings)
    lengths = (expected != 0).sum(dim=1)
    assert len(set(lengths.tolist())) > 8 and (lengths[-8:] > lengths[:8].min()).any()  # late rows outlive early ones
    for is_fixed in (False, True):
        tokens = generate(model, prompts, is_fixed=is_fixed, **settings)
        assert tokens[:, : expected.size(1)].tolist() == expected.tolist() and not tokens[:, expected.size(1) :].any()


def steps_taken(monkeypatch, model, **settings):
    """Tokens of steps of fixed shapes, and for each of them the rows and the addresses that it reads and writes."""
    steps = []
    forward_ = decoding.FixedSteps._forward

    def noting(self):
        memory = [self._tokens, self._mask, self._positions, self._place]
        memory += [states for layer in self.cache.layers[:1] for states in (layer.keys, layer.values)]
        steps.append((len(self._tokens), [(tensor.data_ptr(), tensor.shape) for tensor in memory]))
        return forward_(self)

    monkeypatch.setattr(decoding.FixedSteps, "_forward", noting)
    prompts = [[5, 6, 7, 8, 20 + index][index % 3 :] for index in range(40)]
    torch.manual_seed(0)
    return generate(model, prompts, is_fixed=True, max_new_tokens=60, **settings), steps


def test_shapes_and_addresses_stay_until_rows_leave(monkeypatch):
    _, steps = steps_taken(monkeypatch, family_model("llama"), do_sample=True)
    sizes = [count for count, _ in steps]
    assert sizes[0] == 40 and set(sizes) <= {40, *decoding.SIZES} and len(set(sizes)) > 1
    assert sizes == sorted(sizes, reverse=True)
    for count in set(sizes):
        first, *others = [memory for rows, memory in steps if rows == count]
        assert all(memory == first for memory in others)
        assert len(others) % 8 == 7 or count == sizes[-1]  # finished rows are removed every eighth step


def test_masks_what_comes_later_where_attention_takes_a_mask(monkeypatch):
    """FlashAttention would attend to memory that is not written yet."""
    model = family_model("qwen3")
    for kind in ("sdpa", "eager", "flash_attention_2", "flex_attention"):
        monkeypatch.setattr(model.config, "_attn_implementation_internal", kind)
        assert masks_what_comes_later(model) == (kind in ("sdpa", "eager"))
    monkeypatch.setattr(model.config, "_attn_implementation_internal", "sdpa")
    assert steps_taken(monkeypatch, model, do_sample=False)[1]
    monkeypatch.setattr(decoding, "masks_what_comes_later", lambda model: False)
    assert not steps_taken(monkeypatch, model, do_sample=False)[1]


class Graph:
    """Stands in for a captured graph (`captured`): runs the function in the memory that it was captured with."""

    def __init__(self, run, wrong=0.0):
        self.run, self.wrong, self.result, self.replays = run, wrong, run().clone(), 0

    def __call__(self):
        self.replays += 1
        self.result.copy_(self.run() + self.wrong * torch.arange(float(self.result.size(1))))
        return self.result


def with_graphs(monkeypatch, capture):
    monkeypatch.setattr(decoding, "find_capture_obstacle", lambda model: None)
    monkeypatch.setattr(decoding, "captured", capture)


def test_steps_are_replayed_until_rows_leave(monkeypatch):
    model, graphs = family_model("llama"), []
    plain, _ = steps_taken(monkeypatch, model, do_sample=True)
    with_graphs(monkeypatch, lambda run, pool: graphs.append(Graph(run)) or graphs[-1])
    replayed, steps = steps_taken(monkeypatch, model, do_sample=True)
    assert replayed.tolist() == plain.tolist()
    assert len(graphs) >= 2 and sum(graph.replays for graph in graphs) > len(steps) / 3


@pytest.mark.parametrize("problem", ["raises", "differs"])
def test_steps_that_cannot_be_captured_run_without_graphs(monkeypatch, caplog, problem):
    def capture(run, pool):
        if problem == "raises":
            raise RuntimeError("operation not permitted when stream is capturing")
        return Graph(run, wrong=1.0)

    PartialState()  # for the warning
    model = family_model("llama")
    plain, _ = steps_taken(monkeypatch, model, do_sample=False)
    with_graphs(monkeypatch, capture)
    with caplog.at_level("WARNING"):
        tokens, _ = steps_taken(monkeypatch, model, do_sample=False)
    assert tokens.tolist() == plain.tolist()
    why = "stream is capturing" if problem == "raises" else "the logits of the graph differ"
    warnings = [message for message in caplog.messages if "without CUDA graphs" in message]
    assert len(warnings) == 1 and why in warnings[0]


def test_GraphMemory():
    """Graphs of CUDA share memory; elsewhere there are none. `test_captured` runs on a GPU."""
    assert GraphMemory.create(torch.device("cpu")) is None


def test_find_capture_obstacle():
    assert "CUDA graphs need a CUDA device" in find_capture_obstacle(family_model("qwen3"))
    devices = [SimpleNamespace(device=torch.device("cuda", index)) for index in (0, 0, 1)]
    assert find_capture_obstacle(SimpleNamespace(parameters=lambda: devices[:2])) is None
    assert "over several devices" in find_capture_obstacle(SimpleNamespace(parameters=lambda: devices))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_captured():
    tensor = torch.zeros(3, device="cuda")
    run = captured(lambda: tensor * 2 + 1, GraphMemory.create(tensor.device))
    for number in (1.0, 5.0):
        tensor.fill_(number)
        assert run().tolist() == [2 * number + 1] * 3


def test_a_team_samples_with_fixed_steps(model_folder, tmp_path):
    """`cache_implementation="static"`, TRL's name for it."""
    plain, growing = sampled(team_trainer(model_folder, tmp_path))
    static, fixed = sampled(team_trainer(model_folder, tmp_path, settings={"cache_implementation": "static"}))
    assert plain == static and not growing.keywords["is_fixed"] and fixed.keywords["is_fixed"]


def sampled(trainer):
    """Greedy turns, and what they were decoded by."""
    base, used = trainer.model.get_base_model(), []
    generate = base.generate

    def noting(*args, **kwargs):
        used.append(kwargs["custom_generate"])
        return generate(*args, **kwargs)

    base.generate = noting
    answers = calling(functools.partial(trainer.parts.runner.generator.generate, greedy=True))
    return answers(["reasoner"] * 3, [[5, 6, 7], [5, 6], [9]]), *used


@pytest.mark.parametrize(("family", "others_words"), in_turn([("qwen3",), ("gpt2",), ("gemma3_text",)], False, True))
def test_prompts_that_are_filled_in_parts_give_the_same_tokens(family, others_words, monkeypatch):
    model, widths = family_model(family), []
    prompts, _ = ragged_rows(int(others_words), others_words)
    prompts = [*prompts, *prompts[::-1], [5], [5, 6, 7]]
    expected = generate(model, prompts, fast=False, do_sample=False)
    shared = decoding.shared_pass
    monkeypatch.setattr(decoding, "shared_pass", lambda *args: (widths.append(len(args[1])), shared(*args))[1])
    for tokens in (1, 40):
        monkeypatch.setattr(decoding, "PREFILL_TOKENS", tokens)
        widths.clear()
        assert generate(model, prompts, do_sample=False).tolist() == expected.tolist()
        assert max(widths, default=0) < len(prompts)


def test_no_layer_holds_more_than_the_preallocated_memory(monkeypatch):
    """While a cache is filled, at most one other layer has a second copy of keys and values in memory."""
    model, storages = family_model("llama"), []
    update = decoding._Joining.update

    def noting(self, *args, **kwargs):
        joined = update(self, *args, **kwargs)
        storages.append(weakref.ref(joined[0].untyped_storage()))
        assert sum(storage() is not None for storage in storages) <= 2  # of this layer and of the one before it
        return joined

    monkeypatch.setattr(decoding._Joining, "update", noting)
    generate(model, [[*range(20, 50), 5, 6 + index, 7] for index in range(8)], do_sample=False, max_new_tokens=1)
    assert len(storages) == 3


def test_the_last_rows_take_the_places_of_finished_rows():
    layer = PreallocatedLayer(8, 3)
    layer.update(*(torch.arange(8.0).reshape(8, 1, 1, 1) for _ in range(2)))
    place = layer.keys.data_ptr()
    finished = torch.tensor([False, True, False, False, True, False, True, False])
    order, *moves = decoding._leave([], finished, 5)
    layer.keep_rows(5, *moves)
    assert order.tolist() == [0, 5, 2, 3, 7]
    assert layer.keys[:, 0, 0, 0].tolist() == layer.values[:, 0, 0, 0].tolist() == [0.0, 5.0, 2.0, 3.0, 7.0]
    assert layer.keys.data_ptr() == place  # nothing else was copied
    layer.update(*(torch.full((5, 1, 1, 1), 9.0) for _ in range(2)))
    assert layer.keys[:, 0, :2, 0].tolist() == [[0.0, 9.0], [5.0, 9.0], [2.0, 9.0], [3.0, 9.0], [7.0, 9.0]]


def test_a_processor_that_may_know_the_batch_keeps_all_rows():
    model = family_model("llama")
    sizes = noted_sizes(model)
    prompts = [[5, 6, 7, 8, 20 + index] for index in range(32)]
    generate(model, prompts, do_sample=True, exponential_decay_length_penalty=(40, 1.1))
    assert {rows for rows, _ in sizes[1:]} == {32}


@pytest.mark.parametrize(
    ("is_fixed", "settings"),
    [
        (True, {"temperature": 0.8}),
        (False, {"top_k": 12, "temperature": 0.6}),
        (False, {"top_p": 0.9, "temperature": 0.6}),
        (False, {"min_p": 0.05, "repetition_penalty": 1.5}),
    ],
    ids=str,
)
@pytest.mark.parametrize("power", [1.0, 1.2])
def test_samples_follow_the_distribution_of_the_policy(is_fixed, settings, power, monkeypatch):
    """
    Chi-square over 5,000 pairs of tokens against the exact probabilities, with rows that leave. The logits are ten
    times those of the model, which is nearly uniform, so that draws from another power of the probabilities show.
    """
    model = family_model("qwen3")
    base, ends = model.get_base_model(), list(range(3, 40))
    base.model.norm.weight.data *= 10
    draw = decoding.draw
    monkeypatch.setattr(decoding, "draw", lambda probabilities, *draws: draw(probabilities**power, *draws))
    settings = {"do_sample": True, "max_new_tokens": 2, "eos_token_id": ends, **settings}
    prompt = [5, 6, 7, 8, 50]

    def distribution(tokens):
        """Exact, by the processors of transformers on each row's logits."""
        config = GenerationConfig(**{**COMMON, **settings})
        processors = base._get_logits_processor(config, input_ids_seq_length=tokens.size(1))
        with torch.no_grad():
            return processors(tokens, base(input_ids=tokens).logits[:, -1]).softmax(dim=-1)

    first = distribution(torch.tensor([prompt]))[0]
    second = distribution(torch.tensor([[*prompt, token] for token in range(len(first))]))
    goes_on = torch.tensor([token not in ends for token in range(len(first))])
    only_pad = torch.zeros_like(first)
    only_pad[0] = 1.0
    expected = 5_000 * first.unsqueeze(1) * torch.where(goes_on.unsqueeze(1), second, only_pad)
    torch.manual_seed(0)
    drawn = generate(model, [prompt] * 5_000, is_fixed=is_fixed, **settings)
    counts = torch.zeros_like(expected).index_put_((drawn[:, 0], drawn[:, 1]), torch.ones(()), accumulate=True)
    deviation = chi_square_deviation(counts.flatten(), expected.flatten())
    assert abs(deviation) < 4 if power == 1 else deviation > 6


def test_turns_of_a_trainer_follow_the_policy_at_the_agents_temperature(model_folder, tmp_path, monkeypatch):
    agents = [AgentSpec("reasoner", temperature=0.7), AgentSpec("actor")]
    trainer = team_trainer(model_folder, tmp_path, agents=agents, settings={"max_completion_length": 1})
    assert abs(sampling_deviation(trainer)) < 4
    draw = decoding.draw
    monkeypatch.setattr(decoding, "draw", lambda probabilities, *draws: draw(probabilities**1.2, *draws))
    assert sampling_deviation(trainer) > 6


def test_tokens_of_no_probability_are_never_drawn(monkeypatch):
    probabilities = torch.tensor([[0.0, 0.3, 0.0, 0.7, 0.0]]).repeat(20_000, 1)
    torch.manual_seed(0)
    counts = decoding.draw(probabilities).squeeze(1).bincount(minlength=5).tolist()
    assert counts[0] == counts[2] == counts[4] == 0
    monkeypatch.setattr(torch, "rand", torch.zeros)  # the smallest number that is drawn
    assert decoding.draw(probabilities[:1]).tolist() == [[1]]
    assert abs(counts[1] - 6000) < 4 * (20_000 * 0.3 * 0.7) ** 0.5


@pytest.mark.parametrize("is_fixed", [False, True])
def test_recorded_log_probabilities_equal_scored_log_probabilities(is_fixed):
    model = family_model("qwen3", temperature=0.7)
    base = model.get_base_model()
    prompts, _ = ragged_rows(1, others_words=True)
    recorder = Recorder()
    torch.manual_seed(0)
    drawn = generate(model, prompts, is_fixed=is_fixed, recorder=recorder, do_sample=True, temperature=0.7)
    completions = [ids[: 1 + next((i for i, t in enumerate(ids) if t in ENDS), len(ids))] for ids in drawn.tolist()]
    with torch.no_grad():
        hidden = forward.hidden_states(base.base_model, prompts, completions)
        for row, tokens in enumerate(completions):
            logps, _ = forward.score(base, hidden[row, : len(tokens)], torch.tensor(tokens))
            torch.testing.assert_close(recorder.logps[row, : len(tokens)], logps, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("settings", [{"top_p": 0.9}, {"top_k": 3}, {"repetition_penalty": 1.1}], ids=str)
def test_nothing_is_recorded_where_something_else_is_sampled_from(settings):
    recorder = Recorder()
    generate(family_model("qwen3"), [[5, 6, 7]], recorder=recorder, do_sample=True, **settings)
    assert recorder.logps is None


def test_several_updates_need_no_pass_for_old_log_probabilities(model_folder, tmp_path):
    def run(**settings):
        trainer = team_trainer(model_folder, tmp_path, settings={"num_iterations": 2, "max_steps": 2, **settings})
        scored = []
        with_old = trainer.parts.log_probs.with_old

        def note(rows):
            scored.append(sum(row.old_per_token_logps is None for row in rows))
            return with_old(rows)

        trainer.parts.log_probs.with_old = note
        trainer.train()
        ratios = [entry["clip_ratio/region_mean"] for entry in trainer.state.log_history if "loss" in entry]
        rows = [row for slice_ in trainer.parts.state.slices for row in slice_.rows]
        return scored, ratios, rows

    scored, ratios, rows = run()
    assert scored == [0] and ratios[0] == 0 and all(row.old_per_token_logps is not None for row in rows)
    for generation_kwargs in ({"temperature": 0.5}, {"do_sample": False}):
        scored, *_ = run(generation_kwargs=generation_kwargs, max_steps=1)
        assert scored == [16], generation_kwargs


@pytest.mark.parametrize(
    ("settings", "exact"), [({}, True), ({"attention_dropout": 0.1}, False), ({"dtype": "bfloat16"}, False)], ids=str
)
def test_samples_with_dropout_or_low_precision_are_scored_again(model_folder, tmp_path, settings, exact):
    model = AutoModelForCausalLM.from_pretrained(model_folder, **settings)
    trainer = team_trainer(model, tmp_path, settings={"num_iterations": 2})
    assert trainer.parts.runner.generator.records == exact


def test_nothing_of_the_model_s_own_config_turns_fast_decoding_off(model_folder, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    model.generation_config.num_beams = 2
    _, used = sampled(team_trainer(model, tmp_path))
    assert used.func is decoding.decode


@pytest.mark.parametrize(
    "settings",
    [{"num_beams": 2}, {"guidance_scale": 2.0}, {"cache_implementation": "offloaded"}, {"use_cache": False}],
)
def test_unsupported_settings_are_left_to_transformers(settings):
    assert not can_decode(GenerationConfig(**settings))
