"""What is asked: prompts by kind, padded to a depth, as requests that repeat from mode to mode."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path

from dspark.config import SamplingParams
from dspark.data.sources import HUB, Message, Prompt, read_prompts
from dspark.errors import DataError, SettingsError
from dspark.measure.bench.drive import Ask
from dspark.measure.bench.records import Group, Settings
from dspark.measure.workloads import WORKLOADS
from dspark.target import Tokenizer

Conversation = tuple[Message, ...]
Questions = dict[str, list[Conversation]]

_EARLIER = "Here are some notes. They are not part of the question that follows.\n\n"


def built_in(kinds: Sequence[str] | None = None, limit: int | None = None) -> Questions:
    """Our own prompts of these kinds, default all.

    Raises:
        SettingsError: an unknown kind.
    """
    for kind in kinds or ():
        if kind not in WORKLOADS:
            raise SettingsError(f"kind is {kind!r}; allowed are {', '.join(WORKLOADS)}, or give --prompts.")
    return {kind: [_user(text) for text in WORKLOADS[kind][:limit]] for kind in kinds or WORKLOADS}


def from_sources(sources: Sequence[str], kinds: Sequence[str] | None = None, limit: int | None = None) -> Questions:
    """Prompts of files, folders and data sets (`hf:owner/name`) by the kind they state, or else by file or set.

    Raises:
        DataError: a source is missing, empty or of no known format, or holds none of these kinds.
    """
    found: Questions = {}
    for source in sources:
        several: list[Prompt] = read_prompts([source], limit if source.startswith(HUB) else None)
        for prompt in several:
            found.setdefault(prompt.kind, []).append(prompt.messages)
    for kind in kinds or ():
        if kind not in found:
            raise DataError(f"{', '.join(sources)} holds no prompts of kind {kind!r}; it has {', '.join(found)}.")
    return {kind: found[kind][:limit] for kind in kinds or found}


def is_source(text: str) -> bool:
    return text.startswith(HUB) or Path(text).exists()


def render(tokenizer: Tokenizer, conversation: Conversation) -> list[int]:
    """Token ids through the chat template, ready for the answer."""
    return tokenizer.encode(tokenizer.render_chat(conversation), add_special_tokens=False)


def padded(tokenizer: Tokenizer, conversation: Conversation, depth: int, filler: Sequence[str]) -> Conversation:
    """The conversation with other text before its last question, so that it renders to about `depth` tokens and no
    more; as it is where it is that long already. `filler` are words, used in a circle."""
    size = len(render(tokenizer, conversation))
    if size >= depth or not filler:
        return conversation

    def with_words(number: int) -> Conversation:
        text = " ".join(filler[i % len(filler)] for i in range(number))
        *before, last = conversation
        return (*before, {**last, "content": f"{_EARLIER}{text}\n\n{last['content']}"})

    low, high = 0, depth  # a word is a token or more
    while low < high:
        middle = (low + high + 1) // 2
        if len(render(tokenizer, with_words(middle))) <= depth:
            low = middle
        else:
            high = middle - 1
    return with_words(low) if low else conversation


class Workload:
    """The requests of every group, made once and the same for all modes."""

    def __init__(self, tokenizer: Tokenizer, questions: Questions, settings: Settings):
        self._tokenizer, self._questions, self._settings = tokenizer, questions, settings
        texts = [conversation[-1]["content"] for each in questions.values() for conversation in each]
        self._filler = " ".join(texts).split()
        self._rendered: dict[tuple[str, int], list[tuple[tuple[int, ...], Conversation]]] = {}

    def prompts(self, kind: str, depth: int) -> list[tuple[tuple[int, ...], Conversation]]:
        """Ids and conversation of every prompt of a kind, padded."""
        if (kind, depth) not in self._rendered:
            several = []
            for number, conversation in enumerate(self._questions[kind]):
                shift = 37 * number % max(len(self._filler), 1)  # so that prompts do not begin alike
                filler = [*self._filler[shift:], *self._filler[:shift]]
                deep = padded(self._tokenizer, conversation, depth, filler)
                several.append((tuple(render(self._tokenizer, deep)), deep))
            self._rendered[kind, depth] = several
        return self._rendered[kind, depth]

    def asks(self, group: Group) -> Iterator[Ask]:
        """Requests without end: the prompts in a circle, each with a seed of its own."""
        prompts = self.prompts(group.kind, group.depth)
        for number in count():
            ids, messages = prompts[number % len(prompts)]
            params = SamplingParams(
                temperature=group.temperature,
                max_tokens=self._settings.max_tokens,
                seed=self._settings.seed * 1_000_003 + number,
            )
            yield Ask(number % len(prompts), ids, messages, params)

    def longest(self) -> int:
        """Most tokens of a prompt."""
        return max(
            len(ids)
            for kind in self._settings.kinds
            for depth in self._settings.depths
            for ids, _ in self.prompts(kind, depth)
        )

    def with_room(self, context: int) -> None:
        """Leave out prompts that do not leave room for an answer.

        Raises:
            DataError: a kind has none left.
        """
        room = context - self._settings.max_tokens
        for kind in self._settings.kinds:
            for depth in self._settings.depths:
                fitting = [each for each in self.prompts(kind, depth) if len(each[0]) <= room]
                if not fitting:
                    raise DataError(
                        f"No prompt of {kind} at depth {depth} leaves room for {self._settings.max_tokens} tokens in a "
                        f"context of {context}; give shorter ones, a smaller --max-tokens or a smaller --depths."
                    )
                self._rendered[kind, depth] = fitting


def digest_of(questions: Mapping[str, Sequence[Conversation]]) -> str:
    """Short hash of all prompts in their order."""
    from dspark.data.sources import prompts_digest

    return prompts_digest(Prompt(tuple(each), kind) for kind, several in questions.items() for each in several)


def _user(text: str) -> Conversation:
    return ({"role": "user", "content": text},)
