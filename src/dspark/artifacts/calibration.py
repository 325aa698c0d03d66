"""calibration.json, beside a drafter's weights: how its confidences become probabilities, and how well that went.

One cell per group of acceptance rules and temperature bucket. A file belongs to the weights it was fitted to and to the
target that judged the drafts; beside other weights it is stale, and reading it is refused.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from math import isfinite
from pathlib import Path
from typing import Any

from dspark.artifacts.files import replacing
from dspark.artifacts.fingerprint import Fingerprint
from dspark.errors import DrafterError

FORMAT, VERSION = "dspark calibration", 1
CALIBRATION_FILE = "calibration.json"
FORMS = ("raw", "sts", "platt")
_AGAIN = "run dspark calibrate again"


@dataclass(frozen=True)
class CalibrationCell:
    """What was fitted for some rules and one temperature bucket.

    `form` says what `temperatures` and `biases` are: nothing to change, sequential temperature scaling, or a
    temperature and a bias per slot; a confidence c of slot k becomes sigmoid(logit(c) / temperatures[k] + biases[k]).
    `sts_temperatures` are always those of plain STS, which other engines read. `report` holds figures per slot on
    prompts the fit did not see.
    """

    rules: tuple[str, ...]
    bucket: str
    temperature: float  # the sampling temperature it was collected at
    form: str
    temperatures: tuple[float, ...]
    biases: tuple[float, ...]
    sts_temperatures: tuple[float, ...]
    fitted_blocks: int
    reported_blocks: int
    report: Mapping[str, tuple[float | None, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        slots = len(self.temperatures)
        numbers = (*self.temperatures, *self.biases, *self.sts_temperatures)
        good = self.form in FORMS and slots > 0 and len(self.biases) == slots == len(self.sts_temperatures)
        good = good and all(t > 0 for t in (*self.temperatures, *self.sts_temperatures)) and all(map(isfinite, numbers))
        if not good or not self.rules:
            raise ValueError("a cell has rules, a known form, and finite temperatures above 0 and biases for each slot")


@dataclass(frozen=True)
class StoredCalibration:
    """Cells fitted to one drafter (`drafter`: digest of its weights) on one target. `settings` say how."""

    drafter: str
    target: Fingerprint
    cells: tuple[CalibrationCell, ...]
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def table(self) -> dict[tuple[str, str], tuple[tuple[float, ...], tuple[float, ...]]]:
        """(temperatures, biases) by (rule, bucket)."""
        return {(rule, cell.bucket): (cell.temperatures, cell.biases) for cell in self.cells for rule in cell.rules}

    @property
    def survivals(self) -> dict[tuple[str, str], tuple[float, ...]]:
        """How often the first 1, 2, ... slots were all kept on the held-out prompts, by (rule, bucket)."""
        found: dict[tuple[str, str], tuple[float, ...]] = {}
        for cell in self.cells:
            known = cell.report.get("survival", ())
            if known and all(value is not None and 0 <= value <= 1 for value in known):
                found |= {(rule, cell.bucket): tuple(float(value) for value in known if value is not None)
                          for rule in cell.rules}  # fmt: skip
        return found


def weights_digest(folder: Path) -> str:
    """Short hash of a drafter's weight files.

    Raises:
        DrafterError: there are none, or one cannot be read.
    """
    sha, paths = hashlib.sha256(), sorted(folder.glob("*.safetensors"))
    if not paths:
        raise DrafterError(f"{folder} has no .safetensors file; give the folder of a trained drafter.")
    for path in paths:
        try:
            with path.open("rb") as file:
                sha.update(hashlib.file_digest(file, "sha256").digest())
        except OSError as error:
            raise DrafterError(f"{path} cannot be read ({error.strerror or error}); copy the drafter again.") from None
    return sha.hexdigest()[:16]


def kept_cells(
    folder: Path, drafter: str, target: Fingerprint, measured: tuple[CalibrationCell, ...]
) -> tuple[CalibrationCell, ...]:
    """Cells of the file in `folder`, of the same weights and target, for rules and buckets not measured anew."""
    try:
        before = read_calibration(folder, target)
    except DrafterError:  # damaged or of other weights: nothing to keep
        return ()
    if before is None or before.drafter != drafter:
        return ()
    new = {(rule, cell.bucket) for cell in measured for rule in cell.rules}
    return tuple(cell for cell in before.cells if not any((rule, cell.bucket) in new for rule in cell.rules))


def write_calibration(folder: Path, calibration: StoredCalibration) -> Path:
    """Put `calibration.json` into `folder`, whole or not at all; its path.

    Raises:
        DrafterError: it cannot be written.
    """
    path = folder / CALIBRATION_FILE
    values = {"format": FORMAT, "version": VERSION, **asdict(calibration)}
    try:
        with replacing(path) as part, part.open("w", encoding="utf-8") as file:
            json.dump(values, file, indent=1, allow_nan=False)
            file.write("\n")
    except OSError as error:
        raise DrafterError(
            f"{path} cannot be written ({error.strerror or error}); free space or permissions there, or give --out."
        ) from None
    return path


def read_calibration(folder: Path, target: Fingerprint) -> StoredCalibration | None:
    """The calibration beside a drafter that drafts for `target`; None when it has none.

    Raises:
        DrafterError: damaged, of another version, or fitted to other drafter weights or another target.
    """
    path = folder / CALIBRATION_FILE
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise DrafterError(f"{path} is not readable JSON ({error}); {_AGAIN}.") from None
    stored = _parse(path, values)
    weights = weights_digest(folder)
    if stored.drafter != weights:
        raise DrafterError(
            f"{path} was fitted to other drafter weights ({stored.drafter}) than those beside it ({weights}); {_AGAIN}."
        )
    if not stored.target.matches(target):
        raise DrafterError(
            f"{path} was fitted on target {stored.target.name or 'without a name'} ({stored.target.weights}) and this "
            f"target is {target.name or 'another'} ({target.weights}); {_AGAIN}."
        )
    return stored


def _parse(path: Path, values: Any) -> StoredCalibration:
    if not isinstance(values, dict) or values.get("format") != FORMAT:
        raise DrafterError(f"{path} is not a calibration of dspark; {_AGAIN}.")
    if values.get("version") != VERSION:
        raise DrafterError(
            f"{path} has version {values.get('version')!r} and this dspark reads {VERSION}; {_AGAIN}, or install the "
            "version that wrote it."
        )
    try:
        _only_known(values, ("format", "version", *(f.name for f in fields(StoredCalibration))))
        cells = tuple(map(_parse_cell, values["cells"]))
        return StoredCalibration(
            str(values["drafter"]), Fingerprint.from_dict(values["target"]), cells, values["settings"]
        )
    except (KeyError, TypeError, ValueError, AttributeError, DrafterError) as error:
        reason = str(error).rstrip(".") or type(error).__name__
        raise DrafterError(f"{path} is damaged ({reason}); {_AGAIN}.") from None


def _parse_cell(values: Mapping[str, Any]) -> CalibrationCell:
    _only_known(values, tuple(f.name for f in fields(CalibrationCell)))
    return CalibrationCell(
        rules=tuple(map(str, values["rules"])),
        bucket=str(values["bucket"]),
        temperature=float(values["temperature"]),
        form=str(values["form"]),
        temperatures=tuple(map(float, values["temperatures"])),
        biases=tuple(map(float, values["biases"])),
        sts_temperatures=tuple(map(float, values["sts_temperatures"])),
        fitted_blocks=int(values["fitted_blocks"]),
        reported_blocks=int(values["reported_blocks"]),
        report={name: tuple(slots) for name, slots in values["report"].items()},
    )


def _only_known(values: Mapping[str, Any], known: tuple[str, ...]) -> None:
    unknown = [key for key in values if key not in known]
    if unknown:
        raise ValueError(f"key {unknown[0]!r} is unknown")
