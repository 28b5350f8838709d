"""
The picture of the README and of the documentation's first page: the team of the quickstart, what it trains on, and
what it learns. Trains the team (two minutes on a CPU), and writes docs/pictures/team-<shape>-<mode>.svg.

    python benchmarks/picture.py
"""

import argparse
import html
import os
import re
import sys
import tempfile
from pathlib import Path

from marft_trl import MARFTConfig
from marft_trl.tiny import tiny_team_model

import pandas as pd
from peft import LoraConfig
from transformers.utils import logging


sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

import quickstart


ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "pictures"
STEPS, SHOWN_STEP = 60, 8
MODES = {
    "light": {"back": "#ffffff", "edge": "#d0d7de", "text": "#1f2328", "soft": "#59636e", "line": "#0969da"},
    "dark": {"back": "#0d1117", "edge": "#3d444d", "text": "#f0f6fc", "soft": "#9198a1", "line": "#4493f8"},
}
# Size of the picture, and the left upper corner of each panel
SHAPES = {
    "wide": ((1200, 420), [(30, 30), (375, 30), (845, 30)]),
    "narrow": ((500, 1240), [(90, 30), (30, 440), (60, 850)]),
}
SANS = "-apple-system, 'Segoe UI', Helvetica, Arial, sans-serif"


def trained(folder):
    """Share of right answers before and after, rewards by step, and the turns of a step."""
    args = MARFTConfig(
        folder,
        per_device_train_batch_size=64,
        num_generations=8,
        num_generations_eval=1,
        per_device_eval_batch_size=200,
        max_steps=STEPS,
        learning_rate=1.5e-3,
        logging_steps=2,
        save_strategy="no",
        log_completions=True,
        num_completions_to_print=0,
        seed=0,
        use_cpu=True,
        bf16=False,
    )
    lora = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear")
    trainer = quickstart.make_trainer(tiny_team_model(), quickstart.Transcripts(), args, 400, peft_config=lora)
    before = quickstart.evaluate(trainer)["eval_exact_match"]
    trainer.train()
    after = quickstart.evaluate(trainer)["eval_exact_match"]
    rewards = [(log["step"], log["reward"]) for log in trainer.state.log_history if "reward" in log]
    turns = pd.read_parquet(Path(folder) / "completions" / f"completions_{SHOWN_STEP:05d}.parquet")
    return before, after, rewards, turns


def two_episodes(turns):
    """A question that was answered rightly and wrongly: its text, and the turns of one episode of each kind."""
    for _, group in turns.groupby(turns["episode"] // 8):
        actors = group[group["agent"] == "actor"]
        right, wrong = (actors[actors["exact_answer"] == score]["episode"] for score in (1, 0))
        question = group["prompt"].iloc[0][-1]["content"]
        if len(right) and len(wrong) and not re.search(r"\b1 \w+s\b", question):  # "1 pens"
            episodes = [group[group["episode"] == number.iloc[0]] for number in (right, wrong)]
            return question, [episode.to_dict("records") for episode in episodes]
    raise SystemExit(f"Step {SHOWN_STEP} has no question with right and wrong answers.")


class Drawing:
    """An SVG picture in the colors of a mode."""

    def __init__(self, size, colors):
        self.size, self.colors, self.parts, self.corner = size, colors, [], (0, 0)

    def add(self, tag, text="", **attributes):
        for x, y in (("x", "y"), ("x1", "y1"), ("x2", "y2"), ("cx", "cy")):
            if x in attributes:
                attributes[x] += self.corner[0]
                attributes[y] += self.corner[1]
        shown = "".join(f' {name.replace("_", "-")}="{value}"' for name, value in attributes.items())
        self.parts.append(f"<{tag}{shown}>{html.escape(text)}</{tag}>")

    def text(self, x, y, text, size=17, color="text", **attributes):
        self.add("text", text, x=x, y=y, font_size=size, fill=self.colors[color], **attributes)

    def code(self, x, y, text, size=16):
        """Text of a fixed width, whatever font there is."""
        font = {"font_family": "ui-monospace, Menlo, Consolas, monospace", "lengthAdjust": "spacingAndGlyphs"}
        self.text(x, y, text, size, textLength=round(0.6 * size * len(text)), **font)

    def box(self, x, y, width, height, **attributes):
        style = {"fill": "none", "stroke": self.colors["edge"], "rx": 6} | attributes
        self.add("rect", x=x, y=y, width=width, height=height, **style)

    def arrow(self, x, top, bottom):
        color = self.colors["soft"]
        self.add("line", x1=x, y1=top, x2=x, y2=bottom - 6, stroke=color, stroke_width=1.5)
        x, bottom = x + self.corner[0], bottom + self.corner[1]
        self.parts.append(f'<path d="M{x - 5} {bottom - 8}L{x} {bottom}L{x + 5} {bottom - 8}" fill="{color}"/>')

    def svg(self, label):
        width, height = self.size
        about = f'role="img" aria-label="{html.escape(label)}" font-family="{SANS}"'
        back = f'<rect width="{width}" height="{height}" rx="10" fill="{self.colors["back"]}"/>'
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
            f'height="{height}" {about}>{back}{"".join(self.parts)}</svg>\n'
        )


