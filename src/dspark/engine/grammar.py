"""Answers that match a grammar: compiled once per grammar, one state per request, one mask per slot.

The compiler and matcher are llguidance's (extra `grammar`), imported when the first such request comes. A draft is
looked ahead along and rolled back: the mask of a slot follows from the tokens before it alone, and a draft token the
grammar forbids stays in and is rejected, because its probability is 0 (docs/exactness.md, clause 6).
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import takewhile
from threading import Lock
from typing import TYPE_CHECKING

import numpy as np
import torch
from jaxtyping import Bool
from torch import Tensor

from dspark.config import Grammar
from dspark.errors import RequestError
from dspark.target import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MOST_COMPILED = 64
# One blank, or a line break with an indent: a small model otherwise likes to spend all of max_tokens on blanks.
WHITESPACE = r"\x20?|\r?\n(\x20{0,40}|\x09{0,10})"


class GrammarState:
    """Where one request stands in its grammar. `failure` says why it cannot go on, e.g. a grammar that grows too big.

    EOS tokens (`eos_ids`) are possible where the grammar may end and the request ends at them (`end_ids`), and nowhere
    else. A stop token of the request's own that is text to the grammar cuts the answer wherever it comes.
    """

    def __init__(self, matcher: "LLMatcher", vocab_size: int, end_ids: Iterable[int], eos_ids: Iterable[int]):
        self._matcher, self._vocab_size = matcher, vocab_size
        self._end_ids, self._eos_ids = sorted(end_ids), sorted(eos_ids)
        self._ahead: list[int] = []  # draft tokens the matcher has read behind the committed ones
        self._masks: dict[tuple[int, ...], Tensor] = {}
        self.failure: str | None = None

    def allowed(self, draft_ids: Sequence[int]) -> Bool[Tensor, " V"]:
        """What may follow the committed tokens and `draft_ids`.

        Everything where that draft has left the grammar or completed it: no token is committed there.
        """
        key = tuple(draft_ids)
        if key not in self._masks:
            inside = self._go_to(key) and not self._matcher.is_stopped()
            self._masks[key] = self._mask() if inside else torch.ones(self._vocab_size, dtype=torch.bool)
            self._note_failure()
        return self._masks[key]

    def push(self, token_id: int) -> bool:
        """A token other than an end token is committed; True when the grammar is complete, so that nothing can follow.

        Also True on failure.
        """
        if not self._go_to((token_id,)):
            self.failure = f"Token {token_id} is not what the grammar allows here."
        self._ahead, self._masks = [], {}
        self._note_failure()
        return self._matcher.is_stopped() or self.failure is not None

    def _go_to(self, draft_ids: tuple[int, ...]) -> bool:
        """Bring the matcher behind `draft_ids`; False when the grammar forbids one of them."""
        shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(self._ahead, draft_ids, strict=False)))
        if len(self._ahead) > shared:
            self._matcher.rollback(len(self._ahead) - shared)
            del self._ahead[shared:]
        more = list(draft_ids[shared:])
        read = self._matcher.try_consume_tokens(more) if more else 0
        self._ahead += more[:read]
        return read == len(more)

    def _mask(self) -> Bool[Tensor, " V"]:
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        mask = torch.from_numpy(np.unpackbits(bits, count=self._vocab_size, bitorder="little")).bool()
        mask[self._eos_ids] = False
        if self._matcher.is_accepting():
            mask[self._end_ids] = True
        return mask

    def _note_failure(self) -> None:
        if self._matcher.is_error() and self.failure is None:
            self.failure = f"The grammar cannot be followed any further ({_one_line(self._matcher.get_error())})."


class Grammars:
    """Compiled grammars of one tokenizer, the most recently used ones kept.

    `compile` may be called from any thread before a request is added, so that no other request waits for it.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_ids: Iterable[int]):
        self._tokenizer, self._vocab_size, self._eos_ids = tokenizer, vocab_size, sorted(eos_ids)
        self._vocabulary: LLTokenizer | None = None
        self._compiled: OrderedDict[Grammar, LLMatcher] = OrderedDict()
        self._lock = Lock()

    def compile(self, grammar: Grammar) -> None:
        """Raises RequestError when the grammar is wrong, or llguidance is not installed."""
        with self._lock:
            self._matcher(grammar)

    def start(self, grammar: Grammar, end_ids: Iterable[int]) -> GrammarState:
        """The state of a request that has no output yet and ends at `end_ids`. Raises RequestError as `compile`."""
        with self._lock:
            matcher = self._matcher(grammar).deep_copy()
            assert self._vocabulary is not None
            eos_ids = {*self._vocabulary.eos_tokens, *self._eos_ids}
        return GrammarState(matcher, self._vocab_size, end_ids, eos_ids)

    def _matcher(self, grammar: Grammar) -> "LLMatcher":
        if grammar not in self._compiled:
            self._compiled[grammar] = self._fresh(grammar)
            if len(self._compiled) > MOST_COMPILED:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(grammar)
        return self._compiled[grammar]

    def _fresh(self, grammar: Grammar) -> "LLMatcher":
        try:
            from llguidance import LLMatcher, LLTokenizer
        except ImportError:
            raise RequestError(
                "Structured output needs the package llguidance; install it with pip install 'dspark[grammar]'."
            ) from None
        if self._vocabulary is None:
            self._vocabulary = LLTokenizer(self._tokenizer.to_json(), self._vocab_size, self._eos_ids or None)
        what = grammar.kind.replace("_", " ")
        try:
            matcher = LLMatcher(self._vocabulary, _source(LLMatcher, grammar), log_level=0)
        except ValueError as error:
            raise RequestError(f"The {what} cannot be used ({_one_line(str(error))}); correct it.") from None
        if matcher.is_error():
            raise RequestError(f"The {what} cannot be used ({_one_line(matcher.get_error())}); correct or simplify it.")
        return matcher


def _source(compiler: "type[LLMatcher]", grammar: Grammar) -> str:
    """The grammar in llguidance's own notation."""
    if grammar.kind == "regex":
        return compiler.grammar_from_regex(grammar.text)
    if grammar.kind == "lark":
        return compiler.grammar_from_lark(grammar.text)
    schema = grammar.text if grammar.kind == "json_schema" else '{"type": "object"}'
    return compiler.grammar_from_json_schema(schema, defaults={"whitespace_pattern": WHITESPACE})


def _one_line(text: str) -> str:
    line = " ".join(text.split())
    return (line if len(line) <= 200 else line[:197] + "...").rstrip(".")
