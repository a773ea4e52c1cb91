"""Gains: who is faster than whom, counted as an opponent would count.

what fits       a plan that needs more memory than there is counts for nobody
once each       contenders whose plans compute the same actions in the same order are one, unless they are methods
                by what they move (ZeRO), or late; the fastest speaks for all
all charged     paces are of plans with everything that they move (`rpbench.plan.contest.frame`)
both ways       losses are told as fully as wins
"""

from collections.abc import Hashable, Sequence
from typing import NamedTuple

from rpbench.ir.action import COMPUTE
from rpbench.plan.contest.contender import Contender
from rpbench.plan.contest.frame import posed
from rpbench.plan.contest.plans import Tuned
from rpbench.plan.contest.terms import Terms


class Standing(NamedTuple):
    """A rival beside the champion.

    Args:
        names: of all contenders with that order, the fastest first.
        ratio: the champion's pace over the rival's; above 1 the champion is faster.
    """

    names: tuple[str, ...]
    plan: Tuned
    ratio: float


class Gains(NamedTuple):
    """A champion among its rivals.

    Args:
        standings: rivals that fit, each order once, the slowest first.
        does_not_fit: names of those whose best plan does not fit.
    """

    champion: Tuned
    standings: tuple[Standing, ...]
    does_not_fit: tuple[str, ...]

    @property
    def wins(self) -> tuple[Standing, ...]:
        """Rivals that the champion is faster than."""
        return tuple(each for each in self.standings if each.ratio > 1)

    @property
    def losses(self) -> tuple[Standing, ...]:
        """Rivals that are faster, the fastest first."""
        return tuple(reversed([each for each in self.standings if each.ratio < 1]))

    def sentence(self) -> str:
        """Wins and losses in equal words; a draw is neither."""
        name, distinct = self.champion.contender.name, len(self.standings)
        if not self.champion.outcome.fits:
            return f"{name} does not fit; {distinct} of its rivals do."
        won = f"{name} is faster than {len(self.wins)} of {distinct} distinct orders that fit{_most(self.wins)}"
        return f"{won}, and slower than {len(self.losses)}{_most(self.losses)}; {len(self.does_not_fit)} do not fit."


def gains(plans: Sequence[Tuned], champion: Contender, terms: Terms) -> Gains:
    """How a champion stands.

    Args:
        plans: the best of every contender, the champion's among them, all of the same terms.

    Raises:
        ValueError: if the champion has no plan.
    """
    own = next((plan for plan in plans if plan.contender == champion), None)
    if own is None:
        known = ", ".join(plan.contender.name for plan in plans)
        raise ValueError(f"champion={champion.name}: no plan of it among {known or 'none'}")
    fitting = [plan for plan in plans if plan.outcome.fits]
    groups: dict[Hashable, list[Tuned]] = {}
    for plan in sorted(fitting, key=lambda plan: -plan.outcome.tokens_per_s):
        groups.setdefault(order_key(plan, terms), []).append(plan)
    pace = own.outcome.tokens_per_s if own.outcome.fits else 0.0
    standings = [
        Standing(tuple(each.contender.name for each in group), group[0], pace / group[0].outcome.tokens_per_s)
        for group in groups.values()
        if own not in group
    ]
    out = tuple(plan.contender.name for plan in plans if not plan.outcome.fits and plan is not own)
    return Gains(own, tuple(sorted(standings, key=lambda each: -each.ratio)), out)


def order_key(plan: Tuned, terms: Terms) -> Hashable:
    """What plans with the same order have in common: every device's computation, action by action.

    The layers behind the stages are no part of it, nor activations that move, nor which weights are read: BPipe has the
    order of 1F1B. What a method itself says that it moves is, and a late update beside the method without one.
    """
    entry = plan.contender.entry
    method = entry.name if entry.lower is not None else "", plan.contender.fixed
    order = posed(plan.contender, plan.setting, terms, terms.num_steps).order(plan.partition)
    return method, tuple(
        tuple((action.kind, action.stage, action.microbatch, action.part, action.sub) for action in row)
        for row in (
            [action for action in order.compute(device) if action.kind in COMPUTE]
            for device in range(order.shape.num_ranks)
        )
    )


def _most(standings: Sequence[Standing]) -> str:
    if not standings:
        return ""
    most = max(standings, key=lambda each: max(each.ratio, 1 / each.ratio))
    return f", by up to {max(most.ratio, 1 / most.ratio):.2f} times ({most.names[0]})"
