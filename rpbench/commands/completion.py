"""`list` and `completion`: the options of each choice, and a shell script that offers them.

The script contains the words, so that completion starts no Python. Print it again after adding files of your own.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path

from rpbench import registry
from rpbench.advice.machine_figures import FIGURES
from rpbench.advice.model_source import SIZES
from rpbench.commands.advising.advise_words import OWN
from rpbench.commands.usages import LISTS, usages
from rpbench.config.choices import ConfigError
from rpbench.config.configuration import GROUPS, RunConfig, options_of
from rpbench.config.request import WORDS
from rpbench.passes.recomputation import RECOMPUTES
from rpbench.places import CONF, files_of
from rpbench.plan import METHODS
from rpbench.run.assemble import OFFLOADS
from rpbench.sim.events import RULES


def listed(what: str) -> Iterator[dict[str, str]]:
    """Name and one line about each option of a list (`rpbench.commands.usages.LISTS`); the user's own have a `path`."""
    if what == "schedules":
        for name, entry in registry.offered().items():
            if entry.broken:
                continue
            found = registry.sources(entry)
            yield {"name": name, "says": entry.source} | ({"path": str(found[0])} if found else {})
    for path in files_of(LISTS[what]):
        own = {} if path.is_relative_to(CONF) else {"path": str(path)}
        yield {"name": path.stem, "says": first_comment(path)} | own


def first_comment(path: Path) -> str:
    """The first comment in a file that is neither a directive nor a command, to the line in which a sentence ends."""
    said: list[str] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        text = line.strip("# ") if line.startswith("#") else ""
        if said and not text:
            break
        if text and not text.startswith(("@", "python -m ")):
            said.append(text)
            if text.endswith("."):
                break
    return " ".join(said)


# Where each shell reads the script, and how.
SHELLS = {
    "bash": 'Add to ~/.bashrc: eval "$(rpbench completion bash)"',
    "zsh": 'Add to ~/.zshrc: eval "$(rpbench completion zsh)"',
    "fish": "Add to ~/.config/fish/config.fish: rpbench completion fish | source",
}


def completion(arguments: Sequence[str], verbs: Sequence[str]) -> str:
    """The script for a shell; ConfigError for a shell that is not one of `SHELLS`."""
    if len(arguments) != 1 or arguments[0] not in SHELLS:
        raise ConfigError(f"{' '.join(['completion', *arguments])}: write rpbench completion bash, zsh or fish")
    (shell,) = arguments
    groups = {group: options_of(group) for group in GROUPS}
    values: Mapping[str, Sequence[str]] = groups | {
        "partition": METHODS,
        "dispatch": RULES,
        "offload": OFFLOADS,
        "charge": WORDS,
        "recompute": RECOMPUTES,
        "gpu": options_of("gpu"),
        "ssd": options_of("ssd"),
        "batch": ("max",),
        "finetune": ("full", "lora", "qlora"),
        **dict.fromkeys(("max_seq_len", "fewest_devices", "late"), ("yes", "no")),
        **dict.fromkeys(("verify", "save_timeline", "force"), ("true", "false")),
    }
    form, case = ("fish", "case {}\n                set found {}") if shell == "fish" else ("bash", '{}) found="{}" ;;')
    text = (Path(__file__).with_name("texts") / f"completion_{form}.txt").read_text(encoding="utf-8")
    return text.format(
        shell=shell,
        how=SHELLS[shell],
        start="autoload -U +X bashcompinit && bashcompinit\n" if shell == "zsh" else "",
        values="\n".join(" " * 12 + case.format(key, " ".join(each)) for key, each in values.items()),
        lists=" ".join(LISTS),
        new=usages()["new"]["takes"].split()[0].replace("|", " "),
        shells=" ".join(SHELLS),
        verbs=" ".join(verbs),
        advice=" ".join(f"{key}=" for key in (*OWN, *FIGURES, "finetune", *SIZES)),
        keys=" ".join(f"{key}=" for key in dict.fromkeys([*values, *(each.name for each in fields(RunConfig))])),
        flags="-m --json --config-dir --help --version",
    )
