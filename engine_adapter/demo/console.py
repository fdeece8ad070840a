"""The demo on a terminal: live progress while a setting runs, then the table and the promises.

Writes to standard error when standard output carries JSON. Used by the demo's one thread.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from engine_adapter.demo.figures import MEGA, figures_for
from engine_adapter.demo.settings import EXACT_AMPLE, EXACT_TIGHT

if TYPE_CHECKING:
    from engine_adapter.demo.measure import SettingReport
    from engine_adapter.demo.promises import Promise
    from engine_adapter.demo.serve import Progress as Served

_REFRESH_SECONDS = 0.1
_MARKS = {True: "[green]held[/green]", False: "[bold red]FAILED[/bold red]", None: "[dim]n/a[/dim]"}


class ConsoleDisplay:
    """Shows what runs. On a terminal a line moves; elsewhere each setting leaves one line when it has ended.

    The line says how many tokens the device holds, in how many MB of full precision and of INT4 blocks.
    """

    def __init__(self, *, to_stderr: bool) -> None:
        self.console = Console(file=sys.stderr if to_stderr else sys.stdout, highlight=False)
        self._progress: Progress | None = None
        self._task = TaskID(0)
        self._shown_at = 0.0

    def note(self, text: str) -> None:
        self.console.print(f"[dim]{text}[/dim]")

    def begin(self, title: str, total: int) -> Callable[[Served], None]:
        self._progress = Progress(
            TextColumn(f"{title:<11}"),
            BarColumn(bar_width=10),
            MofNCompleteColumn(),
            TextColumn("{task.fields[state]}"),
            TimeElapsedColumn(),
            console=self.console,
        )
        self._task = self._progress.add_task(title, total=total, state="")
        self._progress.start()
        return self._show

    def _show(self, served: Served) -> None:
        now = time.monotonic()
        if self._progress is None or (now - self._shown_at < _REFRESH_SECONDS and served.finished == 0):
            return
        self._shown_at = now
        sample = served.sample
        full, int4 = (sample.bytes_by_form[form] / MEGA for form in ("full", "int4"))
        state = f"{sample.resident_tokens:>5,} tokens {full:3.0f}+{int4:.0f} MB, {sample.preemptions} preempted"
        self._progress.update(self._task, completed=served.finished, state=state)

    def end(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def table(self, reports: Sequence[SettingReport]) -> None:
        """All figures: one row each, one column a setting."""
        title = "What the same model did with different memory"
        table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
        table.add_column("", no_wrap=True)
        for report in reports:
            name = report.name.replace("-", "-\n")
            table.add_column(f"{name}\n[dim]{report.dtype}[/dim]", justify="right", no_wrap=True)
        for figure in figures_for(report.prefill_tokens_reused for report in reports):
            table.add_row(figure.name, *(figure.text(report) for report in reports))
        self.console.print(table)
        exact = {EXACT_AMPLE, EXACT_TIGHT}
        if any(report.name not in exact for report in reports):
            self.console.print(
                "[dim]tight and tight-int4 have a quarter of ample's peak on the device, a tenth of it on the host.\n"
                "They were fed ample's output tokens (teacher forcing), so all three computed the same text.\n"
                "TTFT counts from when the user sends the request, waiting included. The exact settings are compared "
                "with transformers' generate.[/dim]"
            )

    def promises(self, found: Sequence[Promise], because: str) -> None:
        """Each promise with a mark, what was claimed and what was found; `because`: why some were not checked."""
        table = Table(title="Promises", title_justify="left", box=box.SIMPLE, pad_edge=False, show_header=False)
        table.add_column("")
        table.add_column("promise", no_wrap=True)
        table.add_column("found")
        for promise in found:
            table.add_row(_MARKS[promise.held], promise.name, promise.found)
        self.console.print(table)
        if because:
            self.console.print(f"[dim]n/a: not checked, since {because}.[/dim]")
