"""Composer: cells of every experiment are what Hydra composes, and what it cannot prove it leaves to Hydra."""

import pytest
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.types import RunMode
from spared import spared

from rpbench.config import composing
from rpbench.config.choices import ConfigError, typed
from rpbench.config.composing import Composer
from rpbench.config.configuration import CONF, Composed, RunConfig, composed, register
from rpbench.config.loading import load
from rpbench.sweep.sweeper import ManifestSweeper

EXPERIMENTS = sorted(path.stem for path in (CONF / "experiment").glob("*.yaml"))


def cells_of(*arguments):
    register()
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        hydra = GlobalHydra.instance().hydra
        config = hydra.compose_config("config", list(arguments), RunMode.MULTIRUN, with_log_configuration=False)
        return ManifestSweeper(config, None, hydra.config_loader).cells(arguments)


def assert_same(found: Composed, overrides):
    expected = composed(overrides)
    values = found.node if isinstance(found.node, RunConfig) else typed(RunConfig, found.node)
    assert repr(values) == repr(typed(RunConfig, expected.node)), "also types and the order of keys"
    assert (dict(found.choices), found.overrides) == (dict(expected.choices), expected.overrides)


@pytest.fixture(scope="module")
def plain():
    """What Hydra composes where nothing is asked."""
    return composed(())


@pytest.mark.parametrize("experiment", ["figure10"])
def test_the_last_cell_of_an_experiment_is_hydras(experiment):
    cell = cells_of(f"experiment={experiment}")[-1]
    assert_same(Composer().compose(cell), cell)


@pytest.mark.slow
@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_cells_of_every_experiment_are_hydras(experiment):
    """Some ten of each, over all of its sweep; Hydra takes a third of a second for one."""
    composer, cells = Composer(), cells_of(f"experiment={experiment}")
    for cell in cells[:: max(1, len(cells) // 10)]:
        assert_same(composer.compose(cell), cell)


OVERRIDES = [
    ("schedule=1f1b", "num_microbatches=4", "cost=constant", "cost.hop_ms=0.5", "model=qwen3_1p7b"),
    ("backend=virtual", "backend.recompute_grain=layer", "checkpoint.save_to=a", "model=tiny_gpt"),
    ("seed=${num_devices}", "num_devices=3"),  # an interpolation
    ("+cost.constants.a=1", "cost=analytic"),  # an added key
    ("cluster=8x_rtx4090", "cluster.device_speeds=[1,0.5]", "~cost.hop_ms", "cost=constant"),
]


@pytest.mark.parametrize(
    "number", spared(range(len(OVERRIDES)), lambda number: number in (2, 4)), ids=lambda number: OVERRIDES[number][0]
)
def test_overrides_of_every_kind_are_hydras(number, plain):
    assert_same(Composer(plain).compose(OVERRIDES[number]), OVERRIDES[number])


@pytest.mark.parametrize(
    "words", [("model=qwen3_235b_lora", "model.lora_rank=8"), ("cluster=8x_h100", "num_devices=2")]
)
def test_another_option_with_changes_and_a_machine_of_no_file_need_no_hydra(words, plain, monkeypatch):
    composer = Composer(plain)
    with monkeypatch.context() as patch:
        patch.setattr(composing, "composed", None)
        found = composer.compose(words)
    assert_same(found, words)


def test_a_part_is_composed_once_and_hydra_is_not_asked(plain, monkeypatch):
    composer = Composer(plain)
    monkeypatch.setattr(composing, "composed", None)
    made, real = [], composing.Base.part

    def part(self, key, option, values):
        made.append((key, option))
        return real(self, key, option, values)

    monkeypatch.setattr(composing.Base, "part", part)
    for schedule in ("gpipe", "1f1b"):
        for number in range(4, 24):
            assert (
                composer.compose((f"schedule={schedule}", f"num_microbatches={number}")).node.num_microbatches == number
            )
    assert sum(key == "schedule" for key, _ in made) == 2
    assert sum(key == "num_microbatches" for key, _ in made) == 20
    assert len(made) == 2 + 20 + len(RunConfig.__dataclass_fields__) - 2


@pytest.mark.parametrize("override", ["+seeed=7", "seeed=7", "schedule=gpip", "num_devices=four", "cost.hop=1"])
def test_what_is_wrong_is_said_in_hydras_place(override, plain):
    with pytest.raises(ConfigError) as said:
        Composer(plain).compose((override,))
    assert len(str(said.value).splitlines()) <= 2


def test_single_configurations_are_recalled_until_a_file_changes(tmp_path, monkeypatch):
    monkeypatch.setenv("RPBENCH_PATH", str(tmp_path))
    (tmp_path / "cluster").mkdir()
    file = tmp_path / "cluster" / "mine.yaml"
    file.write_text("name: mine\nnum_devices: 2\n")
    recalling = composing.Recalling()
    for overrides in (("schedule=gpipe",), ("cluster=mine", "schedule=1f1b"), ("cluster=mine", "num_steps=2")):
        assert_same(recalling.compose(overrides), overrides)
    file.write_text("name: mine\nnum_devices: 16\n")
    assert recalling.compose(("cluster=mine",)).node.cluster["num_devices"] == 16
    assert recalling.compose(("cluster=mine", "seed=1")).node.cluster["num_devices"] == 16
    with pytest.raises(ConfigError, match="hydra/launcher=foo"):
        recalling.compose(("schedule=gpipe", "hydra/launcher=foo"))
    monkeypatch.setenv("RPBENCH_PATH", "")
    with pytest.raises(ConfigError, match="mine"):
        recalling.compose(("cluster=mine",))
    monkeypatch.setenv("RPBENCH_PATH", str(tmp_path))
    with monkeypatch.context() as patch:
        patch.setattr(composing, "composed", None)  # what it was asked in this state is still known
        assert recalling.compose(("cluster=mine", "seed=2")).node.cluster["num_devices"] == 16
    recalling.compose(("schedule=gpipe",))
    with pytest.raises(ConfigError, match="num_stepps"):
        recalling.compose(("num_stepps=2",))
    with pytest.raises(ConfigError, match=r"write mode\.system=mobius"):
        recalling.compose(("workload.system=mobius",))


def test_a_model_changed_in_many_ways_has_a_name_that_is_short_enough():
    sizes = {"num_layers": 2, "hidden": 64, "heads": 4, "key_value_heads": 2, "head_dim": 16, "inner": 96, "vocab": 512}
    words = [f"model.{key}={value}" for key, value in sizes.items()]
    few, many, others = (
        load(["schedule=1f1b", "model=mixtral_8x7b", *chosen]).model.name
        for chosen in (words[:2], [*words, "model.seq_len=32"], [*words, "model.seq_len=64"])
    )
    assert few == "mixtral_8x7b-num_layers-2-hidden-64"
    assert len(many) <= 100
    assert many != others


@pytest.mark.parametrize(
    "words, notes",
    [
        (["num_devices=2", "num_devices=3"], ("num_devices=2 num_devices=3: the last one counts",)),
        (["num_devices=2", "num_devices=2"], ()),
    ],
)
def test_a_key_with_two_values_takes_the_last_and_says_so(words, notes):
    """A script's own words before those of its user."""
    found = load(["schedule=1f1b", "num_microbatches=4", "cost=constant", *words])
    assert (found.notes, found.num_devices) == (notes, int(words[-1][-1]))
