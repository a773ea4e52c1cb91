"""The machine of streams: what it shows of devices, the races that it sees, and none where there are none."""

import threading

import pytest
import torch
from stream_replay import Replay

from rpbench.engine.stream_order.happens_before import findings
from rpbench.engine.stream_order.machine import Machine
from rpbench.engine.stream_order.mutants import judged
from rpbench.engine.stream_order.trace import Waits

# --- its face ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["privateuseone", "xpu", "cuda"])
def test_tensors_show_the_device_they_would_be_on(kind):
    if torch.accelerator.is_available() and torch.accelerator.current_accelerator().type == kind:
        pytest.skip("this machine has real ones")
    with Machine(2, kind) as machine:
        second = torch.device(kind, 1)
        host = torch.ones(3)
        there = host.to(second)
        assert (host.device.type, there.device) == ("cpu", second)
        assert there.is_cuda == (kind == "cuda")
        assert (host.get_device(), there.get_device()) == (-1, 1)
        for made in (torch.zeros(2, device=second), there.new_zeros(2), torch.tensor([1.0], device=second), there + 1):
            assert made.device == second
        assert torch.empty_like(there).device == second
        assert there[:1].view(-1).device == there.detach().device == second
        assert there.cpu().device.type == "cpu"
        assert there.to(torch.float64).device == second
        assert there.to(host).device.type == "cpu"
        with torch.accelerator.device_index(1):
            assert torch.ones(1, device=kind).device == second
        with pytest.raises(TypeError, match="no numpy array"):
            there.numpy()
        with pytest.raises(RuntimeError, match="there are 2"):
            torch.ones(1, device=f"{kind}:2")
        module = torch.nn.Linear(3, 3).to(second)
        assert {parameter.device for parameter in module.parameters()} == {second}
        assert module(there).device == second
    assert not findings(machine.trace)
    assert torch.ones(1).device.type == "cpu"


def test_torch_shows_accelerators_inside_and_its_own_again_after_that():
    before = torch.accelerator.device_count(), torch.Stream, torch.Event, torch.Generator, torch.autocast
    with Machine(3) as machine:
        assert torch.accelerator.is_available()
        assert torch.accelerator.device_count() == 3
        kind = torch.accelerator.current_accelerator().type
        stream = torch.Stream(device=torch.device(kind, 2))
        with stream:
            assert torch.accelerator.current_stream() == stream
            assert torch.accelerator.current_device_index() == 2
            held = torch.zeros(300, dtype=torch.uint8, device=kind)
        assert torch.accelerator.current_device_index() == 0
        assert torch.accelerator.memory_allocated(2) == 512  # in whole blocks, as an allocator gives them
        del held
        assert (torch.accelerator.memory_allocated(2), torch.accelerator.max_memory_allocated(2)) == (0, 512)
        drawn = torch.empty(4, device=f"{kind}:1")
        drawn.bernoulli_(0.5, generator=torch.Generator(drawn.device).manual_seed(0))
        with torch.autocast(kind, dtype=torch.bfloat16):
            product = torch.ones(2, 2, device=kind) @ torch.ones(2, 2, device=kind)
        assert product.dtype == torch.bfloat16
    assert not findings(machine.trace)
    assert before == (torch.accelerator.device_count(), torch.Stream, torch.Event, torch.Generator, torch.autocast)


def test_a_gradient_goes_back_to_where_its_tensor_was():
    with Machine(1) as machine:
        weight = torch.ones(3, requires_grad=True)
        there = weight.to("privateuseone:0")
        (there * there).sum().backward()
        assert weight.grad.device.type == "cpu"
        assert weight.grad.tolist() == [2.0, 2.0, 2.0]
    assert not findings(machine.trace)


def test_a_machine_has_devices():
    with pytest.raises(ValueError, match="num_devices=0: a machine has at least one"):
        Machine(0)


# --- what it sees --------------------------------------------------------------------------------------------

KIND = "privateuseone"


def streams(*devices):
    return [torch.Stream(device=torch.device(KIND, device)) for device in devices]


def passed(event_of, waiting):
    event = torch.Event()
    event.record(event_of)
    waiting.wait_event(event)


def read_after_write(*, right):
    one, other = streams(0, 0)
    with one:
        made = torch.ones(4, device=KIND)
    if right:
        passed(one, other)
    with other:
        made + 1
    torch.accelerator.synchronize()


def write_after_read(*, right):
    one, other = streams(0, 0)
    with one:
        made = torch.ones(4, device=KIND)
    passed(one, other)
    with other:
        made + 1
    if right:
        one.wait_stream(other)
    with one:
        made.fill_(0)


def write_after_write(*, right):
    one, other = streams(0, 0)
    with one:
        made = torch.ones(4, device=KIND)
    if right:
        one.synchronize()
    with other:
        made.fill_(0)


