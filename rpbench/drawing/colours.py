"""Colours: what actions of a kind are drawn in and called, in every drawing of a timeline."""

from rpbench.ir.action import Kind

# Okabe-Ito: forward blue, backward vermilion, the halves of a backward apart, recomputation pale.
COLOURS = {
    Kind.F: "#56B4E9",
    Kind.B: "#E69F00",
    Kind.FB: "#D55E00",
    Kind.I: "#F0C05A",
    Kind.W: "#009E73",
    Kind.R: "#CFCFCF",
    Kind.STEP: "#CC79A7",
    Kind.STEP_REST: "#CC79A7",
    Kind.HF: "#8FD3F4",
    Kind.HB: "#F7B267",
}
NAMES = {
    Kind.F: "F forward",
    Kind.B: "B backward",
    Kind.FB: "FB fused forward and backward",
    Kind.I: "I input gradient",
    Kind.W: "W weight gradient",
    Kind.R: "R recompute",
    Kind.STEP: "STEP optimizer",
    Kind.STEP_REST: "STEP_REST optimizer of the host",
    Kind.HF: "HF shard of the head, forward",
    Kind.HB: "HB shard of the head, backward",
}
OTHER = "#999999"  # of a kind that has none
