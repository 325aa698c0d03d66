"""A small language model as drafter: what it offers."""

from tests.engine import support as s


def test_nothing_is_offered_beyond_the_models_own_context(target, tmp_path, monkeypatch):
    """Offered, it would be planned, cost nothing, and make drafting look cheap for everybody."""
    context, prompt = 64, s.prompts(1, seed=3)[0]
    proposer = s.model_proposer(target, tmp_path / "model", max_position_embeddings=context)
    offers, seen = proposer.offers, {}

    def recorded(row, outlook):
        result = offers(row, outlook)
        seen[row.request.num_tokens] = result
        return result

    monkeypatch.setattr(proposer, "offers", recorded)
    params = s.greedy(max_tokens=context - len(prompt) + 30)
    (output,) = s.toy_engine(target, proposer, policy="fixed:4").generate([prompt], params)
    assert output.token_ids == s.toy_engine(target).generate([prompt], params)[0].token_ids
    assert min(seen) < context < max(seen)
    for length, result in seen.items():
        assert bool(result) == (length < context)
        assert all(len(offer.survival) <= context - length for offer in result)
