"""The page on families is the registry's."""

from docs.make_families import PAGE, page
from moejax.models.registry import FAMILIES


def test_the_page_lists_the_registered_families() -> None:
    made = page()
    assert PAGE.read_text(encoding="utf-8") == made, "run python -m docs.make_families"
    assert all(f"| `{name}` |" in made for name in FAMILIES)
