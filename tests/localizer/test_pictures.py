"""Models that read pictures: captured by the probe, replayed row by row, a bad token found where it is.

Real models of transformers of three families, shrunk, with random weights: Qwen's (patches of all pictures in one
tensor), Gemma's (a picture an entry) and Idefics' ([B, pictures, ...], zeros where a sequence has fewer).
Shapes: B rows, T positions, R positions with a logp.
"""

import copy
import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from transformers import AutoConfig, AutoModelForImageTextToText

import gradloc
from gradloc.localization import localize
from gradloc.policy import active_part
from gradloc.replay import coefficients_of, replay
from gradloc.snapshot import open_snapshot
from gradloc_localizer import command
from gradloc_localizer.driver import Options, facts_of, rebuilt
from gradloc_proto.messages import Finding

VOCABULARY, PICTURE, START, END = 48, 44, 45, 46
NUM_ROWS, NUM_PROMPT, NUM_RESPONSE = 3, 22, 8
PER_PICTURE = 4  # placeholders
NUM_PICTURES = ((0, 2, 1), (1, 0, 2))  # of each row, by micro-batch
QUIETLY = ("--threads", "1", "--device", "cpu")
STALE = (1, 2, 3)  # micro-batch, row, column
TEXT = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64,
    "initializer_range": 0.08, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1,
}  # fmt: skip
TOWER = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_channels": 3,
    "image_size": 8, "patch_size": 2, "initializer_range": 0.08,
}  # fmt: skip
ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
QWEN_TOWER = {
    "depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 4, "patch_size": 2, "temporal_patch_size": 1,
    "in_channels": 3, "spatial_merge_size": 2, "out_hidden_size": 32, "window_size": 8, "fullatt_block_indexes": [1],
    "initializer_range": 0.08,
}  # fmt: skip
CONFIGS = {
    "qwen2_5_vl": {
        "text_config": TEXT | {"rope_parameters": ROPE},
        "vision_config": QWEN_TOWER, "image_token_id": PICTURE, "video_token_id": 47, "vision_start_token_id": START,
        "vision_end_token_id": END,
    },
    "gemma3": {
        "text_config": TEXT | {"layer_types": ["full_attention"] * 2, "query_pre_attn_scalar": 8},
        "vision_config": {"model_type": "siglip_vision_model", "vision_use_head": False, **TOWER},
        "mm_tokens_per_image": PER_PICTURE, "image_token_index": PICTURE, "boi_token_index": START,
        "eoi_token_index": END,
    },
    "idefics3": {
        "text_config": {"model_type": "llama", **TEXT}, "vision_config": TOWER, "image_token_id": PICTURE,
        "scale_factor": 2,
    },
}  # fmt: skip


def built(family, dtype=torch.float32):
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, tie_word_embeddings=False, **copy.deepcopy(CONFIGS[family]))
    return AutoModelForImageTextToText.from_config(config, attn_implementation="sdpa", dtype=dtype).train()


def pictures_of(family, ids_BT, num_B, generator):
    """The model's inputs beside ids and mask."""
    num = sum(num_B)
    if family == "qwen2_5_vl":
        return {
            "pixel_values": torch.randn(num * 16, 12, generator=generator),
            "image_grid_thw": torch.tensor([[1, 4, 4]] * num),
            "mm_token_type_ids": (ids_BT == PICTURE).int(),
        }
    if family == "gemma3":
        pixels = torch.randn(num, 3, 8, 8, generator=generator)
        return {"pixel_values": pixels, "token_type_ids": (ids_BT == PICTURE).long()}
    pixels = torch.randn(len(num_B), max(num_B), 3, 8, 8, generator=generator)
    for row, own in enumerate(num_B):
        pixels[row, own:] = 0
    mask = torch.ones(len(num_B), max(num_B), 8, 8, dtype=torch.long)
    return {"pixel_values": pixels, "pixel_attention_mask": mask}


def micro_batch(family, index, seed):
    """Left-padded rows with 0, 1 and 2 pictures in their prompts."""
    generator = torch.Generator().manual_seed(100 * seed + index)
    ids_BT = torch.randint(2, PICTURE, (NUM_ROWS, NUM_PROMPT + NUM_RESPONSE), generator=generator)
    mask_BT = torch.ones_like(ids_BT)
    for row, num in enumerate(NUM_PICTURES[index]):
        at = 3
        for _ in range(num):
            ids_BT[row, at : at + PER_PICTURE + 2] = torch.tensor([START, *[PICTURE] * PER_PICTURE, END])
            at += PER_PICTURE + 3
        mask_BT[row, : 1 + row] = 0
        ids_BT[row, : 1 + row] = 0
    return ids_BT, mask_BT, pictures_of(family, ids_BT, NUM_PICTURES[index], generator)


def logps(model, ids_BT, mask_BT, inputs):
    logits = model(input_ids=ids_BT, attention_mask=mask_BT, **inputs).logits[:, -NUM_RESPONSE - 1 : -1]
    return torch.log_softmax(logits, -1).gather(-1, ids_BT[:, -NUM_RESPONSE:, None])[..., 0]


