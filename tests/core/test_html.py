"""Cards for notebooks: everything is escaped, nothing is fetched."""

from html.parser import HTMLParser

from moejax.core import html
from moejax.core.words import cut

HOSTILE = "<script>alert('x')</script>&\"quoted\""


class Reader(HTMLParser):
    """Collects tags and texts, and whether every tag is closed."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.texts: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.open.append(tag)
        self.tags.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def test_every_text_is_escaped() -> None:
    page = html.card(
        HOSTILE,
        html.facts({HOSTILE: HOSTILE}),
        html.table((HOSTILE, "b"), [[HOSTILE, 1]]),
        html.note(HOSTILE, color=HOSTILE),
        html.heading(HOSTILE),
    )
    read = Reader(page)
    assert read.open == [] and read.tags <= {"div", "table", "thead", "tbody", "tr", "th", "td"}
    assert read.texts.count(HOSTILE) == 7


def test_facts_leave_out_what_is_not_known() -> None:
    assert Reader(html.facts({"a": 0, "b": None, "c": ""})).texts == ["a", "0", "c"]


def test_long_texts_are_cut_and_say_so() -> None:
    assert cut("abcdef", 4) == "abcd… (2 more characters)"
    assert cut("abcd", 4) == "abcd"
    assert len(html.text("x" * 100_000)) < 5000


def test_columns_are_set_as_asked() -> None:
    page = html.table(("a", "b"), [["1", "2"]], right=(0,), strong=(0,))
    assert page.count("text-align:right") == 2 and page.count("text-align:left") == 2
    assert page.count("font-weight:600") == 2
