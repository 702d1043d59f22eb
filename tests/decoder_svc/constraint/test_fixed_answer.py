"""Answers whose tokens are given: one token at each place, whatever is asked at once, and any token behind them."""

from __future__ import annotations

from decoder_svc.constraint.answer_follower import AnswerFollower
from decoder_svc.constraint.fixed_answer import FixedAnswer, fixed_tokens
from decoder_svc.scheduling.sampling_params import AnswerSoFar, Constraint, ConstraintKind
from tests.decoder_svc.constraint.demo_constraints import DEMO_VOCAB, PROMPT, demo_vocabulary, masks_of
from tests.decoder_svc.constraint.test_answer_matcher import allowed

TOKENS = [7, 31, 32, 599, 0]


def fixed(follower: AnswerFollower, tokens: list[int]) -> FixedAnswer:
    constraint = Constraint(ConstraintKind.FIXED_TOKENS, fixed_tokens(tokens))
    follower.prepare(constraint)
    answer = follower.follow(constraint, len(PROMPT), ())
    assert isinstance(answer, FixedAnswer)
    return answer


def test_each_place_has_its_token() -> None:
    follower = AnswerFollower(demo_vocabulary, DEMO_VOCAB)
    answer = fixed(follower, TOKENS)
    for count in range(len(TOKENS)):
        so_far = AnswerSoFar(answer, [*PROMPT, *TOKENS[:count]])
        assert follower.forced([so_far], 3) == [TOKENS[count : count + 3]]
        drafts = TOKENS[count : count + 3]
        (masks,) = masks_of(follower, [AnswerSoFar(answer, so_far.token_ids, drafts)])
        assert [allowed(mask) for mask in masks[: len(drafts)]] == [[token_id] for token_id in drafts]
        assert len(masks) == 1 + len(drafts)
        assert answer.error is None


def test_any_token_comes_behind() -> None:
    follower = AnswerFollower(demo_vocabulary, DEMO_VOCAB)
    answer = fixed(follower, TOKENS)
    end = AnswerSoFar(answer, [*PROMPT, *TOKENS, 5])
    assert follower.forced([end], 3) == [[]]
    ((mask,),) = masks_of(follower, [end])
    assert set(range(DEMO_VOCAB)) <= set(allowed(mask))


def test_grammars_and_given_tokens_in_one_step() -> None:
    """Each answer gets its own masks, in the order of the question. Given tokens need no process."""
    follower = AnswerFollower(demo_vocabulary, DEMO_VOCAB)
    one, other = fixed(follower, [9]), fixed(follower, [10])
    assert follower._current._process is None
    constraint = Constraint(ConstraintKind.CHOICE, '["red"]')
    try:
        follower.prepare(constraint)
        grammar = follower.follow(constraint, len(PROMPT), (2,))
        answers = [AnswerSoFar(each, PROMPT) for each in (one, grammar, other)]
        first, second, third = follower.forced(answers, 8)
        assert (first, third) == ([9], [10])
        assert second
        masks = masks_of(follower, answers)
        assert allowed(masks[0][0]) == [9]
        assert allowed(masks[2][0]) == [10]
        assert second[0] in allowed(masks[1][0])
    finally:
        follower.close()
