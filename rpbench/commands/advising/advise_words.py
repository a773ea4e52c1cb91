"""The words of `advise`'s command line."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from rpbench.advice.machine_figures import FIGURES
from rpbench.advice.model_source import SIZES, USUAL_RANK, config_path, context_in
from rpbench.advice.rows import FRAMEWORKS
from rpbench.commands.advising.advise_questions import BESIDES, QUESTIONS, methods
from rpbench.commands.usages import usage
from rpbench.config.choices import ConfigError
from rpbench.config.configuration import options_of
from rpbench.config.loading import load
from rpbench.config.request import Request
from rpbench.places import file_of
from rpbench.registry import unknown_name
from rpbench.untrusted import whole
from rpbench.workload.architecture import FAMILIES, model_keys, unknown_key

SEQ_LEN = 2048
# Larger numbers are typing errors, and sums of them leave 64 bits.
LARGE = {"num_devices": 10**6, "devices_per_node": 10**6, "seq_len": 10**8, "batch": 10**7, "sequences_per_step": 10**7}
# Keys that take one of some words.
WORDS = {"training_mode": ("full", "lora", "qlora"), "family": FAMILIES, "late": ("yes", "no")}
OWN = (
    *("model", "seq_len", "gpu", "cluster", "sequences_per_step", "schedules", "late", "runs_in", "lengths"),
    *("seconds", "ssd", *QUESTIONS, *BESIDES),
)


@dataclass(frozen=True)
class Asked:
    """The words of the command line: the verb's own, figures of a machine, and sizes of a model."""

    own: Mapping[str, str]
    figures: Mapping[str, str] = field(default_factory=dict)
    sizes: Mapping[str, str] = field(default_factory=dict)
    lengths: tuple[int, ...] = ()  # tokens of every sequence of a step, where they differ

    def words(self) -> dict[str, str]:
        """The words by key, without questions and others that a search over meshes does not read."""
        left_out = (*QUESTIONS, *BESIDES, "seconds")
        found = {**self.own, **self.figures, **self.sizes}
        return {name: value for name, value in found.items() if name not in left_out}

    @property
    def config(self) -> Path | None:
        """The config.json that `model=` names; None for a shipped model, or sizes."""
        return config_path(self.own["model"]) if "model" in self.own else None

    @cached_property
    def request(self) -> Request:
        """The shipped options, composed once: Hydra takes half a second for it."""
        cluster = [f"cluster={self.own['cluster']}"] if self.own.get("cluster") in options_of("cluster") else []
        return load(["cost=analytic", *cluster, *self.model_words])

    @property
    def model_words(self) -> list[str]:
        """The words for a shipped model with the requested sizes; none for another model."""
        if self.config is not None or (name := self.own.get("model")) not in options_of("model"):
            return []
        file = file_of("model", str(name))
        seq_len = self.own.get("seq_len")
        if seq_len is None and file is not None and model_keys(file).get("seq_len", 0) > SEQ_LEN:
            seq_len = str(SEQ_LEN)
        sizes = {**self.sizes, **({"seq_len": seq_len} if seq_len else {})}
        if sizes.get("training_mode") in ("lora", "qlora"):
            sizes.setdefault("lora_rank", str(USUAL_RANK))
        if targets := sizes.get("lora_targets", "").strip("[]"):
            sizes["lora_targets"] = f"[{targets}]"
        return [f"model={name}", *(f"++model.{key}={value}" for key, value in sizes.items())]


def read_asked(arguments: Sequence[str]) -> Asked:
    own, figures, sizes = {}, {}, {}
    for item in _as_keys(arguments):
        key, equals, value = item.partition("=")
        typed, key = key, key.removeprefix("model.")
        key = "training_mode" if key == "finetune" else key
        if not equals or not value:
            raise ConfigError(f"cannot read {item!r}: write key=value, as in {usage('advise')}")
        if key in WORDS and value not in WORDS[key]:
            raise ConfigError(f"{typed}={value}: one of {', '.join(WORDS[key])}")
        if key == "max_batch":
            raise ConfigError(f"max_batch={value} is now batch=max: write batch=max")
        if key == "batch" and value != "max":
            whole(key, value, ", or max: the largest")
            key = "sequences_per_step"
        if key in LARGE and value.replace("_", "").isdecimal() and int(value) > LARGE[key]:
            raise ConfigError(f"{key}={value}: at most {LARGE[key]:,}")
        if key in own or key in figures or key in sizes:
            raise ConfigError(f"{key}={value}: {key}= is given twice; leave one out")
        if key in OWN:
            own[key] = value
        elif key in FIGURES:
            figures[key] = value
        elif key in SIZES:
            sizes[key] = value
        else:
            raise ConfigError(unknown_key(key, [*OWN, *FIGURES, *SIZES], "key"))
    if "model" not in own and not sizes:
        raise ConfigError(f"model= is missing: {usage('advise')}")
    if ("gpu" in own) == ("cluster" in own):
        both = "gpu= and cluster= are two ways to say it; give one" if "gpu" in own else "gpu= or cluster= is missing"
        raise ConfigError(f"{both}: {usage('advise')}")
    return Asked(own, figures, sizes)


def _as_keys(arguments: Sequence[str]) -> list[str]:
    """The words with `runs_in=NAME` for `--runs-in NAME`."""
    words = list(arguments)
    while "--runs-in" in words:
        place = words.index("--runs-in")
        if place + 1 == len(words):
            raise ConfigError(f"--runs-in: name one of {', '.join(FRAMEWORKS)}")
        words[place : place + 2] = [f"runs_in={words[place + 1]}"]
    return words


def framework_in(asked: Asked) -> str | None:
    """The framework that rows are restricted to, in any case of letters; None for any."""
    text = asked.own.get("runs_in")
    if text is None:
        return None
    known = {name.casefold(): name for name in FRAMEWORKS}
    if text.casefold() not in known:
        raise ConfigError(unknown_name("runs_in", text, list(FRAMEWORKS)))
    return known[text.casefold()]


def count_in(asked: Asked, name: str, usual: int) -> int:
    text = asked.own.get(name)
    return usual if text is None else whole(name, text)


def schedules_in(asked: Asked) -> tuple[str, ...] | None:
    """Schedules that the request names; None for all."""
    text = asked.own.get("schedules")
    return None if text is None else methods("schedules", text)


def seq_len_in(asked: Asked) -> int:
    """Tokens of a sequence: as requested, or the usual number, or as many as a config.json has positions for."""
    longest = context_in(asked.config) if asked.config else None
    found = count_in(asked, "seq_len", min(SEQ_LEN, longest or SEQ_LEN))
    if longest is not None and found > longest:
        raise ConfigError(
            f"seq_len={found}: {asked.config} has positions for {longest} tokens; take seq_len={longest} or less"
        )
    return found
