"""What a chat template says about user turns and answers."""

import pytest

from dspark.data import Described
from dspark.data.described import user_turn
from dspark.errors import DataError, RequestError
from dspark.target import Tokenizer
from tests.data.support import writer_engine
from tests.sentences import assert_one_sentence
from tests.toy_models import CHAT_TEMPLATE, EOS_ID, byte_tokenizer

INST = "{{ bos }}{% for m in messages %}[INST] {{ m['content'] }} [/INST]{% endfor %}"
PLAIN = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] | trim }}\n{% endfor %}assistant:"
SYSTEM = "{% if messages[0]['role'] != 'system' %}<|start|>system\nBe kind.<|end|>\n{% endif %}" + CHAT_TEMPLATE


@pytest.mark.parametrize(
    ("template", "header", "end_ids", "stop"),
    [
        (CHAT_TEMPLATE, "<|start|>user\n", (EOS_ID,), ()),
        (SYSTEM, "<|start|>system\nBe kind.<|end|>\n<|start|>user\n", (EOS_ID,), ()),
        (INST, "[INST] ", (), (" [/INST]",)),
        (PLAIN, "user: ", (), ("\nassistant:",)),
        ("{{ messages[0]['content'] }}", "", (), ()),
    ],
)
def test_the_user_turn_of_any_template(template, header, end_ids, stop):
    turn = user_turn(Tokenizer(byte_tokenizer(), template))
    assert (turn.header, turn.end_ids, turn.stop) == (header, end_ids, stop)


@pytest.mark.parametrize(
    ("template", "kind", "names"),
    [(None, RequestError, ["no chat template"]), ("hello", DataError, ["chat template", "prompts in a file"])],
)
def test_models_without_a_user_turn(template, kind, names):
    with pytest.raises(kind) as error:
        user_turn(Tokenizer(byte_tokenizer(), template))
    assert_one_sentence(error.value, names)


def test_described_without_weights_is_the_loaded_target(writer, writer_folder):
    described = Described.load(str(writer_folder))
    assert described.fingerprint == writer.fingerprint and described.spec == writer.spec
    messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Why? <|end|>"}]
    assert described.chat_ids(messages) == writer_engine(writer).chat_ids(messages)
    assert described.answer_end_id() == EOS_ID
    assert set(described.identity()) == {"weights", "tokenizer", "template"}
