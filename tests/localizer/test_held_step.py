"""A trainer with LayerClip: the run takes a healthy step, and the finding still names what was held back."""

import pytest
import torch

import gradloc
from gradloc.clipping import LayerClip
from gradloc_localizer.driver import Options, explain
from gradloc_proto import codec, rules, streams
from gradloc_proto.memory_bus import MemoryBus
from gradloc_proto.messages import StepObserved

ROWS, PROMPT, RESPONSE, STRUCK = 4, 4, 8, 14
PLACE = (2, 3)  # row and column of the response


class Training:
    """GRPO-like steps of a small Qwen3; one token of one step weighs `weight` times what it should."""

    def __init__(self, trainer, store, clip):
        self.model, self.bus = trainer.model(tied=False), MemoryBus()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.probe = gradloc.watch(
            self.model, self.optimizer, run="held", bus=self.bus, store=store, remedies=clip, reference_after=None
        )

    def step(self, number, weight=1.0):
        """One step's decision, and the whole gradient that the optimizer got."""
        generator = torch.Generator().manual_seed(number)
        ids_BT = torch.randint(0, 48, (ROWS, PROMPT + RESPONSE), generator=generator)
        advantage_B = torch.tensor([1.0, -1.0, 0.5, -0.5])
        logits = self.model(ids_BT).logits[:, PROMPT - 1 : -1]
        logp_BR = torch.log_softmax(logits, -1).gather(-1, ids_BT[:, PROMPT:, None])[..., 0]
        self.probe.tokens(logp_BR, ids_BT, torch.ones_like(logp_BR), advantage=advantage_B)
        weight_BR = torch.ones(ROWS, RESPONSE)
        weight_BR[PLACE] = weight
        (-weight_BR * advantage_B[:, None] * torch.exp(logp_BR - logp_BR.detach())).mean().backward()
        decision = self.probe.observe()
        gradient = {name: p.grad.clone() for name, p in self.model.named_parameters()}
        self.optimizer.step()
        self.optimizer.zero_grad()
        return decision, gradient

    def told(self):
        self.probe.close()
        messages = [
            codec.decode(entry.data) for entry in self.bus.read_last(streams.stream("held", "steps"), count=999)
        ]
        return [message for message in messages if isinstance(message, StepObserved)]


def trained(trainer, store, clip, weight):
    training = Training(trainer, store, clip)
    for number in range(STRUCK):
        training.step(number)
    return training, *training.step(STRUCK, weight)


def test_the_step_is_healthy_and_its_finding_names_what_would_have_exploded(trainer, tmp_path):
    clip = LayerClip()
    training, decision, gradient = trained(trainer, tmp_path.as_uri(), [clip], weight=3_000.0)
    assert decision == "snapshot"
    assert clip.last[0].num_positions > 0
    _, _, without = trained(trainer, None, [LayerClip()], weight=0.0)
    for name in (name for name in gradient if ".layers." in name):
        # Earlier positions that the struck one attends to got a little of it from the blocks above.
        cosine = torch.nn.functional.cosine_similarity(gradient[name].flatten(), without[name].flatten(), dim=0)
        assert cosine > 0.99, name
    observed = training.told()[-1]
    usual = max(step.grad_norm for step in training.told()[:-1])
    assert observed.rules_hit[-1] == rules.HELD
    _, finding = explain(observed.snapshot, Options(device="cpu", num_threads=1))
    (culprit,) = finding.culprits
    assert (culprit.sequence, culprit.token) == (PLACE[0], PROMPT + PLACE[1])
    assert finding.verdict in ("token", "sequence")
    assert finding.fidelity.reproduced and finding.fidelity.held_at == "layers.2"
    assert finding.fidelity.reported_norm == pytest.approx(observed.grad_norm)
    assert finding.fidelity.replayed_norm > 100 * usual
    assert finding.certificate.holds and finding.certificate.norm_without < 2 * usual


def test_without_layer_clip_the_same_step_is_an_ordinary_spike(trainer, tmp_path):
    training, decision, _ = trained(trainer, tmp_path.as_uri(), [], weight=3_000.0)
    assert decision == "snapshot"
    observed = training.told()[-1]
    assert rules.HELD not in observed.rules_hit
    _, finding = explain(observed.snapshot, Options(device="cpu", num_threads=1))
    assert finding.fidelity.held_at is None
    assert finding.culprits[0].token == PROMPT + PLACE[1]
