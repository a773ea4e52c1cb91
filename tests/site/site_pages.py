"""Pages whose commands are run: all of `docs/`, and the documents of the repository that are pages of the site."""

from analysis.site.fences import PROJECT, ROOT, Fence, fences

DOCS = ROOT / "docs"
PAGES = sorted([*DOCS.rglob("*.md"), *(ROOT / path for path in PROJECT if path != "CHANGELOG.md")])


def name_of(path):
    return str(path.relative_to(ROOT))


def blocks(path) -> list[Fence]:
    return list(fences(path.read_text(encoding="utf-8")))


def write_file(fence: Fence, folder):
    target = folder / fence.title
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(fence.text, encoding="utf-8")
