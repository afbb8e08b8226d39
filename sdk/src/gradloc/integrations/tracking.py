"""Limits, spikes and findings where people already look: through the trainer's own loggers.

Scalars ride on the trainer's `log`; a finding goes as text to each of W&B, trackio, TensorBoard and MLflow that the
trainer reports to. Imports none of them: their callbacks hold what is needed.
"""

import math
from typing import Any

from gradloc.probe import Probe
from gradloc_proto.messages import Finding

_TEXT = "gradloc/finding"


class Tracking:
    """What one trainer's loggers are told."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._num_spikes = 0
        self._last: dict[str, float] = {}

    def saw(self, probe: Probe, decision: str) -> None:
        """One step was measured."""
        last = probe.last_step
        if last is None:
            return
        self._num_spikes += bool(last.rules_hit)
        known = {"grad_norm": last.norm, "limit": last.limits.norm, "healthy_norm": last.limits.healthy_norm}
        self._last = {f"gradloc/{name}": value for name, value in known.items() if value is not None}
        self._last["gradloc/skipped"] = float(decision == "skip")

    def scalars(self) -> dict[str, float]:
        """For the trainer's next log."""
        finite = {name: value for name, value in self._last.items() if math.isfinite(value)}
        return finite | {"gradloc/num_spikes": float(self._num_spikes)}

    def page(self) -> str | None:
        """Address of the run's page at W&B, MLflow or trackio, whichever knows one first."""
        wandb = self._held("WandbCallback", "_wandb")
        url = getattr(getattr(wandb, "run", None), "url", None)
        return str(url) if url else self._page_at_mlflow() or self._page_at_trackio()

    def _page_at_mlflow(self) -> str | None:
        mlflow = self._held("MLflowCallback", "_ml_flow")
        run = None if mlflow is None else mlflow.active_run()
        server = "" if run is None else str(mlflow.get_tracking_uri())
        if run is None or not server.startswith(("http://", "https://")):
            return None  # a folder has no page
        return f"{server.rstrip('/')}/#/experiments/{run.info.experiment_id}/runs/{run.info.run_id}"

    def _page_at_trackio(self) -> str | None:
        space = self._held("TrackioCallback", "_space_id")
        return f"https://huggingface.co/spaces/{space}" if space else None

    def found(self, finding: Finding) -> None:
        """A spike was explained. Every logger is tried; raises the first one's error after the last."""
        text = text_of(finding)
        errors = []
        for write in (self._tensorboard, self._wandb, self._trackio, self._mlflow):
            try:
                write(finding.step, text)
            except Exception as error:  # noqa: BLE001 - the others still want to know
                errors.append(error)
        if errors:
            raise errors[0]

    def _tensorboard(self, step: int, text: str) -> None:
        writer = self._held("TensorBoardCallback", "tb_writer")
        if writer is not None:
            writer.add_text(_TEXT, text, step)

    def _wandb(self, step: int, text: str) -> None:
        wandb = self._held("WandbCallback", "_wandb")
        if getattr(wandb, "run", None) is not None:
            wandb.log({_TEXT: wandb.Table(columns=["step", "finding"], data=[[step, text]])}, commit=False)

    def _trackio(self, step: int, text: str) -> None:
        trackio = self._held("TrackioCallback", "_trackio")
        if trackio is not None:
            trackio.log({_TEXT: text}, step=step)

    def _mlflow(self, step: int, text: str) -> None:
        mlflow = self._held("MLflowCallback", "_ml_flow")
        if mlflow is not None and mlflow.active_run() is not None:
            mlflow.log_text(text, f"gradloc/step-{step}.txt")

    def _held(self, callback: str, attribute: str) -> Any:
        for one in self._trainer.callback_handler.callbacks:
            if any(base.__name__ == callback for base in type(one).__mro__):
                return getattr(one, attribute, None)
        return None


def text_of(finding: Finding) -> str:
    """The finding in a few lines, without any token's text."""
    lines = [f"step {finding.step}: {finding.summary}"]
    lines += [f"cause: {cause.summary}" for cause in finding.causes[:3]]
    return "\n".join(lines)
