"""Configs as tested artefacts: every file composes, every group choice can be made."""

import pytest
from omegaconf import OmegaConf

from rpbench import registry
from rpbench.harness.assemble import pose
from rpbench.harness.config import CONF, choices, load

# Real work is for as many devices as small machines have cores, drawings for as many as can be read; the others are in
# the paper's setting.
DEVICES = {"atlas": 4, "baselines_cpu": 2, "convergence": 4, "cpu_duel": 2, "equivalence": 4, "gpu_single": 1}


@pytest.mark.parametrize("name", choices("experiment"))
def test_every_experiment_composes_and_says_how_it_is_run(name):
    config = load([f"experiment={name}"])
    lines = (CONF / "experiment" / f"{name}.yaml").read_text().splitlines()
    assert lines[1].startswith("# python -m rpbench")
    assert f"experiment={name}" in lines[1]
    assert config.num_devices == DEVICES.get(name, 8)


@pytest.mark.parametrize("group", ["model", "cluster", "workload", "cost", "backend", "tracker"])
def test_every_option_names_itself(group):
    for name in choices(group):
        assert OmegaConf.load(CONF / group / f"{name}.yaml")["name"] == name
        assert getattr(load([f"{group}={name}"]), group)["name"] == name


@pytest.mark.parametrize("name", list(registry.entries()))
def test_every_schedule_is_offered_with_its_options(name):
    config = load([f"schedule={name}"])
    assert config.schedule == {"name": name, **registry.entry(name).options}
    assert pose(config)[0].entry.name == name


PUBLISHED = [name for name in choices("model") if OmegaConf.load(CONF / "model" / f"{name}.yaml").get("published_name")]


def test_there_are_five_published_models():
    assert len(PUBLISHED) == 5


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_have_published_costs(name):
    problem, model, _ = pose(load([f"model={name}", "cost=published", "partition=published"]))
    assert problem.num_layers == model.num_layers
