"""The prompts: enough of each kind, none twice, and copying ones that give what is to be copied."""

from dspark.measure.workloads import COPY, EXTRACTION, WORKLOADS


def test_six_kinds_of_a_dozen_prompts_or_more():
    assert list(WORKLOADS) == ["code", "math", "chat", "writing", "extraction", "translation"]
    assert all(len(prompts) >= 12 for prompts in WORKLOADS.values())


def test_no_prompt_stands_twice_and_each_fits_a_short_context():
    prompts = [prompt for kind in WORKLOADS.values() for prompt in kind]
    assert len(set(prompts)) == len(prompts)
    assert all(10 < len(prompt) < 600 for prompt in prompts)


def test_extraction_prompts_give_the_text_to_repeat():
    assert set(COPY) <= set(EXTRACTION)
    given = [prompt.partition("\n\n")[2] or prompt.partition(": ")[2] for prompt in EXTRACTION]
    assert all(len(text) > 60 for text in given)
