"""How a server runs, beside how its engine runs."""

import re
from dataclasses import dataclass

from dspark.errors import SettingsError

_HOST_NAME = re.compile(r"[a-z0-9._-]+|\[[0-9a-f:.]+\]")


@dataclass(frozen=True, slots=True)
class ServeConfig:
    """Limits and names of one server.

    Raises:
        SettingsError: a value is outside its range.
    """

    model_name: str  # what clients write in the field `model`
    api_key: str | None = None  # guards everything but /health
    allowed_hosts: tuple[str, ...] | None = None  # names in Host beside this machine's loopback; None: any
    max_queue: int = 64  # requests that may wait beside those that run
    request_timeout_s: float = 600.0  # from arrival to the last token
    max_body_bytes: int = 2_000_000
    body_timeout_s: float = 30.0  # for the body to arrive
    drain_s: float = 20.0  # at shutdown, for running answers to finish
    default_max_tokens: int = 1024  # for chat requests that name none; cache is reserved for all of it

    def __post_init__(self) -> None:
        if not self.model_name:
            raise SettingsError("served-model-name is empty; give a name, or leave the option out.")
        if self.api_key is not None and not (self.api_key.isascii() and self.api_key.strip() == self.api_key != ""):
            raise SettingsError("api-key is empty, begins or ends with a space, or is not ASCII; choose another one.")
        for host in self.allowed_hosts or ():
            if not _HOST_NAME.fullmatch(host):
                raise SettingsError(
                    f"allowed-hosts has {host!r}; write names without port, in lower case, such as llm.example.org."
                )
        for name, least in (
            ("max_queue", 0),
            ("request_timeout_s", 0.001),
            ("max_body_bytes", 1),
            ("body_timeout_s", 0.001),
            ("drain_s", 0),
            ("default_max_tokens", 1),
        ):
            value = getattr(self, name)
            if not value >= least:
                raise SettingsError(f"{name} is {value!r}; allowed is {least} or more.")
