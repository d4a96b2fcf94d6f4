"""course.md as notebooks, for Jupyter, Colab and Kaggle:  python docs/notebook.py [FOLDER]

A block of Python or of commands on the page is a cell, and the block of text behind it the cell's
output. Exercise 8 has a notebook of its own, because its variable counts in a fresh kernel only.
"""
import json
import re
import sys
from pathlib import Path

HERE = Path(__file__).parent
CELL = re.compile(r"```(python|sh)\n(.*?)```\n(?:\s*```text\n(.*?)```\n)?", re.DOTALL)
ALONE = "In [`course-8.ipynb`](course-8.ipynb): it needs a fresh kernel.\n\n"


def code_cell(language, code, printed):
    if language == "sh":                       # by the kernel, in any system
        code = re.sub(r"^python ", "%run ", code, flags=re.MULTILINE)
    code = re.sub(r"\A# (\w+\.py)\n", r"%%writefile \1\n", code)
    outputs = [{"output_type": "stream", "name": "stdout", "text": printed}] if printed else []
    return {"cell_type": "code", "source": code.rstrip(), "outputs": outputs, "execution_count": None,
            "metadata": {}}


def notebook(page):
    """The text of the .ipynb of a Markdown page."""
    cells = []
    rest = CELL.split(page)                    # text, then language, code, output and text of each cell
    while rest:
        text, *rest = rest
        if text.strip():
            cells.append({"cell_type": "markdown", "source": text.strip(), "metadata": {}})
        if rest:
            language, code, printed, *rest = rest
            cells.append(code_cell(language, code, printed))
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    whole = {"nbformat": 4, "nbformat_minor": 4, "metadata": {"kernelspec": kernel}, "cells": cells}
    return json.dumps(whole, ensure_ascii=False, indent=1) + "\n"


def main(folder=HERE):
    page = (HERE / "course.md").read_text(encoding="utf-8")
    before, last, after = re.split(r"^(?=## 8|## Glossary)", page, flags=re.MULTILINE)
    first = CELL.search(before).group()
    title = last.partition("\n")[0]
    pages = {"course": f"{before}{title}\n\n{ALONE}{after}", "course-8": first + last}
    for name, text in pages.items():
        Path(folder, f"{name}.ipynb").write_text(notebook(text), encoding="utf-8", newline="\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
