"""Anthropic's API, rules that choose the agent of a request, and lineages of conversations."""

import asyncio
import itertools
import json

from marft_trl import AgentSpec, Team
from marft_trl.episodes.records import EndOfEpisode, Turn
from marft_trl.episodes.tools import ToolCall
from marft_trl.extras.apps import AppEndpoint, AppRequest, BySystemPrompt, ByTools, ExternalApp
from marft_trl.extras.apps import messages as dialect
from marft_trl.extras.apps.requests import ChatReply, ChatRequest, ReplyCall, RequestError
from marft_trl.reporting.transcripts import format_episode
from marft_trl.tiny import tiny_dataset, tiny_tokenizer

import openai
import pytest
import torch

from .helpers import add, collect, only_slice, plain_logps, team_trainer
from .test_applications import SCHEMA, played, question_of, raw, repeat_last, user
from .test_live import namesakes  # noqa: F401
from .test_serve import serving
from .test_tools import ROWS, canned, tool_tokenizer


anthropic = pytest.importorskip("anthropic")
httpx = pytest.importorskip("httpx2")  # of the client
TOOL = {"name": "add", "description": "Add.", "input_schema": SCHEMA["function"]["parameters"]}
CACHED = {"cache_control": {"type": "ephemeral"}}


def text(words, **extra):
    return {"type": "text", "text": words, **extra}


def talks_to(endpoint, **options):
    return anthropic.AsyncAnthropic(base_url=endpoint.root_url, api_key=endpoint.api_key, **options)


async def ask(client, model, history, text):
    history.append(user(text))
    reply = await client.messages.create(model=model, max_tokens=9, messages=history)
    history.append({"role": "assistant", "content": reply.content[0].text})


def read(**fields):
    body = {"model": "ann", "max_tokens": 9, "messages": [user("Hi.")], **fields}
    return dialect.read(json.dumps(body).encode(), ["ann"])


def test_a_conversation_becomes_that_of_a_chat_template():
    thought = {"type": "thinking", "thinking": "hm", "signature": "x"}
    tool_use = {"type": "tool_use", "id": "toolu_1", "name": "add", "input": {"a": 3, "b": 4}}
    request = read(
        system=[text("Be brief.", **CACHED), text("Add.")],
        messages=[
            user("Look."),
            user([text("What is 3+4?", **CACHED)]),
            {"role": "assistant", "content": [thought, text("Let me see."), tool_use]},
            user([{"type": "tool_result", "tool_use_id": "toolu_1", "content": [text("7")]}, text("And now?")]),
        ],
        **{"tools": [TOOL], "stop_sequences": ["\n"], "top_k": 5, "temperature": 0.5},
    )
    call = {"id": "toolu_1", "type": "function", "function": {"name": "add", "arguments": {"a": 3, "b": 4}}}
    assert request.messages == [
        {"role": "system", "content": "Be brief.\n\nAdd."},
        user("Look.\n\nWhat is 3+4?"),
        {"role": "assistant", "content": "Let me see.", "tool_calls": [call]},
        {"role": "tool", "content": "7", "tool_call_id": "toolu_1", "name": "add"},
        user("And now?"),
    ]
    assert request.tools[0]["function"] == {"name": "add", "description": "Add.", "parameters": TOOL["input_schema"]}
    assert (request.stop, request.max_tokens, request.sampling) == (("\n",), 9, {"temperature": 0.5, "top_k": 5})
    assert read(tools=[TOOL], tool_choice={"type": "none"}).tools == ()
    assert read(tools=[{"type": "web_search_20250305", "name": "web_search"}]).tools == ()  # of the provider
    assert read(context_management={"edits": []}, output_config={"effort": "high"}, thinking={"type": "adaptive"})
    context_management = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
    assert read(context_management=context_management, output_config={"effort": "xhigh", "format": None})
    assert read(thinking={"type": "adaptive", "display": "omitted"}, stop_sequences=list("abcde")).stop == (*"abcde",)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"messages": [user([{"type": "image", "source": {}}])]}, r"`messages\[0\].content\[0\].source`.*'base64'"),
        ({"messages": [user([{"type": "document", "source": {}}])]}, "'document'"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, r"`tools\[0\].type` is 'bash"),
        ({"mcp_servers": [{"name": "x"}]}, "`mcp_servers` is not supported"),
        ({"thread": {"type": "create"}}, "`thread` is not supported"),
        ({"stop_sequences": [""]}, "`stop_sequences` must be"),
        ({"model": "bob"}, "`model` must be one of 'ann'"),
        ({"system": 3}, "`system` must be a text or a list of blocks"),
        ({"messages": []}, "`messages` must be a list of messages"),
        ({"messages": [user([])]}, "`messages\\[0\\]` must have content"),
        ({"messages": [user("Hi."), {"role": "assistant", "content": "I"}]}, "agents do not continue a message"),
        ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "`context_management`"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "`messages\\[0\\].role` must be 'user' or 'assistant'"),
        ({"messages": [user([{"type": "tool_result", "tool_use_id": "t"}])]}, 'the call "t", which no earlier'),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "t"}]}]}, "must be an object"),
    ],
)
def test_unsupported_fields_are_refused_by_name(fields, words):
    with pytest.raises(RequestError, match=words):
        read(**fields)


