"""The documentation as a site: every public name is on its API page, and its pages fit into narrow windows."""

import ast
import asyncio
import functools
import importlib
import importlib.util
import inspect
import json
import re
import subprocess
import sys
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from .test_page import CHROMIUM, browsing


ROOT = Path(__file__).parents[1]
HAS_MKDOCS = importlib.util.find_spec("mkdocs") is not None
# Repeat what the package lists
INSIDE = {"marft_trl.trainer", "marft_trl.configs"}


def listed():
    """Modules with public names: those that have a list."""
    for file in sorted((ROOT / "marft_trl").rglob("*.py")):
        assigned = [node for node in ast.parse(file.read_text()).body if isinstance(node, ast.Assign)]
        name = ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        if any(ast.unparse(node.targets[0]) == "__all__" for node in assigned) and name not in INSIDE:
            yield name


def test_every_public_name_is_in_the_api_and_has_a_docstring():
    page = (ROOT / "docs" / "reference" / "api.md").read_text()
    module_names = re.findall(r"<!-- names of ([\w.]+) -->", page)
    assert sorted(module_names) == sorted(listed())
    for module in map(importlib.import_module, module_names):
        for name in module.__all__:
            public_object = getattr(module, name)
            if inspect.isclass(public_object) or inspect.isfunction(public_object):
                assert inspect.getdoc(public_object), (module.__name__, name)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    if not HAS_MKDOCS:
        pytest.skip("needs the extra `docs`")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


@pytest.mark.slow
def test_the_site_is_complete(site):
    pages = {file.relative_to(ROOT / "docs").with_suffix("") for file in (ROOT / "docs").rglob("*.md")}
    for page in pages:
        assert (site / page).with_suffix(".html").exists() and (site / page).with_suffix(".md").exists(), page
        assert f"({page}.md)" in (site / "llms.txt").read_text()
    for name, count in {"workflows": 7, "environments_and_games": 1}.items():
        text = (site / "guide" / f"{name}.html").read_text()
        assert text.count('<svg class="flowchart"') == count and 'class="mermaid"' not in text
    assert f"marft_trl {importlib.import_module('marft_trl').__version__}" in (site / "index.html").read_text()
    api = (site / "reference" / "api.html").read_text()
    for module in ["marft_trl", *listed()]:
        for name in importlib.import_module(module).__all__:
            assert f'id="{module}.{name}"' in api, (module, name)
    assert not re.search(r"\[<code>[\w.]+</code>\]", api)  # links of docstrings
    for file in (*site.rglob("*.html"), *site.rglob("*.md")):  # links lead somewhere, also those of `llms.txt`
        link = r"\]\(([^)#\s:]+)(?:#[\w-]+)?\)" if file.suffix == ".md" else r'(?:href|src)="([^"#?:]+)["#?]'
        for target in re.findall(link, file.read_text()) if file.name != "404.html" else ():
            assert (file.parent / target).exists(), (str(file.relative_to(site)), target)
    for file in site.rglob("*.html"):  # nothing comes from another host
        assert not re.findall(r'<(?:script|link|img)[^>]*(?:src|href)="https?://[^"]*', file.read_text()), file


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
@pytest.mark.parametrize("width", [1280, 390])
def test_pages_fit_into_the_window(site, tmp_path, monkeypatch, width):
    monkeypatch.setattr(SimpleHTTPRequestHandler, "log_message", lambda *arguments: None)
    pages = [file.relative_to(site) for file in sorted(site.rglob("*.html")) if file.name != "404.html"]

    async def looked_at(url):
        async with browsing(tmp_path / "profile", url) as page:
            size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
            await page.call("Emulation.setDeviceMetricsOverride", **size)
            for path in pages:
                await page.call("Page.navigate", url=f"{url}/{path}")
                await page.until(f"document.readyState == 'complete' && location.pathname == '/{path}'")
                wide = await page.value("document.documentElement.scrollWidth")
                assert wide <= width, (str(path), wide)
                assert not page.problems, (str(path), json.dumps(page.problems)[:2000])
                page.problems.clear()
                if path.name in ("index.html", "algorithms.html", "choices.html"):
                    await page.picture(tmp_path / f"{path.stem}-{width}.png")

    handler = functools.partial(SimpleHTTPRequestHandler, directory=str(site))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            asyncio.run(looked_at(f"http://127.0.0.1:{server.server_port}"))
        finally:
            server.shutdown()
