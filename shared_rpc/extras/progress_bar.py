"""A tqdm progress bar that also reports an endpoint's progress. Needs tqdm, which is not a dependency of this library."""

from __future__ import annotations

from typing import Any

from tqdm.auto import tqdm

from shared_rpc.context import CURRENT_RUN, progress_of

__all__ = ["ProgressBar"]


class ProgressBar(tqdm):
    """A tqdm bar that reports the progress of the endpoint in which it is created, from any updating thread.

    Libraries with bars accept it as ``tqdm_class``; it also works for your own loops. A disabled bar reports nothing, and
    outside of endpoints it is an ordinary tqdm bar. Of several bars the last update counts.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._run = CURRENT_RUN.get()
        super().__init__(*args, **kwargs)
        self._report()

    def update(self, n: float | None = 1) -> Any:
        """Advance the bar, and report."""
        drawn = super().update(n)
        self._report()
        return drawn

    def close(self) -> None:
        """Report a last time, and close the bar."""
        self._report()
        super().close()

    def _report(self) -> None:
        if self._run is not None and not self.disable:
            self._run.report(progress_of(self.n, self.total, str(self.desc or "").rstrip(": ")))
