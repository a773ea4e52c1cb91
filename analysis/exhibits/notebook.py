"""What a notebook shows: an exhibit as heading, figure, table and caption, and an answer as a sentence."""

from IPython.display import HTML, Image, Markdown, display

from analysis.exhibits.exhibit import Exhibit
from analysis.exhibits.figures.files import png_bytes
from analysis.exhibits.tables.files import frame


def show(exhibit: Exhibit) -> None:
    """Display an exhibit; what makes its records again stands below it."""
    display(Markdown(f"### {exhibit.title}"))
    if exhibit.draw:
        display(Image(png_bytes(exhibit.draw())))
    if exhibit.table:
        display(HTML(frame(exhibit.table).to_html(index=False, border=0)))
    command = f"\n\nRecords: `{exhibit.command}`" if exhibit.command else ""
    display(Markdown(f"{exhibit.caption} *({', '.join(exhibit.evidence)})*{command}"))


def say(*sentences: str) -> None:
    """Display an answer, one paragraph a sentence."""
    display(Markdown("\n\n".join(sentences)))
