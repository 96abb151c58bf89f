"""A short document of headings, paragraphs, tables and figures, written as Markdown and as LaTeX."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from analysis.report.tables import latex
from analysis.text import markdown, markdown_line

#: The longest running text; a longer one is a mistake or an attack.
_LONGEST = 5000


@dataclass(frozen=True)
class Heading:
    """A heading; ``level`` 1 is a section."""

    text: str
    level: int = 2


@dataclass(frozen=True)
class Paragraph:
    """Running text."""

    text: str


@dataclass(frozen=True)
class Bullets:
    """A list of sentences."""

    items: Sequence[str]


@dataclass(frozen=True)
class Table:
    """A table of texts; ``text_columns`` (from 0) are set left, all others right."""

    caption: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    text_columns: Sequence[int] = (0,)


@dataclass(frozen=True)
class Figure:
    """A figure file, by its path without suffix: PNG in Markdown, PDF in LaTeX."""

    path: str
    caption: str
    alternative: str


Block = Heading | Paragraph | Bullets | Table | Figure


def as_markdown(blocks: Sequence[Block]) -> str:
    """Return the document as Markdown; every text is shown as it is."""
    return "\n\n".join(_markdown_block(block) for block in blocks) + "\n"


def _markdown_block(block: Block) -> str:
    if isinstance(block, Heading):
        return f"{'#' * block.level} {markdown(block.text)}"
    if isinstance(block, Paragraph):
        return _unlisted(markdown(block.text, limit=_LONGEST))
    if isinstance(block, Bullets):
        return "\n".join(f"- {markdown(item, limit=_LONGEST)}" for item in block.items)
    if isinstance(block, Figure):
        image = f"![{markdown(block.alternative)}]({block.path}.png)"
        return f"{image}\n\n*{markdown(block.caption, limit=_LONGEST)}*"
    left = set(block.text_columns)
    rule = "|".join("---" if place in left else "---:" for place in range(len(block.headings)))
    lines = [markdown_line(block.headings), f"|{rule}|", *(markdown_line(row) for row in block.rows)]
    return "\n".join([*lines, "", f"*{markdown(block.caption, limit=_LONGEST)}*"])


def _unlisted(text: str) -> str:
    """Keep a paragraph from beginning a list, which ``-``, ``+`` and ``1.`` would."""
    return f"\\{text}" if text[:1] in "-+" else text


def as_latex(blocks: Sequence[Block]) -> str:
    r"""Return the document as LaTeX to be read in by ``\input``; every text is printed as it is."""
    head = [
        r"% \usepackage[T1]{fontenc} \usepackage{booktabs,graphicx,textcomp}",
        r"% \graphicspath{{path/to/report/}} where this file is read from elsewhere",
    ]
    return "\n\n".join(["\n".join(head), *(_latex_block(block) for block in blocks)]) + "\n"


def _latex_block(block: Block) -> str:
    if isinstance(block, Heading):
        command = {1: "section", 2: "subsection"}.get(block.level, "subsubsection")
        return rf"\{command}{{{latex(block.text)}}}"
    if isinstance(block, Paragraph):
        return latex(block.text, limit=_LONGEST)
    if isinstance(block, Bullets):
        items = [rf"\item {latex(item, limit=_LONGEST)}" for item in block.items]
        return "\n".join([r"\begin{itemize}", *items, r"\end{itemize}"])
    if isinstance(block, Figure):
        lines = [r"\centering", rf"\includegraphics[width=0.7\linewidth]{{{block.path}.pdf}}"]
        return "\n".join([r"\begin{figure}[htbp]", *lines, _caption(block.caption), r"\end{figure}"])
    return _latex_table(block)


def _latex_table(table: Table) -> str:
    left = set(table.text_columns)
    columns = "".join("l" if place in left else "r" for place in range(len(table.headings)))
    rows = [" & ".join(latex(text) for text in row) + r" \\" for row in table.rows]
    head = " & ".join(latex(text) for text in table.headings) + r" \\"
    lines = [rf"\begin{{tabular}}{{{columns}}}", r"\toprule", head, r"\midrule", *rows]
    lines += [r"\bottomrule", r"\end{tabular}"]
    # As wide as the page: scaling tables have many columns.
    fitted = [r"\resizebox{\ifdim\width>\linewidth\linewidth\else\width\fi}{!}{%", *lines, "}"]
    return "\n".join(
        [r"\begin{table}[htbp]", r"\centering", _caption(table.caption), *fitted, r"\end{table}"]
    )


def _caption(text: str) -> str:
    return rf"\caption{{{latex(text, limit=_LONGEST)}}}"