class Run:
    """A user's loop of eight calm steps and one with a stale token in a row with two pictures."""

    def __init__(self, family, store, watching=None, **tokens_arguments):
        self.family, self.model = family, built(family)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.arguments = tokens_arguments
        watching = {"run": "pictures", "store": store, "reference_after": None} | (watching or {})
        self.probe = gradloc.watch(self.model, self.optimizer, **watching)
        for _ in range(8):
            self.step()
        self.before = copy.deepcopy(self.model)
        self.gradients, self.norm = self.step(stale=9.0)
        self.probe.close()

    def step(self, stale=0.0):
        for index in range(len(NUM_PICTURES)):
            ids_BT, mask_BT, inputs = micro_batch(self.family, index, seed=self.probe.step)
            logp_BR = logps(self.model, ids_BT, mask_BT, inputs)
            rollout_BR = logp_BR.detach() - 0.01
            if stale and index == STALE[0]:
                rollout_BR[STALE[1:]] -= stale
            advantage_B = torch.tensor([1.0, -0.5, 0.8])
            self.probe.tokens(
                logp_BR,
                ids_BT,
                torch.ones_like(logp_BR),
                rollout_logp=rollout_BR,
                advantage=advantage_B,
                attention_mask=mask_BT,
                uid=[f"secret-{index}-{row}" for row in range(NUM_ROWS)],
                **({"model_inputs": inputs} | self.arguments),
            )
            (-(torch.exp(logp_BR - rollout_BR) * advantage_B[:, None]).sum() / 48).backward()
        self.probe.observe()
        gradients = {name: p.grad.clone() for name, p in self.model.named_parameters() if p.grad is not None}
        self.optimizer.step()
        self.optimizer.zero_grad()
        return gradients, torch.cat([one.flatten().double() for one in gradients.values()]).norm().item()


@pytest.fixture(scope="module", params=sorted(CONFIGS))
def run(request, tmp_path_factory):
    return Run(request.param, str(tmp_path_factory.mktemp("store")))


@pytest.fixture
def url(run):
    return run.probe._writer.url(8)


@pytest.fixture
def rebuilt_step(url):
    return rebuilt(open_snapshot(url), Options(device="cpu", num_threads=1))


def oracle(model, batches):
    """Each token's exact share, by a float64 backward pass of whole micro-batches, which nothing cut."""
    model = copy.deepcopy(model).double()
    parameters = list(model.parameters())
    rows = {}
    for number, placed in enumerate(batches):
        ids_BT, mask_BT, inputs = micro_batch(model.config.model_type, number, seed=8)
        inputs = {name: x.double() if x.is_floating_point() else x for name, x in inputs.items()}
        logp_BR = logps(model, ids_BT, mask_BT, inputs)
        for row, column in (placed.batch.coefficient_BR != 0).nonzero().tolist():
            own = torch.autograd.grad(logp_BR[row, column], parameters, retain_graph=True, allow_unused=True)
            flat = torch.cat(
                [torch.zeros(p.numel()) if g is None else g.flatten() for p, g in zip(parameters, own, strict=True)]
            )
            rows[number, row, column] = flat * float(placed.batch.coefficient_BR[row, column])
    whole = sum(rows.values())
    return {place: float(torch.dot(one, whole) / whole.square().sum()) for place, one in rows.items()}


def test_the_replayed_gradient_is_the_trainers(run, rebuilt_step):
    policy, batches = rebuilt_step
    for by_row in (False, True):
        gradient = replay(policy, batches, coefficients_of(batches), by_row=by_row).gradient
        own = torch.cat([gradient.tensors[name].flatten().double() for name in run.gradients])
        true = torch.cat([one.flatten().double() for one in run.gradients.values()])
        assert float(own @ true / own.norm() / true.norm()) >= 1 - 1e-9
        assert gradient.norm == pytest.approx(run.norm, rel=1e-5)
    assert any(name.startswith("vision.") for name in gradient.layer_norms)


def test_the_token_is_found_and_its_share_is_the_oracles(run, rebuilt_step, url):
    policy, batches = rebuilt_step
    finding = localize(policy, batches, facts_of(open_snapshot(url).manifest))
    culprit = finding.culprits[0]
    assert (finding.verdict, finding.certificate.holds, finding.fidelity.reproduced) == ("token", True, True)
    place = (STALE[0], STALE[1], NUM_PROMPT + STALE[2])
    assert (culprit.micro_batch, culprit.sequence, culprit.token) == place
    expected = oracle(run.before, batches)
    assert max(expected, key=expected.get) == STALE
    assert culprit.share == pytest.approx(expected[STALE], abs=1e-4)
    # Where its gradient arises: all of the share is in the profile, what reads pictures at their positions.
    total = sum(sum(row) for row in finding.profile.values)
    assert total == pytest.approx(culprit.share, abs=0.02)


