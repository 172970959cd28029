"""Rounds: draft, then verify. Everything that decodes goes through here, with a drafter or without one.

Contract: a session is prefilled, then takes rounds of one `draft_round` and one `verify_round`, any number of sessions
in each call, until it is finished. A call that fails leaves its sessions as they were, and can be made again. Wrong
order raises RuntimeError. Without a drafter a round drafts nothing and its verify gives one token: plain decoding.
"""

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import accumulate
from math import ceil
from time import perf_counter
from typing import Literal

import torch
from torch import Tensor

from outrider.core import Phase, RouteSink
from outrider.errors import RequestError
from outrider.models.target import QueuedTokens, TargetModel
from outrider.scheduler.sequence import Sequence
from outrider.spec.acceptance import committed_rows
from outrider.spec.drafter import DrafterModel
from outrider.spec.observation import Observation, Union, nbytes_of, union_of
from outrider.spec.sampling import Drafted, Trial, Verdict, draft_not_finite, draft_tokens, judge, not_finite
from outrider.stats import RoundCounters

Projection = Literal["none", "previous-round"]


@dataclass(frozen=True)
class DraftResult:
    """A pending block and what its verify is expected to need.

    token_probs: the drafter's probability of each token, under the request's warp (greedy: temperature 1).
    expert_union, expert_bytes: the projected union of the verify and its exact stored bytes; `projection` says where
        they come from. A first round has no history: nothing is projected, 0 bytes, "none".
    """

    tokens: tuple[int, ...]
    token_probs: tuple[float, ...]
    expert_union: Union
    expert_bytes: int
    projection: Projection


@dataclass(frozen=True)
class VerifyResult:
    """What a verify gave.

    accepted_ids: the new tokens: accepted drafts and the one in place of the first that fell (or behind the last).
    num_accepted: how many of them are drafts.
    committed: rows that stay in KV memory: the anchor and the accepted drafts that had a row.
    expert_union: every (layer, expert) that the verify's rows went to, rejected rows included.
    """

    accepted_ids: tuple[int, ...]
    num_accepted: int
    committed: int
    finished: bool
    expert_union: Union


@dataclass(eq=False)
class SpecSession(Sequence):
    """A request in rounds. `output` holds what was emitted; its last token, the anchor, is not in KV memory yet."""

    draft: Drafted | None = None
    last_union: Union | None = None

    @property
    def emitted(self) -> list[int]:
        """The tokens so far, the anchor last."""
        return self.output

    @property
    def anchor(self) -> int:
        """The last emitted token."""
        return self.output[-1]


