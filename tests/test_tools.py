"""Functions that agents call: limits, visibility of calls, tokens, and training as in TRL."""

import asyncio
import copy
import time
from dataclasses import replace

from marft_trl import AgentSpec, Sequential, Team, Workflow
from marft_trl.episodes.tools import ToolCall, ToolLimits, call_tool, call_tools
from marft_trl.prompts import team_view
from marft_trl.prompts.builder import PromptBuilder, Window
from marft_trl.prompts.chat_template import ChatTemplate
from marft_trl.prompts.tool_calls import call_opening, call_pattern, parse_calls, prepare_template
from marft_trl.rollout.generator import SampledTurn
from marft_trl.tiny import tiny_model, tiny_tokenizer
from marft_trl.workflows import EnvironmentLoop, rehearse, together

import pytest
import torch
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st
from trl import GRPOConfig, GRPOTrainer
from trl.chat_template_utils import qwen3_chat_template

from .helpers import (
    SETTINGS,
    SIZES,
    StopAt,
    add,
    began_at,
    build_observation,
    by_hand,
    collect,
    earned,
    grows_linearly,
    lora,
    moved,
    only_slice,
    team_trainer,
    varied_reward,
    weights,
)
from .tokenizers_and_templates import chat_template


async def double(a: int) -> int:
    """
    Double a number.

    Args:
        a: the number
    """
    await asyncio.sleep(0)
    return 2 * a


def fail():
    """Fail."""
    raise ValueError("no such thing")


class Mute(Exception):
    def __str__(self):
        raise RuntimeError("nothing to say")


def odd_tools() -> list:
    """Tools that fail, hang or return odd values, each in a different way."""

    def leave():
        raise SystemExit(3)

    def hang():
        time.sleep(60)

    async def wait():
        await asyncio.sleep(60)

    def talk():
        return "x" * 100

    async def talk_later():
        return "y" * 100

    async def leave_later():
        raise SystemExit(4)

    async def cancel_awaited_task():
        task = asyncio.ensure_future(asyncio.sleep(9))
        task.cancel()
        await task

    def mute():
        raise Mute

    def own_timeout():
        raise TimeoutError("the server is slow")

    def half_a_character():
        return "\ud83d"

    def plain_around_asynchronous():
        return double(4)

    tools = [leave, hang, wait, talk, talk_later, leave_later, cancel_awaited_task, mute, own_timeout]
    return [*tools, half_a_character, plain_around_asynchronous]


TOOLS = [add, double, fail, *odd_tools()]


# ---- One call ----


@pytest.mark.parametrize(
    ("call", "text", "problem"),
    [
        (ToolCall("add", {"a": 3, "b": 4}), "7", None),
        (ToolCall("double", {"a": 3}), "6", None),
        (ToolCall("talk"), "x" * 40 + "... (60 more characters are left out)", None),
        (ToolCall("talk_later"), "y" * 40 + "... (60 more characters are left out)", None),
        (ToolCall("subtract", {}), "Tool subtract not found. There is add, double, fail", "unknown"),
        (ToolCall("add", {"a": 3}), "add: missing a required argument: 'b'", "arguments"),
        (ToolCall("add", [3, 4]), "have to be an object", "arguments"),
        (ToolCall("add", {"a": 3, "b": "x"}), "unsupported operand", "error"),
        (ToolCall("fail"), "{'error': 'no such thing'}", "error"),
        (ToolCall("leave"), "SystemExit: 3", "error"),
        (ToolCall("hang"), "Tool hang did not answer within 0.2 seconds.", "timeout"),
        (ToolCall("wait"), "Tool wait did not answer within 0.2 seconds.", "timeout"),
        (ToolCall("leave_later"), "SystemExit: 4", "error"),
        (ToolCall("cancel_awaited_task"), "CancelledError", "error"),
        (ToolCall("mute"), "Mute", "error"),
        (ToolCall("own_timeout"), "the server is slow", "error"),
        (ToolCall("half_a_character"), "?", None),
        (ToolCall("plain_around_asynchronous"), "8", None),
    ],
    ids=str,
)
def test_tool_failures_are_returned_to_the_model(call, text, problem):
    start = time.monotonic()
    result = asyncio.run(call_tool(TOOLS, call, ToolLimits(output=40, seconds=0.2)))
    assert text in result.text and result.problem == problem and result.name == call.name
    assert ("error" in result.text) == (problem is not None)
    assert time.monotonic() - start < 20  # also where the thread of a tool still hangs


