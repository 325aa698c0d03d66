"""Which target a drafter, a table or a profile was made for."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from dspark.errors import DrafterError


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Short hashes of a target's weights, tokenizer and chat template, and a name for people.

    Two targets with the same `tokenizer` share token ids; drafters follow `weights`, and drafts get worse when only
    `template` differs.
    """

    weights: str
    tokenizer: str
    template: str
    name: str = ""

    def to_dict(self) -> dict[str, str]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Fingerprint":
        """Raises DrafterError when a part is missing."""
        names = [f.name for f in fields(cls)]
        missing = [n for n in names[:3] if n not in values]
        if missing:
            raise DrafterError(f"The stored target fingerprint lacks {', '.join(missing)}; write the drafter again.")
        return cls(**{n: str(values.get(n, "")) for n in names})

    def matches(self, other: "Fingerprint") -> bool:
        """Same weights and tokenizer: a drafter trained for one serves the other."""
        return (self.weights, self.tokenizer) == (other.weights, other.tokenizer)
