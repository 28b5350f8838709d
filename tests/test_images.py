# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Teams that see: vision-language models of many families, images from data sets, environments, tools and clients."""

import asyncio
import base64
import io
import itertools
import json
import random
from dataclasses import replace

from marft_trl import AgentSpec, MARFTConfig, MARFTTrainer, Team
from marft_trl.episodes.guard import EpisodeError
from marft_trl.episodes.images import has_image, images_of, read_image
from marft_trl.episodes.records import Feedback
from marft_trl.episodes.rerun import observation_key
from marft_trl.episodes.tools import ToolCall, ToolLimits, call_tool
from marft_trl.extras.apps.served_team import application
from marft_trl.prompts import team_view
from marft_trl.reporting.transcripts import Transcript, html_page
from marft_trl.rollout.generator import SampledTurn
from marft_trl.rollout.runner import RunMode
from marft_trl.seams.vision import ImageProcessor, as_tokenizer, of_images, without_vision
from marft_trl.trainer import bases
from marft_trl.workflows import EnvironmentLoop, Workflow, together

import datasets
import pandas as pd
import pytest
import torch
from aiohttp.test_utils import TestClient, TestServer
from datasets import Dataset
from PIL import Image
from transformers import BitsAndBytesConfig
from trl import GRPOConfig, GRPOTrainer
from trl.data_utils import prepare_multimodal_messages

from .helpers import SETTINGS, logged_steps, lora, moved_by_training, team_trainer, varied_reward, weights
from .vision_families import FAMILIES, picture


FAST = ("gemma3", "qwen2_5_vl", "smolvlm")
families = pytest.mark.parametrize(
    "family", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES]
)
QUESTION = "What color is it?"
PAIRS = [
    {"prompt": [{"role": "user", "content": QUESTION}], "images": [picture(seed) for seed in range(first, first + 2)]}
    for first in range(8)
]


def rows(count=8, **columns):
    """Questions with one image each, of two sizes."""
    prompt = [{"role": "user", "content": QUESTION}]
    images = [picture(seed, (56, 56 + 28 * (seed % 2))) for seed in range(count)]
    return [{"prompt": prompt, "image": image, **columns} for image in images]


def trainer_of(family, folder, agents, settings=None, **arguments):
    model, processor = FAMILIES[family]()
    args = MARFTConfig(str(folder), **{**SETTINGS, "learning_rate": 1e-2, **(settings or {})})
    arguments = {"reward_funcs": varied_reward, "train_dataset": Dataset.from_list(rows()), **arguments}
    arguments = {"peft_config": lora(), **arguments}
    return MARFTTrainer(model, args=args, processing_class=processor, agents=agents, **arguments)


def moved_agents(trainer):
    """The agents whose adapters training changes."""
    return {name.split(".")[-2] for name in moved_by_training(trainer) if "lora" in name}


LOOKER, SOLVER = AgentSpec("looker", system_prompt="Look."), AgentSpec("solver", sees_images=False)


def evaluated(trainer, inputs):
    """A rollout with the rows of its turns, in order."""
    trainer.model.eval()
    rollout, slice_, _ = trainer.parts.batch_maker.for_evaluation(inputs, RunMode())
    return rollout, slice_.rows


@pytest.mark.parametrize(
    ("family", "settings", "data"),
    [
        *(
            pytest.param(*case, marks=() if case[0] in FAST else pytest.mark.slow)
            for case in zip(FAMILIES, itertools.repeat({}), itertools.repeat(None))
        ),
        pytest.param("qwen2_5_vl", {"pad_to_multiple_of": 7}, PAIRS, marks=pytest.mark.slow),
        pytest.param("idefics3", {"steps_per_generation": 2}, PAIRS, marks=pytest.mark.slow),
        pytest.param(
            "internvl", {"loss_type": "grpo", "gradient_checkpointing": False}, PAIRS, marks=pytest.mark.slow
        ),
    ],
)
def test_one_agent_equals_grpo(family, settings, data, tmp_path):
    """Weights, also of the vision tower, and logs: bit for bit, with old log-probabilities."""
    settings = {**SETTINGS, "num_iterations": 2, "max_steps": 3, "learning_rate": 1e-2, **settings}
    runs = []
    for trainer_class, config_class in ((GRPOTrainer, GRPOConfig), (MARFTTrainer, MARFTConfig)):
        model, processor = FAMILIES[family]()
        processor.tokenizer.add_bos_token = False  # else TRL's types of tokens are one place off for Gemma
        team = trainer_class is MARFTTrainer
        arguments = {"agents": [AgentSpec("solo")]} if team else {}
        args = config_class(str(tmp_path), **settings, **({"share_prefixes": False} if team else {}))
        arguments |= {"reward_funcs": varied_reward, "train_dataset": Dataset.from_list(data or rows())}
        trainer = trainer_class(model, args=args, processing_class=processor, **arguments)
        trainer.train()
        logs = [{name: log[name] for name in ("loss", "grad_norm", "entropy")} for log in logged_steps(trainer)]
        runs.append((logs, dict(trainer.model.named_parameters())))
    (their_logs, their_weights), (our_logs, our_weights) = runs
    assert our_logs == their_logs and their_logs[0]["grad_norm"] > 0
    assert all(torch.equal(our_weights[name], weight) for name, weight in their_weights.items())


