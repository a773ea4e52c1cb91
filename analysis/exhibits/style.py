"""How figures look: a colour and a marker a method, the names people read, a hatch a kind of evidence.

Colours are those of Okabe and Ito, "Color Universal Design" (2008); yellow only fills. Nothing is told by
colour alone: curves have markers, bars stand beside their names, their parts differ in lightness or hatch.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import matplotlib

BLACK, ORANGE, SKY, GREEN = "#000000", "#E69F00", "#56B4E9", "#009E73"
YELLOW, BLUE, VERMILION, PURPLE = "#F0E442", "#0072B2", "#D55E00", "#CC79A7"
GREY, PALE = "#8C8C8C", "#D0D0D0"

_STYLE = matplotlib.rc_params_from_file(Path(__file__).with_name("rpbench.mplstyle"), use_default_template=False)


@dataclass(frozen=True)
class Look:
    """Name, colour and marker of something that appears in several figures."""

    name: str
    colour: str
    marker: str


# Schedules by registered name, systems as in the published tables. Megatron's pipeline is 1F1B.
METHODS = {
    "gpipe": Look("GPipe", SKY, "s"),
    "1f1b": Look("1F1B", BLUE, "^"),
    "interleaved_1f1b": Look("Interleaved 1F1B", GREEN, "v"),
    "looped_bfs": Look("Looped BFS", PURPLE, "D"),
    "roundpipe": Look("RoundPipe", VERMILION, "o"),
    "roundpipe_call": Look("RoundPipe, one round", VERMILION, "p"),
    "roundpipe-sync": Look("RoundPipe-sync", ORANGE, "P"),
    "zero-2": Look("ZeRO-2", YELLOW, "<"),
    "zero-infinity": Look("ZeRO-Infinity", PURPLE, ">"),
    "fsdp": Look("FSDP", GREY, "X"),
    "fsdp-offload": Look("FSDP with offload", PALE, "*"),
    "megatron-pp": Look("Megatron-PP", BLUE, "h"),
    "megatron-tp": Look("Megatron-TP", SKY, "p"),
    "mobius": Look("Mobius", GREEN, "d"),
}

# Schedules that appear by name alone.
_NAMES = {
    "acco": "ACCO",
    "adaptis": "AdaPtis",
    "adaptive_1f1b": "Adaptive 1F1B",
    "bitpipe": "BitPipe",
    "bpipe": "BPipe",
    "chimera": "Chimera",
    "combined_1f1b": "Combined 1F1B",
    "cyclic_dp": "Cyclic data parallelism",
    "dapple": "DAPPLE",
    "data_parallel": "Data parallel",
    "dualpipe": "DualPipe",
    "dualpipe_v": "DualPipeV",
    "gis": "GIS",
    "greedysnake": "GreedySnake",
    "hanayo": "Hanayo",
    "interleaved_zb": "Interleaved ZB",
    "interlaced": "Interlaced pipeline",
    "kfkb": "kFkB",
    "mario": "Mario",
    "megatrain": "MegaTrain",
    "megatron_tp": "Megatron-TP",
    "optpipe": "OptPipe",
    "pipe_offload": "PipeOffload",
    "pipedream": "PipeDream",
    "pipedream_2bw": "PipeDream-2BW",
    "pipedream_flush": "PipeDream-Flush",
    "pipelined_backprop": "Pipelined Backpropagation",
    "pipemare": "PipeMare",
    "pipeoptim": "PipeOptim",
    "seq1f1b": "Seq1F1B",
    "spectrain": "SpecTrain",
    "stp": "STP",
    "superoffload": "SuperOffload",
    "tawpipe": "TawPipe",
    "two_bp": "2BP",
    "v_half": "V-Half",
    "v_min": "V-Min",
    "varuna": "Varuna",
    "vocab_parallel": "Vocabulary parallel",
    "weipipe": "WeiPipe",
    "xpipe": "XPipe",
    "zenflow": "ZenFlow",
    "zb_auto": "ZB, automatic",
    "zb_h1": "ZB-H1",
    "zb_h2": "ZB-H2",
    "zb_v": "ZB-V",
    "zero_2": "ZeRO-2",
    "zero_3": "ZeRO-3",
    "zero_infinity": "ZeRO-Infinity",
    "zero_offload": "ZeRO-Offload",
    "zero_offload_delayed": "ZeRO-Offload, one step late",
    "roundpipe_async": "RoundPipe, one step late",
    "roundpipe_call_async": "RoundPipe, one round, one step late",
}

# Colours of schedules that have none of their own: darker and lighter kin of the palette's.
_FURTHER = (
    "#003A5C",
    "#7B3F61",
    "#8C6D1F",
    "#004D38",
    "#7A2E00",
    "#5A5A5A",
    "#9BD3F5",
    "#C9A400",
    "#B48EC7",
    "#66C2A5",
)

# Kinds of schedules, for figures that show them all.
FAMILIES = {
    "one stage a device": Look("one stage a device", BLUE, "^"),
    "looped": Look("looped", GREEN, "v"),
    "zero bubble": Look("zero bubble", PURPLE, "D"),
    "V and waves": Look("V and waves", BLACK, "X"),
    "bidirectional": Look("bidirectional", SKY, "s"),
    "parts and offload": Look("parts and offload", YELLOW, "P"),
    "stages dealt to devices": Look("stages dealt to devices", VERMILION, "o"),
}
_FAMILY_OF = {
    "gpipe": "one stage a device",
    "1f1b": "one stage a device",
    "dapple": "one stage a device",
    "pipedream_flush": "one stage a device",
    "two_bp": "zero bubble",
    "interleaved_1f1b": "looped",
    "looped_bfs": "looped",
    "interleaved_zb": "zero bubble",
    "zb_h1": "zero bubble",
    "zb_h2": "zero bubble",
    "zb_auto": "zero bubble",
    "zb_v": "V and waves",
    "v_half": "V and waves",
    "v_min": "V and waves",
    "hanayo": "V and waves",
    "dualpipe_v": "V and waves",
    "dualpipe": "bidirectional",
    "chimera": "bidirectional",
    "bitpipe": "bidirectional",
    "greedysnake": "parts and offload",
    "superoffload": "parts and offload",
    "zenflow": "parts and offload",
    "megatrain": "parts and offload",
    "combined_1f1b": "looped",
    "stp": "V and waves",
    "gis": "looped",
    "adaptis": "looped",
    "kfkb": "one stage a device",
    "varuna": "one stage a device",
    "interlaced": "parts and offload",
    "mario": "one stage a device",
    "tawpipe": "stages dealt to devices",
    "weipipe": "stages dealt to devices",
    "bpipe": "parts and offload",
    "optpipe": "parts and offload",
    "pipe_offload": "parts and offload",
    "seq1f1b": "parts and offload",
    "vocab_parallel": "parts and offload",
    "roundpipe": "stages dealt to devices",
    "roundpipe_call": "stages dealt to devices",
}

# Models by their name in `conf/model/`, in the order of the paper's figures.
MODELS = {
    "qwen3_1p7b": Look("Qwen3-1.7B", BLUE, "o"),
    "llama31_8b": Look("Llama-3.1-8B", GREEN, "s"),
    "gpt_oss_20b": Look("GPT-OSS-20B", VERMILION, "^"),
    "qwen3_32b": Look("Qwen3-32B", PURPLE, "D"),
    "qwen3_235b_lora": Look("Qwen3-235B LoRA", BLACK, "v"),
}

# Ways to cut a model into stages.
PARTITIONS = {
    "published": Look("published cut", BLACK, "s"),
    "even": Look("even", SKY, "v"),
    "greedy": Look("greedy (released planner)", ORANGE, "D"),
    "search": Look("search", VERMILION, "o"),
}

# Parts of the idle time, dark next to light so that they stay apart in print.
PARTS = {
    "fill": Look("fill", SKY, ""),
    "switch": Look("switch", YELLOW, ""),
    "drain": Look("drain", BLUE, ""),
    "intra": Look("intra", "#FAFAFA", ""),
}

# How a number is known, as the hatch of a bar.
HATCHES = {
    "measured": "",
    "simulated": "",
    "derived": "",
    "predicted": "xxxx",
    "emulated": "\\\\\\\\",
    "published": "////",
}


@contextmanager
def applied() -> Iterator[None]:
    """The style in force for figures that are made, or written, inside."""
    with matplotlib.rc_context(_STYLE):
        yield


# What each bubble of a record is; captions, the page of the method and docs/bubbles.md say it in these words.
BUBBLES = {
    "bubble_makespan": "1 − work / (devices × makespan)",
    "bubble_span": "1 − work / (devices × longest device-local span)",
    "bubble_over_ideal": "idle / work",
    "bubble_steady": (
        "idle share of every device, in the middle of a long run, from the end of its own work for one step to that "
        "for a later one"
    ),
    "bubble_between_ends": "1 − work / (devices × interval) between the ends of two steps, on any devices",
}


def model_name(model: str) -> str:
    """A model's name for people; one that is not in the paper keeps its own."""
    return MODELS[model].name if model in MODELS else model


def method_name(method: str) -> str:
    """A schedule's or system's name for people; one that is not known here keeps its own."""
    return METHODS[method].name if method in METHODS else _NAMES.get(method, method)


def look_of(schedule: str) -> Look:
    """A schedule's look: its own, or one made of what its neighbours do not use, the same in every figure."""
    if schedule in METHODS:
        return METHODS[schedule]
    known = sorted(_NAMES)
    place = known.index(schedule) if schedule in known else len(known)
    return Look(method_name(schedule), _FURTHER[place % len(_FURTHER)], "<>XPdhH8"[place % 8])


def family_of(schedule: str) -> str:
    """The kind of a registered schedule."""
    return _FAMILY_OF[schedule]
