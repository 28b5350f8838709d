# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""What the site needs besides `mkdocs.yml`: files of the repository that pages link to, and names in docstrings."""

import ast
import re
from pathlib import Path

from mkdocs.structure.files import File


ROOT = Path(__file__).parents[1]
LINK = re.compile(r"\]\((\.\./[\w./-]+)(#[\w-]+)?\)")
NAMES = re.compile(r"<!-- names of ([\w.]+) -->")


def on_page_markdown(markdown, page, config, files):
    """Links to files of the repository lead to copies in the site, which is complete without a network."""

    def add(name, file):
        if files.get_file_from_path(name) is None:
            files.append(File.generated(config, name, abs_src_path=str(file)))

    return NAMES.sub(lambda match: entries(match[1]), with_copies(markdown, page.file.src_uri, add))


def with_copies(markdown, page, add=lambda name, file: None):
    """A page with links to copies of files of the repository. `add(name, file)` gets each of them."""
    up = "../" * page.count("/")

    def to_copy(match):
        file = (ROOT / "docs" / page).parent.joinpath(match[1]).resolve()
        if file == ROOT / "docs" / "README.md":  # the list of pages, which the navigation is here
            return f"]({up}index.md)"
        if file.is_relative_to(ROOT / "docs") or not file.is_file():
            return match[0]
        path = file.relative_to(ROOT).as_posix()
        name = f"source/{path}" + ("" if path.endswith((".yaml", ".yml")) else ".txt")
        add(name, file)
        return f"]({up}{name})"

    return LINK.sub(to_copy, markdown)


def entries(module):
    """An entry of mkdocstrings for each public name of a module."""
    names = public_names(module)
    return "\n\n".join(f"::: {module}.{name}" for name in sorted(names, key=str.lower))


def public_names(module):
    """What a module lists in `__all__`."""
    source = ROOT.joinpath(*module.split("."), "__init__.py").read_text(encoding="utf-8")
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