class Rounds:
    """Runs rounds on `target`.

    Args:
        max_width: rows of a verify where the caller gives no widths; None: all that was drafted.
        sink: told of every verify's routes; None: nothing is recorded.
    """

    def __init__(
        self,
        target: TargetModel,
        drafter: DrafterModel | None,
        max_width: int | None = None,
        sink: RouteSink | None = None,
    ) -> None:
        self.drafter = drafter
        self.counters = RoundCounters()
        self._target, self._sink, self._max_width = target, sink, max_width
        self._taps = drafter.config.tap_layers if drafter else ()

    def prefill(self, session: SpecSession, count: int) -> list[int]:
        """Run the next `count` prompt tokens; those that complete the prompt give the first token.

        Returns: the new tokens, one or none.
        """
        start, stop = session.table.length, session.table.length + count
        seen = Observation(self._taps)
        with ExitStack() as undo:
            undo.callback(session.table.truncate, start)
            hidden, batch = self._target.forward(Phase.PREFILL, [session.table], [session.prompt[start:stop]], seen)
            tokens: list[int] = []
            if stop == len(session.prompt):
                (verdict,) = self._judge([session], hidden[-1:], [1], [Drafted.nothing()])
                tokens = verdict.tokens
            if self.drafter:
                self.drafter.extend(seen.features(range(count)), batch.positions, batch.slots)
            undo.pop_all()
        self._target.commit(range(count))
        self.counters.first_tokens += len(tokens)
        return session.extend(tokens)

    def draft_round(self, sessions: Seq[SpecSession]) -> list[DraftResult]:
        """One drafter pass for all `sessions`; each gets a pending block. Nothing is fetched and no route changes.

        Raises: RuntimeError for a session that is not prefilled, finished, drafted already or named twice; ValueError
            for more sessions than the target takes at once.
        """
        began = perf_counter()
        self._check_number(sessions)
        for session in _distinct(sessions):
            _check_running(session)
            if session.draft is not None:
                raise RuntimeError(f"session {session.id} has a draft that waits for its verify")
        drafts = self._draft(sessions)
        results = [self._project(s, draft) for s, draft in zip(sessions, drafts, strict=True)]
        for session, draft in zip(sessions, drafts, strict=True):
            session.draft = draft
        self.counters.drafted += sum(len(draft.tokens) for draft in drafts)
        self.counters.add_drafting(perf_counter() - began)
        return results

    def verify_round(self, sessions: Seq[SpecSession], widths: Seq[int] | None = None) -> list[VerifyResult]:
        """One target step for all `sessions`: it settles their pending blocks and emits at least a token each.

        Args:
            widths: rows for each session, from 1 to its drafts + 1; None: `max_width`. Row 0 is the anchor. A width may
                be chosen after looking at d_1 .. d_w and at all draft distributions, never at later drafts
                (spec/acceptance.py). Rows beyond the session's last token are not run.

        Raises: RuntimeError for a session without a draft or named twice; ValueError for a width out of range, or for
            more sessions or rows than the target takes at once; RequestError for logits that are not finite.
        """
        began = perf_counter()
        if not sessions:
            return []
        self._check_number(sessions)
        for session in _distinct(sessions):
            _check_running(session)
        drafts = [_pending(session) for session in sessions]
        trials = self._verify(sessions, drafts, self._widths(sessions, drafts, widths))
        kept = [row for trial in trials for row in trial.kept]
        self._target.commit(kept)
        if self._sink:
            self._sink.commit(kept)
        results = [self._settle(session, trial) for session, trial in zip(sessions, trials, strict=True)]
        self.counters.verify_seconds += perf_counter() - began
        return results

    def queued_rounds(self, sessions: Seq[SpecSession]) -> list[list[int]] | None:
        """Several greedy rounds without the host between them; the new tokens of each session.

        A round whose logits are not finite ends them; it raises when it is the first of a call.

        None where that cannot be: a sink, sampling, a pending draft, too many stop tokens, or a target whose rounds the
        host drives.
        """
        queue = self._target.queue
        if queue is None or self._sink or not all(_can_be_queued(s, queue.most_stops) for s in sessions):
            return None
        began = perf_counter()
        for session in _distinct(sessions):
            _check_running(session)
        tables = [session.table for session in sessions]
        starts = [table.length for table in tables]
        left = [session.remaining for session in sessions]
        with ExitStack() as undo:
            for table, start in zip(tables, starts, strict=True):
                undo.callback(table.truncate, start)
            rounds = min(queue.most_rounds, ceil(min(left) / (self.counters.mean_tokens or 1)))
            anchors, stops = [s.anchor for s in sessions], [s.stop_ids for s in sessions]
            said = queue.decode(tables, anchors, left, stops, rounds)
            settled = [each for each in said if all(own.settled for own in each)]
            if not settled:
                raise _not_settled(starts, said[0])
            of_each = list(zip(*settled, strict=True))
            widths = [own[-1].rows for own in of_each]
            # Where a round was not settled its routes stand in place of the last; the next call meets it again.
            routes = dict(enumerate(queue.routes(sum(widths)))) if len(settled) == len(said) else None
            undo.pop_all()
        ends = accumulate(widths)
        for session, start, own, width, end in zip(sessions, starts, of_each, widths, ends, strict=True):
            kept = sum(committed_rows(each.accepted or 0, each.rows, len(each.tokens)) for each in own)
            session.table.truncate(start + kept)
            session.extend(token for each in own for token in each.tokens)
            session.draft = None
            session.last_union = None if routes is None else union_of(routes, range(end - width, end))
            for each in own:
                self._count(each)
        drafting = queue.times.draft if queue.times else None
        if self.drafter:
            self.counters.add_drafting(drafting)
        self.counters.verify_seconds += perf_counter() - began - (drafting or 0.0)
        return [[token for each in own for token in each.tokens] for own in of_each]

    # --- inside -------------------------------------------------------------------------------------------------------

    def _draft(self, sessions: Seq[SpecSession]) -> list[Drafted]:
        if self.drafter is None or not sessions:
            return [Drafted.nothing() for _ in sessions]
        logits = self.drafter.propose([s.anchor for s in sessions], [s.table for s in sessions])
        return draft_tokens(logits, [(s.params, len(s.output)) for s in sessions])

    def _project(self, session: SpecSession, draft: Drafted) -> DraftResult:
        union = session.last_union or frozenset()
        nbytes = nbytes_of(union, self._target.expert_nbytes)
        source: Projection = "none" if session.last_union is None else "previous-round"
        return DraftResult(draft.tokens, draft.token_probs, union, nbytes, source)

    def _widths(self, sessions: Seq[SpecSession], drafts: Seq[Drafted], widths: Seq[int] | None) -> list[int]:
        most = [len(draft.tokens) + 1 for draft in drafts]
        if widths is None:
            widths = [min(m, self._max_width or m) for m in most]
        if len(widths) != len(sessions):
            raise ValueError(f"{len(widths)} widths were given for {len(sessions)} sessions")
        for session, width, limit in zip(sessions, widths, most, strict=True):
            if not 1 <= width <= limit:
                raise ValueError(f"session {session.id} can verify 1 to {limit} rows, not {width}")
        rows = [min(width, s.remaining) for s, width in zip(sessions, widths, strict=True)]
        most_rows = self._target.most_verify_rows
        if most_rows is not None and sum(rows) > most_rows:
            raise ValueError(f"a verify of {sum(rows)} rows was asked for; this engine runs {most_rows} at once")
        return rows

    def _check_number(self, sessions: Seq[SpecSession]) -> None:
        most = self._target.most_sequences
        if most is not None and len(sessions) > most:
            raise ValueError(f"{len(sessions)} sessions were given; this engine takes {most} at once (max_batch)")

    def _verify(self, sessions: Seq[SpecSession], drafts: Seq[Drafted], widths: Seq[int]) -> list["_Outcome"]:
        """The part of a verify that may fail; the sessions are as before when it does."""
        tables = [session.table for session in sessions]
        blocks = [[s.anchor, *d.tokens[: width - 1]] for s, d, width in zip(sessions, drafts, widths, strict=True)]
        seen = Observation(self._taps)
        with ExitStack() as undo:
            if self._sink:
                self._sink.begin_step()
                undo.callback(self._sink.abandon)
            for table in tables:
                undo.callback(table.truncate, table.length)
            hidden, batch = self._target.forward(Phase.DECODE, tables, blocks, seen)
            verdicts = self._judge(sessions, hidden, widths, drafts)
            routes = seen.routes()
            outcomes = []
            for session, draft, verdict, span in zip(sessions, drafts, verdicts, batch.spans, strict=True):
                tokens = session.until_end(verdict.tokens)
                rows = range(span.start, span.stop)
                stay = rows[: committed_rows(verdict.accepted, len(rows), len(tokens))]
                tested = min(len(rows), len(draft.tokens))
                if len(tokens) < len(verdict.tokens):  # what lies behind a stop was not put to the test
                    tested = len(tokens)
                accepted = min(verdict.accepted, len(tokens))
                outcomes.append(_Outcome(tokens, tested, accepted, span.position, stay, union_of(routes, rows)))
            if self.drafter:
                kept = [row for outcome in outcomes for row in outcome.kept]
                at = torch.tensor(kept, device=batch.slots.device)
                self.drafter.extend(seen.features(kept), batch.positions[at], batch.slots[at])
            if self._sink:
                for layer, ids in routes.items():
                    self._sink.observe(layer, ids)
            undo.pop_all()
        return outcomes

    def _settle(self, session: SpecSession, outcome: "_Outcome") -> VerifyResult:
        """Move a session on by what its verify gave."""
        session.table.truncate(outcome.position + len(outcome.kept))
        session.extend(outcome.tokens)
        session.draft, session.last_union = None, outcome.union
        self.counters.count(outcome.tested, outcome.accepted, len(outcome.tokens))
        return VerifyResult(tuple(outcome.tokens), outcome.accepted, len(outcome.kept), session.finished, outcome.union)

    def _count(self, said: QueuedTokens) -> None:
        """A queued round; what lies behind a stop was not put to the test."""
        drafts = self.drafter.config.num_drafts if self.drafter else 0
        accepted, tokens = said.accepted or 0, len(said.tokens)
        stopped = tokens < min(accepted + 1, said.rows)
        self.counters.drafted += drafts
        self.counters.count(tokens if stopped else min(said.rows, drafts), min(accepted, tokens), tokens)

    def _judge(
        self, sessions: Seq[SpecSession], hidden: Tensor, widths: Seq[int], drafts: Seq[Drafted]
    ) -> list[Verdict]:
        logits = self._target.logits(hidden).split(list(widths))
        return judge(
            [
                Trial(rows, draft, s.params, len(s.output), s.table.length - len(rows))
                for s, rows, draft in zip(sessions, logits, drafts, strict=True)
            ]
        )