def by_hand(trainer, processor, row, messages):
    """Log-probabilities of a row by one pass of the model on what the processor makes of the messages."""
    inputs = processor.apply_chat_template(
        [prepare_multimodal_messages(messages)],
        **{"add_generation_prompt": True, "tokenize": True, "return_dict": True, "return_tensors": "pt"},
    )
    assert inputs["input_ids"][0].tolist() == row.prompt_ids.tolist()
    count = len(row.completion_ids)
    ids = torch.cat([inputs.pop("input_ids"), row.completion_ids[None]], dim=1)
    inputs["attention_mask"] = torch.ones_like(ids)
    for name in [name for name in inputs if name.endswith("token_type_ids")]:
        inputs[name] = torch.cat([inputs[name], torch.zeros(1, count, dtype=torch.long)], dim=1)
    trainer.policies.activate(row.agent)
    with torch.no_grad():
        logits = trainer.model.get_base_model().eval()(input_ids=ids, **inputs).logits[0, -count - 1 : -1]
    return torch.log_softmax(logits, dim=-1).gather(1, row.completion_ids[:, None])[:, 0]


class Hinted(Workflow):
    """Two agents that see a third agent's turn."""

    async def run(self, episode):
        hint = await episode.turn("hint")
        await together(episode.turn(name, sees=[hint]) for name in ("looker", "solver"))