def test_excess_calls_get_a_single_refusal():
    calls = [ToolCall("double", {"a": index}) for index in range(1000)]
    results = asyncio.run(call_tools(TOOLS, calls, ToolLimits(calls=3), left=3))
    assert [result.text for result in results[:3]] == ["0", "2", "4"]
    assert len(results) == 4 and results[3].problem == "too_many" and "No more than 3 calls" in results[3].text


def test_a_tool_that_hangs_again_and_again_is_not_called_any_more():
    calls = []

    def stuck():
        calls.append(1)
        time.sleep(5)

    async def often():
        return [await call_tool([stuck], ToolCall("stuck"), ToolLimits(seconds=0.05)) for _ in range(6)]

    results = asyncio.run(often())
    assert len(calls) == 3 and all(result.problem == "timeout" for result in results)
    assert "out of order" in results[-1].text


# ---- An episode ----


def calculates(agent, seen):
    """The solver calls tools, then replies with the last result; others reply with the number of turns they see."""
    if agent != "solver":
        return f"{agent} saw {len(seen)}"
    results = [message.text for message in seen if getattr(message, "tool", None)]
    return results[-1] if results else [ToolCall("add", {"a": 3, "b": 4}), ToolCall("fail")]


def test_an_agent_continues_after_tool_calls_that_teammates_do_not_see():
    tools = {"solver": [add, fail]}

    class ChecksState(Sequential):
        async def run(self, episode):
            await super().run(episode)
            assert episode.state.busy == 0 and not episode.state.calling

    episode = rehearse(ChecksState(), ["planner", "solver", "judge"], calculates, "q", tools)
    assert [turn.agent for turn in episode.turns] == ["planner", "solver", "solver", "judge"]
    _, call, answer, judge = episode.turns
    assert [feedback.text for feedback in episode.feedback] == ["7", "{'error': 'no such thing'}"]
    assert (call.audience, answer.audience) == ("solver", None)
    assert (call.sees, answer.sees, judge.sees) == ((0,), (0, 1), (0, 2))
    assert (call.hears, answer.hears, judge.hears) == ((), (0, 1), ())
    assert episode.joint_steps() == [0, 1, 2, 3] and episode.fed == ()
    assert episode.counts == {"tools/calls": 2, "tools/failures": 1, "tools/error": 1}


def test_later_turns_of_the_agent_see_earlier_calls():
    tools = {"solver": [add, fail]}
    episode = rehearse(Sequential(rounds=2), ["solver", "judge"], calculates, "q", tools)
    assert [turn.agent for turn in episode.turns] == ["solver", "solver", "judge", "solver", "judge"]
    assert episode.turns[3].sees == (0, 1, 2) and episode.turns[3].hears == (0, 1)
    assert episode.turns[4].sees == (1, 2, 3)


@pytest.mark.parametrize(("limits", "turns", "executed"), [((4, None), 6, 4), ((4, 2), 3, 2), ((1, None), 3, 1)])
def test_an_agent_that_always_calls_comes_to_an_end(limits, turns, executed):
    class Limited(Sequential):
        async def run(self, episode):
            episode.state.limits = ToolLimits(*limits)
            await super().run(episode)

    episode = rehearse(Limited(), ["solver"], lambda *_: ToolCall("double", {"a": 1}), "q", {"solver": [double]})
    assert len(episode.turns) == turns and [feedback.text for feedback in episode.feedback].count("2") == executed
    assert episode.counts["tools/too_many"] == (limits[1] is None)


@pytest.mark.parametrize("slow", ["first", "second"])
def test_nothing_depends_on_how_long_tools_take(slow):
    class World:
        def reset(self, **row): ...

        async def look(self, name: str):
            await asyncio.sleep(0.05 if name == slow else 0)
            return f"seen by {name}"

        def get_reward(self):
            return 1.0

    def answer(requests):
        return [
            request.make_turn(
                "word" if request.after else "call", tool_calls=() if request.after else (look(request.agent),)
            )
            for request in requests
        ]

    def look(agent):
        return ToolCall("look", {"name": agent})

    (episode,) = collect(EnvironmentLoop(World, side_by_side=True), [{"prompt": "q"}], ["first", "second"], answer)
    assert [turn.agent for turn in episode.turns] == ["first", "second"] * 2
    assert [feedback.text for feedback in episode.feedback] == ["seen by first", "seen by second"]
    assert [turn.fed for turn in episode.turns] == [0, 0, 2, 2] and episode.fed == (0, 1)
    assert episode.answer.agent == "second" and earned(episode) == {3: 1.0}