def draw_team(drawing):
    drawing.text(0, 18, "A team on one model", 20, font_weight="600")
    drawing.text(160, 62, "question", color="soft", text_anchor="middle")
    for place, (agent, act) in enumerate((("reasoner", "writes the steps"), ("actor", "writes the answer"))):
        top = 98 + 92 * place
        drawing.arrow(160, top - 28, top)
        drawing.box(40, top, 240, 60, stroke=drawing.colors["line"])
        drawing.text(54, top + 26, agent, font_weight="600")
        drawing.text(54, top + 48, act, 15, "soft")
        drawing.text(268, top + 26, f"LoRA {place + 1}", 15, "line", text_anchor="end")
    drawing.box(20, 84, 280, 200, stroke_dasharray="5 4")
    drawing.text(160, 274, "one base, shared", 14, "soft", text_anchor="middle")
    drawing.arrow(160, 288, 316)
    drawing.text(160, 338, "your reward function", color="soft", text_anchor="middle")


def draw_episodes(drawing, question, episodes):
    drawing.text(0, 18, "Each turn is a training example", 20, font_weight="600")
    drawing.text(0, 52, question, 15)
    for place, episode in enumerate(episodes):
        top = 76 + 132 * place
        advantage, score = episode[0]["advantage"], episode[-1]["exact_answer"]
        drawing.box(0, top, 440, 116)
        for line, turn in enumerate(episode):
            y = top + 30 + 34 * line
            drawing.text(14, y, turn["agent"], 15, "soft")
            strength = max(-1.0, min(1.0, turn["advantage"]))  # as on the pages of transcripts
            red, blue = (round(127 + sign * 110 * strength) for sign in (-1, 1))
            width = round(0.6 * 16 * len(turn["completion"])) + 8
            fill = {"fill": f"rgb({red},127,{blue})", "fill_opacity": round(0.65 * abs(strength), 2), "stroke": "none"}
            drawing.box(96, y - 17, width, 24, rx=3, **fill)
            drawing.code(100, y, turn["completion"])
        drawing.text(14, top + 100, f"reward {score:.0f}, advantage {advantage:+.1f}", 15, "soft")
    drawing.text(0, 356, "blue: more of this; orange: less of it", 14, "soft")


def draw_curve(drawing, before, after, rewards):
    drawing.text(0, 18, "And the toy team gets better", 20, font_weight="600")
    left, top, width, height = 40, 52, 270, 240
    soft = drawing.colors["soft"]
    for share in (0, 0.5, 1):
        y = top + height * (1 - share)
        drawing.add("line", x1=left, y1=y, x2=left + width, y2=y, stroke=drawing.colors["edge"])
        drawing.text(left - 8, y + 5, f"{share:.0%}", 13, "soft", text_anchor="end")
    drawing.text(left + 8, top + 18, "training reward", 13, "soft")
    points = [(left + width * step / STEPS, top + height * (1 - reward)) for step, reward in rewards]
    x, y = drawing.corner
    line = " ".join(f"{a + x:.0f},{b + y:.0f}" for a, b in points)
    drawing.parts.append(
        f'<polyline points="{line}" fill="none" stroke="{drawing.colors["line"]}" stroke-width="2.5"/>'
    )
    for step in (0, 30, 60):
        drawing.text(left + width * step / STEPS, top + height + 22, str(step), 13, "soft", text_anchor="middle")
    drawing.text(
        left + width / 2,
        top + height + 40,
        "steps of a 0.4M model: two minutes on a CPU",
        14,
        "soft",
        text_anchor="middle",
    )
    drawing.text(left, 364, f"held-out questions: {before:.0%} → {after:.0%} right", 16, font_weight="600")
    drawing.add("line", x1=left, y1=top, x2=left, y2=top + height, stroke=soft)


def main():
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        before, after, rewards, turns = trained(folder)
    question, episodes = two_episodes(turns)
    label = (
        f"A reasoner and an actor with a LoRA each; turns with rewards; right answers from {before:.0%} to {after:.0%}"
    )
    FOLDER.mkdir(exist_ok=True)
    for shape, (size, corners) in SHAPES.items():
        for mode, colors in MODES.items():
            drawing = Drawing(size, colors)
            for corner, draw in zip(
                corners,
                (
                    draw_team,
                    lambda drawing: draw_episodes(drawing, question, episodes),
                    lambda drawing: draw_curve(drawing, before, after, rewards),
                ),
                strict=True,
            ):
                drawing.corner = corner
                draw(drawing)
            (FOLDER / f"team-{shape}-{mode}.svg").write_text(drawing.svg(label), encoding="utf-8")
    print(f"{before:.1%} -> {after:.1%}; {question}")


if __name__ == "__main__":
    main()
