"""What lies on disk: the cache folder, atomic publishing, fingerprints."""

from dspark.artifacts.cache import cache_dir, is_published, publish_folder, require_space
from dspark.artifacts.fingerprint import Fingerprint

__all__ = ["Fingerprint", "cache_dir", "is_published", "publish_folder", "require_space"]