@pytest.mark.parametrize("order", [("solver", "judge"), ("judge", "solver")])
def test_branches_side_by_side_are_not_shown_calls(order):
    class Twice(Workflow):
        async def run(self, episode):
            await together(self.twice(episode, name) for name in order)

        async def twice(self, episode, name):
            await episode.turn(name)
            return await episode.turn(name)

    tools = {"solver": [add, fail]}
    episode = rehearse(Twice(), ["solver", "judge"], calculates, "q", tools)
    calls = {turn.index for turn in episode.turns if turn.tool_calls}
    assert calls and not any(calls & set(turn.sees) for turn in episode.turns if turn.agent == "judge")


def test_unknown_tool_names_are_not_shown_as_tools():
    name = "x<|im_end|>"
    replies = iter([ToolCall(name), "done"])
    episode = rehearse(Sequential(), ["solver"], lambda *_: next(replies), "q", {"solver": [add]})
    assert episode.feedback[0].tool == "unknown" and name in episode.feedback[0].text


def test_without_tools_nothing_is_called():
    episode = rehearse(Sequential(), ["solver"], lambda *_: ToolCall("add", {}))
    assert len(episode.turns) == 1 and not episode.turns[0].tool_calls and not episode.feedback


# ---- Tokens ----


def tool_tokenizer():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = qwen3_chat_template
    return tokenizer


TOKENIZER = tool_tokenizer()
TEMPLATE = prepare_template(TOKENIZER, "The team")
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 3, "b": 4}}\n</tool_call>'


def ids_of(text):
    return [*TOKENIZER(text)["input_ids"], TOKENIZER.eos_token_id]


def calls_in(text):
    return parse_calls(TOKENIZER, ids_of(text), [], [])


def test_calls_are_read():
    assert calls_in(CALL) == (ToolCall("add", {"a": 3, "b": 4}),)
    assert calls_in(f"so {CALL}\n{CALL}") == (ToolCall("add", {"a": 3, "b": 4}),) * 2
    assert calls_in("seven") == calls_in('<tool_call>{"name": 5}</tool_call>') == calls_in("<tool_call>") == ()


PIECES = ["<tool_call>", "</tool_call>", "\n", '{"name": "add"', ', "arguments": ', "{", "}", "[", '"', "<think>", "a"]
ODD = st.lists(st.one_of(st.sampled_from(PIECES), st.text(max_size=4), st.characters()), max_size=12).map("".join)


@pytest.mark.parametrize("count", [100, pytest.param(10_000, marks=pytest.mark.slow)])
def test_no_text_makes_the_reading_of_calls_raise(count):
    @settings(max_examples=count)
    @given(ODD)
    def check(text):
        calls = parse_calls(TOKENIZER, ids_of(text.encode("utf-8", "replace").decode()), [], [])
        problems = [asyncio.run(call_tool([], call, ToolLimits())).problem for call in calls]
        assert all(isinstance(call.name, str) for call in calls)
        assert all(problem == "unknown" for problem in problems)

    check()


