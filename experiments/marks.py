"""Tables that commands write into pages, between two marks."""


def put_between(page: str, begin: str, end: str, text: str) -> str:
    """The page with `text` in the place of what stands between the marks. Raises ValueError for a page without them."""
    before, first, rest = page.partition(f"{begin}\n")
    _, last, after = rest.partition(f"\n{end}")
    if not first or not last:
        raise ValueError(f"the page has no {begin} with {end} behind it, each on a line of its own")
    return f"{before}{first}{text}{last}{after}"