TWO_CALLS = ChatReply("Wait.", (ReplyCall("c1", "add", '{"a": 1, "b": 2}'), ReplyCall("c2", "add", "{}")))
REPLIES = [
    (ChatReply("7"), "end_turn", None, []),
    (ChatReply("7", is_truncated=True), "max_tokens", None, []),
    (ChatReply("7", stopped_by="\n"), "stop_sequence", "\n", []),
    (ChatReply("", (ReplyCall("call_1", "add", '{"a": 3, "b": 4}'),)), "tool_use", None, []),
    *((TWO_CALLS, "tool_use", None, parts) for parts in ([], ["Wa", "it."])),
]


@pytest.mark.parametrize(("reply", "reason", "stop", "parts"), REPLIES)
def test_a_stream_adds_up_to_the_whole_answer(reply, reason, stop, parts):
    request = ChatRequest("ann", [user("Hi.")])
    whole = dialect.answer("1", request, [reply])
    assert (whole["stop_reason"], whole["stop_sequence"]) == (reason, stop)
    stream = dialect.stream("1", request)
    events = [*stream.begin(), *(event for part in parts for event in stream.delta(part)), *stream.end(reply)]
    body = b"".join(map(dialect.encoded, events))
    response = httpx.Response(200, headers={"Content-Type": "text/event-stream"}, content=body)
    transport = httpx.Client(transport=httpx.MockTransport(lambda request: response))
    client = anthropic.Anthropic(base_url="http://x", api_key="x", http_client=transport)
    with client.messages.stream(model="ann", max_tokens=9, messages=[user("Hi.")]) as parts_of_answer:
        message = json.loads(parts_of_answer.get_final_message().model_dump_json(exclude_none=True))
    assert {name: message.get(name) for name in whole} == whole


def test_a_reply_split_into_two_messages_is_merged():
    tool_use = {"type": "tool_use", "id": "toolu_1", "name": "add", "input": {"a": 3, "b": 4}}
    parts = [[text("Let me see.")], [tool_use]]
    result = user([{"type": "tool_result", "tool_use_id": "toolu_1"}])
    whole, split = (
        read(messages=[user("Hi."), *({"role": "assistant", "content": content} for content in contents), result])
        for contents in ([[*parts[0], *parts[1]]], parts)
    )
    assert whole.messages == split.messages and len(whole.messages) == 3
    turns = [{"role": "assistant", "content": content} for content in ("I think", "[interrupted]")]
    assert [message["content"] for message in read(messages=[user("Hi."), *turns, user("Go on.")]).messages[1:3]] == [
        "I think",
        "[interrupted]",
    ]


