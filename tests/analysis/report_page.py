"""What tests read off the report: its identities, links and outside references."""

from dataclasses import replace
from html.parser import HTMLParser

from analysis.report.content import Content
from analysis.report.images import Image, Shown


def image(stem: str) -> Image:
    return Image(Shown(f"{stem}.svg", 600, 300), Shown(f"{stem}.narrow.svg", 400, 800), (f"{stem}.png", f"{stem}.svg"))


def with_images(content: Content) -> Content:
    """The same with a name for every figure, and none drawn."""
    return replace(content, images={each.id: image(each.id) for each in content.exhibits if each.draw})


class Page(HTMLParser):
    """The report, parsed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.links: list[str] = []
        self.outside: list[str] = []  # links that leave the report, for a reader to follow
        self.images: list[str] = []
        self.fetched: list[str] = []  # what a browser would load from elsewhere
        self.policy = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {key: value or "" for key, value in attrs}
        if "id" in given:
            self.ids.append(given["id"])
        if tag == "a":
            (self.outside if "://" in given["href"] else self.links).append(given["href"])
        elif tag == "img":
            self.images.append(given.get("src", ""))
        elif given.get("http-equiv") == "Content-Security-Policy":
            self.policy = given["content"]
        else:
            self.fetched += [
                given[key] for key in ("src", "href", "data", "action", "poster", "srcset") if key in given
            ]
