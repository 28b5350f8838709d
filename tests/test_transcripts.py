"""Transcripts for the terminal and for the browser are complete and safe for any text."""

import asyncio
import re
import subprocess
import time
from html.parser import HTMLParser

from marft_trl import AgentSpec, Sequential, Workflow
from marft_trl.episodes.tools import ToolCall
from marft_trl.extras.commands import main
from marft_trl.reporting.transcripts import Transcript, TranscriptMessage, format_episode, html_page, write_index
from marft_trl.tiny import exact_answer, tiny_dataset
from marft_trl.workflows import rehearse

import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from markupsafe import Markup

from .helpers import grows_linearly, team_trainer
from .test_page import CHROMIUM, browsing


def look() -> str:
    """Look."""
    return "a door"


def episode_with_everything():
    class EpisodeOutcome(Workflow):
        earns = True

        async def run(self, episode):
            plan = await episode.turn("planner")
            episode.observe("It is dark.", after=[plan], reward=0.5)
            await episode.turn("solver")

    replies = iter(["go <left> & right", ToolCall("look"), "through the door"])
    return rehearse(EpisodeOutcome(), ["planner", "solver"], lambda *_: next(replies), "Where to?", {"solver": [look]})


def test_a_transcript_has_speakers_texts_and_observations():
    """The terminal and the page show the same."""
    transcript = Transcript.of(episode_with_everything(), {"exact": 1.0}, "step 3", [0.5, None, [1.0, -2.0]])
    speakers = [entry.speaker for entry in transcript.entries]
    assert speakers == ["planner", "environment", "solver", "tool", "solver"]
    planner, feedback, call, result, answer = transcript.entries
    assert planner.notes == ("sees the prompt", "earned 0.5") and planner.advantages == 0.5
    assert feedback.notes == ("feedback",) and feedback.is_feedback
    assert call.notes == ("sees planner #1, feedback", "calls look") and call.advantages is None
    assert result.notes == ("result of look, for solver",) and result.text == "a door"
    assert answer.notes == ("sees planner #1, solver #2, feedback", "the team's answer")
    assert answer.advantages == (1.0, -2.0)
    text, page = transcript.as_text(200), Reader.read(html_page([transcript])).text
    words = ["step 3", "Where to?", "exact 1", "go <left> & right", "It is dark.", "a door", "through the door"]
    for expected_text in (*words, *(note for entry in transcript.entries for note in entry.notes)):
        assert expected_text in text and expected_text in page
    order = [page.index(word) for word in words[3:]]
    assert order == sorted(order)


class Reader(HTMLParser):
    """The text, tags and colours of a page."""

    def __init__(self):
        super().__init__()
        self.text, self.tags, self.colours = "", [], []

    @classmethod
    def read(cls, page):
        reader = cls()
        reader.feed(page)
        reader.close()
        return reader

    def handle_data(self, data):
        self.text += data

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, tuple(name for name, _ in attributes)))
        self.colours += [dict(attributes)["style"]] if tag == "span" else []


def test_turn_rewards_are_saved_when_no_transcript_is_printed(model_folder, tmp_path, capsys):
    def half(completions, **kwargs):
        return [0.25] * len(completions)

    agents = [AgentSpec("solver", reward_funcs=half)]
    settings = {"credit": "per_step", "max_steps": 1, "log_completions": True, "num_completions_to_print": 0}
    team_trainer(model_folder, tmp_path, agents=agents, settings=settings).train()
    (page,) = (tmp_path / "completions").glob("transcripts_*.html")
    assert "own reward: half 0.25" in page.read_text() and "the team's answer" not in capsys.readouterr().out
    table = pd.read_parquet(tmp_path / "completions" / "completions_00001.parquet")
    assert len(table) == 8 and set(table["turn_reward/half"]) == {0.25}


LEGEND = ["--a:-1", "--a:-.5", "--a:0", "--a:.5", "--a:1"]