def test_errors_have_the_form_of_the_api_and_keys_come_by_either_header():
    results = []

    async def app(row, endpoint):
        client = talks_to(endpoint, max_retries=0)
        wrong = client.with_options(api_key="wrong")
        for caller, model in ((wrong, "ann"), (client, "bob")):
            with pytest.raises(anthropic.APIStatusError) as caught:
                await caller.messages.create(model=model, max_tokens=9, messages=[user("Hi.")])
            results.append((type(caught.value).__name__, caught.value.body["error"]["type"]))
        answer = await client.messages.create(model="ann", max_tokens=9, messages=[user("Hi.")])
        results.append(answer.content[0].text)
        body = {"model": "ann", "messages": [user("Ho.")], "stop_sequences": ["o."]}
        for key, headers in ((None, {}), ("wrong", {"x-api-key": endpoint.api_key}), ("wrong", {})):
            async with raw(endpoint, key) as send:  # with `Authorization` alone, or with both headers
                status, text = await send("messages", body, **headers)
                results.append((status, json.loads(text).get("stop_sequence")))

    (episode,) = played(app)
    errors = [("AuthenticationError", "authentication_error"), ("NotFoundError", "not_found_error")]
    assert results == [*errors, "ann: Hi.", (200, "o."), (200, "o."), (401, None)]
    assert [turn.text for turn in episode.turns] == ["ann: Hi.", "ann: Ho.", "ann: Ho."]


def test_cache_hints_are_mentioned_once(caplog, monkeypatch):
    monkeypatch.setattr("marft_trl.extras.apps.requests._WARNED", set())
    for _ in range(3):
        read(system=[text("x", **CACHED)])
    assert sum("cache_control" in record.message for record in caplog.records) == 1


def test_rules_choose_by_system_prompt_and_tools():
    search, tools = BySystemPrompt({"You search": "ben"}, "ann"), ByTools({"edit": "ann", "grep": "ben"})
    for rule, (model, system, named), agent in (
        (search, ("m", "You search files.", ()), "ben"),
        (BySystemPrompt({"You": "ann", "You search": "ben"}), ("m", " You search", ()), "ben"),
        (search, ("m", "You code.", ()), "ann"),
        (search, ("ben", "", ()), "ben"),
        (tools, ("m", "", ("grep",)), "ben"),
        (tools, ("m", "", ("grep", "edit")), "ann"),
    ):
        assert rule(AppRequest(model, system, frozenset(named), {})) == agent


def test_agent_of_routes_a_single_model_name_to_several_agents():
    """By a function of the system prompt and headers, which sees no key. Unknown agents are refused."""
    requests = []

    def agent_of(request):
        requests.append(request)
        return "ben" if request.system == "Search." else request.headers.get("x-agent", "nobody")

    async def app(row, endpoint):
        client = talks_to(endpoint, max_retries=0)
        same = {"model": "claude", "max_tokens": 9}
        await client.messages.create(**same, messages=[user("one")], extra_headers={"x-agent": "ann"})
        answer = await client.messages.create(**same, system="Search.", messages=[user("two")])
        assert answer.model == "claude"  # as the client asked for
        with pytest.raises(anthropic.NotFoundError, match="`agent_of` chose 'nobody'.*'ann', 'ben'"):
            await client.messages.create(**same, messages=[user("three")])

    (episode,) = played(app, agent_of=agent_of)
    assert [turn.agent for turn in episode.turns] == ["ann", "ben"]
    assert not {"x-api-key", "authorization"} & {name.lower() for name in requests[0].headers}


def test_a_rule_is_checked_before_training_and_stored_with_the_team():
    rule = BySystemPrompt({"You search": "ben"}, default="ann")
    app = ExternalApp(repeat_last, agent_of=rule)
    with pytest.raises(ValueError, match=r"must choose agents of the team \('ann'\), got 'ben'"):
        app.check(["ann"])
    assert app.named_agents() == ["ben", "ann"]
    description = json.loads(json.dumps(app.describe()))
    description.pop("class")
    assert ExternalApp.from_description(description).agent_of == rule
    assert "agent_of" not in ExternalApp(repeat_last, agent_of=lambda request: "ann").describe()
    with pytest.raises(TypeError, match="`agent_of` must be a function"):
        ExternalApp(repeat_last, agent_of="ann")


