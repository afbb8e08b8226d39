"""A snapshot's model is rebuilt as it was, or refused with one clear reason; nothing of it is executed."""

import sys

import pytest
import torch
from torch import nn

from gradloc.snapshot import open_snapshot
from gradloc_localizer.model_source import ModelRejected, build_model


@pytest.fixture
def saved(trainer, tmp_path):
    """Write a step as a snapshot with some manifest fields changed, and open it."""

    def save(model=None, **changes):
        step = trainer.faulty(trainer.model() if model is None else model, trainer.stale(6.0))
        return step, open_snapshot(step.write(f"file://{tmp_path}/run/0/7", **changes))

    return save


@pytest.mark.parametrize("model_type", ["qwen3", "llama", "gpt2"])
@pytest.mark.parametrize("tied", [True, False])
def test_the_rebuilt_model_has_the_same_weights_and_answers(trainer, saved, model_type, tied):
    step, snapshot = saved(trainer.model(model_type=model_type, tied=tied))
    model = build_model(snapshot).eval()
    assert type(model) is type(step.model)
    expected = step.model.state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in model.state_dict().items())
    assert len(list(model.parameters())) == len(list(step.model.parameters()))
    ids = torch.arange(10).reshape(1, 10)
    with torch.no_grad():
        assert torch.equal(model(ids).logits, step.model.eval()(ids).logits)


def test_bfloat16_stays_bfloat16(trainer, saved):
    _, snapshot = saved(trainer.model(dtype=torch.bfloat16), parameter_dtype="bfloat16")
    assert {parameter.dtype for parameter in build_model(snapshot).parameters()} == {torch.bfloat16}


def config(trainer, **changes):
    return {**trainer.model().config.to_dict(), **changes}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model_config_hf": None}, "neither a Hugging Face configuration nor a factory"),
        ({"model_config_hf": {}}, "cannot build a"),
        ({"model_config_hf": {"model_type": "no-such-model"}}, "cannot build a 'no-such-model'"),
        ({"attention": "somebody/kernels:evil"}, "attention kernel"),
        ({"architecture": "ValueHeadModel"}, "was taken from a ValueHeadModel"),
        ({"parameter_dtype": "int3"}, "unknown number format"),
        ({"model_factory": "os:getcwd"}, "not allowed here"),
    ],
)
def test_what_cannot_be_rebuilt_is_refused(saved, changes, reason):
    _, snapshot = saved(**changes)
    with pytest.raises(ModelRejected, match=reason):
        build_model(snapshot)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"num_hidden_layers": 4, "layer_types": None}, "lack"),
        ({"num_hidden_layers": 2, "layer_types": None}, "have no place for"),
        ({"vocab_size": 50}, "have another shape for"),
        # A size that no machine holds is refused before it is allocated.
        ({"intermediate_size": 2**40}, "have another shape for"),
        # So many modules would fill the memory even without parameters.
        ({"num_hidden_layers": 10**9, "layer_types": None}, "wants 1000000000 of 'num_hidden_layers'"),
        ({"num_hidden_layers": 10**400, "layer_types": None}, "num_hidden_layers"),
    ],
)
def test_weights_of_another_model_are_refused(trainer, saved, changes, reason):
    _, snapshot = saved(model_config_hf=config(trainer, **changes))
    with pytest.raises(ModelRejected, match=reason):
        build_model(snapshot)


def test_code_that_a_configuration_names_is_never_run(trainer, saved, tmp_path, monkeypatch):
    (tmp_path / "modeling_evil.py").write_text("raise SystemExit('executed')")
    monkeypatch.chdir(tmp_path)
    named = {"auto_map": {"AutoModelForCausalLM": "modeling_evil.Evil"}, "_name_or_path": str(tmp_path)}
    _, snapshot = saved(model_config_hf=config(trainer, **named))
    build_model(snapshot)
    assert "modeling_evil" not in sys.modules


class Counted(nn.Module):
    """A model that Hugging Face does not know."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(48, 8)
        self.head = nn.Linear(8, 48)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(input_ids))


@pytest.fixture
def factory_module(monkeypatch):
    """An installed module with a factory, one that lies, and none."""
    import types

    module = types.ModuleType("somebodys_models")
    module.build = Counted
    module.number = lambda: 3
    monkeypatch.setitem(sys.modules, "somebodys_models", module)
    return "somebodys_models"


def test_an_allowed_factory_builds_the_model(trainer, tmp_path, factory_module):
    from gradloc.manifest import Manifest
    from gradloc.snapshot import MicroBatch, collect_parts, write_manifest, write_part, write_weights
    from gradloc.store import Store

    model = Counted()
    store = Store(f"file://{tmp_path}/x/0/1")
    ones = torch.ones(1, 3)
    write_part(store, 0, (MicroBatch(torch.ones(1, 4).long(), ones.bool(), -ones, ones),), 1.0)
    manifest = Manifest(
        run_id="x",
        attempt=0,
        step=1,
        created_at=0.0,
        world_size=1,
        grad_norm=1.0,
        model_factory=f"{factory_module}:build",
        parts=collect_parts(store, 1),
        files=write_weights(store, model.state_dict()),
    )
    write_manifest(store, manifest)
    snapshot = open_snapshot(store.url)
    built = build_model(snapshot, allowed_factories=[f"{factory_module}:build"])
    assert torch.equal(built.head.weight, model.head.weight)


@pytest.mark.parametrize(("function", "reason"), [("number", "expected a torch.nn.Module"), ("missing", "install it")])
def test_a_factory_that_is_none_is_refused(saved, factory_module, function, reason):
    name = f"{factory_module}:{function}"
    _, snapshot = saved(model_factory=name)
    with pytest.raises(ModelRejected, match=reason):
        build_model(snapshot, allowed_factories=[name])