def test_bisection_cuts_pictures_alike(rebuilt_step, url):
    policy, batches = rebuilt_step
    finding = localize(policy, batches, facts_of(open_snapshot(url).manifest), strategy="bisect")
    assert [(one.micro_batch, one.sequence, one.token) for one in finding.culprits] == [
        (STALE[0], STALE[1], NUM_PROMPT + STALE[2])
    ]


def test_any_rows_alone_are_what_they_are_among_all(rebuilt_step):
    policy, batches = rebuilt_step
    for placed in batches:
        with torch.no_grad():
            whole_BR = policy.log_probs(placed.batch)
            for rows in ([0], [1], [2], [0, 2], [1, 2]):
                for num_columns in (2, NUM_RESPONSE):
                    own_BR = torch.zeros(NUM_ROWS, NUM_RESPONSE)
                    own_BR[rows, :num_columns] = 1.0
                    part = active_part(placed.batch, own_BR)
                    alone = policy.log_probs_of(part)
                    torch.testing.assert_close(alone, whole_BR[rows, : part.num_columns], atol=2e-5, rtol=1e-5)


def test_the_manifest_says_whose_pictures_are_whose(run, url):
    manifest = open_snapshot(url).manifest
    records = [record.inputs for record in manifest.parts[0].micro_batches]
    assert [record.placeholders["image"] for record in records] == [PICTURE, PICTURE]
    for record, num_B in zip(records, NUM_PICTURES, strict=True):
        told = record.inputs["pixel_values"]
        if run.family == "idefics3":
            assert (told.layout, told.counts) == ("sequences", ())
        else:
            per = 16 if run.family == "qwen2_5_vl" else 1
            assert (told.layout, told.counts) == ("entries", tuple(num * per for num in num_B))
    if run.family == "qwen2_5_vl":
        assert records[1].inputs["image_grid_thw"].counts == NUM_PICTURES[1]
        assert records[1].inputs["mm_token_type_ids"].layout == "positions"


def test_redacted_there_is_nothing_of_samples_or_pictures(run, url, tmp_path):
    page = tmp_path / "page.html"
    words = [url, "--json", "--redact", "--html", str(page), *QUIETLY]
    result = CliRunner().invoke(command.localize, words)
    assert result.exit_code == 0, result.output
    assert Finding.model_validate_json(result.stdout).verdict == "token"
    for text in (result.stdout, page.read_text()):
        assert "secret-" not in text and "pixel_values" not in text


@pytest.mark.parametrize("family", ["qwen2_5_vl"])
class TestWhatCannotBeReplayedIsSaidInOneLine:
    def refused(self, run):
        result = CliRunner().invoke(command.localize, [run.probe._writer.url(8), "--json", *QUIETLY])
        assert result.exit_code == 2
        (line,) = result.stderr.splitlines()
        return line

    def test_pictures_beyond_the_bound(self, family, tmp_path, monkeypatch):
        monkeypatch.setenv("GRADLOC_STRICT", "0")
        run = Run(family, str(tmp_path), watching={"model_inputs_bytes_max": 5_000})
        assert "raise watch(model_inputs_bytes_max=)" in self.refused(run)

    def test_pictures_that_the_probe_was_not_given(self, family, tmp_path, monkeypatch, caplog):
        monkeypatch.setenv("GRADLOC_STRICT", "0")
        line = self.refused(Run(family, str(tmp_path), model_inputs=None))
        assert "called with pixel_values, which probe.tokens() was not given" in line
        assert sum("pixel_values" in one.message for one in caplog.records) == 1  # said when training began


def test_a_hostile_manifest_is_refused(run, url):
    """Grids and counts that do not fit would make a model take any amount of memory."""
    manifest = Path(url.removeprefix("file://")) / "manifest.json"
    kept = manifest.read_text()
    document = json.loads(kept)
    told = document["parts"][0]["micro_batches"][0]["inputs"]["inputs"]
    harms = [
        ("counts", [1]),
        ("counts", [-1, 1 << 40, 1]),
        ("shape", [1 << 40, 3]),
        ("layout", "axis-positions"),
        ("layout", "nothing"),
    ]
    try:
        for name, value in harms:
            harmed = copy.deepcopy(document)
            changed = harmed["parts"][0]["micro_batches"][0]["inputs"]["inputs"]["pixel_values"]
            changed.update({"layout": "entries"} if name == "counts" else {}, **{name: value})
            manifest.write_text(json.dumps(harmed))
            result = CliRunner().invoke(command.localize, [url, "--json", *QUIETLY])
            assert result.exit_code == 2 and len(result.stderr.splitlines()) == 1, (name, value, result.output)
        del told["pixel_values"]
        told["labels"] = {"layout": "sequences", "shape": [3], "dtype": "int64"}
        manifest.write_text(json.dumps(document))
        result = CliRunner().invoke(command.localize, [url, "--json", *QUIETLY])
        assert result.exit_code == 2 and "labels" in result.stderr
    finally:
        manifest.write_text(kept)
