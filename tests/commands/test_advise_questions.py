"""`advise`, turned round: two rows by causes, the longest sequence, the largest batch, the fewest devices, the rent."""

import io
import shlex
from dataclasses import replace

import pytest
from small_machines import EIGHT_LAYERS, NODES, TWO_CARDS

from rpbench.advice.machine_figures import described
from rpbench.commands.advising.advise import advise_on
from rpbench.commands.advising.advise_questions import spelled_machine
from rpbench.cost.hardware.machine import machine


def test_two_contenders_lie_beside_each_other_by_causes(capsys):
    people = io.StringIO()
    answer = advise_on([*TWO_CARDS, "compare=fsdp,1f1b", "seconds=1"], people)
    rows = {row["schedule"]: row["tokens_per_s"] for row in answer["ranking"]}
    found = answer["comparison"]
    assert (found["a"]["label"], found["b"]["label"]) == ("zero_3 (FSDP)", "1f1b")
    assert found["ratio"] == pytest.approx(rows["1f1b"] / rows["zero_3"], rel=1e-3)
    parts = sum(each["log"] for each in found["causes"]) + found["unexplained"]["log"]
    assert parts == pytest.approx(found["log_ratio"])
    assert found["unexplained"]["log"] == pytest.approx(0.0, abs=1e-6)
    assert "bubble" in people.getvalue()
    nodes = advise_on([*EIGHT_LAYERS, *NODES, "compare=fsdp,interleaved_1f1b"], io.StringIO())
    assert {row["schedule"] for row in nodes["ranking"]} == {"zero_3", "interleaved_1f1b"}
    assert nodes["comparison"]["ratio"] != 1


def test_over_nodes_a_comparison_tells_recomputation_from_kernels():
    answer = advise_on([*EIGHT_LAYERS, *NODES, "compare=fsdp,1f1b", "device_memory_bytes=2.8e9"], io.StringIO())
    rows = {row["schedule"]: row for row in answer["ranking"]}
    found = {each["cause"]: each for each in answer["comparison"]["causes"]}
    assert rows["zero_3"]["options"]["kept_layers"] == [0]
    assert found["recomputation"]["a_seconds"] > found["recomputation"]["b_seconds"] > 0
    assert rows["zero_3"]["options"]["tensor"] > 1
    each = answer["num_devices"] / answer["tokens_per_step"]
    assert found["collectives"]["a_seconds"] > each * rows["zero_3"]["why"]["data"]  # those inside layers too


def test_a_method_that_updates_after_each_microbatch_is_compared_over_the_same_tokens():
    answer = advise_on([*TWO_CARDS, "compare=1f1b,pipedream", "seconds=1"], io.StringIO())
    first, second = sorted(answer["ranking"], key=lambda row: row["schedule"])
    assert second["schedule"] == "pipedream"
    assert answer["comparison"]["ratio"] == pytest.approx(second["tokens_per_s"] / first["tokens_per_s"])
    for row in (first, second):
        assert sum(row["why"].values()) == pytest.approx(answer["tokens_per_step"] / row["tokens_per_s"])


@pytest.mark.parametrize("question, key", [("max_seq_len=yes", "seq_len"), ("batch=max", "microbatch_sequences")])
def test_a_limit_is_held_by_its_command_and_not_beyond(question, key, rpbench):
    words = [word for word in TWO_CARDS if not (key == "seq_len" and word.startswith("seq_len="))]
    words += ["schedules=1f1b,zero_2", "device_memory_bytes=4e9"]
    answer = advise_on([*words, question], io.StringIO())
    assert {row["schedule"] for row in answer["limits"]} == {"1f1b", "zero_2"}
    for row in answer["limits"]:
        status, (record,), _ = rpbench(*shlex.split(row["command"])[3:])
        assert (status, record["status"]) == (0, "ok")
        assert record["tokens_per_s"] == pytest.approx(row["tokens_per_s"])
        assert max(record["peak_memory_bytes"]) <= 4e9
        if key == "seq_len":
            more = [f"seq_len={row['beyond'] * 17 // 16}", f"schedules={row['schedule']}"]
            asked = [word for word in words if not word.startswith("schedules=")]
            assert advise_on([*asked, *more], io.StringIO())["ranking"] == []


def test_a_limit_on_one_host_counts_compositions():
    """A bound on 1F1B over all devices says nothing of 1F1B with tensor shards, which plain advice finds."""
    words = [word for word in TWO_CARDS if not word.startswith(("seq_len=", "num_devices="))]
    words += ["num_devices=4", "device_memory_bytes=4e9", "schedules=1f1b", "seconds=1"]
    (row,) = advise_on([*words, "max_seq_len=yes"], io.StringIO())["limits"]
    assert "mesh.tensor=" in row["command"]
    assert not row["proven"]
    answer = advise_on([*words, f"seq_len={row['seq_len']}"], io.StringIO())
    assert [each["schedule"] for each in answer["ranking"]] == ["1f1b"]
    assert answer["does_not_fit"] == answer["none_found"] == []  # a schedule is said to fit, or not to, once
    assert advise_on([*words, f"seq_len={row['beyond'] * 17 // 16}"], io.StringIO())["ranking"] == []


