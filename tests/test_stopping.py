"""Only the tokens of a turn decide where it ends: in generation, in cutting, and in what counts as truncated."""

import math

from marft_trl import AgentSpec, Team
from marft_trl.config.team_setup import Sampling
from marft_trl.rollout.transformers_generator import TransformersGenerator
from marft_trl.rollout.turn_reader import StopStringCriterion, StopStrings
from marft_trl.seams.generation import TrlEngine
from marft_trl.tiny import tiny_tokenizer

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from .helpers import calling, in_turn, only_slice, team_trainer


LONGEST = 12


@pytest.fixture(scope="module", params=[(True, True), (True, False), (False, True), (False, False)], ids=str)
def trainer(request, model_folder, tmp_path_factory):
    """A trainer for each way of generating, with the padding token apart from the end-of-sequence token or not."""
    share, is_apart = request.param
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    tokenizer = tiny_tokenizer()
    tokenizer.pad_token = tokenizer.pad_token if is_apart else tokenizer.eos_token
    settings = {"share_prefixes": share, "num_iterations": 2, "max_completion_length": LONGEST}
    arguments = {"processing_class": tokenizer, "agents": [AgentSpec("solo")], "settings": settings}
    trainer = team_trainer(model, tmp_path_factory.mktemp("stops"), **arguments)
    assert (trainer.generation_kwargs["pad_token_id"] == tokenizer.eos_token_id) != is_apart
    return trainer


def generator_with(trainer, stop):
    """A generator whose agent stops at these texts; log-probabilities are kept on the fast path."""
    sampling = Sampling.from_agent(AgentSpec("solo", stop=stop, max_completion_length=LONGEST), trainer.args)
    engine = TrlEngine(trainer, Sampling.from_agent(AgentSpec("solo"), trainer.args).as_generation_kwargs())
    share = trainer.parts.passes.share
    return TransformersGenerator(engine, trainer.policies, {"solo": sampling}, share, records=True)


@settings(max_examples=6)
@given(data=st.data(), seed=st.integers(0, 10**6))
def test_nothing_that_was_not_sampled_is_part_of_a_turn(trainer, data, seed):
    tokenizer = trainer.processing_class
    ids = st.integers(3, len(tokenizer) - 1)
    prompts = data.draw(st.lists(st.lists(ids, min_size=1, max_size=6), min_size=1, max_size=5))
    # Texts that a turn may well hold, and texts that begin at the end of a prompt
    letters = st.text("abc=;+0123456789 \n", min_size=1, max_size=2)
    ends = st.sampled_from([tokenizer.decode(prompt)[-1:] for prompt in prompts])
    stop = data.draw(st.lists(letters | st.builds(str.__add__, ends, letters), min_size=1, max_size=2))
    generator = generator_with(trainer, [text for text in stop if text])
    torch.manual_seed(seed)
    sampled = calling(generator.generate)(["solo"] * len(prompts), prompts)

    rule = StopStrings(tokenizer, stop)
    for prompt, (completion, logps, _) in zip(prompts, sampled, strict=True):
        assert 1 <= len(completion) <= LONGEST
        assert not rule.are_in(completion[:-1])  # it ends with the first token that completes a stop text
        ended = completion[-1] in trainer.eos_token_ids or rule.are_in(completion)
        assert ended or len(completion) == LONGEST
        if not generator.records:
            continue
        assert len(logps) == len(completion)
        with torch.no_grad():
            logits = trainer.model(torch.tensor([[*prompt, *completion]])).logits[0].float()
        scores = logits[len(prompt) - 1 : -1].log_softmax(-1)
        expected = scores.gather(1, torch.tensor(completion).unsqueeze(1)).squeeze(1)
        torch.testing.assert_close(torch.tensor(logps), expected, atol=1e-4, rtol=0)


def test_a_stop_text_that_begins_in_the_prompt_ends_nothing(tokenizer):
    """The prompt ends in `a`: a turn `b...` does not hold `ab`, so it goes on."""
    criterion = StopStringCriterion(StopStrings(tokenizer, ["ab"]))
    a, b, c = (tokenizer.encode(letter, add_special_tokens=False)[0] for letter in "abc")
    rows = torch.tensor([[c, a, b], [a, c, a]])
    assert criterion(rows, None).tolist() == [False, False]
    rows = torch.cat([rows, torch.tensor([[a], [b]])], dim=1)
    assert criterion(rows, None).tolist() == [False, True]
    rows = torch.cat([rows, torch.tensor([[b], [c]])], dim=1)
    assert criterion(rows, None).tolist() == [True, True]


