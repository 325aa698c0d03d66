"""A difference between two answers is a near-tie or a fault, and the report can tell."""

from dspark.measure import differences, kernel_noise
from tests.engine import support as s
from tests.engine.support import toy_target

PROMPTS = s.prompts(3)


def answers(target, params):
    return [list(o.token_ids) for o in s.toy_engine(target).generate(PROMPTS, params)]


def test_equal_answers_have_no_differences(tmp_path):
    target = toy_target(tmp_path / "toy")
    ours = answers(target, s.greedy())
    assert differences(target, PROMPTS, ours, ours, s.greedy()) == []


def test_a_wrong_token_is_a_fault_and_named_by_its_place(tmp_path):
    target = toy_target(tmp_path / "toy", exact=False, dtype="float16")
    for params in (s.greedy(), s.seeded(1)):
        ours = answers(target, params)
        theirs = [list(a) for a in ours]
        theirs[1][7] = (theirs[1][7] + 1) % 250
        (found,) = differences(target, PROMPTS, ours, theirs, params)
        assert (found.prompt, found.position) == (1, 7)
        assert not found.is_tie and found.gap > 2 * found.noise > 0


def test_an_answer_that_ends_early_is_a_fault(tmp_path):
    target = toy_target(tmp_path / "toy")
    ours = answers(target, s.greedy())
    (found,) = differences(target, PROMPTS, ours, [*ours[:2], ours[2][:-1]], s.greedy())
    assert found.prompt == 2 and not found.is_tie


def test_two_tokens_with_equal_scores_are_a_tie(tmp_path):
    """Two rows of the head are the same, so the model cannot tell their tokens apart."""
    from safetensors.torch import load_file, save_file

    from dspark.target import load_target
    from tests.toy_models import write_model

    folder = write_model(tmp_path / "toy", "qwen3")
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"][101] = tensors["lm_head.weight"][100] = 3 * tensors["lm_head.weight"][100]
    save_file(tensors, folder / "model.safetensors")
    target = load_target(str(folder), s.CPU, "float16")
    params = s.greedy(allowed_token_ids=[100, 102, 103])
    ours = [list(o.token_ids) for o in s.toy_engine(target).generate(PROMPTS, params)]
    index, place = next((i, a.index(100)) for i, a in enumerate(ours) if 100 in a)
    theirs = [list(a) for a in ours]
    theirs[index][place] = 101
    (found,) = differences(target, PROMPTS, ours, theirs, s.greedy())
    assert found.is_tie and found.gap == 0


def test_exact_mode_has_no_kernel_noise(tmp_path):
    assert kernel_noise(toy_target(tmp_path / "exact"), PROMPTS[0]) == 0
    assert kernel_noise(toy_target(tmp_path / "fast", exact=False, dtype="float16"), PROMPTS[0]) > 0