def test_tokens_are_coloured_by_their_advantage():
    tokens = ("th", "rough", " <b>")
    message = TranscriptMessage("solver", "through <b>", tokens=tokens, advantages=(1.5, -0.25, 0.0))
    page = Reader.read(html_page([Transcript("", "q", (message,))]))
    assert page.colours == [*LEGEND, "--a:1.00", "--a:-0.25", "--a:0.00"] and "through <b>" in page.text
    assert "advantages -0.25 to +1.5" in page.text
    whole = Reader.read(html_page([Transcript("", "q", (TranscriptMessage("solver", "through", advantages=-3.0),))]))
    assert whole.colours == [*LEGEND, "--a:-1.00"] and "advantage -3" in whole.text
    assert Reader.read(html_page([Transcript("", "q", (TranscriptMessage("solver", "through"),))])).colours == LEGEND


PIECES = ["<script>", "</pre>", "</section>", "<!--", "-->", "&lt;", '"', "'", "\x1b[31m", "\u202e", "\ud800", "\r"]
PIECES += ["é", "\x00"]
ODD = st.lists(st.one_of(st.sampled_from(PIECES), st.text(max_size=4), st.characters()), max_size=20).map("".join)


def test_texts_that_claim_to_be_escaped_are_escaped():
    """An environment that renders its texts with jinja2 returns `Markup`."""
    attack = Markup("<img src=x>")
    message = TranscriptMessage(attack, attack, notes=(attack,), shown=attack, tokens=(attack,), advantages=(1.0,))
    page = html_page([Transcript(attack, attack, (message,), {attack: 1.0}, reference=attack)], attack, attack)
    assert "<img" not in page and page.count("&lt;img") >= 9


def renders_safely(text):
    """Whether a text changes neither the structure of the page nor the terminal."""
    transcripts = [
        Transcript(
            content,
            content,
            (TranscriptMessage(content, content, (content,), content, (content, content), (0.1, 0.2)),),
            {content: 1.0},
        )
        for content in (f"a{text}", "plain")
    ]
    odd, plain = (Reader.read(html_page([transcript], transcript.title)) for transcript in transcripts)
    terminal = transcripts[0].as_text()
    return odd.tags == plain.tags and all(char.isprintable() or char in "\n\t" for char in terminal)


@pytest.mark.parametrize("count", [100, pytest.param(10_000, marks=pytest.mark.slow)])
def test_no_text_breaks_a_rendering(count):
    @settings(max_examples=count)
    @given(ODD)
    def check(text):
        assert renders_safely(text)

    check()


