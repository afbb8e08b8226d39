"""The reporter: database, REST, web page, Prometheus and Slack. Embed it with `Reporter`."""

from gradloc_reporter.reporter import Reporter
from gradloc_reporter.settings import Settings, SlackSettings

__all__ = ["Reporter", "Settings", "SlackSettings"]