@dataclass(frozen=True)
class _Outcome:
    """One session's part of a verify: its new tokens, drafts tested and accepted, first position, batch rows kept."""

    tokens: list[int]
    tested: int
    accepted: int
    position: int
    kept: range
    union: Union


def _distinct(sessions: Seq[SpecSession]) -> Seq[SpecSession]:
    if len({id(session) for session in sessions}) < len(sessions):
        raise RuntimeError("a session is named twice in one call")
    return sessions


def _can_be_queued(session: SpecSession, most_stops: int) -> bool:
    return session.params.temperature == 0 and session.draft is None and len(session.stop_ids) <= most_stops


def _not_settled(starts: Iterable[int], said: Iterable[QueuedTokens]) -> RequestError:
    """What ends a round of sequences that were `starts` tokens long before it."""
    for start, own in zip(starts, said, strict=True):
        if own.accepted is None:
            return draft_not_finite()
        if -1 in own.tokens:
            return not_finite(start + own.tokens.index(-1))
    raise AssertionError("every sequence of the round was settled")


def _check_running(session: SpecSession) -> None:
    if session.finished:
        raise RuntimeError(f"session {session.id} is finished")
    if not session.output:
        raise RuntimeError(f"session {session.id} is not prefilled")


def _pending(session: SpecSession) -> Drafted:
    if session.draft is None:
        raise RuntimeError(f"session {session.id} has no draft; call draft_round first")
    return session.draft
