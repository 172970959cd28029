"""Executes one plan as calls of the round seam (`spec/session.py`)."""

from outrider.core import Phase
from outrider.scheduler.scheduler import Plan, StepResult
from outrider.spec.session import Rounds, SpecSession


class Runner:
    """Owns nothing. If a plan fails, its sessions are as they were before, and it can be run again."""

    def __init__(self, rounds: Rounds) -> None:
        self._rounds = rounds

    def execute(self, plan: Plan[SpecSession]) -> StepResult[SpecSession]:
        """A chunk of a prompt, or a round of every running session, or several where the device can queue them."""
        if plan.phase is Phase.PREFILL:
            return StepResult(plan, (tuple(self._rounds.prefill(plan.sequences[0], plan.count)),))
        if (queued := self._rounds.queued_rounds(plan.sequences)) is not None:
            return StepResult(plan, tuple(map(tuple, queued)))
        # After a verify that failed the drafts still stand.
        self._rounds.draft_round([s for s in plan.sequences if s.draft is None])
        verified = self._rounds.verify_round(plan.sequences)
        return StepResult(plan, tuple(result.accepted_ids for result in verified))
