"""Frames of one contender: what its settings are timed on, each made once."""

from rpbench.ir.partition import Partition
from rpbench.plan.contest.contender import Contender
from rpbench.plan.contest.frame import Frame
from rpbench.plan.contest.plans import Tuned
from rpbench.plan.contest.space import Setting
from rpbench.plan.contest.terms import Terms

# Timelines that take as long as making the frame of another order, and of one that follows from the times of a cut.
FRAME, FRAME_OF_TIMES = 8, 20


class Frames:
    """The frames of one contender, made once."""

    def __init__(self, contender: Contender, terms: Terms) -> None:
        self.contender, self.terms = contender, terms
        self._known: dict[tuple[object, ...], Frame] = {}
        self.num_made = 0
        self.each = FRAME_OF_TIMES if contender.entry.needs_costs else FRAME

    def of_plan(self, plan: Tuned) -> Frame:
        """The frame of a plan with the steps that it was timed with, at the setting it has."""
        known = self.of(plan.setting, plan.partition, plan.num_steps)
        if known.schedule.partition == plan.partition:  # or stages without layers may be others
            return known.at(plan.setting)
        return Frame(self.contender, plan.setting, self.terms, plan.partition, plan.num_steps)

    def under(self, terms: Terms) -> "Frames":
        """Those that serve other limits too."""
        found = Frames(self.contender, terms)
        if not self.contender.entry.needs_costs:  # which look at the memory
            found._known = {key: frame.under(terms) for key, frame in self._known.items()}
        return found

    def keep_only(self, setting: Setting, cut: Partition, num_steps: int) -> None:
        """Forget all frames but the one that times a cut: those of many contenders take gigabytes."""
        frame = self.of(setting, cut, num_steps)
        self._known = {key: known for key, known in self._known.items() if known is frame}

    def keep_only_of(self, setting: Setting) -> None:
        """Forget all frames but those of a setting, whatever it recomputes, that time any cut."""
        kept = self._made_for(setting)
        self._known = {key: frame for key, frame in self._known.items() if key[0] == kept and frame.serves_any_cut}

    def of(self, setting: Setting, cut: Partition, num_steps: int) -> Frame:
        """The frame of a setting that can time a cut.

        Raises:
            ValueError: if the schedule does not take the setting.
        """
        asked = setting.recompute
        setting, *keys = self._keys(setting, cut, num_steps)
        for key in keys:
            if key in self._known:
                return self._known[key]
        made = Frame(self.contender, setting, self.terms, cut, num_steps)
        if not made.refuses(asked):
            made.graph  # noqa: B018  # what cannot move on is refused here
        self.num_made += 1
        self._known[keys[0 if made.serves_any_cut else 1]] = made
        return made

    def has(self, setting: Setting, cut: Partition, num_steps: int) -> bool:
        """Whether the frame of a setting that can time a cut has been made; none can where its stages are others."""
        chunks, (_, *keys) = setting.chunks_per_device, self._keys(setting, cut, num_steps)
        alike = chunks is None or chunks * self.terms.num_devices == len(cut.forward)
        return alike and any(key in self._known for key in keys)

    def _keys(
        self, setting: Setting, cut: Partition, num_steps: int
    ) -> tuple[Setting, tuple[object, ...], tuple[object, ...]]:
        """What a frame is made for, and its names: for any cut with as many stages, and for this one alone."""
        setting = self._made_for(setting)
        return setting, (setting, len(cut.forward), len(cut.backward), num_steps), (setting, cut, num_steps)

    def _made_for(self, setting: Setting) -> Setting:
        """The order of most schedules does not depend on what is recomputed."""
        return setting if self.contender.entry.needs_costs else setting.changed("recompute", "all")
