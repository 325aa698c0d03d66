"""What lies on disk: the cache folder, atomic publishing, fingerprints."""

from dspark.artifacts.cache import cache_dir, is_published, publish_folder, require_space
from dspark.artifacts.calibration import (
    CalibrationCell,
    StoredCalibration,
    kept_cells,
    read_calibration,
    weights_digest,
    write_calibration,
)
from dspark.artifacts.fingerprint import Fingerprint

__all__ = [
    "CalibrationCell",
    "Fingerprint",
    "StoredCalibration",
    "cache_dir",
    "is_published",
    "kept_cells",
    "publish_folder",
    "read_calibration",
    "require_space",
    "weights_digest",
    "write_calibration",
]