def test_sub_agents_and_shortened_histories_begin_lineages():
    async def app(row, endpoint):
        client = talks_to(endpoint)
        main, first, second = [], [], []
        await ask(client, "ann", main, "task")
        await asyncio.gather(ask(client, "ben", first, "left"), ask(client, "ben", second, "right"))
        await asyncio.gather(ask(client, "ben", second, "more"), ask(client, "ben", first, "more"))
        await ask(client, "ann", main, "found")
        await ask(client, "ann", [user("summary")], "go on")

    (episode,) = played(app, together=0.1)
    texts_and_lineages = [(turn.text, turn.lineage) for turn in episode.turns]
    assert [lineage for _, lineage in texts_and_lineages] == [0, 1, 2, 1, 2, 0, 3]
    assert texts_and_lineages[1:3] == [("ben: left", 1), ("ben: right", 2)]
    assert episode.counts["app/lineages"] == 4
    assert all(f"lineage {number}" in format_episode(episode) for number in range(4))

    async def one_turn(row, endpoint):
        await talks_to(endpoint).messages.create(model="ann", max_tokens=9, messages=[user("Hi.")])

    (plain,) = played(one_turn)
    assert plain.turns[0].lineage == 0 and "lineage" not in format_episode(plain)


def test_two_conversations_that_begin_alike_stay_apart():
    """The same question and the same reply twice, and then different ones. A request that fails continues neither."""

    async def app(row, endpoint):
        client = talks_to(endpoint, max_retries=0)
        histories = [], []
        for texts in (("look", "look"), ("left", "right"), ("more", "more"), ("end", "end")):
            if texts[0] == "left":
                for history in histories:
                    with pytest.raises(anthropic.BadRequestError):
                        await ask(client, "ann", [*history], "too long")
            requests = zip(histories, texts, strict=True)
            await asyncio.gather(*(ask(client, "ann", history, text) for history, text in requests))

    def answer(requests):
        too_long = EndOfEpisode("It is too long.")
        texts = [request.requested_turn.messages[-1]["content"] for request in requests]
        replies = repeat_last(requests)
        return [too_long if text == "too long" else reply for text, reply in zip(texts, replies, strict=True)]

    (episode,) = played(app, answer, together=0.1)
    lineages = [turn.lineage for turn in episode.turns]
    assert [sorted(lineages[place : place + 2]) for place in (0, 2, 4, 6)] == [[0, 1]] * 4
    assert lineages[2:4] == lineages[4:6] == lineages[6:]


@pytest.mark.parametrize(
    "arguments", ['{"a": NaN}', '{"a": 1e999}', '{"a": "\\ud800"}', '{"a": ' + "[" * 40 + "]" * 40 + "}"]
)
def test_a_call_that_no_request_can_have_is_a_text(arguments):
    """Clients send calls back, so the output of an agent could end the run."""
    for call_arguments in (arguments, json.loads(arguments)):
        turn = Turn("ann", "said", 0, tool_calls=(ToolCall("add", call_arguments),))
        reply = ChatReply.from_turn(turn)
        assert not reply.calls and reply.text == "said"
    assert ChatReply.from_turn(Turn("ann", "", 0, tool_calls=(ToolCall("add", '{"a": 1}'),))).calls


