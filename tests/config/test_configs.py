"""Configs as tested artefacts: every file composes, every group choice can be made."""

import pytest
from omegaconf import OmegaConf
from spared import spared

from rpbench import registry
from rpbench.config.composing import recalling
from rpbench.config.configuration import CONF, composed, options_of
from rpbench.config.loading import load
from rpbench.run.assemble import pose

OLD_NAMES = {"cuda": "device"}  # of backends
INHERITED = {"aa_duel": 2, "convergence_one_by_one": 4}  # devices of experiments that begin as another one


@pytest.mark.parametrize("name", options_of("experiment"))
def test_every_experiment_says_how_it_is_run(name):
    lines = (CONF / "experiment" / f"{name}.yaml").read_text().splitlines()
    assert lines[1].startswith("# python -m rpbench")
    assert f"experiment={name}" in lines[1]


# Hydra takes a third of a second for one; `./reproduce.sh quick` composes many more.
@pytest.mark.parametrize("name", spared(options_of("experiment"), lambda name: name in ("atlas", "figure17", "gains")))
def test_every_experiment_composes(name):
    config = composed([f"experiment={name}"]).node
    written = OmegaConf.load(CONF / "experiment" / f"{name}.yaml")
    assert config.num_devices == written.get("num_devices", INHERITED.get(name))  # else those of the cluster: eight


@pytest.mark.parametrize("group", ["mode", "model", "cluster", "workload", "cost", "backend", "optimizer", "tracker"])
def test_every_option_names_itself(group):
    for name in options_of(group):
        written = OmegaConf.load(CONF / group / f"{name}.yaml")
        named = OLD_NAMES.get(name, name)
        assert written.get("name", named) == named
        assert getattr(recalling.compose([f"{group}={name}"]).node, group)["name"] == named


@pytest.mark.parametrize("name", list(registry.entries()))
def test_every_schedule_is_offered_with_its_options(name):
    request = load([f"schedule={name}"])
    assert (request.entry.name, request.schedule.options) == (name, registry.entry(name).options)
    assert pose(request).entry.name == name


@pytest.mark.parametrize("path", sorted((CONF / "schedule").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_variant_of_a_schedule_sets_its_options(path):
    request, written = load([f"schedule={path.stem}"]), OmegaConf.load(path)
    assert request.schedule.chosen == path.stem
    assert request.entry.name == written["name"]
    assert set(written) - {"name"} <= set(request.entry.options)


PUBLISHED = [
    name for name in options_of("model") if OmegaConf.load(CONF / "model" / f"{name}.yaml").get("published_name")
]


def test_there_are_five_published_models():
    assert len(PUBLISHED) == 5


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_have_published_costs(name):
    request = load([f"model={name}", "cost=published", "partition=published"])
    assert pose(request).num_layers == request.model.num_layers


def test_another_batch_is_the_same_model():
    """It lost the corrections of the published timings, which say nothing of a batch."""
    found = load(("schedule=1f1b", "model=qwen3_1p7b", "model.batch_sequences=64"))
    assert found.given_model.published_name == "qwen3-1.7b"