def test_a_method_that_takes_no_size_is_said_to_be_refused_and_not_to_be_too_large():
    words, people = [word for word in TWO_CARDS if not word.startswith("num_devices=")], io.StringIO()
    (row,) = advise_on([*words, "num_devices=3", "batch=max", "schedules=megatron_tp"], people)["limits"]
    assert "3 of 8 heads: heads that do not divide" in row["why"]
    assert f"megatron_tp ({row['why']})" in people.getvalue()


def test_a_method_without_a_mesh_is_not_told_to_change_a_batch_that_divides():
    """Tensor groups stay in a node, here of four devices; it was told to take a multiple of the devices."""
    words, why = [*EIGHT_LAYERS, *NODES, "schedules=megatron_tp"], "with these methods and tensor groups of at most 4;"
    (row,) = advise_on([*words, "max_seq_len=yes"], io.StringIO())["limits"]
    assert why in row["why"]
    with pytest.raises(ValueError, match=why):
        advise_on(words, io.StringIO())


def test_limits_for_a_framework_are_those_of_what_it_runs():
    words = [*TWO_CARDS, "batch=max", "runs_in=FSDP2"]
    found = advise_on([*words, "schedules=1f1b,zero_2,zero_3"], io.StringIO())["limits"]
    assert {row["schedule"] for row in found} == {"zero_2", "zero_3"}
    for cards in (TWO_CARDS, (*EIGHT_LAYERS, *(word for word in NODES if not word.startswith("batch=")))):
        with pytest.raises(ValueError, match="runs_in=FSDP2: none of the schedules"):
            advise_on([*cards, *words[-2:], "schedules=1f1b"], io.StringIO())


def test_the_longest_sequence_over_nodes_fits_and_a_longer_one_does_not():
    answer = advise_on([*EIGHT_LAYERS, *NODES[:4], "max_seq_len=yes", "schedules=1f1b"], io.StringIO())
    (row,) = answer["limits"]
    words = [*EIGHT_LAYERS, *NODES[:4], "schedules=1f1b"]
    assert advise_on([*words, f"seq_len={row['seq_len']}"], io.StringIO())["ranking"]
    if row["beyond"] is not None:
        assert not advise_on([*words, f"seq_len={row['beyond'] * 2}"], io.StringIO())["ranking"]


def test_no_fewer_devices_hold_it_than_the_fewest():
    words = [word for word in TWO_CARDS if not word.startswith("num_devices=")]
    words += ["schedules=1f1b", "device_memory_bytes=1.2e9"]
    answer = advise_on([*words, "num_devices=4", "fewest_devices=yes"], io.StringIO())
    fewest = answer["fewest_devices"]
    assert fewest == answer["num_devices"] > 1
    assert [row["num_devices"] for row in answer["fewer"]] == list(range(1, fewest))
    assert all("more memory of each device 1f1b fits" in row["why"] for row in answer["fewer"])
    own = [*words, "sequences_per_step=32"]
    assert advise_on([*own, f"num_devices={fewest}"], io.StringIO())["ranking"]
    assert not advise_on([*own, f"num_devices={fewest - 1}"], io.StringIO())["ranking"]


def test_the_cheapest_rent_of_those_in_time():
    words = [*TWO_CARDS[:-1], "num_devices=4", "schedules=gpipe", "batch=1", "tokens=1e10", "usd_per_device_hour=0.5"]
    answer = advise_on([*words, "deadline_days=1000"], io.StringIO())
    assert [row["num_devices"] for row in answer["rents"]] == [1, 2, 4]
    for row in answer["rents"]:
        assert row["usd"] == pytest.approx(row["days"] * 24 * row["num_devices"] * 0.5)
    assert answer["cheapest"]["usd"] == min(row["usd"] for row in answer["rents"])
    assert answer["ranking"][0]["usd_per_1e9_tokens"] == pytest.approx(answer["cheapest"]["usd"] / 10)
    pace = answer["ranking"][0]["tokens_per_s"]
    assert answer["cheapest"]["days"] == pytest.approx(1e10 / pace / 86_400)
    between = (answer["rents"][0]["days"] + answer["rents"][1]["days"]) / 2
    assert answer["cheapest"]["num_devices"] == 1
    assert advise_on([*words, f"deadline_days={between}"], io.StringIO())["cheapest"]["num_devices"] == 2
    assert advise_on([*words, "deadline_days=1e-6"], io.StringIO())["cheapest"] is None


def test_a_part_of_the_nodes_is_spelled_without_a_word_that_no_run_reads():
    """A run warned of the rent and of the domain in its own command."""
    rented = replace(machine("16x_h100_sxm5_80gb"), price_usd_per_hour=48.0).with_devices(4)
    assert spelled_machine(rented) == "cluster=16x_h100_sxm5_80gb ++cluster.num_devices=4"
    wide = described("h100_sxm5_80gb", {"num_devices": "16", "devices_per_node": "16"}).machine
    assert "++cluster.domain=0" in spelled_machine(wide)  # the usual nodes have domains of eight
