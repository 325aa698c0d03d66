"""Tokens to text as they come: never half a character, never part of a stop string."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from dspark.target import Tokenizer

REPLACEMENT = "�"  # what a decoder shows for an unfinished UTF-8 sequence


@dataclass(frozen=True, slots=True)
class Piece:
    """Text that one token added, and where the token came from: accepted, recovered, bonus or plain."""

    text: str
    kind: str


class TextStream:
    """Detokenises one request's output incrementally, finds stop strings, and holds back what may become one.

    `text` is the finished part so far; after `finish` it equals the decoding of all tokens, cut at a stop string.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()):
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._longest_stop = max(map(len, self._stop), default=0)
        self._ids: list[int] = []
        self._window = 0  # ids before it no longer influence new text
        self._shown = 0  # ids whose text is in `text`
        self._early = 0  # characters in `text` of the ids after them, which end in a part of a character
        self.text = ""
        self.starts: list[int] = []  # per token pushed: where in `text` it begins, or the character it is part of
        self._pieces: list[Piece] = []
        self._emitted = 0  # characters of `text` handed out

    def push(self, token_id: int, kind: str = "plain", may_stop: bool = True) -> bool:
        """Add one token; True when its text completes a stop string (the text is then cut before it)."""
        self._ids.append(token_id)
        self.starts.append(len(self.text))
        before = self._tokenizer.decode(self._ids[self._window : self._shown])
        new = self._tokenizer.decode(self._ids[self._window :])[len(before) :]
        whole = new.rstrip(REPLACEMENT)
        fresh, self._early = whole[self._early :], len(whole)
        if whole == new:  # no character is still incomplete
            self._window, self._shown, self._early = self._shown, len(self._ids), 0
        return self._append(fresh, kind, may_stop)

    def finish(self) -> None:
        """No more tokens come: an incomplete character is shown as it decodes."""
        if self._shown < len(self._ids):
            before = self._tokenizer.decode(self._ids[self._window : self._shown])
            new = self._tokenizer.decode(self._ids[self._window :])[len(before) :]
            self._append(new[self._early :], "plain", may_stop=False)
            self._shown = len(self._ids)

    @property
    def shown_tokens(self) -> int:
        """Tokens of which something was handed out, and those before them."""
        return bisect_left(self.starts, self._emitted)

    def take(self, finished: bool = False) -> list[Piece]:
        """The pieces that are safe to show now and were not handed out before."""
        safe = len(self.text) if finished else len(self.text) - self._held_back()
        pieces = []
        while self._pieces and self._emitted < safe:
            piece = self._pieces.pop(0)
            room = safe - self._emitted
            if len(piece.text) > room:
                self._pieces.insert(0, Piece(piece.text[room:], piece.kind))
                piece = Piece(piece.text[:room], piece.kind)
            self._emitted += len(piece.text)
            pieces.append(piece)
        return pieces

    def _append(self, delta: str, kind: str, may_stop: bool) -> bool:
        searched = max(0, len(self.text) - self._longest_stop + 1)
        self.text += delta
        if delta:
            self._pieces.append(Piece(delta, kind))
        cuts = [at for stop in self._stop if (at := self.text.find(stop, searched)) >= 0] if may_stop else []
        if not cuts:
            return False
        self.text = self.text[: min(cuts)]
        self._ids, self._window, self._shown, self._early = [], 0, 0, 0
        return True

    def _held_back(self) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        for size in range(min(self._longest_stop - 1, len(self.text)), 0, -1):
            tail = self.text[-size:]
            if any(stop.startswith(tail) for stop in self._stop):
                return size
        return 0