@families
@pytest.mark.parametrize("share", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_log_probabilities_by_hand(family, share, tmp_path):
    """Two agents with different adapters, of which one sees images, after the text of a function."""
    looker = AgentSpec("looker") if family == "llava_next" else LOOKER  # without system messages in its template
    agents = [AgentSpec("hint", reply=lambda messages: "It is a square."), looker, SOLVER]
    config = lora(init_lora_weights=False)
    trainer = trainer_of(family, tmp_path, agents, {"share_prefixes": share}, peft_config=config, workflow=Hinted())
    _, processor = FAMILIES[family]()
    questions = rows(4)
    if family == "idefics2":  # its processor adds a space between an image and a word
        questions = [{**row, "prompt": [{"role": "user", "content": f"\n{QUESTION}"}]} for row in questions]
    rollout, filled = evaluated(trainer, questions)
    turns = [turn for episode in rollout.episodes for turn in episode.turns if turn.agent != "hint"]
    assert {row.agent: bool(row.images) for row in filled} == {"looker": True, "solver": False}
    found = trainer.parts.log_probs.compute_log_probs(filled)
    for row, turn, logps in zip(filled, turns, found, strict=True):
        torch.testing.assert_close(logps, by_hand(trainer, processor, row, turn.observation), rtol=0, atol=1e-5)


@families
def test_a_looker_and_a_blind_solver_train(family, tmp_path):
    """With the defaults: each adapter moves, the vision tower has none, and what is shown to whom is right."""
    agents = [LOOKER, SOLVER, AgentSpec("judge", trainable=False)]
    agents[0] = AgentSpec("looker") if family == "llava_next" else LOOKER
    trainer = trainer_of(family, tmp_path, agents)
    assert trainer.parts.passes.share or family == "qwen3_5"  # whose layers keep a state
    assert not any("visi" in name or "visual" in name for name in weights(trainer) if "lora" in name)
    assert moved_agents(trainer) == {"looker", "solver"}
    rollout = trainer.parts.rollouts.run(rows(2), training=False)
    for looker, solver, judge in (episode.turns for episode in rollout.episodes):
        assert len(images_of(looker.observation)) == len(images_of(judge.observation)) == 1
        assert not images_of(solver.observation) and QUESTION in str(solver.observation)
        image_tokens = set(trainer.processing_class.image_token_ids)
        assert image_tokens & set(looker.prompt_ids) and not image_tokens & set(solver.prompt_ids)


@pytest.mark.parametrize(
    "settings",
    [
        {"critic": "shared", "advantage": "gae", "num_generations": 1, "gradient_checkpointing": True},
        pytest.param({"critic": "frozen", "advantage": "gae", "num_generations": 1}, marks=pytest.mark.slow),
        pytest.param({"level": "action", "critic": "multi_head", "advantage": "gae"}, marks=pytest.mark.slow),
        pytest.param({"top_entropy_quantile": 0.5, "beta": 0.1, "num_iterations": 2}, marks=pytest.mark.slow),
        pytest.param({"credit": "counterfactual"}, marks=pytest.mark.slow),
        pytest.param({"advantage": "turn"}, marks=pytest.mark.slow),
        pytest.param({"update_order": "sequential"}, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("family", ["qwen2_5_vl", pytest.param("idefics3", marks=pytest.mark.slow)])
def test_settings_train_on_images(settings, family, tmp_path):
    trainer = trainer_of(family, tmp_path, [LOOKER, SOLVER], {"max_steps": 3, **settings})
    assert {"looker", "solver"} <= moved_agents(trainer)


@pytest.mark.slow
def test_a_4_bit_base_sees(tmp_path):
    """Loaded by name with its processor."""
    for part in FAMILIES["qwen2_5_vl"]():
        part.save_pretrained(tmp_path / "base")
    config = BitsAndBytesConfig(load_in_4bit=True, llm_int8_skip_modules=["lm_head", "visual"])
    trainer = MARFTTrainer(
        str(tmp_path / "base"),
        agents=[LOOKER, SOLVER],
        args=MARFTConfig(str(tmp_path), **{**SETTINGS, "learning_rate": 1e-2}),
        train_dataset=Dataset.from_list(rows()),
        reward_funcs=varied_reward,
        peft_config=lora(),
        quantization_config=config,
    )
    assert trainer.model.get_base_model().is_quantized and moved_agents(trainer) == {"looker", "solver"}
    rollout, filled = evaluated(trainer, rows(4))
    turns = [turn for episode in rollout.episodes for turn in episode.turns]
    found = trainer.parts.log_probs.compute_log_probs(filled)
    for row, turn, logps in zip(filled, turns, found, strict=True):
        if row.images:
            expected = by_hand(trainer, trainer.processing_class, row, turn.observation)
            torch.testing.assert_close(logps, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", FAST)
def test_values_by_hand(family, tmp_path):
    """The critic reads the images that its agent saw."""
    settings = {"critic": "shared", "advantage": "gae", "num_generations": 1}
    trainer = trainer_of(family, tmp_path, [LOOKER], settings, peft_config=lora(init_lora_weights=False))
    rollout, made = evaluated(trainer, rows(4))
    filled = trainer.parts.critic.with_values(rollout, made)
    (part,) = trainer.critic.parts
    trainer.policies.activate_adapter(part)
    base = trainer.model.get_base_model().eval()
    for row in filled:
        ids = torch.cat([row.prompt_ids, row.completion_ids])[None]
        images = trainer.parts.passes.images
        inputs = images.for_model([row.images], ids, [len(row.prompt_ids)])
        with torch.no_grad():
            states = base.base_model(input_ids=ids, **inputs).last_hidden_state[0, len(row.prompt_ids) - 1 : -1]
            expected = trainer.critic.heads[part](states)[:, 0]
        torch.testing.assert_close(row.old_values, expected, rtol=0, atol=1e-5)
    blank = (read_image(Image.new("RGB", (56, 56))),)
    changed = trainer.parts.critic.with_values(rollout, [replace(made[0], images=blank)])
    assert not torch.allclose(changed[0].old_values, filled[0].old_values)


def test_killed_and_resumed_equals_uninterrupted(tmp_path):
    """In the middle of a generation batch; a checkpoint has each image once."""
    settings = {"max_steps": 4, "steps_per_generation": 2, "num_iterations": 2, "save_strategy": "steps"}
    settings |= {"save_steps": 1}

    def make(name):
        return trainer_of("smolvlm", tmp_path / name, [LOOKER, SOLVER], settings)

    whole = make("whole")
    whole.train()
    folder = tmp_path / "whole" / "checkpoint-1"
    state = json.loads((folder / "marft_rollouts_0.json").read_text())
    named = [name for slice_ in state["slices"] for row in slice_["rows"] for name in row.get("images", ())]
    assert len(named) > len(set(named)) == len(state["images"])
    again = make("again")
    again.train(resume_from_checkpoint=str(folder))
    expected, found = weights(whole), weights(again)
    assert all(torch.equal(found[name], weight) for name, weight in expected.items())


@pytest.mark.parametrize("family", ["gemma3", pytest.param("qwen3_vl", marks=pytest.mark.slow)])
def test_a_saved_team_sees(family, tmp_path):
    """It answers as the trainer's team, has the processor, and continues with `trainer.team` and files of images."""
    trainer = trainer_of(family, tmp_path, [LOOKER, SOLVER], {"max_steps": 1})
    trainer.train()
    trainer.save_model(str(tmp_path / "team"))
    picture(3).save(tmp_path / "picture.png")
    base, _ = FAMILIES[family]()
    team = Team.from_pretrained(tmp_path / "team", model=base)
    assert [agent.sees_images for agent in team.agents] == [True, False]
    episodes = [
        found.run([{"prompt": QUESTION, "image": picture(3)}], greedy=True)[0] for found in (trainer.team, team)
    ]
    assert episodes[0].turns[0].prompt_ids == episodes[1].turns[0].prompt_ids
    assert episodes[0].answer.text == episodes[1].answer.text
    answers = [team(QUESTION, greedy=True, images=[source]) for source in (picture(3), tmp_path / "picture.png")]
    assert answers[0] == answers[1] == episodes[1].answer.text
    assert list(team.stream(QUESTION, greedy=True, images=[picture(3)]))[-1].text == answers[0]
    other = team.run([{"prompt": QUESTION, "images": [picture(3), picture(4)]}])[0]
    assert len(images_of(other.turns[0].observation)) == 2
    whole = [replace(e, turns=tuple(replace(turn, truncated=False) for turn in e.turns)) for e in episodes]
    dataset = team.to_dataset(whole)
    looked = [row for row in dataset if row["agent"] == "looker"]
    assert looked and all(len(row["images"]) == 1 for row in looked)
    assert read_image(looked[0]["images"][0]) is read_image(picture(3))


def as_url(image):
    file = io.BytesIO()
    image.save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def test_served_teams_see(tmp_path):
    """All three APIs give the same answer, which depends on the image; nothing is fetched or read from disk."""
    trainer = trainer_of("llava", tmp_path, [LOOKER, SOLVER], peft_config=lora(init_lora_weights=False))
    url = as_url(picture(3))
    source = {"type": "base64", "media_type": "image/png", "data": url.partition(",")[2]}
    bodies = {
        "/v1/chat/completions": {"messages": [{"type": "image_url", "image_url": {"url": url}}]},
        "/v1/responses": {"input": [{"type": "input_image", "image_url": url}], "store": False},
        "/v1/messages": {"messages": [{"type": "image", "source": source}], "max_tokens": 99},
    }
    texts = {"/v1/responses": "input_text"}

    async def ask():
        found = {}
        async with TestClient(TestServer(application(trainer.team))) as client:
            for path, body in bodies.items():
                field = "input" if "input" in body else "messages"
                parts = [*body[field], {"type": texts.get(path, "text"), "text": QUESTION}]
                request = {**body, field: [{"role": "user", "content": parts}], "model": "team", "temperature": 0}
                found[path] = await (await client.post(path, json=request)).json()
            for wrong in ("http://127.0.0.1:1/x.png", "file:///etc/passwd", "/etc/passwd", url[:200]):
                part = {"type": "image_url", "image_url": {"url": wrong}}
                request = {"model": "team", "messages": [{"role": "user", "content": [part]}]}
                reply = await client.post("/v1/chat/completions", json=request)
                assert reply.status == 400, wrong
            picture(3).save(tmp_path / "secret.png")
            request = {"model": "team", "messages": [{"role": "user", "content": QUESTION}]}
            request["row"] = {"image": str(tmp_path / "secret.png")}
            assert (await client.post("/v1/chat/completions", json=request)).status == 400
        return found

    found = asyncio.run(ask())
    answers = [
        found["/v1/chat/completions"]["choices"][0]["message"]["content"],
        found["/v1/responses"]["output"][0]["content"][0]["text"],
        found["/v1/messages"]["content"][0]["text"],
    ]
    expected = trainer.team.run([{"prompt": QUESTION, "image": picture(3)}], greedy=True)[0].answer.text
    assert answers == [expected] * 3


def screen(number):
    """A picture of another size than those of the questions."""
    return picture(90 + number, (84, 56 + 28 * number))


class Screen:
    """Shows a picture of each round."""

    def reset(self, prompt, **row):
        self.round = 0
        return [{"type": "text", "text": "Begin."}, {"type": "image", "image": screen(0)}]

    def step(self, turns):
        self.round += 1
        return screen(self.round), float(len(turns[-1].text) % 3), self.round == 2


def test_environments_show_images(tmp_path):
    workflow = EnvironmentLoop(Screen, agents=["looker", "solver"])
    trainer = trainer_of("qwen2_5_vl", tmp_path, [LOOKER, SOLVER], workflow=workflow, reward_funcs=None)
    assert moved_agents(trainer) == {"looker", "solver"}
    (episode,) = trainer.parts.rollouts.run(rows(1), training=False).episodes
    shown = [images_of(turn.observation) for turn in episode.turns]
    screens = [read_image(image) for image in (picture(0), screen(0), screen(1))]
    assert [list(images) for images in shown] == [screens[:2], [], screens, []]
    page = html_page([Transcript.of(episode)])
    assert page.count('<img src="data:image/jpeg') == 4 and "img-src data:" in page
    assert "[image 56 x 56]" in Transcript.of(episode).as_text()


def look(number: int):
    """
    Look at a picture.

    Args:
        number: Which one.
    """
    return [{"type": "image", "image": picture(number)}, {"type": "text", "text": "Here."}]


def test_tools_return_images(tmp_path):
    """The next turn goes on from the tokens of the call, and sees the image."""
    agents = [AgentSpec("looker", tools=[look])]
    trainer = trainer_of("qwen3_vl", tmp_path, agents, {"max_completion_length": 60})
    call = '<tool_call>\n{"name": "look", "arguments": {"number": 5}}\n</tool_call><|im_end|>'
    tokenizer = trainer.parts.runner.prompts.tokenizer

    async def generate(observed, **options):
        texts = ["Red.<|im_end|>" if len(item.images) > 1 else call for item in observed]
        return [SampledTurn(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in texts]

    trainer.parts.runner.generator.generate = generate
    rollout, made = evaluated(trainer, rows(4))
    first, second = rollout.episodes[0].turns
    assert second.prompt_ids[: len(first.prompt_ids)] == first.prompt_ids
    assert images_of(second.observation) == (read_image(picture(0)), read_image(picture(5)))
    pads = [turn.prompt_ids.count(trainer.processing_class.image_token_id) for turn in (first, second)]
    assert pads[1] == 2 * pads[0] > 0
    assert len(trainer.parts.log_probs.compute_log_probs(made)) == 8


def test_text_rows_have_the_numbers_of_trl(tmp_path):
    """Rows without images share prefixes in a model that sees, with the log-probabilities of TRL's pass."""
    questions = [{"prompt": [{"role": "user", "content": f"Add {number}."}]} for number in range(8)]
    found, made = [], []
    for share in (True, False):
        trainer = trainer_of("qwen2_5_vl", tmp_path, [LOOKER, SOLVER], {"share_prefixes": share, "seed": 3})
        made = made or evaluated(trainer, questions[:4])[1]
        assert trainer.parts.passes.give_positions == share
        found.append(trainer.parts.log_probs.compute_log_probs(made))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


def mixed(count=8):
    """Questions with no, one or two images."""
    prompt = [{"role": "user", "content": QUESTION}]
    return [{"prompt": prompt, "images": [picture(n * 3 + k) for k in range(n % 3)]} for n in range(count)]


@pytest.mark.parametrize("family", ["qwen2_5_vl", "smolvlm"])
def test_rows_with_and_without_images_are_scored_apart(family, tmp_path):
    """In any order and number, a row has the log-probabilities that it has alone."""
    trainer = trainer_of(family, tmp_path, [LOOKER], train_dataset=Dataset.from_list(mixed()))
    _, filled = evaluated(trainer, mixed())
    assert [len(row.images) for row in filled] == [n % 3 for n in range(8)]
    together = trainer.parts.log_probs.compute_log_probs(filled)
    for row, logps in zip(filled, together, strict=True):
        (alone,) = trainer.parts.log_probs.compute_log_probs([row])
        torch.testing.assert_close(logps, alone, rtol=0, atol=1e-5)


def test_updates_have_the_numbers_of_trls_passes(tmp_path):
    """Of the same sampled tokens, where text rows share prefixes and steps span several slices."""
    found, data = [], Dataset.from_list(PAIRS)  # of one size, so that rows are sorted by their completions
    for share in (True, False):
        settings = {"share_prefixes": share, "optim": "sgd", "learning_rate": 1.0, "num_iterations": 2}
        settings |= {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
        trainer = trainer_of("qwen2_5_vl", tmp_path, [LOOKER, SOLVER], settings, train_dataset=data)
        draw = random.Random(0)

        async def generate(observed, draw=draw, **options):
            return [SampledTurn([draw.randrange(3, 200) for _ in range(draw.randint(1, 8))]) for _ in observed]

        trainer.parts.runner.generator.generate = generate
        assert moved_agents(trainer) == {"looker", "solver"}
        found.append(weights(trainer))
    for name, weight in found[0].items():
        torch.testing.assert_close(weight, found[1][name], rtol=0, atol=1e-5, msg=name)


BROKEN = [*rows(7), {**rows(1)[0], "image": {"bytes": b"no image", "path": None}}]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"settings": {"use_vllm": True, "vllm_mode": "colocate"}}, "`use_vllm=True` does not send images"),
        ({"settings": {"critic": "shared", "advantage": "gae", "critic_sees": "history"}}, "reads texts"),
        ({"agents": [AgentSpec("blind", sees_images=False)]}, "`train_dataset` has the column 'image'"),
    ],
)
def test_settings_without_images_are_refused(arguments, message, tmp_path):
    arguments = {"agents": [LOOKER], **arguments}
    with pytest.raises(ValueError, match=message):
        trainer_of("llava", tmp_path, **arguments)


def test_bad_images_are_named_before_anything_is_generated(tmp_path):
    files = [{"bytes": None, "path": str(tmp_path / "missing.png")}, {"bytes": None, "path": "https://x.org/x.png"}]
    for place, source in enumerate([BROKEN[-1]["image"], *files]):
        dataset = Dataset.from_list([{**row, "image": source if n == 5 else None} for n, row in enumerate(rows(8))])
        with pytest.raises(ValueError, match="Row 5 of `train_dataset`: `image`: "):
            trainer_of("llava", tmp_path / str(place), [LOOKER], train_dataset=dataset)
    (tmp_path / "5.png").write_bytes(b"no image")
    for seed in range(5):
        picture(seed).save(tmp_path / f"{seed}.png")
    columns = {"prompt": [row["prompt"] for row in rows(6)], "image": [str(tmp_path / f"{n}.png") for n in range(6)]}
    decoded = Dataset.from_dict(columns).cast_column("image", datasets.Image())
    with pytest.raises(ValueError, match="Row 5 of `train_dataset`: UnidentifiedImageError"):
        trainer_of("llava", tmp_path, [LOOKER], train_dataset=decoded)
    places = [{"role": "user", "content": [{"type": "image"}, {"type": "image"}, {"type": "text", "text": "?"}]}]
    dataset = Dataset.from_list([{"prompt": places, "image": picture(0)}] * 8)
    with pytest.raises(ValueError, match="Row 0 of `train_dataset`: `image`: Number of images"):
        trainer_of("llava", tmp_path, [LOOKER], train_dataset=dataset)


def test_texts_cannot_make_places_of_images(tmp_path):
    """A question and a teammate that write the token of an image are shown as texts, and nothing is lost."""
    reply = AgentSpec("liar", reply=lambda messages: "<image> <image>")
    trainer = trainer_of("llava", tmp_path, [reply, LOOKER], {"max_completion_length": 40})
    row = {"prompt": [{"role": "user", "content": "What is <image>?"}], "image": picture(0)}
    (episode,) = trainer.parts.rollouts.run([row], training=False).episodes
    ids, token = episode.turns[1].prompt_ids, trainer.processing_class.image_token_id
    assert ids.count(token) == trainer.model.config.image_seq_length
    assert ids[0] == trainer.parts.runner.prompts.tokenizer.bos_token_id  # which the processor adds, not the template
    assert "<image> <image>" in trainer.parts.runner.prompts.tokenizer.decode([i for i in ids if i != token])


def test_text_teams_refuse_images(model_folder, tmp_path):
    trainer = team_trainer(model_folder, tmp_path)
    with pytest.raises(ValueError, match="no agent of the team sees images"):
        trainer.team("What is it?", images=[picture(0)])
    content = [{"type": "image", "image": picture(0)}, {"type": "text", "text": "What is it?"}]
    with pytest.raises(EpisodeError, match="no agent of the team sees images"):
        trainer.team([{"role": "user", "content": content}])
    with pytest.raises(EpisodeError, match="no agent of the team sees images"):
        trainer.team.run([{"prompt": "What is it?", "image": picture(0)}])
    shows = team_trainer(model_folder, tmp_path, workflow=EnvironmentLoop(Screen), reward_funcs=None)
    with pytest.raises(EpisodeError, match="'environment' shows an image, but no agent of the team sees images"):
        shows.team("What is it?")
    texts = [{"role": "user", "content": [{"type": "text", "text": "How "}, {"type": "text", "text": "many?"}]}]
    assert trainer.team.run([texts], greedy=True)[0].turns[0].prompt_ids == (
        trainer.team.run([[{"role": "user", "content": "How many?"}]], greedy=True)[0].turns[0].prompt_ids
    )


@families
def test_ImageProcessor_cuts_inputs_by_row(family):
    """Inputs of several rows, for TRL's pass, are those of each row alone; `of_images` finds them among others."""
    model, processor = FAMILIES[family]()
    images = ImageProcessor(processor)
    assert as_tokenizer(processor).chat_template == processor.chat_template
    sets = [[read_image(picture(0))], [read_image(picture(1, (56, 84)))]]
    ids = [images.encode(processor.image_token * len(own), own) for own in sets]
    width = max(map(len, ids))
    padded = torch.tensor([[0] * (width - len(row)) + row for row in ids])
    inputs = images.inputs(sets, padded, [width, width])
    assert inputs["num_images"] == [1, 1] and of_images({**inputs, "other": 1}) == inputs
    for name in [name for name in inputs if name.endswith("token_type_ids")]:
        assert inputs[name].sum() > 0
        assert images.inputs(sets, padded, [0, 0])[name].sum() == 0  # tokens of a completion are texts
    config = without_vision(lora(), model)
    assert config.exclude_modules and without_vision(lora(target_modules=["q_proj"]), model).exclude_modules is None
    assert bases.Base(model, processor, (), {}).images is not None


def test_different_images_are_different_observations():
    """A re-run keeps a turn only if its agent saw the same images."""
    first, same, other = (Feedback("here", images=(read_image(picture(seed)),)) for seed in (0, 0, 1))
    keys = [observation_key("judge", [feedback]) for feedback in (first, same, other)]
    assert keys[0] == keys[1] != keys[2]


def test_each_base_suppresses_its_own_image_token(model_folder, tmp_path):
    """A sampled token of an image would have no pixels; an ordinary token of another model is not suppressed."""
    model, processor = FAMILIES["gemma3"]()
    second = AgentSpec("second", model=model, processing_class=processor)
    trainer = trainer_of("qwen2_5_vl", tmp_path, [LOOKER, second, AgentSpec("writer", model=model_folder)])
    own = {"looker": trainer.model.config.image_token_id, "second": model.config.image_token_id}
    expected = {**{name: [token] for name, token in own.items()}, "writer": None}
    trainer.save_model(str(tmp_path / "team"))
    first, further = FAMILIES["qwen2_5_vl"]()[0], FAMILIES["gemma3"]()[0]
    bases_of = {"looker": first, "second": further, "writer": model_folder}
    for team in (trainer.team, Team.from_pretrained(tmp_path / "team", model=bases_of)):
        settings = {name: team._runner.generator.settings(name).get("suppress_tokens") for name in expected}
        assert settings == expected


def test_files_are_turned_upright(tmp_path):
    """As `datasets` does for decoded images."""
    for orientation, size in ((1, (40, 20)), (6, (20, 40)), (8, (20, 40))):
        exif = Image.Exif()
        exif[0x0112] = orientation
        path = tmp_path / f"{orientation}.jpg"
        picture(0, (40, 20)).save(path, exif=exif)
        dataset = Dataset.from_dict({"image": [str(path)]}).cast_column("image", datasets.Image())
        assert read_image(path).size == read_image(path.read_bytes()).size == dataset[0]["image"].size == size


def rewarded(prompts, completions, image=None, **kwargs):
    """Rewards get the images in the messages, as in TRL."""
    assert all(has_image(prompt[-1]["content"]) for prompt in prompts)
    return varied_reward(completions)


def test_logs_evaluations_and_views(tmp_path):
    """Tables of completions, votes over samples of a question, and a view that chooses who sees what."""

    def view(agent, prompt, seen):
        return [{"role": "user", "content": QUESTION}] if agent.name == "solver" else team_view(agent, prompt, seen)

    settings = {"log_completions": True, "max_steps": 1, "per_device_eval_batch_size": 8}
    trainer = trainer_of(
        *("smolvlm", tmp_path, [AgentSpec("looker"), AgentSpec("solver")], settings),
        **{"reward_funcs": rewarded, "eval_dataset": Dataset.from_list(rows(2)), "view": view},
    )
    assert moved_agents(trainer) == {"looker", "solver"}
    assert "eval_pass@2" in trainer.evaluate(k=[2])
    trainer.view = lambda agent, prompt, seen: [{"role": "user", "content": [{"type": "image", "image": "/x.png"}]}]
    with pytest.raises(Exception, match=r"Message 0 of the view's messages has the place of an image without a `PIL"):
        trainer.team(QUESTION)


def test_a_broken_image_skips_an_episode(tmp_path):
    """Beyond the rows that are read before training."""
    trainer = trainer_of("llava", tmp_path, [LOOKER], {"on_episode_error": "skip", "max_skipped_share": 0.5})
    broken = {**rows(1)[0], "images": {"bytes": b"no image", "path": None}}
    rollout = trainer.parts.rollouts.run([*rows(3), broken], training=True)
    assert [bool(episode.failure) for episode in rollout.episodes] == [False, False, False, True]
    assert "`images`: An image is broken" in rollout.episodes[3].failure


def test_the_card_of_a_team_that_sees(tmp_path):
    """The code in the card loads the processor, and a base that is a text model as one."""
    trainer = trainer_of("llava", tmp_path, [LOOKER], {"max_steps": 1})
    trainer.save_model(str(tmp_path / "team"))
    text = (tmp_path / "team" / "README.md").read_text()
    assert "pipeline_tag: image-text-to-text" in text and "AutoProcessor.from_pretrained" in text
    assert "AutoModelForImageTextToText" in text and "AutoModelForCausalLM" not in text


def listing():
    """
    Return numbers.
    """
    return [1, 2]


def test_lists_of_tools_are_logged(tmp_path):
    """A table of completions has the results of tools as texts."""
    trainer = trainer_of("qwen3_vl", tmp_path, [AgentSpec("looker", tools=[listing])], {"log_completions": True})
    call = '<tool_call>\n{"name": "listing", "arguments": {}}\n</tool_call><|im_end|>'
    tokenizer = trainer.parts.runner.prompts.tokenizer

    async def generate(observed, **options):
        texts = ["Done.<|im_end|>" if "tool" in str(item.content) else call for item in observed]
        return [SampledTurn(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in texts]

    trainer.parts.runner.generator.generate = generate
    trainer.train()
    table = pd.read_parquet(tmp_path / "completions" / "completions_00001.parquet")
    assert any("[1, 2]" in str(prompt) for prompt in table["prompt"])


def several():
    """
    Return two pictures.
    """
    return "First:", picture(1), "second:", picture(2)


def test_images_are_found_in_what_functions_return(tmp_path):
    """In lists and tuples, next to texts, and in addition to parts."""

    class Shown(Workflow):
        async def run(self, episode):
            parts = [{"type": "text", "text": "Two."}, picture(1)]
            picture(2).save(tmp_path / "2.png")
            episode.observe(parts, images=[tmp_path / "2.png"])
            await episode.turn("looker")

    trainer = trainer_of("gemma3", tmp_path, [AgentSpec("looker")], workflow=Shown())
    (episode,) = trainer.team.run([QUESTION])
    assert episode.turns[0].images == (read_image(picture(1)), read_image(picture(2)))
    assert [part["type"] for part in episode.turns[0].observation[0]["content"]] == ["text", "image", "image", "text"]
    result = asyncio.run(call_tool([several], ToolCall("several"), ToolLimits()))
    assert result.text == "First:\nsecond:" and list(result.images) == list(episode.turns[0].images)