@pytest.mark.parametrize("piece", ["<script>", "\x1b[31m", "a", " ", "\n", "&", "\u202e"])
def test_long_texts_are_rendered_in_linear_time(piece):
    def render(size):
        text = piece * (size // len(piece))
        transcript = Transcript.of(rehearse(Sequential(), ["solver"], lambda *_: text, "q"))
        assert len(transcript.as_text()) + len(html_page([transcript])) > size

    assert grows_linearly(render, 400_000)


def test_hundreds_of_turns_are_rendered():
    episode = rehearse(Sequential(rounds=300), ["solver"], lambda *_: "word", "q")
    start = time.process_time()
    assert len(html_page([Transcript.of(episode)])) > 100_000 and "solver #299" in format_episode(episode)
    assert time.process_time() - start < 60


def run_browser(page, *options):
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]
    command = [CHROMIUM, *flags, "--disable-dev-shm-usage", *options, page.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


def test_characters_of_several_tokens_are_whole(model_folder, tmp_path):
    trainer = team_trainer(model_folder, tmp_path)
    ids = trainer.processing_class("aé日b")["input_ids"]
    texts = trainer.parts.reporter.token_texts("reasoner", ids)
    assert len(texts) == len(ids) and "".join(texts) == "aé日b"


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
def test_a_browser_shows_the_page(tmp_path):
    tokens, advantages = [[], [], ["through ", "the door"]], [0.5, None, [1.0, -1.0]]
    transcript = Transcript.of(episode_with_everything(), {"exact": 1.0}, "step 3", advantages, tokens)
    attack = TranscriptMessage(
        "solver", "<script>document.title = 'taken'</script><img src=x onerror=\"document.title='taken'\">"
    )
    page = tmp_path / "page.html"
    page.write_text(html_page([transcript, Transcript("attack", "q", (attack,))]), encoding="utf-8")
    dumped = run_browser(page, "--virtual-time-budget=2000", "--dump-dom")
    rendered = Reader.read(dumped)
    assert "<title>Episodes</title>" in dumped  # no script ran
    tags = [tag for tag, _ in rendered.tags]
    assert rendered.text.count("document.title") == 2 and "img" not in tags and tags.count("script") == 1  # ours
    assert "through the door" in rendered.text and len(rendered.colours) == 8
    picture = tmp_path / "page.png"
    run_browser(page, f"--screenshot={picture}")
    assert colours(picture) >= {"blue", "orange"}


def test_a_run_lists_pages_with_right_answers_and_rewards(model_folder, tmp_path, capsys):
    def half(completions, **kwargs):
        return [0.5] * 2 + [1.0] * (len(completions) - 2)

    settings = {"max_steps": 2, "log_completions": True, "num_completions_to_print": 2, "run_name": "a <run>"}
    settings |= {"advantage": "gae", "critic": "shared"}  # each token has an advantage
    trainer = team_trainer(model_folder, tmp_path, settings=settings, reward_funcs=[exact_answer, half])
    trainer.train()
    folder = tmp_path / "completions"
    index = (folder / "index.html").read_text()
    assert re.findall(r'href="([^"]*)"', index) == ["transcripts_00002.html", "transcripts_00001.html"]
    # The mean over all episodes of the batch, as logged, although the page shows only the first
    logged = [f"{log['reward']:.3g}" for log in trainer.state.log_history[1::-1]]
    assert re.findall(r"The first 2 of 8 episodes, mean reward ([\d.]+)", index) == logged
    assert "a &lt;run&gt;" in index
    page = Reader.read((folder / "transcripts_00002.html").read_text())
    assert "a <run> · The first 2 of 8 episodes" in page.text and page.text.count("right answer") == 2
    assert page.text.count("episode 0") == page.text.count("episode 1") == 1 and "episode 2" not in page.text
    assert "reasoner" in page.text and "what it was shown" in page.text and len(page.colours) > 20
    assert page.text.count("exact_answer") == page.text.count("total") == 2
    assert ("a", ("href",)) in page.tags
    (folder / "transcripts_00001 (1).html").write_text("a copy that somebody has made")
    write_index(folder, "again")
    assert (folder / "index.html").read_text().count("<li>") == 2
    assert main(["transcripts", str(tmp_path)]) == 0
    output = capsys.readouterr().out
    assert re.search(r"^half 0.5$", output, re.MULTILINE) and "advantage: -1" not in output


def test_the_page_of_an_evaluation_is_next_to_that_of_its_step(model_folder, tmp_path, capsys):
    settings = {"max_steps": 2, "log_completions": True, "num_completions_to_print": 1, "completions_total_limit": 1}
    settings |= {"eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 4, "num_generations_eval": 4}
    folder = tmp_path / "completions"
    folder.mkdir()
    (folder / "transcripts_00000_eval.html").write_text("beyond the limit")
    team_trainer(model_folder, tmp_path, settings=settings, eval_dataset=tiny_dataset(1, seed=1)).train()
    pages = {path.name: path.read_text() for path in folder.glob("transcripts_*")}
    assert sorted(pages) == ["transcripts_00002.html", "transcripts_00002_eval.html"]
    assert "advantage" in Reader.read(pages["transcripts_00002.html"]).text
    assert "of the evaluation at step 2" in pages["transcripts_00002_eval.html"]
    index = (folder / "index.html").read_text()
    links = re.findall(r'href="([^"]*)">([^<]*)', index)
    assert links == [("transcripts_00002_eval.html", "step 2, evaluation"), ("transcripts_00002.html", "step 2")]
    capsys.readouterr()
    assert main(["transcripts", str(tmp_path)]) == 0 and "logged at step 2" in capsys.readouterr().out
    assert main(["transcripts", str(tmp_path), "--eval"]) == 0 and "evaluation at step 2" in capsys.readouterr().out
    (folder / "transcripts_00003_eval.html").write_text("a later evaluation")
    assert main(["transcripts", str(tmp_path)]) == 0 and "logged at step 2" in capsys.readouterr().out
    assert main(["transcripts", str(tmp_path), "--step", "3"]) == 0 and "a later" in capsys.readouterr().out
    (folder / "transcripts_00003_eval.html").unlink()
    (folder / "transcripts_00002.html").unlink()
    assert main(["transcripts", str(tmp_path)]) == 0 and "evaluation at step 2" in capsys.readouterr().out
    (folder / "transcripts_00002_eval.html").unlink()
    assert main(["transcripts", str(tmp_path), "--eval"]) == 2
    assert "no transcripts of evaluations" in capsys.readouterr().err


def test_a_limit_keeps_the_completions_of_the_latest_steps(model_folder, tmp_path):
    folder = tmp_path / "completions"
    folder.mkdir()
    untouched = {
        "transcripts_00009.html",
        "completions_00009.parquet",
        "notes.txt",
    }  # of a later step, and of the user
    for name in (*untouched, "transcripts_00000.html"):
        (folder / name).write_text("x")
    settings = {"max_steps": 3, "log_completions": True, "num_completions_to_print": 0, "completions_total_limit": 2}
    team_trainer(model_folder, tmp_path, settings=settings).train()
    latest = {name for step in (2, 3) for name in (f"transcripts_0000{step}.html", f"completions_0000{step}.parquet")}
    assert {path.name for path in folder.iterdir()} == {*latest, *untouched, "index.html"}


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
def test_episodes_are_searched_sorted_and_read_by_keyboard(tmp_path):
    def transcript(number):
        message = TranscriptMessage("solver", f"word{number} " * 400, shown="the whole question", advantages=0.5)
        return Transcript(f"episode {number}", "q", (message,), {"exact": number / 4}, number / 4, f"answer {number}")

    page = tmp_path / "page.html"
    page.write_text(html_page([transcript(number) for number in (1, 3, 0, 2)], index="index.html"), encoding="utf-8")
    titles = "[...document.querySelectorAll('section')].filter(node => !node.hidden).map(node => node.innerText[8])"

    async def used():
        async with browsing(tmp_path / "profile", page.as_uri()) as browser:
            await browser.until(
                "document.querySelectorAll('section').length == 4 && document.readyState == 'complete'"
            )

            async def key(char):
                await browser.call("Input.dispatchKeyEvent", type="keyDown", text=char, key=char)
                await browser.call("Input.dispatchKeyEvent", type="keyUp", key=char)

            async def order(by):
                await browser.value(f"order.value = '{by}'; order.dispatchEvent(new Event('change'))")
                return "".join(await browser.value(titles))

            assert "".join(await browser.value(titles)) == "1302"
            assert [await order(by) for by in (-1, 1, 0)] == ["3210", "0123", "1302"]
            await key("/")
            await browser.write("word2")
            await browser.until(f"({titles}).length == 1")
            assert await browser.value("count.textContent") == "1 of 4" and await browser.value(titles) == ["2"]
            await browser.value("find.value = ''; find.dispatchEvent(new Event('input'))")
            await browser.press("Escape")
            places = []
            for pressed in "jjjk":
                await key(pressed)
                places.append(await browser.value("document.activeElement.innerText.slice(8, 9)"))
            assert "".join(places) == "1303"
            await key("o")
            assert await browser.value("[...document.querySelectorAll('details')].every(node => node.open)")
            assert not browser.problems, browser.problems
            await browser.picture(tmp_path / "page.png")

    asyncio.run(used())


def colours(picture):
    """The colours of advantages that a screenshot contains."""
    image = pytest.importorskip("PIL.Image").open(picture).convert("RGB")
    pixels = {pixel for _, pixel in image.getcolors(image.width * image.height)}
    return {"blue" if b > r else "orange" for r, _, b in pixels if abs(b - r) > 80}
