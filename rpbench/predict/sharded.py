"""Data-parallel systems whose state is divided: ZeRO-2, ZeRO-Infinity, FSDP.

Every device trains its own microbatches; a step is `num_calls` micro-steps. Psi is the number of parameters.

    ZeRO-2         reduces the gradients of every micro-step on all devices (bucketed; 2 sends of Psi), gathers the
                   updated weights once a step; behind the computation
    ZeRO-Infinity  gathers the weights of every micro-step twice and scatters its gradients (3 Psi); fetches its
                   share of the weights from the host twice and adds its gradients there in fp32; Adam on the host;
                   all behind the computation
    both           pass over every gradient of a micro-step on its way into a bucket and out
    FSDP           gathers the weights of every micro-step twice (2 Psi), beside the computation; scatters gradients
                   once a step

Whether a system hides its transfers and how often it sends gradients is our reading of the published throughputs,
for no profile is public: the settings allow more than one.

Source: Rajbhandari et al., "ZeRO", SC'20, section 7; "ZeRO-Infinity", SC'21, sections 5 and 6; Zhao et al.,
"PyTorch FSDP", VLDB'23, section 3.
"""

from rpbench.cost.hardware.basis import Basis
from rpbench.mesh.layers.collectives import gather_s, reduce_s
from rpbench.mesh.layers.layer_times import setting_of, times_of
from rpbench.predict.case import Case, Terms, ring, waiting_s
from rpbench.workload.counts import BYTES_PER_VALUE


def zero2_step(case: Case, basis: Basis) -> Terms:
    """Seconds of a step of ZeRO-2."""
    calls, devices = case.settings.num_calls, case.num_devices
    gradients = BYTES_PER_VALUE * case.model.trainable_parameters
    return {
        "computation": calls * compute_s(case, basis),
        "expert loop": calls * waiting_s(case.model, basis),
        "gradients": calls * reduce_s(gradients, ring(devices, basis)),
        "gradient copies": calls * _gradient_copies_s(case, basis),
        "weights": gather_s(gradients, ring(devices, basis)),
        "optimizer": _device_optimizer_s(case, basis),
    }


def fsdp_step(case: Case, basis: Basis) -> Terms:
    """Seconds of a step of FSDP; computation counts where the gathers do not hide it, and the reverse."""
    calls, devices = case.settings.num_calls, case.num_devices
    gathers = calls * 2 * gather_s(BYTES_PER_VALUE * case.model.total_parameters, ring(devices, basis))
    computation = calls * (compute_s(case, basis) + waiting_s(case.model, basis))
    return {
        "computation": computation,
        "weights": max(0.0, gathers - computation),
        "gradients": gather_s(BYTES_PER_VALUE * case.model.trainable_parameters, ring(devices, basis)),
        "optimizer": _device_optimizer_s(case, basis),
    }


def zero_infinity_step(case: Case, basis: Basis) -> Terms:
    """Seconds of a step of ZeRO-Infinity with weights and optimizer on the host."""
    calls, devices = case.settings.num_calls, case.num_devices
    weights = BYTES_PER_VALUE * case.model.total_parameters
    trained = case.model.trainable_parameters
    gradients = BYTES_PER_VALUE * trained
    return {
        "computation": calls * compute_s(case, basis),
        "expert loop": calls * waiting_s(case.model, basis),
        "weights": calls * 2 * gather_s(weights, ring(devices, basis)),
        "gradients": calls * gather_s(gradients, ring(devices, basis)),
        "gradient copies": calls * _gradient_copies_s(case, basis),
        "copies": calls * _host_copy_s((2 * weights + gradients) / devices, devices, basis),
        "adding gradients": calls * basis["host_accumulate_bytes"] * trained / basis["host_bytes_per_s"],
        "optimizer": basis["adam_bytes"] * trained / basis["host_bytes_per_s"],
    }


def compute_s(case: Case, basis: Basis) -> float:
    """Seconds of one micro-step on one device: every layer recomputed, eager passes over all logits in fp32."""
    times = times_of(setting_of(case.model, case.microbatch_tokens, basis, case.software))
    layers = sum(times.forward) + sum(times.recompute) + sum(times.backward)
    rate = basis["memory_bytes_per_s"] * basis["memory_efficiency"]
    loss = basis["eager_loss_bytes"] * case.microbatch_tokens * case.model.vocab / rate
    return layers + times.head_forward + times.head_backward + loss


def _gradient_copies_s(case: Case, basis: Basis) -> float:
    """Seconds a device takes to copy all gradients of a micro-step into DeepSpeed's buckets and out again."""
    rate = basis["memory_bytes_per_s"] * basis["memory_efficiency"]
    return basis["deepspeed_gradient_bytes"] * case.model.trainable_parameters / rate


def _host_copy_s(bytes_each: float, num_devices: int, basis: Basis) -> float:
    """Seconds for all devices to copy as much at the same time: the link's or the host memory's, whichever is more."""
    return max(bytes_each / basis["copy_bytes_per_s"], bytes_each * num_devices / basis["host_bytes_per_s"])


def _device_optimizer_s(case: Case, basis: Basis) -> float:
    """Seconds Adam takes over a device's share of the state."""
    rate = basis["memory_bytes_per_s"] * basis["memory_efficiency"]
    return basis["adam_bytes"] * case.model.trainable_parameters / case.num_devices / rate
