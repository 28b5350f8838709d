"""The page of a served team in a browser: used by keyboard alone. Skipped where there is no Chromium."""

import asyncio
import base64
import contextlib
import json
import os
import shutil
import subprocess
from pathlib import Path

from marft_trl import Team

import pytest
from aiohttp import ClientSession

from .namesakes import NAMES, said_by
from .test_live import namesakes  # noqa: F401  # a fixture
from .test_serve import serving


CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")]
QUESTION = "How many <b>apples</b> are left?"
IDLE = "!document.querySelector('#send').disabled"


class Browser:
    """A page in Chromium, over its DevTools protocol."""

    def __init__(self, socket):
        self._socket, self._count, self.problems = socket, 0, []

    async def call(self, method, **parameters):
        self._count += 1
        await self._socket.send_json({"id": self._count, "method": method, "params": parameters})
        while True:
            message = await self._socket.receive_json(timeout=60)
            if message.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded"):
                self.problems.append(message["params"])
            if message.get("id") == self._count:
                return message["result"]

    async def value(self, expression):
        return (await self.call("Runtime.evaluate", expression=expression, returnByValue=True))["result"].get("value")

    async def until(self, expression):
        for _ in range(600):
            if await self.value(expression):
                return
            await asyncio.sleep(0.1)
        raise AssertionError(f"{expression}: {await self.value('document.body.innerText')}")

    async def press(self, key, text=None):
        code = {"Enter": 13, "Tab": 9, "Escape": 27}[key]
        for kind in ("keyDown", "keyUp"):
            more = {"text": text} if text and kind == "keyDown" else {}
            await self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code, **more)

    async def write(self, text):
        await self.call("Input.insertText", text=text)

    async def picture(self, path):
        shot = await self.call("Page.captureScreenshot", format="png")
        Path(path).write_bytes(base64.b64decode(shot["data"]))


@contextlib.asynccontextmanager
async def browsing(folder, url):
    flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0", "--window-size=760,640"]
    process = subprocess.Popen([CHROMIUM, *flags, f"--user-data-dir={folder}", url], stderr=subprocess.DEVNULL)
    try:
        port = Path(folder) / "DevToolsActivePort"
        while not (port.exists() and port.read_text().count("\n")):
            assert process.poll() is None
            await asyncio.sleep(0.1)
        async with ClientSession() as session:
            pages = []
            while not pages:
                async with session.get(f"http://127.0.0.1:{port.read_text().split()[0]}/json") as response:
                    targets = json.loads(await response.text())
                pages = [target for target in targets if target["type"] == "page" and target["url"].startswith(url)]
            async with session.ws_connect(pages[0]["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                browser = Browser(socket)
                for domain in ("Runtime", "Log", "Page"):
                    await browser.call(f"{domain}.enable")
                yield browser
    finally:
        process.kill()
        process.wait()


def test_the_page_works_by_keyboard(namesakes, tmp_path):  # noqa: F811
    async def used(url):
        async with browsing(tmp_path / "profile", url) as page:
            await page.until("document.querySelectorAll('#model option').length == 6")
            assert await page.value("document.activeElement.id") == "question"  # it can be written into at once
            await page.write(QUESTION)
            await page.press("Enter", "\r")
            await page.until(f"document.querySelectorAll('article').length == 5 && {IDLE}")
            texts = await page.value("[...document.querySelectorAll('article pre')].map(node => node.innerText)")
            headings = await page.value("[...document.querySelectorAll('article h3')].map(node => node.innerText)")
            classes = await page.value("[...document.querySelectorAll('article')].map(node => node.className)")
            assert texts == [said_by(name) for name in NAMES]
            assert headings == [*NAMES[:-1], f"{NAMES[-1]} · the answer"] and classes == [*[""] * 4, "answer"]
            assert await page.value("document.querySelector('section p').innerText") == QUESTION
            if folder := os.environ.get("MARFT_SCREENSHOTS"):
                await page.picture(Path(folder) / "serve.png")
            # By Tab to `Who`, and another agent by its first letter
            await page.press("Tab")
            assert await page.value("document.activeElement.id") == "model"
            await page.call("Input.dispatchKeyEvent", type="keyDown", key="c", text="c")
            assert await page.value("document.getElementById('model').value") == "cat"
            await page.value("document.getElementById('question').focus()")
            await page.press("Enter", "\r")
            await page.until(f"document.querySelectorAll('section')[0].innerText.includes('CatCat') && {IDLE}")
            # An error is shown where a screen reader reads it too
            await page.value("document.getElementById('temperature').value = 9")
            await page.press("Enter", "\r")
            await page.until("document.getElementById('wrong').innerText.includes('from 0 to 2')")
            names = "[...document.querySelectorAll('input, select, textarea')].every(field => field.labels.length)"
            assert await page.value(names)
            return page.problems

    with serving(Team.from_pretrained(f"{namesakes}/team", model=f"{namesakes}/base")) as url:
        problems = asyncio.run(used(url))
    unexpected = [problem for problem in problems if "favicon" not in str(problem) and "400" not in str(problem)]
    assert not unexpected, unexpected