def test_a_sub_agent_learns_from_the_reward_of_the_episode(model_folder, tmp_path):
    """One model name, two adapters: each turn is a row of its agent, with the advantage of its episode."""

    async def app(row, endpoint):
        client = talks_to(endpoint)
        same = {"model": "claude", "max_tokens": 9}
        history = [user(question_of(row))]
        for _ in range(2):
            message = await client.messages.create(**same, system="Search.", messages=[user("look")])
            history.append({"role": "assistant", "content": message.content[0].text or "-"})
            history.append(user("So?"))
            await client.messages.create(**same, system="Code.", messages=history)

    rule = BySystemPrompt({"Code": "reasoner", "Search": "actor"})
    arguments = {"workflow": ExternalApp(app, agent_of=rule, answer="reasoner"), "train_dataset": ROWS}
    arguments["reward_funcs"] = lambda completions, **kwargs: [float(index % 4) for index in range(len(completions))]
    trainer = team_trainer(model_folder, tmp_path, settings={"loss_type": "bnpo"}, **arguments)
    slice_ = only_slice(trainer, [trainer.train_dataset[index // 4] for index in range(8)])
    by_episode = {}
    for row in slice_.rows:
        by_episode.setdefault(row.episode, {"reasoner": [], "actor": []})[row.agent].append(row.advantage)
    assert len(by_episode) == 8 and len({advantages["actor"][0] for advantages in by_episode.values()}) == 4
    for advantages in by_episode.values():
        assert advantages["reasoner"] == advantages["actor"] == [advantages["actor"][0]] * 2


async def talk(endpoint, form, stream, tools):
    """A first turn, the answers to its calls, and turns that follow, in one of the three forms of the API."""
    history, texts = [user("What is 3+4?")], []
    sdk = openai.AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key)
    sdk = talks_to(endpoint) if form == "messages" else sdk
    while len(history) < 6:
        text, calls, reply = await FORMS[form](sdk, history, stream, tools and (tools != "once" or len(history) == 1))
        texts.append(text)
        history += reply
        results = [(call_id, str(add(**json.loads(arguments)))) for call_id, arguments in calls]
        if form == "messages" and results:
            blocks = [{"type": "tool_result", "tool_use_id": call_id, "content": total} for call_id, total in results]
            history.append(user(blocks))
        elif form == "responses":
            kind = "function_call_output"
            history += [{"type": kind, "call_id": call_id, "output": total} for call_id, total in results]
        else:
            history += [{"role": "tool", "tool_call_id": call_id, "content": total} for call_id, total in results]
        if not results:
            history.append(user("Again."))
    return texts


async def answer(resource, request, final):
    """The whole reply, or the reply that the method `final` assembles from a stream."""
    if not final:
        return await resource.create(**request)
    async with resource.stream(**request) as parts:
        return await getattr(parts, final)()


async def by_chat(sdk, history, stream, tools):
    request = {"model": "solver", "messages": history, **({"tools": [SCHEMA]} if tools else {})}
    message = (await answer(sdk.chat.completions, request, stream and "get_final_completion")).choices[0].message
    calls = [(call.id, call.function.arguments) for call in message.tool_calls or ()]
    reply = {"role": "assistant", "content": message.content}
    functions = [(call_id, {"name": "add", "arguments": arguments}) for call_id, arguments in calls]
    if calls:
        reply["tool_calls"] = [{"id": call_id, "type": "function", "function": f} for call_id, f in functions]
    return message.content, calls, [reply]


async def by_responses(sdk, history, stream, tools):
    schema = {"type": "function", "strict": False, **SCHEMA["function"]}
    request = {"model": "solver", "input": history, **({"tools": [schema]} if tools else {})}
    response = await answer(sdk.responses, request, stream and "get_final_response")
    calls = [(item.call_id, item.arguments) for item in response.output if item.type == "function_call"]
    items = [item.model_dump(exclude_none=True, exclude={"parsed_arguments"}) for item in response.output]
    return response.output_text, calls, items


async def by_messages(sdk, history, stream, tools):
    request = {"model": "solver", "max_tokens": 64, "messages": history, **({"tools": [TOOL]} if tools else {})}
    message = await answer(sdk.messages, request, stream and "get_final_message")
    calls = [(block.id, json.dumps(block.input)) for block in message.content if block.type == "tool_use"]
    text = "".join(block.text for block in message.content if block.type == "text")
    blocks = [block.model_dump(exclude_none=True) for block in message.content]
    return text, calls, [{"role": "assistant", "content": blocks}]


FORMS = {"chat": by_chat, "responses": by_responses, "messages": by_messages}


@pytest.mark.parametrize(
    ("form", "stream", "tools"),
    [
        *[("chat", False, True), ("responses", True, "once"), ("messages", True, True)],
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in itertools.product(FORMS, (False, True), (False, "once"))
        ),
    ],
)
def test_rows_are_the_sampled_tokens_with_their_gradients(form, stream, tools, model_folder, tmp_path):
    """Whatever the client does with them. Log-probabilities and gradients equal those of a computation by hand."""
    texts = []

    async def app(row, endpoint):
        texts.append(await talk(endpoint, form, stream, tools))

    episodes = []

    def reward(completions, turns, **kwargs):
        episodes.extend(turns)
        return [float(len(texts) % 3 + index % 4) for index in range(len(completions))]

    torch.manual_seed(0)
    arguments = {"train_dataset": ROWS, "processing_class": tool_tokenizer(), "reward_funcs": reward}
    arguments |= {"agents": [AgentSpec("solver"), AgentSpec("judge", trainable=False)]}
    arguments |= {"workflow": ExternalApp(app, tools=bool(tools))}
    # So that rows have log-probabilities
    settings = {"max_completion_length": 64, "loss_type": "bnpo", "num_iterations": 2}
    trainer = team_trainer(model_folder, tmp_path, settings=settings, **arguments)
    if tools:
        canned(trainer, [])
    slice_ = only_slice(trainer, [trainer.train_dataset[index // 4] for index in range(8)])
    trainer.accelerator.backward(trainer.compute_loss(trainer.model, slice_))
    turns = [turn for episode in episodes for turn in episode]
    assert len(turns) == len(slice_.rows) and all(len(episode) >= 2 for episode in episodes)
    assert {turn.text for turn in turns} >= {text for answers in texts for text in answers if text}
    row_ids = sorted((row.prompt_ids.tolist(), row.completion_ids.tolist()) for row in slice_.rows)
    assert row_ids == sorted((list(turn.prompt_ids), list(turn.completion_ids)) for turn in turns)
    for episode in episodes:
        for earlier, later in itertools.pairwise(episode):  # as they were sampled
            sampled, prompt_ids = earlier.completion_ids, later.prompt_ids
            assert any(prompt_ids[place : place + len(sampled)] == sampled for place in range(len(prompt_ids)))
    trained = trainer.policies.parameters("solver")
    gradients = {name: parameter.grad.clone() for name, parameter in trained.items()}
    trainer.model.zero_grad()
    for row in slice_.rows:
        logps = plain_logps(trainer, row)
        assert (row.old_per_token_logps - logps).abs().max() <= 1e-5
        (-row.advantage * logps.sum() / sum(len(row.completion_ids) for row in slice_.rows)).backward()
    assert any(gradient.abs().max() > 1e-4 for gradient in gradients.values())
    for name, parameter in trained.items():
        assert (gradients[name] - parameter.grad).abs().max() <= 2e-6, name


def test_an_unchanged_harness_runs_on_the_served_team(model_folder, tmp_path):
    """Agents are chosen as in training, greedy answers are the same, and tokens are counted as they are shown."""
    replies = []

    async def harness(row, endpoint):
        client = talks_to(endpoint)
        same = {"model": "claude", "max_tokens": 9, "extra_body": {"temperature": 0}}
        plan = await client.messages.create(**same, system="You plan.", messages=[user(question_of(row))])
        text = plan.content[0].text
        conversation = {"system": "You answer.", "messages": [user(text or "-")]}
        async with client.messages.stream(**same, **conversation, stop_sequences=["9"]) as parts:
            answer = await parts.get_final_message()
        count = await client.messages.count_tokens(model="claude", **conversation)
        assert count.input_tokens == answer.usage.input_tokens > 0 < answer.usage.output_tokens
        assert answer.stop_reason in ("end_turn", "stop_sequence", "max_tokens")
        replies.append((text, answer.content[0].text))

    rule = BySystemPrompt({"You plan": "reasoner", "You answer": "actor"})
    trainer = team_trainer(model_folder, tmp_path, workflow=ExternalApp(harness, agent_of=rule))
    for parameter in trainer.policies.all_parameters():
        torch.nn.init.normal_(parameter.data, std=0.1)
    rows = [{"prompt": row["prompt"]} for row in tiny_dataset(2, seed=3)]
    episodes = trainer.team.run(rows)
    assert [[turn.agent for turn in episode.turns] for episode in episodes] == [["reasoner", "actor"]] * 2
    expected = sorted(replies)
    trainer.save_model()
    replies.clear()
    team = Team.from_pretrained(tmp_path, model_folder, processing_class=tiny_tokenizer())
    for key in (None, "secret"):
        with serving(team, api_key=key) as url:
            for row in rows:
                asyncio.run(harness(row, AppEndpoint(f"{url}/v1", key or "none")))
            client = anthropic.Anthropic(base_url=url, api_key="wrong", max_retries=0)
            error = anthropic.AuthenticationError if key else anthropic.NotFoundError
            with pytest.raises(error, match="" if key else "No entry of `agent_of` matches"):
                client.messages.create(model="claude", max_tokens=9, messages=[user("Hi.")])
    assert sorted(replies) == sorted(2 * expected) and len(set(replies[0])) > 1
    with serving(team, agent_of=lambda request: "nobody") as url:  # overrides the rule of the team
        client = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
        with pytest.raises(anthropic.NotFoundError, match="`agent_of` chose 'nobody'"):
            client.messages.create(model="claude", max_tokens=9, system="You plan.", messages=[user("Hi.")])


def test_a_team_answers_anthropic_clients(namesakes):  # noqa: F811
    team = Team.from_pretrained(f"{namesakes}/team", model=f"{namesakes}/base")
    request = {"model": "team", "max_tokens": 9, "messages": [user("1 + 1 = ?")], "extra_body": {"temperature": 0}}
    with serving(team) as url:
        client = anthropic.Anthropic(base_url=url, api_key="none")
        answer = client.messages.create(**request)
        with client.messages.stream(**request) as parts:
            assert "".join(parts.text_stream) == answer.content[0].text
        assert answer.role == "assistant" and answer.usage.output_tokens > 0
        with pytest.raises(anthropic.BadRequestError, match="not supported"):
            client.messages.create(**request, tools=[TOOL])
        models = client.models.list()
        assert models.has_more is False and {model.display_name for model in models} >= {"team"}


@pytest.mark.parametrize("stream", [False, True])
def test_anthropics_tool_runner_falls_back_to_whole_conversations(stream):
    """The first request names a thread, which the server does not support; the client recognizes the error."""
    results = []

    @anthropic.beta_async_tool
    async def add(a: int, b: int) -> str:
        """Add two numbers.

        Args:
            a: the first
            b: the second
        """
        return str(a + b)

    async def app(row, endpoint):
        async with talks_to(endpoint) as client:
            options = {"model": "ann", "max_tokens": 64, "tools": [add], "stream": stream}
            runner = client.beta.messages.tool_runner(**options, messages=[user("What is 3+4?")])
            results.append((await runner.until_done()).content[0].text)

    def answer(requests):
        first = all(isinstance(m["content"], str) and m["role"] != "tool" for m in requests[0].requested_turn.messages)
        call = {"tool_calls": (ToolCall("add", {"a": 3, "b": 4}),), "without_calls": ""} if first else {}
        return [request.make_turn("" if first else "It is 7.", **call) for request in requests]

    (episode,) = collect(ExternalApp(app, tools=True, together=0), [{"prompt": "x"}], ["ann"], answer)
    assert results == ["It is 7."] and [turn.lineage for turn in episode.turns] == [0, 0]
    assert episode.turns[1].text == "It is 7." and not episode.counts.get("app/refused")


def test_deferred_tools_are_shown_once_a_search_has_found_them():
    deferred = [{**TOOL, "name": name, "defer_loading": True} for name in ("fetch", "never")]
    names = lambda request: [tool["function"]["name"] for tool in request.tools]  # noqa: E731
    assert names(read(tools=[TOOL, *deferred])) == ["add"]
    call = {"type": "tool_use", "id": "t", "name": "add", "input": {}}
    search_result = {
        "type": "tool_result",
        "tool_use_id": "t",
        "content": [{"type": "tool_reference", "tool_name": "fetch"}],
    }
    messages = [user("x"), {"role": "assistant", "content": [call]}, user([search_result])]
    request = read(tools=[TOOL, *deferred], messages=messages)
    assert names(request) == ["add", "fetch"] and request.messages[-1]["content"] == "The tool fetch is available."