@pytest.mark.parametrize(
    ("text", "stop", "cut"),
    [
        ("1+2=3;4+5=9", ["=9", "3;"], "1+2=3;"),
        ("a\N{ROBOT FACE}b", ["\N{ROBOT FACE}"], "a\N{ROBOT FACE}"),  # a character of several tokens
    ],
)
def test_a_turn_is_cut_after_the_token_that_completes_the_first_stop_text(tokenizer, text, stop, cut):
    ids = tokenizer.encode(text, add_special_tokens=False)
    rule = StopStrings(tokenizer, stop)
    cut_ids = rule.cut([*ids, 0, 0])
    assert tokenizer.decode(cut_ids) == cut and len(cut_ids) > 3
    assert rule.cut(cut_ids[:-1]) == cut_ids[:-1]
    assert [rule.end([ids[:n]])[0] for n in range(1, len(ids) + 1)].index(True) == len(cut_ids) - 1
    assert StopStrings(tokenizer, []).cut([1, 2, 0]) == [1, 2, 0]


@torch.no_grad()
def _make_sure_of(model, ends, pad, share=1 / 6):
    """Make a model end a turn with this probability at every token, regardless of its training."""
    embeddings, norm = model.get_input_embeddings().weight, model.model.norm.weight  # of inputs and outputs
    embeddings[:, 0] = 100  # the same for all tokens, and above all else
    norm.zero_()
    norm[0] = len(norm) ** -0.5
    embeddings[ends, 0] += math.log(share / (1 - share) * (len(embeddings) - len(ends)) / len(ends))
    embeddings[pad, 0] -= 50


@pytest.mark.parametrize(
    ("where", "share"), in_turn([("generation_kwargs",), ("generation_config",), ("tokenizer",)], True, False)
)
def test_end_tokens_end_turns_wherever_they_are_set(model_folder, tmp_path, where, share):
    """No padding is part of a turn, its log-probabilities are those of its tokens, and a saved team ends there too."""
    model, again = (AutoModelForCausalLM.from_pretrained(model_folder) for _ in range(2))
    tokenizer = tiny_tokenizer()
    others = tokenizer("+=;0123456789")["input_ids"]
    if where == "tokenizer":
        tokenizer.eos_token = tokenizer.convert_ids_to_tokens(others[0])
        others = others[:1]
    elif where == "generation_config":
        model.generation_config.eos_token_id = others  # only in training: the team reads it from the manifest
    for base in (model, again):
        _make_sure_of(base, others, tokenizer.pad_token_id)
    end_settings = {"generation_kwargs": {"eos_token_id": others}} if where == "generation_kwargs" else {}
    settings = {"share_prefixes": share, "num_iterations": 2, **end_settings}
    trainer = team_trainer(model, tmp_path, processing_class=tokenizer, settings=settings)
    ends = {tokenizer.eos_token_id, *others}
    assert set(trainer.eos_token_ids) >= ends
    slice_ = only_slice(trainer, [{"prompt": "3+4"}] * 8)
    turns = [row.completion_ids.tolist() for row in slice_.rows]
    assert all(not set(turn[:-1]) & {*ends, tokenizer.pad_token_id} for turn in turns)
    assert {turn[-1] for turn in turns} & set(others) and len({*map(len, turns)}) > 1
    for row in slice_.rows:
        assert row.old_per_token_logps is None or (row.old_per_token_logps < 0).all()
    trainer.save_model(str(tmp_path / "team"))
    team = Team.from_pretrained(tmp_path / "team", again)
    completions = [turn.completion_ids for episode in team.run([{"prompt": "3+4"}] * 8) for turn in episode.turns]
    assert all(not set(turn[:-1]) & ends for turn in completions) and {turn[-1] for turn in completions} & set(others)


def test_the_first_token_may_end_turns(model_folder, tmp_path):
    trainer = team_trainer(model_folder, tmp_path, settings={"generation_kwargs": {"eos_token_id": 0}})
    assert 0 in trainer.eos_token_ids and 0 in trainer.generation_kwargs["eos_token_id"]


def test_the_generation_config_of_the_base_gives_end_tokens_alone(model_folder, tmp_path, caplog):
    """In training and in a saved team; the settings that are ignored are logged."""

    def sampled(name, **settings):
        model, again = (AutoModelForCausalLM.from_pretrained(model_folder) for _ in range(2))
        for base in (model, again):
            base.generation_config.update(**settings)
        trainer = team_trainer(model, tmp_path / name, settings={"seed": 3})
        torch.manual_seed(0)
        (slice_,) = trainer.parts.batch_maker.for_training([{"prompt": "3+4"}] * 8)
        trainer.save_model(str(tmp_path / f"{name}-team"))
        team = Team.from_pretrained(tmp_path / f"{name}-team", again)
        torch.manual_seed(0)
        completions = [turn.completion_ids for episode in team.run([{"prompt": "3+4"}] * 8) for turn in episode.turns]
        return [row.completion_ids.tolist() for row in slice_.rows], completions

    plain = sampled("plain")
    assert "generation config of the base" not in caplog.text
    settings = {"min_p": 0.9, "typical_p": 0.2, "no_repeat_ngram_size": 1, "suppress_tokens": [5, 6], "num_beams": 3}
    assert sampled("bent", **settings, top_k=1, temperature=0.1) == plain
    assert all(f"{name}={value!r}" in caplog.text for name, value in settings.items()) and "top_k=" not in caplog.text