def memory_given_away(*, right):
    one, other = streams(0, 0)
    with one:
        made = torch.ones(4, device=KIND)
    passed(one, other)
    with other:
        made + 1
    if right:
        made.record_stream(other)
    del made
    with one:
        torch.ones(4, device=KIND)


def memory_given_away_by_who_knows(*, right):
    one, other = streams(0, 0)
    with one:
        made = torch.ones(4, device=KIND)
    passed(one, other)
    with other:
        made + 1
    if right:
        other.synchronize()
    del made
    with one:
        torch.ones(4, device=KIND)


def host_writes_what_a_copy_reads(*, right):
    host = torch.ones(4).pin_memory()
    (stream,) = streams(0)
    with stream:
        host.to(KIND, non_blocking=True)
    if right:
        stream.synchronize()
    host.fill_(0)


def host_reads_what_a_copy_writes(*, right):
    (stream,) = streams(0)
    home = torch.empty(4, pin_memory=True)
    with stream:
        home.copy_(torch.ones(4, device=KIND), non_blocking=True)
    if right:
        stream.synchronize()
    home + 1


def host_frees_what_a_copy_reads(*, right):
    """torch keeps pinned memory until copies of it are done; so this is right either way but for the pinning."""
    host = torch.ones(4).pin_memory() if right else torch.ones(4)
    (stream,) = streams(0)
    with stream:
        host.to(KIND, non_blocking=True)
    del host


def event_of_another_thread(*, right):
    one, other = streams(0, 0)
    event = torch.Event()

    def record():
        event.record(one)

    thread = threading.Thread(target=record)
    thread.start()
    if right:
        thread.join()
    else:
        while thread.is_alive():  # in time, and nothing says so
            pass
    other.wait_event(event)


def event_not_recorded(*, right):
    (one,) = streams(0)
    event = torch.Event()
    if right:
        event.record(one)
    one.wait_event(event)


def time_of_an_event(*, right):
    (one,) = streams(0)
    events = [torch.Event(enable_timing=True) for _ in range(2)]
    for event in events:
        event.record(one)
        with one:
            torch.ones(1, device=KIND)
    if right:
        events[1].synchronize()
    events[0].elapsed_time(events[1])


def memory_of_another_device(*, right):
    here, there = torch.ones(4, device=f"{KIND}:0"), torch.ones(4, device=f"{KIND}:1")
    torch.accelerator.synchronize(1)
    here + (there.to(here.device) if right else there)


def memory_of_the_host(*, right):
    here = torch.ones(4, device=KIND)
    here + (torch.ones(4).to(KIND) if right else torch.ones(4))


def copy_between_devices(*, right):
    """It runs on the source's current stream, which waits for the target's: not for the stream that wrote it."""
    one, other = streams(0, 1)
    with one:
        made = torch.ones(4, device=f"{KIND}:0")
    if right:
        passed(one, other)
    with other:
        made.to(f"{KIND}:1", non_blocking=True)


PROGRAMS = [
    ("RAW", read_after_write),
    ("WAR", write_after_read),
    ("WAW", write_after_write),
    ("REUSE", memory_given_away),
    ("REUSE", memory_given_away_by_who_knows),
    ("WAR", host_writes_what_a_copy_reads),
    ("RAW", host_reads_what_a_copy_writes),
    ("BLOCKS", host_frees_what_a_copy_reads),
    ("EVENT", event_of_another_thread),
    ("EVENT", event_not_recorded),
    ("EVENT", time_of_an_event),
    ("DEVICE", memory_of_another_device),
    ("DEVICE", memory_of_the_host),
    ("RAW", copy_between_devices),
]


@pytest.mark.parametrize("kind, program", PROGRAMS, ids=lambda found: getattr(found, "__name__", found))
def test_a_program_that_may_go_wrong_is_seen_and_the_right_one_is_not(kind, program):
    with Machine(2) as machine:
        program(right=True)
    assert not findings(machine.trace)
    with Machine(2) as machine:
        program(right=False)
    assert {found.kind for found in findings(machine.trace)} == {kind}


def test_a_finding_names_both_ends():
    with Machine(1) as machine:
        read_after_write(right=False)
    (found,) = findings(machine.trace)
    assert "add on stream" in found.what
    assert "ones on stream" in found.what or "fill_ on stream" in found.what
    assert "test_stream_order.py" in found.what


# --- loops of users ------------------------------------------------------------------------------------------


class Doubled(torch.autograd.Function):
    """A user's own function: what it makes in its backward is asked for where its gradient is."""

    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, gradient):
        return gradient * torch.full(gradient.shape, 2.0, device=gradient.device)


def of_classes(linear, x):
    """`one_hot` makes zeros for itself, which no argument says the device of."""
    return linear(torch.nn.functional.one_hot((x > 0).sum(-1), 4).to(x.dtype))


