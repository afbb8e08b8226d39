"""What the configuration of Ray Serve may say to the what-if app, as `args`."""

from pydantic import BaseModel, ConfigDict, Field


class AppSettings(BaseModel):
    """spare_gpus: of the resource that localizations queue for, too."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    replicas_max: int = Field(default=1, ge=1, le=100)
    idle_s: float = Field(default=300.0, gt=0, le=86_400)
    start_timeout_s: float = Field(default=900.0, gt=0, le=86_400)
    num_cpus: float = Field(default=1.0, ge=0)
    num_gpus: float = Field(default=0.0, ge=0)
    spare_gpus: float = Field(default=1.0, ge=0)
    device: str = "auto"
    threads: int = Field(default=2, ge=1, le=1024)
