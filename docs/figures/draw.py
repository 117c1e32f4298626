"""Draws the figures of the docs from their recorded data: python docs/figures/draw.py

Each JSON file in this folder holds measured values and the command that measured them. The SVG file of the
same name is drawn from it.
"""

import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

FOLDER = Path(__file__).parent
COLOURS = ("#0b6e4f", "#7fb69e", "#b0b0b0", "#d08c60")


def draw(file: Path) -> None:
    data = json.loads(file.read_text())
    matplotlib.rcParams |= {"svg.hashsalt": file.stem, "svg.fonttype": "none", "font.size": 10}
    figure, axes = plt.subplots(figsize=(7, 3.6), layout="constrained")
    width = 0.8 / len(data["series"])
    for i, (name, values) in enumerate(data["series"].items()):
        places = [j + (i - (len(data["series"]) - 1) / 2) * width for j in range(len(values))]
        bars = axes.bar(places, values, width, label=name, color=COLOURS[i])
        axes.bar_label(bars, fmt="%.0f", fontsize=8, padding=2)
    axes.set_xticks(range(len(data["streams"])), data["streams"])
    axes.set(xlabel=data["x"], ylabel=data["y"])
    axes.set_title(data["title"], fontsize=10)
    axes.margins(y=0.2)  # room for the legend
    axes.legend(frameon=False, loc="upper left")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(file.with_suffix(".svg"), metadata={"Date": None})
    plt.close(figure)


if __name__ == "__main__":
    for file in sorted(FOLDER.glob("*.json")):
        draw(file)
