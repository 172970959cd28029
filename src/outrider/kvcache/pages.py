"""Pages and page tables: who owns which piece of KV memory. Free of torch.

Contract: a page belongs to exactly one table or to the pool. A table grows by `append` before its rows are written and
shrinks by `truncate` when rows are rejected; `release` gives everything back.
"""

from dataclasses import dataclass, field

from outrider.errors import OutriderError

PAGE_SIZE = 16
"""Tokens a page."""


class OutOfPages(OutriderError):
    """The pool has fewer free pages than were asked for; nothing was taken."""


class PagePool:
    """`num_pages` pages of `PAGE_SIZE` tokens; the page that came back last goes out first."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, -1, -1))

    @property
    def num_free(self) -> int:
        """Pages that nobody owns."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Pages that belong to a table."""
        return self.num_pages - len(self._free)

    def take(self, count: int) -> list[int]:
        """`count` pages. Raises: OutOfPages."""
        if count > len(self._free):
            raise OutOfPages(f"{count} KV pages were asked for and {len(self._free)} of {self.num_pages} are free")
        return [self._free.pop() for _ in range(count)]

    def give(self, pages: list[int]) -> None:
        """Take `pages` back."""
        self._free.extend(reversed(pages))


@dataclass
class PageTable:
    """The pages of one sequence in order; `length` tokens of them are in use."""

    pool: PagePool
    pages: list[int] = field(default_factory=list)
    length: int = 0

    def append(self, count: int) -> None:
        """Make room for `count` more tokens. Raises: OutOfPages, leaving the table as it was."""
        self.pages += self.pool.take(pages_for(self.length + count) - len(self.pages))
        self.length += count

    def truncate(self, length: int) -> None:
        """Keep the first `length` tokens and give back pages that hold none of them.

        Raises: ValueError if the table is shorter.
        """
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot truncate a table of {self.length} tokens to {length}")
        keep = pages_for(length)
        given = self.pages[keep:]
        del self.pages[keep:]  # before the pool has them: an interrupt between may lose pages, never give them twice
        self.length = length
        self.pool.give(given)

    def release(self) -> None:
        """Give all pages back."""
        self.truncate(0)

    def slots(self, start: int, stop: int) -> list[int]:
        """Token slots (page * PAGE_SIZE + offset) of positions [start, stop)."""
        return [self.pages[p // PAGE_SIZE] * PAGE_SIZE + p % PAGE_SIZE for p in range(start, stop)]


def pages_for(tokens: int) -> int:
    """Pages that `tokens` tokens take."""
    return -(-tokens // PAGE_SIZE)
