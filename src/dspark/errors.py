"""What a user can get wrong. Every error is one sentence: what, the value, what is allowed, what to do."""


class DsparkError(Exception):
    """Base of all errors that are the caller's to fix; the command line prints it as one line and exits 2."""


class SettingsError(DsparkError):
    """A setting or sampling parameter is unknown or outside its range."""


class RequestError(DsparkError):
    """One request cannot be served as asked (too long, empty, wrong ids); other requests go on."""


class ModelError(DsparkError):
    """A model folder or file is missing, damaged, or of a kind that is not supported."""


class DrafterError(DsparkError):
    """A drafter checkpoint is missing, damaged, or does not fit the target."""


class CacheError(DsparkError):
    """The cache folder cannot be written or read."""


class DataError(DsparkError):
    """A token file is missing, damaged, or was made by another target."""


class ProfileError(DsparkError):
    """A cost profile is missing, damaged, or was measured elsewhere."""


class TrainError(DsparkError):
    """A training run cannot start, resume or go on."""
