"""The picture of `dspark plan`. Needs matplotlib (`pip install 'dspark[plots]'`)."""

from collections.abc import Sequence
from pathlib import Path

from dspark.errors import SettingsError
from dspark.measure.plan import PlanRow

MOST_LINES = 8


def plot_plan(rows: Sequence[PlanRow], title: str, path: Path) -> None:
    """Write a PNG: expected speed-up against concurrency, a line per block size, the best block ringed.

    Raises:
        SettingsError: matplotlib is not installed, or `path` cannot be written.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise SettingsError("--plot needs matplotlib; install it with pip install 'dspark[plots]'.") from None
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    counts = [row.concurrency for row in rows]
    longest = len(rows[0].speedup)
    for block in range(1, longest + 1):
        if longest <= MOST_LINES or block in (1, 2, 4, 8, 12, 16):
            axes.plot(counts, [row.speedup[block - 1] for row in rows], marker=".", label=f"{block} drafted")
    axes.plot(
        counts, [row.best_speedup for row in rows], "o", markersize=12, fillstyle="none", color="black", label="best"
    )
    axes.axhline(1.0, color="grey", linestyle="--", linewidth=1)
    axes.set_xscale("log", base=2)
    axes.set_xticks(counts, [str(count) for count in counts])
    axes.set_xlabel("requests at once")
    axes.set_ylabel("expected speed-up over plain decoding")
    axes.set_title(title)
    axes.legend(fontsize="small")
    try:
        figure.savefig(path, format="png", dpi=120)
    except OSError as error:
        raise SettingsError(
            f"The plot {path} cannot be written ({error.strerror or error}); give another path."
        ) from None
