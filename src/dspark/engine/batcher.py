"""Which requests take part in the next pass, and with which tokens."""

from collections import deque
from dataclasses import dataclass, field

from dspark.engine.prefix import PrefixCache, shared_length
from dspark.engine.request import Request
from dspark.target import PassRow

WORTH_WAITING_FOR = 32  # prompt tokens; fewer cost less than the pass that is waited for


@dataclass
class Row:
    """One request's part of a pass: the tokens to run before any draft, and whether a token is sampled after them."""

    request: Request
    tokens: list[int]
    samples: bool
    prefill: bool
    max_draft: int = 0  # draft tokens the pass has room for
    source: str = "none"  # where its draft is to come from
    draft_ids: list[int] = field(default_factory=list)

    def pass_row(self) -> PassRow:
        return PassRow(self.request.start, self.request.kv_len, len(self.tokens) + len(self.draft_ids))


class Batcher:
    """Continuous batching: requests join when the pool has room for all their tokens, in order of arrival.

    Every decoding request is in every pass; what the pass has left after them and their drafts goes to prompt chunks.
    What the prefix cache holds of a prompt is not run again, nor is what an earlier request is about to run.
    """

    def __init__(self, prefixes: PrefixCache, max_batch: int, max_pass_tokens: int, slack: int):
        self.prefixes, self.slots = prefixes, prefixes.slots
        self._max_batch, self._max_pass_tokens = max_batch, max_pass_tokens
        self._slack = slack  # slots behind a request's last token that its proposer writes to
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []

    @property
    def free_slots(self) -> int:
        """Slots no request owns: free ones, and those of kept prefixes, which go when their room is needed."""
        return self.slots.free_slots + self.slots.size_of(prefix.start for prefix in self.prefixes.kept)

    def fits_ever(self, limit: int) -> bool:
        return self.slots.fits_when_empty(limit + self._slack)

    def next_rows(self, most_drafts: int) -> list[Row]:
        """Admit what fits and lay out the next pass: decoding rows first, then prompt chunks.

        Drafts of up to `most_drafts` a row are planned for, fewer where the pass would grow beyond its limit.
        """
        self._admit()
        decoding = [r for r in self.running if not r.in_prefill]
        # Drafts, of which most are never made, do not crowd out the prompts that wait for their turn.
        unread = sum(len(r.prompt_ids) - r.kv_len for r in self.running if r.in_prefill)
        for_prompts = min(unread, self._max_pass_tokens * 3 // 4)
        share = (self._max_pass_tokens - for_prompts) // max(len(decoding), 1)
        drafts = max(0, min(most_drafts, share - 1))
        rows = [Row(r, r.tokens(r.kv_len), samples=True, prefill=False, max_draft=drafts) for r in decoding]
        room = self._max_pass_tokens - len(rows) * (1 + drafts)
        for request in self.running:
            if request.in_prefill and room > 0 and not self._waits(request):
                if _untouched(request):
                    self.prefixes.extend(request, self.running)
                chunk = request.prompt_ids[request.kv_len : request.kv_len + room]
                room -= len(chunk)
                ends_prompt = request.kv_len + len(chunk) == len(request.prompt_ids)
                rows.append(Row(request, chunk, samples=ends_prompt, prefill=True))
        return rows

    def remove(self, request: Request) -> bool:
        """Forget a request, wherever it stands; True when its cache range stays as a prefix, False when it is free."""
        kept = request.start >= 0 and self.prefixes.keep(request)
        if request.start >= 0 and not kept:
            self.slots.give_back(request.start)
        request.start = -1
        if request in self.running:
            self.running.remove(request)
        elif request in self.waiting:
            self.waiting.remove(request)
        return kept

    def _admit(self) -> None:
        while self.waiting and len(self.running) < self._max_batch:
            request = self.waiting[0]
            if not self.prefixes.admit(request, request.limit + self._slack, self.running):
                return
            self.running.append(self.waiting.popleft())

    def _waits(self, request: Request) -> bool:
        """Whether an earlier request is about to run most of this one's prompt, which is then copied from it."""
        if not self.prefixes.enabled or not _untouched(request):
            return False
        left = len(request.prompt_ids) - request.kv_len
        for earlier in self.running:
            if earlier is request:
                return False
            shared = min(shared_length(earlier.prompt_ids, request.prompt_ids), len(request.prompt_ids) - 1)
            saved = shared - request.kv_len
            if earlier.in_prefill and earlier.kv_len < shared and saved >= max(WORTH_WAITING_FOR, left / 2):
                return True
        return False


def _untouched(request: Request) -> bool:
    """No pass has run any of its prompt yet: all it has was copied."""
    return request.kv_len == request.stats.cached_tokens
