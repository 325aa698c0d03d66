"""profile.json: what a machine's passes cost, and exactly what they were measured with.

The cache holds one file per key, named by its digest, so another model, drafter, setting or version never meets costs
that are not its own.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from dspark.artifacts.cache import CACHE_ENV, cache_dir
from dspark.artifacts.files import replacing
from dspark.errors import CacheError, ProfileError

FORMAT = 1  # raised when costs are measured or read in another way, so that older files are measured again


@dataclass(frozen=True, slots=True)
class ProfileKey:
    """Everything a cost depends on. `target` is the fingerprint of the weights, `drafter` a digest of what drafts, ""
    for proposers that run no model."""

    target: str
    drafter: str
    device: str
    cpu: str
    dtype: str
    exact: bool
    threads: int
    torch: str
    dspark: str

    @property
    def digest(self) -> str:
        return hashlib.sha256(json.dumps([FORMAT, asdict(self)], sort_keys=True).encode()).hexdigest()[:16]

    def differences(self, other: "ProfileKey") -> list[str]:
        """What differs, in words: "threads 1, here 2"."""
        names = [f.name for f in fields(self) if getattr(self, f.name) != getattr(other, f.name)]
        return [f"{n} {getattr(self, n) or 'none'}, here {getattr(other, n) or 'none'}" for n in names]


@dataclass(frozen=True)
class StoredProfile:
    """The content of a profile.json. `costs` is read by `dspark.schedule.Profile.from_dict`.

    Names are for people. `residual` is the median relative error of predicted against measured times on points that
    the costs were not fitted to; `seconds` is how long measuring took, `measured` the day.
    """

    key: ProfileKey
    costs: Mapping[str, Any]
    target_name: str = ""
    drafter_name: str = ""
    measured: str = ""
    seconds: float = 0.0
    residual: float = 0.0


def profile_path(key: ProfileKey) -> Path:
    """Where the cache keeps the profile of this key."""
    return cache_dir() / "profiles" / f"{key.digest}.json"


def cached_profiles() -> list[Path]:
    """Every profile in the cache, by name."""
    return sorted((cache_dir() / "profiles").glob("*.json"))


def write_profile(path: Path, stored: StoredProfile) -> None:
    """Write in one step: a reader sees the old file or the new one.

    Raises:
        CacheError: the folder cannot be written.
    """
    text = json.dumps({"format": FORMAT, **asdict(stored)}, indent=1)
    try:
        with replacing(path) as part:
            part.write_text(text, encoding="utf-8")
    except OSError as error:
        raise CacheError(
            f"The profile {path} cannot be written ({error.strerror or error}); give another --out, or set {CACHE_ENV} "
            "to another folder."
        ) from None


def read_profile(path: Path, key: ProfileKey | None = None) -> StoredProfile:
    """Read a profile.json, and refuse one that was not measured with `key`.

    Raises:
        ProfileError: missing, damaged, of another format, or measured elsewhere.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ProfileError(
            f"The profile {path} cannot be read ({error.strerror or error}); write one with dspark profile --out."
        ) from None
    except ValueError as error:
        raise ProfileError(f"The profile {path} is not valid JSON ({error}); measure it again.") from None
    if not isinstance(values, dict) or values.get("format") != FORMAT:
        found = values.get("format") if isinstance(values, dict) else type(values).__name__
        raise ProfileError(
            f"The profile {path} has format {found!r}; this version of dspark reads {FORMAT}, so measure it again."
        )
    stored = _stored(path, values)
    if key is not None and (differing := stored.key.differences(key)):
        raise ProfileError(
            f"The profile {path} was measured elsewhere ({'; '.join(differing)}); measure it again with dspark profile."
        )
    return stored


def _stored(path: Path, values: Mapping[str, Any]) -> StoredProfile:
    key, costs = values.get("key"), values.get("costs")
    if not isinstance(key, dict) or not isinstance(costs, dict) or set(key) != {f.name for f in fields(ProfileKey)}:
        raise ProfileError(f"The profile {path} lacks its key or its costs; measure it again.")
    for f in fields(ProfileKey):
        if type(key[f.name]) is not f.type:
            raise ProfileError(f"The profile {path} has {key[f.name]!r} as {f.name} of its key; measure it again.")
    rest: dict[str, Any] = {f.name: values.get(f.name, f.default) for f in fields(StoredProfile)[2:]}
    for f in fields(StoredProfile)[2:]:
        if type(rest[f.name]) is not f.type:
            raise ProfileError(f"The profile {path} has {rest[f.name]!r} as {f.name}; measure it again.")
    return StoredProfile(ProfileKey(**key), costs, **rest)
