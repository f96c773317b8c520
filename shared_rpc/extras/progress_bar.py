"""A progress bar of tqdm that is an endpoint's progress too. Needs tqdm, which this library does without."""

from __future__ import annotations

from typing import Any

from tqdm.auto import tqdm

from shared_rpc.context import CURRENT_RUN, progress_of

__all__ = ["ProgressBar"]


class ProgressBar(tqdm):
    """A bar of tqdm that reports the progress of the endpoint in which it is made, from whichever thread it is updated.

    Libraries that show bars take it as ``tqdm_class``; it serves for loops of your own as well. A disabled bar reports nothing,
    and where no endpoint runs it is tqdm's own. Of several bars the last update counts.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._run = CURRENT_RUN.get()
        super().__init__(*args, **kwargs)
        self._report()

    def update(self, n: float | None = 1) -> Any:
        """Move the bar on, and report."""
        drawn = super().update(n)
        self._report()
        return drawn

    def close(self) -> None:
        """Report for the last time, and close the bar."""
        self._report()
        super().close()

    def _report(self) -> None:
        if self._run is not None and not self.disable:
            self._run.report(progress_of(self.n, self.total, str(self.desc or "").rstrip(": ")))