def masked(linear, x):
    y = linear(x)
    return torch.nn.functional.scaled_dot_product_attention(y, y, y, is_causal=True)


def run_again(linear, x, *, use_reentrant=False):
    def forward(x):
        return torch.nn.functional.dropout(linear(x)) + torch.arange(4, device=x.device)

    return torch.utils.checkpoint.checkpoint(forward, x, use_reentrant=use_reentrant)


def run_again_by_a_function(linear, x):
    return run_again(linear, x.requires_grad_(), use_reentrant=True)


def with_a_function(linear, x):
    return Doubled.apply(linear(x))


def with_hooks(linear, x):
    made = linear(x)
    made.register_hook(lambda gradient: gradient + torch.ones(4, device=gradient.device))
    return made


def with_a_default_device(linear, x):
    before = torch.get_default_device()
    torch.set_default_device(x.device)
    try:
        return linear(x) + torch.ones(4)
    finally:
        torch.set_default_device(None if before == torch.device("cpu") else before)


USED = [of_classes, masked, run_again, run_again_by_a_function, with_a_function, with_hooks, with_a_default_device]


def gradient_of(use, device):
    torch.manual_seed(0)
    linear, x = torch.nn.Linear(4, 4).to(device), torch.randn(3, 4).to(device)
    use(linear, x).square().sum().backward()
    return linear.weight.grad


@pytest.mark.parametrize("use", USED, ids=lambda use: use.__name__)
def test_a_loop_of_a_user_has_no_findings_and_the_gradient_of_the_processor(use):
    expected = gradient_of(use, "cpu")
    with Machine(2) as machine:
        found = gradient_of(use, KIND)
        assert found.device == torch.device(KIND, 0)
    assert not findings(machine.trace)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("use", [with_a_function, with_hooks])
def test_what_is_called_back_and_forgets_the_device_is_seen(use, monkeypatch):
    for name in ("full", "ones"):
        make = getattr(torch, name)
        monkeypatch.setattr(torch, name, lambda *words, device=None, make=make: make(*words))
    with Machine(2) as machine:
        gradient_of(use, KIND)
    assert {found.kind for found in findings(machine.trace)} == {"DEVICE"}


def test_what_workers_of_a_loader_have_pinned_is_there_for_who_takes_it_from_their_queue():
    batches = [torch.ones(2, 4), torch.zeros(2, 4)]
    with Machine(1) as machine:
        loader = torch.utils.data.DataLoader(batches, batch_size=None, pin_memory=True, num_workers=1)
        found = [batch.to(KIND, non_blocking=True) for batch in loader]
    assert len(found) == 2
    assert not findings(machine.trace)


def test_a_kind_that_the_machine_has_not_is_refused_as_torch_does():
    with Machine(1), pytest.raises((AssertionError, RuntimeError), match="CUDA"):
        torch.ones(2).cuda()


# --- mutants and other orders --------------------------------------------------------------------------------


def recorded(program, **machine):
    with Machine(2, **machine) as found:
        program(right=True)
    return found


@pytest.mark.parametrize("program", [program for kind, program in PROGRAMS if kind != "DEVICE"])
def test_every_mutant_of_a_right_program_is_seen_or_named(program):
    verdicts = list(judged(recorded(program).trace))
    assert {verdict.outcome for verdict in verdicts} <= {"seen", "known", "later", "idle"}
    assert all(verdict.by for verdict in verdicts)
    dropped = [verdict.outcome for verdict in verdicts if verdict.mutant.endswith("dropped")]
    if program not in (event_of_another_thread, event_not_recorded):  # which share no memory
        assert "seen" in dropped


def test_a_wait_that_another_one_covers_is_named_with_it():
    def program(*, right):
        one, other = streams(0, 0)
        with one:
            made = torch.ones(4, device=KIND)
        passed(one, other)
        passed(one, other)
        with other:
            made + 1
        torch.accelerator.synchronize()

    verdicts = [found for found in judged(recorded(program).trace) if found.mutant.startswith("Waits")]
    assert [found.outcome for found in verdicts if found.mutant.endswith("dropped")] == ["later", "known"]
    assert all("brought by Waits" in found.by for found in verdicts if found.mutant.endswith("dropped"))


@pytest.mark.parametrize("program", [read_after_write, write_after_read, copy_between_devices])
def test_an_order_that_is_allowed_gives_the_same_bits_and_a_race_does_not(program):
    machine = recorded(program, keep_calls=True)
    assert not any(Replay(machine).differences(seed) for seed in range(20))
    entries = [entry for entry in machine.trace.entries if not isinstance(entry, Waits)]
    if program is write_after_read:
        entries = [entry for entry in entries if type(entry).__name__ != "WaitsForStream"]
    machine.trace.entries = entries
    replay = Replay(machine)
    assert any(replay.differences(seed) for seed in range(50))
