# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""What the site needs besides `mkdocs.yml`: files that pages link to, flowcharts, and names in docstrings."""

import ast
import html as markup
import re
import tomllib
from pathlib import Path

from mkdocs.structure.files import File


ROOT = Path(__file__).parents[1]
LINK = re.compile(r"\]\((\.\./[\w./-]+)(#[\w-]+)?\)")
NAMES = re.compile(r"<!-- names of ([\w.]+) -->")
FLOWCHART = re.compile(r"^```mermaid\nflowchart LR\n(.*?)\n```$", re.DOTALL | re.MULTILINE)
ARROW = re.compile(r"\s+--(?:\s+(.+?)\s+--)?>\s+")


def on_config(config):
    """The version below each page, and the repository's address at its top once `[project.urls]` names it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    config.copyright = f"marft_trl {project['version']}"
    config.repo_url = project.get("urls", {}).get("Repository")
    return config


def on_page_markdown(markdown, page, config, files):
    """Links to files of the repository lead to copies in the site, which is complete without a network."""

    def add(name, file):
        if files.get_file_from_path(name) is None:
            files.append(File.generated(config, name, abs_src_path=str(file)))

    markdown = FLOWCHART.sub(lambda match: drawn(match[1]), markdown)
    return NAMES.sub(lambda match: entries(match[1]), with_copies(markdown, page.file.src_uri, add))


def with_copies(markdown, page, add=lambda name, file: None):
    """A page with links to copies of files of the repository. `add(name, file)` gets each of them."""

    def to_copy(match):
        file = (ROOT / "docs" / page).parent.joinpath(match[1]).resolve()
        if file.is_relative_to(ROOT / "docs") or not file.is_file():
            return match[0]
        path = file.relative_to(ROOT).as_posix()
        name = f"source/{path}" + ("" if path.endswith((".yaml", ".yml")) else ".txt")
        add(name, file)
        return f"]({'../' * page.count('/')}{name})"

    return LINK.sub(to_copy, markdown)


def drawn(flowchart):
    """A flowchart as a picture in the page: the theme would load a script of another host that draws it."""
    labels, arrows = {}, []
    for line in flowchart.splitlines():
        ends, texts = ARROW.split(line.strip())[::2], ARROW.split(line.strip())[1::2]
        for place, end in enumerate(ends):
            name, _, label = end.partition("[")
            ends[place] = name
            if label or name not in labels:
                labels[name] = label.strip('"]') or name
        arrows += zip(ends[:-1], ends[1:], texts, strict=True)
    return _svg(labels, arrows, _columns(labels, arrows))


def _columns(nodes, arrows):
    """The column of each node: right of all that lead to it, but for arrows that lead back."""
    columns = dict.fromkeys(nodes, 0)
    order = list(nodes)
    for _ in nodes:
        for start, end, _ in arrows:
            if not _leads_back(arrows, start, end, order):
                columns[end] = max(columns[end], columns[start] + 1)
    return columns


def _leads_back(arrows, start, end, order):
    seen, left = set(), [end]
    while left:
        node = left.pop()
        seen.add(node)
        left += [other for begin, other, _ in arrows if begin == node and other not in seen]
    return start in seen and order.index(end) <= order.index(start)


def _svg(labels, arrows, columns):
    rows = {name: list(columns.values())[: list(columns).index(name)].count(columns[name]) for name in columns}
    at = {name: (10 + 180 * columns[name], 10 + 60 * rows[name]) for name in columns}
    width, height = 180 * max(columns.values()) + 140, 60 * max(rows.values()) + 90
    parts = []
    for start, end, text in arrows:
        (x, y), (to_x, to_y) = at[start], at[end]
        if columns[end] > columns[start]:
            path, middle = f"M{x + 120} {y + 18}L{to_x - 6} {to_y + 18}", ((x + to_x + 120) / 2, (y + to_y) / 2 + 12)
        elif columns[end] == columns[start] - 1:  # back, beside the arrow that leads here
            path, middle = f"M{x} {y + 28}L{to_x + 126} {to_y + 28}", ((x + to_x + 120) / 2, (y + to_y) / 2 + 42)
        else:  # back, below all boxes
            low = height - 24
            path = f"M{x + 60} {y + 36}V{low}H{to_x + 60}V{to_y + 42}"
            middle = ((x + to_x) / 2 + 60, height - 8)
        parts.append(f'<path d="{path}" fill="none" stroke="currentColor" marker-end="url(#tip)"/>')
        if text:
            parts.append(f'<text x="{middle[0]}" y="{middle[1]}" text-anchor="middle">{markup.escape(text)}</text>')
    for name, (x, y) in at.items():
        parts.append(f'<rect x="{x}" y="{y}" width="120" height="36" rx="4" fill="none" stroke="currentColor"/>')
        parts.append(f'<text x="{x + 60}" y="{y + 23}" text-anchor="middle">{markup.escape(labels[name])}</text>')
    says = ", ".join(f"{labels[start]} to {labels[end]}" for start, end, _ in arrows)
    tip = '<marker id="tip" markerWidth="7" markerHeight="7" refX="5" refY="3" orient="auto"><path d="M0 0L6 3L0 6" '
    tip += 'fill="currentColor"/></marker>'
    return (
        f'<svg class="flowchart" role="img" aria-label="{markup.escape(says)}" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-size="13" fill="currentColor">{tip}{"".join(parts)}</svg>'
    )


def entries(module):
    """An entry of mkdocstrings for each public name of a module."""
    names = public_names(module)
    return "\n\n".join(f"::: {module}.{name}" for name in sorted(names, key=str.lower))


def public_names(module):
    """What a module lists in `__all__`."""
    place = ROOT.joinpath(*module.split("."))
    place = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
    source = place.read_text(encoding="utf-8")
    lists = [
        node for node in ast.parse(source).body if isinstance(node, ast.Assign) and node.targets[0].id == "__all__"
    ]
    return ast.literal_eval(lists[0].value)


def on_page_content(html, page, config, files):
    """TRL writes names in docstrings as [`Name`]: a link where the API page has it, else the name alone."""
    if not page.file.src_uri.endswith("api.md"):
        return html
    known = {one.rpartition(".")[2]: one for one in re.findall(r'<h\d id="([\w.]+)"', html)}

    def shown(match):
        name = match[1].rpartition(".")[2]
        return f'<a href="#{known[name]}"><code>{name}</code></a>' if name in known else f"<code>{name}</code>"

    return re.sub(r"\[<code>~?([\w.]+)</code>\]", shown, html)


def on_post_build(config):
    """`llms.txt`: every page with its first paragraph, for readers that are no people."""
    base = Path(config.site_dir)
    lines = [f"# {config.site_name}", "", f"> {config.site_description}", ""]
    for section in config.nav:
        (name, pages), *_ = section.items()
        lines += [f"## {name}", ""]
        for entry in [pages] if isinstance(pages, str) else pages:
            path = entry if isinstance(entry, str) else next(iter(entry.values()))
            lines.append(_line(Path(config.docs_dir) / path))
            copy = base / path
            copy.parent.mkdir(parents=True, exist_ok=True)
            text = (Path(config.docs_dir) / path).read_text(encoding="utf-8")
            names = NAMES.sub(lambda match: ", ".join(f"`{match[1]}.{one}`" for one in public_names(match[1])), text)
            copy.write_text(with_copies(names, path), encoding="utf-8")
        lines.append("")
    (base / "llms.txt").write_text("\n".join(lines), encoding="utf-8")


def _line(file):
    text = re.sub(r"\A---\n.*?\n---\n", "", file.read_text(encoding="utf-8"), flags=re.DOTALL).strip()
    title, _, rest = text.partition("\n")
    first = " ".join(rest.strip().split("\n\n")[0].split())
    return f"- [{title.lstrip('# ')}]({file.relative_to(ROOT / 'docs').as_posix()}): {re.sub(r'[*]{2}', '', first)}"
