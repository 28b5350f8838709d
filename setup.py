# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""The README of the wheel: PyPI needs absolute links, which lead to the repository that pyproject.toml names."""

import re
import tomllib
from pathlib import Path

from setuptools import setup


ROOT = Path(__file__).parent


def readme():
    """The README, with links to the tag of this version if `[project.urls]` has `Repository = "https://..."`."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    repository = project.get("urls", {}).get("Repository")
    if not repository:
        return text

    def absolute(match):
        kind = "raw" if match[2].endswith((".svg", ".png")) else "blob"
        return f"{match[1]}{repository.rstrip('/')}/{kind}/v{project['version']}/{match[2]}"

    return re.sub(r'(\]\(|src="|srcset=")(?![a-z]+:|#)([^)"]+)', absolute, text)


setup(long_description=readme(), long_description_content_type="text/markdown")