@pytest.mark.parametrize("piece", ["<tool_call>", CALL, "{", "<think>", '"', "\n"])
def test_long_texts_are_read_in_linear_time(piece):
    ids = {size: ids_of(piece * (size // len(piece))) for size in (5_000, 40_000)}
    assert grows_linearly(lambda size: parse_calls(TOKENIZER, ids[size], [], []), 40_000)
    assert (len(parse_calls(TOKENIZER, ids[40_000], [], [])) > 400) == (piece == CALL)


def grpo_trainer(model_folder, folder, **settings):
    """TRL's trainer with the same tools."""
    return GRPOTrainer(
        model=model_folder,
        reward_funcs=right,
        args=GRPOConfig(str(folder), **{**SETTINGS, "bf16": False, "use_cpu": True, **settings}),
        train_dataset=ROWS,
        processing_class=tool_tokenizer(),
        peft_config=lora(),
        tools=[add],
    )


def right(completions, **kwargs):
    """1 if the last message has a seven. Completions are strings or lists of messages."""
    texts = [completion if isinstance(completion, str) else completion[-1]["content"] for completion in completions]
    return [float("7" in text) for text in texts]


ROWS = Dataset.from_dict({"prompt": [[{"role": "user", "content": f"What is {n}+4?"}] for n in range(32)]})


def test_an_agent_goes_on_with_the_very_tokens_of_trl(model_folder, tmp_path):
    tokenizer, grpo = tool_tokenizer(), grpo_trainer(model_folder, tmp_path)
    template = prepare_template(tokenizer, "The team")
    assert template == grpo.chat_template

    def tokenize(prompts, functions):
        grpo.tools = list(functions)
        return grpo._tokenize_prompts(prompts)[0]

    build = PromptBuilder(ChatTemplate(tokenizer, template), tokenize, end_token_ids=[tokenizer.eos_token_id])
    agent = AgentSpec("solver", tools=[add])
    prompt = ROWS[0]["prompt"]
    first = build_observation(build, agent, prompt, (), (add,))
    assert '"name": "add"' in tokenizer.decode(first.ids)
    episode = rehearse(Sequential(), ["solver"], calculates, prompt, {"solver": [add, fail]})
    call, _ = episode.turns
    call = replace(call, prompt_ids=first.ids, completion_ids=ids_of(CALL))
    second = build_observation(build, agent, prompt, (call, *episode.feedback), (add,), call)
    messages = [{"role": "tool", "name": feedback.tool, "content": feedback.text} for feedback in episode.feedback]
    assert second.ids == [*first.ids, *ids_of(CALL), *grpo._get_tool_suffix_ids(messages)]
    call = replace(call, completion_ids=ids_of(CALL)[:-1])  # ended by a stop text
    assert build_observation(build, agent, prompt, (call, *episode.feedback), (add,), call).ids == second.ids
    assert [message["role"] for message in second.content] == ["user", "assistant", "tool", "tool"]


# ---- In the trainer ----


# The method of TRL that samples, in `GRPOTrainer` and, through `TransformersGenerator` and `TrlEngine`, for teams
TRL_GENERATION = "_generate_single_turn"


def canned(trainer, log=None):
    """Sample a call first, in three of four rows, and a number after results, not always the right one."""
    waves = []

    def generate(prompt_ids, *_, **__):
        waves.append(len(prompt_ids))
        if log is not None:
            log.extend(TOKENIZER.decode(ids) for ids in prompt_ids)
        replies = []
        for index, ids in enumerate(prompt_ids):
            is_after = "<tool_response>" in TOKENIZER.decode(ids)
            replies.append(ids_of(("7" if index % 2 else "8") if is_after or index % 4 == 3 else CALL))
        return replies, None

    setattr(trainer, TRL_GENERATION, generate)
    return waves


def tool_trainer(model_folder, folder, settings=None, **arguments):
    defaults = {
        "agents": [AgentSpec("solver", tools=[add])],
        "reward_funcs": right,
        "train_dataset": ROWS,
        "processing_class": tool_tokenizer(),
    }
    settings = {"max_completion_length": 128, **(settings or {})}
    return team_trainer(model_folder, folder, settings=settings, **{**defaults, **arguments})


def test_a_lone_agent_with_tools_trains_as_grpo_trainer_does(model_folder, tmp_path):
    settings = {"max_completion_length": 128, "max_steps": 3}
    grpo = grpo_trainer(model_folder, tmp_path / "grpo", **settings)
    team = tool_trainer(model_folder, tmp_path / "team", settings)
    start = weights(team)
    waves = canned(grpo), canned(team)
    grpo.train()
    team.train()
    assert waves[0] == waves[1] == [8, 6] * 3
    renamed = {name.replace(".solver.", ".default."): value for name, value in weights(team).items()}
    assert moved(start, weights(team))
    for name, value in weights(grpo).items():
        torch.testing.assert_close(renamed[name], value, rtol=1e-5, atol=2e-6, msg=name)
    logs = [log for log in team.state.log_history if "tools/call_frequency" in log]
    grpo_logs = [log for log in grpo.state.log_history if "tools/call_frequency" in log]
    for name in ("tools/call_frequency", "tools/failure_frequency", "reward"):
        assert [log[name] for log in logs] == [log[name] for log in grpo_logs]
    assert logs[0]["tools/call_frequency"] == 0.75 and logs[0]["workflow/tools/calls"] == 0.75


BROKEN = '<tool_call>\n{"name": "add", "arguments": {a: 3, b: 4}}\n</tool_call>'


@pytest.mark.parametrize(
    ("template", "opening"),
    [
        *((chat_template(name), "<tool_call>") for name in ("qwen2_5", "qwen3", "glm4moe")),
        (chat_template("llama3_1"), '{"name": "'),
        (tiny_tokenizer().chat_template, None),
        ("{{ raise_exception('no') }}", None),
    ],
)
def test_the_opening_of_a_call_is_read_from_the_template(template, opening):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    assert call_opening(tokenizer) == opening


JUDGED = [AgentSpec("solver", tools=[add]), AgentSpec("judge", system_prompt="Judge.")]


def scripted_episode(trainer, *turns):
    """Run an episode with these turns, the last of which repeats. Returns the episode and the prompt of each turn."""
    prompts = []

    def generate(agents, prompt_ids, **options):
        replies = [turns[min(len(prompts) + place, len(turns) - 1)] for place in range(len(agents))]
        prompts.extend(trainer.processing_class.decode(ids) for ids in prompt_ids)
        return [SampledTurn(ids) for ids in replies]

    trainer.parts.runner.generator.generate = by_hand(generate)
    (episode,) = trainer.parts.runner.run([{"prompt": [{"role": "user", "content": "3+4?"}]}])
    return episode, prompts


def test_a_call_that_cannot_be_read_is_a_failed_call(model_folder, tmp_path):
    """The model gets an error, the call is counted, and teammates see only the text before it."""
    trainer = tool_trainer(model_folder, tmp_path, agents=JUDGED)
    episode, prompts = scripted_episode(trainer, *map(ids_of, (f"so {BROKEN}", "seven", "fine")))
    assert [(turn.agent, turn.text.strip()) for turn in episode.turns] == [
        ("solver", f"so {BROKEN}"), ("solver", "seven"), ("judge", "fine"),
    ]  # fmt: skip
    assert "could not be read" in episode.feedback[0].text and "could not be read" in prompts[1]
    assert episode.counts["tools/calls"] == episode.counts["tools/failures"] == episode.counts["tools/malformed"] == 1
    assert "tool_call" not in prompts[2].split("Judge.")[1] and "seven" in prompts[2]
    # A call that the length limit cuts off
    episode, prompts = scripted_episode(trainer, ids_of('so <tool_call>\n{"name": "add", "ar')[:-1])
    assert episode.turns[0].truncated and not episode.turns[0].tool_calls
    assert "[solver]\nso" in prompts[1] and "tool_call" not in prompts[1].split("Judge.")[1]


@pytest.mark.parametrize(
    ("text", "text_before"),
    [
        (f"so {BROKEN}", "so"),
        ("<tool_call>", ""),
        ("a\n <tool_call>x", "a"),
        ('so <tool_call>\n{"na', "so"),
        ("I will not use <tool_call> today", None),
        ("seven", None),
    ],
)
def test_text_before_a_call(text, text_before):
    match = call_pattern(TOKENIZER, TEMPLATE).search(text)
    assert (None if match is None else text[: match.start()].rstrip()) == text_before


def test_final_turns_are_shown_without_tool_calls(model_folder, tmp_path):
    trainer = tool_trainer(model_folder, tmp_path, {"max_tool_calls": 1}, agents=JUDGED)
    episode, prompts = scripted_episode(trainer, *[ids_of(f"adding {CALL}")] * 3, ids_of("fine"))
    judge_prompt = prompts[-1].split("Judge.")[1]
    assert episode.turns[-1].agent == "judge" and "[solver]" in judge_prompt and "adding" in judge_prompt
    assert "tool_call" not in judge_prompt


@pytest.mark.parametrize(
    ("settings", "agents", "reply", "speakers"),
    [
        ({"max_tool_calling_iterations": 2}, JUDGED, CALL, ["solver"] * 3 + ["judge"]),
        ({}, [AgentSpec("solo", tools=[add])], BROKEN, ["solo"]),  # as in `GRPOTrainer`
    ],
)
def test_number_of_turns_after_tool_calls(model_folder, tmp_path, settings, agents, reply, speakers):
    episode, _ = scripted_episode(tool_trainer(model_folder, tmp_path, settings, agents=agents), ids_of(reply))
    assert [turn.agent for turn in episode.turns] == speakers
    assert bool(episode.turns[0].tool_calls) == (reply == CALL)


@pytest.mark.slow
def test_a_resumed_run_with_tools_ends_with_the_same_bits(model_folder, tmp_path):
    def train(folder, steps, resume=False):
        settings = {"max_steps": 4, "save_steps": 1, "save_strategy": "steps"}
        trainer = tool_trainer(model_folder, tmp_path / folder, settings)
        trainer.add_callback(StopAt(steps))
        before, waves = weights(trainer), canned(trainer)
        trainer.train(resume_from_checkpoint=resume)
        assert moved(before, weights(trainer)) and waves == [8, 6] * (steps - began_at(trainer))
        return trainer

    whole = train("whole", 4)
    train("cut", 2)
    resumed = train("cut", 4, resume=True)
    assert began_at(resumed) == 2 and not moved(weights(whole), weights(resumed))


class Cupboard:
    """TRL's convention: `reset`, public methods as tools, `get_reward`."""

    def reset(self, **row):
        self.apples = 0
        return "The cupboard is empty."

    def add(self, a: int, b: int) -> str:
        """
        Put apples into the cupboard.

        Args:
            a: apples
            b: more apples
        """
        self.apples += a + b
        return f"{self.apples} apples"

    def get_reward(self):
        return float(self.apples)


def test_methods_of_an_environment_are_tools(model_folder, tmp_path):
    apples = []

    def note(completions, environments, **kwargs):
        apples.append([environment.apples for environment in environments])
        return [0.0] * len(completions)

    settings, agents = {"max_steps": 1, "num_generations": 8}, [AgentSpec("solver", system_prompt="Fill it.")]
    arguments = {"agents": agents, "reward_funcs": [note], "environment_factory": Cupboard}
    trainer = tool_trainer(model_folder, tmp_path, settings, **arguments)
    assert isinstance(trainer.workflow, EnvironmentLoop) and trainer.workflow.describe()["tools"] == ["add"]
    prompts = []
    canned(trainer, prompts)
    trainer.train()
    assert apples == [[7, 7, 7, 0] * 2]
    assert "The cupboard is empty." in prompts[0] and any("7 apples" in prompt for prompt in prompts)
    (step_log,) = [log for log in trainer.state.log_history if "reward" in log]
    assert step_log["rewards/environment_reward/mean"] == pytest.approx(7 * 6 / 8)


def test_environment_state_is_a_dependency():
    def calls_add(agent, seen):
        results = [message for message in seen if getattr(message, "tool", None)]
        return "done" if results else ToolCall("add", {"a": 3, "b": 4})

    episode = rehearse(EnvironmentLoop(Cupboard), ["a", "b"], calls_add)
    assert [turn.agent for turn in episode.turns] == ["a", "a", "b", "b"]
    assert episode.fed == (0, 2) and [turn.fed for turn in episode.turns] == [0, 1, 1, 2]
    assert earned(episode) == {3: 14.0} and episode.environment.apples == 14


class Stateless:
    def reset(self, **row): ...

    def step(self, turns):
        return None, 0.0, True

    def peek(self):
        """Peek."""
        return "dark"


def test_environments_with_steps_offer_tools_on_request():
    assert EnvironmentLoop(Stateless).functions == []
    assert [function.__name__ for function in EnvironmentLoop(Stateless, tools=["peek"]).functions] == ["peek"]
    with pytest.raises(ValueError, match=r"names 'peak', but .* has the public methods 'peek'. Did you mean 'peek'\?"):
        EnvironmentLoop(Stateless, tools=["peak"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"processing_class": tiny_tokenizer()}, "Agent 'solver' has tools, but the tokenizer has a chat template wi"),
        ({"agents": [AgentSpec("solver", tools=[lambda a: a])]}, "`<lambda>` of agent 'solver' cannot be described"),
        ({"agents": [AgentSpec("tool", tools=[add])]}, "agent cannot be named 'tool'"),
        ({"workflow": Sequential(), "environment_factory": Cupboard}, "were both passed"),
        ({"environment_factory": {"a": Cupboard}}, "needs the column 'environment'"),
        ({"workflow": EnvironmentLoop(Cupboard), "reward_funcs": None}, "both have a tool named 'add'"),
        ({"settings": {"max_tool_calls": 0}}, "`max_tool_calls` must be a finite number above 0"),
        ({"settings": {"tool_timeout": -1.0}}, "`tool_timeout` must be a finite number above 0"),
    ],
)
def test_invalid_tool_settings_raise_before_training(model_folder, tmp_path, arguments, message):
    with pytest.raises(ValueError, match=message):
        tool_trainer(model_folder, tmp_path, **arguments)


def test_tools_of_the_trainer_are_for_all_that_have_none(model_folder, tmp_path):
    agents = [AgentSpec("solver", tools=add), AgentSpec("judge")]
    trainer = tool_trainer(model_folder, tmp_path, agents=agents, tools=[double])
    assert [agent.functions for agent in trainer.agents] == [(add,), (double,)]
    with pytest.raises(TypeError, match="`tools` of agent 'solver' must be a function or a list"):
        AgentSpec("solver", tools="add")
    with pytest.raises(ValueError, match="several functions named 'add'"):
        AgentSpec("solver", tools=[add, add])


@pytest.mark.parametrize("overflow", ["end_episode", "drop_oldest_turn"])
def test_results_that_outgrow_the_window(model_folder, tmp_path, overflow):
    def talk() -> str:
        """Talk."""
        return "word " * 300

    talk.__name__ = "add"
    settings = {"max_steps": 1, "context_overflow": overflow, "max_completion_length": 100}
    trainer = tool_trainer(model_folder, tmp_path, settings, agents=[AgentSpec("solver", tools=[talk])])
    canned(trainer)
    trainer.parts.runner.prompts.window_size = 700
    trainer.train()
    (step_log,) = [log for log in trainer.state.log_history if "reward" in log]
    name = "context/ended_episodes" if overflow == "end_episode" else "context/dropped_turns"
    assert step_log[name] > 0


def test_a_call_that_was_cut_off_is_not_made(model_folder, tmp_path):
    trainer = tool_trainer(model_folder, tmp_path)
    setattr(trainer, TRL_GENERATION, lambda prompt_ids, *_, **__: ([ids_of(CALL)[:-1] for _ in prompt_ids], None))
    episodes = trainer.parts.runner.run([{"prompt": "What is 3+4?"}] * 2, trainer.parts.runner.answer)
    assert [len(episode.turns) for episode in episodes] == [1, 1] and not episodes[0].feedback
    assert episodes[0].turns[0].truncated and episodes[0].turns[0].tool_calls == ()


def test_a_candidate_that_calls_a_tool_is_scored_by_the_call(model_folder, tmp_path):
    """The agent has not continued yet, so there is no final turn to score instead."""

    def calls(completions, **kwargs):
        return [float("tool_call" in text) + 0.25 for text in map(str, completions)]

    settings = {"credit": "per_step", "advantage": "turn", "turn_candidates": 2, "num_generations": 1}
    settings["per_device_train_batch_size"] = 4
    agents = [AgentSpec("solver", tools=[add], reward_funcs=calls)]
    trainer = tool_trainer(model_folder, tmp_path, settings, agents=agents)
    canned(trainer)
    trainer.model.train()
    rollout = trainer.parts.rollouts.run([dict(ROWS[0])] * 4, training=True)
    returns = [worth for node in rollout.nodes for worth in node.returns]
    assert all(worth == worth for worth in returns) and {0.25, 1.25} == set(returns)
    assert any(turn.tool_calls for turn in rollout.episodes[0].turns)  # the episode continued from the best candidate


def test_a_call_gets_the_own_reward_of_the_final_turn(model_folder, tmp_path):
    def seven(completions, **kwargs):
        return [float("7" in text) for text in map(str, completions)]

    agents = [AgentSpec("solver", tools=[add], reward_funcs=seven)]
    trainer = tool_trainer(model_folder, tmp_path, {"credit": "per_step", "advantage": "none"}, agents=agents)
    canned(trainer)
    by_episode = {}
    for row in only_slice(trainer, [ROWS[0] for _ in range(8)]).rows:
        by_episode.setdefault(row.episode, set()).add(float(row.advantage))
    assert all(len(advantages) == 1 for advantages in by_episode.values())
    assert {0.0, 1.0} == set().union(*by_episode.values())


def test_undeclared_tools_are_named(model_folder, tmp_path):
    class Undeclared(Workflow):
        async def run(self, episode):
            await episode.turn("solver", tools=[add])

    trainer = tool_trainer(model_folder, tmp_path, agents=[AgentSpec("solver")], workflow=Undeclared())
    with pytest.raises(ValueError, match=r"passes undeclared tools to agent 'solver' \(add\)"):
        trainer.parts.runner.run([{"prompt": "q"}], trainer.parts.runner.answer)


def test_prompts_after_a_call_keep_the_view_of_the_call():
    """Turns that a view or a window left out of the prompt of a call stay out of the prompts that follow."""

    def view(agent, prompt, seen):
        return team_view(agent, prompt, seen[-1:])

    build = PromptBuilder(ChatTemplate(TOKENIZER, TEMPLATE), None, view=view, end_token_ids=[2])
    episode = rehearse(Sequential(), ["planner", "judge", "solver"], calculates, "q", {"solver": [add, fail]})
    planner, judge, call, _ = episode.turns
    agent = AgentSpec("solver", tools=[add])
    first = build_observation(build, agent, "q", (planner, judge), (add,))
    fields = {"sees": (judge.index,), "hears": (), "observation": first.content, "prompt_ids": first.ids}
    call = replace(call, **fields, completion_ids=ids_of(CALL))
    second = build_observation(build, agent, "q", (planner, judge, call, *episode.feedback), (add,), call)
    assert second.seen == [judge, call, *episode.feedback]
    assert second.content[: len(first.content)] == first.content
    assert "planner saw" not in TOKENIZER.decode(second.ids) and "judge saw" in TOKENIZER.decode(second.ids)


def test_hundreds_of_turns_are_dropped_in_a_moment():
    window = Window(200, {"solver": 10}, "drop_oldest_turn")
    build = PromptBuilder(ChatTemplate(TOKENIZER), lambda prompts: [[1]], window=window)
    episode = rehearse(Sequential(rounds=1200), ["solver"], lambda *_: "word", "q")
    start = time.process_time()
    observation = build_observation(build, AgentSpec("solver"), "q", tuple(episode.turns))
    assert 0 < len(observation.seen) < 1200 and observation.dropped == 1200 - len(observation.seen)
    assert len(observation.ids) + 10 <= 200 and time.process_time() - start < 60


def test_an_empty_list_of_tools_means_none(tmp_path):
    """Neither the tools of the trainer nor those of the environment. Other agents get them, by name if requested."""
    tokenizer = tool_tokenizer()
    model = tiny_model(len(tokenizer), **SIZES)

    def advertised_tools(tools, environment_tools=None):
        agents = [AgentSpec("writer", tools=[]), AgentSpec("caller", tools=tools), AgentSpec("other")]
        loop = EnvironmentLoop(Shelf, tools=environment_tools)
        settings = {"max_completion_length": 4}
        arguments = {"workflow": loop, "reward_funcs": varied_reward, "processing_class": tokenizer, "tools": [add]}
        trainer = team_trainer(copy.deepcopy(model), tmp_path, agents=agents, settings=settings, **arguments)
        plan, (episode,) = trainer.plan(), trainer.team.run(["x"], seed=0)
        texts = {turn.agent: tokenizer.decode(turn.prompt_ids) for turn in episode.turns}
        has = {name: [tool for tool in ("add", "look") if f'"name": "{tool}"' in text] for name, text in texts.items()}
        listed = {name: next(line for line in plan.splitlines() if line.startswith(f"  {name}: ")) for name in has}
        for name, tools in has.items():
            assert listed[name].partition("; tools ")[2].split(", ") == (tools or [""])
        trainer.save_model()
        loaded = Team.from_pretrained(tmp_path, model=copy.deepcopy(model), tools=[add], environment_factory=Shelf)
        (episode,) = loaded.run(["x"], seed=0)
        assert {turn.agent: tokenizer.decode(turn.prompt_ids) for turn in episode.turns} == texts
        return has

    assert advertised_tools(None) == {"writer": [], "caller": ["add", "look"], "other": ["add", "look"]}
    assert advertised_tools([]) == {"writer": [], "caller": [], "other": ["add", "look"]}
    assert advertised_tools(None, {"caller": ["look"]}) == {"writer": [], "caller": ["add", "look"], "other": ["add"]}


class Shelf:
    def reset(self, **row):
        return ""

    def look(self) -> str:
        """Look at the shelf."""
        return "books"


def test_a_list_that_a_tool_returns_is_plain_and_shown_whole_or_as_a_text():
    def look():
        return ["Rome\ud83d", 7]

    whole, short = [asyncio.run(call_tool([look], ToolCall("look"), ToolLimits(output=size))) for size in (40, 8)]
    assert whole.elements == ["Rome?", 7] and short.elements is None and "left out" in short.text
    episode = rehearse(
        Sequential(), ["a"], lambda agent, seen: "so" if seen else ToolCall("look"), tools={"a": [look]}
    )
    assert episode.feedback[0].elements == ["Rome?", 7]


class Endless(Stateless):
    def step(self, turns):
        return None, 0.0, False


def test_tools_by_agent_need_a_known_agent_and_are_offered_to_the_next_agent():
    with pytest.raises(ValueError, match="'c'"):
        EnvironmentLoop(Endless, tools={"c": ["peek"]}).check(["a", "b"])
    for name, count in (("a", 1), ("b", 0)):
        loop = EnvironmentLoop(Endless, horizon=1, tools={name: ["peek"]})
        episode = rehearse(loop, ["a", "b"], lambda agent, seen: "x")
        assert len(episode.horizon.functions) == count
        assert {horizon.agent: len(horizon.functions) for horizon in episode.horizons} == {"a": count, "b": 1 - count}
