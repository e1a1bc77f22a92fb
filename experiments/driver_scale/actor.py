"""An actor that does nothing, in a process without torch: what is left of a step is what the driver and Ray do."""

from typing import Any


class Empty:
    """Answers each call with as many results as are expected of it."""

    def call(self, verbs: Any, *values: Any) -> Any:
        """A status, and as many results as the first argument says, each a few bytes."""
        count = verbs[0][1][0]
        return (None, *range(count)) if count else None
