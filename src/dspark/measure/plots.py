"""Pictures, with matplotlib (optional extra `plots`), which is imported only when one is drawn."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxtyping import Bool, Float
from torch import Tensor

from dspark.artifacts.files import replacing
from dspark.errors import SettingsError
from dspark.schedule.reliability import reliability

# title -> label of a curve -> (stated [N], came true [N])
Panels = Mapping[str, Mapping[str, tuple[Float[Tensor, " N"], Bool[Tensor, " N"]]]]
_LEAST = 10  # statements a bin needs to be drawn


def reliability_diagram(panels: Panels, path: Path) -> None:
    """One panel per title: observed over stated frequency, the diagonal being perfect; larger dots hold more.

    Raises:
        SettingsError: matplotlib is not installed.
    """
    pyplot = _pyplot()
    figure, axes = pyplot.subplots(1, len(panels), figsize=(4 * len(panels), 4.2), squeeze=False, layout="constrained")
    for axis, (title, curves) in zip(axes[0], panels.items(), strict=True):
        axis.plot([0, 1], [0, 1], color="0.7", linewidth=1)
        for label, (stated, outcome) in curves.items():
            bins = reliability(stated, outcome)
            drawn = bins.counts >= _LEAST
            x, y, sizes = bins.stated[drawn], bins.observed[drawn], 120 * (bins.counts[drawn] / len(outcome)).sqrt()
            (line,) = axis.plot(x, y, linewidth=1, label=label)
            axis.scatter(x, y, s=sizes, color=line.get_color(), alpha=0.6)
        axis.set(title=title, xlim=(0, 1), ylim=(0, 1), xlabel="stated survival", ylabel="observed", aspect="equal")
        axis.legend(fontsize="small", frameon=False)
    try:
        with replacing(path) as part:
            figure.savefig(part, dpi=110, format="png")
    finally:
        pyplot.close(figure)


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError:
        raise SettingsError("Diagrams need matplotlib; install it with pip install 'dspark[plots]'.") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot
