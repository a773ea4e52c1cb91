"""`advise`: wrong words, each answered in one line that says the way out, before anything is searched."""

import pytest
from small_machines import EIGHT_LAYERS, FOUR_L40S, NODES, TWO_CARDS

from rpbench.cli import dispatch

WRONG = [
    ((*TWO_CARDS, "max_seq_len=maybe"), "max_seq_len=maybe: yes or no"),
    ((*TWO_CARDS, "compare=1f1b"), "compare=1f1b: two schedules with a comma between"),
    ((*TWO_CARDS, "compare=1f1b,roundpip"), "did you mean roundpipe?"),
    ((*TWO_CARDS, "compare=1f1b,gpipe", "schedules=1f1b"), "compare= names the schedules; leave it out"),
    ((*TWO_CARDS, "compare=1f1b,gpipe", "batch=max"), "one question at a time"),
    ((*TWO_CARDS, "batch=big"), "batch=big: a whole number of at least 1, or max"),
    ((*TWO_CARDS, "max_batch=yes"), "max_batch=yes is now batch=max"),
    ((*TWO_CARDS, "batch=16", "sequences_per_step=16"), "given twice"),
    ((*TWO_CARDS, "max_seq_len=4096"), "one length is seq_len=N"),
    ((*TWO_CARDS[:-1], "num_devices=1" + 20 * "0"), "at most 1,000,000"),
    ((*TWO_CARDS, "batch=1" + 20 * "0"), "at most 10,000,000"),
    ((*TWO_CARDS[:-3], "seq_len=1" + 20 * "0", *TWO_CARDS[-2:]), "at most 100,000,000"),
    ((*TWO_CARDS, "inner=9999999999"), "inner=9999999999: at most 1,000,000,000"),
    (("model=.", *FOUR_L40S), "there is no config.json in this folder"),
    ((*TWO_CARDS, "deadline_days=3"), "tokens= is missing"),
    ((*TWO_CARDS, "tokens=1e9"), "add deadline_days="),
    ((*TWO_CARDS, "deadline_days=0", "tokens=1e9"), "deadline_days=0: a number above 0"),
    ((*FOUR_L40S, "model=llama31_8b", "deadline_days=3", "tokens=1e9"), "usd_per_device_hour= is missing"),
    ((*EIGHT_LAYERS, *NODES, "compare=fsdp,roundpipe"), "compare=roundpipe: a search over meshes has 1f1b"),
    (("model=nowhere/config.json", *FOUR_L40S), "nothing is downloaded"),
    (("model=llama31_9b", *FOUR_L40S), "did you mean llama31_8b?"),
    (("model=" + 300 * "a", *FOUR_L40S), "unknown model 'aaa"),
    (("model=llama31_8b", "gpu=l4s", "num_devices=4"), "did you mean l40s?"),
    ((*TWO_CARDS, "finetune=some"), "finetune=some: one of full, lora, qlora"),
    ((*TWO_CARDS, "late=maybe"), "late=maybe: one of yes, no"),
    ((*TWO_CARDS, "family=lama"), "family=lama: one of gpt, llama, qwen3, gpt_oss"),
    ((*TWO_CARDS, "runs_in=titan"), "unknown runs_in 'titan'"),
    ((*TWO_CARDS, "schedules=1f1"), "did you mean 1f1b?"),
    (("model=llama31_8b", "gpu=l40s"), "num_devices= is missing"),
    (
        ("model=llama31_8b", *FOUR_L40S[:2], "host_link_bytes_per_s=0"),
        "host_link_bytes_per_s=0: bytes a second above 0",
    ),
    (("model=llama31_8b", "gpu=l40s", "num_devices=3.5"), "num_devices=3.5: a whole number"),
    (("model=llama31_8b", "gpu=l40s", "num_devices=9", "devices_per_node=4"), "take 8 or 12"),
    (("model=llama31_8b",), "gpu= or cluster= is missing"),
    (("hidden=512", *FOUR_L40S), "num_layers=, heads=, vocab= missing"),
    (("hiden=512", *FOUR_L40S), "did you mean hidden?"),
    (("model=llama31_8b", "cluster=8x_h100", "intra_bytes_per_s=1e9"), "cluster=8x_h100 has it"),
    (("model=llama31_8b", "cluster=8x_rtx4090", "num_devices=9"), "cluster 8x_rtx4090 has 8"),
    (("model=llama31_8b", *FOUR_L40S, "num_devices=8"), "num_devices=8: num_devices= is given twice"),
    (("model=llama31_8b", *FOUR_L40S, "schedules=1f1b,"), "schedules=1f1b,: names with a comma between two"),
    (
        ("model=llama31_8b", *FOUR_L40S, "devices_per_node=2", "schedules=hanayo"),
        "schedules=hanayo: a search over meshes",
    ),
    (("model=llama3_8b", "frozen_layers=2", "cluster=dgx_h100"), "frozen layers under a mesh"),
    (("num_layers=2", "hidden=64", "heads=2", "vocab=100", "kv_heads=1", *FOUR_L40S), "is spelled key_value_heads now"),
]


@pytest.mark.parametrize(
    "words, expected", WRONG, ids=lambda value: " ".join(value) if isinstance(value, tuple) else ""
)
def test_a_wrong_request_is_answered(words, expected, capsys):
    assert dispatch(("advise", *words)) == 2
    out, err = capsys.readouterr()
    assert expected in err
    assert out == ""
    assert len(err.splitlines()) == 1  # before anything is searched
