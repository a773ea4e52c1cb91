"""What tests read off the report: its identities, links and outside references."""

from html.parser import HTMLParser


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
